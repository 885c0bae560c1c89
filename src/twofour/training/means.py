"""Mean and variance over the valid positions of a tensor, in static shapes.

`values[mask].mean(0)` has a shape that depends on how many positions are valid: `torch.compile`
breaks the graph or compiles again. These functions do the same with the mask as plain data.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, TypeAlias

from twofour.errors import BadInputError

if TYPE_CHECKING:
    from torch import Tensor

Dim: TypeAlias = "int | tuple[int, ...] | None"


def masked_mean(values: Tensor, mask: Tensor, dim: Dim = None, *, keepdim: bool = False) -> Tensor:
    """The mean of floating-point `values` over the valid positions of `dim` (None: all axes).

    `mask` is bool or integer and non-zero where valid; its axes are the first ones of `values`, as
    in `values[mask]`, and an axis of size 1 counts for all positions. The gradient of other
    positions is exactly zero even where they contain NaN or infinity. Without a valid position the
    mean is 0. Half types are summed in float32. Raises BadInputError for a mask that does not fit.
    """
    wide, invalid, axes, count = _checked(values, mask, dim)
    # the zeros that replace invalid values have no gradient, and NaN * 0 never comes up
    mean = wide.masked_fill(invalid, 0).sum(axes, keepdim=True) / count.clamp(min=1)
    if not keepdim:
        mean = mean.squeeze(axes)
    return mean.to(values.dtype)


def masked_var(
    values: Tensor, mask: Tensor, dim: Dim = None, *, unbiased: bool = True, keepdim: bool = False
) -> Tensor:
    """The variance of what `masked_mean` takes the mean of; `unbiased` as in torch.

    With no more than one valid position it is 0.
    """
    wide, invalid, axes, count = _checked(values, mask, dim)
    apart = (wide - masked_mean(wide, mask, axes, keepdim=True)).masked_fill(invalid, 0)
    variance = apart.square().sum(axes, keepdim=True) / (count - int(unbiased)).clamp(min=1)
    if not keepdim:
        variance = variance.squeeze(axes)
    return variance.to(values.dtype)


def _checked(
    values: Tensor, mask: Tensor, dim: Dim
) -> tuple[Tensor, Tensor, tuple[int, ...], Tensor]:
    """The values in float32 or wider, what is not valid, the axes, how many positions are valid."""
    shape = mask.shape
    sizes = values.shape
    # a list, here and below: torch.compile takes no generator
    fits = [shape[at] in (1, sizes[at]) for at in range(min(len(shape), len(sizes)))]
    is_other_type = mask.is_floating_point() or not values.is_floating_point()
    if is_other_type or not all(fits) or len(shape) > len(sizes):
        what = f"a mask of shape {tuple(shape)} and type {mask.dtype} does not fit values of"
        # an additive mask is of floats, and has 0 where valid
        hint = "give floating-point values, and a bool or integer mask over their first axes"
        raise BadInputError(f"{what} shape {tuple(sizes)} and type {values.dtype}", hint=hint)
    # a mask (2, 7) of values (2, 7, 64) is (2, 7, 1)
    invalid = mask.reshape(*shape, *[1] * (len(sizes) - len(shape))) == 0
    if dim is None:
        dim = tuple(range(len(sizes)))
    axes = (dim,) if isinstance(dim, int) else dim
    times = prod([sizes[axis] for axis in axes if invalid.shape[axis] == 1])
    wide = values.float() if values.element_size() < 4 else values
    return wide, invalid, axes, (~invalid).sum(axes, keepdim=True) * times

"""Example inputs: bound to the forward's signature, converted, doubled, and turned into arrays."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.records import Precision

_MESSAGE_LENGTH = 500
"""Of an error of the user's forward, which may carry a whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module's forward, in the order of its signature.

    torch.export keeps keyword arguments in the caller's order; binding them first makes the order
    of the ONNX inputs a property of the module.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_parameter: dict[str, Any]
    """The same values by the names of the signature, `*args` and `**kwargs` under their own."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the call: one ONNX input each, in this order."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Raises BadInputError when the forward does not take these arguments."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise forward_error(module, error) from error
    positional, named = bound.args, bound.kwargs
    if not named and positional and isinstance(positional[-1], dict):
        # torch.onnx.export takes a dict in the last place for keyword arguments
        name = list(bound.arguments)[-1]
        positional, named = positional[:-1], {name: positional[-1]}
    return Call(args=positional, kwargs=named, by_parameter=dict(bound.arguments))


def forward_error(
    module: nn.Module, error: BaseException, precision: Precision = Precision.FLOAT32
) -> BadInputError:
    """The error to raise for a forward that fails on the example inputs in that precision."""
    text = textwrap.shorten(str(error), _MESSAGE_LENGTH) or "no message"
    name, kind = type(module).__name__, type(error).__name__
    if precision is Precision.FLOAT32:
        return BadInputError(
            f"{name}.forward fails on the example inputs: {kind}: {text}",
            hint="give example inputs (number, shapes and types) that the forward accepts",
        )
    return BadInputError(
        f"{name}.forward fails on the example inputs in {precision.value}: {kind}: {text}",
        hint="try --precision float32; if that works, the forward makes float32 tensors of its own "
        "and should give them the type of its inputs",
    )


def converted(call: Call, dtype: torch.dtype) -> Call:
    """The call with every floating-point tensor in `dtype`."""
    return _mapped(call, lambda t: t.to(dtype) if t.is_floating_point() else t)


def batch_size(call: Call) -> int | None:
    """Length of axis 0 of the first tensor that has axes; None where there is no such tensor."""
    return next((int(t.shape[0]) for t in call.tensors if t.dim() > 0), None)


def with_two_rows(call: Call) -> Call:
    """The call with a batch of one repeated: torch.export takes a size of 1 for a constant."""
    if batch_size(call) != 1:
        return call
    return _mapped(call, lambda t: torch.cat([t, t]) if _has_batch(t, 1) else t)


def dynamic_batch(call: Call) -> dict[str, Any]:
    """`dynamic_shapes` for torch.export: axis 0 is `batch` where it is as long as the batch."""
    size = batch_size(call)
    batch = torch.export.Dim("batch")

    def spec(leaf: object) -> dict[int, Any] | None:
        return {0: batch} if isinstance(leaf, torch.Tensor) and _has_batch(leaf, size) else None

    specs: dict[str, Any] = pytree.tree_map(spec, call.by_parameter)
    return specs


def input_arrays(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[NDArray[Any], ...]:
    """The example inputs as the exported file takes them: one array for each ONNX input, in order.

    Floating-point inputs are float32 in every precision. Raises BadInputError when the forward
    does not take these arguments.
    """
    call = converted(bind(module, args, kwargs), torch.float32)
    return tuple(as_array(tensor) for tensor in call.tensors)


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor in numpy; floating point of any width as float32."""
    plain = tensor.detach().cpu()
    array: NDArray[Any] = (plain.float() if plain.is_floating_point() else plain).numpy()
    return np.ascontiguousarray(array).reshape(array.shape)


def _has_batch(tensor: torch.Tensor, size: int | None) -> bool:
    return tensor.dim() > 0 and int(tensor.shape[0]) == size


def _mapped(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    args, kwargs, by_parameter = pytree.tree_map_only(
        torch.Tensor, change, (call.args, call.kwargs, call.by_parameter)
    )
    return Call(args=args, kwargs=kwargs, by_parameter=by_parameter)

"""Which stored weights a forward multiplies by, and by what: seen at torch's own dispatcher.

Every product ends there, whoever asks for it: a layer's forward, a functional call, the inside of
MultiheadAttention, TorchScript. Padding modes, "same" padding and output sizes are resolved by
then. Hooks on modules would miss most of that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twofour.pruning.matrices import Layout, Window
from twofour.pruning.torch_spill import Tree

Operator = Any
"""A torch.ops overload; torch has no public type for it."""
_ATEN = torch.ops.aten
_COPIES = (
    _ATEN._to_copy.default,
    _ATEN.clone.default,
    _ATEN.mul.Tensor,
    _ATEN.div.Tensor,
    _ATEN.sub.Tensor,
    _ATEN.add.Tensor,
)
"""What makes another tensor of a weight that stands for it: a cast, a scaled weight."""
_MOST_STACKED = 64
"""Matrices of one batched product that are looked at one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A stored weight whose inputs are wanted."""

    name: str
    tensor: Tensor
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of a forward with some rows of a target."""

    target: Target
    first: int
    """The first row of the weight's matrix that takes part."""
    last: int
    """Behind the last one."""
    x: Tensor
    """(n, inputs), or for a convolution (samples, channels, spatial ...)."""
    layout: Layout
    """By which the rows of `x` are read: the target's, or of a convolution that uses a matrix."""
    window: Window | None
    """None: a matrix product."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Memory in which a target's values lie: its own, or that of a copy."""

    target: Target
    tensor: Tensor
    start: int
    end: int


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, tells `meet` of each product with a target, before it is worked out."""

    def __init__(self, targets: Sequence[Target], meet: Callable[[Product], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._meet = meet
        self._places: list[_Place] = []
        for target in targets:
            self._add(target, target.tensor)

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tree:
        read = _READERS.get(func)
        if read is not None:
            for product in read(self, args):
                self._meet(product)
        elif func not in _COPIES and _is_composite(func):  # whole only in inference mode
            with self:
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        result = func(*args, **(kwargs or {}))
        if func in _COPIES:
            self._follow(args, result)
        return result

    def _add(self, target: Target, tensor: Tensor) -> None:
        start = tensor.data_ptr()
        span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (span + 1) * tensor.element_size()
        self._places.append(_Place(target, tensor, start, end))
        self._places.sort(key=lambda place: place.start)

    def _follow(self, args: Sequence[Any], result: Tree) -> None:
        for arg in args:
            place = self.place(arg)
            if place is not None and isinstance(result, Tensor) and result.shape == arg.shape:
                whole = arg.data_ptr() == place.start and arg.shape == place.tensor.shape
                if whole and self.place(result) is None:
                    self._add(place.target, result)
                return

    def place(self, value: object) -> _Place | None:
        """Where a tensor's memory belongs to a target; None: nowhere."""
        if not isinstance(value, Tensor) or value.numel() == 0 or value.is_meta:
            return None
        address = value.data_ptr()
        index = bisect_right(self._places, address, key=lambda place: place.start) - 1
        if index < 0 or address >= self._places[index].end:
            return None
        place = self._places[index]
        return place if place.tensor.device == value.device else None


@cache
def _is_composite(func: Operator) -> bool:
    """Whether an operator is nothing but a row of others."""
    has: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), "CompositeImplicitAutograd")


def _of_matrix(place: _Place, view: Tensor, contracted: int, x: Tensor) -> Iterator[Product]:
    """A product that sums over axis `contracted` of a 2-D view of a target; x is (n, inputs)."""
    found = _rows_of_view(place, view, contracted)
    if found is not None and x.shape[-1] == place.target.layout.channels:
        first, last = found
        layout = place.target.layout
        yield Product(target=place.target, first=first, last=last, x=x, layout=layout, window=None)


def _rows_of_view(place: _Place, view: Tensor, contracted: int) -> tuple[int, int] | None:
    """Which rows of the target's matrix a 2-D view has; None where it is no such view."""
    layout, stored = place.target.layout, place.tensor
    if view.dim() != 2 or layout.taps > 1 or layout.groups > 1 or len(layout.shape) < 2:
        return None
    inputs = layout.axis % len(layout.shape)
    if inputs > 1 or (not layout.convolution and len(layout.shape) != 2):
        return None
    rows = 1 - inputs
    offset, odd = divmod(view.data_ptr() - place.start, stored.element_size())
    step = stored.stride(rows)
    first, aside = divmod(offset, step)
    count = view.shape[1 - contracted]
    fits = (
        not odd
        and not aside
        and view.shape[contracted] == stored.shape[inputs]
        and _same_step(view, contracted, stored, inputs)
        and _same_step(view, 1 - contracted, stored, rows)
        and first + count <= stored.shape[rows]
    )
    return (first, first + count) if fits else None


def _same_step(view: Tensor, axis: int, stored: Tensor, stored_axis: int) -> bool:
    return view.shape[axis] == 1 or view.stride(axis) == stored.stride(stored_axis)


def _mm(seen: Products, args: Sequence[Any]) -> Iterator[Product]:
    yield from _two(seen, args[0], args[1])


def _addmm(seen: Products, args: Sequence[Any]) -> Iterator[Product]:
    yield from _two(seen, args[1], args[2])


def _two(seen: Products, left: Tensor, right: Tensor) -> Iterator[Product]:
    place = seen.place(right)
    if place is not None:
        yield from _of_matrix(place, right, 0, left)
        return
    place = seen.place(left)
    if place is not None:
        yield from _of_matrix(place, left, 1, right.t() if right.dim() == 2 else right[None])


def _bmm(seen: Products, args: Sequence[Any]) -> Iterator[Product]:
    yield from _stacks(seen, args[0], args[1])


def _baddbmm(seen: Products, args: Sequence[Any]) -> Iterator[Product]:
    yield from _stacks(seen, args[1], args[2])


def _stacks(seen: Products, left: Tensor, right: Tensor) -> Iterator[Product]:
    """A stack of matrices times a stack: a weight repeated along it is one product."""
    if seen.place(right) is None and seen.place(left) is None:
        return
    if right.stride(0) == 0 and seen.place(right) is not None:
        yield from _two(seen, left.reshape(-1, left.shape[-1]), right[0])
    elif left.shape[0] <= _MOST_STACKED:
        for one, other in zip(left, right, strict=True):
            yield from _two(seen, one, other)


def _convolution(seen: Products, args: Sequence[Any]) -> Iterator[Product]:
    x, weight, _bias, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    place = seen.place(weight)
    if place is None:
        return
    layout = place.target.layout
    axes = weight.dim() - 2
    window = Window(
        kernel=tuple(weight.shape[2:]),
        stride=_each(stride, axes),
        dilation=_each(dilation, axes),
        padding=tuple((p, p) for p in _each(padding, axes)),
        transposed=transposed,
        output_padding=_each(output_padding, axes) if transposed else (),
    )
    if not layout.convolution and not transposed and math.prod(window.kernel) == 1 == groups:
        flat = weight.reshape(weight.shape[:2])
        found = _rows_of_view(place, flat, 1)
        read = Layout(shape=tuple(weight.shape), axis=1, m=layout.m, convolution=True)
    else:
        whole = weight.shape == place.tensor.shape and weight.stride() == place.tensor.stride()
        fits = layout.convolution and whole and groups == layout.groups
        axis = 0 if transposed else 1
        found = (0, _matrix_rows(layout)) if fits and axis == layout.axis else None
        read = layout
    if found is not None:
        first, last = found
        yield Product(target=place.target, first=first, last=last, x=x, layout=read, window=window)


def _each(values: Sequence[int], axes: int) -> tuple[int, ...]:
    """One number stands for all axes."""
    return tuple(values) * axes if len(values) == 1 else tuple(values)


def _matrix_rows(layout: Layout) -> int:
    return layout.stack_shape[1]


_READERS: dict[Any, Callable[[Products, Sequence[Any]], Iterator[Product]]] = {
    _ATEN.mm.default: _mm,
    _ATEN.addmm.default: _addmm,
    _ATEN.mv.default: _mm,
    _ATEN.addmv.default: _addmm,
    _ATEN.bmm.default: _bmm,
    _ATEN.baddbmm.default: _baddbmm,
    _ATEN.convolution.default: _convolution,
}

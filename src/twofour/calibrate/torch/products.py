"""Which stored weights a forward multiplies by, and by what: seen at torch's own dispatcher.

Every product ends there, whoever asks for it: a layer's forward, a functional call, the inside of
MultiheadAttention, TorchScript. Padding modes, "same" padding and output sizes are resolved by
then. Hooks on modules would miss most of that. `UseOrder` records in which order a forward uses
weights.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twofour.pruning.matrices import Layout, Window
from twofour.pruning.torch.calls import Tree

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
    _ATEN.fake_quantize_per_channel_affine_cachemask.default,
    _ATEN._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
)
"""Operators whose result is still the weight: a cast, a scaled or a rounded weight."""
_MOST_STACKED = 64
"""Matrices of one batched product that are looked at one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedWeight:
    """A stored weight whose inputs are to be gathered."""

    name: str
    tensor: Tensor
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of a forward with some rows of a watched weight."""

    weight: WatchedWeight
    first: int
    """The first row of the weight's matrix that takes part."""
    last: int
    """The row behind the last one."""
    x: Tensor
    """(n, inputs), or for a convolution (samples, channels, spatial ...)."""
    layout: Layout
    """How rows are made of `x`: the weight's layout, or that of a convolution with a matrix."""
    window: Window | None
    """None: a matrix product."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Memory that contains a watched weight's values: its own, or that of a copy."""

    weight: WatchedWeight
    tensor: Tensor
    start: int
    end: int


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, calls `meet` with each product with a watched weight, before it is computed.

    Where that returns False nothing depends on the product's values, and they may be 0.

    Where the first use of its output is a sum with a tensor of its shape (the other branch of a
    residual block), it calls `added` with that tensor, before the sum is computed.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own: False spares the 2 s that the compiler takes to load."""
        return False

    def __init__(
        self,
        weights: Sequence[WatchedWeight],
        meet: Callable[[Product], bool | None],
        added: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._meet, self._added = meet, added
        self._output: Tensor | None = None
        """That of the last product, until it is used."""
        self._places: list[_Place] = []
        for weight in weights:
            self._add(weight, weight.tensor)

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tree:
        read = _READERS.get(func)
        products = [*read(self, args)] if read is not None else []
        needed = [self._meet(product) for product in products]
        is_whole = bool(products) and _is_whole(products, args)
        # composite operators come whole only in inference mode
        if read is None and func not in _COPIES and _is_composite(func):
            with self:
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        uses = [at for at, arg in enumerate(args) if self._is_output(arg)]
        if len(uses) == 1 and func in (_ATEN.add.Tensor, _ATEN.add_.Tensor) and not kwargs:
            self._look_at_sum(args[uses[0]], args[1 - uses[0]])
        if needed == [False] and is_whole:
            result = products[0].x.new_zeros(len(products[0].x), products[0].last)
        else:
            result = func(*args, **(kwargs or {}))
        if func in _COPIES:
            self._follow(args, result[0] if isinstance(result, tuple) else result)
        if products:
            self._output = result if is_whole else None
        elif uses and (func._schema.is_mutable or not self._is_output(result)):
            self._output = None
        return result

    def _is_output(self, value: object) -> bool:
        """Whether it is the last product's output, or a view of all of it."""
        return (
            self._output is not None
            and isinstance(value, Tensor)
            and value.numel() == self._output.numel()
            and value.data_ptr() == self._output.data_ptr()
        )

    def _look_at_sum(self, output: Tensor, other: object) -> None:
        """Give `added` what is added to a view of the output, in the output's own shape."""
        if self._output is not None and isinstance(other, Tensor) and other.shape == output.shape:
            turned = torch.empty_like(self._output, dtype=other.dtype)
            turned.as_strided(output.shape, output.stride()).copy_(other)
            self._output = None
            self._added(turned)

    def _add(self, weight: WatchedWeight, tensor: Tensor) -> None:
        start = tensor.data_ptr()
        span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (span + 1) * tensor.element_size()
        self._places.append(_Place(weight, tensor, start, end))
        self._places.sort(key=lambda place: place.start)

    def _follow(self, args: Sequence[Any], result: Tree) -> None:
        """Watch the copy of a weight too."""
        for arg in args:
            place = self.place(arg)
            if place is not None and isinstance(result, Tensor) and result.shape == arg.shape:
                whole = arg.data_ptr() == place.start and arg.shape == place.tensor.shape
                if whole and self.place(result) is None:
                    self._add(place.weight, result)
                return

    def place(self, value: object) -> _Place | None:
        """The watched weight that a tensor's memory belongs to; None: no such weight."""
        # Places are sorted by address and do not overlap. With places 100..200 and 300..400 the
        # address 150, a slice of the first weight, has one start (100) at or below it: index 0;
        # 250 has that one too, but lies behind its end.
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
    """Whether an operator is composed of others alone."""
    has: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), "CompositeImplicitAutograd")


def _is_whole(products: Sequence[Product], args: Sequence[Any]) -> bool:
    """Whether an operator's result is (n, outputs) of one matrix, n the rows of x."""
    (one, *others) = products
    is_whole = (one.first, one.last) == (0, one.weight.layout.stack_shape[1])
    return is_whole and not others and one.window is None and any(one.x is arg for arg in args)


def _of_matrix(place: _Place, view: Tensor, contracted: int, x: Tensor) -> Iterator[Product]:
    """A product that sums over axis `contracted` of a 2-D view of a weight; x is (n, inputs)."""
    found, layout = _rows_of_view(place, view, contracted), place.weight.layout
    if found is not None and x.shape[-1] == layout.channels:
        first, last = found
        yield Product(weight=place.weight, first=first, last=last, x=x, layout=layout, window=None)


def _rows_of_view(place: _Place, view: Tensor, contracted: int) -> tuple[int, int] | None:
    """The rows of the weight's matrix that a 2-D view has; None where it is no such view."""
    layout, stored = place.weight.layout, place.tensor
    if view.dim() != 2 or layout.taps > 1 or layout.groups > 1 or len(layout.shape) < 2:
        return None
    inputs = layout.axis % len(layout.shape)
    if inputs > 1 or (not layout.convolution and len(layout.shape) != 2):
        return None
    rows = 1 - inputs
    # A packed in_proj_weight of MultiheadAttention is (24, 8) float32, strides (8, 1). Its part for
    # the keys begins 256 bytes in: 64 elements, 64 / 8 = row 8, and 64 % 8 = 0 columns aside; its 8
    # rows are 8 to 16. Transposed for the product it is (8, 8), strides (1, 8): `contracted` is 0.
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


def _two(seen: Products, left: Tensor, right: Tensor) -> Iterator[Product]:
    """The product of two matrices, one of which is a weight; x is made (n, inputs)."""
    place = seen.place(right)
    if place is not None:
        yield from _of_matrix(place, right, 0, left)
        return
    place = seen.place(left)
    if place is not None:
        yield from _of_matrix(place, left, 1, right.t() if right.dim() == 2 else right[None])


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
    layout = place.weight.layout
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
        found = (0, layout.stack_shape[1]) if fits and axis == layout.axis else None
        read = layout
    if found is not None:
        first, last = found
        yield Product(weight=place.weight, first=first, last=last, x=x, layout=read, window=window)


def _each(values: Sequence[int], axes: int) -> tuple[int, ...]:
    """One number stands for all axes."""
    return tuple(values) * axes if len(values) == 1 else tuple(values)


_READERS: dict[Any, Callable[[Products, Sequence[Any]], Iterator[Product]]] = {
    _ATEN.mm.default: lambda seen, args: _two(seen, args[0], args[1]),
    _ATEN.addmm.default: lambda seen, args: _two(seen, args[1], args[2]),
    _ATEN.mv.default: lambda seen, args: _two(seen, args[0], args[1]),
    _ATEN.addmv.default: lambda seen, args: _two(seen, args[1], args[2]),
    _ATEN.bmm.default: lambda seen, args: _stacks(seen, args[0], args[1]),
    _ATEN.baddbmm.default: lambda seen, args: _stacks(seen, args[1], args[2]),
    _ATEN.convolution.default: _convolution,
}


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


class StopForward(BaseException):
    """Ends a forward whose rest is not needed. No Exception, because models may catch these."""


class UseOrder:
    """The order in which one forward of each call uses weights and ends parts of a block."""

    def __init__(self) -> None:
        self._counts: list[Counter[str]] = []
        self._parts: list[Counter[str]] = []
        self._clock = 0
        self._first: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._met: dict[str, int] = {}
        """Weight -> number of the first input it was used with; in the order of first use."""
        self._last: tuple[Tensor, int] | None = None
        self._inputs = 0

    def begin(self) -> None:
        """Start the next call's forward."""
        self._counts.append(Counter())
        self._parts.append(Counter())
        self._last = None

    def meet(self, product: Product) -> None:
        """Record the use of a weight."""
        name, x = product.weight.name, product.x
        self._clock += 1
        self._first.setdefault(name, self._clock)
        self._counts[-1][name] += 1
        last, self._last = self._last, (x, version_of(x))
        same = last is not None and (
            last[0].data_ptr() == x.data_ptr()
            and (last[0].shape, last[0].stride(), last[1]) == (x.shape, x.stride(), version_of(x))
        )
        self._inputs += not same
        self._met.setdefault(name, self._inputs)

    def ended(self, part: str) -> None:
        """Record that a part of the block has run."""
        self._clock += 1
        self._parts[-1][part] += 1
        self._ends.setdefault(part, self._clock)

    def finished_parts(self, names: Collection[str]) -> frozenset[str]:
        """Parts whose outputs are final once all weights used before `names` are pruned.

        Only parts that run once in every call; none where calls use different weights, because
        weights that the first call does not use are pruned out of order.
        """
        if any(counts.keys() != self._counts[0].keys() for counts in self._counts):
            return frozenset()
        at = min(self._first[name] for name in names)
        return frozenset(
            part
            for part, end in self._ends.items()
            if end < at and all(ran[part] == 1 for ran in self._parts)
        )

    def steps(self, most: int | None = None) -> list[list[str]]:
        """Weights grouped by the first input they were used with, in the order of their use.

        Neighbours are joined where there would be more than `most` steps.
        """
        # query, key and value of an attention are used with the same tensor and are one step:
        # _met {"q": 1, "k": 1, "v": 1, "out": 2, "up": 3} gives [[q, k, v], [out], [up]].
        found = [[*names] for _, names in groupby(self._met, self._met.__getitem__)]
        size = 1 if most is None else -(-len(found) // most)
        groups = (found[at : at + size] for at in range(0, len(found), max(1, size)))
        return [[name for names in group for name in names] for group in groups]

    def uses(self, names: Collection[str], number: int) -> int | None:
        """Number of products with these weights in a forward of this call.

        None: it differs between calls, and may depend on the data.
        """
        if any(len({counts[name] for counts in self._counts}) > 1 for name in names):
            return None
        return sum(self._counts[number][name] for name in names)

"""Which stored weights a forward multiplies by, and by what: seen at torch's own dispatcher.

Every product ends there, whoever asks for it: a layer's forward, a functional call, the inside of
MultiheadAttention, TorchScript. Padding modes, "same" padding and output sizes are resolved by
then. Hooks on modules would miss most of that. And in which order a forward uses weights, and when
it has used them all.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own: False spares the 2 s that the compiler takes to load."""
        return False

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


def _two(seen: Products, left: Tensor, right: Tensor) -> Iterator[Product]:
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
        found = (0, layout.stack_shape[1]) if fits and axis == layout.axis else None
        read = layout
    if found is not None:
        first, last = found
        yield Product(target=place.target, first=first, last=last, x=x, layout=read, window=window)


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
    """How often it was changed in place, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


class Enough(BaseException):
    """Breaks a forward off: what comes is not needed. No Exception, which models may catch."""


class Trace:
    """Watches the products of one forward of each call."""

    def __init__(self) -> None:
        self._counts: list[Counter[str]] = []
        self._parts: list[Counter[str]] = []
        self._clock = 0
        self._first: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._met: dict[str, int] = {}
        """By weight, in the order of first use: the number of the input that it met first."""
        self._last: tuple[Tensor, int] | None = None
        self._inputs = 0

    def begin(self) -> None:
        """The next call's forward begins."""
        self._counts.append(Counter())
        self._parts.append(Counter())
        self._last = None

    def meet(self, product: Product) -> None:
        """A weight is used."""
        name, x = product.target.name, product.x
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
        """A part of the block has run."""
        self._clock += 1
        self._parts[-1][part] += 1
        self._ends.setdefault(part, self._clock)

    def final_parts(self, names: Collection[str]) -> frozenset[str]:
        """Parts whose outputs do not change any more once all is pruned that comes before these.

        Only those that run once in every call; none where calls use different weights, as what the
        first does not use is pruned out of order.
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
        """Weights by the input that they met first, in the order of their use.

        Neighbours are taken together where there would be more than `most` steps.
        """
        found = [[*names] for _, names in groupby(self._met, self._met.__getitem__)]
        size = 1 if most is None else -(-len(found) // most)
        groups = (found[at : at + size] for at in range(0, len(found), max(1, size)))
        return [[name for names in group for name in names] for group in groups]

    def uses(self, names: Collection[str], number: int) -> int | None:
        """After how many products with these weights a forward of this call is done with them.

        None: that hangs on the data.
        """
        if any(len({counts[name] for counts in self._counts}) > 1 for name in names):
            return None
        return sum(self._counts[number][name] for name in names)


@dataclass(slots=True)
class RowOrder:
    """Whether the rows of matrix products lie position by position, not sample by sample."""

    samples: int = 1
    positions_first: bool = False
    _hooks: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def watched(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Within it, the modules' inputs tell."""
        try:
            for module in modules:
                is_attention = isinstance(module, nn.MultiheadAttention)
                look = self._look_attention if is_attention else self._look
                self._hooks.append(module.register_forward_pre_hook(look, with_kwargs=True))
            yield
        finally:
            while self._hooks:
                self._hooks.pop().remove()

    def begin(self, samples: int) -> None:
        """A forward begins."""
        self.samples, self.positions_first = samples, False

    def _look(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        self.positions_first = (
            x is not None
            and x.dim() > 2
            and x.shape[0] != self.samples
            and x.shape[1] == self.samples
        )

    def _look_attention(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """MultiheadAttention puts positions first inside, whatever it is given."""
        query = args[0] if args else kwargs.get("query")
        self.positions_first = isinstance(query, Tensor) and query.dim() == 3

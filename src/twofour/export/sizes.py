"""Free sizes of a module's inputs: asked for, found by running it, frozen by the trace."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.export.calls import BoundCall, copy_with, in_eval_mode, tensor_names, with_tensors
from twofour.export.model_code import describe_error
from twofour.inputs.fits import sizes_by_symbol
from twofour.records import frozen
from twofour.records.export import TensorShape
from twofour.records.options import DynamicAxis, SizeRange

Axes = Sequence[DynamicAxis]
BATCH = "batch"
_CHECKED_BATCHES = range(2, 33)
"""Batches that the trace must be right for; 1 is a case of its own to torch.

Not more: Upsample2D of diffusers takes another way to the same values from 64 rows on.
"""
_CHECKED_LENGTH = 128
"""Greater size that a sequence is run at, where the model allows it: cheap, and long enough."""
_FIX = re.compile(r"^ +(\w+) = (\w+)$", re.MULTILINE)
"""What torch suggests below "Suggested fixes:", such as "  height = 6" or "  width = height"."""


def with_batch(call: BoundCall, axes: Axes = ()) -> tuple[DynamicAxis, ...]:
    """The axes and, where they do not name it, axis 0 of tensors as long as the first one."""
    named = {axis.input for axis in axes if axis.axis == 0}
    lengths = {n: tensor.shape[0] for n, tensor in call.named_tensors.items() if tensor.dim()}
    batch = next(iter(lengths.values()), None)
    every = [*axes]
    for name, length in lengths.items():
        if length == batch and name not in named:
            every.append(DynamicAxis(input=name, axis=0, name=BATCH))
    return tuple(every)


def checked_axes(call: BoundCall, axes: Axes) -> tuple[DynamicAxis, ...]:
    """The axes, counted from the front; raises BadInputError for what the call does not have."""
    tensors = call.named_tensors
    checked: dict[tuple[str, int], DynamicAxis] = {}
    for axis in axes:
        if axis.input not in tensors:
            raise BadInputError(
                f"{_option(axis)}: there is no input {axis.input!r}",
                hint=f"the inputs are {', '.join(tensors) or 'none'}",
            )
        shape = tensors[axis.input].shape
        if not -len(shape) <= axis.axis < len(shape):
            words = "x".join(map(str, shape)) or "a scalar"
            raise BadInputError(f"{_option(axis)}: {axis.input!r} is {words}, and has no such axis")
        at = axis.axis % len(shape)
        before = checked.get((axis.input, at))
        if before is not None:
            raise BadInputError(f"{_option(axis)}: that axis is {before.name!r} already")
        checked[axis.input, at] = DynamicAxis(input=axis.input, axis=at, name=axis.name)
    every = tuple(checked.values())
    sizes_of(call, every)
    return every


def sizes_of(call: BoundCall, axes: Axes) -> dict[str, int]:
    """Size of each name in the call; raises BadInputError where two axes of one name differ."""
    names = {(axis.input, axis.axis): axis.name for axis in axes}
    shapes = {name: tuple(map(int, tensor.shape)) for name, tensor in call.named_tensors.items()}
    inputs = []
    for name, shape in shapes.items():
        free = tuple(names.get((name, axis), size) for axis, size in enumerate(shape))
        inputs.append(TensorShape(name=name, dtype="", shape=free))
    hint = "one name is one size: give the axes different names, or other inputs"
    return sizes_by_symbol(inputs, shapes, "the example inputs", hint)


def resized(call: BoundCall, axes: Axes, sizes: Mapping[str, int]) -> BoundCall:
    """The call with its tensors cut or repeated to these sizes: token ids stay token ids."""
    # [7, 8, 9] at a size of 5 becomes [7, 8, 9, 7, 8]
    tensors = dict(enumerate(call.tensors))
    for at, name in enumerate(tensor_names(call)):
        for axis in axes:
            size = sizes.get(axis.name)
            if axis.input != name or size is None:
                continue
            length = tensors[at].shape[axis.axis]
            if length not in (0, size):
                index = torch.arange(size, device=tensors[at].device) % length
                tensors[at] = tensors[at].index_select(axis.axis, index)
    return with_tensors(call, [*tensors.values()])


def without_ones(call: BoundCall, axes: Axes) -> BoundCall:
    """The call with sizes of 1 doubled: torch.export takes a size of 1 for a constant."""
    ones = {name: 2 for name, size in sizes_of(call, axes).items() if size == 1}
    return resized(call, axes, ones) if ones else call


def dynamic_shapes(call: BoundCall, axes: Axes, largest: Mapping[str, int]) -> dict[str, Any]:
    """`dynamic_shapes` for torch.export; `largest` is the greatest size of names that have one."""
    dims = {a.name: _free_size(a.name, largest.get(a.name)) for a in axes}
    names = iter(tensor_names(call))

    def free_axes(leaf: object) -> dict[int, Any] | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        name = next(names)
        return {a.axis: dims[a.name] for a in axes if a.input == name} or None

    specs: dict[str, Any] = pytree.tree_map(free_axes, call.by_parameter)
    return specs


def _free_size(name: str, largest: int | None) -> Any:  # noqa: ANN401  # torch has no name for it
    if torch.__version__ < "2.9":  # refuses a named size over conditions of its own: height != 3
        return torch.export.Dim.AUTO(max=largest)
    return torch.export.Dim(name, max=largest)


def name_dimensions(model: ir.Model, inputs: Sequence[str], axes: Axes) -> dict[str, str]:
    """Write the names of these axes wherever their symbols occur; returns the names that are lost.

    torch names a symbol itself unless an input is a constant or None; then its own `s77` stays. A
    name is lost where torch has put a number or another name's symbol: the value says which.
    """
    # axes ids:1=sequence and mask:1=length; the trace has ids [batch, s77], mask [batch, s77]:
    # names {"s77": "sequence"}, lost {"length": "sequence"}; an output [batch, 2*s77] becomes
    # [batch, 2*sequence]. A trace with mask [batch, 16] gives lost {"length": "16"}
    values = dict(zip(inputs, model.graph.inputs, strict=True))
    names: dict[str, str] = {}
    lost: dict[str, str] = {}
    for axis in axes:
        size = values[axis.input].shape[axis.axis]
        symbol = str(getattr(size, "value", size))
        if symbol.isdigit():
            lost[axis.name] = symbol
        elif names.setdefault(symbol, axis.name) != axis.name:
            lost[axis.name] = names[symbol]
    if BATCH in names.values():  # an input that is as long as the batch by chance may be constant
        lost.pop(BATCH, None)
    _rename(model, {symbol: name for symbol, name in names.items() if symbol != name})
    return lost


def _rename(model: ir.Model, names: Mapping[str, str]) -> None:
    """Write these names instead of symbols, in every shape of the graph."""
    if not names:
        return
    # a symbol may be an expression, such as 2*s77: the longest first
    symbols = sorted(names, key=len, reverse=True)
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, symbols)) + r")(?!\w)")
    computed = itertools.chain.from_iterable(node.outputs for node in model.graph.all_nodes())
    for value in (*model.graph.inputs, *computed):
        for at, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value:
                text = pattern.sub(lambda match: names[match[0]], size.value)
                value.shape[at] = ir.SymbolicDim(text)


def batch_condition(
    program: torch.export.ExportedProgram, inputs: Sequence[str], axes: Axes
) -> str | None:
    """What has to be true of the batch for the trace to be right; None where every batch will do.

    torch.onnx.export lets a forward compare the batch and leaves out the check that torch.export
    puts into the program.
    """
    # "if x.shape[0] % 2" at a batch of 8 leaves Eq(Mod(s77, 2), 0), which is false for 3;
    # "if x.shape[0] > 4" leaves a range from 5 on; Eq(Mod(64*s77, 64), 0) is always true
    size = _traced_batch(program, inputs, axes)
    if size is None:
        return None
    symbol = size.node.expr
    limits = program.range_constraints.get(symbol)
    if limits is not None and limits.lower > _CHECKED_BATCHES[0]:
        return f"{BATCH} >= {limits.lower}"
    if limits is not None and limits.upper < _CHECKED_BATCHES[-1]:
        return f"{BATCH} <= {limits.upper}"
    conditions = size.node.shape_env
    assertions = [*itertools.chain(*conditions.deferred_runtime_asserts.values())]
    if torch.__version__ < "2.9":  # has them among its guards
        assertions += conditions.guards
    for assertion in assertions:
        condition = assertion.expr
        if getattr(condition, "rel_op", "") == "!=":
            continue  # torch's own code asks so too: a GRU may leave Ne(6, batch), and 6 is right
        if any(condition.subs(symbol, n) == False for n in _CHECKED_BATCHES):  # noqa: E712
            return str(condition.subs(symbol, BATCH))
    return None


def _traced_batch(
    program: torch.export.ExportedProgram, inputs: Sequence[str], axes: Axes
) -> torch.SymInt | None:
    """The batch as torch traced it; None where it is a number."""
    values = (node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    # parameters and buffers are the first placeholders
    named = dict(zip(inputs, tensors[-len(inputs) :], strict=True))
    sizes: Iterator[object] = (named[a.input].shape[a.axis] for a in axes if a.name == BATCH)
    return next((size for size in sizes if isinstance(size, torch.SymInt)), None)


class FrozenSizeError(BadInputError):
    """Sizes that were to be free and are constant in what torch traced."""

    def __init__(self, message: str, *, names: tuple[str, ...], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.names = names


def frozen_size_error(module: nn.Module, axes: Axes, lost: Mapping[str, str]) -> FrozenSizeError:
    """The error for sizes that are constant, or one with another: `lost` says what they are."""
    parts = [f"{n} ({_places(axes, n)}) is always {instead}" for n, instead in lost.items()]
    options = " ".join(_option(axis) for axis in axes if axis.name in lost)
    hint = f"leave {options} out, or rewrite the line of the model that compares it"
    equal = [f"{name} and {other}" for name, other in lost.items() if not other.isdigit()]
    if equal:
        hint = f"give {equal[0]} the same name: they are one size"
    return FrozenSizeError(
        f"{type(module).__name__} does not leave every size free: {'; '.join(parts)}",
        names=tuple(lost),
        hint=hint,
    )


def _option(axis: DynamicAxis) -> str:
    return f"--dynamic {axis.input}:{axis.axis}={axis.name}"


def _places(axes: Axes, name: str) -> str:
    return ", ".join(f"{axis.input} dimension {axis.axis}" for axis in axes if axis.name == name)


def suggested_sizes(text: str, axes: Axes) -> dict[str, str]:
    """Names that torch says are a number or another name, and which."""
    names = {axis.name for axis in axes}
    return {name: value for name, value in _FIX.findall(text) if name in names}


def refuse_fixed(module: nn.Module, axes: Axes, fixed: Mapping[str, str]) -> None:
    """Raise BadInputError for sizes that were asked to be free and cannot be."""
    if not fixed:
        return
    name, why = next(iter(fixed.items()))
    options = " ".join(_option(axis) for axis in axes if axis.name == name)
    raise BadInputError(
        f"{type(module).__name__} runs with one {name} only ({_places(axes, name)}): {why}",
        hint=f"leave {options} out",
    )


@frozen
class FreeSizes:
    """What stays free in the file, and two calls of other sizes that the module runs."""

    axes: tuple[DynamicAxis, ...]
    """Axes besides those of the batch, which is asked for by a flag."""
    ranges: tuple[SizeRange, ...]
    others: tuple[dict[str, int], ...]
    """Sizes by name; as many as there are, two where the module runs shorter and longer ones."""
    fixed: dict[str, str]
    """Name -> why the module does not run at another size."""
    returned: Mapping[frozenset[tuple[str, int]], object]
    """Sizes, as pairs of name and size -> what the forward returned when it was tried there."""

    def without(self, names: Sequence[str] | None) -> FreeSizes:
        """The same without these free sizes; None: only the batch stays free."""
        if names is None or not any(axis.name in names for axis in self.axes):
            return NOTHING_FREE
        others = []
        for sizes in self.others:
            left = dict(sizes)
            for name in names:
                left.pop(name, None)
            others.append(left)
        return replace(
            self,
            axes=tuple(axis for axis in self.axes if axis.name not in names),
            ranges=tuple(size for size in self.ranges if size.name not in names),
            others=tuple(others),
        )


NOTHING_FREE = FreeSizes(axes=(), ranges=(), others=(), fixed={}, returned={})


def find_free_sizes(
    module: nn.Module,
    call: BoundCall,
    axes: Axes,
    longest: Mapping[str, int | None],
    *,
    batch: bool,
) -> FreeSizes:
    """Run the module at shorter and longer sizes than the example's, in float32.

    `longest` has the sizes that the configuration names. Raises BadInputError for an axis that the
    call does not have, and for two axes of one name and different sizes.
    """
    # a trace says neither how long a table of positions is nor what a smaller image breaks
    asked = checked_axes(call, axes)
    every = with_batch(call, asked) if batch else asked
    runs = _Runs(module, call, every)
    sizes = _examples(call, every, longest)
    longer = runs.that_work({size.name: size.longer for size in sizes})
    shorter = runs.that_work({size.name: size.shorter for size in sizes})
    fixed = {}
    ranges = []
    for size in sizes:
        if size.name == BATCH:
            continue
        if size.name in longer or size.name in shorter:
            ranges.append(_range(size, shorter, longer))
        else:
            fixed[size.name] = runs.why_fixed(size)
    return FreeSizes(
        axes=tuple(axis for axis in asked if axis.name not in fixed),
        ranges=tuple(ranges),
        others=tuple(working for working in (shorter, longer) if working.keys() - {BATCH}),
        fixed=fixed,
        returned=runs.returned,
    )


@frozen
class _Size:
    """One free size: its name, as it is in the example, and the greatest that is known."""

    name: str
    example: int
    longest: int | None
    is_known: bool
    """The model's configuration says how long it may be, if only that there is no limit."""

    @property
    def longer(self) -> tuple[int, ...]:
        """The longer size to try, where there is one."""
        # an image of 224 is tried at 448, 16 of at most 512 tokens at 128
        if self.name == BATCH:
            return (3,) if self.example == 2 else (2,)
        wanted = max(2 * self.example, _CHECKED_LENGTH if self.is_known else 0)
        limit = wanted if self.longest is None else self.longest
        longer = min(wanted, limit)
        return (longer,) if longer > self.example else ()

    @property
    def shorter(self) -> tuple[int, ...]:
        """Shorter sizes to try, the most useful first."""
        if self.name == BATCH:
            return (3,) if self.example == 1 else (1,)
        first = (1, 2) if self.is_known else ()
        return tuple(n for n in (*first, self.example // 2) if 0 < n < self.example)


def _examples(call: BoundCall, axes: Axes, longest: Mapping[str, int | None]) -> list[_Size]:
    return [
        _Size(name=name, example=size, longest=longest.get(name), is_known=name in longest)
        for name, size in sizes_of(call, axes).items()
    ]


def _range(size: _Size, shorter: Mapping[str, int], longer: Mapping[str, int]) -> SizeRange:
    """What was run; for a sequence to the limit of its configuration, or without one."""
    largest = size.longest if size.is_known else longer.get(size.name, size.example)
    return SizeRange(name=size.name, min=shorter.get(size.name, size.example), max=largest)


class _Runs:
    """Runs of a module at other sizes than the example's, and what they returned."""

    def __init__(self, module: nn.Module, call: BoundCall, axes: Axes) -> None:
        self._module = module
        self._call = call
        self._axes = axes
        self.returned: dict[frozenset[tuple[str, int]], object] = {}

    def failure(self, sizes: Mapping[str, int]) -> Exception | SystemExit | None:
        """What the module raises at these sizes; None where it runs."""
        other = resized(self._call, self._axes, sizes)
        module = self._module
        with contextlib.suppress(Exception):  # a module may refuse to be copied in any way
            # Swin keeps the smaller window of a small image, and fails on the example after that
            module = copy_with(module, {})
        with in_eval_mode(module), contextlib.redirect_stdout(sys.stderr):
            try:
                returned = module(*other.args, **other.kwargs)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - anything can be raised
                return error
        self.returned[frozenset(sizes.items())] = returned
        return None

    def that_work(self, candidates: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """All at their first candidate where that runs, else each at the first that does."""
        first = {name: tried[0] for name, tried in candidates.items() if tried}
        if first and self.failure(first) is None:
            return first
        working: dict[str, int] = {}
        for name, sizes in candidates.items():
            for size in sizes:
                if self.failure({**working, name: size}) is None:
                    working[name] = size
                    break
        return working

    def why_fixed(self, size: _Size) -> str:
        """Why the module runs at the example's size alone, from the first other size to try."""
        tried = next(iter((*size.longer, *size.shorter)), None)
        if tried is None:
            return f"{size.example} is all that it may be"
        error = self.failure({size.name: tried})
        what = "it fails" if error is None else describe_error(error)
        return f"at {tried} instead of {size.example}: {what}"

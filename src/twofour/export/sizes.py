"""Free sizes of a module's inputs: asked for, found by running it, frozen by the trace."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.export.example_inputs import (
    BoundCall,
    copy_with,
    in_eval_mode,
    tensor_names,
    with_tensors,
)
from twofour.export.model_code import describe_error, package_line, user_line
from twofour.inputs.fits import sizes_by_symbol
from twofour.records.export import TensorShape
from twofour.records.options import DynamicAxis, SizeRange

BATCH = "batch"
_CHECKED_BATCHES = range(2, 33)
"""Batches that the trace must be right for; 1 is a case of its own to torch.

Not more: Upsample2D of diffusers takes another way to the same values from 64 rows on.
"""
_CHECKED_LENGTH = 128
"""Greater size that a sequence is run at, where the model allows it: cheap, and long enough."""
_FIX = re.compile(r"^ +(\w+) = (\w+)$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


def with_batch(call: BoundCall, axes: Sequence[DynamicAxis] = ()) -> tuple[DynamicAxis, ...]:
    """The axes and, where they do not name it, axis 0 of tensors as long as the first one."""
    taken = {axis.input for axis in axes if axis.axis == 0}
    sizes = {n: t.shape[:1] for n, t in zip(tensor_names(call), call.tensors, strict=True)}
    size = next(filter(None, sizes.values()), None)
    batch = (name for name, own in sizes.items() if own and own == size and name not in taken)
    return (*axes, *(DynamicAxis(input=name, axis=0, name=BATCH) for name in batch))


def checked_axes(call: BoundCall, axes: Sequence[DynamicAxis]) -> tuple[DynamicAxis, ...]:
    """The axes, counted from the front; raises BadInputError for what the call does not have."""
    tensors = dict(zip(tensor_names(call), call.tensors, strict=True))
    found: dict[tuple[str, int], DynamicAxis] = {}
    for axis in axes:
        what = f"--dynamic {axis.input}:{axis.axis}={axis.name}"
        if axis.input not in tensors:
            raise BadInputError(
                f"{what}: there is no input {axis.input!r}",
                hint=f"the inputs are {', '.join(tensors) or 'none'}",
            )
        rank = tensors[axis.input].dim()
        if not -rank <= axis.axis < rank:
            shape = "x".join(map(str, tensors[axis.input].shape)) or "a scalar"
            raise BadInputError(f"{what}: {axis.input!r} is {shape}, and has no such axis")
        place = (axis.input, axis.axis % rank)
        if place in found:
            raise BadInputError(f"{what}: that axis is {found[place].name!r} already")
        found[place] = DynamicAxis(input=axis.input, axis=place[1], name=axis.name)
    sizes_of(call, tuple(found.values()))
    return tuple(found.values())


def sizes_of(call: BoundCall, axes: Sequence[DynamicAxis]) -> dict[str, int]:
    """Size of each name in the call; raises BadInputError where two axes of one name differ."""
    names = {(axis.input, axis.axis): axis.name for axis in axes}
    shapes = {
        n: tuple(map(int, t.shape)) for n, t in zip(tensor_names(call), call.tensors, strict=True)
    }
    inputs = [
        TensorShape(
            name=name,
            dtype="",
            shape=tuple(names.get((name, axis), size) for axis, size in enumerate(shape)),
        )
        for name, shape in shapes.items()
    ]
    hint = "one name is one size: give the axes different names, or other inputs"
    return sizes_by_symbol(inputs, shapes, "the example inputs", hint)


def resized(call: BoundCall, axes: Sequence[DynamicAxis], sizes: Mapping[str, int]) -> BoundCall:
    """The call with its tensors cut or repeated to these sizes: token ids stay token ids."""
    tensors = []
    for name, tensor in zip(tensor_names(call), call.tensors, strict=True):
        for axis in axes:
            size = sizes.get(axis.name)
            length = tensor.shape[axis.axis] if axis.input == name else 0
            if size not in (None, length) and length:
                index = torch.arange(size) % length
                tensor = tensor.index_select(axis.axis, index.to(tensor.device))  # noqa: PLW2901
        tensors.append(tensor)
    return with_tensors(call, tensors)


def without_ones(call: BoundCall, axes: Sequence[DynamicAxis]) -> BoundCall:
    """The call with sizes of 1 doubled: torch.export takes a size of 1 for a constant."""
    ones = {name: 2 for name, size in sizes_of(call, axes).items() if size == 1}
    return resized(call, axes, ones) if ones else call


def dynamic_shapes(
    call: BoundCall, axes: Sequence[DynamicAxis], largest: Mapping[str, int]
) -> dict[str, Any]:
    """`dynamic_shapes` for torch.export; `largest` is the greatest size of names that have one."""
    dims = {a.name: torch.export.Dim(a.name, max=largest.get(a.name)) for a in axes}
    names = iter(tensor_names(call))

    def spec(leaf: object) -> dict[int, Any] | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        name = next(names)
        return {a.axis: dims[a.name] for a in axes if a.input == name} or None

    specs: dict[str, Any] = pytree.tree_map(spec, call.by_parameter)
    return specs


def name_dimensions(
    model: ir.Model, inputs: Sequence[str], axes: Sequence[DynamicAxis]
) -> dict[str, str]:
    """Write the names of these axes wherever their symbols occur; returns the names that are lost.

    torch names a symbol itself unless an input is a constant or None; then its own `s77` stays. A
    name is lost where torch has put a number or another name's symbol: the value says which.
    """
    # axes ids:1=sequence and mask:1=length; the trace has ids [batch, s77], mask [batch, s77]:
    # names {"s77": "sequence"}, lost {"length": "sequence"}; an output [batch, 2*s77] becomes
    # [batch, 2*sequence]. A trace with mask [batch, 16] gives lost {"length": "16"}
    shapes = dict(zip(inputs, (value.shape for value in model.graph.inputs), strict=True))
    names: dict[str, str] = {}
    lost: dict[str, str] = {}
    for axis in axes:
        shape = shapes.get(axis.input)
        found = None if shape is None or axis.axis >= len(shape) else shape[axis.axis]
        symbol = found.value if isinstance(found, ir.SymbolicDim) else None
        if symbol is None:
            lost[axis.name] = str(found)
        elif names.setdefault(symbol, axis.name) != axis.name:
            lost[axis.name] = names[symbol]
    if BATCH in names.values():  # an input that is as long as the batch by chance may be constant
        lost.pop(BATCH, None)
    _rename(model, {symbol: name for symbol, name in names.items() if symbol != name})
    return lost


def batch_condition(
    program: torch.export.ExportedProgram, inputs: Sequence[str], axes: Sequence[DynamicAxis]
) -> str | None:
    """What has to be true of the batch for the trace to be right; None where every batch will do.

    torch.onnx.export lets a forward compare the batch and leaves out the check that torch.export
    puts into the program.
    """
    # "if x.shape[0] % 2" at a batch of 8 leaves Eq(Mod(s77, 2), 0), which is false for 3;
    # "if x.shape[0] > 4" leaves a range from 5 on; Eq(Mod(64*s77, 64), 0) is always true
    values = (node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    given = [value for value in values if isinstance(value, torch.Tensor)][-len(inputs) :]
    shapes = dict(zip(inputs, (tensor.shape for tensor in given), strict=True))
    sizes: list[Any] = [shapes[axis.input][axis.axis] for axis in axes if axis.name == BATCH]
    size = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    if size is None:
        return None
    symbol = size.node.expr
    limits = program.range_constraints.get(symbol)
    if limits is not None and not all(n in limits for n in _CHECKED_BATCHES):
        return f"{BATCH} >= {limits.lower}" if limits.lower > 2 else f"{BATCH} <= {limits.upper}"
    for assertion in itertools.chain(*size.node.shape_env.deferred_runtime_asserts.values()):
        condition = assertion.expr
        if getattr(condition, "rel_op", "") == "!=":
            continue  # torch's own code asks so too: a GRU may leave Ne(6, batch), and 6 is right
        if any(condition.subs(symbol, n) == False for n in _CHECKED_BATCHES):  # noqa: E712
            return str(condition.subs(symbol, BATCH))
    return None


def _rename(model: ir.Model, names: Mapping[str, str]) -> None:
    if not names:
        return
    # a symbol may be an expression, such as 2*s77: the longest first
    texts = sorted(names, key=len, reverse=True)
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, texts)) + r")(?!\w)")
    nodes = model.graph.all_nodes()
    for value in (*model.graph.inputs, *(out for node in nodes for out in node.outputs)):
        for at, dimension in enumerate(value.shape or ()):
            if isinstance(dimension, ir.SymbolicDim) and dimension.value:
                text = pattern.sub(lambda match: names[match[0]], dimension.value)
                value.shape[at] = ir.SymbolicDim(text)


class FrozenSizeError(BadInputError):
    """Sizes that were to be free and are constant in what torch traced."""

    def __init__(self, message: str, *, names: tuple[str, ...], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.names = names


def frozen_size_error(
    module: nn.Module, axes: Sequence[DynamicAxis], lost: Mapping[str, str]
) -> FrozenSizeError:
    """The error for sizes that are constant, or one with another: `lost` says what they are."""
    parts = []
    for name, instead in lost.items():
        own = ", ".join(f"{a.input} dimension {a.axis}" for a in axes if a.name == name)
        parts.append(f"{name} ({own}) is always {instead}")
    options = " ".join(f"--dynamic {a.input}:{a.axis}={a.name}" for a in axes if a.name in lost)
    equal = next((f"{n} and {o}" for n, o in lost.items() if not o.isdigit()), None)
    hint = f"leave {options} out, or rewrite the line of the model that compares it"
    if equal is not None:
        hint = f"give {equal} the same name: they are one size"
    return FrozenSizeError(
        f"{type(module).__name__} does not leave every size free: {'; '.join(parts)}",
        names=tuple(lost),
        hint=hint,
    )


def suggested_sizes(text: str, axes: Sequence[DynamicAxis]) -> dict[str, str]:
    """Names that torch says are a number or another name, and which."""
    names = {axis.name for axis in axes}
    return {name: value for name, value in _FIX.findall(text) if name in names}


def line_in(text: str) -> str | None:
    """The line of the user's code, else of a package, that a message of torch quotes."""
    frames = [(match[1], int(match[2])) for match in _FRAME.finditer(text)]
    return user_line(frames) or package_line(frames, but=Path(str(torch.__file__)).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
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
        kept = tuple(a for a in self.axes if names is not None and a.name not in names)
        left = {axis.name for axis in kept}
        if len(kept) == len(self.axes):
            return NOTHING_FREE
        return replace(
            self,
            axes=kept,
            ranges=tuple(size for size in self.ranges if size.name in left),
            others=tuple(
                {n: size for n, size in sizes.items() if n in left or n == BATCH}
                for sizes in self.others
            ),
        )


NOTHING_FREE = FreeSizes(axes=(), ranges=(), others=(), fixed={}, returned={})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """One free size: its name, as it is in the example, and the greatest that is known."""

    name: str
    example: int
    longest: int | None
    is_known: bool
    """The model's configuration says how long it may be, if only that there is no limit."""

    @property
    def longer(self) -> tuple[int, ...]:
        """Longer sizes to try, the most useful first; a step may have to be a power of two."""
        if self.name == BATCH:
            return (2 if self.example != 2 else 3,)
        wanted = max(2 * self.example, _CHECKED_LENGTH if self.is_known else 0)
        steps = (self.example + 2**power for power in range(7))
        limit = wanted if self.longest is None else self.longest
        return tuple(n for n in (min(wanted, limit), *steps) if self.example < n <= limit)

    @property
    def shorter(self) -> tuple[int, ...]:
        """Shorter sizes to try, likewise."""
        if self.name == BATCH:
            return (1 if self.example != 1 else 3,)
        steps = (self.example - 2**power for power in range(7))
        first = (1, 2) if self.is_known else ()
        return tuple(n for n in (*first, self.example // 2, *steps) if 0 < n < self.example)


def find_free_sizes(
    module: nn.Module,
    call: BoundCall,
    axes: Sequence[DynamicAxis],
    longest: Mapping[str, int | None],
    *,
    batch: bool,
) -> FreeSizes:
    """Run the module at shorter and longer sizes than the example's, in float32.

    `longest` has the sizes that the configuration names. Raises BadInputError for an axis that the
    call does not have, and for two axes of one name and different sizes.
    """
    asked = checked_axes(call, axes)
    every = with_batch(call, asked) if batch else asked
    returned: dict[frozenset[tuple[str, int]], object] = {}

    def failure(sizes: Mapping[str, int]) -> Exception | SystemExit | None:
        """None where the module runs at these sizes."""
        other = resized(call, every, sizes)
        tried = module
        with contextlib.suppress(Exception):  # a module may refuse to be copied in any way
            # Swin keeps the smaller window of a small image, and fails on the example after that
            tried = copy_with(module, {})
        with in_eval_mode(tried), contextlib.redirect_stdout(sys.stderr):
            try:
                given = tried(*other.args, **other.kwargs)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - anything can be raised
                return error
        returned[frozenset(sizes.items())] = given
        return None

    sizes = [
        _Size(name=n, example=size, longest=longest.get(n), is_known=n in longest)
        for n, size in sizes_of(call, every).items()
    ]
    free = [size for size in sizes if size.name != BATCH]
    long = _sizes_that_run(failure, {s.name: s.longer for s in sizes})
    short = _sizes_that_run(failure, {s.name: s.shorter for s in sizes})
    stuck = (s for s in free if s.name not in long and s.name not in short)
    fixed = {size.name: _why_fixed(size, failure) for size in stuck}
    return FreeSizes(
        axes=tuple(axis for axis in asked if axis.name not in fixed),
        # what was run; for a sequence to the limit of its configuration, or without one
        ranges=tuple(
            SizeRange(
                name=s.name,
                min=short.get(s.name, s.example),
                max=s.longest if s.is_known else long.get(s.name, s.example),
            )
            for s in free
            if s.name not in fixed
        ),
        others=tuple(
            {name: size for name, size in found.items() if name not in fixed}
            for found in (short, long)
            if any(s.name in found for s in free)
        ),
        fixed=fixed,
        returned=returned,
    )


def _why_fixed(size: _Size, failure: Callable[[Mapping[str, int]], BaseException | None]) -> str:
    """Why the module runs at the example's size alone, from the first other size to try."""
    tried = next(iter((*size.longer, *size.shorter)), None)
    if tried is None:
        return f"{size.example} is all that it may be"
    error = failure({size.name: tried})
    what = "it fails" if error is None else describe_error(error)
    return f"at {tried} instead of {size.example}: {what}"


def refuse_fixed(module: nn.Module, axes: Sequence[DynamicAxis], fixed: Mapping[str, str]) -> None:
    """Raise BadInputError for sizes that were asked to be free and cannot be."""
    if not fixed:
        return
    name, why = next(iter(fixed.items()))
    own = [axis for axis in axes if axis.name == name]
    options = " ".join(f"--dynamic {axis.input}:{axis.axis}={axis.name}" for axis in own)
    places = ", ".join(f"{axis.input} dimension {axis.axis}" for axis in own)
    raise BadInputError(
        f"{type(module).__name__} runs with one {name} only ({places}): {why}",
        hint=f"leave {options} out",
    )


def _sizes_that_run(
    failure: Callable[[Mapping[str, int]], object], candidates: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """All at their first candidate where that runs, else each at the first that does by itself."""
    first = {name: tried[0] for name, tried in candidates.items() if tried}
    if first and failure(first) is None:
        return first
    batch = {BATCH: first[BATCH]} if BATCH in first else {}
    if batch and failure(batch) is not None:
        batch = {}
    found = dict(batch)
    for name in (name for name in candidates if name != BATCH):
        for tried in candidates[name]:
            if failure({**batch, name: tried}) is None:
                found[name] = tried
                break
    return found if failure(found) is None else dict(list(found.items())[:2])  # one by one

"""Free sizes of inputs: asked for, allowed ranges, and those that the trace froze."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.export.example_inputs import Call, tensor_names, with_tensors
from twofour.export.model_code import package_line, quiet, user_line
from twofour.records.options import DynamicAxis

BATCH = "batch"


def batch_size(call: Call) -> int | None:
    """Length of axis 0 of the first tensor that has axes; None where there is no such tensor."""
    return next((int(t.shape[0]) for t in call.tensors if t.dim() > 0), None)


def batch_axes(call: Call) -> tuple[DynamicAxis, ...]:
    """Axis 0 of every tensor that is as long there as the batch."""
    size = batch_size(call)
    named = zip(tensor_names(call), call.tensors, strict=True)
    return tuple(
        DynamicAxis(input=name, axis=0, name=BATCH)
        for name, tensor in named
        if tensor.dim() > 0 and int(tensor.shape[0]) == size
    )


def with_batch(call: Call, axes: Sequence[DynamicAxis]) -> tuple[DynamicAxis, ...]:
    """The axes, and those of the batch that none of them names otherwise."""
    taken = {(axis.input, axis.axis) for axis in axes}
    return (*axes, *(a for a in batch_axes(call) if (a.input, a.axis) not in taken))


def checked_axes(call: Call, axes: Sequence[DynamicAxis]) -> tuple[DynamicAxis, ...]:
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


def sizes_of(call: Call, axes: Sequence[DynamicAxis]) -> dict[str, int]:
    """Size of each name in the call; raises BadInputError where two axes of one name differ."""
    tensors = dict(zip(tensor_names(call), call.tensors, strict=True))
    sizes: dict[str, int] = {}
    first: dict[str, DynamicAxis] = {}
    for axis in axes:
        size = int(tensors[axis.input].shape[axis.axis])
        before = first.setdefault(axis.name, axis)
        if sizes.setdefault(axis.name, size) != size:
            raise BadInputError(
                f"{axis.name!r} is {sizes[axis.name]} in {in_words(before)} and {size} in "
                f"{in_words(axis)} of the example inputs",
                hint="one name is one size: give the axes different names, or other inputs",
            )
    return sizes


def resized(call: Call, axes: Sequence[DynamicAxis], sizes: Mapping[str, int]) -> Call:
    """The call with its tensors cut or repeated along the axes until they have these sizes.

    Repeating keeps the values real: token ids stay in the vocabulary.
    """
    tensors = []
    for name, given in zip(tensor_names(call), call.tensors, strict=True):
        tensor = given
        for axis in axes:
            size = sizes.get(axis.name)
            length = tensor.shape[axis.axis] if axis.input == name else 0
            if axis.input == name and size not in (None, length) and length:
                index = torch.arange(size) % length
                tensor = tensor.index_select(axis.axis, index.to(tensor.device))
        tensors.append(tensor)
    return with_tensors(call, tensors)


def without_ones(call: Call, axes: Sequence[DynamicAxis]) -> Call:
    """The call with sizes of 1 doubled: torch.export takes a size of 1 for a constant."""
    ones = {name: 2 for name, size in sizes_of(call, axes).items() if size == 1}
    return resized(call, axes, ones) if ones else call


def dynamic_shapes(
    call: Call, axes: Sequence[DynamicAxis], largest: Mapping[str, int]
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
    """Give the symbols at these axes their names wherever they occur; gives names that are no more.

    torch names a symbol itself unless an input is a constant or None; then its own `s77` stays. A
    name is no more where torch has put a number in its place, or another name's symbol: the value
    is that number or name.
    """
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


def in_words(axis: DynamicAxis) -> str:
    """Input and axis, as errors say them."""
    return f"{axis.input} dimension {axis.axis}"


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


_LOGGER = "torch.fx.experimental.symbolic_shapes"
_SYMBOL = re.compile(r"create_symbol (\w+) = \d+ for (\S+\.size\(\)\[\d+\])")
_GUARD = re.compile(r"(?:eval|runtime_assert) (?:\(\w+\) )?(Eq\(.*\)) \[guard added\]")
_FIX = re.compile(r"^ +(\w+) = (\w+)$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


class FrozenSizeError(BadInputError):
    """Sizes that were to be free and are constant in what torch traced."""

    def __init__(self, message: str, *, names: tuple[str, ...], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.names = names


class _Conditions(logging.Handler):
    """Equations that torch assumes while it traces, each with the model's line that asked."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.symbols: dict[str, str] = {}
        """Symbol -> the size it stands for, in torch's words: L['x'].size()[1]."""
        self.found: list[tuple[str, str | None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if symbol := _SYMBOL.match(text):
            self.symbols[symbol[1]] = symbol[2]
        elif guard := _GUARD.match(text):
            frames = traceback.extract_stack()
            self.found.append((guard[1], model_line([(f.filename, f.lineno or 0) for f in frames])))


def why_frozen(
    module: nn.Module, call: Call, axes: Sequence[DynamicAxis], lost: Mapping[str, str]
) -> FrozenSizeError:
    """The error that says which sizes are constant and why; traces the module once more for it."""
    conditions = _conditions(module, call, axes)
    sources = _sources(call)
    parts = []
    for name, instead in lost.items():
        own = [axis for axis in axes if axis.name == name]
        texts = {f"{sources.get(axis.input)}.size()[{axis.axis}]" for axis in own}
        symbols = {s for s, text in conditions.symbols.items() if text in texts}
        about = (line for eq, line in conditions.found if symbols & {*re.findall(r"\w+", eq)})
        line = next(filter(None, about), None)
        because = f", by {line}" if line else ""
        parts.append(f"{name} ({', '.join(map(in_words, own))}) is always {instead}{because}")
    options = " ".join(f"--dynamic {a.input}:{a.axis}={a.name}" for a in axes if a.name in lost)
    equal = next((f"{n} {o}" for n, o in lost.items() if not o.isdigit()), None)
    hint = f"leave {options} out, or rewrite that line"
    if equal is not None:
        hint = f"give {' and '.join(equal.split())} the same name: they are one size"
    return FrozenSizeError(
        f"{type(module).__name__} does not let every size free: {'; '.join(parts)}",
        names=tuple(lost),
        hint=hint,
    )


def suggested_sizes(text: str, axes: Sequence[DynamicAxis]) -> dict[str, str]:
    """Names that torch says are constant, or of one size with another, with what they are."""
    names = {axis.name for axis in axes}
    return {name: value for name, value in _FIX.findall(text) if name in names}


def model_line(frames: Sequence[tuple[str, int]]) -> str | None:
    """The innermost frame of the model's code: of the user's own, else of an installed package."""
    torchs = Path(str(torch.__file__)).parent
    return user_line(frames) or package_line(frames, but=torchs)


def line_in(text: str) -> str | None:
    """The model's line that a message of torch quotes from a traceback."""
    return model_line([(match[1], int(match[2])) for match in _FRAME.finditer(text)])


def _conditions(module: nn.Module, call: Call, axes: Sequence[DynamicAxis]) -> _Conditions:
    handler, logger = _Conditions(), logging.getLogger(_LOGGER)
    level, handlers, propagate = logger.level, logger.handlers, logger.propagate
    try:
        # as torch.onnx does; the module sets its functions when it is imported
        patched = torch.fx.experimental._config.patch(  # type: ignore[attr-defined]  # ditto
            backed_size_oblivious=True
        )
        with quiet(), patched:
            logger.handlers, logger.propagate = [handler], False
            logger.setLevel(logging.INFO)
            torch.export.export(
                module,
                call.args,
                kwargs=call.kwargs,
                dynamic_shapes=dynamic_shapes(call, axes, {}),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except Exception:  # noqa: BLE001, S110 - it fails by the very condition that is looked for
        pass
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    return handler


def _sources(call: Call) -> dict[str, str]:
    """Input name -> how torch writes it: L['x'], L['states'][0]."""
    leaves: list[tuple[Any, Any]] = pytree.tree_leaves_with_path(call.by_parameter)
    texts = ["L" + pytree.keystr(p) for p, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return dict(zip(tensor_names(call), texts, strict=True))

"""An ONNX file of float32 in float16 or bfloat16, for sparse kernels that float32 has none of.

Names of nodes and initializers stay, and so do the types of inputs and outputs; casts are added
where a half-precision tensor meets one that keeps float32. Why this is not a library's work:
docs/decisions/0006-float32-onnx-files.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx_ir as ir

from twofour.errors import BadInputError
from twofour.export.casts import Rewriting, rewrite
from twofour.export.element_types import element_types
from twofour.export.float32_file import all_nodes, external_tensors, load_float32
from twofour.export.float32_rules import (
    LAYERS,
    Plan,
    named,
    plan,
)
from twofour.export.onnx_file import save, what_is_invalid
from twofour.records.options import Precision

_HALVES = {Precision.FLOAT16: ir.DataType.FLOAT16, Precision.BFLOAT16: ir.DataType.BFLOAT16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was converted, and what kept float32."""

    initializers: int
    nodes: int
    notes: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    """Tensors of the main graph, by the names they had, that are half precision now."""


def convert_onnx(
    source: Path, target: Path, precision: Precision, keep: tuple[str, ...] = ()
) -> Conversion:
    """Write `source` to `target` (weights in `<target name>.data`) in half precision.

    `keep` are globs over names of nodes that stay float32. Raises BadInputError for a damaged
    file, a glob that matches nothing, a value that the type cannot hold (named, with the largest),
    and a layer that has no such type in the file's opset.
    """
    model = load_float32(source)
    _refuse_overwriting(model, source, target)
    unmatched = [g for g in keep if not any(named(n, (g,)) for n in all_nodes(model))]
    if unmatched:
        raise BadInputError(
            f"--keep-float32 {unmatched[0]!r} matches no node of {source}",
            hint="globs are matched with the names of the nodes, such as "
            + ", ".join([n.name or "" for n in all_nodes(model)][:3]),
        )
    half = _HALVES[precision]
    types = element_types(model)
    planned = plan(model, types, half, keep)
    _refuse_layers(planned, precision, source)
    rewriting = Rewriting(model=model, types=types, half=half, plan=planned, source=source)
    rewrite(rewriting)
    save(model, target, partial(_refuse_invalid, source, precision))
    return _summary(rewriting)


def _refuse_overwriting(model: ir.Model, source: Path, target: Path) -> None:
    read = {source.resolve(), *(Path(t.path).resolve() for t in external_tensors(model))}
    for written in (target, target.with_name(f"{target.name}.data")):
        if written.resolve() in read:
            raise BadInputError(
                f"writing {written} would overwrite a file that is being read",
                hint="choose another name or folder for the converted model",
            )


def _refuse_invalid(source: Path, precision: Precision, target: Path, invalid: str) -> None:
    """A file that onnx.checker finds fault with as it came is taken as it is."""
    if what_is_invalid(source) is None:
        raise BadInputError(
            f"{target.name}: {source} has no valid form in {precision.value}: {invalid}",
            hint="--keep-float32 with the name of that node leaves it as it is",
        )


def _refuse_layers(planned: Plan, precision: Precision, source: Path) -> None:
    missing = [node for node in planned.without if node.op_type in LAYERS]
    if missing:
        raise BadInputError(
            f"{source}: {planned.without[missing[0]]} has no {precision.value} "
            f"(node {missing[0].name}; {len(missing)} in all)",
            hint="use --precision float16, or write the file in opset 22 first "
            "(onnx.version_converter)",
        )


def _summary(state: Rewriting) -> Conversion:
    planned = state.plan
    nodes = sum(bool(p or planned.outputs.get(n)) for n, p in planned.inputs.items())
    missing = Counter(planned.without.values())
    notes = [
        f"{op} ({count}) has no {state.half.name.lower()} and stays float32"
        for op, count in missing.items()
    ]
    word = state.half.name.lower()
    if state.limits:
        notes.append(f"masks of float32's lowest number became {word}'s lowest: {state.limits}")
    if not state.constants and not nodes:
        notes.append(f"nothing in {state.source.name} is float32 that could be {word}")
    return Conversion(
        initializers=state.constants,
        nodes=nodes,
        notes=tuple(notes),
        tensors=tuple(dict.fromkeys(state.tensors)),
    )

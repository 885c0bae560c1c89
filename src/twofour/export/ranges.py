"""Ranges of activations, and those that float16 does not reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from twofour.errors import BadInputError
from twofour.export.ir_models import load_float32
from twofour.graph.files import Array
from twofour.graph.opened import OpenedModel

FLOAT16_MAX = float(np.finfo(np.float16).max)
_MASKED = 0.99 * float(np.finfo(np.float32).max)
"""From here on it is float32's own limit: a mask, which is float16's limit in the new file."""
_PREFIX = "largest value of "
_MOST_NAMED = 6


def write_with_ranges(opened: OpenedModel, target: Path, names: Sequence[str]) -> None:
    """Write the model with one more output per tensor of its main graph: its largest magnitude."""
    model = load_float32(opened)
    graph = model.graph
    made = {value.name: value for node in graph for value in node.outputs}
    made.update((value.name, value) for value in graph.inputs)
    for name in (name for name in names if name in made):  # others are inside functions
        magnitude = ir.node("Abs", [made[name]], name=f"abs {name}")
        largest = ir.node(
            "ReduceMax",
            [magnitude.outputs[0]],
            attributes={"keepdims": 0},
            outputs=[ir.Value(name=_PREFIX + name, type=ir.TensorType(ir.DataType.FLOAT))],
            name=f"max {name}",
        )
        largest.outputs[0].shape = ir.Shape([])
        graph.extend([magnitude, largest])
        graph.outputs.append(largest.outputs[0])
    ir.save(model, target, external_data=f"{target.name}.data")


def split_ranges(outputs: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, float]]:
    """The model's own outputs, and the largest magnitude of each tensor that was asked for."""
    own = dict(outputs)
    added = [name for name in own if name.startswith(_PREFIX)]
    ranges = {name.removeprefix(_PREFIX): float(own.pop(name)) for name in added}
    return own, ranges


def refuse_overflow(model: OpenedModel, ranges: Mapping[str, float]) -> None:
    """Raise BadInputError where a finite value of float32 is beyond float16, naming the nodes."""
    over = [name for name, value in ranges.items() if FLOAT16_MAX < value < _MASKED]
    if not over:
        return
    users = (node.name for node in model.nodes if {*node.outputs, *node.inputs} & {*over})
    named = list(dict.fromkeys(users))
    keep = " ".join(f"--keep-float32 {name!r}" for name in named[:_MOST_NAMED])
    more = f" (and {len(named) - _MOST_NAMED} more)" if len(named) > _MOST_NAMED else ""
    others = f"; so do {len(over) - 1} others" if len(over) > 1 else ""
    raise BadInputError(
        f"{model.path}: tensor {over[0]!r} reaches {ranges[over[0]]:g} on the example inputs, and "
        f"float16 ends at {FLOAT16_MAX:g}{others}",
        hint=f"use --precision bfloat16, or leave float32 what makes and uses it: {keep}{more}",
    )

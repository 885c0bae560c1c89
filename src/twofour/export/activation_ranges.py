"""How large the tensors between the layers of a float32 ONNX file become, before they are halved.

Asked of the file as it came: ONNX Runtime's CPU provider computes most of a float16 graph in
float32 and drops the casts in between, so that the converted file does not show what overflows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from twofour.errors import BadInputError
from twofour.export.float32_file import load_float32
from twofour.graph_tensors import Array

FLOAT16_MAX = float(np.finfo(np.float16).max)
_MASKED = 0.99 * float(np.finfo(np.float32).max)
"""From here on it is float32's own limit: a mask, which is float16's limit in the new file."""
_PREFIX = "largest value of "
_MOST_NAMED = 6


def write_with_ranges(source: Path, target: Path, tensors: Sequence[str]) -> None:
    """Write `source` with one more output per tensor of its main graph: its largest magnitude."""
    model = load_float32(source)
    graph = model.graph
    made = {value.name: value for node in graph for value in node.outputs}
    made.update((value.name, value) for value in graph.inputs)
    for name in tensors:
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
    own = {name: array for name, array in outputs.items() if not name.startswith(_PREFIX)}
    ranges = {
        name.removeprefix(_PREFIX): float(array)
        for name, array in outputs.items()
        if name.startswith(_PREFIX)
    }
    return own, ranges


def refuse_overflow(source: Path, ranges: Mapping[str, float]) -> None:
    """Raise BadInputError where a finite value of float32 is beyond float16, naming the nodes."""
    over = [name for name, value in ranges.items() if FLOAT16_MAX < value < _MASKED]
    if not over:
        return
    first = over[0]
    graph = load_float32(source).graph
    users = [
        node.name or node.op_type
        for node in graph
        for value in (*node.outputs, *node.inputs)
        if value is not None and value.name in over
    ]
    named = list(dict.fromkeys(users))
    keep = " ".join(f"--keep-float32 {name!r}" for name in named[:_MOST_NAMED])
    more = f" (and {len(named) - _MOST_NAMED} more)" if len(named) > _MOST_NAMED else ""
    raise BadInputError(
        f"{source}: tensor {first!r} reaches {ranges[first]:g} on the example inputs, and float16 "
        f"ends at {FLOAT16_MAX:g}" + (f"; so do {len(over) - 1} others" if len(over) > 1 else ""),
        hint=f"use --precision bfloat16, or leave float32 what makes and uses it: {keep}{more}",
    )

"""Ranges of activations, and those that float16 does not reach."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from twofour.export.float32 import FLOAT, plan_casts
from twofour.graph.files import Array

FLOAT16_MAX = float(np.finfo(np.float16).max)
MASKED = 0.99 * float(np.finfo(np.float32).max)
"""From here on it is float32's own limit: a mask, which is float16's limit in the new file."""
_PREFIX = "largest value of "


def write_with_ranges(model: ir.Model, target: Path, keep: tuple[str, ...]) -> None:
    """Write a float32 model with one more output per tensor that float16 would round.

    That is its largest magnitude. `keep` are globs of nodes that stay float32; tensors inside
    subgraphs are not asked for.
    """
    graph = model.graph
    values = plan_casts(model, ir.DataType.FLOAT16, keep).narrowed
    for value in dict.fromkeys(values):
        maker = value.producer()
        if (value.graph if maker is None else maker.graph) is not graph:
            continue
        magnitude = ir.node("Abs", [value])
        largest = ir.Value(
            name=f"{_PREFIX}{value.name}", type=ir.TensorType(FLOAT), shape=ir.Shape([])
        )
        reduce = ir.node("ReduceMax", magnitude.outputs, {"keepdims": 0}, outputs=[largest])
        graph.extend([magnitude, reduce])
        graph.outputs.append(largest)
    ir.save(model, target, external_data=f"{target.name}.data")


def split_ranges(outputs: Mapping[str, Array]) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The model's own outputs, and the tensors with finite values that are beyond float16."""
    own = dict(outputs)
    added = [name for name in own if name.startswith(_PREFIX)]
    ranges = {name.removeprefix(_PREFIX): float(own.pop(name)) for name in added}
    return own, tuple(name for name, value in ranges.items() if FLOAT16_MAX < value < MASKED)

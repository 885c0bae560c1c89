"""What ONNX Runtime gives for a model on the CPU, and files with Q/DQ nodes made by it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from support.onnx_models import Array, load
from twofour.export.ir_models import save
from twofour.export.quantize import quantized
from twofour.graph.opened import open_onnx


def outputs(
    source: Path | onnx.ModelProto, inputs: Mapping[str, Array], *inner: str
) -> dict[str, Array]:
    """All outputs by name, behind these inner tensors; without fusions, which round otherwise."""
    model = onnx.ModelProto()
    model.CopyFrom(load(source) if isinstance(source, Path) else source)
    for place, name in enumerate(inner):
        model.graph.output.insert(place, onnx.ValueInfoProto(name=name))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def write_quantized(path: Path, target: Path, inputs: Mapping[str, Array]) -> str:
    """Write the file with Q/DQ nodes and give what was said."""

    def tensors_of(written: Path) -> list[dict[str, Array]]:
        return [{**inputs, **outputs(written, inputs)}]

    with quantized(open_onnx(path), target.parent, tensors_of) as (graph, words):
        save(graph, target, path)
    return words


def cosine(one: Array, other: Array) -> float:
    """Of all values as one vector."""
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))

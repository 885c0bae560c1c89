"""What ONNX Runtime gives for a model on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnxruntime

from support.onnx_models import Array, load


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

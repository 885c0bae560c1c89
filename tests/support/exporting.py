"""A module exported by hand, as a run does it: traced, its weights stored, the passes run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from torch import nn

from twofour.export.calls import bind
from twofour.export.passes import GraphExport
from twofour.export.tracing import trace, write_graph
from twofour.graph.stored import read_stores
from twofour.pipeline.torch.weight_files import save_tensors
from twofour.records.export import LayerMap
from twofour.records.options import ExportOptions


def export_onnx(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Path,
    options: ExportOptions,
) -> LayerMap:
    """Write `target` and its weights, and give the names of its layers."""
    with tempfile.TemporaryDirectory() as folder:
        traced = trace(module, bind(module, args, kwargs), options)
        weights = Path(folder, "dense.safetensors")
        save_tensors(module.state_dict(), weights, first=frozenset(traced.model.graph.initializers))
        write_graph(traced, read_stores([weights]), Path(folder, "graph.onnx"))
        graph = onnx.load(Path(folder, "graph.onnx"), load_external_data=False)
        return GraphExport(graph, options).write(read_stores([weights]), target)

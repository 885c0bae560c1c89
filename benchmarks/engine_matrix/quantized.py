"""INT8 in the form that every TensorRT reads: float weights behind QuantizeLinear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from twofour.engines.onnxruntime.session import LEVELS, OrtSession
from twofour.export.quantize import quantized
from twofour.graph.opened import open_onnx


def quantize(source: Path, target: Path, examples: dict[str, np.ndarray]) -> None:
    """Write the file that a run with `--quantize int8` writes, in float32 beside the products."""

    def tensors_of(path: Path) -> Iterator[dict[str, np.ndarray]]:
        with OrtSession(path, level=LEVELS[-1]) as session:
            yield {**examples, **session.outputs(examples)}

    with quantized(open_onnx(source), target.parent, tensors_of) as (model, _):
        ir.save(model, target, external_data=f"{target.name}.data")

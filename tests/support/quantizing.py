"""Files with Q/DQ nodes, made as a run makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from support.ort import outputs
from twofour.export.ir_models import save
from twofour.export.quantize import quantized
from twofour.graph.opened import open_onnx

Arrays = dict[str, npt.NDArray[Any]]


def write_quantized(path: Path, target: Path, inputs: Arrays) -> str:
    """Write the file with Q/DQ nodes and give what was said."""

    def tensors_of(written: Path) -> list[Arrays]:
        return [{**inputs, **outputs(written, inputs)}]

    with quantized(open_onnx(path), target.parent, tensors_of) as (graph, words):
        save(graph, target, path)
    return words


def cosine(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Of all values as one vector."""
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))

"""Inputs of models in words, and calibration data opened for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.inputs.samples import CalibrationData, ModelInputs
from twofour.records.export import TensorShape
from twofour.records.options import CalibrationOptions
from twofour.sources.calibration.kinds import onnx_inputs, open_calibration


def onnx_model(
    file: Path = Path("model.onnx"), /, **inputs: tuple[str, tuple[int | str, ...]]
) -> ModelInputs:
    """What an ONNX file takes: type and shape of each input."""
    tensors = [
        TensorShape(name=n, dtype=dtype, shape=shape) for n, (dtype, shape) in inputs.items()
    ]
    return onnx_inputs(file, tensors)


def joined(data: CalibrationData, name: str = "x") -> NDArray[Any]:
    """All samples of an input in one array."""
    return np.concatenate([batch.arrays[name] for batch in data.batches()])


def opened(path: Path | str, inputs: ModelInputs, **options: Any) -> CalibrationData:
    """The data for that model; `options` are fields of CalibrationOptions."""
    return open_calibration(CalibrationOptions(data=str(path), **options), inputs)

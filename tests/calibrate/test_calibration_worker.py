"""What the process that runs an ONNX graph on calibration data adds up."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from twofour.calibrate.onnx.input_rows import InputReading, Spatial
from twofour.calibrate.onnx.pieces import BatchFile, CalibrationWorker, Tap
from twofour.pruning.matrices import Layout

_POINTWISE = InputReading(
    layout=Layout(shape=(1, 100, 1, 1), axis=1, m=4, convolution=True),
    spatial=Spatial(
        kernel=(1, 1),
        stride=(1, 1),
        dilation=(1, 1),
        pads=((0, 0), (0, 0)),
        auto_pad="NOTSET",
        transposed=False,
        output_padding=(),
        output_shape=None,
    ),
)


def test_samples_of_different_batches_show_different_places(tmp_path: Path) -> None:
    """Each place has its own channel, so that the Gram matrix counts how often it is seen."""
    np.savez(tmp_path / "x.npz", x=np.eye(100, dtype=np.float32).reshape(1, 100, 10, 10))
    batches = [BatchFile(path=tmp_path / "x.npz", samples=1, first=at) for at in range(100)]
    worker = CalibrationWorker(lambda *_: None)
    worker.begin(tmp_path, batches)
    tap = Tap(tensor="x", reading=_POINTWISE, layer="conv")
    (found,) = worker.look([tap], [], frozenset(), "all").statistics
    assert found is not None
    assert found.held_out is not None
    for inputs, samples in ((found.seen, 90), (found.held_out, 10)):
        assert inputs.rows == samples * 64
        assert np.abs(np.diagonal(inputs.gram[0]) - 0.64 * samples).max() <= 4

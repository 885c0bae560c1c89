"""The ONNX files: dense, opset 17, float16 with float32 inputs and outputs, and INT8."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine_matrix.plan import FLOAT16, INT8, MODELS
from engine_matrix.sweep import CHAINS, OPSET, write_sweep
from twofour.graph.opened import open_onnx
from twofour.inputs.fits import numpy_type

DENSE = "dense.onnx"
_HERE = Path(__file__).parent
_REAL = ("resnet50", "bert_base", "vit_base")
"""Of real_models.py; the others are of nets.py."""
_CALIBRATION_ROWS = 2


def make(nets: Sequence[str], target: Path, precisions: Sequence[str]) -> list[str]:
    """Write what is missing below `target`; gives what failed, with its last words."""
    failures = []
    for net in nets:
        for precision in precisions:
            folder = target / f"{net}-{precision}"
            if (folder / DENSE).is_file():
                continue
            try:
                _make_one(net, precision, target)
            except Exception as error:  # noqa: BLE001  # the other networks are wanted all the same
                failures.append(f"{folder.name}: {error}")
    return failures


def _make_one(net: str, precision: str, target: Path) -> None:
    """The folder gets its name when it is whole."""
    folder = target / f"{net}-{precision}"
    unfinished = target / f"{folder.name}.part"
    for left in (folder, unfinished):
        shutil.rmtree(left, ignore_errors=True)
    unfinished.mkdir(parents=True)
    if precision == INT8:
        from engine_matrix.quantized import quantize

        source = target / f"{net}-{FLOAT16}" / DENSE
        quantize(source, unfinished / DENSE, _examples(source))
    elif net in MODELS:
        file = _HERE.parent / "real_models.py" if net in _REAL else _HERE / "nets.py"
        _export(f"{file}:{net}", unfinished)
    else:
        write_sweep(CHAINS[net.removeprefix("sweep_")], unfinished / DENSE)
    unfinished.rename(folder)


def _export(source: str, folder: Path) -> None:
    command = [sys.executable, "-m", "twofour", "export", source, "--out", str(folder)]
    # a run for TensorRT takes a number for every dimension but the batch
    fixed = ["--dynamic", "none"]
    options = ["--opset", str(OPSET), "--precision", FLOAT16, *fixed, "--quiet"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())


def _examples(model: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for tensor in open_onnx(model).inputs:
        dtype, dims = numpy_type(tensor.dtype), [_CALIBRATION_ROWS, *map(int, tensor.shape[1:])]
        whole = np.issubdtype(dtype, np.integer)
        array = rng.integers(0, 1000, dims) if whole else rng.standard_normal(dims)
        arrays[tensor.name] = array.astype(dtype)
    return arrays

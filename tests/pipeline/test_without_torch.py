"""ONNX in, ONNX out: nothing of that chain needs torch, so that a TensorRT box can do it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support import onnx_models as om

_COMMAND = "from twofour.cli import main; main()"
_MISSING = "raise ModuleNotFoundError('No module named {name}', name='{name}')\n"
_TORCH = ("torch", "onnxscript", "onnx_ir", "transformers", "safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One Conv of 8 to 8 channels."""
    ends = ("batch", 8, 6, 6), ("batch", 8, 4, 4)
    return om.one_layer(tmp_path / "conv.onnx", "Conv", om.weights(8, 8, 3, 3), ends)


def _run(blocked: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where these packages are missing, for its worker processes as well."""
    with tempfile.TemporaryDirectory() as folder:
        for name in blocked:
            Path(folder, f"{name}.py").write_text(_MISSING.format(name=name))
        path = os.pathsep.join([folder, *sys.path])
        return subprocess.run(
            [sys.executable, "-c", _COMMAND, *arguments],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )


def test_the_whole_chain_runs_on_an_onnx_file_without_torch(model: Path, tmp_path: Path) -> None:
    done = _run(_TORCH, "prune-export-build", str(model), "--out", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    weights = {
        t.name: numpy_helper.to_array(t)
        for t in onnx.load(tmp_path / "r" / "sparse.onnx").graph.initializer
    }
    assert float(np.mean(weights["w"] == 0)) == 0.5


@pytest.mark.parametrize("command", ["prune", "validate", "report"])
def test_onnx_commands_need_neither_torch_nor_onnxruntime(
    model: Path, tmp_path: Path, command: str
) -> None:
    arguments = {
        "prune": ["prune", str(model), "--out", str(tmp_path / "r")],
        "validate": ["validate", str(model)],
        "report": ["report", "--onnx", str(model)],
    }[command]
    done = _run((*_TORCH, "onnxruntime"), *arguments)
    assert done.returncode == (4 if command == "validate" else 0), done.stderr
    assert "conv" in done.stdout


def test_an_onnx_file_is_pruned_with_calibration_data_without_torch(
    model: Path, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).normal(0.5, size=(24, 8, 6, 6)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    data = ["--calibrate", str(tmp_path / "x.npz"), "--method", "admm"]
    done = _run(_TORCH, "prune", str(model), *data, "--out", str(tmp_path / "r"), "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    (row,) = record["weights"]
    assert (row["method"], row["pruned"]) == ("admm", True)
    assert 0 < row["output_error"]["calibration"] < 0.15
    assert record["calibration"]["samples"] == 24
    assert not (tmp_path / "r" / "stages" / "calibration").exists()


def test_a_missing_engine_is_exit_3_with_what_to_install(model: Path, tmp_path: Path) -> None:
    done = _run(("onnxruntime", "tensorrt"), "build", str(model), "--out", str(tmp_path / "r"))
    assert done.returncode == 3
    assert "pip install onnxruntime" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["prune", "model.py:make"],
        ["export", "model.py:make"],
        ["prune-export-build", "timm:resnet18"],
        ["validate", "weights.pt"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_that_needs_torch_says_what_to_install(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("import torch\n\ndef make(): return torch.nn.Linear(8, 8)\n")
    (tmp_path / "weights.pt").write_bytes(b"PK")
    done = _run(_TORCH, *arguments)
    assert done.returncode == 3, done.stderr
    assert "the Python package torch" in done.stderr
    assert "pip install torch" in done.stderr

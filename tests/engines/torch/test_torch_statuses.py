from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from twofour.engines.tensorrt.plan import GPU
from twofour.engines.torch.engine import MODES, TorchEngine, TorchTensorRtEngine
from twofour.records.latency import SPARSITY_OFF

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from twofour.engines.protocol import ENGINES
for name in ("torch", "torch-tensorrt"):
    engine = ENGINES[name].engine()
    for mode in engine.modes:
        status = engine.status(mode.name)
        print(f"{name}:{mode.name}", status.why_not, status.hint, sep="|")
"""


@no_gpu
def test_every_mode_says_what_is_missing() -> None:
    statuses = {f"torch:{mode}": TorchEngine().status(mode) for mode in MODES}
    for mode in (GPU, SPARSITY_OFF):
        statuses[f"torch-tensorrt:{mode}"] = TorchTensorRtEngine().status(mode)
    missing = {name: status.why_not for name, status in statuses.items() if status.why_not}
    assert set(missing) == {
        "torch:semi-structured-cusparselt",
        "torch:semi-structured-cutlass",
        "torch:sdpa-efficient",
        "torch:sdpa-cudnn",
        "torch:dynamic-int8",
        "torch:static-int8",
        "torch:torchscript",
        "torch:xla",
        f"torch-tensorrt:{GPU}",
        f"torch-tensorrt:{SPARSITY_OFF}",
    }
    assert set(missing) == {name for name, status in statuses.items() if not status.can_run}
    assert "onnxruntime:int8" in str(statuses["torch:static-int8"].hint)
    assert missing["torch:xla"].startswith("twofour does not run torch_xla")
    assert "need a GPU with sparse tensor cores" in missing["torch:semi-structured-cutlass"]
    assert "torch has this attention on GPUs only" in missing["torch:sdpa-cudnn"]


def test_without_torch_every_mode_says_so() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert finished.stderr == ""
    lines = [line.split("|") for line in finished.stdout.splitlines()]
    assert len(lines) == len(MODES) + 2
    of_torch = lines[: len(MODES)]
    assert all(line[1].startswith("torch cannot be imported") for line in of_torch)
    assert all(line[2] == "pip install torch" for line in of_torch)

from __future__ import annotations

import pytest
import torch

from twofour.engines.tensorrt.plan import GPU
from twofour.engines.torch.engine import MODES, TorchEngine, TorchTensorRtEngine
from twofour.records.latency import SPARSITY_OFF

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


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

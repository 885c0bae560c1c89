"""A model that does not fit in memory is traced, pruned and exported, array by array."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from twofour.jobs import run_all, run_forecast
from twofour.pipeline.torch.graph import give_back_memory
from twofour.records.options import ForecastOptions, RunOptions

HIDDEN, INNER = 4096, 11008
"""The widths of a Llama of 7 billion weights; one of its 32 blocks."""
LARGEST_BYTES = 4 * HIDDEN * INNER
"""The largest array in float32: 180 MB."""

CHILD = """
import json, sys, threading, time
from pathlib import Path
import twofour.pipeline.torch.graph as graph
import twofour.pipeline.checks as checks

graph.available_bytes = checks.available_bytes = lambda: 1 << 28  # a module in float32 takes 0.9 GB
from twofour.jobs import run_all
from twofour.records.options import RunOptions

peak = 0

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.01)

import torch, onnxscript, transformers  # what every run loads is no part of the model
from torch.onnx._internal.exporter import _core
started = anonymous()
threading.Thread(target=watch, daemon=True).start()
result = run_all(sys.argv[1], Path(sys.argv[2]), RunOptions())
print(json.dumps({
    "bytes": peak - started,
    "pruned": sum(row.pruned for row in result.prune.weights),
    "broken": len(result.export.pattern.broken),
    "why": result.accuracy.not_compared,
}))
"""


def saved_block(folder: Path, hidden: int, inner: int) -> str:
    """A checkpoint of a Llama of one block, in bfloat16."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=hidden // 32,
        vocab_size=512,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_block_of_a_large_model_takes_the_memory_of_some_arrays(tmp_path: Path) -> None:
    folder = saved_block(tmp_path / "block", HIDDEN, INNER)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, folder, str(tmp_path / "run")],
        check=True,
        capture_output=True,
        text=True,
        timeout=500,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["pruned"], found["broken"]) == (8, 0)
    assert "GB of memory" in found["why"]
    assert found["bytes"] < 5 * LARGEST_BYTES, "the weights alone are 0.8 GB in float32"


def test_a_module_for_which_memory_is_short_is_never_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("twofour.pipeline.torch.graph", "twofour.pipeline.checks"):
        monkeypatch.setattr(f"{module}.available_bytes", lambda: 1 << 16)
    result = run_all(saved_block(tmp_path / "block", 128, 256), tmp_path / "run", RunOptions())
    assert sum(row.pruned for row in result.prune.weights) == 8
    assert result.export.pattern.broken == ()
    assert "GB of memory" in (result.accuracy.not_compared or "")


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [("BertModel", "bert"), ("MixtralForCausalLM", "mixtral")],
)
def test_a_configuration_alone_is_forecast(kind: str, model_type: str, tmp_path: Path) -> None:
    config = {
        "architectures": [kind],
        "model_type": model_type,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 32,
        "num_local_experts": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ForecastOptions(gpus=("A100",), batches=(8,))
    (cell,) = run_forecast(str(tmp_path), asked, RunOptions()).cells
    assert any(layer.layer.endswith(("o_proj", "output.dense")) for layer in cell.layers)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


TIED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(512, 32)
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 512, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x)
        return self.head(self.query(x) + self.key(x).relu())

def make():
    return Net(), torch.zeros(2, 5, dtype=torch.int64)
"""


def test_without_weights_a_tied_head_is_shared_and_small_layers_are_not_taken_for_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "tied.py").write_text(TIED)
    asked = ForecastOptions(gpus=("A100",), batches=(8,))
    (cell,) = run_forecast(f"{tmp_path / 'tied.py'}:make", asked, RunOptions()).cells
    reasons = {layer.layer: layer.reason[:14] for layer in cell.layers}
    assert reasons == {
        "query": "SMALL_CHANNELS",
        "key": "SMALL_CHANNELS",
        "head": "SHARED_WEIGHT:",
    }


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_what_was_freed_between_what_is_kept_goes_back() -> None:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    tensors = [torch.ones(1 << 14) for _ in range(2000)]  # 64 KiB each, in the heap
    full = resident()
    tensors = tensors[::100]
    give_back_memory()
    assert resident() < full - (80 << 20)

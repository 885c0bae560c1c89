"""A model that does not fit in memory is traced, pruned and exported, array by array."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_run import Recorder
from transformers import LlamaConfig, LlamaForCausalLM

import twofour
from twofour.errors import BadInputError
from twofour.graph.stored import read_stores
from twofour.jobs import run_all, run_forecast, run_prune
from twofour.pattern import check
from twofour.pipeline.torch.graph import give_back_memory
from twofour.records.options import CalibrationOptions, ForecastOptions, RunOptions
from twofour.records.weights import PruneResult, ReasonCode
from twofour.store import read_record

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


def saved_llama(folder: Path, hidden: int, inner: int, blocks: int = 1, **options: str) -> str:
    """A checkpoint of a Llama in bfloat16."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // 32,
        vocab_size=512,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, **options)
    return str(folder)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_block_of_a_large_model_takes_the_memory_of_some_arrays(tmp_path: Path) -> None:
    folder = saved_llama(tmp_path / "block", HIDDEN, INNER)
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
    result = run_all(saved_llama(tmp_path / "block", 128, 256), tmp_path / "run", RunOptions())
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


# --- a checkpoint that is pruned in a copy of its files -------------------------------------------


TWO_FOUR = twofour.Pattern(2, 4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    saved_llama(folder, 32, 64, 3, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def state(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def test_a_container_without_room_for_a_checkpoint_has_it_pruned_in_a_copy(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the machine has memory enough, the container's limit leaves none
    monkeypatch.setattr("twofour.engines.machine._text", lambda _: "1")
    folder, _, _ = run_prune(str(llama), tmp_path / "run", RunOptions())
    assert (folder / "checkpoint").is_dir()


def test_streamed_is_what_pruning_in_memory_gives(llama: Path, tmp_path: Path) -> None:
    seen = Recorder()
    options = RunOptions(stream=True)
    folder, result, validation = run_prune(str(llama), tmp_path / "run", options, seen)
    assert [n.split(" (")[0] for n in seen.notes if "vLLM" in n] == [
        "sparse kernels take an engine of prune-export-build: TensorRT-LLM builds no TensorRT "
        "engines any more: trtllm-build and its --weight_sparsity are gone"
    ]
    pruned, dense = state(folder / "checkpoint"), state(llama)
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    expected = twofour.prune(model)
    assert {k: v.dtype for k, v in pruned.items()} == {k: v.dtype for k, v in dense.items()}
    for key, tensor in model.state_dict().items():
        assert torch.equal(pruned[key], tensor), key
    assert [(r.weight.layer, r.zeros, r.kept_magnitude) for r in result.weights] == [
        (r.weight.layer, r.zeros, r.kept_magnitude) for r in expected.weights
    ]
    assert len(validation.checks) == len(expected.weights)
    assert not validation.broken
    assert sum(c.required for c in validation.checks) == sum(r.pruned for r in expected.weights)
    copy = folder / "checkpoint"
    assert sorted(f.name for f in copy.iterdir()) == sorted(f.name for f in llama.iterdir())
    for file in llama.glob("*.safetensors"):
        length = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert (copy / file.name).read_bytes()[:length] == file.read_bytes()[:length]
    assert (copy / "config.json").read_bytes() == (llama / "config.json").read_bytes()


def test_a_streamed_folder_is_validated_like_any_other(llama: Path, tmp_path: Path) -> None:
    folder, result, _ = run_prune(str(llama), tmp_path / "run", RunOptions(stream=True))
    checked = twofour.validate(folder)
    assert len(checked.checks) == len(result.weights)
    assert not checked.broken
    record = read_record(PruneResult, folder / "prune.json")
    assert record.source == str(llama)
    key = next(r.weight.weight for r in record.weights if r.pruned)
    assert key is not None
    place = read_stores(sorted((folder / "checkpoint").glob("*.safetensors")))[key]
    with place.file.open("r+b") as file:
        file.seek(place.offset)
        file.write(b"\x3c" * place.size_bytes)
    assert [c.weight for c in twofour.validate(folder).broken] == [key]
    (folder / "checkpoint" / "generation_config.json").write_text("{}")
    assert any("generation_config.json was changed" in s for s in twofour.validate(folder).stale)


def test_nan_in_a_shard_is_named(llama: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(BadInputError, match=r"layers\.1\.mlp\.up_proj.*1 of 2048 values"):
        run_prune(str(tmp_path / "nan"), tmp_path / "run", RunOptions(stream=True))


def test_a_weight_in_eight_bits_is_left_and_says_why(llama: Path, tmp_path: Path) -> None:
    folder, key = tmp_path / "eight", "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(llama, folder)
    (file,) = [f for f in folder.glob("*.safetensors") if key in load_file(f)]
    tensors = load_file(file)
    save_file({**tensors, key: tensors[key].to(torch.float8_e4m3fn)}, file)
    out, result, _ = run_prune(str(folder), tmp_path / "run", RunOptions(stream=True))
    (row,) = [row for row in result.weights if row.weight.weight == key]
    assert (row.pruned, row.zeros, row.reasons[0].code) == (False, 0, ReasonCode.DTYPE)
    assert sum(row.pruned for row in result.weights) == len(result.weights) - 1
    assert torch.equal(state(out / "checkpoint")[key].float(), state(folder)[key].float())


def test_stream_is_refused_where_there_is_nothing_to_stream(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(8, 8)\n")
    with pytest.raises(BadInputError, match="is no checkpoint folder"):
        run_prune(f"{tmp_path}/m.py:make", tmp_path / "run", RunOptions(stream=True))


def test_other_weights_than_the_config_says_are_named(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    LlamaForCausalLM.from_pretrained(llama).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 4}))
    with pytest.raises(BadInputError, match="no weights for 9"):
        run_prune(str(folder), tmp_path / "run", RunOptions(stream=True))


@pytest.mark.parametrize("in_a_copy", [pytest.param(False, marks=pytest.mark.full), True])
def test_with_data_a_checkpoint_goes_through_its_graph(
    in_a_copy: bool, llama: Path, tmp_path: Path
) -> None:
    ids = np.random.default_rng(0).integers(0, 96, (12, 6))
    np.savez(tmp_path / "ids.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    options = RunOptions(calibration=CalibrationOptions(data=str(tmp_path / "ids.npz")))
    options = replace(options, stream=in_a_copy)
    folder, result, validation = run_prune(str(llama), tmp_path / "run", options)
    assert (folder / "checkpoint").exists() is in_a_copy
    assert not validation.broken
    assert {row.method for row in result.weights} == {"admm"}
    assert all(row.output_error is not None for row in result.weights)
    copy = folder / "checkpoint"
    pruned = state(copy) if in_a_copy else load_file(folder / "weights.safetensors")
    dense = state(llama)
    assert {k: v.dtype for k, v in pruned.items()} == {k: v.dtype for k, v in dense.items()}
    assert all(
        check(pruned[row.weight.weight or ""].float().numpy(), 1, TWO_FOUR).holds
        for row in result.weights
    )


def test_a_run_folder_within_the_checkpoint_is_not_copied_into_itself(
    llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama, tmp_path / "c")
    (tmp_path / "c" / "more").mkdir()
    (tmp_path / "c" / "more" / "notes.txt").write_text("the user's")
    out = tmp_path / "c" / "runs" / "r"
    run_prune(str(tmp_path / "c"), out, RunOptions(stream=True))
    assert (out / "checkpoint" / "more" / "notes.txt").is_file()
    assert list((out / "checkpoint" / "runs").iterdir()) == []
    recorder = Recorder()
    run_prune(str(tmp_path / "c"), out, RunOptions(stream=True, resume=True), recorder)
    assert recorder.did == []

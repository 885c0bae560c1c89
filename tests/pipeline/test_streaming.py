"""A checkpoint that goes through memory tensor by tensor comes out as one that fits in it would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_run import Recorder
from transformers import (
    AlbertConfig,
    AlbertModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import twofour
from twofour.calibrate.finished_steps import FinishedSteps
from twofour.calibrate.torch.block_loop import BlockLoop
from twofour.calibrate.torch.blocks import WeightGroup
from twofour.calibrate.torch.products import StopForward
from twofour.errors import BadInputError
from twofour.main_job import run_prune
from twofour.pattern import check
from twofour.pruning.solve import SolvedLayer
from twofour.pruning.torch.module import CheckpointFiles, StreamedModule
from twofour.pruning.torch.module_layers import without_values
from twofour.records.options import (
    CalibrationOptions,
    MethodOptions,
    RunOptions,
)
from twofour.records.weights import PruneResult, ReasonCode, Selection
from twofour.store import read_record

TWO_FOUR = twofour.Pattern(2, 4)


def config(**changes: object) -> LlamaConfig:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaConfig(**{**sizes, **changes})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    model = LlamaForCausalLM(config()).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def state(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


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


def test_the_copy_has_the_same_files_and_headers(llama: Path, tmp_path: Path) -> None:
    folder, _, _ = run_prune(str(llama), tmp_path / "run", RunOptions(stream=True))
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
    files = CheckpointFiles(sorted((folder / "checkpoint").glob("*.safetensors")), writable=True)
    files.write(key, torch.ones_like(files.read(key)))
    assert [c.weight for c in twofour.validate(folder).broken] == [key]
    (folder / "checkpoint" / "generation_config.json").write_text("{}")
    assert any("generation_config.json was changed" in s for s in twofour.validate(folder).stale)


def test_an_index_that_names_other_tensors_than_the_shards_is_refused(
    llama: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(llama, tmp_path / "copy"))
    twofour.validate(copy)
    index = copy / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    first, *others = sorted(whole["weight_map"])
    for changed in (
        {key: whole["weight_map"][key] for key in others},
        {**whole["weight_map"], first: whole["weight_map"][others[0]]},
    ):
        index.write_text(json.dumps({**whole, "weight_map": changed}))
        with pytest.raises(BadInputError, match=f"differ in where {first} is"):
            twofour.validate(copy)


def test_selection_and_a_second_run(llama: Path, tmp_path: Path) -> None:
    options = RunOptions(stream=True, selection=Selection(exclude=("*.q_proj",)))
    folder, result, _ = run_prune(str(llama), tmp_path / "run", options)
    left = [r.weight.layer for r in result.weights if not r.pruned]
    assert left == [f"model.layers.{n}.self_attn.q_proj" for n in range(3)]
    before = (folder / "checkpoint" / "config.json").stat().st_mtime_ns
    run_prune(str(llama), tmp_path / "run", options)
    assert (folder / "checkpoint" / "config.json").stat().st_mtime_ns == before


def test_a_tied_head_is_left_to_its_embedding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "tied")
    _, result, validation = run_prune(
        str(tmp_path / "tied"), tmp_path / "run", RunOptions(stream=True)
    )
    head = next(r for r in result.weights if r.weight.layer == "lm_head")
    assert not head.pruned
    assert head.weight.weight == "model.embed_tokens.weight"
    assert not validation.broken


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
    with pytest.raises(BadInputError, match=r"no weights for 9 parameters of LlamaForCausalLM"):
        run_prune(str(folder), tmp_path / "run", RunOptions(stream=True))


def test_a_module_runs_from_files_as_it_does_from_memory(llama: Path) -> None:
    whole = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).eval()
    with without_values():
        bare = LlamaForCausalLM(config()).eval()
    assert all(p.is_meta for p in bare.parameters())
    files = CheckpointFiles(sorted(llama.glob("*.safetensors")))
    streamed = StreamedModule(bare, files)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(bare(ids).logits, whole(ids).logits)
        assert all(p.is_meta for p in bare.parameters())
        with streamed.held(bare.model.layers[0]):
            assert not any(p.is_meta for p in bare.model.layers[0].parameters())
            assert torch.equal(bare(ids).logits, whole(ids).logits)
    assert all(p.is_meta for p in bare.parameters())


def test_a_forward_that_is_broken_off_holds_nothing_behind_its_block(llama: Path) -> None:
    with without_values():
        bare = LlamaForCausalLM(config()).eval()
    streamed = StreamedModule(bare, CheckpointFiles(sorted(llama.glob("*.safetensors"))))
    block = bare.model.layers[0]

    def break_off(*_: object) -> None:
        raise StopForward

    block.mlp.up_proj.register_forward_pre_hook(break_off)
    hidden = torch.ones(1, 3, 32, dtype=torch.bfloat16)
    with torch.no_grad(), streamed.held(block), pytest.raises(StopForward):
        block(
            hidden,
            position_embeddings=bare.model.rotary_emb(hidden, torch.arange(3)[None]),
        )
    assert all(p.is_meta for p in bare.parameters())


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "ids.npz"
    ids = np.random.default_rng(0).integers(0, 96, (24, 12))
    np.savez(file, input_ids=ids, attention_mask=np.ones_like(ids))
    return file


@pytest.mark.parametrize("method", ["wanda", "admm"])
def test_blocks_are_calibrated_as_in_memory(
    method: str, llama: Path, tokens: Path, tmp_path: Path
) -> None:
    options = RunOptions(
        stream=True,
        method=MethodOptions(name=method),
        calibration=CalibrationOptions(data=str(tokens)),
    )
    folder, result, validation = run_prune(str(llama), tmp_path / "run", options)
    assert not validation.broken
    assert result.calibration is not None
    assert (result.method, result.calibration.samples) == (method, 24)
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    batches = list(np.load(tokens)["input_ids"].reshape(3, 8, 12))
    expected = twofour.prune(model, method=method, calibrate=batches)
    for found, wanted in zip(result.weights, expected.weights, strict=True):
        assert found.method == wanted.method == method, found.weight.layer
        assert found.output_error is not None
        assert wanted.output_error is not None
        assert found.output_error.calibration == pytest.approx(
            wanted.output_error.calibration, rel=0.1, abs=1e-3
        )
    pruned = state(folder / "checkpoint")
    first = pruned["model.layers.0.self_attn.q_proj.weight"]
    assert check(first.float().numpy(), 1, TWO_FOUR).holds
    same = (first == model.model.layers[0].self_attn.q_proj.weight).float().mean()
    assert float(same) > 0.98


def test_activations_that_do_not_fit_go_to_files(
    llama: Path,
    by_data: RunOptions,
    whole: tuple[Path, PruneResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twofour.pruning.torch.calls.MEMORY_BYTES", 0)
    in_files, _, _ = run_prune(str(llama), tmp_path / "b", by_data)
    one, other = state(whole[0] / "checkpoint"), state(in_files / "checkpoint")
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_later_batch_that_the_model_cannot_run_on_is_named(llama: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 96, (24, 12))
    ids[10, 3] = 96
    np.savez(tmp_path / "ids.npz", input_ids=ids)
    options = RunOptions(
        stream=True, calibration=CalibrationOptions(data=str(tmp_path / "ids.npz"))
    )
    with pytest.raises(BadInputError, match=r"forward fails on calibration batch 2 .*IndexError"):
        run_prune(str(llama), tmp_path / "run", options)


@pytest.fixture(scope="module")
def by_data(tokens: Path) -> RunOptions:
    calibration = CalibrationOptions(data=str(tokens))
    return RunOptions(stream=True, method=MethodOptions(name="wanda"), calibration=calibration)


@pytest.fixture(scope="module")
def whole(
    llama: Path, by_data: RunOptions, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PruneResult]:
    """A run that nothing stopped, in two threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "2")
        folder, result, _ = run_prune(str(llama), tmp_path_factory.mktemp("whole") / "run", by_data)
    return folder, result


def stopped(model: Path, out: Path, options: RunOptions) -> list[str]:
    """Stop a run while it writes the second block; the names that were written until then."""
    write, written = CheckpointFiles.write, list[str]()

    def stopping(files: CheckpointFiles, name: str, tensor: torch.Tensor) -> None:
        if name == "model.layers.1.self_attn.o_proj.weight":
            raise KeyboardInterrupt
        write(files, name, tensor)
        written.append(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFiles, "write", stopping)
        with pytest.raises(KeyboardInterrupt):
            run_prune(str(model), out, options)
    return written


def test_a_run_that_was_stopped_goes_on_behind_the_last_block_with_the_same_bits(
    llama: Path,
    by_data: RunOptions,
    whole: tuple[Path, PruneResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    written = stopped(llama, tmp_path / "run", by_data)
    assert sum(name.startswith("model.layers.1.") for name in written) > 0
    solved: list[str] = []
    steps = BlockLoop._steps

    def counted(loop: BlockLoop, group: WeightGroup, *rest: Any, keep: bool) -> Any:
        solved.append(group.block or "")
        return steps(loop, group, *rest, keep=keep)

    monkeypatch.setattr(BlockLoop, "_steps", counted)
    folder, result, _ = run_prune(str(llama), tmp_path / "run", by_data)
    assert solved == ["model.layers.1", "model.layers.2", "lm_head"]
    assert result == whole[1]
    one, other = state(whole[0] / "checkpoint"), state(folder / "checkpoint")
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not (folder / "stages" / "streamed").exists()


def test_a_block_is_on_the_disk_before_it_counts_as_done(
    llama: Path, by_data: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(CheckpointFiles, "sync", lambda _, keys: order.extend(["synced", *keys]))
    save = FinishedSteps.save

    def noted(self: FinishedSteps, names: Sequence[str], solved: Mapping[str, SolvedLayer]) -> None:
        order.append(names[0])
        save(self, names, solved)

    monkeypatch.setattr(FinishedSteps, "save", noted)
    written = stopped(llama, tmp_path / "run", by_data)
    first = [name for name in written if name.startswith("model.layers.0.")]
    assert order == ["the copy is whole", "synced", *first, first[0]]
    assert (tmp_path / "run" / "stages" / "streamed").exists()
    run_prune(str(llama), tmp_path / "run", RunOptions(stream=True))
    assert not (tmp_path / "run" / "stages" / "streamed").exists()


def test_the_users_own_files_are_never_written(llama: Path) -> None:
    files = CheckpointFiles(sorted(llama.glob("*.safetensors")))
    key = min(files.keys)
    with pytest.raises(AssertionError, match="the user's own files"):
        files.write(key, files.read(key))


def test_an_encoder_and_its_decoder_are_two_chains(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, num_layers=2, decoder_start_token_id=0))
    model.save_pretrained(tmp_path / "t5")
    ids = np.random.default_rng(0).integers(0, 64, (20, 8))
    np.savez(tmp_path / "ids.npz", input_ids=ids, decoder_input_ids=ids)
    options = RunOptions(
        stream=True, calibration=CalibrationOptions(data=str(tmp_path / "ids.npz"))
    )
    _, result, validation = run_prune(str(tmp_path / "t5"), tmp_path / "run", options)
    assert not validation.broken
    pruned = [row for row in result.weights if row.pruned]
    assert len(pruned) == 2 * 6 + 2 * 10
    assert all(row.output_error is not None for row in pruned)


def test_blocks_that_run_more_than_once_are_calibrated_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_hidden_layers": 3, "embedding_size": 16}
    model = AlbertModel(AlbertConfig(**sizes, **heads, num_hidden_groups=2, inner_group_num=2))
    model.save_pretrained(tmp_path / "albert")
    np.savez(tmp_path / "ids.npz", input_ids=np.ones((20, 8), np.int64))
    options = RunOptions(
        stream=True, calibration=CalibrationOptions(data=str(tmp_path / "ids.npz"))
    )
    _, result, validation = run_prune(str(tmp_path / "albert"), tmp_path / "run", options)
    assert not validation.broken
    assert all(row.output_error is not None for row in result.weights if row.pruned)


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
    run_prune(str(tmp_path / "c"), out, RunOptions(stream=True), recorder)
    assert recorder.did == []

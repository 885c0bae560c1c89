"""Blocks whose outputs are kept give the same result as running everything each time."""

from __future__ import annotations

import copy
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from support.calibrated import TWO_FOUR
from torch import Tensor, nn

import twofour
from twofour.calibrate.torch.block_loop import calibration_task, prune_calibrated
from twofour.calibrate.torch.blocks import Blocks, parts_of
from twofour.errors import BadInputError
from twofour.pruning.resources import give_back_memory
from twofour.pruning.torch.calls import Call, TreeStore, tree_store
from twofour.records.options import MethodOptions
from twofour.records.weights import Calibration, Selection

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
    ),
    "albert": lambda: transformers.AlbertModel(
        transformers.AlbertConfig(**SIZES, embedding_size=8)
    ),
}


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[9], [5], [7]])
    return [
        {
            "input_ids": torch.randint(0, 64, (3, 9), generator=generator),
            "attention_mask": (torch.arange(9)[None] < lengths).long(),
        }
        for _ in range(3)
    ]


def same_state(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_models_of_transformers_are_calibrated_block_by_block(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    whole = copy.deepcopy(model)
    result = twofour.prune(model, calibrate=texts(), method="wanda", refit=0)
    monkeypatch.setattr("twofour.calibrate.torch.block_loop.parts_of", lambda *_, **__: {})
    assert twofour.prune(whole, calibrate=texts(), method="wanda", refit=0) == result
    assert same_state(model, whole)
    assert all(row.output_error is not None for row in result.weights if row.pruned)


def pruned_in(
    memory_bytes: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[nn.Module, int]:
    """A pruned model, and how many kept outputs were let go on the way, one by one."""
    torch.manual_seed(0)
    model, gone = MODELS[name](), []
    drop = TreeStore.drop

    def counted(kept: TreeStore, group: Hashable, key: Hashable | None = None) -> None:
        gone.extend([] if key is None or not kept.has(group, key) else [key])
        drop(kept, group, key)

    monkeypatch.setattr(TreeStore, "drop", counted)
    task = replace(
        calibration_task(TWO_FOUR, MethodOptions(name="wanda")), memory_bytes=memory_bytes
    )
    calls = [Call(args=(), kwargs=text, samples=3) for text in texts()]
    about = Calibration(source="texts", samples=9, held_out=0)
    prune_calibrated(model, calls, about, task, Selection())
    monkeypatch.undo()
    return model, len(gone)


@pytest.mark.parametrize(("name", "chained"), [("llama", True), ("albert", False)])
def test_what_does_not_fit_into_memory_goes_to_files_and_is_let_go(
    name: str, chained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pruned_in(1 << 20, name, monkeypatch)
    small, gone = pruned_in(2000, name, monkeypatch)
    assert (gone > 0) is chained
    assert same_state(model, small)


def without_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block has parts of its own."""
    monkeypatch.setattr(
        "twofour.calibrate.torch.block_loop.parts_of",
        lambda *args, **given: {} if "most" in given else parts_of(*args, **given),
    )


def products_run(model: nn.Module, parts: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many forwards of Linears pruning takes."""
    if not parts:
        without_parts(monkeypatch)
    ran: list[nn.Module] = []
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: ran.append(module) if isinstance(module, nn.Linear) else None
    )
    try:
        twofour.prune(model, calibrate=texts(), method="wanda", refit=0)
    finally:
        hook.remove()
        monkeypatch.undo()
    return len(ran)


def test_what_parts_of_a_block_gave_is_not_worked_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(MODELS["bert"]())
    with_parts = products_run(models[0], True, monkeypatch)
    without = products_run(models[1], False, monkeypatch)
    assert same_state(*models)
    assert with_parts < 0.75 * without


class TwoWays(nn.Module):
    """Which weights run hangs on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.one if float(x.sum()) > 0 else self.other)(x)
        return y


class Block(nn.Module):
    """With a part that is not finished when what comes behind it is."""

    def __init__(self) -> None:
        super().__init__()
        self.ways, self.last = TwoWays(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.ways(x))
        return y


def test_a_part_whose_weights_hang_on_the_data_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(8, 8))
    whole = copy.deepcopy(model)
    data = [torch.rand(9, 8), -torch.rand(9, 8)]
    result = twofour.prune(model, calibrate=data, method="wanda", refit=0)
    without_parts(monkeypatch)
    assert twofour.prune(whole, calibrate=data, method="wanda", refit=0) == result
    assert same_state(model, whole)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(BadInputError, match="no temporary folder"),
        tree_store(within=tmp_path / "no"),
    ):
        pass
    with tree_store(memory_bytes=0, within=tmp_path) as kept:
        (folder,) = tmp_path.iterdir()
        assert folder.name.startswith(".calibration.")
        folder.rmdir()
        with pytest.raises(BadInputError, match="cannot write intermediate results"):
            kept.put("block", 0, torch.ones(3))


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


_HOLES = """
import os
import numpy as np
from pathlib import Path
from twofour.pruning.resources import give_back_large_arrays

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

give_back_large_arrays()
np.ones(8 << 20, np.uint8)  # without the call glibc takes this size from its heap from now on
arrays = [np.ones(4 << 20, np.uint8) for _ in range(50)]
full = resident()
del arrays[:-1]
print(full - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_large_arrays_go_back_though_one_behind_them_is_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HOLES], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) > 180


def test_what_is_let_go_gives_its_file_back(tmp_path: Path) -> None:
    with tree_store(memory_bytes=0, within=tmp_path) as kept:
        (folder,) = tmp_path.iterdir()
        for number in range(2):
            kept.put("block", number, torch.full((4,), number))
        kept.drop("block", 0)
        assert not kept.has("block", 0)
        assert torch.equal(kept.get("block", 1), torch.ones(4, dtype=torch.long))
        assert len([*folder.iterdir()]) == 1


def test_kept_trees_come_back_with_their_strides_and_types() -> None:
    trees = [
        {"a": torch.randn(2, 3, 4).transpose(0, 2), "b": (None, "x", torch.tensor(3))},
        [torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.ones(0, 2)],
        torch.randn(3).bfloat16().expand(4, 3),
        torch.tensor([True, False]),
    ]
    for memory in (0, 1 << 20):
        with tree_store(memory_bytes=memory) as kept:
            for number, tree in enumerate(trees):
                assert kept.put("group", number, tree)
            first = kept.get("group", 0)
            assert torch.equal(first["a"], trees[0]["a"])  # type: ignore[index]
            assert first["a"].stride() == trees[0]["a"].stride()  # type: ignore[index]
            assert first["b"][:2] == (None, "x")
            second = kept.get("group", 1)
            assert second[0].is_contiguous(memory_format=torch.channels_last)
            assert second[1].shape == (0, 2)
            assert torch.equal(kept.get("group", 2), trees[2])  # type: ignore[arg-type]
            assert kept.get("group", 3).dtype is torch.bool
            first["a"].zero_()
            assert torch.equal(kept.get("group", 0)["a"], trees[0]["a"])  # type: ignore[index]
            kept.drop("group")
            assert not kept.has("group", 0)
            assert not kept.put("group", 4, torch.randn(3, 3).to_sparse())


class InPlace(nn.Module):
    """Changes what it is given, which its caller goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.relu_())
        return y


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = InPlace(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        y = self.first(x)
        z: Tensor = self.third(self.second(y) + x)
        return z


def test_a_block_that_changes_its_input_always_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Odd()
    whole, x = copy.deepcopy(model), torch.randn(9, 8)
    result = twofour.prune(model, calibrate=[x], method="wanda")
    monkeypatch.setattr("twofour.calibrate.torch.block_loop.parts_of", lambda *_, **__: {})
    assert twofour.prune(whole, calibrate=[x], method="wanda") == result
    assert same_state(model, whole)
    with tree_store() as kept:
        blocks = Blocks({"first": model.first}, kept)
        with blocks.installed(), torch.no_grad():
            blocks.begin(0, {"first"})
            model(x)
        assert blocks.impure == {"first"}


class Gradient(nn.Module):
    """Asks for a gradient through its first layer, which kept outputs do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            gradient = torch.autograd.grad(self.first(x).sum(), self.first.weight)[0]
        y: Tensor = self.second(x + gradient.sum())
        return y


def test_a_model_that_cannot_go_on_with_kept_outputs_runs_as_a_whole() -> None:
    torch.manual_seed(0)
    result = twofour.prune(Gradient(), calibrate=[torch.randn(9, 8)], method="wanda")
    assert all(row.output_error is not None for row in result.weights)


def test_large_parts_fall_into_their_children_and_weightless_ones_are_no_blocks() -> None:
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(14)))
    model = nn.Sequential(nn.Embedding(4, 4), deep, nn.GRU(4, 4), nn.LayerNorm(4))
    holders = {part for part in model.modules() if isinstance(part, nn.Linear)}
    assert list(parts_of("", model, holders)) == [*(f"1.{i}" for i in range(14)), "2"]

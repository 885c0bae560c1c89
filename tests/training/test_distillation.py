"""A pruned module trained to give the dense outputs again: on the clock, and after a stop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.export_nets import PaddedEncoder
from support.trained import lost, net, pruned_net, zeros
from torch import Tensor, nn

import twofour
from twofour.errors import BadInputError
from twofour.records.run import Finetuning
from twofour.sources.calibration.kinds import module_inputs
from twofour.sources.calibration.loaders import calibration_from_value
from twofour.training import distillation
from twofour.training.distillation import TrainingTask, distil


def batches(count: int = 40) -> list[Tensor]:
    torch.manual_seed(1)
    mixed = torch.randn(16, 16)
    return [torch.randn(8, 16) @ mixed for _ in range(count)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other take longer on so small a net
    yield
    torch.set_num_threads(threads)


def each_step_a_second(minutes: float = 3) -> TrainingTask:
    clock = itertools.count().__next__
    return TrainingTask(pattern=twofour.Pattern(2, 4), minutes=minutes, clock=clock)


def trained(
    student: nn.Module,
    task: TrainingTask,
    dense: nn.Module | None = None,
    data: list[Tensor] | None = None,
) -> Finetuning:
    given = calibration_from_value(data or batches(), module_inputs(student), where="batches")
    return distil(student, dense or net(), given, task)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda rate: monkeypatch.setattr(distillation, "LEARNING_RATE", rate)


def test_the_outputs_come_back_and_the_zeros_stay(faster: Callable[[float], None]) -> None:
    faster(1e-2)
    model = pruned_net()
    masks = zeros(model)
    result = trained(model, each_step_a_second())
    before, after = (result.measured[place].distance for place in (0, result.best))
    assert after < before / 2
    assert lost(model, masks) == 0
    assert (result.steps, result.weights, result.stopped) == (160, 2, None)
    assert result.blocks == ("0", "2")
    assert len(result.measured) == 21


def test_where_training_makes_it_worse_the_pruned_weights_are_kept(
    faster: Callable[[float], None],
) -> None:
    faster(30.0)
    model = pruned_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = trained(model, each_step_a_second())
    assert result.best == 0
    assert result.stopped is not None
    assert result.seconds < 100
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_dense_model_runs_once_for_each_batch_if_its_outputs_can_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once, often, dense = pruned_net(), pruned_net(), net()
    calls: list[int] = []
    dense.register_forward_hook(lambda *_: calls.append(1))
    result = trained(once, each_step_a_second(), dense)
    assert (result.steps, len(calls)) == (160, 40)
    calls.clear()
    monkeypatch.setattr(distillation, "_DENSE_BYTES", 0)
    trained(often, each_step_a_second(), dense)
    assert len(calls) > 100
    assert all(torch.equal(once.state_dict()[n], v) for n, v in often.state_dict().items())


def test_outputs_that_float16_cannot_hold_are_trained_too() -> None:
    def scaled() -> nn.Sequential:
        model = net()
        model.get_parameter("0.weight").data.mul_(1e6)
        return model

    model = scaled()
    twofour.prune(model)
    result = trained(model, each_step_a_second(0.5), scaled())
    assert result.blocks == ("0", "2")
    assert all(math.isfinite(row.distance) for row in result.measured)
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize(
    ("flags", "fast"),
    [
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"avx512_bf16": False, "amx_bf16": False}, False),
        ({}, False),
    ],
)
def test_bfloat16_is_for_processors_with_instructions_for_it(
    flags: dict[str, bool], fast: bool
) -> None:
    assert distillation.is_fast_in_bfloat16(flags) is fast


def test_steps_in_bfloat16_come_as_near_and_all_else_is_float32(
    faster: Callable[[float], None],
) -> None:
    faster(1e-2)
    plain, model = pruned_net(), pruned_net()
    masks = zeros(model)
    wanted = trained(plain, replace(each_step_a_second(), bfloat16=False))
    result = trained(model, replace(each_step_a_second(), bfloat16=True))
    assert (result.bfloat16, wanted.bfloat16) == (True, False)
    assert result.measured[0] == wanted.measured[0]
    assert not torch.equal(plain.state_dict()["0.weight"], model.state_dict()["0.weight"])
    best, aim = (of.measured[of.best].distance for of in (result, wanted))
    assert best == pytest.approx(aim, rel=0.1)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert lost(model, masks) == 0


class Filled(nn.Module):
    """Writes products into a tensor of float32, which torch refuses for those in bfloat16."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x))
        return torch.zeros_like(x).index_put((places,), self.layers(x))


def test_a_module_that_cannot_run_in_bfloat16_is_trained_in_float32() -> None:
    model = Filled(pruned_net())
    result = trained(model, replace(each_step_a_second(0.2), bfloat16=True), Filled(net()))
    assert not result.bfloat16
    assert result.steps > 0


class KilledError(Exception):
    """The end of the process, at some step."""


def stopped_after_a_checkpoint(task: TrainingTask) -> None:
    def killed(text: str, _done: int, _total: int | None) -> None:
        if text.startswith("step 80,"):
            raise KilledError

    with pytest.raises(KilledError):
        trained(pruned_net(), replace(task, report=killed))


def test_a_stopped_training_goes_on_at_its_checkpoint_to_the_same_weights(tmp_path: Path) -> None:
    whole, again = pruned_net(), pruned_net()
    trained(whole, each_step_a_second())
    task = replace(each_step_a_second(), checkpoint=tmp_path / "finetune.pt", key="k")
    stopped_after_a_checkpoint(task)
    said: list[str] = []
    notes: list[str] = []
    clock = itertools.count().__next__
    task = replace(task, clock=clock, report=lambda text, *_: said.append(text), note=notes.append)
    trained(again, task)
    assert notes == ["training continues at step 53: a checkpoint was there"]
    assert said[0].startswith("step 54,")
    assert all(torch.equal(whole.state_dict()[n], v) for n, v in again.state_dict().items())
    said.clear()
    trained(pruned_net(), replace(task, key="other", minutes=0.1))
    assert said[0].startswith("step 1,")


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-200]),
        lambda file: file.write_bytes(b""),
        lambda file: torch.save({"key": "k"}, file),
        lambda file: torch.save([1], file),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_the_way_to_start_anew(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    task = replace(each_step_a_second(), checkpoint=tmp_path / "finetune.pt", key="k")
    stopped_after_a_checkpoint(task)
    damage(tmp_path / "finetune.pt")
    with pytest.raises(BadInputError, match=r"finetune\.pt is damaged") as caught:
        trained(pruned_net(), replace(each_step_a_second(), checkpoint=task.checkpoint, key="k"))
    assert "without --resume" in (caught.value.hint or "")


def test_without_resume_training_starts_anew_says_so_and_leaves_the_checkpoint(
    tmp_path: Path,
) -> None:
    file, notes, said = tmp_path / "finetune.pt", list[str](), list[str]()
    task = replace(each_step_a_second(), checkpoint=file, key="k")
    stopped_after_a_checkpoint(task)
    before = file.read_bytes()
    task = replace(each_step_a_second(0.5), checkpoint=file, key="k", resumes=False)
    trained(
        pruned_net(), replace(task, note=notes.append, report=lambda text, *_: said.append(text))
    )
    assert notes == ["training starts anew; with --resume it continues at finetune.pt"]
    assert said[0].startswith("step 1,")
    assert file.read_bytes() == before


def test_a_checkpoint_that_cannot_be_written_is_bad_input_and_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def full(value: object, target: Any, *more: object, **named: object) -> None:
        if isinstance(target, Path):  # what torch says of a full disk
            raise RuntimeError("unexpected pos 843328 vs 843220")
        save(value, target, *more, **named)  # type: ignore[arg-type]  # as tensors are pickled

    file = tmp_path / "finetune.pt"
    file.write_bytes(b"the last one")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(BadInputError, match=r"cannot write .*finetune") as caught:
        trained(pruned_net(), replace(each_step_a_second(), checkpoint=file, resumes=False))
    assert "free some space" in (caught.value.hint or "")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [
        ("finetune.pt", b"the last one")
    ]


@pytest.mark.parametrize("of_dense", [True, False])
def test_outputs_that_are_not_finite_at_first_are_refused(of_dense: bool) -> None:
    student, dense = pruned_net(), net()
    broken = dense if of_dense else student
    broken.get_parameter("2.bias").data[0] = float("nan")
    with pytest.raises(BadInputError, match="NaN or infinite"):
        twofour.finetune(student, dense, batches(), minutes=0.001)


def test_outputs_that_are_the_same_for_all_samples_count_by_their_size() -> None:
    constant = torch.full((8, 4), 0.3) * (1 + 1e-7 * torch.randn(8, 4))
    assert float(distillation._distance(1.1 * constant, constant, None)) == pytest.approx(
        0.01, 1e-3
    )
    zeros_alone = torch.zeros(8, 4)
    assert distillation._distance(zeros_alone, zeros_alone, None) == 0
    assert distillation._distance(zeros_alone + 2, zeros_alone, None) == 4


def test_padding_does_not_count() -> None:
    wanted = torch.randn(2, 3, 4)
    padding = torch.tensor([[False, False, True], [False, True, True]])
    found = torch.where(padding[..., None], wanted + 9, wanted)
    assert distillation._distance(found, wanted, padding) == 0
    assert distillation._distance(found, wanted, None) > 1


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (net(), batches(), "the zeros of no weight of Sequential hold 2:4"),
        (pruned_net(), batches(1), r"(?s)needs two batches.*a batch has 8"),
        (net(), batches(), "are the same module"),
        (nn.Sequential(pruned_net()[0]), batches(), "no output of one shape"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    model: nn.Module, data: list[Tensor], message: str
) -> None:
    dense = model if "same" in message else net()
    with pytest.raises(BadInputError, match=message):
        twofour.finetune(model, dense, data, minutes=0.001)


def test_layers_of_an_encoder_with_padding_are_trained_as_they_are_exported() -> None:
    torch.manual_seed(0)
    dense, model = PaddedEncoder(layers=6), PaddedEncoder(layers=6)
    model.load_state_dict(dense.state_dict())
    twofour.prune(model)
    padded = [torch.randn(4, 8, 32) * (torch.arange(8) < 5)[:, None] for _ in range(4)]
    result = trained(model, each_step_a_second(0.1), dense, padded)
    assert result.blocks == tuple(f"encoder.layers.{number}" for number in range(6))
    assert all(math.isfinite(row.distance) for row in result.measured)
    assert torch.backends.mha.get_fastpath_enabled()

"""Repair of torch modules: against plain references, and where nothing is to be done."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from twofour.pattern import check
from twofour.pruning.statistics import held_out_samples
from twofour.pruning.torch_calls import Call
from twofour.pruning.torch_module import prune_module
from twofour.pruning.torch_repair import DenseRecord, record_dense, repair_module
from twofour.records.options import Selection
from twofour.records.pruning import Repair, RepairKind
from twofour.records.weights import Pattern

PATTERN = Pattern(n=2, m=4)


def calls_of(data: Tensor, size: int = 8, padding: Tensor | None = None) -> Iterable[Call]:
    pads = [None] * len(data) if padding is None else torch.split(padding, size)
    return [
        Call(args=(batch,), kwargs={}, samples=len(batch), padding=pad)
        for batch, pad in zip(torch.split(data, size), pads, strict=False)
    ]


def seen(data: Tensor) -> Tensor:
    return data[torch.from_numpy(~held_out_samples(0, len(data)))]


def settled(build: Callable[[], nn.Module]) -> nn.Module:
    """The same weights every time, and statistics of batch norms as after some training."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for module in model.modules():
            if (
                isinstance(module, nn.modules.batchnorm._BatchNorm)
                and module.running_mean is not None
            ):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]  # beside the mean
                if module.affine:
                    module.weight.uniform_(0.5, 1.5)
    return model.eval()


def cnn() -> nn.Module:
    return settled(
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 6),
        )
    )


def plain() -> nn.Module:
    return settled(
        lambda: nn.Sequential(
            nn.Conv1d(4, 8, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose1d(8, 8, 3, stride=2, groups=2),
            nn.ReLU(),
            nn.Conv1d(8, 8, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 13, 6, bias=False),
        )
    )


def images(samples: int = 48, seed: int = 1) -> Tensor:
    return torch.randn(samples, 4, 6, 6, generator=torch.Generator().manual_seed(seed)) + 0.5


def repaired(
    model: nn.Module,
    calls: Iterable[Call],
    wanted: bool | None = None,
    kinds: Sequence[RepairKind] = tuple(RepairKind),
) -> tuple[Repair, DenseRecord]:
    """Prune by magnitude and repair, in place."""
    rows = prune_module(copy.deepcopy(model), PATTERN, Selection(all_layers=True)).weights
    dense = record_dense(model, [row.weight for row in rows if row.pruned], calls)
    prune_module(model, PATTERN, Selection(all_layers=True))
    return repair_module(model, dense, calls, wanted, kinds), dense


def forced(model: nn.Module, calls: Iterable[Call], kind: RepairKind) -> nn.Module:
    """The pruned model with this kind of repair, whatever the outputs say."""
    record, _ = repaired(model, calls, True, (kind,))
    assert record.taken is kind
    return model


def test_batch_norms_are_estimated_again_behind_those_that_were() -> None:
    data = images()
    model = forced(cnn(), calls_of(data), RepairKind.BATCH_NORM)
    x = seen(data)
    with torch.no_grad():
        for layer in model.children():
            if isinstance(layer, nn.BatchNorm2d):
                assert layer.running_mean is not None
                assert layer.running_var is not None
                torch.testing.assert_close(layer.running_mean, x.mean((0, 2, 3)))
                torch.testing.assert_close(layer.running_var, x.var((0, 2, 3)))
            x = layer(x)


@pytest.mark.parametrize("kind", list(RepairKind))
@pytest.mark.parametrize("size", [1, 7])
def test_repair_does_not_depend_on_the_size_of_batches(kind: RepairKind, size: int) -> None:
    data = images()
    one = forced(cnn(), calls_of(data, 8), kind).state_dict()
    other = forced(cnn(), calls_of(data, size), kind).state_dict()
    for key, values in one.items():
        torch.testing.assert_close(other[key], values, rtol=1e-5, atol=1e-6)


def test_the_same_run_gives_the_same_bits() -> None:
    data = images()
    one = forced(cnn(), calls_of(data), RepairKind.BOTH).state_dict()
    other = forced(cnn(), calls_of(data), RepairKind.BOTH).state_dict()
    assert all(torch.equal(other[key], values) for key, values in one.items())


@pytest.mark.parametrize("build", [cnn, plain])
def test_matching_gives_every_channel_the_mean_and_deviation_of_the_dense_model(
    build: Callable[[], nn.Module],
) -> None:
    data = images(600) if build is cnn else images(600).flatten(2)[..., :6]
    dense = build()
    model = forced(build(), calls_of(data), RepairKind.MATCHING)
    x, y = seen(data), seen(data)
    looked_at = 0
    with torch.no_grad():
        for one, other in zip(dense.children(), model.children(), strict=True):
            x, y = one(x), other(y)
            has_norm = build is cnn and isinstance(one, nn.Conv2d)
            if has_norm or not isinstance(
                one, (nn.modules.conv._ConvNd, nn.BatchNorm2d, nn.Linear)
            ):
                continue
            axes = [axis for axis in range(x.ndim) if axis != 1]
            if getattr(one, "bias", None) is None:
                torch.testing.assert_close((y**2).mean(axes), (x**2).mean(axes), rtol=0.1, atol=0)
            else:
                torch.testing.assert_close(y.std(axes), x.std(axes), rtol=0.05, atol=1e-3)
                torch.testing.assert_close(y.mean(axes), x.mean(axes), rtol=1e-3, atol=1e-4)
            looked_at += 1
    assert looked_at == (3 if build is cnn else 4)


@pytest.mark.parametrize("build", [cnn, plain])
def test_zeros_stay_zeros_and_the_pattern_holds(build: Callable[[], nn.Module]) -> None:
    data = images() if build is cnn else images().flatten(2)[..., :6]
    model, alone = build(), build()
    prune_module(alone, PATTERN, Selection(all_layers=True))
    record, _ = repaired(model, calls_of(data), wanted=True)
    assert record.taken is not None
    for (name, one), (_, other) in zip(
        model.named_parameters(), alone.named_parameters(), strict=True
    ):
        if name.endswith("weight") and one.ndim > 1:
            assert torch.equal(one == 0, other == 0)
            assert not torch.signbit(one[one == 0]).any()
    weight = model.get_submodule("3" if build is cnn else "7").weight
    assert isinstance(weight, Tensor)
    assert check(weight.detach().numpy(), 1, PATTERN).violations == 0


def test_the_choice_is_written_and_the_error_is_that_of_the_saved_module() -> None:
    data, model, dense = images(80), cnn(), cnn()
    record, _ = repaired(model, calls_of(data))
    assert record.taken is not None
    assert record.error_before is not None
    assert record.error_after is not None
    assert record.error_after < 0.9 * record.error_before
    errors = [each.error for each in record.tried if each.error is not None]
    assert record.error_after == pytest.approx(min(errors), rel=1e-4)
    assert record.judged_on == 8
    held = data[torch.from_numpy(held_out_samples(0, len(data)))]
    with torch.no_grad():
        wanted, given = dense(held), model(held)
    whole = ((wanted - wanted.mean(axis=0)) ** 2).sum()
    assert record.error_after == pytest.approx(
        float(((given - wanted) ** 2).sum() / whole), rel=1e-3
    )


def test_what_needs_no_repair_is_left_bit_for_bit() -> None:
    """Weights that hold the pattern lose nothing: the outputs are the dense ones already."""
    model = cnn()
    prune_module(model, PATTERN, Selection(all_layers=True))
    before = copy.deepcopy(model.state_dict())
    record, _ = repaired(model, calls_of(images()))
    assert record.taken is None
    assert record.error_after == record.error_before == 0
    assert all(torch.equal(before[key], values) for key, values in model.state_dict().items())


def test_trying_leaves_no_trace() -> None:
    model, data = cnn().train(), images(9)  # nothing is held out: nothing to judge by
    prune_module(model, PATTERN, Selection(all_layers=True))
    before = copy.deepcopy(model.state_dict())
    record, _ = repaired(model, calls_of(data))
    assert (record.taken, record.error_before, record.judged_on) == (None, None, 0)
    assert record.why == "no sample was held out to judge it by"
    assert all(torch.equal(before[key], values) for key, values in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_repair_that_is_asked_for_is_done_without_anything_to_judge_by() -> None:
    record, _ = repaired(cnn(), calls_of(images(9)), wanted=True)
    assert record.taken is RepairKind.BATCH_NORM
    assert record.why == "asked for"


def test_without_calibration_data_nothing_is_tried() -> None:
    record, _ = repaired(cnn(), ())
    assert (record.tried, record.taken, record.judged_on) == ((), None, 0)


class Norms(nn.Module):
    """Batch norms that must be left alone, and one that need not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.untracked = nn.BatchNorm1d(8, track_running_stats=False)
        self.twice = nn.BatchNorm1d(8)
        self.frozen = Frozen(8)
        self.unused = nn.BatchNorm1d(8)
        self.plain = nn.SyncBatchNorm(8, affine=False)
        self.instance = nn.InstanceNorm1d(8, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.untracked(self.first(x))))
        out: Tensor = self.instance(self.plain(self.frozen(x))[..., None])[..., 0]
        return out


class Frozen(nn.Module):
    """As detection models have it: constants in buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.full((channels,), 0.3))
        self.register_buffer("running_var", torch.full((channels,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        assert isinstance(mean, Tensor)
        assert isinstance(var, Tensor)
        return (x - mean) / var.sqrt()


def test_batch_norms_that_are_frozen_shared_untracked_or_unused_are_left_alone() -> None:
    model = settled(Norms)
    before = copy.deepcopy(model.state_dict())
    data = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    after = forced(model, calls_of(data), RepairKind.BATCH_NORM).state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"first.weight", "plain.running_mean", "plain.running_var"}


class Tied(nn.Module):
    """Two layers with one weight, one that computes something more, and one as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.more = Squared(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, object]:
        x = self.other(torch.relu(self.one(x)))
        return {"pair": (self.last(self.more(x)), [x]), "count": torch.tensor(3), "none": None}


class Squared(nn.Linear):
    """A Linear whose output is not W x + b."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name
        return super().forward(input) ** 2


def test_tied_weights_and_sub_classes_that_compute_more_are_left_alone() -> None:
    model = settled(Tied)
    data = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    record, dense = repaired(model, calls_of(data), wanted=True)
    assert list(dense.sites) == ["last"]
    assert record.tried[0].changed == 1
    assert [len(outputs) for outputs in dense.outputs.values()] == [2] * 5


class Sideways(nn.Module):
    """Uses a layer's largest weight, which pruning leaves, behind the layer's back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + 20 * self.layer.weight.abs().max()
        return out


def test_what_turns_out_worse_once_it_is_written_is_taken_back_bit_for_bit() -> None:
    model, alone = settled(Sideways), settled(Sideways)
    prune_module(alone, PATTERN, Selection(all_layers=True))
    data = torch.randn(80, 8, generator=torch.Generator().manual_seed(0)) + 1
    record, _ = repaired(model, calls_of(data))
    assert record.error_before is not None
    assert record.tried[0].error is not None
    assert record.tried[0].error < 0.9 * record.error_before
    assert (record.taken, record.error_after) == (None, record.error_before)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


class Noisy(nn.Module):
    """Random in eval mode too, by every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.first(x), 0.5)
        x = x + random.random() + torch.from_numpy(np.random.normal(size=x.shape)).float()
        out: Tensor = self.last(x) + torch.randn(len(x), 4)
        return out


def test_what_a_model_draws_at_random_is_the_same_with_and_without_repair() -> None:
    model = settled(Noisy)
    rows = prune_module(copy.deepcopy(model), PATTERN, Selection(all_layers=True)).weights
    data = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    dense = record_dense(model, [row.weight for row in rows], calls_of(data))
    assert not torch.equal(dense.outputs[1][0], dense.outputs[2][0])
    record = repair_module(model, dense, calls_of(data))
    assert record.error_before == 0
    assert [found.kind for found in record.tried] == [RepairKind.MATCHING]
    assert record.tried[0].error == pytest.approx(0, abs=1e-9)


class Tokens(nn.Module):
    """(samples, positions) of numbers -> (samples, positions, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(self.table(tokens))))
        out: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


@pytest.mark.parametrize("kind", [RepairKind.BATCH_NORM, RepairKind.MATCHING])
def test_padding_counts_nowhere(kind: RepairKind) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 16, (40, 6), generator=generator)
    padding = torch.arange(6) >= torch.randint(1, 7, (40, 1), generator=generator)
    states = []
    for filler in (0, 5):
        data = tokens.masked_fill(padding, filler)
        model = settled(Tokens)
        states.append(forced(model, calls_of(data, 8, padding), kind).state_dict())
    assert all(torch.equal(states[1][key], values) for key, values in states[0].items())
    without = forced(settled(Tokens), calls_of(tokens), kind).state_dict()
    assert not torch.equal(without["norm.running_mean"], states[0]["norm.running_mean"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_stay_what_they_are(dtype: torch.dtype) -> None:
    model = cnn().to(dtype)
    record, _ = repaired(model, calls_of(images().to(dtype)), wanted=True)
    assert record.taken is not None
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


class Experts(nn.Module):
    """Runs one of two layers, by what is in the batch, and its batch norms in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = int(x[0, 0] > 0)
        x = self.layers[first](x)
        for at in (first, 1 - first):
            x = self.norms[at](x)
        return x


def test_forwards_that_take_different_ways_come_to_an_end() -> None:
    model = settled(Experts)
    data = torch.randn(80, 8, generator=torch.Generator().manual_seed(3))
    record, dense = repaired(model, calls_of(data))
    assert set(dense.sites) >= {"norms.0", "norms.1"}
    assert record.judged_on == 8


def test_numbers_that_are_not_finite_leave_a_site_as_it_is() -> None:
    model, data = cnn(), images()
    with torch.no_grad():
        model.get_parameter("0.bias")[0] = float("inf")
    before = copy.deepcopy(model.get_submodule("1").state_dict())
    record, dense = repaired(model, calls_of(data))
    assert "1" not in dense.sites
    assert record.taken is None
    after = model.get_submodule("1").state_dict()
    assert all(torch.equal(before[key], values) for key, values in after.items())


def test_as_many_calls_as_memory_holds_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    data = images(80)
    largest = 8 * 8 * 6 * 6 * 4
    monkeypatch.setattr("twofour.pruning.torch_repair._MOST_BYTES", 3 * 4 * largest)
    record, dense = repaired(cnn(), calls_of(data))
    assert dense.calls == (0, 2, 5)
    assert record.judged_on == int(held_out_samples(0, 80).reshape(10, 8)[[0, 2, 5]].sum())


def test_no_more_calls_than_enough_are_used_and_their_held_out_samples_stay_a_tenth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twofour.pruning.torch_repair._ENOUGH_BYTES", 1)
    one_by_one = [Call(args=(x[None],), kwargs={}, samples=1) for x in images(256)]
    record, dense = repaired(cnn(), one_by_one)
    assert len(dense.calls) == pytest.approx(128, abs=2)
    assert record.judged_on == pytest.approx(13, abs=2)
    assert record.taken is not None


def test_only_calls_with_a_held_out_sample_are_run_to_judge() -> None:
    calls = [Call(args=(x[None],), kwargs={}, samples=1) for x in images(20)]
    model = cnn()
    rows = prune_module(copy.deepcopy(model), PATTERN, Selection(all_layers=True)).weights
    dense = record_dense(model, [row.weight for row in rows], calls)
    prune_module(model, PATTERN, Selection(all_layers=True))
    ran: list[object] = []
    model.register_forward_hook(lambda _, args, __: ran.append(args))
    record = repair_module(model, dense, calls, kinds=(RepairKind.MATCHING,))
    assert record.taken is RepairKind.MATCHING
    assert len(ran) == 2 + 20 + 2  # before; the trial; what was written


def test_a_forward_that_fails_names_the_batch() -> None:
    from twofour.errors import BadInputError

    calls = [
        Call(args=(data,), kwargs={}, samples=8) for data in (images(8), torch.zeros(8, 3, 6, 6))
    ]
    with pytest.raises(BadInputError, match="batch 2"):
        record_dense(cnn(), (), calls)


def test_a_single_sample_without_an_axis_of_samples_runs() -> None:
    model = settled(lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    calls = [Call(args=(images(1, seed)[0],), kwargs={}, samples=1) for seed in range(20)]
    record, dense = repaired(model, calls)
    assert list(dense.sites) == ["0", "2"]
    assert record.judged_on == 2
    assert record.taken is RepairKind.MATCHING


def test_forwards_that_change_their_inputs_see_the_same_every_time() -> None:
    def build() -> nn.Module:
        return settled(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)))

    data = torch.randn(80, 8, generator=torch.Generator().manual_seed(0))
    before = data.clone()
    record, _ = repaired(build(), calls_of(data))
    assert torch.equal(data, before)
    again, _ = repaired(build(), calls_of(data))
    assert record == again


def test_a_record_of_the_dense_model_serves_for_a_copy_that_was_pruned() -> None:
    dense, data = cnn(), calls_of(images(80))
    before = copy.deepcopy(dense.state_dict())
    pruned, at_once = copy.deepcopy(dense), copy.deepcopy(dense)
    rows = prune_module(pruned, PATTERN, Selection(all_layers=True)).weights
    record = record_dense(dense, [row.weight for row in rows], data)
    repair = repair_module(pruned, record, data)
    assert repair == repaired(at_once, data)[0]
    assert repair.taken is not None
    assert all(torch.equal(before[key], values) for key, values in dense.state_dict().items())
    for one, other in zip(pruned.parameters(), at_once.parameters(), strict=True):
        assert torch.equal(one, other)


def test_calls_from_a_reader_that_counts_its_batches_are_all_used() -> None:
    """Two ways through it at once would get in each other's way."""
    from twofour.pipeline.torch_calibrating import calls_of as read
    from twofour.pipeline.torch_calibrating import data_of

    model = settled(lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)))
    batches = [*torch.split(images(80), 8)]
    dense = record_dense(model, (), read(model, data_of(model, batches, 80)).calls)
    assert dense.calls == (*range(10),)
    assert dense.held_out == 8

"""Pruning torch modules with calibration data, step by step, against a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.calibrated import TWO_FOUR, calibrated, call
from support.matrix_problem import solve_layer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import twofour
from twofour.calibrate.torch.block_loop import (
    BlockLoop,
    CalibrationTask,
    calls_kept,
    prune_calibrated,
)
from twofour.calibrate.torch.stored_weights import WeightsInMemory
from twofour.errors import BadInputError, PatternBrokenError
from twofour.pattern import check
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.matrices import Layout, matrix_rows
from twofour.pruning.methods import method_named
from twofour.pruning.samples import factors_of, held_out_samples
from twofour.pruning.solve import SolvedLayer
from twofour.pruning.statistics import InputSums
from twofour.records.options import MethodOptions
from twofour.records.weights import Calibration, PrunedWeight, PruneResult, Selection

WANDA = CalibrationTask(pattern=TWO_FOUR, options=MethodOptions(name="wanda"))


def solved_plainly(
    weight: Tensor, x: Tensor, dense: Tensor, away: Tensor | None = None
) -> SolvedLayer:
    """One Linear by itself; `dense` is its input in the dense model, `away` how far it is there
    from what is added to its output here.
    """
    layout = Layout(shape=tuple(weight.shape), axis=1, m=4)
    sums = InputSums(None if away is None else weight.detach().numpy()[None])
    rows = (matrix_rows(each.numpy(), layout) for each in (x, dense))
    added = None if away is None else away.numpy()[None]
    sums.add(next(rows), factors_of(held_out_samples(0, len(x))), next(rows), added)
    statistics = sums.statistics()
    assert statistics is not None
    problem = LayerProblem(
        stored=weight.detach().numpy().copy(),
        layout=layout,
        pattern=TWO_FOUR,
        statistics=statistics,
        has_bias=True,
    )
    return solve_layer(problem, method_named("wanda"), WANDA.options)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def stack(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(8) for _ in range(depth)), nn.Linear(8, 4))


def test_every_layer_meets_what_the_pruned_ones_before_it_give() -> None:
    model, x = stack(), torch.randn(60, 8)
    expected, plain, dense = stack(), x, x
    calls = [call(x[i : i + 20], samples=20) for i in range(0, 60, 20)]
    names = [name for name, _ in model.named_parameters() if name.endswith("weight")]
    weights = [calibrated(model, name) for name in names]
    with calls_kept(model, calls, WANDA) as kept:
        found = BlockLoop(WeightsInMemory(model, weights), kept, WANDA).run()
    assert list(found) == names
    with torch.no_grad():
        for block in expected:
            inner = [block.up, block.down] if isinstance(block, Block) else [block]
            y, goal, away = plain, dense, dense - plain
            dense = block(dense)
            for layer in inner:
                assert isinstance(layer, nn.Linear)
                is_down = layer.out_features == 8
                solved = solved_plainly(layer.weight, y, goal, away if is_down else None)
                goal = torch.relu(layer(goal))
                layer.weight.copy_(torch.from_numpy(solved.weight))
                layer.bias.add_(torch.from_numpy(solved.bias_change).float())
                y = torch.relu(layer(y))
            plain = block(plain)
    for name in names:
        got, wanted = model.get_parameter(name), expected.get_parameter(name)
        assert torch.equal(got != 0, wanted != 0), name
        assert torch.allclose(got, wanted, rtol=1e-3, atol=1e-5), name
    assert torch.allclose(model(x), expected(x), rtol=1e-3, atol=1e-4)
    error = found["3.weight"].output_error
    assert error is not None
    assert error.held_out is not None


class Branches(nn.Module):
    """Blocks that skip, a loop over one block, an exit that hangs on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.again, self.head, self.early = Block(8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        y = self.blocks[1](first)
        for _ in range(2):
            y = self.again(y)
        return self._ending(x, y, first)

    def _ending(self, x: Tensor, y: Tensor, first: Tensor) -> Tensor:
        if float(x[0, 0]) > 0:
            out: Tensor = self.early(y)
            return out
        late: Tensor = self.head(self.blocks[2](y) + first)
        return late


def batches(count: int = 4, rows: int = 10, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=generator) for _ in range(count)]


def test_branches_loops_and_early_exits_give_the_same_as_running_everything_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pruned() -> tuple[nn.Module, PruneResult]:
        torch.manual_seed(0)
        model = Branches()
        return model, twofour.prune(model, calibrate=batches(), method="wanda")

    model, result = pruned()
    monkeypatch.setattr("twofour.calibrate.torch.block_loop.parts_of", lambda *_, **__: {})
    whole, expected = pruned()
    assert result == expected
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name
    assert all(row.output_error is not None for row in result.weights)


class Idle(nn.Sequential):
    """Has a layer that its forward leaves out."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))
        self.never = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[1](torch.relu(self[0](x)))
        return y


def rows_of(result: PruneResult) -> dict[str, PrunedWeight]:
    return {row.weight.layer: row for row in result.weights}


def test_what_was_done_stands_in_the_rows() -> None:
    model = Idle()
    result = twofour.prune(model, "2:4", calibrate=batches(8), samples=80, damping=0.05, refit=3)
    assert (result.method, result.calibration) == (
        "admm",
        twofour.Calibration(source="calibrate", samples=80, held_out=8),
    )
    first, second, never = (rows_of(result)[name] for name in ("0", "1", "never"))
    assert (first.method, first.damping, first.refit_steps, first.bias_corrected) == (
        "admm",
        0.05,
        3,
        True,
    )
    assert not second.bias_corrected
    assert (never.method, never.output_error) == ("magnitude", None)
    assert never.note == "no calibration input reached it: pruned without data"
    for row in (first, second, never):
        weight = model.get_parameter(str(row.weight.weight)).detach()
        assert row.zeros == int((weight == 0).sum()) == weight.numel() // 2
        assert check(weight.numpy(), 1, TWO_FOUR).holds


def test_biases_make_up_for_the_mean_of_what_went() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(9, 8) + 2
    dense, bias = model(x), model.get_parameter("0.bias").clone()
    twofour.prune(model, calibrate=[x], method="wanda", refit=0)
    assert (model(x) - dense).mean(0).abs().max() < 1e-6
    assert (model.get_parameter("0.bias") - bias).abs().max() > 0.01


def test_each_projection_of_attention_is_corrected_in_its_own_third_of_the_bias() -> None:
    torch.manual_seed(0)
    for width in (8, 4):
        attention = nn.MultiheadAttention(8, 2, kdim=width, vdim=width, batch_first=True)
        before = copy.deepcopy(attention)
        x, memory = torch.randn(3, 5, 8) + 1, torch.randn(3, 7, width) - 1
        result = twofour.prune(
            Attention(attention), calibrate=[(x, memory)], method="wanda", refit=0
        )
        assert all(row.bias_corrected for row in result.weights)
        for third, inputs, old, new in (
            (0, x, *projections(before, attention, 0)),
            (1, memory, *projections(before, attention, 1)),
            (2, memory, *projections(before, attention, 2)),
        ):
            mean = inputs.reshape(-1, inputs.shape[-1]).mean(0)
            change = attention.in_proj_bias.chunk(3)[third] - before.in_proj_bias.chunk(3)[third]
            assert torch.allclose(change, (old - new) @ mean, atol=1e-5)


def projections(
    before: nn.MultiheadAttention, after: nn.MultiheadAttention, third: int
) -> tuple[Tensor, Tensor]:
    """One of query, key and value, before and after."""
    found = []
    for module in (before, after):
        apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        packed = module.in_proj_weight
        found.append((apart if packed is None else packed.chunk(3))[third].detach())
    return found[0], found[1]


class Attention(nn.Module):
    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y: Tensor = self.inner(x, memory, memory)[0]
        return y


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_written_back_rounded(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = stack(1).to(kind), torch.randn(20, 8, dtype=kind)
    result = twofour.prune(model, calibrate=[x])
    assert {p.dtype for p in model.parameters()} == {kind}
    for row in result.weights:
        weight = model.get_parameter(str(row.weight.weight))
        assert check(weight.detach().float().numpy(), 1, TWO_FOUR).holds
        assert row.output_error is not None
        assert 0 < row.output_error.calibration < 0.5


def test_a_tied_weight_is_pruned_once_for_all_its_users() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    plain, x = leaves(model)["0.weight"], torch.randn(9, 8)
    with torch.no_grad():
        inputs = torch.cat([x, model[0](x)])
    twofour.prune(model, calibrate=[x], method="wanda", refit=0)
    norms = (inputs**2).sum(0).sqrt()
    kept = (plain.abs() * norms).reshape(8, 2, 4).argsort(-1).argsort(-1) >= 2
    assert torch.equal(leaves(model)["1.weight"] != 0, kept.reshape(8, 8))


def leaves(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


class Troubled(nn.Module):
    """A chain that goes wrong behind its first layer, once that is pruned."""

    seen: Tensor

    def __init__(self, trouble: str) -> None:
        super().__init__()
        self.first, self.second, self.trouble = nn.Linear(8, 8), nn.Linear(8, 8), trouble
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        x = self.first(x)
        if self.trouble == "raises" and (self.first.weight == 0).any():
            raise ValueError("no\nmore")
        if self.trouble == "nan" and (self.first.weight == 0).any():
            x = x / 0
        y: Tensor = self.second(nn.functional.dropout(x, 0.5, training=self.training))
        return y


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("raises", "fails on calibration batch 1 .*ValueError: no"),
        ("nan", "batch 1 the input of second.weight contains"),
    ],
)
def test_what_goes_wrong_on_the_way_leaves_everything_as_it_was(trouble: str, message: str) -> None:
    model = Troubled(trouble).train()
    before, random_state = leaves(model), torch.get_rng_state()
    with pytest.raises(BadInputError, match=message):
        twofour.prune(model, calibrate=batches())
    after = leaves(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(random_state, torch.get_rng_state())
    assert model.training
    assert model.first.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


def test_biases_of_the_dense_model_are_taken_back_too_where_anything_is_raised() -> None:
    model, dense = Troubled("raises"), Troubled("")
    before = leaves(model)
    work = replace(WANDA, dense_model=dense)
    about = Calibration(source="x", samples=40, held_out=4)
    calls = [call(x, samples=10) for x in batches()]
    with pytest.raises(BadInputError, match="ValueError: no"):
        prune_calibrated(model, calls, about, work, Selection())
    assert all(torch.equal(before[name], value) for name, value in leaves(model).items())


def test_a_loader_of_inputs_and_labels_prunes_as_its_inputs_do() -> None:
    x, labels = torch.cat(batches()), torch.arange(40)
    one, other = stack(), stack()
    loader = DataLoader(TensorDataset(x, labels), batch_size=8)
    found = twofour.prune(one, calibrate=loader)
    expected = twofour.prune(other, calibrate=[*torch.split(x, 8)])
    assert found.weights == expected.weights
    assert found.calibration is not None
    assert found.calibration.notes[-1].startswith("calibrate gives pairs")
    assert all(torch.equal(leaves(one)[name], value) for name, value in leaves(other).items())


def test_nothing_is_left_behind_in_a_model_that_was_pruned() -> None:
    model = Troubled("").train()
    threads, grads = torch.get_num_threads(), [p.requires_grad_(False) for p in model.parameters()]
    random_state = torch.get_rng_state()
    twofour.prune(model, calibrate=batches())
    assert torch.equal(random_state, torch.get_rng_state())
    assert (model.training, int(model.seen), threads) == (True, 0, torch.get_num_threads())
    assert not any(p.requires_grad or p.grad is not None for p in grads)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_same_bits_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        torch.manual_seed(0)
        before = torch.get_num_threads()
        torch.set_num_threads(int(threads))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        result = twofour.prune(
            nn.Sequential(layer, nn.TransformerEncoderLayer(32, 4, 64)),
            calibrate=[
                torch.randn(8, 6, 32, generator=torch.Generator().manual_seed(i)) for i in (0, 1)
            ],
        )
        torch.set_num_threads(before)
        found.append((result, leaves(layer)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


class ChangedInPlace(nn.Module):
    """Two layers read one tensor, which is another one in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.one(x)
        z: Tensor = y + self.other(x.relu_())
        return z


def test_inference_mode_of_the_caller_changes_nothing() -> None:
    torch.manual_seed(0)
    model = ChangedInPlace()
    inside = copy.deepcopy(model)
    result = twofour.prune(model, calibrate=batches())
    with torch.inference_mode():
        assert twofour.prune(inside, calibrate=batches()) == result
        assert torch.is_inference_mode_enabled()
    assert all(torch.equal(value, leaves(inside)[name]) for name, value in leaves(model).items())


def unread() -> Iterator[Tensor]:
    """Data that nothing needs to look at."""
    raise AssertionError("the data were read")
    yield


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"calibrate": []}, "no samples"),
        ({"calibrate": [torch.randn(4, 7)]}, "fails on calibration batch 1"),
        ({"calibrate": 3}, "calibrate"),
        ({"refit": 3}, "--refit 3 needs calibration samples"),
        ({"damping": 0.1}, "--damping 0.1 needs calibration samples"),
        ({"samples": 32}, "--calibrate-samples needs calibration samples"),
        ({"method": "wish", "calibrate": [torch.randn(4, 8)]}, "no pruning method 'wish'"),
        ({"damping": "much", "calibrate": [torch.randn(4, 8)]}, "damping"),
        ({"damping": float("inf"), "calibrate": [torch.randn(4, 8)]}, "^--damping inf is not"),
        ({"damping": -1.0, "calibrate": unread()}, "^--damping -1.0 is not"),
        ({"refit": -1, "calibrate": unread()}, "^--refit -1 is not"),
        ({"samples": "many", "calibrate": unread()}, "samples.*found .many. of type str"),
        ({"samples": 0, "calibrate": unread()}, "^samples=0 leaves no sample"),
        (
            {"calibrate": [torch.randn(40, 8) * 1e25]},
            "^0.weight: the sums over the layer's calibration inputs are not finite",
        ),
        ({"calibrate": [torch.randn(4, 8)], "method": "keep"}, "^0.weight: there is no mask"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    before = leaves(model)
    with pytest.raises((BadInputError, PatternBrokenError), match=message):
        twofour.prune(model, **given)
    assert torch.equal(before["0.weight"], leaves(model)["0.weight"])

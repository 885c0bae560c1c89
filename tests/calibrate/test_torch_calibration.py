"""`twofour.prune(module, calibrate=...)`: layer by layer against a plain loop, and what is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import twofour
from twofour.errors import BadInputError, PatternBrokenError
from twofour.pattern import check
from twofour.records.weights import Pattern, PruneResult

TWO_FOUR = Pattern(2, 4)


def prune(model: nn.Module, *given: Any, **options: Any) -> PruneResult:
    """Every layer: these are smaller than what is pruned by default."""
    return twofour.prune(model, *given, all_layers=True, **options)


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


def batches(count: int = 4, rows: int = 10, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=generator) for _ in range(count)]


def leaves(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: nn.Module, other: nn.Module | dict[str, Tensor]) -> bool:
    others = other.state_dict() if isinstance(other, nn.Module) else other
    return all(torch.equal(value, others[name]) for name, value in one.state_dict().items())


class ByHand(nn.Module):
    """A parameter of no layer, used in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x), self.layer(2 - x)])


@pytest.mark.parametrize("build", [ByHand, lambda: Twice(nn.Linear(8, 6, bias=False))])
def test_the_error_of_a_layer_is_that_of_its_outputs(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(build()), torch.randn(3, 7, 8)
    x = x + torch.roll(x, 1, 1) + 0.5
    with torch.no_grad():
        dense = model(x)
    (row,) = prune(model, calibrate=[x]).weights
    with torch.no_grad():
        lost = (((model(x) - dense) ** 2).sum() / (dense**2).sum()).item()
    assert row.output_error is not None
    assert row.output_error.calibration == pytest.approx(lost, rel=1e-3)
    assert 0 < lost < 0.3
    weight = model.get_parameter(row.weight.weight or "").detach()
    assert row.weight.axis is not None
    assert check(weight.numpy(), row.weight.axis, TWO_FOUR).holds
    assert row.zeros == int((weight == 0).sum()) > 0


class HeadOfTraining(nn.Sequential):
    """Has a layer that its forward leaves out."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))
        self.never = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[1](torch.relu(self[0](x)))
        return y


def test_what_was_done_stands_in_the_rows() -> None:
    model = HeadOfTraining()
    never = leaves(model)["never.weight"]
    result = prune(model, "2:4", calibrate=batches(8), samples=80, damping=0.05, refit=3)
    assert (result.method, result.calibration) == (
        "admm",
        twofour.Calibration(source="calibrate", samples=80, held_out=8),
    )
    first, second = result.weights
    assert (first.weight.layer, first.weight.op, second.weight.op) == ("0", "Gemm", "Gemm")
    assert (first.method, first.damping, first.refit_steps) == ("admm", 0.05, 3)
    assert (first.bias_corrected, second.bias_corrected) == (True, False)
    for row in (first, second):
        weight = model.get_parameter(str(row.weight.weight)).detach()
        assert row.zeros == int((weight == 0).sum()) == weight.numel() // 2
        assert check(weight.numpy(), 1, TWO_FOUR).holds
    assert torch.equal(model.never.weight, never)


def test_a_bias_that_two_layers_share_stays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].bias = model[0].bias
    before = leaves(model)["0.bias"]
    result = prune(model, calibrate=batches())
    assert [row.bias_corrected for row in result.weights] == [False, False]
    assert torch.equal(leaves(model)["0.bias"], before)


class Attention(nn.Module):
    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y: Tensor = self.inner(x, memory, memory)[0]
        return y


def thirds(module: nn.MultiheadAttention) -> list[Tensor]:
    """Weights of query, key and value."""
    apart: list[Tensor] = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    packed: Tensor | None = module.in_proj_weight
    return apart if packed is None else [*packed.chunk(3)]


@pytest.mark.parametrize("width", [8, 4], ids=["packed", "apart"])
def test_each_projection_of_attention_is_pruned_and_corrected_by_its_own_inputs(width: int) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, kdim=width, vdim=width, batch_first=True)
    before = copy.deepcopy(attention)
    x, memory = torch.randn(3, 5, 8) + 1, torch.randn(3, 7, width) - 1
    result = prune(Attention(attention), calibrate=[(x, memory)], method="wanda", refit=0)
    assert all(row.bias_corrected for row in result.weights)
    biases = zip(attention.in_proj_bias.chunk(3), before.in_proj_bias.chunk(3), strict=True)
    for inputs, old, new, (bias, bias_before) in zip(
        (x, memory, memory), thirds(before), thirds(attention), biases, strict=True
    ):
        flat = inputs.reshape(-1, inputs.shape[-1])
        assert torch.equal(new != 0, kept_by_wanda(old, flat))
        assert torch.allclose(bias - bias_before, (old - new) @ flat.mean(0), atol=1e-5)


def kept_by_wanda(weight: Tensor, inputs: Tensor) -> Tensor:
    scores = (weight.abs() * (inputs**2).sum(0).sqrt()).reshape(len(weight), -1, 4)
    return (scores.argsort(-1).argsort(-1) >= 2).reshape(weight.shape)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_other_types_are_written_back_rounded(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = stack(1).to(kind), torch.randn(20, 8, dtype=kind)
    result = prune(model, calibrate=[x])
    assert {p.dtype for p in model.parameters()} == {kind}
    for row in result.weights:
        weight = model.get_parameter(str(row.weight.weight))
        assert check(weight.detach().float().numpy(), 1, TWO_FOUR).holds
        assert row.output_error is not None
        assert 0 < row.output_error.calibration < 0.5


class Tokens(nn.Module):
    """A small encoder of texts, which its mask keeps from looking at padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].float()
        y = torch.tanh(self.first(self.table(input_ids))) * mask
        z: Tensor = self.last(y.sum(1) / mask.sum(1))
        return z


def texts(lengths: list[int], width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(width)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    return {
        "input_ids": torch.randint(1, 50, (len(lengths), width), generator=generator) * mask,
        "attention_mask": mask,
    }


def test_padding_counts_for_no_layer_and_texts_of_all_lengths_are_one_calibration() -> None:
    torch.manual_seed(0)
    model = Tokens()
    first, given = leaves(model)["first.weight"], [texts([5, 3, 1], 5), texts([7, 2], 7)]
    inputs = torch.cat([model.table(b["input_ids"])[b["attention_mask"] == 1] for b in given])
    result = prune(model, calibrate=given, method="wanda", refit=0)
    assert result.calibration is not None
    assert result.calibration.samples == 5
    assert torch.equal(model.first.weight != 0, kept_by_wanda(first, inputs.detach()))


def test_images_of_several_sizes_are_one_calibration() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    images = [torch.randn(3, 4, 6, 6), torch.randn(2, 4, 5, 7), torch.randn(3, 4, 6, 6)]
    with torch.no_grad():
        dense = [model(x) for x in images]
    result = prune(model, calibrate=images)
    assert result.calibration is not None
    assert result.calibration.samples == 8
    assert all(row.output_error is not None for row in result.weights)
    with torch.no_grad():
        moved = [model(x) - y for x, y in zip(images, dense, strict=True)]
    assert torch.cat(moved).mean(0).abs().max() < 1e-4


SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50, "hidden_size": 32}
T5 = {"num_layers": 1, "num_heads": 2, "vocab_size": 50, "d_model": 32, "d_ff": 32, "d_kv": 16}


@pytest.mark.parametrize(
    "kind", ["decoder", pytest.param("encoder and decoder", marks=pytest.mark.full)]
)
def test_models_of_transformers_are_pruned_without_their_caches(kind: str) -> None:
    torch.manual_seed(0)
    given: list[dict[str, Tensor]] = [texts([9, 4, 7], 9)]
    model: nn.Module
    if kind == "decoder":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32))
    else:
        model = T5ForConditionalGeneration(T5Config(**T5))
        given = [batch | {"decoder_input_ids": batch["input_ids"]} for batch in given]
    result = twofour.prune(model, calibrate=given, method="wanda", refit=0)
    pruned = [row for row in result.weights if row.pruned]
    assert len(pruned) == (8 if kind == "decoder" else 6 + 10)
    assert all(row.output_error is not None for row in pruned)
    assert model.config.use_cache is True  # type: ignore[union-attr]  # of transformers


class Counting(nn.Module):
    """Counts its forwards, and learns the statistics of its inputs in training mode."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        x = functional.dropout(self.norm(self.first(x)), 0.5, training=self.training)
        y: Tensor = self.second(x)
        return y


def test_nothing_but_weights_changes_in_a_model_that_was_pruned() -> None:
    model = Counting().train()
    model.second.eval()
    threads, grads = torch.get_num_threads(), [p.requires_grad_(False) for p in model.parameters()]
    ours, before, random_state = [*model.parameters()], leaves(model), torch.get_rng_state()
    prune(model, calibrate=batches())
    assert torch.equal(random_state, torch.get_rng_state())
    assert (model.training, model.norm.training, model.second.training) == (True, True, False)
    assert threads == torch.get_num_threads()
    assert not any(p.requires_grad or p.grad is not None for p in grads)
    assert all(one is other for one, other in zip(ours, model.parameters(), strict=True))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
    changed = (name for name, value in leaves(model).items() if not value.equal(before[name]))
    assert {*changed} == {"first.weight", "first.bias", "second.weight", "second.bias"}


class Odd(nn.Module):
    """Buffers of other types than weights have, extra state, a matrix that is no parameter."""

    places: Tensor
    signs: Tensor
    unsaved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fixed = nn.Linear(8, 8), torch.randn(8, 8)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("places", torch.arange(8).expand(2, 8))
        self.register_buffer("signs", torch.tensor([True, False] * 4))
        self.register_buffer("unsaved", torch.randn(8, 8), persistent=False)

    def get_extra_state(self) -> object:
        return {"version": 2}

    def set_extra_state(self, state: object) -> None:
        """Nothing has to be set."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(self.signs, x, -x) @ self.fixed + self.places[0]
        y: Tensor = self.layer(x @ self.unsaved)
        return y


def test_what_is_no_parameter_is_no_row_and_stays() -> None:
    torch.manual_seed(0)
    model = Odd()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    (row,) = prune(model, calibrate=batches()).weights
    assert (row.weight.layer, row.pruned) == ("layer", True)
    assert check(model.layer.weight.detach().numpy(), 1, TWO_FOUR).holds
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class Roots(nn.Module):
    """Its second layer meets numbers that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.sqrt(self.first(x)))
        return y


def not_finite() -> list[Tensor]:
    given = batches()
    given[2][0, 0] = torch.inf
    return given


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("make", "data", "message"),
    [
        (Counting, not_finite, "batch 2: the array for input x has 1 value not finite"),
        (Roots, batches, "^layer 'second': its input .* has values that are NaN or infinite"),
        (
            Counting,
            lambda: [*batches(), torch.ones(10, 7)],
            r"several sizes, and Counting .*\(x dimension 1\) is always 8",
        ),
        (
            Counting,
            lambda: [*batches(), torch.ones(10)],
            "sample 41 has the inputs x of 1 axes, the first one x of 2 axes",
        ),
    ],
)
def test_where_anything_is_bad_the_module_keeps_every_bit(
    make: Callable[[], nn.Module], data: Callable[[], object], message: str
) -> None:
    model = make().train()
    before, random_state = leaves(model), torch.get_rng_state()
    with pytest.raises(BadInputError, match=message):
        prune(model, calibrate=data())
    assert same(model, before)
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(module.training for module in model.modules())


@pytest.mark.full
def test_inference_mode_of_the_caller_changes_nothing() -> None:
    model = stack(1)
    inside = copy.deepcopy(model)
    result = prune(model, calibrate=batches())
    with torch.inference_mode():
        assert prune(inside, calibrate=batches()) == result
        assert torch.is_inference_mode_enabled()
    assert same(model, inside)


def unread() -> Iterator[Tensor]:
    """Data that nothing needs to look at."""
    raise AssertionError("the data were read")
    yield


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"calibrate": []}, "no samples"),
        ({"calibrate": [torch.randn(4, 7)]}, "Sequential.forward fails on .*4x7"),
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
            "layer '0': the sums over the layer's calibration inputs are not finite",
        ),
        ({"calibrate": [torch.randn(4, 8)], "method": "keep"}, "layer '0': there is no mask"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    before = leaves(model)
    with pytest.raises((BadInputError, PatternBrokenError), match=message) as told:
        prune(model, **given)
    assert "/tmp" not in str(told.value)
    assert same(model, before)

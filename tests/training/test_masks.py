"""Masks held in training: each way to lose the zeros of a pruned module, with and without them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from support.trained import Model, loss, lost, net, pruned_net, train, zeros
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel

import twofour
from twofour.errors import BadInputError, PatternBrokenError

Hold = Callable[[nn.Module, Optimizer], object]


def test_half_of_a_pruned_module_is_zero() -> None:
    assert sum(int(mask.sum()) for mask in zeros(pruned_net()).values()) == 384


def sgd(model: Model, hold: Hold) -> None:
    optimizer = SGD(model.parameters(), lr=0.01)
    hold(model, optimizer)
    train(model, optimizer)


def adamw_with_decay(model: Model, hold: Hold) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1, amsgrad=True)
    hold(model, optimizer)
    train(model, optimizer)


def adafactor(model: Model, hold: Hold) -> None:
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    hold(model, optimizer)
    train(model, optimizer)


def momentum_loaded_from_dense_training(model: Model, hold: Hold) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    hold(model, optimizer)
    dense = net()
    before = AdamW(dense.parameters(), lr=0.01)
    train(dense, before)
    optimizer.load_state_dict(before.state_dict())
    train(model, optimizer)


def values_written_between_steps(model: Model, hold: Hold) -> None:
    optimizer = SGD(model.parameters(), lr=0.01)
    hold(model, optimizer)
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(-0.5)
    train(model, optimizer)


def parameters_replaced(model: Model, hold: Hold) -> None:
    holder = hold(model, SGD(model.parameters(), lr=0.01))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    optimizer = AdamW(model.parameters(), lr=0.01)
    if isinstance(holder, twofour.MaskHolder):
        holder.add_optimizer(optimizer)
    train(model, optimizer)


def second_optimizer_with_momentum(model: Model, hold: Hold) -> None:
    first, second = (SGD(model.parameters(), lr=0.01, momentum=0.9) for _ in range(2))
    holder = hold(model, first)
    for weight in model.parameters():
        second.state[weight]["momentum_buffer"] = torch.ones_like(weight)
    if isinstance(holder, twofour.MaskHolder):
        holder.add_optimizer(second)
    train(model, first, second)


def scheduler_before(model: Model, hold: Hold) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=5)
    hold(model, optimizer)
    train(model, optimizer)
    scheduler.step()
    train(model, optimizer)


def scheduler_after(model: Model, hold: Hold) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    hold(model, optimizer)
    OneCycleLR(optimizer, 0.1, total_steps=5)
    train(model, optimizer)


class _Wrapper:
    """As of Accelerate: an optimizer with another inside."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def wrapped_optimizer(model: Model, hold: Hold) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    hold(DataParallel(model), _Wrapper(optimizer))  # type: ignore[arg-type]
    train(model, optimizer)


def mixed_precision(model: Model, hold: Hold) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    hold(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model)
        scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def bfloat16(model: Model, hold: Hold) -> None:
    model.bfloat16()
    optimizer = AdamW(model.parameters(), lr=0.01)
    hold(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 16, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()


def accumulation_and_clipping(model: Model, hold: Hold) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    hold(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            torch.autograd.backward(loss(model))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def compiled_model(model: Model, hold: Hold) -> None:
    compiled = cast("nn.Module", torch.compile(model, backend="aot_eager"))
    optimizer = AdamW(compiled.parameters(), lr=0.01)
    hold(compiled, optimizer)
    train(compiled, optimizer)


def unfrozen_later(model: Model, hold: Hold) -> None:
    model.requires_grad_(False)
    hold(model, optimizer := AdamW(model.parameters(), lr=0.01))
    model.requires_grad_(True)
    train(model, optimizer)


CASES = [
    sgd,
    adamw_with_decay,
    adafactor,
    momentum_loaded_from_dense_training,
    values_written_between_steps,
    parameters_replaced,
    second_optimizer_with_momentum,
    scheduler_before,
    scheduler_after,
    wrapped_optimizer,
    mixed_precision,
    bfloat16,
    accumulation_and_clipping,
    compiled_model,
    unfrozen_later,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_zeros_stay_with_the_masks_and_are_lost_without(case: Callable[..., None]) -> None:
    held, free = pruned_net(), pruned_net()
    masks = zeros(held)
    dense = {n: p.clone() for n, p in held.named_parameters()}
    case(held, twofour.hold_masks)
    assert lost(held, masks) == 0
    assert all(not torch.equal(p, dense[n]) for n, p in held.named_parameters()), "it was trained"
    case(free, lambda *_: None)
    assert lost(free, masks) > 100


def test_the_state_of_the_optimizer_is_cleared_under_the_masks_alone() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    twofour.prune(model)
    kept = {p: dict(optimizer.state[p]) for p in model.parameters()}
    before = {p: s["exp_avg"].clone() for p, s in kept.items()}
    twofour.hold_masks(model, optimizer)
    for weight in (model.get_parameter("0.weight"), model.get_parameter("2.weight")):
        state = optimizer.state[weight]
        assert not state["exp_avg"][weight == 0].any()
        assert not state["exp_avg_sq"][weight == 0].any()
        assert weight.grad is not None
        assert not weight.grad[weight == 0].any()
        assert torch.equal(state["exp_avg"][weight != 0], before[weight][weight != 0])
        assert int(state["step"]) == 3


def test_clipping_measures_the_kept_gradients_alone() -> None:
    model, free = pruned_net(), pruned_net()
    masks = zeros(model)
    twofour.hold_masks(model, SGD(model.parameters(), lr=0.01))
    for part in (model, free):
        torch.manual_seed(1)
        torch.autograd.backward(loss(part))
    kept = [
        p.grad.masked_fill(masks[n], 0) if n in masks else p.grad
        for n, p in free.named_parameters()
        if p.grad is not None
    ]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    expected = math.sqrt(sum(float(g.square().sum()) for g in kept))
    assert float(norm) == pytest.approx(expected, rel=1e-5)
    assert float(nn.utils.clip_grad_norm_(free.parameters(), 1.0)) > 1.1 * expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.0])
def test_whatever_is_under_a_mask_becomes_a_positive_zero(bad: float) -> None:
    model = pruned_net()
    masks = zeros(model)
    holder = twofour.hold_masks(model, SGD(model.parameters(), lr=0.01))
    with torch.no_grad():
        model.get_parameter("0.weight")[masks["0.weight"]] = bad
    holder.apply()
    assert lost(model, masks) == 0
    assert model.get_parameter("0.weight").isfinite().all()


@pytest.mark.parametrize("begins_dense", [False, True])
def test_an_average_keeps_the_zeros_once_they_are_written(*, begins_dense: bool) -> None:
    model = net() if begins_dense else pruned_net()
    average = AveragedModel(model, avg_fn=lambda old, new, _: torch.lerp(old, new, 0.1))
    average.update_parameters(model)
    twofour.prune(model)
    masks = zeros(model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    holder = twofour.hold_masks(model, optimizer)
    for round_ in range(2):
        train(model, optimizer)
        average.update_parameters(model)
        if begins_dense and not round_:
            with pytest.raises(PatternBrokenError, match=r"^384 values under the masks"):
                holder.verify(average)
            holder.apply(average)
    holder.verify(average)
    assert lost(average.module, masks) == 0


def test_a_merge_of_lora_is_held_once_it_is_applied() -> None:
    model = pruned_net()
    masks = zeros(model)
    model.requires_grad_(False)
    weight = model.get_parameter("0.weight")
    low, high = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(32, 4))
    holder = twofour.hold_masks(model, AdamW([low, high]))
    weight.data += high.detach() @ low.detach()
    with pytest.raises(PatternBrokenError, match=r"^256 values .* in this one: 0.weight \(256\)"):
        holder.verify()
    holder.make_permanent()
    assert lost(model, masks) == 0
    assert not weight._post_accumulate_grad_hooks


def test_a_saved_mask_keeps_a_weight_free_that_happens_to_be_zero() -> None:
    model = pruned_net()
    masks = zeros(model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    saved = twofour.hold_masks(model, optimizer).state_dict()
    assert {name: (m.dtype, tuple(m.shape)) for name, m in saved.items()} == {
        "0.weight": (torch.uint8, (64,)),
        "2.weight": (torch.uint8, (32,)),
    }
    train(model, optimizer)
    row, column = (int(i) for i in model.get_parameter("0.weight").nonzero()[0])
    with torch.no_grad():
        model.get_parameter("0.weight")[row, column] = 0
    for masks_too in (False, True):
        resumed = copy.deepcopy(model)
        again = AdamW(resumed.parameters(), lr=0.01)
        again.load_state_dict(optimizer.state_dict())
        holder = twofour.hold_masks(resumed, again)
        if masks_too:
            holder.load_state_dict(saved)
        train(resumed, again)
        assert lost(resumed, masks) == 0
        assert bool(resumed.get_parameter("0.weight")[row, column] != 0) is masks_too


def test_after_remove_nothing_is_held() -> None:
    model = pruned_net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    holder = twofour.hold_masks(model, optimizer)
    masks = zeros(model)
    holder.remove()
    train(model, optimizer)
    assert lost(model, masks) > 300


def test_what_is_pruned_is_held_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(8, 6, 3),
            "up": nn.ConvTranspose2d(8, 4, 2),
            "attention": nn.MultiheadAttention(16, 2),
            "odd": nn.Linear(7, 3),
            "dense": nn.Linear(16, 16),
            "starts_at_zero": nn.Linear(8, 16, bias=False),
        }
    )
    nn.init.zeros_(model.get_parameter("starts_at_zero.weight"))
    twofour.prune(model, "1:4", exclude=["dense", "starts_at_zero"])
    model["conv"].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = SGD(model.parameters(), lr=0.01, weight_decay=0.1)
    holder = twofour.hold_masks(model, optimizer, "1:4")
    assert holder.weights == (
        "conv.weight",
        "up.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    )
    masks = {name: model.get_parameter(name) == 0 for name in holder.weights}
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert lost(model, masks) == 0
    assert all((model.get_parameter(n) != 0)[~mask].all() for n, mask in masks.items())


def _named(kind: str, base: type[nn.Module]) -> type[nn.Module]:
    return type(kind, (base,), {})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _, o: twofour.hold_masks(net(), o), "the zeros of no weight of Sequential hold"),
        (lambda m, o: twofour.hold_masks(m, o, "1:4"), "hold 1:4"),
        (lambda m, _: twofour.hold_masks(m, m), "must be a torch.optim.Optimizer, found Seq"),
        (lambda m, _: twofour.hold_masks(m, SGD(net().parameters())), "has none of the 2 weights"),
        (lambda m, o: twofour.hold_masks(m, o).apply(nn.Linear(2, 2)), "has no weight 0.weight"),
        (
            lambda m, o: twofour.hold_masks(
                _named("FullyShardedDataParallel", nn.Sequential)(m), o
            ),
            "FSDP1",
        ),
        (
            lambda m, o: twofour.hold_masks(m, o).load_state_dict({"0.weight": torch.zeros(9)}),
            r"the mask of 0.weight does not belong to a weight of \(32, 16\)",
        ),
    ],
)
def test_what_cannot_be_held_is_refused(
    call: Callable[[Model, Optimizer], object], message: str
) -> None:
    model = pruned_net()
    with pytest.raises(BadInputError, match=message):
        call(model, SGD(model.parameters(), lr=0.01))


def test_a_flattened_weight_is_refused_at_the_next_step() -> None:
    model = pruned_net()
    optimizer = SGD(model.parameters(), lr=0.01)
    twofour.hold_masks(model, optimizer)
    model.get_parameter("0.weight").data = torch.ones(512)
    with pytest.raises(BadInputError, match=r"0.weight is \[512\] here, and its mask is \[32, 16"):
        optimizer.step()

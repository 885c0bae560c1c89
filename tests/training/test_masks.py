"""Masks held in training: each way to lose the zeros of a pruned module, with and without them."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from support.trained import Model, loss, lost, net, pruned_net, train, zeros
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.nn.utils import parametrize
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel

import twofour
from twofour.errors import BadInputError, PatternBrokenError

Hold = Callable[[nn.Module, Optimizer], twofour.MaskHolder]
Case = Callable[[nn.Module, Hold], None]


def steps_of(kind: Callable[..., Optimizer], **options: Any) -> Case:
    def case(model: Model, hold: Hold) -> None:
        optimizer = kind(model.parameters(), lr=0.01, **options)
        hold(model, optimizer)
        train(model, optimizer)

    return case


def bfloat16(model: Model, hold: Hold) -> None:
    steps_of(AdamW)(model.bfloat16(), hold)


def compiled(model: Model, hold: Hold) -> None:
    steps_of(AdamW)(cast("nn.Module", torch.compile(model, backend="aot_eager")), hold)


def momentum_loaded_from_dense_training(model: Model, hold: Hold) -> None:
    dense, optimizer = net(), AdamW(model.parameters(), lr=0.01)
    hold(model, optimizer)
    before = AdamW(dense.parameters(), lr=0.01)
    train(dense, before)
    optimizer.load_state_dict(before.state_dict())
    train(model, optimizer)


def values_written_between_steps(model: Model, hold: Hold) -> None:
    hold(model, optimizer := SGD(model.parameters(), lr=0.01))
    train(model, optimizer)
    with torch.no_grad():
        for name, value in {"0.weight": math.nan, "2.weight": -0.0}.items():
            weight = model.get_parameter(name)
            weight.masked_fill_(weight == 0, value)
    optimizer.step()


def parameters_and_optimizer_replaced(model: Model, hold: Hold) -> None:
    holder = hold(model, SGD(model.parameters(), lr=0.01))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    holder.add_optimizer(optimizer := AdamW(model.parameters(), lr=0.01))
    train(model, optimizer)


def second_optimizer_with_momentum(model: Model, hold: Hold) -> None:
    first, second = (SGD(model.parameters(), lr=0.01, momentum=0.9) for _ in range(2))
    holder = hold(model, first)
    for weight in model.parameters():
        second.state[weight]["momentum_buffer"] = torch.ones_like(weight)
    holder.add_optimizer(second)
    train(model, first, second)


def schedules_before_and_after(model: Model, hold: Hold) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    first = OneCycleLR(optimizer, 0.1, total_steps=5)
    hold(model, optimizer)
    second = CosineAnnealingLR(optimizer, 5)
    train(model, optimizer)
    first.step()
    second.step()
    train(model, optimizer)


def wrapped(model: Model, hold: Hold) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    inside = SimpleNamespace(optimizer=optimizer)  # as Accelerate has it
    hold(DataParallel(model), cast("Optimizer", inside))
    train(model, optimizer)


def mixed_precision_accumulated_and_clipped(model: Model, hold: Hold) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    hold(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(model)
            torch.autograd.backward(scaler.scale(value))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def unfrozen_later(model: Model, hold: Hold) -> None:
    hold(model.requires_grad_(False), optimizer := AdamW(model.parameters(), lr=0.01))
    model.requires_grad_(True)
    train(model, optimizer)


CASES = {
    "sgd": steps_of(SGD),
    "adamw_with_decay": steps_of(AdamW, weight_decay=0.1, amsgrad=True),
    "adafactor": steps_of(Adafactor),
    **{
        case.__name__: case
        for case in (
            bfloat16,
            compiled,
            momentum_loaded_from_dense_training,
            values_written_between_steps,
            parameters_and_optimizer_replaced,
            second_optimizer_with_momentum,
            schedules_before_and_after,
            wrapped,
            mixed_precision_accumulated_and_clipped,
            unfrozen_later,
        )
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_zeros_stay_with_the_masks_and_are_lost_without(case: Case) -> None:
    held, free = pruned_net(), pruned_net()
    masks = zeros(held)
    before = {n: p.clone() for n, p in held.named_parameters()}
    case(held, twofour.hold_masks)
    assert sum(int(mask.sum()) for mask in masks.values()) == 1024
    assert lost(held, masks) == 0
    assert all(not torch.equal(p, before[n].to(p.dtype)) for n, p in held.named_parameters())
    case(free, Mock())
    assert lost(free, masks) > 100


def test_the_state_is_cleared_under_the_masks_alone_and_remove_lets_go() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    twofour.prune(model)
    before = {p: optimizer.state[p]["exp_avg"].clone() for p in model.parameters()}
    holder, masks = twofour.hold_masks(model, optimizer), zeros(model)
    for weight in (model.get_parameter("0.weight"), model.get_parameter("2.weight")):
        state = optimizer.state[weight]
        for value in (state["exp_avg"], state["exp_avg_sq"], cast("Tensor", weight.grad)):
            assert not value[weight == 0].any()
        assert torch.equal(state["exp_avg"][weight != 0], before[weight][weight != 0])
        assert int(state["step"]) == 3
    holder.remove()
    train(model, optimizer)
    assert lost(model, masks) > 300


def test_clipping_measures_the_kept_gradients_alone_in_new_parameters_too() -> None:
    model, free = pruned_net(), pruned_net()
    masks = zeros(model)
    holder = twofour.hold_masks(model, SGD(model.parameters(), lr=0.01))
    for _ in range(2):
        for part in (model, free):
            part.zero_grad()
            torch.manual_seed(1)
            torch.autograd.backward(loss(part))
        gradients = {n: cast("Tensor", p.grad) for n, p in free.named_parameters()}
        kept = [g.masked_fill(masks[n], 0) if n in masks else g for n, g in gradients.items()]
        expected = math.sqrt(sum(float(g.square().sum()) for g in kept))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert float(norm) == pytest.approx(expected, rel=1e-5)
        assert float(nn.utils.clip_grad_norm_(free.parameters(), 1e9)) > 1.1 * expected
        model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()}, assign=True)
        holder.add_optimizer(SGD(model.parameters(), lr=0.01))


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
            with pytest.raises(PatternBrokenError, match="1024 values under"):
                holder.verify(average)
            holder.apply(average)
    holder.verify(average)
    assert lost(average.module, masks) == 0


def test_a_merge_of_lora_is_held_once_it_is_applied() -> None:
    model = pruned_net()
    masks = zeros(model)
    model.requires_grad_(False)
    weight = model.get_parameter("0.weight")
    low, high = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(64, 4))
    holder = twofour.hold_masks(model, AdamW([low, high]))
    weight.data += high.detach() @ low.detach()
    with pytest.raises(PatternBrokenError, match=r"512 values .*0\.weight"):
        holder.verify()
    holder.make_permanent()
    assert lost(model, masks) == 0


def test_a_saved_mask_keeps_a_weight_free_that_happens_to_be_zero() -> None:
    model = pruned_net()
    masks = zeros(model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    saved = twofour.hold_masks(model, optimizer).state_dict()
    assert {name: (m.dtype, tuple(m.shape)) for name, m in saved.items()} == {
        "0.weight": (torch.uint8, (128,)),
        "2.weight": (torch.uint8, (128,)),
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


def test_what_is_pruned_is_held_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(16, 8, 3),
            "up": nn.ConvTranspose2d(32, 8, 2),
            "attention": nn.MultiheadAttention(32, 2),
            "odd": nn.Linear(7, 3),
            "dense": nn.Linear(32, 32),
            "starts_at_zero": nn.Linear(16, 64, bias=False),
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


NAMES = ("0.weight", "2.weight")
TUPLE: Any = (2, 4)


@pytest.mark.parametrize("hidden", [["2"], ["0", "2"]])
def test_a_weight_that_a_parametrization_hides_is_named_as_not_held(hidden: list[str]) -> None:
    model = pruned_net()
    for name in hidden:
        parametrize.register_parametrization(model.get_submodule(name), "weight", nn.Tanh())
    optimizer, free = SGD(model.parameters()), [n for n in NAMES if n[0] not in hidden]
    said = f"^{', '.join(f'{name}.weight' for name in hidden)}: not held"
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.warns(UserWarning, match=said))
        if not free:
            stack.enter_context(pytest.raises(BadInputError, match="of no weight"))
        assert list(twofour.hold_masks(model, optimizer).weights) == free


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _, o: twofour.hold_masks(net(), o), "the zeros of no weight of Sequential hold"),
        (lambda m, o: twofour.hold_masks(m, o, "1:4"), "hold 1:4"),
        (lambda m, _: twofour.hold_masks(m, m), "must be a torch.optim.Optimizer, found Seq"),
        (lambda m, _: twofour.hold_masks(m, SGD(net().parameters())), "has none of the 2 weights"),
        (lambda m, o: twofour.hold_masks(m, o).apply(nn.Linear(2, 2)), "has no weight 0.weight"),
        (lambda m, o: twofour.hold_masks(m, o, TUPLE), r"^'\(2, 4\)' is not an N:M pattern"),
        (
            lambda m, o: twofour.hold_masks(m, o).load_state_dict({}),
            "the saved masks lack those of 0.weight, 2.weight",
        ),
        (
            lambda m, o: twofour.hold_masks(m, o).load_state_dict(
                dict.fromkeys(NAMES, torch.zeros(9))
            ),
            r"the mask of 0.weight does not belong to a weight of \(64, 16\)",
        ),
    ],
)
def test_what_cannot_be_held_is_refused(
    call: Callable[[Model, Optimizer], object], message: str
) -> None:
    model = pruned_net()
    with pytest.raises(BadInputError, match=message):
        call(model, SGD(model.parameters(), lr=0.01))

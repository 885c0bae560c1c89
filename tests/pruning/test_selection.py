"""Which weights are pruned: defaults, globs, and arrays with several users."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support import report_cases

from twofour.errors import BadInputError
from twofour.pruning.selection import choose
from twofour.records.weights import Pattern, Reason, ReasonCode, Selection, Weight

TWO_FOUR = Pattern(2, 4)
ALL = Selection(all_layers=True)


def linear(layer: str, out: int = 8, into: int = 128, **changes: Any) -> Weight:
    return report_cases.linear(layer, into, out, **changes)


def conv(layer: str, channels: int, groups: int) -> Weight:
    return report_cases.conv(layer, channels, channels, groups=groups, op="Conv2d", node=None)


COMPUTED = linear(
    "hyper",
    weight=None,
    axis=None,
    reasons=(Reason(code=ReasonCode.NOT_CONSTANT, message="made in every forward"),),
)
MIXED = (
    linear("fc1"),
    linear("fc2", 128, 10),
    conv("grouped", 32, 4),
    conv("depthwise", 32, 32),
    COMPUTED,
)


def pruned(weights: tuple[Weight, ...], selection: Selection) -> list[str]:
    return [w.layer for w, chosen, _ in choose(weights, TWO_FOUR, selection) if chosen]


def codes(weights: tuple[Weight, ...], selection: Selection) -> list[list[str]]:
    return [[r.code.value for r in why] for _, _, why in choose(weights, TWO_FOUR, selection)]


def test_by_default_only_what_sparse_math_can_use_is_pruned() -> None:
    assert pruned(MIXED, Selection()) == ["fc1"]
    assert codes(MIXED, Selection()) == [
        [],
        ["AXIS_NOT_MULTIPLE"],
        ["GROUPED_CONV"],
        ["DEPTHWISE_CONV"],
        ["NOT_CONSTANT"],
    ]


def test_a_grouped_convolution_of_odd_width_has_both_reasons() -> None:
    ((_, _, why),) = choose((conv("g", 20, 2),), TWO_FOUR, Selection())
    assert [r.code.value for r in why] == ["GROUPED_CONV", "AXIS_NOT_MULTIPLE"]
    assert "C/groups=10" in why[1].message


def test_the_axis_is_judged_by_the_pattern_asked_for() -> None:
    weights = (linear("fc", 64, 24),)
    assert choose(weights, Pattern(4, 8), Selection())[0][1]
    assert not choose(weights, Pattern(8, 16), Selection())[0][1]


def test_all_layers_prunes_whatever_has_an_axis_and_keeps_the_reasons() -> None:
    assert pruned(MIXED, ALL) == ["fc1", "fc2", "grouped", "depthwise"]
    assert codes(MIXED, ALL)[1:3] == [["AXIS_NOT_MULTIPLE"], ["GROUPED_CONV"]]


def test_include_adds_layers_and_exclude_wins_over_it() -> None:
    assert pruned(MIXED, Selection(include=("group*",))) == ["fc1", "grouped"]
    both = Selection(include=("fc?",), exclude=("fc2",))
    assert pruned(MIXED, both) == ["fc1"]
    row = choose(MIXED, TWO_FOUR, both)[1]
    assert (row[2][0].code, "--exclude fc2" in row[2][0].message) == (ReasonCode.EXCLUDED, True)
    assert pruned(MIXED, Selection(all_layers=True, exclude=("fc*", "d*"))) == ["grouped"]
    assert pruned(MIXED, Selection(include=("*",), exclude=("hyper",)))[-1] == "depthwise"


def test_globs_match_weight_names_and_node_names_and_their_case() -> None:
    weights = (linear("a"), linear("b", node="MatMul_3"))
    assert pruned(weights, Selection(exclude=("a.weight",))) == ["b"]
    assert pruned(weights, Selection(exclude=("MatMul_*",))) == ["a"]
    with pytest.raises(BadInputError, match="matmul"):
        choose(weights, TWO_FOUR, Selection(exclude=("matmul_*",)))


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_glob_that_matches_nothing_is_an_error_with_close_names(option: str) -> None:
    weights = (linear("encoder.layer.0.fc1"), linear("encoder.layer.0.fc2"), linear("head"))
    globs: dict[str, Any] = {option: ("encoder.layers.0.fc1",)}
    selection = Selection(**globs)
    with pytest.raises(BadInputError, match=f"--{option} encoder.layers.0.fc1") as caught:
        choose(weights, TWO_FOUR, selection)
    assert caught.value.hint is not None
    assert "encoder.layer.0.fc1" in caught.value.hint
    assert "head" not in caught.value.hint


def test_an_include_of_the_impossible_names_the_layer_and_why() -> None:
    with pytest.raises(BadInputError, match=r"hyper.*made in every forward"):
        choose(MIXED, TWO_FOUR, Selection(include=("hyper",)))
    with pytest.raises(BadInputError, match=r"flat.*no axis"):
        choose((linear("flat", axis=None),), TWO_FOUR, Selection(include=("flat",)))


def test_nothing_overrides_a_zero_point_of_the_weight_and_one_of_activations_only_informs() -> None:
    point = Reason(code=ReasonCode.ZERO_POINT, message="zero point is 3")
    assert pruned((linear("q8", axis=None, reasons=(point,)),), ALL) == []
    assert pruned((linear("q8", reasons=(point,)),), Selection()) == ["q8"]


def tied(*axes: int) -> tuple[Weight, ...]:
    names = [f"user{i}" for i in range(len(axes))]
    return tuple(
        linear(name, 32, 32, axis=axis, tied_to=tuple(n for n in names if n != name))
        for name, axis in zip(names, axes, strict=True)
    )


def test_users_of_one_array_along_one_axis_are_pruned_together_and_others_as_they_are() -> None:
    weights = (*tied(1, 1), linear("alone", 32, 32, axis=0))
    assert pruned(weights, Selection()) == ["user0", "user1", "alone"]


def test_excluding_one_user_leaves_the_array_dense_for_all() -> None:
    rows = choose(tied(1, 0), TWO_FOUR, Selection(exclude=("user1",)))
    assert [chosen for _, chosen, _ in rows] == [False, False]
    assert "array with user1" in rows[0][2][0].message


def test_a_user_that_needs_it_dense_learns_that_the_array_is_pruned() -> None:
    first, second = tied(1, 1)
    grouped = Reason(code=ReasonCode.GROUPED_CONV, message="2 groups")
    rows = choose((first, dataclasses.replace(second, reasons=(grouped,))), TWO_FOUR, Selection())
    assert [chosen for _, chosen, _ in rows] == [True, True]
    assert [r.code for r in rows[1][2]] == [ReasonCode.GROUPED_CONV, ReasonCode.SHARED_WEIGHT]


@pytest.mark.parametrize(
    ("globs", "left"),
    [
        (("a[[]0]",), ["a[0]"]),
        (("a[0]",), ["a0"]),
        (("b*", "b1"), ["b1"]),
        (("a[[]?]",), ["a[0]"]),
        (("a[[]0]", "a0", "b1"), ["a[0]", "a0", "b1"]),
    ],
)
def test_a_glob_may_spell_a_name(globs: tuple[str, ...], left: list[str]) -> None:
    weights = tuple(map(linear, ("a[0]", "a0", "b1")))
    found = choose(weights, TWO_FOUR, Selection(exclude=globs))
    assert [w.layer for w, chosen, _ in found if not chosen] == left
    said = next(reasons[0].message for w, _, reasons in found if w.layer == left[-1])
    first = globs[0] if len(globs) < 3 else globs[-1]
    assert said == f"left dense by --exclude {first}"

"""Thresholds that agree best with what was chosen: the fit of engine_evidence.py."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from engine_evidence_parts.records import Answer
from engine_evidence_parts.thresholds import FEWEST_LAYERS, Outcome, fit, foretells
from hypothesis import assume, given
from hypothesis import strategies as st

SIZES = (16, 32, 64, 128, 256, 512)
sizes = st.sampled_from(SIZES)
outcomes = st.builds(Outcome, in_channels=sizes, out_channels=sizes, chosen=st.booleans())


def chosen_from(c0: int, k0: int, pairs: list[tuple[int, int]]) -> list[Outcome]:
    """Outcomes by a known rule."""
    return [Outcome(in_channels=c, out_channels=k, chosen=c >= c0 and k >= k0) for c, k in pairs]


def balanced(said: list[bool], data: list[Outcome]) -> float:
    """Balanced accuracy, straight from its definition."""
    shares = []
    for side in (True, False):
        of_side = [s is o.chosen for s, o in zip(said, data, strict=True) if o.chosen is side]
        shares.append(sum(of_side) / len(of_side))
    return sum(shares) / 2


@given(sizes, sizes)
def test_a_known_rule_comes_back_from_a_whole_grid(c0: int, k0: int) -> None:
    assume((c0, k0) != (SIZES[0], SIZES[0]))
    found = fit(chosen_from(c0, k0, list(product(SIZES, SIZES))))
    assert found.answer is Answer.THRESHOLDS
    assert (found.least_in_channels, found.least_out_channels) == (c0, k0)
    assert (found.right, found.wrong, found.balanced_accuracy) == (36, 0, 1.0)
    assert (found.equal_in_channels, found.equal_out_channels) == ((c0, c0), (k0, k0))


@given(sizes, sizes, st.lists(st.tuples(sizes, sizes), min_size=FEWEST_LAYERS, max_size=40))
def test_a_known_rule_is_matched_without_an_error_by_thresholds_no_larger(
    c0: int, k0: int, pairs: list[tuple[int, int]]
) -> None:
    data = chosen_from(c0, k0, pairs)
    assume(0 < sum(o.chosen for o in data) < len(data))
    found = fit(data)
    assert found.wrong == 0
    assert found.least_in_channels is not None
    assert found.least_out_channels is not None
    reached = [o for o in data if o.chosen]
    occurring = min(o.in_channels for o in reached) * min(o.out_channels for o in reached)
    assert found.least_in_channels * found.least_out_channels <= occurring
    assert [foretells(found, o) for o in data] == [o.chosen for o in data]


@given(st.lists(outcomes, min_size=FEWEST_LAYERS, max_size=40))
def test_a_fit_is_the_best_there_is_and_never_worse_than_a_constant(data: list[Outcome]) -> None:
    assume(0 < sum(o.chosen for o in data) < len(data))
    found = fit(data)
    said = [foretells(found, o) for o in data]
    assert None not in said
    assert found.balanced_accuracy == pytest.approx(balanced([bool(s) for s in said], data))
    assert found.balanced_accuracy is not None
    assert found.balanced_accuracy >= 0.5
    for c, k in product(SIZES, SIZES):
        rival = [o.in_channels >= c and o.out_channels >= k for o in data]
        assert found.balanced_accuracy >= balanced(rival, data) - 1e-12


@given(st.lists(outcomes, max_size=40))
def test_counts_are_those_of_the_data(data: list[Outcome]) -> None:
    found = fit(data)
    assert found.layers == len(data)
    assert found.chosen == sum(o.chosen for o in data)
    assert found.sizes == len({(o.in_channels, o.out_channels) for o in data})
    if found.right is not None and found.wrong is not None:
        assert found.right + found.wrong == len(data)
        wrong = sum(foretells(found, o) is not o.chosen for o in data)
        assert wrong == found.wrong
        # sizes of both outcomes are wrong at least once each, whatever the rule
        assert found.wrong >= found.mixed_sizes


@given(st.lists(outcomes, min_size=FEWEST_LAYERS, max_size=30), st.randoms())
def test_the_order_of_the_layers_does_not_matter(data: list[Outcome], rng: Random) -> None:
    mixed = list(data)
    rng.shuffle(mixed)
    assert fit(mixed) == fit(data)


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=30), st.booleans())
def test_one_outcome_alone_is_said_in_words_however_few_layers(
    pairs: list[tuple[int, int]], outcome: bool
) -> None:
    data = [Outcome(in_channels=c, out_channels=k, chosen=outcome) for c, k in pairs]
    found = fit(data)
    assert found.answer is (Answer.ALL_CHOSEN if outcome else Answer.NONE_CHOSEN)
    assert found.right is None
    assert {foretells(found, o) for o in data} == {None}


@given(st.lists(outcomes, max_size=FEWEST_LAYERS - 1))
def test_fewer_than_eight_layers_give_no_rule(data: list[Outcome]) -> None:
    found = fit(data)
    assert found.answer in (Answer.TOO_FEW, Answer.ALL_CHOSEN, Answer.NONE_CHOSEN)
    assert found.least_in_channels is None
    assert found.balanced_accuracy is None


def test_nothing_at_all_is_too_few() -> None:
    assert fit([]).answer is Answer.TOO_FEW


def test_never_where_only_small_layers_were_chosen() -> None:
    data = [Outcome(in_channels=c, out_channels=c, chosen=c < 64) for c in SIZES for _ in "xy"]
    found = fit(data)
    assert (found.answer, found.right, found.wrong) == (Answer.NEVER, 8, 4)
    assert found.balanced_accuracy == 0.5


def test_always_where_most_were_chosen_and_size_tells_nothing() -> None:
    data = [Outcome(in_channels=64, out_channels=64, chosen=at > 2) for at in range(12)]
    found = fit(data)
    assert (found.answer, found.right, found.wrong) == (Answer.ALWAYS, 9, 3)
    assert found.mixed_sizes == 1


def test_never_before_always_where_half_were_chosen() -> None:
    data = [Outcome(in_channels=64, out_channels=64, chosen=at % 2 == 0) for at in range(12)]
    assert fit(data).answer is Answer.NEVER


def test_among_equal_thresholds_the_smallest_product_is_taken_and_the_others_are_told() -> None:
    # nothing lies between 16 and 256 on the way along the diagonal
    data = chosen_from(256, 256, [(16, 16)] * 4 + [(16, 256)] * 4 + [(256, 256)] * 4)
    found = fit(data)
    assert (found.least_in_channels, found.least_out_channels) == (256, 16)
    assert found.equal_in_channels == (256, 256)
    assert found.equal_out_channels == (16, 256)


def test_a_few_chosen_layers_are_not_drowned_by_the_many_that_are_not() -> None:
    # 2 of 42 chosen; plain accuracy would call "never" best with 40 right, against 37
    data = chosen_from(512, 512, [(16, 16)] * 35 + [(512, 512)] * 2)
    data += [Outcome(in_channels=512, out_channels=512, chosen=False)] * 5
    found = fit(data)
    assert found.answer is Answer.THRESHOLDS
    assert (found.equal_in_channels, found.equal_out_channels) == ((16, 512), (16, 512))
    assert (found.right, found.wrong, found.chosen) == (37, 5, 2)

"""Moments of channels, the changes that match them, and the choice by the outputs."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from twofour.pruning.repair import (
    Moments,
    Normalisation,
    OutputDistance,
    chosen,
    compared_values,
    concluded,
    estimated_again,
    joined,
    matching,
    moments,
    renormalised,
)
from twofour.records.pruning import RepairKind, RepairTry

FLOATS = st.floats(-1e3, 1e3, width=32)
VALUES = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 12), st.integers(1, 4)), elements=FLOATS
)


def normal(seed: int, rows: int = 4000, channels: int = 5) -> NDArray[np.float64]:
    random = np.random.default_rng(seed)
    scales, means = random.uniform(0.2, 3, channels), random.normal(0, 4, channels)
    return random.normal(means, scales, (rows, channels))


def of(values: NDArray[np.floating]) -> Moments:
    found = joined([moments(values, values.ndim - 1)])
    assert found is not None
    return found


@given(values=VALUES, cut=st.integers(0, 12))
def test_moments_do_not_depend_on_how_the_rows_are_cut_into_batches(
    values: NDArray[np.float32], cut: int
) -> None:
    pieces = joined([moments(values[:cut], 1), moments(values[cut:], 1)])
    assert pieces is not None
    assert pieces.count == len(values)
    exact = values.astype(np.float64)
    np.testing.assert_allclose(pieces.mean, exact.mean(axis=0), rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(pieces.variance, exact.var(axis=0), rtol=1e-9, atol=1e-7)


def test_a_small_variance_about_a_large_mean_is_not_lost() -> None:
    values = 1e6 + np.array([[0.0], [1.0], [2.0], [3.0]])
    parts = [moments(values[[at]], 1) for at in range(4)]
    whole = joined(parts)
    assert whole is not None
    assert whole.variance[0] == pytest.approx(1.25, rel=1e-9)


def test_channels_may_lie_on_any_axis_and_places_be_left_out() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    kept = np.array([[True, False, False, True], [False, True, False, False]])
    found = moments(values, 1, kept)
    assert found.count == 3
    np.testing.assert_allclose(found.mean, np.mean([[0, 4, 8], [3, 7, 11], [13, 17, 21]], axis=0))


def test_no_value_and_values_that_are_not_finite_give_no_moments() -> None:
    empty = moments(np.zeros((0, 3)), 1)
    assert empty.count == 0
    assert joined([empty, empty]) is None
    assert joined([]) is None
    assert joined([moments(np.array([[1.0], [nan]]), 1)]) is None
    assert joined([empty, moments(np.ones((2, 3)), 1)]) is not None


def test_matching_gives_the_mean_and_deviation_of_the_dense_model() -> None:
    dense, now = normal(0), normal(1)
    change = matching(of(dense), of(now))
    repaired = now * change.scale + change.shift
    np.testing.assert_allclose(repaired.mean(axis=0), dense.mean(axis=0), rtol=1e-9)
    assert ((change.scale >= 0.25) & (change.scale <= 4)).all()
    inside = (change.scale > 0.26) & (change.scale < 3.9)
    wanted, had = dense.std(axis=0), repaired.std(axis=0)
    np.testing.assert_allclose(had[inside], wanted[inside], rtol=0.02)


def test_matching_without_a_bias_gives_the_mean_square() -> None:
    dense, now = normal(0), normal(0) * 0.7 + 0.1
    change = matching(of(dense), of(now), has_bias=False)
    assert (change.shift == 0).all()
    had = ((now * change.scale) ** 2).mean(axis=0)
    np.testing.assert_allclose(had, (dense**2).mean(axis=0), rtol=0.01)


def test_matching_of_what_did_not_change_changes_nothing() -> None:
    same = of(normal(3))
    change = matching(same, same)
    np.testing.assert_allclose(change.scale, 1, rtol=1e-12)
    np.testing.assert_allclose(change.shift, 0, atol=1e-12)


def test_a_scale_is_bounded_and_a_dead_channel_is_not_blown_up() -> None:
    dense, now = normal(0, channels=4), normal(0, channels=4)
    now[:, 0] = dense[:, 0] * 1e-6  # as good as gone
    now[:, 1] = dense[:, 1] * 1e3
    dense[:, 2] = now[:, 2] = 7.0  # constant in both
    change = matching(of(dense), of(now))
    assert change.scale[0] == pytest.approx(4.0)
    assert change.scale[1] == pytest.approx(0.25)
    assert change.scale[2] == pytest.approx(1.0)


def test_layers_that_are_constant_in_all_channels_keep_their_scale() -> None:
    constant = of(np.ones((50, 3)))
    assert (matching(constant, constant).scale == 1).all()


@given(rows=st.integers(2, 200))
def test_the_fewer_values_the_nearer_is_a_scale_to_1(rows: int) -> None:
    wide, narrow = np.linspace(-2, 2, rows)[:, None], np.linspace(-1, 1, rows)[:, None]
    few = matching(of(wide), of(narrow)).scale[0]
    more = matching(of(np.repeat(wide, 2, axis=0)), of(np.repeat(narrow, 2, axis=0))).scale[0]
    assert 1 < few < more < 2


def test_batch_norms_get_the_mean_and_the_unbiased_variance_of_all_values() -> None:
    values = normal(6, rows=37)
    found = estimated_again(of(values))
    assert found is not None
    np.testing.assert_allclose(found.mean, values.mean(axis=0))
    np.testing.assert_allclose(found.variance, values.var(axis=0, ddof=1))
    assert estimated_again(of(values[:1])) is None


def test_renormalised_batch_norms_give_out_what_the_dense_one_gave() -> None:
    dense, now = normal(7), normal(7) * 0.8 + 0.3
    epsilon = 1e-5
    running = Normalisation(mean=dense.mean(axis=0) + 0.1, variance=dense.var(axis=0) * 1.2)
    found = renormalised(running, epsilon, of(dense), of(now))

    def normalised(values: NDArray[np.float64], by: Normalisation) -> NDArray[np.float64]:
        out: NDArray[np.float64] = (values - by.mean) / np.sqrt(by.variance + epsilon)
        return out

    before, after = normalised(dense, running), normalised(now, found)
    np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(after.std(axis=0), before.std(axis=0), rtol=2e-3)


def test_a_variance_never_becomes_negative_and_the_mean_still_fits() -> None:
    dense, now = normal(8, channels=2), normal(8, channels=2) * 0.5
    running = Normalisation(mean=dense.mean(axis=0) + 1, variance=np.array([1e-6, 0.0]))
    found = renormalised(running, 1e-3, of(dense), of(now))
    assert (found.variance >= 0).all()
    before = (dense.mean(axis=0) - running.mean) / np.sqrt(running.variance + 1e-3)
    after = (now.mean(axis=0) - found.mean) / np.sqrt(found.variance + 1e-3)
    np.testing.assert_allclose(after, before, rtol=1e-9)


def distance(*outputs: tuple[int, object, object]) -> float | None:
    """Of outputs whose every value is of a sample of its own."""
    found = OutputDistance()
    for number, *both in outputs:
        found.add(number, *(np.asarray(one, np.float32).reshape(-1, 1, 1) for one in both))
    return found.error()


def distance_of(dense: np.ndarray, now: np.ndarray, calls: int = 1) -> float | None:
    """Of one output (samples, ...), all of which counts, cut into calls."""
    found = OutputDistance()
    for one, other in zip(np.split(dense, calls), np.split(now, calls), strict=True):
        kept = np.ones(one.shape, np.bool_)
        found.add(0, compared_values(one, kept), compared_values(other, kept))
    return found.error()


def test_the_distance_is_the_squared_one_over_the_variance_of_the_dense_output() -> None:
    assert distance((0, [0, 2], [0, 3]), (0, [4], [4])) == pytest.approx(1 / 8)


@pytest.mark.parametrize("calls", [1, 5])
def test_what_all_samples_share_does_not_hide_what_each_of_them_loses(calls: int) -> None:
    """Logits that are far apart for every sample, and lose all that tells samples apart."""
    random = np.random.default_rng(0)
    constant = np.array([0, 50, -50, 100], np.float32)
    dense = constant + random.normal(0, 1, (40, 4)).astype(np.float32)
    now = np.broadcast_to(dense.mean(axis=0), dense.shape)
    assert distance_of(dense, now, calls) == pytest.approx(1, rel=1e-5)
    over_all = ((now - dense) ** 2).sum() / ((dense - dense.mean()) ** 2).sum()
    assert over_all < 4e-4, "what was taken before"


def test_columns_are_the_places_of_an_image_and_of_a_text() -> None:
    random = np.random.default_rng(1)
    for shape in ((6, 3, 4, 5), (6, 7, 5)):
        constant = 100 * random.normal(0, 1, shape[1:])
        dense = (constant + random.normal(0, 1, shape)).astype(np.float32)
        now = dense + random.normal(0, 0.3, shape).astype(np.float32)
        wanted = ((now - dense) ** 2).sum() / ((dense - dense.mean(axis=0)) ** 2).sum()
        assert distance_of(dense, now, 2) == pytest.approx(wanted, rel=1e-4)


def test_a_single_sample_is_judged_by_its_channels_and_without_places_by_all_values() -> None:
    dense = np.arange(12, dtype=np.float32).reshape(1, 4, 3)
    by_channel = ((dense - dense.mean(axis=1, keepdims=True)) ** 2).sum()
    assert distance_of(dense, dense + 1) == pytest.approx(12 / by_channel)
    logits = np.array([[0, 3, 6]], np.float32)
    assert distance_of(logits, logits + 1) == pytest.approx(3 / 18)


def test_texts_of_several_lengths_are_judged_by_channels() -> None:
    random = np.random.default_rng(2)
    offset = np.array([0, 10, -20], np.float32)
    calls = [offset + random.normal(0, 1, (2, n, 3)).astype(np.float32) for n in (4, 5)]
    padded = np.ones((2, 4, 3), np.bool_)
    padded[1, 2:] = False
    found = OutputDistance()
    seen = [compared_values(one, kept) for one, kept in ((calls[0], padded), (calls[1], None))]
    assert [one.shape for one in seen] == [(6, 1, 3), (0, 1, 1)]
    for one, kept in ((calls[0], padded), (calls[1], np.ones((2, 5, 3), np.bool_))):
        found.add(0, compared_values(one, kept), compared_values(one + 1, kept))
    rows = np.concatenate([calls[0][0], calls[0][1, :2], *calls[1]])
    wanted = rows.size / ((rows - rows.mean(axis=0)) ** 2).sum()
    assert found.error() == pytest.approx(wanted, rel=1e-5)


def test_what_varies_by_no_more_than_rounding_is_taken_for_constant() -> None:
    """Else an output that no input reaches would outweigh all others."""
    dense = np.array([[1, 2], [1, 2.0000002]], np.float32)
    now = dense + np.float32(0.1)
    wanted = ((now - dense) ** 2).sum() / ((dense - dense.mean()) ** 2).sum()
    assert distance_of(dense, now) == pytest.approx(wanted)


def test_an_output_whose_size_hangs_on_the_weights_is_left_out() -> None:
    assert distance((0, [0, 2], [1, 2]), (1, [0, 2, 4], [0, 2])) == pytest.approx(0.5)
    assert distance((1, [0, 2, 4], [0, 2])) is None


def test_of_a_large_output_a_million_values_are_compared_at_most() -> None:
    large = np.zeros((3, 700, 1000), np.float32)
    kept = np.ones(large.shape, np.bool_)
    assert compared_values(large, kept).shape == (3, 349, 1000)
    wide = np.zeros((3, 2, 1_000_000), np.float32)
    assert compared_values(wide, np.ones(wide.shape, np.bool_)).shape == (3, 1, 349525)
    long = np.zeros(3_000_000, np.float32)
    assert compared_values(long, np.ones(long.shape, np.bool_)).shape[0] <= 1 << 20


def test_the_distance_is_the_mean_over_outputs_that_vary() -> None:
    assert distance((0, [0, 2], [1, 2]), (1, [0, 20], [0, 20])) == pytest.approx(0.25)
    assert distance((0, [0, 2], [1, 2]), (1, [5, 5], [9, 9])) == pytest.approx(0.5)


def test_there_is_no_distance_without_outputs_or_variation() -> None:
    assert distance() is None
    assert distance((0, [], [])) is None
    assert distance((0, [3, 3], [1, 2])) is None
    assert distance((0, [3, nan], [1, 2])) is None


def test_outputs_that_are_not_finite_are_infinitely_far_away() -> None:
    assert distance((0, [0, 2], [0, nan])) == inf
    assert distance((0, [0, 2], [0, inf])) == inf


def tried(*errors: float | None) -> list[RepairTry]:
    return [
        RepairTry(kind=kind, error=error, changed=1)
        for kind, error in zip(RepairKind, errors, strict=False)
    ]


@pytest.mark.parametrize(
    ("before", "errors", "taken"),
    [
        (0.5, (0.4, 0.3, 0.35), RepairKind.MATCHING),
        (0.5, (0.3, 0.3), RepairKind.BATCH_NORM),
        (0.5, (0.5, 0.6), None),
        (0.5, (0.499, 0.4999), None),
        (0.0, (0.0,), None),
        (0.5, (inf, nan), None),
        (inf, (0.9,), RepairKind.BATCH_NORM),
        (None, (None,), None),
        (0.5, (), None),
    ],
)
def test_the_nearest_is_taken_where_it_is_nearer_than_none(
    before: float | None, errors: tuple[float | None, ...], taken: RepairKind | None
) -> None:
    found = chosen(tried(*errors), before, always=False)
    assert (None if found is None else found.kind) == taken


def test_asked_for_the_best_is_taken_and_without_a_score_the_first() -> None:
    best = chosen(tried(0.7, 0.6), 0.5, always=True)
    assert best is not None
    assert best.kind is RepairKind.MATCHING
    first = chosen(tried(None, None), None, always=True)
    assert first is not None
    assert first.kind is RepairKind.BATCH_NORM
    assert chosen([], 0.5, always=True) is None


@pytest.mark.parametrize(
    ("tries", "before", "judged_on", "why"),
    [
        ((), 0.5, 3, "no batch norm and no pruned layer whose output is seen could be changed"),
        ((None,), None, 0, "no sample was held out to judge it by"),
        ((None,), None, 3, "no output of floats varies on the held-out samples"),
        ((0.6,), 0.5, 3, "no kind brings the outputs on held-out samples nearer by 1%"),
        ((0.3,), 0.5, 3, "the outputs on held-out samples are nearest with it"),
    ],
)
def test_the_record_says_why(
    tries: tuple[float | None, ...], before: float | None, judged_on: int, why: str
) -> None:
    each = tuple(tried(*tries))
    taken = chosen(each, before, always=False)
    record = concluded(each, taken, (before, before), judged_on)
    assert record.why.startswith(why)
    assert record.taken == (None if taken is None else taken.kind)
    assert record.tried == each

"""What calibration samples count for: copies, samples much larger than the others, only zeros."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from twofour.inputs.samples import SampleSplit
from twofour.records.weights import Calibration

ABOUT = Calibration(source="x", samples=0, held_out=0, notes=("first",))


def split_of(*batches: NDArray[np.generic]) -> SampleSplit:
    split = SampleSplit()
    for batch in batches:
        split.add([batch, np.ones((), np.float32)], len(batch))
    return split


def rows(count: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).uniform(0.5, 1, (count, 6))


def test_copies_are_on_one_side_and_count_once() -> None:
    x = rows(20)
    split = split_of(np.repeat(x, 3, axis=0), x[9:10], (1000 * x[:2]).astype(np.int64))
    numbers = np.flatnonzero(split.factors)
    assert np.array_equal(numbers, [*range(0, 60, 3), 61, 62])
    assert np.array_equal(np.flatnonzero(split.factors < 0), [27, 57])
    assert split.noted_in(ABOUT).held_out == 2
    assert split.noted_in(ABOUT).notes[1:] == (
        "copies of other calibration samples: 41 of 63; 22 count",
    )


@pytest.mark.parametrize("times", [300, 10_000])
def test_a_sample_much_larger_than_the_others_counts_as_one_of_them(times: int) -> None:
    x = np.ones((40, 6)) + 1e-6 * rows(40)
    x[17] *= times
    factors = split_of(x).factors
    assert factors[17] == pytest.approx(1 / times, rel=1e-3)
    assert np.array_equal(np.delete(np.abs(factors), 17), np.ones(39))
    (note,) = split_of(x).noted_in(ABOUT).notes[1:]
    assert note == (
        f"calibration sample 18 is {times:,} times as large as the median one: it counts as if it "
        "were as large as that"
    )
    x[3] *= 20
    assert "median one (1 more like it):" in split_of(x).noted_in(ABOUT).notes[1]


def test_sizes_of_token_ids_say_nothing() -> None:
    ids = np.array([[1, 2], [3, 1], [30_000, 2]])
    assert np.array_equal(split_of(ids).factors, np.ones(3))


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_samples_that_are_all_0_do_not_count(kind: type[np.generic]) -> None:
    split = split_of(np.zeros((3, 4), kind), np.zeros((2, 4), kind))
    assert not split.factors.any()
    notes = split.noted_in(ABOUT).notes
    assert "is 0: pruned" in notes[1]

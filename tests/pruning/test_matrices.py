"""Of many outputs of a convolution, some of each sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.calibrated_layers import layout_of, window_of
from torch import nn

from twofour.pruning.matrices import (
    SampleRange,
    sampled,
    window_rows,
)

CONVOLUTIONS = [
    (nn.Conv2d(8, 6, 3, stride=2, padding=1, groups=2), (2, 8, 7, 6)),
    (nn.Conv2d(5, 6, (3, 2), padding=(1, 0)), (2, 5, 6, 5)),
    (nn.ConvTranspose1d(6, 4, 3, stride=2, padding=1, output_padding=1), (2, 6, 5)),
    (nn.ConvTranspose2d(8, 6, (3, 2), stride=(2, 1), dilation=2, groups=2), (2, 8, 4, 5)),
]


@pytest.mark.parametrize("of", [slice(None), slice(9, None, 10), slice(0, None, 4)])
def test_every_place_is_looked_at_as_often_over_many_samples(of: slice) -> None:
    """Also of those held out, and of samples with a period: a corner no less than the middle."""
    numbers = np.arange(64 if of == slice(None) else 640)[of]
    places = sampled(16 * 16, 64, numbers)
    assert places is not None
    assert places.shape == (len(numbers), 64)
    seen = np.bincount(places.reshape(-1), minlength=256)
    assert seen[[0, 15, 240, 255]].min() >= len(numbers) / 4 - 2
    assert np.abs(seen - len(numbers) / 4).max() <= (2 if of == slice(None) else 4)


@given(count=st.integers(1, 5000), most=st.integers(1, 200), first=st.integers(0, 10**6))
def test_places_of_a_sample_are_different_ones_and_spread(
    count: int, most: int, first: int
) -> None:
    places = sampled(count, most, np.arange(first, first + 3))
    if count <= most:
        assert places is None
        return
    assert places is not None
    assert places.shape == (3, most)
    assert places.min() >= 0
    assert places.max() < count
    assert (np.diff(places) > 0).all()
    if most >= 32:
        eighths = [np.bincount(row * 8 // count, minlength=8) for row in places]
        # 7 is the most over every count, every number of places and every start of these ranges
        assert np.abs(np.array(eighths) - most / 8).max() <= 7


def test_rows_of_a_tensor_that_cuts_samples_up_are_numbered_over_all_batches() -> None:
    """Four views of each sample, one behind the other."""
    assert list(SampleRange(first=3, samples=2, in_all=9).numbers(8)) == list(range(12, 20))


@pytest.mark.parametrize("per_tap", [False, True])
@pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS)
def test_rows_of_some_outputs_are_those_among_the_rows_of_all(
    module: Any, shape: tuple[int, ...], per_tap: bool
) -> None:
    layout, window = replace(layout_of(module), per_tap=per_tap), window_of(module)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    every = window_rows(x.numpy(), layout, window)
    outputs = every.shape[1] // shape[0]
    places = sampled(outputs, 3, np.arange(shape[0]))
    assert places is not None
    wanted = (places + outputs * np.arange(shape[0])[:, None]).reshape(-1)
    rows = window_rows(x.numpy(), layout, window, places)
    assert np.array_equal(rows, every[:, wanted])

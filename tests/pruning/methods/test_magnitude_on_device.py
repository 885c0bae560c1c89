"""The tensor path of magnitude pruning, on CPU tensors, against the path of numpy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twofour.errors import BadInputError, PatternBrokenError
from twofour.pattern import count_zeros
from twofour.pruning.methods.keep import keep_bits_in_place
from twofour.pruning.methods.magnitude import Outcome, count_non_finite, prune_bits_in_place
from twofour.pruning.methods.magnitude_on_device import (
    count_non_finite_on_device,
    count_zeros_on_device,
    prune_on_device,
    prune_where_it_lies,
    tiles,
)
from twofour.records.weights import Pattern

TWO_FOUR = Pattern(2, 4)
INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.dtype])


def name_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any rank, float type and layout; ties and zeros of both signs, or any finite bits."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    kind = draw(st.sampled_from(list(INTEGERS)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        tensor = (torch.randn(shape, generator=random) * 2).round().to(kind)
    else:
        limits = torch.iinfo(INTEGERS[kind])
        bits = torch.randint(limits.min, limits.max, shape, generator=random)
        tensor = bits.to(INTEGERS[kind]).view(kind)
        tensor[~torch.isfinite(tensor)] = -0.0
    layout = draw(st.sampled_from(["contiguous", "transposed", "strided"]))
    if layout == "transposed":
        return tensor.permute(draw(st.permutations(range(tensor.ndim))))
    return tensor.repeat_interleave(2, dim=-1)[..., ::2] if layout == "strided" else tensor


@given(
    tensors(),
    st.integers(2, 32).flatmap(
        lambda m: st.builds(Pattern, st.integers(1, m - 1), st.just(m)),
    ),
    st.sampled_from([1, 16, 100, 1 << 22]),
    st.data(),
)
def test_a_tensor_gets_the_bits_that_a_numpy_array_gets(
    tensor: torch.Tensor, pattern: Pattern, most: int, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(-tensor.ndim, tensor.ndim - 1))
    array, kind = bits_of(tensor.clone()).numpy(), name_of(tensor)
    expected = prune_bits_in_place(array, axis, pattern, kind=kind)
    outcome = prune_on_device(bits_of(tensor), axis, pattern, kind=kind, most=most)
    assert bits_of(tensor).tolist() == array.tolist()
    assert (outcome.zeros, outcome.zeros_before, outcome.non_finite) == (
        expected.zeros,
        expected.zeros_before,
        0,
    )
    if outcome.kept_magnitude is not None and expected.kept_magnitude is not None:
        assert outcome.kept_magnitude == pytest.approx(expected.kept_magnitude, rel=1e-5)
    assert count_zeros_on_device(bits_of(tensor), kind=kind, most=most) == outcome.zeros


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 200),
    st.data(),
)
def test_tiles_hold_each_element_once_and_never_cut_a_group(
    shape: list[int], group: int, most: int, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    shape[axis] *= group
    places = torch.arange(math.prod(shape)).reshape(shape)
    found = [tile.movedim(axis, -1).reshape(-1, group) for tile in tiles(places, axis, group, most)]
    assert all(tile.numel() <= max(most, group) for tile in found)
    whole = places.movedim(axis, -1).reshape(-1, group)
    assert sorted(torch.cat(found).tolist()) == sorted(whole.tolist())


@pytest.mark.parametrize("kind", INTEGERS)
def test_values_that_are_not_finite_and_zeros_are_counted(kind: Any) -> None:
    tensor = torch.tensor([1, -0.0, math.nan, math.inf, 0, 2, -math.inf, -math.nan], dtype=kind)
    name = name_of(tensor)
    assert count_non_finite_on_device(bits_of(tensor), kind=name, most=3) == 4
    assert count_non_finite(bits_of(tensor).numpy(), kind=name) == 4
    assert count_zeros_on_device(bits_of(tensor), kind=name, most=3) == 2
    assert count_zeros(bits_of(tensor).numpy(), kind=name) == 2
    assert prune_on_device(bits_of(tensor), 0, TWO_FOUR, kind=name).non_finite == 4


def test_tensors_and_arrays_are_told_apart() -> None:
    tensor = torch.tensor([[4.0, -3, 2, 1], [0, 0, 0, 5]])
    array = tensor.numpy().copy()
    expected = Outcome(kept_magnitude=12 / 15, zeros=5, zeros_before=3)
    assert prune_where_it_lies(bits_of(tensor), 1, TWO_FOUR, kind="float32") == expected
    assert prune_where_it_lies(array.view("u4"), 1, TWO_FOUR, kind="float32") == expected
    assert tensor.tolist() == array.tolist() == [[4, -3, 0, 0], [0, 0, 0, 5]]


def test_the_mask_of_a_tensor_is_kept_or_refused_like_that_of_an_array() -> None:
    tensor = torch.tensor([[4.0, -3, 0, 0], [0, 0, 0, 5]])
    before = tensor.clone()
    outcome = keep_bits_in_place(bits_of(tensor), 1, TWO_FOUR, kind="float32")
    assert outcome == Outcome(kept_magnitude=1.0, zeros=5, zeros_before=5)
    tensor[1, :2] = before[1, :2] = 1
    with pytest.raises(PatternBrokenError, match="1 non-zeros are more than 2:4 allows"):
        keep_bits_in_place(bits_of(tensor), 1, TWO_FOUR, kind="float32")
    assert torch.equal(tensor, before)


def test_an_expanded_tensor_and_an_axis_that_is_not_there_are_refused() -> None:
    expanded = bits_of(torch.ones(4).expand(4, 4))
    with pytest.raises(BadInputError, match="share one place"):
        prune_on_device(expanded, 1, TWO_FOUR, kind="float32")
    with pytest.raises(BadInputError, match="axis 2"):
        prune_on_device(bits_of(torch.ones(4, 4)), 2, TWO_FOUR, kind="float32")


def test_an_empty_tensor_is_left_as_it_is() -> None:
    empty = bits_of(torch.ones(0, 8))
    outcome = prune_on_device(empty, 1, TWO_FOUR, kind="float32")
    assert outcome == Outcome(kept_magnitude=None, zeros=0, zeros_before=0)
    assert count_non_finite_on_device(empty, kind="float32") == 0

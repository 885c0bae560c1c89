"""`masked_mean` and `masked_var` against boolean indexing: numbers, gradients, compilation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twofour import BadInputError, masked_mean, masked_var


def by_index(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each row's valid positions, with shapes that depend on the mask."""
    rows = [row[kept] for row, kept in zip(values, mask, strict=True)]
    return torch.stack([r.mean(0) for r in rows]), torch.stack([r.var(0) for r in rows])


def case(seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 9, generator=made) < 0.5
    mask[:, :2] = True
    return torch.randn(3, 9, 4, generator=made, dtype=torch.float64, requires_grad=True), mask


@pytest.mark.parametrize("seed", range(5))
def test_numbers_and_gradients_are_those_of_boolean_indexing(seed: int) -> None:
    values, mask = case(seed)
    for ours, theirs in zip((masked_mean, masked_var), by_index(values, mask), strict=True):
        found = ours(values, mask, 1)
        torch.testing.assert_close(found, theirs)
        (gradient,) = torch.autograd.grad(found.square().sum(), values)
        (expected,) = torch.autograd.grad(theirs.square().sum(), values, retain_graph=True)
        torch.testing.assert_close(gradient, expected)
        assert not gradient[~mask].any()
        torch.testing.assert_close(ours(values, mask), getattr(values[mask], ours.__name__[7:])())


@pytest.mark.parametrize("function", [masked_mean, masked_var])
def test_first_and_second_derivatives_are_exact(function: Callable[..., Tensor]) -> None:
    values, mask = case(0)
    mask[1] = False
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: function(x, mask, 1), (values,))


@pytest.mark.parametrize("function", [masked_mean, masked_var])
@pytest.mark.parametrize("filler", [float("nan"), float("inf"), 7.0])
def test_what_is_not_valid_changes_nothing(function: Callable[..., Tensor], filler: float) -> None:
    values, mask = case(1)
    mask[2] = False
    filled = values.detach().masked_fill(~mask[..., None], filler).requires_grad_()
    found = function(filled, mask.long(), 1, keepdim=True)
    (gradient,) = torch.autograd.grad(found.sum(), filled)
    assert found.shape == (3, 1, 4)
    assert torch.equal(found, function(values, mask, 1, keepdim=True))
    assert not found[2].any()
    assert not gradient[~mask].any()
    assert gradient.isfinite().all()


def test_one_axis_of_size_1_counts_for_all_and_half_is_summed_in_float32() -> None:
    values = torch.full((2, 3, 30_000), 4.0, dtype=torch.float16)
    mask = torch.tensor([[[True]], [[False]]])
    assert masked_mean(values, mask, (1, 2)).tolist() == [4, 0]
    assert masked_mean(values, mask) == 4
    assert masked_var(values, mask).dtype == torch.float16


def test_one_compilation_serves_every_number_of_valid_positions() -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    both = torch.compile(
        lambda x, m: (masked_mean(x, m, 1), masked_var(x, m, 1)),
        backend=counting,
        fullgraph=True,
        dynamic=False,
    )
    values, _ = case(2)
    for valid in range(10):
        mask = (torch.arange(9) < valid).expand(3, 9)
        for found, function in zip(both(values, mask), (masked_mean, masked_var), strict=True):
            assert torch.equal(found, function(values, mask, 1))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("values", "mask"),
    [
        (torch.ones(3, 4), torch.ones(4, dtype=torch.bool)),
        (torch.ones(3), torch.ones(3, 1, dtype=torch.bool)),
        (torch.ones(3), torch.zeros(3)),
        (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(values: Tensor, mask: Tensor) -> None:
    with pytest.raises(BadInputError, match="a mask of shape"):
        masked_mean(values, mask)

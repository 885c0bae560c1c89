"""A layer's stack of matrices times its input rows is what torch computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from twofour.pruning.matrices import (
    Layout,
    Window,
    from_stack,
    matrix_rows,
    to_stack,
    window_rows,
)


def _pairs(padding: Any) -> tuple[tuple[int, int], ...]:
    return tuple((p, p) for p in padding)


def _window(module: Any) -> Window:
    return Window(
        kernel=module.kernel_size,
        stride=module.stride,
        dilation=module.dilation,
        padding=_pairs(module.padding),
        mode=module.padding_mode,
        transposed=isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d)),
        output_padding=module.output_padding,
    )


CONVOLUTIONS = [
    (nn.Conv1d(6, 4, 3, padding=2, dilation=2), (2, 6, 9)),
    (nn.Conv2d(8, 6, 3, stride=2, padding=1, groups=2), (2, 8, 7, 6)),
    (nn.Conv2d(5, 6, (3, 2), padding=(1, 0), padding_mode="reflect"), (2, 5, 6, 5)),
    (nn.Conv2d(5, 6, 3, padding=1, padding_mode="replicate"), (2, 5, 6, 5)),
    (nn.Conv2d(5, 6, 3, padding=1, padding_mode="circular"), (2, 5, 6, 5)),
    (nn.Conv3d(4, 3, (1, 2, 3)), (1, 4, 3, 4, 5)),
    (nn.ConvTranspose1d(6, 4, 3, stride=2, padding=1, output_padding=1), (2, 6, 5)),
    (nn.ConvTranspose2d(8, 6, (3, 2), stride=(2, 1), dilation=2, groups=2), (2, 8, 4, 5)),
    (nn.Conv2d(4, 4, 3, groups=4, padding=1), (2, 4, 5, 5)),
]


@pytest.mark.parametrize("per_tap", [False, True])
@pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS)
def test_a_convolution_is_its_stack_times_its_rows(
    module: Any, shape: tuple[int, ...], per_tap: bool
) -> None:
    weight = module.weight.detach().numpy()
    is_transposed = isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d))
    layout = Layout(
        shape=weight.shape,
        axis=0 if is_transposed else 1,
        m=4,
        groups=module.groups,
        convolution=True,
        per_tap=per_tap,
    )
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stack = to_stack(weight, layout)
    rows = window_rows(x.numpy(), layout, _window(module))
    assert stack.shape == layout.stack_shape
    assert rows.shape[::2] == layout.parts_and_inputs
    product = np.einsum("pni,pri->pnr", rows, stack)
    if per_tap:
        product = product.reshape(module.groups, -1, *product.shape[1:]).sum(1)
    module.bias.data.zero_()
    expected = module(x).detach().numpy()
    outputs = np.moveaxis(expected, 1, -1).reshape(-1, expected.shape[1])
    found = np.moveaxis(product, 0, 1).reshape(outputs.shape)
    assert np.allclose(found, outputs, atol=1e-5)
    assert np.array_equal(from_stack(stack, layout), weight)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_matrix_of_either_order_is_its_stack_times_its_rows(axis: int) -> None:
    generator = np.random.default_rng(0)
    weight, x = generator.normal(size=(6, 10)), generator.normal(size=(3, 5, 0))
    x = generator.normal(size=(3, 5, weight.shape[axis]))
    layout = Layout(shape=weight.shape, axis=axis, m=4)
    stack = to_stack(weight, layout)
    rows = matrix_rows(x, layout)
    expected = (x @ (weight if axis == 0 else weight.T)).reshape(15, -1)
    assert np.allclose(rows[0] @ stack[0].T, expected)
    assert np.array_equal(from_stack(stack, layout), weight)


def test_blocks_of_rows_and_stored_stacks_are_parts() -> None:
    generator = np.random.default_rng(0)
    packed = generator.normal(size=(12, 8))
    layout = Layout(shape=packed.shape, axis=1, m=4, blocks=3)
    assert layout.stack_shape == (3, 4, 8)
    assert np.array_equal(to_stack(packed, layout)[1], packed[4:8])
    experts, x = generator.normal(size=(3, 8, 5)), generator.normal(size=(3, 7, 8))
    layout = Layout(shape=experts.shape, axis=1, m=4)
    product = np.einsum("pni,pri->pnr", matrix_rows(x, layout), to_stack(experts, layout))
    assert np.allclose(product, x @ experts)
    assert np.array_equal(from_stack(to_stack(experts, layout), layout), experts)

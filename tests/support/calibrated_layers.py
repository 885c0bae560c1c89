"""Small layers of every kind with the inputs of each output written out by the layer itself.

A layer is linear in its weight. So the inputs that a weight is multiplied with are what the layer
gives when that weight is 1 and all others are 0, and no code that arranges inputs is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from support.matrix_problem import layer_problem
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.matrices import Layout, Window, matrix_rows, window_rows
from twofour.records.weights import Pattern

Index = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One output of a layer: its weights, run by run along the reduction axis, and their inputs."""

    runs: tuple[tuple[Index, ...], ...]
    """Where the weights stand in the stored array; groups of M lie within a run."""
    inputs: NDArray[np.float64]
    """(rows, weights), in the order of the runs."""


@dataclass(frozen=True, kw_only=True)
class CalibratedLayer:
    """A weight, its outputs one by one, and the rows as the code under test arranges them."""

    weight: NDArray[np.float64]
    layout: Layout
    units: tuple[Unit, ...]
    rows: NDArray[np.float64]


def window_of(module: Any) -> Window:
    """What an output of a convolution of torch sums over."""
    return Window(
        kernel=module.kernel_size,
        stride=module.stride,
        dilation=module.dilation,
        padding=tuple((p, p) for p in module.padding),
        transposed=module.transposed,
        output_padding=module.output_padding,
    )


def layout_of(module: Any, m: int = 4) -> Layout:
    """The weight of a convolution of torch as matrices."""
    return Layout(
        shape=tuple(module.weight.shape),
        axis=0 if module.transposed else 1,
        m=m,
        groups=module.groups,
        convolution=True,
    )


def _module(module: Any, shape: tuple[int, ...], m: int, seed: int) -> CalibratedLayer:
    torch.manual_seed(seed)
    module = module.double().requires_grad_(False)
    module.bias = None
    weight, transposed = module.weight, module.transposed
    x = torch.randn(shape, dtype=torch.float64)
    x = x + torch.roll(x, 1, 1) + 0.5  # neighbours are correlated, and the mean is not 0
    values = torch.randn_like(weight)
    outputs, groups = module.out_channels, module.groups
    inner = module.in_channels // groups
    kernel = list(itertools.product(*(range(k) for k in module.kernel_size)))
    by_weight = {}
    for index in itertools.product(*(range(n) for n in weight.shape)):
        weight.zero_()
        weight[index] = 1
        by_weight[index] = module(x).movedim(1, -1).reshape(-1, outputs).numpy()
    units = []
    for o in range(outputs):
        group, place = divmod(o, outputs // groups)
        runs = tuple(
            tuple(
                (group * inner + c, place, *tap) if transposed else (o, c, *tap)
                for c in range(inner)
            )
            for tap in kernel
        )
        columns = [by_weight[index][:, o] for run in runs for index in run]
        units.append(Unit(runs=runs, inputs=np.stack(columns, axis=1)))
    layout, window = layout_of(module, m), window_of(module)
    return CalibratedLayer(
        weight=values.numpy(),
        layout=layout,
        units=tuple(units),
        rows=window_rows(x.numpy(), layout, window),
    )


def problem_of(
    layer: CalibratedLayer, pattern: Pattern, factors: NDArray[np.float64] | None = None
) -> LayerProblem:
    """The layer pruned by all of its rows, which count once each unless told otherwise."""
    if factors is None:
        factors = np.ones(layer.rows.shape[1])
    return layer_problem(layer.weight, layer.layout, pattern, layer.rows, factors)


def _inputs(generator: np.random.Generator, *shape: int) -> NDArray[np.float64]:
    x = generator.normal(size=shape) * generator.uniform(0.2, 2, shape[-1])
    return x + 0.7 * np.roll(x, 1, -1) + 0.5


def _matrix(shape: tuple[int, int], axis: int, m: int, seed: int) -> CalibratedLayer:
    generator = np.random.default_rng(seed)
    weight, x = generator.normal(size=shape), _inputs(generator, 30, shape[axis])
    units = tuple(
        Unit(runs=(tuple((o, c) if axis == 1 else (c, o) for c in range(shape[axis])),), inputs=x)
        for o in range(shape[1 - axis])
    )
    layout = Layout(shape=shape, axis=axis, m=m)
    return CalibratedLayer(weight=weight, layout=layout, units=units, rows=matrix_rows(x, layout))


def _experts(m: int, seed: int) -> CalibratedLayer:
    """A stored stack of matrices, inputs first."""
    generator = np.random.default_rng(seed)
    weight, x = generator.normal(size=(3, 10, 4)), _inputs(generator, 3, 30, 10)
    units = tuple(
        Unit(runs=(tuple((e, c, o) for c in range(10)),), inputs=x[e])
        for e in range(3)
        for o in range(4)
    )
    layout = Layout(shape=weight.shape, axis=1, m=m)
    return CalibratedLayer(weight=weight, layout=layout, units=units, rows=matrix_rows(x, layout))


KINDS: dict[str, Callable[[int, int], CalibratedLayer]] = {
    "linear": lambda m, seed: _matrix((6, 18), 1, m, seed),
    "inputs first": lambda m, seed: _matrix((18, 6), 0, m, seed),
    "one row": lambda m, seed: _matrix((1, 9), 1, m, seed),
    "one input": lambda m, seed: _matrix((5, 1), 1, m, seed),
    "experts": _experts,
    "conv1d, dilated": lambda m, seed: _module(
        nn.Conv1d(6, 4, 3, padding=2, dilation=2), (2, 6, 20), m, seed
    ),
    "conv2d, groups": lambda m, seed: _module(
        nn.Conv2d(10, 4, 3, stride=2, padding=1, groups=2), (3, 10, 9, 9), m, seed
    ),
    "conv2d, padded": lambda m, seed: _module(
        nn.Conv2d(5, 4, (3, 2), padding=(1, 0)), (2, 5, 6, 6), m, seed
    ),
    "conv2d, depthwise": lambda m, seed: _module(
        nn.Conv2d(4, 8, 3, groups=4, padding=1), (2, 4, 5, 5), m, seed
    ),
    "conv3d": lambda m, seed: _module(nn.Conv3d(4, 3, (1, 2, 3)), (2, 4, 3, 4, 6), m, seed),
    "transposed, 1d": lambda m, seed: _module(
        nn.ConvTranspose1d(6, 4, 3, stride=2, padding=1, output_padding=1), (3, 6, 9), m, seed
    ),
    "transposed, 2d": lambda m, seed: _module(
        nn.ConvTranspose2d(2 * m, 4, (3, 2), stride=(2, 1), dilation=2, groups=2),
        (2, 2 * m, 4, 5),
        m,
        seed,
    ),
}
"""Name to what makes it, of M and a seed."""

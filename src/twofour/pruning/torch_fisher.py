"""How far pruning each weight moves a module's outputs, from one backward pass over the examples.

To first order a change D of a weight moves the outputs y by J D. For random signs r, the gradient
of <r, y> times D is <r, J D>, whose square is ||J D||^2 on average: one backward pass serves all
weights at once (Hutchinson's estimator of the Fisher information of a Gaussian around the outputs;
as a loss it is the distance of the outputs to the module's own dense ones, no labels needed).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour.pruning.torch_calls import float_tensors

PROBES = 32
"""Random sign vectors in all: the relative error of a score is about sqrt(2 / 32)."""


def fisher_scores(
    module: nn.Module,
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
    changes: Mapping[str, Mapping[str, Tensor]],
    *,
    seed: int = 0,
    probes: int = PROBES,
) -> dict[str, float]:
    """||J D||^2 / ||y||^2, mean over the float outputs, for the change D of each layer.

    `changes` are by layer and state_dict key: those of weight and bias belong together, as one may
    make up for the other. Keys of no parameter, and layers of none, are left out. `call` holds
    example inputs by position and by name. The module is as it was afterwards. Raises RuntimeError
    (torch's) where there is no gradient, as under no_grad.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    keys = dict.fromkeys(key for of in changes.values() for key in of)
    wanted = {key: parameters[key] for key in keys if key in parameters}
    if not wanted:
        return {}
    before = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        for parameter in wanted.values():
            parameter.requires_grad_(True)
        return _scores(module, call, changes, wanted, (seed, probes))
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(before[name])


def _scores(
    module: nn.Module,
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
    changes: Mapping[str, Mapping[str, Tensor]],
    wanted: Mapping[str, nn.Parameter],
    how: tuple[int, int],
) -> dict[str, float]:
    with torch.no_grad():
        sizes = [float(y.double().square().sum()) for y in float_tensors(_run(module, call))]
    generator = torch.Generator().manual_seed(how[0])
    chunks = list(_chunks(call, how[1]))
    probes = math.ceil(how[1] / len(chunks))
    sums = {layer: 0.0 for layer, of in changes.items() if not wanted.keys().isdisjoint(of)}
    for chunk in chunks:
        outputs = [*float_tensors(_run(module, chunk))]
        for number in range(probes):
            signed = _signed_sum(outputs, sizes, generator)
            found = torch.autograd.grad(
                signed, list(wanted.values()), retain_graph=number < probes - 1, allow_unused=True
            )
            gradients = dict(zip(wanted, found, strict=True))
            for layer in sums:
                sums[layer] += _moved(gradients, changes[layer]) ** 2 / probes
    return sums


def _moved(gradients: Mapping[str, Tensor | None], change: Mapping[str, Tensor]) -> float:
    """Gradient times change, over the parameters of one layer."""
    products = (
        float((gradient.double() * change[key].detach().double()).sum())
        for key in change
        if (gradient := gradients.get(key)) is not None
    )
    return math.fsum(products)


def _signed_sum(
    outputs: Sequence[Tensor], sizes: Sequence[float], generator: torch.Generator
) -> Tensor:
    """Sum of the outputs under random signs, each output scaled to norm 1 over all examples."""
    total = torch.zeros((), dtype=torch.float64)
    for output, size in zip(outputs, sizes, strict=True):
        signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
        scale = 1 / math.sqrt((size or 1.0) * len(outputs))
        total = total + scale * (output.double() * signs).sum()
    return total


def _run(module: nn.Module, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> object:
    args, kwargs = call
    return module(*args, **kwargs)


def _chunks(
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
    most: int,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The examples in at most so many parts along the first axis; whole where they have none."""
    args, kwargs = call
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    rows = {t.shape[0] if t.ndim else 0 for t in tensors}
    number = min(rows.pop(), most) if len(rows) == 1 else 1

    def part(value: Any, at: int) -> Any:  # noqa: ANN401  # whatever forward takes
        if number < 2 or not isinstance(value, Tensor):
            return value
        return torch.tensor_split(value, number)[at]

    for at in range(max(1, number)):
        yield tuple(part(a, at) for a in args), {n: part(a, at) for n, a in kwargs.items()}

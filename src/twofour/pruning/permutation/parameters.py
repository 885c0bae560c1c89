"""The orders of an exported graph's channels put back into the parameters it was exported from.

A constant is a parameter as it is, transposed, a block of its rows, or one with a batch norm folded
in. Which one it is, is proven by values; a constant that moves and comes from none refuses all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.graph.files import read_tensor
from twofour.graph.opened import OpenedModel
from twofour.pruning.permutation.apply import Orders, orders_by_number, permuted
from twofour.pruning.permutation.classes import Classes
from twofour.records.export import LayerMap

Array = NDArray[Any]
_EPSILONS = (1e-5, 1e-3, 1e-6, 1e-12, 1e-4, 1e-2)
"""Of batch norms, the most usual first; state_dict does not hold it."""
_FOLDED = 1e-3
"""Largest part by which a folded value may be off: it was computed in another order or type."""
_NORM_KEYS = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Origin:
    """A parameter, and how its values lie in a constant."""

    key: str
    turned: bool = False
    """The constant is its transpose."""
    first: int | None = None
    """The constant is the block of rows that starts here; None: the whole."""
    along: int | None = None
    """It has one number for each place along this axis of the constant, folded in there."""


def permuted_parameters(
    opened: OpenedModel,
    classes: Classes,
    orders: Orders,
    layers: LayerMap,
    parameters: Mapping[str, Array],
) -> dict[str, Array]:
    """New values of the parameters (state_dict keys) that the orders change; others are left out.

    `parameters` are those of the module that the file was exported from: keys that share memory are
    tied and change together. Compare the module's outputs before and after, as those of the files.
    Raises BadInputError for a constant that moves and comes from no parameter, or from one of
    several that cannot be told apart.
    """
    found = _Parameters(layers, parameters)
    numbers = orders_by_number(classes, orders)
    for name in classes.placements:
        values = read_tensor(classes.tensors[name], opened.path)

        def move(array: Array, name: str = name) -> Array:
            return permuted(array, classes.placements[name], numbers)

        if not np.array_equal(_bytes(move(values)), _bytes(values)):
            found.move(name, values, move)
    return found.changed


def _bytes(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


class _Parameters:
    """Parameters, those that moved, and what constants are known to come from."""

    def __init__(self, layers: LayerMap, parameters: Mapping[str, Array]) -> None:
        self.given = parameters
        self.changed: dict[str, Array] = {}
        self.rows = {row.initializer: row for row in layers.layers if row.parameter}
        self.moved: set[tuple[str, int | None]] = set()

    def move(self, name: str, values: Array, move: Callable[[Array], Array]) -> None:
        """Do to the parameters behind a constant what `move` does to the constant."""
        origins = list(self._same(name, values))
        if not origins:
            origins = [*self._scaled(name, values), *self._norms(values)]
        if not origins:
            raise BadInputError(
                f"constant {name!r} of shape {list(values.shape)} moves with its channels, and"
                " comes from no parameter of the module: the permutation cannot be put back",
                hint="permute the ONNX file alone, or leave the permutation out",
            )
        for origin in origins:
            self._put(origin, values.shape, move)

    def _put(self, origin: _Origin, shape: tuple[int, ...], move: Callable[[Array], Array]) -> None:
        if (origin.key, origin.first) in self.moved:
            return
        self.moved.add((origin.key, origin.first))
        for key in self._tied(origin.key):
            whole = self.changed.get(key, self.given[key]).copy()
            if origin.along is not None:
                self.changed[key] = _moved_along(whole, origin.along, shape, move)
                continue
            rows = shape[-1] if origin.turned else shape[0]
            part = whole if origin.first is None else whole[origin.first : origin.first + rows]
            laid = part.T if origin.turned else part
            part[...] = _unlaid(move(laid.reshape(shape)), origin, part.shape)
            self.changed[key] = whole

    def _tied(self, key: str) -> list[str]:
        """All keys of the same memory."""
        own = self.given[key]
        place = (own.__array_interface__["data"], own.shape, own.strides)
        return [
            other
            for other, array in self.given.items()
            if other == key
            or (
                own.size
                and (array.__array_interface__["data"], array.shape, array.strides) == place
            )
        ]

    def _same(self, name: str, values: Array) -> Iterator[_Origin]:
        """The parameter whose values the constant has; by its name first."""
        row = self.rows.get(name)
        for key in (name, *([row.parameter] if row else [])):
            if key in self.given:
                fitting = _laid_out(key, self.given[key], values)
                if fitting is not None:
                    yield fitting
                    return
        found = [
            origin
            for key, array in self.given.items()
            if (origin := _laid_out(key, array, values)) is not None
        ]
        if not found:
            return
        strangers = {o.key for o in found} - set(self._tied(found[0].key))
        if strangers:
            raise BadInputError(
                f"constant {name!r} may come from {found[0].key!r} or {min(strangers)!r}, which"
                " have the same values: the permutation cannot be put back",
                hint="permute the ONNX file alone, or leave the permutation out",
            )
        yield found[0]

    def _scaled(self, name: str, values: Array) -> Iterator[_Origin]:
        """A weight with a batch norm folded in: each output channel by a factor of its own."""
        row = self.rows.get(name)
        if row is None or row.parameter not in self.given:
            return
        own = self.given[row.parameter]
        for turned in (False, True):
            laid = own.T if turned else own
            found = _factors(values, laid) if laid.shape == values.shape else None
            if found is not None:
                yield _Origin(key=row.parameter, turned=turned)
                for prefix, (gamma, _, _, variance) in self._batch_norms(len(found[1])):
                    scales = (gamma / np.sqrt(variance + epsilon) for epsilon in _EPSILONS)
                    if any(np.allclose(scale, found[1], rtol=_FOLDED, atol=0) for scale in scales):
                        yield from (
                            _Origin(key=f"{prefix}{key}", along=found[0]) for key in _NORM_KEYS
                        )
                        return
                return

    def _norms(self, values: Array) -> Iterator[_Origin]:
        """A bias that a batch norm left behind: the norm's own numbers, and the bias before it."""
        if values.ndim != 1:
            return
        for prefix, numbers in self._batch_norms(len(values)):
            gamma, beta, mean, variance = numbers
            biases = [k for k in self.given if k.endswith("bias") and self._fits(k, len(values))]
            for bias in (None, *biases):
                before = 0.0 if bias is None else self.given[bias].astype(np.float64)
                for epsilon in _EPSILONS:
                    folded = (before - mean) * gamma / np.sqrt(variance + epsilon) + beta
                    scale = np.abs(folded) + np.abs(beta) + np.abs(mean * gamma)
                    if (np.abs(folded - values) <= _FOLDED * scale + 1e-12).all():
                        yield from (_Origin(key=f"{prefix}{key}") for key in _NORM_KEYS)
                        if bias is not None:
                            yield _Origin(key=bias)
                        return

    def _fits(self, key: str, length: int) -> bool:
        return self.given[key].shape == (length,)

    def _batch_norms(self, length: int) -> Iterator[tuple[str, Sequence[Array]]]:
        for key in self.given:
            prefix = key.removesuffix("running_var")
            names = [f"{prefix}{name}" for name in _NORM_KEYS]
            whole = key != prefix and all(n in self.given and self._fits(n, length) for n in names)
            if whole:
                yield prefix, [self.given[n].astype(np.float64) for n in names]


def _unlaid(laid: Array, origin: _Origin, shape: tuple[int, ...]) -> Array:
    return laid.T if origin.turned else laid.reshape(shape)


def _laid_out(key: str, own: Array, values: Array) -> _Origin | None:
    """How the parameter's values make up the constant; None where they do not."""
    if own.dtype != values.dtype:
        own = own.astype(values.dtype)
    if own.size == values.size:
        if np.array_equal(own.reshape(-1), values.reshape(-1)):
            return _Origin(key=key)
        if own.ndim == values.ndim == 2 and np.array_equal(own.T, values):
            return _Origin(key=key, turned=True)
        return None
    for turned in (False, True) if values.ndim == own.ndim == 2 else (False,):
        block = values.T if turned else values
        if block.ndim != own.ndim or block.shape[1:] != own.shape[1:] or len(block) >= len(own):
            continue
        for first in range(0, len(own) - len(block) + 1, max(1, len(block))):
            if np.array_equal(own[first : first + len(block)], block):
                return _Origin(key=key, turned=turned, first=first)
    return None


def _factors(values: Array, own: Array) -> tuple[int, Array] | None:
    """The axis along which each slice is a multiple of the parameter's, and the multiples."""
    one, other = values.astype(np.float64), own.astype(np.float64)
    for axis in range(min(2, one.ndim)):
        a = np.moveaxis(one, axis, 0).reshape(one.shape[axis], -1)
        b = np.moveaxis(other, axis, 0).reshape(one.shape[axis], -1)
        size = (b * b).sum(1)
        factor = (a * b).sum(1) / np.where(size > 0, size, 1)
        off = np.abs(a - factor[:, None] * b)
        if (off <= _FOLDED * np.abs(a).max(1, initial=0)[:, None] + 1e-12).all():
            return axis, factor
    return None


def _moved_along(
    numbers: Array, axis: int, shape: tuple[int, ...], move: Callable[[Array], Array]
) -> Array:
    """Numbers along one axis of a constant, as the constant's slices move."""
    spread = np.broadcast_to(
        np.expand_dims(numbers, [a for a in range(len(shape)) if a != axis]), shape
    )
    moved = np.moveaxis(move(spread), axis, 0).reshape(len(numbers), -1)
    return np.ascontiguousarray(moved[:, 0])

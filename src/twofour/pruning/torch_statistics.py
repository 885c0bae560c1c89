"""Statistics of the inputs of some stored weights, from the products of a torch module's forwards.

Weights that meet the same input (query, key and value) share one Gram matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from array_api_compat import array_namespace
from numpy.typing import NDArray
from torch import Tensor

from twofour.errors import BadInputError
from twofour.pruning.matrices import (
    Layout,
    Share,
    matrix_rows,
    outputs_to_see,
    padded_outputs,
    window_rows,
)
from twofour.pruning.methods.problem import Array
from twofour.pruning.statistics import Inputs, InputSums, Statistics, both, held_out_samples
from twofour.pruning.torch_calls import Call
from twofour.pruning.torch_products import Product, Target

_MOST_BLOCKS = 16
"""Row blocks of one weight that have Gram matrices of their own."""

_Rows = tuple[int, int]
"""The first row of a matrix and the one behind the last."""
_User = tuple[str, _Rows]
"""A target and the rows of it that a product used."""


@dataclass(slots=True)
class _Pending:
    """The input met last, and who used it until now."""

    product: Product
    version: int
    rows: Array
    held_out: NDArray[np.bool_]
    users: list[_User]


class Gathering:
    """Sums what a group of targets met; `begin` and `end` stand around each forward."""

    def __init__(self, targets: Sequence[Target], samples: int) -> None:
        self._targets = targets
        self._samples = max(1, samples)
        self._sums: dict[tuple[_User, ...], InputSums] = {}
        self._pending: _Pending | None = None
        self._call: tuple[Call, int, int] | None = None

    def begin(self, call: Call, number: int, first_sample: int) -> None:
        """Forward `number` begins; samples are counted over all of them."""
        self._call = call, number, first_sample

    def end(self) -> None:
        """The forward is over, or broken off."""
        self._flush()
        self._call = None

    def meet(self, product: Product, *, positions_first: bool = False) -> None:
        """Add the inputs of one product; `positions_first`: its rows are not sample by sample."""
        user = (product.target.name, (product.first, product.last))
        pending = self._pending
        if pending is not None and _same_input(pending, product):
            pending.users.append(user)
            return
        self._flush()
        rows, held_out = self._rows(product, positions_first=positions_first)
        self._pending = _Pending(product, version_of(product.x), rows, held_out, [user])

    def statistics(self) -> dict[str, tuple[Layout, Statistics]]:
        """By target; those that met no input are missing.

        The layout is the target's, with as many blocks as its rows met different inputs.
        """
        met: dict[str, list[tuple[_Rows, Statistics]]] = {}
        for users, sums in self._sums.items():
            statistics = sums.statistics()
            if statistics is not None:
                for name, rows in users:  # twice where it used the same input twice
                    met.setdefault(name, []).append((rows, statistics))
        targets = {target.name: target for target in self._targets}
        return {name: _joined(targets[name].layout, found) for name, found in met.items()}

    def _flush(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and pending.rows.shape[1]:
            key = tuple(sorted(pending.users))
            sums = self._sums.setdefault(key, InputSums())
            sums.add(pending.rows, pending.held_out)

    def _rows(self, product: Product, *, positions_first: bool) -> tuple[Array, NDArray[np.bool_]]:
        """(parts, n, inputs) with padding left out, and which of the n are held out."""
        assert self._call is not None, "products are met between begin and end"
        call, number, first_sample = self._call
        x = _numbers(product.x)
        if product.window is None:
            rows = matrix_rows(x, product.layout)
            owner, padding = _owners(rows.shape[1], call, positions_first=positions_first)
        else:
            share = Share(first=first_sample, samples=call.samples, in_all=self._samples)
            taken = outputs_to_see(product.layout, product.window, tuple(x.shape), share)
            rows = window_rows(x, product.layout, product.window, taken)
            owner = _even_owners(rows.shape[1], call.samples)
            padding = _padded_outputs(product, call, taken)
        if padding is not None:
            kept = np.flatnonzero(~padding)
            rows, owner = array_namespace(rows).take(rows, _like(kept, rows), axis=1), owner[kept]
        elif product.window is None:
            rows = rows.copy() if isinstance(rows, np.ndarray) else rows.clone()
        _refuse_non_finite(rows, product.target.name, number)
        return rows, held_out_samples(first_sample, call.samples)[owner]


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


def _same_input(pending: _Pending, product: Product) -> bool:
    one, other = pending.product, product
    return (
        one.x.data_ptr() == other.x.data_ptr()
        and (one.x.shape, one.x.stride(), one.x.dtype, one.x.device)
        == (other.x.shape, other.x.stride(), other.x.dtype, other.x.device)
        and pending.version == version_of(other.x)
        and one.window == other.window
        and _reading(one.layout) == _reading(other.layout)
    )


def _reading(layout: Layout) -> tuple[object, ...]:
    """What of a layout says how inputs become rows."""
    return layout.parts_and_inputs, layout.channels, layout.groups, layout.per_tap


def _numbers(x: Tensor) -> Array:
    """In float32 or float64; of numpy on the CPU, where it may be the tensor's own memory."""
    wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
    return wide.numpy() if wide.device.type == "cpu" else wide


def _like(indices: NDArray[np.int64], rows: Array) -> Array:
    return indices if isinstance(rows, np.ndarray) else torch.from_numpy(indices).to(rows.device)


def _owners(
    count: int, call: Call, *, positions_first: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """To which sample of the call each row of a matrix product belongs, and where padding is."""
    padding = None if call.padding is None else call.padding.cpu().numpy().astype(bool)
    if padding is not None and padding.size != count:
        padding = None
    if positions_first and count % max(1, call.samples) == 0:
        return np.arange(count) % call.samples, None if padding is None else padding.T.reshape(-1)
    return _even_owners(count, call.samples), None if padding is None else padding.reshape(-1)


def _padded_outputs(
    product: Product, call: Call, taken: NDArray[np.int64] | None
) -> NDArray[np.bool_] | None:
    """Which outputs of a convolution, sample by sample, stand where padding does."""
    assert product.window is not None
    if call.padding is None:
        return None
    padding, size = call.padding.cpu().numpy().astype(bool), tuple(product.x.shape)
    found = padded_outputs(padding, product.window, size, taken)
    return None if found is None else found.reshape(-1)


def _even_owners(count: int, samples: int) -> NDArray[np.int64]:
    """Rows lie sample by sample, as many of each."""
    return np.arange(count) * samples // max(1, count)


def _refuse_non_finite(rows: Array, name: str, number: int) -> None:
    xp = array_namespace(rows)
    if bool(xp.isfinite(xp.sum(rows))) or bool(xp.all(xp.isfinite(rows))):
        return
    what = "NaN" if bool(xp.any(xp.isnan(rows))) else "infinity"
    raise BadInputError(
        f"on calibration batch {number + 1} the input of {name} holds {what}: what comes before "
        "it gives no numbers",
        hint="check the data; a model in float16 may overflow: give it in float32 or bfloat16",
    )


def _joined(layout: Layout, met: Sequence[tuple[_Rows, Statistics]]) -> tuple[Layout, Statistics]:
    """One weight's statistics from all that its rows met."""
    rows = layout.stack_shape[1]
    size = math.gcd(rows, *(edge for edges, _ in met for edge in edges))
    blocks = rows // size if size else 1
    splits = layout.blocks == 1 and not layout.convolution and layout.axis % 2 == 1
    if blocks == 1 or blocks > _MOST_BLOCKS or not splits:
        return layout, reduce(both, (statistics for _, statistics in met))
    every = reduce(both, (statistics for _, statistics in met))
    parts = []
    for start in range(0, rows, size):
        own = [found for (first, last), found in met if first <= start < last]
        parts.append(reduce(both, own) if own else every)
    return replace(layout, blocks=blocks), _stacked(parts)


def _stacked(parts: Sequence[Statistics]) -> Statistics:
    held = [part.held_out for part in parts if part.held_out is not None]
    return Statistics(
        seen=_stack([part.seen for part in parts]),
        held_out=_stack(held) if len(held) == len(parts) else None,
    )


def _stack(parts: Sequence[Inputs]) -> Inputs:
    """Side by side, weighted as if all had met as many rows."""
    xp, rows = array_namespace(parts[0].gram), max(part.rows for part in parts)
    return Inputs(
        gram=xp.concat([part.gram * (rows / part.rows) for part in parts]),
        total=xp.concat([part.total * (rows / part.rows) for part in parts]),
        rows=rows,
    )

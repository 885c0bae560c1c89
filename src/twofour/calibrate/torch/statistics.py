"""Statistics of the inputs of some stored weights, from the products of a torch module's forwards.

Weights that meet the same input (query, key and value) share one Gram matrix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from array_api_compat import array_namespace, device
from numpy.typing import NDArray
from torch import Tensor

from twofour.calibrate.torch.products import Product, Target, version_of
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
from twofour.pruning.statistics import Drift, Inputs, InputSums, Statistics, added, held_out_samples
from twofour.pruning.torch.calls import Call, Spill

_MOST_BLOCKS = 16
"""Row blocks of one weight that have Gram matrices of their own."""

_DENSE = "inputs in the dense model"

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
    dense: Array | None
    """The same in the dense model, where they differ."""
    held_out: NDArray[np.bool_]
    users: list[_User]


class DenseInputs:
    """What targets meet in the dense model, product by product, to be found again in the pruned."""

    def __init__(self, kept: Spill) -> None:
        self._kept = kept
        self._places: dict[object, object] = {}
        """Of a product -> of the tensor that it met, which others may have met too."""
        self._last: tuple[Product, int, object] | None = None
        self._number = 0
        self._times: Counter[object] = Counter()

    def begin(self, number: int) -> None:
        """Forward `number` begins, of the dense model or the pruned one."""
        self._number, self._last = number, None
        self._times.clear()

    def record(self, product: Product) -> None:
        """Keep what it meets."""
        key, last = self._key(product), self._last
        if last is None or not _same_input(last[0], last[1], product):
            if not self._kept.put(_DENSE, key, product.x):
                return
            last = self._last = product, version_of(product.x), key
        self._places[key] = last[2]

    def find(self, product: Product) -> Tensor | None:
        """What the same product of the same call met; None where there was none of this shape."""
        place = self._places.get(self._key(product))
        found: Tensor | None = None if place is None else self._kept.get(_DENSE, place)
        return found if found is not None and found.shape == product.x.shape else None

    def drop(self) -> None:
        """Forget everything."""
        self._kept.drop(_DENSE)
        self._places.clear()

    def _key(self, product: Product) -> object:
        user = product.target.name, product.first, product.last
        self._times[user] += 1
        return (self._number, *user, self._times[user])


class Gathering:
    """Sums what a group of targets met; `begin` and `end` stand around each forward."""

    def __init__(
        self, targets: Sequence[Target], samples: int, dense: DenseInputs | None = None
    ) -> None:
        """`dense`: what they met in the dense model; None: the same."""
        self._targets = targets
        self._samples = max(1, samples)
        self._dense = dense
        self._sums: dict[tuple[_User, ...], InputSums] = {}
        self._pending: _Pending | None = None
        self._call: tuple[Call, int, int] | None = None

    def begin(self, call: Call, number: int, first_sample: int) -> None:
        """Forward `number` begins; samples are counted over all of them."""
        self._call = call, number, first_sample
        if self._dense is not None:
            self._dense.begin(number)

    def end(self) -> None:
        """The forward is over, or broken off."""
        self._flush()
        self._call = None

    def meet(self, product: Product, *, positions_first: bool = False) -> None:
        """Add the inputs of one product; `positions_first`: its rows are not sample by sample."""
        user = (product.target.name, (product.first, product.last))
        dense = None if self._dense is None else self._dense.find(product)
        pending = self._pending
        if pending is not None and _same_input(pending.product, pending.version, product):
            pending.users.append(user)
            return
        self._flush()
        rows, held_out = self._rows(product, positions_first=positions_first)
        near = None
        if dense is not None and not torch.equal(dense, product.x):
            near, _ = self._rows(replace(product, x=dense), positions_first=positions_first)
        self._pending = _Pending(product, version_of(product.x), rows, near, held_out, [user])

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
            sums.add(pending.rows, pending.held_out, pending.dense)

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
            xp, owner = array_namespace(rows), owner[kept]
            rows = xp.take(rows, xp.asarray(kept, device=device(rows)), axis=1)
        elif product.window is None:
            rows = rows.copy() if isinstance(rows, np.ndarray) else rows.clone()
        _refuse_non_finite(rows, product.target.name, number)
        return rows, held_out_samples(first_sample, call.samples)[owner]


def _same_input(one: Product, version: int, other: Product) -> bool:
    return (
        one.x.data_ptr() == other.x.data_ptr()
        and (one.x.shape, one.x.stride(), one.x.dtype, one.x.device)
        == (other.x.shape, other.x.stride(), other.x.dtype, other.x.device)
        and version == version_of(other.x)
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
        return layout, reduce(added, (statistics for _, statistics in met))
    every = reduce(added, (statistics for _, statistics in met))
    parts = []
    for start in range(0, rows, size):
        own = [found for (first, last), found in met if first <= start < last]
        parts.append(reduce(added, own) if own else every)
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
    shares = [rows / part.rows for part in parts]

    def joined(sums: Sequence[Array]) -> Array:
        return xp.concat([each * share for each, share in zip(sums, shares, strict=True)])

    drift = None
    if any(part.drift is not None for part in parts):
        drifts = [_drift(part) for part in parts]
        drift = Drift(
            cross=joined([each.cross for each in drifts]),
            total=joined([each.total for each in drifts]),
        )
    return Inputs(
        gram=joined([part.gram for part in parts]),
        total=joined([part.total for part in parts]),
        rows=rows,
        drift=drift,
    )


def _drift(inputs: Inputs) -> Drift:
    """Zeros where there is none."""
    if inputs.drift is not None:
        return inputs.drift
    xp = array_namespace(inputs.gram)
    return Drift(cross=xp.zeros_like(inputs.gram), total=xp.zeros_like(inputs.total))

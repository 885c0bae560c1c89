"""Gram matrices of the inputs of stored weights, from the products of a torch module's forwards.

Weights that are used with the same input (query, key and value) share one Gram matrix.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from array_api_compat import array_namespace, device
from numpy.typing import NDArray
from torch import Tensor, nn

from twofour.calibrate.torch.products import Product, StopForward, WatchedWeight, version_of
from twofour.errors import BadInputError
from twofour.pruning.matrices import (
    Layout,
    SampleRange,
    matrix_rows,
    outputs_to_see,
    padded_outputs,
    window_rows,
)
from twofour.pruning.methods.problem import Array
from twofour.pruning.statistics import Drift, Inputs, InputSums, Statistics, added
from twofour.pruning.torch.calls import Call, TreeStore

_MOST_BLOCKS = 16
"""Row blocks of one weight that have Gram matrices of their own."""

_DENSE = "inputs in the dense model"
_ADDED = "what is added to outputs in the dense model"

_RowRange = tuple[int, int]
"""The first row of a matrix and the one behind the last."""
_User = tuple[str, _RowRange]
"""A weight and the rows of it that a product used."""


@dataclass(slots=True)
class _LastInput:
    """The input of the last product, and the weights that have used it until now."""

    product: Product
    version: int
    rows: Array
    dense: Array | None
    """The rows in the dense model, where they differ."""
    added: Array | None
    """(parts, rows, outputs): what the dense model adds to the outputs, less what is added here."""
    positions_first: bool
    factors: NDArray[np.float64]
    users: list[_User]


class DenseInputs:
    """The dense model's inputs of weights, and what is added to the outputs, by product."""

    def __init__(self, kept: TreeStore) -> None:
        self._kept = kept
        self._places: dict[object, object] = {}
        """Key of a product -> key of its input, which other products may have used too."""
        self._last: tuple[Product, int, object] | None = None
        self._number = 0
        self._times: Counter[object] = Counter()
        self._at: tuple[Any, ...] = ()
        """Key of the last product."""
        self.used_in_part: set[str] = set()
        """Weights of which a product used some rows alone."""

    def begin(self, number: int) -> None:
        """Start forward `number`, of the dense model or the pruned one."""
        self._number, self._last = number, None
        self._times.clear()

    def record(self, product: Product) -> None:
        """Keep its input."""
        self.seek(product)
        if (product.first, product.last) != (0, product.weight.layout.stack_shape[1]):
            self.used_in_part.add(product.weight.name)
        key, last = self._at, self._last
        if last is None or not _same_input(last[0], last[1], product):
            if not self._kept.put(_DENSE, key, product.x):
                return
            last = self._last = product, version_of(product.x), key
        self._places[key] = last[2]

    def record_added(self, added: Tensor) -> None:
        """Keep what is added to the outputs of the last product."""
        self._kept.put(_ADDED, self._at, added)

    def seek(self, product: Product) -> None:
        """Go to the same product of the same call."""
        user = product.weight.name, product.first, product.last
        self._times[user] += 1
        self._at = (self._number, *user, self._times[user])

    def find(self, what: str) -> Tensor | None:
        """The product's input in the dense model, or what is added to its outputs there."""
        place = self._places.get(self._at) if what == _DENSE else self._at
        found: Tensor | None = self._kept.get(what, place) if self._kept.has(what, place) else None
        return found

    def drop(self) -> None:
        """Forget everything."""
        self._kept.drop(_DENSE)
        self._kept.drop(_ADDED)
        self._places.clear()


class GramCollector:
    """Adds up the inputs of some weights; `begin` and `end` enclose each forward."""

    def __init__(
        self,
        weights: Sequence[WatchedWeight],
        factors: NDArray[np.float64],
        dense: DenseInputs | None = None,
        dense_weight: Array | None = None,
    ) -> None:
        """`factors`: of all samples, as `SampleSplit` gives them; `dense`: the weights' inputs in
        the dense model; None: the same inputs; `dense_weight`: for `InputSums`.
        """
        self._weights = weights
        self._factors = factors
        self._dense, self._dense_weight = dense, dense_weight
        self._sums: dict[tuple[_User, ...], InputSums] = {}
        self._last: _LastInput | None = None
        self._call: tuple[Call, int, int] | None = None
        self._added: Tensor | None = None
        """What the dense model adds to the outputs of the last product."""
        self.left: int | None = None
        """Products that are to come before the forward is stopped; None: not known."""

    def begin(self, call: Call, number: int, first_sample: int) -> None:
        """Start forward `number`; samples are counted over all forwards."""
        self._call = call, number, first_sample
        if self._dense is not None:
            self._dense.begin(number)

    def end(self) -> None:
        """Close the forward, which may have been stopped."""
        self._flush()
        self._call = None

    def meet(self, product: Product, *, positions_first: bool = False) -> bool:
        """Add the inputs of one product, and return whether anything depends on its output.

        `positions_first`: its rows are not sample by sample.
        """
        user = (product.weight.name, (product.first, product.last))
        if self._dense is not None:
            self._dense.seek(product)
            self._added = None if self._dense_weight is None else self._dense.find(_ADDED)
        last = self._last
        if last is not None and _same_input(last.product, last.version, product):
            last.users.append(user)
        else:
            self._flush()
            rows, factors = self._rows(product, positions_first=positions_first)
            dense, near = None if self._dense is None else self._dense.find(_DENSE), None
            differs = dense is not None and not torch.equal(dense, product.x)
            if dense is not None and differs and dense.shape == product.x.shape:
                near, _ = self._rows(replace(product, x=dense), positions_first=positions_first)
            self._last = _LastInput(
                product, version_of(product.x), rows, near, None, positions_first, factors, [user]
            )
        self.left = None if self.left is None else self.left - 1
        if self.left == 0 and self._added is None:
            raise StopForward
        return self.left != 0

    def meet_added(self, added: Tensor) -> None:
        """Take what is added to the outputs of the last product."""
        last, dense = self._last, self._added
        if last is not None and dense is not None and dense.shape == added.shape:
            away = dense.to(torch.promote_types(dense.dtype, torch.float32)) - added
            layout = Layout(shape=tuple(added.shape), axis=1, m=1)
            others = replace(last.product, x=away, layout=layout)
            last.added, _ = self._rows(others, positions_first=last.positions_first)
        if self.left == 0:
            raise StopForward

    def statistics(self) -> dict[str, tuple[Layout, Statistics]]:
        """Layout and statistics by weight; weights without any input are missing.

        The layout is the weight's, with as many blocks as its rows had different inputs.
        """
        met: dict[str, list[tuple[_RowRange, Statistics]]] = {}
        for users, sums in self._sums.items():
            statistics = sums.statistics()
            if statistics is not None:
                for name, rows in users:  # twice where it used the same input twice
                    met.setdefault(name, []).append((rows, statistics))
        layouts = {weight.name: weight.layout for weight in self._weights}
        return {name: _joined(layouts[name], found) for name, found in met.items()}

    def _flush(self) -> None:
        last, self._last = self._last, None
        if last is not None and last.rows.shape[1]:
            sums = self._sums.setdefault(tuple(sorted(last.users)), InputSums(self._dense_weight))
            added = last.added if len(last.users) == 1 else None
            sums.add(last.rows, last.factors, last.dense, added)

    def _rows(
        self, product: Product, *, positions_first: bool
    ) -> tuple[Array, NDArray[np.float64]]:
        """(parts, n, inputs) with padding left out, and the factor of each of the n."""
        assert self._call is not None, "products come between begin and end"
        call, number, first_sample = self._call
        wide = product.x.detach()
        wide = wide if wide.dtype == torch.float64 else wide.float()
        x: Array = wide.numpy() if wide.device.type == "cpu" else wide  # maybe the tensor's memory
        if product.window is None:
            rows = matrix_rows(x, product.layout)
            owner, padding = _owners(rows.shape[1], call, positions_first=positions_first)
        else:
            of_all = SampleRange(
                first=first_sample, samples=call.samples, in_all=len(self._factors)
            )
            taken = outputs_to_see(product.layout, product.window, tuple(x.shape), of_all)
            rows = window_rows(x, product.layout, product.window, taken)
            owner = _even_owners(rows.shape[1], call.samples)
            padding = _padded_outputs(product, call, taken)
        if padding is not None:
            kept = np.flatnonzero(~padding)
            xp, owner = array_namespace(rows), owner[kept]
            rows = xp.take(rows, xp.asarray(kept, device=device(rows)), axis=1)
        elif product.window is None:
            rows = rows.copy() if isinstance(rows, np.ndarray) else rows.clone()
        _refuse_non_finite(rows, product.weight.name, number)
        return rows, self._factors[first_sample + owner]


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
    """The parts of a layout that say how inputs become rows."""
    return layout.parts_and_inputs, layout.channels, layout.groups, layout.per_tap


def _owners(
    count: int, call: Call, *, positions_first: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """The sample of the call that each row of a matrix product belongs to, and which is padding."""
    padding = None if call.padding is None else call.padding.cpu().numpy().astype(bool)
    if padding is not None and padding.size != count:
        padding = None
    if positions_first and count % max(1, call.samples) == 0:
        return np.arange(count) % call.samples, None if padding is None else padding.T.reshape(-1)
    return _even_owners(count, call.samples), None if padding is None else padding.reshape(-1)


def _padded_outputs(
    product: Product, call: Call, taken: NDArray[np.int64] | None
) -> NDArray[np.bool_] | None:
    """Which outputs of a convolution, sample by sample, are at positions of padding."""
    assert product.window is not None
    if call.padding is None:
        return None
    padding, size = call.padding.cpu().numpy().astype(bool), tuple(product.x.shape)
    found = padded_outputs(padding, product.window, size, taken)
    return None if found is None else found.reshape(-1)


def _even_owners(count: int, samples: int) -> NDArray[np.int64]:
    """The sample of each row, where rows lie sample by sample, as many of each."""
    return np.arange(count) * samples // max(1, count)


def _refuse_non_finite(rows: Array, name: str, number: int) -> None:
    xp = array_namespace(rows)
    if bool(xp.isfinite(xp.sum(rows))) or bool(xp.all(xp.isfinite(rows))):
        return
    what = "NaN" if bool(xp.any(xp.isnan(rows))) else "infinity"
    raise BadInputError(
        f"on calibration batch {number + 1} the input of {name} contains {what}",
        hint="check the data; a model in float16 may overflow: give it in float32 or bfloat16",
    )


def _joined(
    layout: Layout, met: Sequence[tuple[_RowRange, Statistics]]
) -> tuple[Layout, Statistics]:
    """One weight's layout and statistics, from the inputs of its rows."""
    # A packed in_proj_weight of 24 rows whose parts had different inputs (cross-attention): rows 0
    # to 8 had the queries, 8 to 24 keys and values. The greatest common divisor of 24, 0, 8, 8 and
    # 24 is 8: three blocks of 8 rows, each with the Gram matrix of its own input.
    rows = layout.stack_shape[1]
    size = math.gcd(rows, *(edge for edges, _ in met for edge in edges))
    blocks = rows // size if size else 1
    splits = layout.blocks == 1 and not layout.convolution and layout.axis % 2 == 1
    whole = reduce(added, (statistics for _, statistics in met))
    if blocks == 1 or blocks > _MOST_BLOCKS or not splits:
        return layout, whole
    parts = []
    for start in range(0, rows, size):
        own = [found for (first, last), found in met if first <= start < last]
        parts.append(reduce(added, own) if own else whole)
    held = [part.held_out for part in parts if part.held_out is not None]
    most = max(part.every.rows for part in parts)
    shares = [most / part.every.rows for part in parts]
    held_out = _stack(held, shares) if len(held) == len(parts) else None
    every = _stack([part.every for part in parts], shares)
    return replace(layout, blocks=blocks), Statistics(every=every, held_out=held_out)


def _stack(parts: Sequence[Inputs], shares: Sequence[float]) -> Inputs:
    """The inputs as parts of one stack, weighted as if all had the same number of rows."""
    xp, rows = array_namespace(parts[0].gram), max(part.rows for part in parts)

    def joined(sums: Sequence[Array]) -> Array:
        return xp.concat([each * share for each, share in zip(sums, shares, strict=True)])

    drift = None
    if any(part.drift is not None for part in parts):
        drifts = [
            part.drift or Drift(cross=xp.zeros_like(part.gram), total=xp.zeros_like(part.total))
            for part in parts
        ]
        drift = Drift(
            cross=joined([each.cross for each in drifts]), total=joined([d.total for d in drifts])
        )
    return Inputs(
        gram=joined([part.gram for part in parts]),
        total=joined([part.total for part in parts]),
        rows=rows,
        drift=drift,
    )


@dataclass(slots=True)
class RowOrder:
    """Tracks whether the rows of matrix products lie position by position, not sample by sample."""

    samples: int = 1
    positions_first: bool = False
    _hooks: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def watched(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Within it, the shapes of the modules' inputs decide."""
        try:
            for module in modules:
                is_attention = isinstance(module, nn.MultiheadAttention)
                look = self._look_attention if is_attention else self._look
                self._hooks.append(module.register_forward_pre_hook(look, with_kwargs=True))
            yield
        finally:
            while self._hooks:
                self._hooks.pop().remove()

    def begin(self, samples: int) -> None:
        """Start a forward."""
        self.samples, self.positions_first = samples, False

    def _look(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        self.positions_first = (
            x is not None
            and x.dim() > 2
            and x.shape[0] != self.samples
            and x.shape[1] == self.samples
        )

    def _look_attention(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """MultiheadAttention puts positions first inside, whatever its arguments."""
        query = args[0] if args else kwargs.get("query")
        self.positions_first = isinstance(query, Tensor) and query.dim() == 3

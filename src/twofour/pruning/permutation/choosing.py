"""Which order each class of channels gets: searched over all weights that read it, and judged.

A class is searched on one matrix, in which the weights that sum over it lie one below the other.
An order is taken only where it keeps clearly more, and, where the caller can tell it, where the
output error of these layers after the real method falls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.pruning.permutation.apply import permuted
from twofour.pruning.permutation.classes import ChannelClass, Classes, Placement, Reader
from twofour.pruning.permutation.search import Found, Order, Progress, Stop, kept_score, search
from twofour.records.weights import Pattern

Array = NDArray[Any]
Reorder = Callable[[Array], Array]
"""Puts what stands along a weight's axis of groups in another order; takes any array of the
weight's stored shape."""
Score = Callable[[str, Reorder | None], float]
"""Output error of a layer after the real method, with its inputs so reordered (None: as they
are)."""

LEAST_EFFICACY = 0.03
"""Below, an order is not worth the change: many rows average out (2048x2048 normal: 0.12)."""
_MOST_ROWS = 8192
"""Of a class, rows that are searched over; of more, so many are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOrder:
    """What the order of a class does to one weight that reads it."""

    layer: str
    kept_before: float
    """Sum of the scores that N:M keeps in this class, of all that there is; 0 to 1."""
    kept: float
    error_before: float | None = None
    """Output error after the real method; None where it was not asked for."""
    error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassOrder:
    """The order of one class, and why it was taken or left; a small record to resume from."""

    key: str
    """Of the class."""
    order: tuple[int, ...]
    """Which channel comes to each slot, also where it was not taken."""
    taken: bool
    reason: str
    efficacy: float
    """Share of what there is to gain that is gained (Pool and Yu 2021), 0 to 1."""
    steps: int
    stop: Stop
    layers: tuple[LayerOrder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceProgress:
    """How far the choice has come."""

    classes_done: int
    of: int
    record: ClassOrder | None = None
    """Of the class that was just finished."""
    search: Progress | None = None
    """Of the one that is searched now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How orders are searched for and judged."""

    pattern: Pattern
    layers: Collection[str] | None = None
    """Those that are pruned; the order does not matter to others. None: all."""
    scales: Mapping[str, Array] = field(default_factory=dict)
    """By layer, sizes of its inputs (square root of the Gram matrix' diagonal), as an array that
    broadcasts to the stored weight. A layer without: magnitudes alone."""
    score: Score | None = None
    seconds: float | None = None
    """At most for all searches together; a class that it does not reach stays as it is. What
    `score` takes comes on top."""
    steps: int | None = None
    """Sweeps for each class; None: by its size."""
    seed: int = 0
    least_efficacy: float = LEAST_EFFICACY


def choose_orders(
    classes: Classes,
    values: Callable[[str], Array],
    how: Search,
    *,
    known: Mapping[str, ClassOrder] | None = None,
    progress: Callable[[ChoiceProgress], None] | None = None,
) -> tuple[ClassOrder, ...]:
    """An order for every class; `values` gives the array of a constant by its name.

    Classes that `known` holds are not searched again, so a choice that was killed goes on where it
    stopped; the search of each class is the same whichever others there are. Time alone may change
    the result, and says so: see `ClassOrder.stop`.
    """
    judging = _Timed(how.score)
    how = how if how.score is None else replace(how, score=judging)
    until = None if how.seconds is None else time.monotonic() + how.seconds
    done: list[ClassOrder] = []
    sought = [each for each in enumerate(classes.classes) if _readers(each[1], how)]
    for at, (number, each) in enumerate(sought):
        record = (known or {}).get(each.key)
        if record is None or len(record.order) != each.size:
            left = None
            if until is not None:
                left = (until + judging.seconds - time.monotonic()) / (len(sought) - at)

            def tell(step: Progress, at: int = at) -> None:
                if progress is not None:
                    progress(ChoiceProgress(classes_done=at, of=len(sought), search=step))

            record = _chosen(_Class(classes, number, values, how), left, tell)
        done.append(record)
        if progress is not None:
            progress(ChoiceProgress(classes_done=at + 1, of=len(sought), record=record))
    return tuple(done)


class _Timed:
    """A score that knows how long it took."""

    def __init__(self, score: Score | None) -> None:
        self.score, self.seconds = score, 0.0

    def __call__(self, layer: str, reorder: Reorder | None) -> float:
        assert self.score is not None, "not asked without one"
        started = time.monotonic()
        try:
            return self.score(layer, reorder)
        finally:
            self.seconds += time.monotonic() - started


def orders_taken(records: Sequence[ClassOrder]) -> dict[str, tuple[int, ...]]:
    """What `permute_onnx` asks for."""
    return {record.key: record.order for record in records if record.taken}


def _readers(each: ChannelClass, how: Search) -> list[Reader]:
    return [r for r in each.readers if how.layers is None or r.layer in how.layers]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Copy:
    """Rows of a weight in which the channels of a class stand once, in groups of M slots."""

    groups: tuple[tuple[int, ...], ...]
    rows: Array
    """Scores of these rows, and the places of the groups along the weight's axis."""
    places: NDArray[np.int64]


class _Class:
    """One class and the weights that read it."""

    def __init__(
        self, classes: Classes, number: int, values: Callable[[str], Array], how: Search
    ) -> None:
        self.how, self.number, self.each = how, number, classes.classes[number]
        self.readers = _readers(self.each, how)
        self.placements = classes.placements
        self.values = values
        shapes = [(r, tuple(classes.tensors[r.constant].dims)) for r in self.readers]
        rows = sum(prod(shape) // shape[reader.axis] for reader, shape in shapes)
        self.share = min(1.0, _MOST_ROWS / max(1, rows))
        self.random = np.random.default_rng(how.seed)

    def placement(self, reader: Reader) -> Placement:
        found = self.placements[reader.constant]
        return next(p for p in found if p.shape[reader.axis] > 1 and (p.group == self.number).any())

    def scores(self, reader: Reader) -> Array:
        """|w|, or |w| times the size of its input."""
        values: Array = np.abs(self.values(reader.constant).astype(np.float64))
        scale = self.how.scales.get(reader.layer)
        return values if scale is None else values * scale

    def parts(self, reader: Reader, scores: Array) -> Iterator[tuple[NDArray[np.int64], Array]]:
        """Slots along the axis (-1: none of this class), and the rows where they stand so."""
        placement, axis = self.placement(reader), reader.axis
        slots = np.where(placement.group == self.number, placement.slot, -1)
        rows = np.moveaxis(scores, axis, -1)
        lines = np.moveaxis(slots, axis, -1)
        flat = lines.reshape(-1, lines.shape[-1])
        kinds, kind_of = np.unique(flat, axis=0, return_inverse=True)
        for number, line in enumerate(kinds):
            which = kind_of.reshape(lines.shape[:-1]) == number
            mask = np.broadcast_to(which, rows.shape[:-1])
            if (line >= 0).any():
                yield line, rows[mask]

    def copies(self, reader: Reader) -> Iterator[_Copy]:
        m = self.how.pattern.m
        for line, rows in self.parts(reader, self.scores(reader)):
            whole = line[: len(line) - len(line) % m].reshape(-1, m)
            seen: dict[int, int] = {}
            found: dict[int, list[int]] = {}
            for at, group in enumerate(whole):
                if group.min() >= 0 and len(set(group.tolist())) == m:
                    copy = max(seen.get(int(slot), 0) for slot in group)
                    seen.update({int(slot): copy + 1 for slot in group})
                    found.setdefault(copy, []).append(at)
            for members in found.values():
                places = np.array(members)[:, None] * m + np.arange(m)
                groups = tuple(tuple(map(int, whole[at])) for at in members)
                yield _Copy(groups=groups, rows=self._some(rows), places=places)

    def _some(self, rows: Array) -> Array:
        if self.share == 1:
            return rows
        number = max(1, round(len(rows) * self.share))
        # at random: a fixed step would meet the same place of every kernel
        drawn: Order = self.random.choice(len(rows), number, replace=False)
        return np.take(rows, np.sort(drawn), 0)

    def kept(self, reader: Reader, order: Order | None) -> float:
        """Share of the scores of this weight that N:M keeps in groups that hold the class."""
        scores, m = self.scores(reader), self.how.pattern.m
        orders = {} if order is None else {self.number: order}
        moved = permuted(scores, [self.placement(reader)], orders)
        kept = whole = 0.0
        for line, rows in self.parts(reader, moved):
            touched = np.add.reduceat(line >= 0, np.arange(0, len(line), m)) > 0
            places = np.flatnonzero(np.repeat(touched, m)[: len(line)])
            part = rows[:, places]
            kept, whole = kept + kept_score(part, self.how.pattern), whole + float(part.sum())
        return kept / whole if whole else 1.0

    def reorder(self, reader: Reader, order: Order) -> Reorder:
        """What the order does to this weight's inputs."""
        return lambda stored: permuted(stored, [self.placement(reader)], {self.number: order})


def _chosen(each: _Class, seconds: float | None, tell: Callable[[Progress], None]) -> ClassOrder:
    size, pattern = each.each.size, each.how.pattern
    if seconds is not None and seconds <= 0:
        return _left(each, "not searched: the time was up", Stop.SECONDS)
    matrix, slots = _stacked(each)
    if len(slots) <= pattern.m:
        why = f"its {size} channels make up {len(slots) // pattern.m} group of {pattern.m}"
        if not len(slots):
            why = f"no group of {pattern.m} consists of {pattern.m} of its {size} channels"
        return _left(each, f"not searched: {why}", Stop.CONVERGED)
    how = each.how
    found = search(matrix, pattern, steps=how.steps, seconds=seconds, seed=how.seed, progress=tell)
    order = np.arange(size)
    order[slots] = slots[found.order]
    if found.efficacy < how.least_efficacy:
        percent = f"{100 * found.efficacy:.1f} %"
        reason = f"efficacy {percent}, below {100 * how.least_efficacy:g} %: not worth a change"
        return _record(each, found, order, (False, reason), ())
    layers = tuple(_judged(each, reader, order) for reader in each.readers)
    return _record(each, found, order, _verdict(layers), layers)


def _left(each: _Class, reason: str, stop: Stop) -> ClassOrder:
    return ClassOrder(
        key=each.each.key,
        order=tuple(range(each.each.size)),
        taken=False,
        reason=reason,
        efficacy=0.0,
        steps=0,
        stop=stop,
        layers=(),
    )


def _record(
    each: _Class,
    found: Found,
    order: Order,
    verdict: tuple[bool, str],
    layers: tuple[LayerOrder, ...],
) -> ClassOrder:
    return ClassOrder(
        key=each.each.key,
        order=tuple(map(int, order)),
        taken=verdict[0],
        reason=verdict[1],
        efficacy=found.efficacy,
        steps=found.steps,
        stop=found.stop,
        layers=layers,
    )


def _judged(each: _Class, reader: Reader, order: Order) -> LayerOrder:
    score = each.how.score
    return LayerOrder(
        layer=reader.layer,
        kept_before=each.kept(reader, None),
        kept=each.kept(reader, order),
        error_before=None if score is None else score(reader.layer, None),
        error=None if score is None else score(reader.layer, each.reorder(reader, order)),
    )


def _verdict(layers: Sequence[LayerOrder]) -> tuple[bool, str]:
    """Taken where the output errors fall in the mean, and without them where more is kept."""
    errors = [(x.error_before, x.error) for x in layers if x.error is not None]
    before = float(np.mean([x.kept_before for x in layers]))
    after = float(np.mean([x.kept for x in layers]))
    if errors:
        old = float(np.mean([b for b, _ in errors if b is not None]))
        new = float(np.mean([a for _, a in errors]))
        falls = new < old
        return (
            falls,
            f"output error {'falls' if falls else 'does not fall'}: {old:.4g} to {new:.4g}",
        )
    more = after > before
    instead = "instead of" if more else "no more than"
    return more, f"keeps {100 * after:.2f} % of the scores, {instead} {100 * before:.2f} %"


def _stacked(each: _Class) -> tuple[Array, Order]:
    """The matrix to search in, and the slot that each of its columns is.

    Weights that have the channels in other groups than most (behind a channel shuffle, say) cannot
    lie below them: they are judged, not searched over.
    """
    copies = [copy for reader in each.readers for copy in each.copies(reader)]
    weight: dict[tuple[tuple[int, ...], ...], int] = {}
    for copy in copies:
        key = tuple(sorted(tuple(sorted(group)) for group in copy.groups))
        weight[key] = weight.get(key, 0) + len(copy.rows) * copy.places.size
    if not weight:
        return np.zeros((0, 0)), np.zeros(0, np.intp)
    reference = max(weight, key=lambda key: (weight[key], key))
    column = {group: at for at, group in enumerate(reference)}
    m = each.how.pattern.m
    fitting = [c for c in copies if all(tuple(sorted(g)) in column for g in c.groups)]
    stack = []
    for copy in fitting:
        block = np.zeros((len(copy.rows), len(reference) * m))
        for group, places in zip(copy.groups, copy.places, strict=True):
            # columns of a group stand in the order of its slots
            ranked = places[np.argsort(group)]
            first = column[tuple(sorted(group))] * m
            block[:, first : first + m] = copy.rows[:, ranked]
        stack.append(block)
    return np.concatenate(stack), np.array(reference, np.intp).reshape(-1)

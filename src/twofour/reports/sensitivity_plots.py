"""A plot of sets of layers: what each saves, and what it loses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from twofour.records.options import LossKind
from twofour.records.sensitivity import PrunedSet, SensitivityResult
from twofour.reports.svg import (
    BOTTOM,
    TOP,
    Drawing,
    Scale,
    disc,
    frame,
    point,
    shape,
    square,
    x_axis,
    y_axis,
)
from twofour.words import count, figure, printable

_WIDTH, _HEIGHT = 620, 420
_LEFT, _RIGHT = 70, 16
_MEASURED, _FORETOLD = disc("runs"), square("can")
_SPARE = 1.08
_LEAST = 1e-9
"""The axis of losses is at least this long."""


def draw_pareto(result: SensitivityResult) -> Drawing | None:
    """Share of the possible saving across, loss up; None where nothing was measured."""
    sets = {s.dense: s for s in (*result.pareto, *_chosen(result))}.values()
    known = [s for s in sets if s.loss is not None]
    if not known:
        return None
    limit = None if result.budget is None else result.budget.asked.max_drop
    losses = [0.0, *(v for s in known for v in (s.predicted, s.loss or 0.0) if math.isfinite(v))]
    high = max(*losses, limit or 0.0, _LEAST) * _SPARE
    x = Scale(low=0, high=104, start=_LEFT, end=_WIDTH - _RIGHT, log=False)
    y = Scale(low=min(losses) * _SPARE, high=high, start=_HEIGHT - BOTTOM, end=TOP, log=False)
    parts = (
        *x_axis(x, y.start, "saved, % of what all could save", values=range(0, 101, 20)),
        *y_axis(y, (x.start, x.end), _title(result)),
        *(_limit(x, y, limit) if limit is not None else ()),
        *(mark for one in known for mark in _marks(one, x, y)),
    )
    label = f"{count(len(known), 'set')} of layers: saving across and loss up"
    return frame((_WIDTH, _HEIGHT), label, parts, css="plot")


def pareto_key() -> tuple[tuple[Drawing, str], ...]:
    """The marks and what they stand for."""
    return (_MEASURED, "measured"), (_FORETOLD, "foretold")


def _chosen(result: SensitivityResult) -> tuple[PrunedSet, ...]:
    return () if result.budget is None else (result.budget.chosen,)


def _title(result: SensitivityResult) -> str:
    if result.loss is LossKind.METRIC and result.figure is not None:
        return f"loss: how far {printable(result.figure)[:40]} falls"
    return "loss"


def _limit(x: Scale, y: Scale, limit: float) -> Iterator[Drawing]:
    at = y.at(limit)
    yield shape("path", css="guide", d=f"M{x.start} {at}H{x.end}")
    yield shape("text", text="allowed", css="note", x=x.start + 8, y=at - 6)


def _marks(one: PrunedSet, x: Scale, y: Scale) -> Iterator[Drawing]:
    for mark, word, loss in (
        (_FORETOLD, "foretold", one.predicted),
        (_MEASURED, "measured", one.loss),
    ):
        if loss is None or not math.isfinite(loss):
            continue
        title = (
            f"{count(one.layers, 'layer')} pruned, {100 * one.share:.1f} % saved\n"
            f"loss {word}: {figure(loss)}"
        )
        yield point(title, mark, x.at(100 * one.share), y.at(loss))

"""A plot of what pruning did: the output error of every layer, in the order of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10

from twofour.records.pruning import PrunedWeight
from twofour.reports.eligibility_words import name_cell
from twofour.reports.svg import (
    BOTTOM,
    TOP,
    Drawing,
    Scale,
    disc,
    frame,
    point,
    square,
    x_axis,
    y_axis,
)
from twofour.words import count

_WIDTH, _HEIGHT = 620, 420
_LEFT, _RIGHT = 70, 16
_LEAST = 1e-6
"""Errors below it, 0 among them, are drawn at it."""
_SEEN, _HELD_OUT = square("can"), disc("runs")


def draw_errors(rows: Sequence[PrunedWeight]) -> Drawing | None:
    """Layers across in their order, errors up; held-out ones beside those of the method's data."""
    points = [(number, row) for number, row in enumerate(rows, 1) if row.output_error is not None]
    if not points:
        return None
    errors = [max(error, _LEAST) for _, row in points for error, _ in _errors(row)]
    low, high = 10.0 ** floor(log10(min(errors))), 10.0 ** ceil(log10(max(errors) * 1.001))
    x = Scale(low=0, high=len(rows) + 1, start=_LEFT, end=_WIDTH - _RIGHT, log=False)
    y = Scale(low=low, high=high, start=_HEIGHT - BOTTOM, end=TOP)
    parts = (
        *x_axis(x, y.start, "layer", values=_numbers(len(rows))),
        *y_axis(y, (x.start, x.end), "output error"),
        *(mark for number, row in points for mark in _marks(x.at(number), y, row)),
    )
    label = f"output error of {count(len(points), 'layer')}, in the order of the model"
    return frame((_WIDTH, _HEIGHT), label, parts, css="plot")


def error_key() -> tuple[tuple[Drawing, str], ...]:
    """The marks and what they stand for."""
    return (_SEEN, "on the inputs that the method saw"), (_HELD_OUT, "held out")


def _errors(row: PrunedWeight) -> Iterator[tuple[float, Drawing]]:
    error = row.output_error
    assert error is not None
    yield error.calibration, _SEEN
    if error.held_out is not None:
        yield error.held_out, _HELD_OUT


def _marks(x: float, y: Scale, row: PrunedWeight) -> Iterator[Drawing]:
    for error, mark in _errors(row):
        words = "held out" if mark is _HELD_OUT else "seen by the method"
        title = f"{name_cell(row.weight.layer)}\n{row.method}, {words}: {error:.4g}"
        yield point(title, mark, x, y.at(max(error, _LEAST)))


def _numbers(count_of: int) -> list[float]:
    step = max(1, ceil(count_of / 10))
    return [float(n) for n in range(step, count_of + 1, step)]

"""How far a variant's outputs agree with the reference, and what the user's metric says."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from twofour.records.export import OutputAgreement
from twofour.records.latency import ComparedVariant
from twofour.reports.comparison.columns import Column, Kind, column
from twofour.reports.comparison.figures import per_cent
from twofour.reports.words import printable


def output_columns(rows: Sequence[ComparedVariant]) -> tuple[Column, ...]:
    """Largest error, lowest cosine, shares of equal values and of rows with one top class."""
    return (
        column("max error", Kind.FIGURE, rows, lambda v: _largest_error(v.agreement)),
        column("cosine", Kind.FIGURE, rows, lambda v: _lowest_cosine(v.agreement)),
        column("equal", Kind.FIGURE, rows, lambda v: _lowest_share(v.agreement)),
        column("top-1", Kind.FIGURE, rows, lambda v: _share(v.top1_agreement)),
    )


def metric_columns(
    rows: Sequence[ComparedVariant], baseline: ComparedVariant | None
) -> tuple[Column, ...]:
    """Each metric, and by how much it is below the baseline's."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return tuple(made for name in names for made in _metric(name, rows, baseline))


def _metric(
    name: str, rows: Sequence[ComparedVariant], baseline: ComparedVariant | None
) -> tuple[Column, Column]:
    whole = None if baseline is None else baseline.metrics.get(name)

    def value(row: ComparedVariant) -> str | None:
        found = row.metrics.get(name)
        return None if found is None else f"{found:.4g}"

    def drop(row: ComparedVariant) -> str | None:
        found = row.metrics.get(name)
        if found is None or whole is None or row is baseline:
            return None
        return f"{whole - found:.4g}"

    said = printable(name)
    return (
        column(said, Kind.FIGURE, rows, value),
        column(f"drop of {said}", Kind.FIGURE, rows, drop),
    )


def _largest_error(outputs: Sequence[OutputAgreement]) -> str | None:
    """The largest error; behind it what is wrong with it: a bound it exceeds, values not finite."""
    if not outputs:
        return None
    worst = max(outputs, key=lambda o: o.max_abs_error)
    said = [f"{worst.max_abs_error:.3g}"]
    said += [f"bound {o.bound:.3g}" for o in outputs if not o.within and o.bound is not None][:1]
    not_finite = sum(o.not_finite for o in outputs)
    said += [f"{not_finite:,} NaN/inf"] if not_finite else []
    return "\n".join(said)


def _lowest_cosine(outputs: Sequence[OutputAgreement]) -> str | None:
    known = [o.cosine for o in outputs if not isnan(o.cosine)]
    return f"{min(known):.6f}" if known else None


def _lowest_share(outputs: Sequence[OutputAgreement]) -> str | None:
    """Of equal values, over the outputs of whole numbers and texts."""
    return _share(min((o.equal for o in outputs if o.equal is not None), default=None))


def _share(part: float | None) -> str | None:
    return None if part is None else per_cent(part)

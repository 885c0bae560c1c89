"""A fleet as a document: what each kind of accelerator gains, and the verdict of every layer."""

from __future__ import annotations

from dataclasses import replace

from twofour.eligibility.reasons import obstacles
from twofour.eligibility.totals import status_of
from twofour.records.eligibility import Evidence, Verdict, VerdictName
from twofour.records.run import Fleet, FleetKind
from twofour.reports.document import (
    Column,
    Document,
    Kind,
    Table,
    column,
    fold_rows,
    names,
    present,
    section,
    table,
    texts,
    verdict_column,
)
from twofour.reports.latency_words import answer_lines
from twofour.words import count, printable


def fleet_document(fleet: Fleet) -> Document:
    """What each kind gains, measured beside forecast, and a row for each layer."""
    name = printable(fleet.source)
    return Document(
        name=name,
        about="fleet",
        title=f"{name} on {count(len(fleet.kinds), 'kind')} of nodes",
        blocks=present(
            section("Gain by kind", _gains_table(fleet.kinds)),
            section("Verdict of each layer by kind", _verdicts_table(fleet.kinds)),
        ),
    )


def _gains_table(rows: tuple[FleetKind, ...]) -> Table:
    built = [row.built for row in rows]
    return table(
        "",
        (
            names("kind", rows, lambda r: r.kind),
            texts("engine", built, lambda b: b.engine.in_words),
            column("layers with sparse kernels", Kind.FIGURE, rows, _sparse_layers),
            column("measured", Kind.TEXT, rows, _measured),
            column("forecast", Kind.FIGURE, rows, _forecast),
            names("node", [row.node for row in rows], str),
        ),
        legend="forecast: the expected and the largest gain, from cuBLASLt and cuSPARSELt as "
        "measured elsewhere",
    )


def _forecast(row: FleetKind) -> str | None:
    if row.expected is None or row.forecast is None:
        return None
    return f"{row.expected.in_words}\nat most {row.forecast.gain:.2f}"


def _sparse_layers(row: FleetKind) -> str | None:
    """`3 of 21`; None where no log of TensorRT says so."""
    if row.report is None:
        return None
    verdicts = row.report.verdicts
    measured = [v.verdict for v in verdicts if v.evidence is Evidence.MEASURED]
    return f"{measured.count(VerdictName.CHOSEN)} of {len(verdicts)}" if measured else None


def _measured(row: FleetKind) -> str:
    """What sparse against dense showed, with the noise; or why nothing was built."""
    if row.times is None:
        return "; ".join(filter(None, (row.error, row.hint)))
    return "\n".join(answer_lines(row.times))


def _verdicts_table(rows: tuple[FleetKind, ...]) -> Table:
    """The matrix: a row for each layer, a column for each kind."""
    reports = [(row.kind, row.report.verdicts) for row in rows if row.report is not None]
    if not reports or not reports[0][1]:
        return Table(title="", columns=())
    columns = [_verdicts(kind, verdicts) for kind, verdicts in reports]
    layers = [verdict.layer for verdict in reports[0][1]]
    # layers are alike where every kind has the same verdict and the same note on them
    shown = (zip(column.cells, column.notes, strict=True) for column in columns)
    alike = list(zip(layers, zip(*shown, strict=True), strict=True))
    named = (names("layer", layers, str), *columns)
    return Table(title="", columns=named, folds=lambda: fold_rows(alike))


def _verdicts(kind: str, verdicts: tuple[Verdict, ...]) -> Column:
    made = verdict_column(kind, verdicts, lambda v: v.verdict.value, lambda v: status_of(v).slug)
    return replace(made, notes=tuple(map(_note, verdicts)))


def _note(of: Verdict) -> str:
    """The main reason against sparse kernels, and whether all of it is predicted."""
    # "(GROUPED_CONV, predicted)"
    parts = [reason.code.value for reason in obstacles(of.reasons[:1])]
    if of.evidence is Evidence.PREDICTED:
        parts.append("predicted")
    return f"({', '.join(parts)})" if parts else ""

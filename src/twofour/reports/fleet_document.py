"""A fleet as a document: what each kind of accelerator gains, and the verdict of every layer."""

from __future__ import annotations

from dataclasses import replace

from twofour.eligibility.reasons import obstacles
from twofour.eligibility.totals import status_of
from twofour.records.eligibility import Evidence, Verdict, VerdictName
from twofour.records.fleet import Fleet, FleetKind
from twofour.reports.document import (
    Column,
    Document,
    Kind,
    Table,
    column,
    fold_rows,
    present,
    section,
    table,
    verdict_column,
)
from twofour.reports.latency_words import answer_lines
from twofour.words import count, name_cell, printable


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
    return table(
        "",
        (
            column("kind", Kind.NAME, rows, lambda r: name_cell(r.kind)),
            column(
                "engine", Kind.TEXT, rows, lambda r: r.built.engine.in_words if r.built else None
            ),
            column("layers with sparse kernels", Kind.FIGURE, rows, _sparse_layers),
            column("measured", Kind.TEXT, rows, _measured),
            column(
                "forecast", Kind.FIGURE, rows, lambda r: r.forecast.in_words if r.forecast else None
            ),
            column("node", Kind.NAME, rows, lambda r: r.node and name_cell(r.node)),
        ),
        legend="forecast: the gain at most, from cuBLASLt and cuSPARSELt as measured elsewhere",
    )


def _sparse_layers(row: FleetKind) -> str | None:
    """None where no log of TensorRT says so."""
    verdicts = row.report.verdicts if row.report else ()
    known = [v.verdict is VerdictName.CHOSEN for v in verdicts if v.evidence is Evidence.MEASURED]
    return f"{sum(known)} of {len(verdicts)}" if known else None


def _measured(row: FleetKind) -> str:
    """What sparse against dense showed, with the noise; or why nothing was built."""
    if row.times is None:
        return printable("; ".join(filter(None, (row.error, row.hint))))
    return "\n".join(answer_lines(row.times))


def _verdicts_table(rows: tuple[FleetKind, ...]) -> Table:
    """The matrix: a row for each layer, a column for each kind."""
    built = [(row.kind, row.report.verdicts) for row in rows if row.report]
    lines = list(zip(*(verdicts for _, verdicts in built), strict=True))
    alike = [(name_cell(of[0].layer), tuple((v.verdict, _note(v)) for v in of)) for of in lines]
    layers = column("layer", Kind.NAME, alike, lambda row: row[0])
    columns = (layers, *(_verdicts(*of) for of in built)) if lines else ()
    return Table(title="", columns=columns, folds=lambda: fold_rows(alike))


def _verdicts(kind: str, verdicts: tuple[Verdict, ...]) -> Column:
    made = verdict_column(
        name_cell(kind), verdicts, lambda v: v.verdict.value, lambda v: status_of(v).slug
    )
    return replace(made, notes=tuple(map(_note, verdicts)))


def _note(of: Verdict) -> str:
    """The main reason against sparse kernels, and whether all of it is predicted."""
    parts = [reason.code.value for reason in obstacles(of.reasons[:1])]
    parts += ["predicted"] if of.evidence is Evidence.PREDICTED else []
    return f"({', '.join(parts)})" if parts else ""

"""Every format of a report gives the same cells: the same tables, rows, columns and figures."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from support.comparison_cases import COMPARISONS, run_folder
from support.render_cases import every_status, hostile, large
from support.rendered import (
    to_csv,
    to_html,
    to_markdown,
    to_table,
)
from support.report_cases import conv, matmul, report

from twofour.pipeline.evidence_files import EvidenceFiles
from twofour.pipeline.reporting import report_files
from twofour.records.eligibility import EligibilityReport, VerdictName
from twofour.records.latency import LatencyComparison
from twofour.records.weights import NotCovered
from twofour.reports import text as text_formats
from twofour.reports.document import Table
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.latency_document import latency_document
from twofour.reports.terminal import plain_text

Rows = list[list[str]]
WIDE = 4000
"""Columns in which no cell is folded."""
LOGS = Path(__file__).parents[1] / "data" / "logs"


def _of_log(name: str) -> EligibilityReport:
    return report_files(EvidenceFiles(log=LOGS / name)).report


def _with_notes() -> EligibilityReport:
    """Every verdict, what no row names, notes of the report."""
    unknown = conv("up", 256, 256, op="ConvTranspose", shape=(256, 256, 3, 3), axis=0)
    made = every_status()
    verdicts = (*made.verdicts, *report(unknown).verdicts)
    beside = NotCovered(
        op="LSTM", uses=2, weights=4096, multiplies=True, users=("a", "b"), arrays=("w",)
    )
    return replace(
        made, verdicts=verdicts, not_covered=(beside,), notes=("a note | with a pipe", "=1+1")
    )


REPORTS = {
    "notes": _with_notes(),
    "a log": _of_log("named_sparse.log"),
    "a log with tactics": _of_log("rtx_small.log"),
    "an old log": _of_log("wording_8.log"),
    "every status": every_status(),
    "hostile": hostile(),
    "alike": large(40),
    "empty": report(),
    "one": report(matmul("fc", 512, 512)),
}


def _words(text: str) -> str:
    return " ".join(text.split())


def _expected(table: Table) -> Rows:
    """Head and rows as text, each cell with its note."""
    rows = [[column.head for column in table.columns]]
    for at in range(len(table.rows)):
        cells = [("-" if c.cells[at] is None else c.cells[at], c.note(at)) for c in table.columns]
        rows.append([_words(f"{cell} {note}") for cell, note in cells])
    return rows


def _of_pages(page: str) -> Iterator[Rows]:
    """Tables of a page, without the rows that only its script shows."""
    for inside in re.findall(r"<table.*?</table>", page, re.DOTALL):
        rows = re.findall(r"<tr.*?</tr>", inside, re.DOTALL)
        cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
        yield [[_plain(cell) for cell in row] for row in cells]


def _plain(html: str) -> str:
    return _words(unescape(re.sub(r"<[^>]*>", "", html.replace("<br>", " "))))


def _of_markdown(text: str) -> list[Rows]:
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    return list(_of_pages(str(page)))


def _table(tables: list[Table], style: str) -> Table:
    return next(table for table in tables if table.style == style)


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_gives_the_same_cells_in_every_format(name: str) -> None:
    comparison = COMPARISONS[name]
    tables = latency_document(comparison).tables
    expected = [_expected(table) for table in tables]
    assert len(expected) > 0
    assert list(_of_pages(to_html(comparison))) == expected
    assert _of_markdown(to_markdown(comparison)) == expected
    assert _of_csv(comparison) == list(_long(tables))
    shown = plain_text(to_table(comparison), width=WIDE)
    rows = [" ".join(row) for rows in expected for row in rows[1:]]
    assert [row for row in rows if row in _words(shown)] != []
    for table in tables:
        for column in table.columns:
            for line in "\n".join(filter(None, column.cells)).splitlines():
                assert line in shown


def _of_csv(comparison: LatencyComparison) -> list[tuple[str, ...]]:
    text = text_formats.csv(latency_document(comparison))
    head, *rows = csv.reader(io.StringIO(text))
    assert tuple(head) == text_formats.CELLS
    return [tuple(cell.removeprefix("'") for cell in row[:4]) for row in rows]


def _long(tables: tuple[Table, ...]) -> Iterator[tuple[str, ...]]:
    for table in tables:
        names, *others = table.columns
        for at, name in enumerate(names.cells):
            for column in others:
                cell = "" if column.cells[at] is None else f"{column.cells[at]} {column.note(at)}"
                lines = [(text or "").strip().replace("\n", " | ") for text in (name, cell)]
                yield (table.title, lines[0], column.head, lines[1])


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_gives_the_same_layers_in_every_format(name: str) -> None:
    made = REPORTS[name]
    layers = _table([*eligibility_document(made).tables], "layers")
    every = _expected(layers)
    folded = _expected(layers.folded())
    assert folded[0] == every[0]
    (page,) = [rows for rows in _of_pages(to_html(made)) if rows[0] == every[0]]
    assert page == folded
    (markdown,) = [rows for rows in _of_markdown(to_markdown(made)) if rows[0] == every[0]]
    assert markdown == folded
    assert layers.folds is not None
    covered = sorted(at for fold in layers.folds() for at in fold.rows)
    assert covered == list(range(len(every) - 1))


@pytest.mark.parametrize("name", REPORTS)
def test_the_csv_has_the_cells_of_the_other_formats_and_the_exact_figures(name: str) -> None:
    made = REPORTS[name]
    layers = _table([*eligibility_document(made).tables], "layers")
    rows = list(csv.DictReader(io.StringIO(to_csv(made))))
    rows = rows[: len(rows) - len(made.not_covered)]
    assert len(rows) == len(layers.rows)
    names = {"type": "dtype", "sparse": "sparse_ms", "dense": "dense_ms"}
    names |= {"ratio": "sparse_over_dense"}
    for column in layers.columns:
        if column.key == "why":
            continue  # its codes begin the cell of the table for scripts
        for at, row in enumerate(rows):
            said, cell = row[names.get(column.key, column.key)].removeprefix("'"), column.cells[at]
            if column.kind == "figure" and said:
                assert float(said) == column.values[at]
                said = f"{float(said):.3f}" if column.key == "ratio" else f"{float(said):.4g}"
            if column.key == "layer":
                said = said or "(no name)"
            if column.key == "size":
                said = " ".join((row["op"].removeprefix("'"), said))
            assert said == (cell or ""), (column.key, at)
            if column.key == "verdict":
                assert column.note(at).startswith("(rules said") == (
                    row["rules_were_wrong"] == "true"
                )


def test_the_reports_have_every_verdict_and_their_notes_stand_in_every_format() -> None:
    made = REPORTS["notes"]
    assert {v.verdict for v in made.verdicts} == set(VerdictName)
    for shown in (to_html(made), to_markdown(made), plain_text(to_table(made))):
        assert "=1+1" in shown
        assert "in LSTM (2)" in shown


def test_the_other_tables_of_a_report_are_the_same_in_a_page_and_in_markdown() -> None:
    made = every_status()
    document = eligibility_document(made, comparison=run_folder())
    others = [_expected(t) for t in document.tables if not t.style]
    pages = list(_of_pages(to_html(made, comparison=run_folder())))
    assert pages[1:] == others
    assert len(others) > 4
    cards = _expected(_table([*document.tables], "cards"))[1:]
    terminal = _words(plain_text(to_table(made), width=WIDE))
    for row in cards:
        assert _words(" ".join(row)) in terminal


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["every status", "alike"])
def test_no_cell_is_lost_on_a_narrow_terminal(name: str, width: int) -> None:
    made = REPORTS[name]
    shown = plain_text(to_table(made), width=width)
    letters = re.sub(r"\s", "", shown)
    words = set(re.split(r"[\s,;()]+", shown))
    layers = _table([*eligibility_document(made).tables], "layers").folded()
    for column in layers.columns:
        for cell in filter(None, column.cells):
            if column.key in {"verdict", "sparse", "dense", "ratio"}:
                assert set(cell.split()) <= words, cell
            elif column.key == "why":
                assert cell.partition(",")[0] in words, cell
    assert len(letters) > 300

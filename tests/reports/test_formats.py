"""Adding a format: one function, under one name. CSV and Markdown: names read as they are."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from support.comparison_cases import COMPARISONS, run_folder
from support.render_cases import every_status
from support.rendered import to_csv, to_markdown
from support.report_cases import matmul, reason, report
from typer.testing import CliRunner

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.records.weights import ReasonCode
from twofour.reports import FORMATS, renderer
from twofour.reports.document import Document
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.latency_document import latency_document
from twofour.words import printable

GOLDEN = Path(__file__).parent / "golden"


def toy(document: Document) -> str:
    """Names of the tables' columns, a table a line."""
    lines = (" ".join(column.head for column in table.columns) for table in document.tables)
    return f"{document.name}\n" + "\n".join(lines) + "\n"


@pytest.fixture
def with_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "toy", toy)


@pytest.mark.usefixtures("with_toy")
def test_a_format_that_is_added_gets_every_report() -> None:
    render = renderer("toy")
    assert "layer verdict reasons" in str(render(eligibility_document(every_status())))
    assert "variant median ms" in str(render(latency_document(run_folder())))


@pytest.mark.usefixtures("with_toy")
def test_report_takes_a_format_that_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = SimpleNamespace(report=every_status())
    monkeypatch.setattr("twofour.pipeline.reporting.report_folder", lambda *_: judged)
    done = CliRunner().invoke(application(), ["report", "somewhere", "--format", "toy"])
    assert done.exit_code == 0
    assert done.stdout.startswith("digits.py:make\n layers weights")


def test_a_format_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadInputError, match="no format 'pdf'") as refused:
        renderer("pdf")
    assert "table, markdown, csv, html" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("report.csv", to_csv(every_status())),
        ("report.md", to_markdown(every_status())),
        *((f"comparison_{n}.md", to_markdown(COMPARISONS[n])) for n in ("run_folder", "hostile")),
    ],
)
def test_a_document_is_as_expected(
    golden: Callable[[Path, str], None], name: str, text: str
) -> None:
    golden(GOLDEN / name, text)


def _layer_in_csv(name: str) -> str:
    text = to_csv(report(matmul(name, 512, 512, weight="w")))
    (row,) = csv.DictReader(io.StringIO(text))
    return str(row["layer"])


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("  =1+1", "'  =1+1"),
        ("\uff1d1", "'\uff1d1"),
        ("'quoted", "''quoted"),
        ("\t=1", r"\t=1"),
        ("fc-1=2", "fc-1=2"),
    ],
)
def test_a_name_that_a_spreadsheet_would_run_gets_an_apostrophe(name: str, cell: str) -> None:
    assert _layer_in_csv(name) == cell


@given(st.text())
def test_a_name_reads_as_it_is_in_markdown_and_without_one_apostrophe_in_csv(name: str) -> None:
    cell = _layer_in_csv(name)
    assert cell.removeprefix("'") == printable(name)
    assert cell.lstrip()[:1] not in tuple("=+-@\t\r\n")
    made = report(matmul(name, 512, 512, weight="w"))
    page = MarkdownIt("commonmark").enable("table").render(to_markdown(made))
    (shown,) = re.findall(r"<tr>\n<td>(.*?)</td>", page.split("<h2>Layers</h2>")[1])
    assert unescape(re.sub(r"</?code>", "", shown)) == (printable(name) or "(no name)")


@given(st.text(alphabet="ab_*`|\\\\[](){}<>&#~$! .:/-\u00e9", min_size=1))
def test_a_sentence_reads_as_it_is(text: str) -> None:
    made = report(matmul("fc", 512, 512))
    said = replace(made.verdicts[0], reasons=(reason(ReasonCode.DENSE_FASTER, text),), remedy=None)
    page = MarkdownIt("commonmark").enable("table")
    shown = page.render(to_markdown(replace(made, verdicts=(said,))).split("## What")[0])
    (legend,) = re.findall(r"<li>(<code>DENSE_FASTER</code>: .*?)</li>", shown, re.DOTALL)
    assert unescape(legend).split("(1 layer")[0].split() == [
        "<code>DENSE_FASTER</code>:",
        *f"{text}.".split(),
    ]


def test_no_name_adds_a_tag_or_a_link() -> None:
    text = to_markdown(COMPARISONS["hostile"])
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert set(re.findall(r"<([a-z0-9]+)", page)) <= {
        *("h1", "h2", "p", "ul", "li", "strong", "code", "br"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }

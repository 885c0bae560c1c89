"""The Markdown report: as expected, every layer in it, and no name that turns into markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from support.render_cases import every_status, hostile, large
from support.rendered import to_markdown
from support.report_cases import matmul, reason, report

from twofour.records.weights import ReasonCode
from twofour.words import printable

GOLDEN = Path(__file__).parent / "golden"


def _tables(text: str) -> list[list[str]]:
    """Cells of every table line; a pipe is only ever the end of a cell."""
    lines = (line for line in text.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _rendered_names(text: str) -> list[str]:
    """The first cells of the table of layers, as a reader of the rendered page sees them."""
    page = MarkdownIt("commonmark").enable("table").render(text)
    rows = re.findall(r"<tr>\n<td>(.*?)</td>", page.split("<h2>Layers</h2>")[1])
    return [unescape(re.sub(r"</?code>", "", row)) for row in rows]


def test_the_report_of_every_status_is_as_expected(golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN / "report.md", to_markdown(every_status()))


def test_the_report_of_hostile_names_is_as_expected(golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN / "hostile.md", to_markdown(hostile()))


def test_no_name_adds_a_cell_or_a_tag() -> None:
    text = to_markdown(hostile())
    widths = {len(row) for row in _tables(text.split("## Layers")[1])}
    assert widths == {8}
    tags = set(re.findall(r"<[^>\s]*", re.sub(r"`[^`\n]*`", "", text)))
    assert tags <= {"<code", "</code"}


@given(st.text(min_size=1))
def test_a_name_reads_as_it_is(name: str) -> None:
    (shown,) = _rendered_names(to_markdown(report(matmul(name, 512, 512, weight="w"))))
    assert shown == printable(name)


def test_times_have_no_column_where_no_layer_was_timed() -> None:
    assert "sparse ms" not in to_markdown(large(8))


def test_an_empty_report_is_a_report() -> None:
    assert "| sparse kernels possible | 0 layers | 0 weights (0 %) |  |" in to_markdown(report())


@given(st.text(alphabet="ab_*`|\\\\[](){}<>&#~$! .:/-\u00e9", min_size=1))
def test_a_sentence_reads_as_it_is(text: str) -> None:
    made = report(matmul("fc", 512, 512))
    said = replace(made.verdicts[0], reasons=(reason(ReasonCode.DENSE_FASTER, text),), remedy=None)
    page = MarkdownIt("commonmark").enable("table")
    shown = page.render(to_markdown(replace(made, verdicts=(said,))).split("## What")[0])
    cells = re.findall(r"<td>(.*?)</td>", shown)
    assert unescape(cells[-2]).split() == ["<code>DENSE_FASTER</code>:", *text.split()]

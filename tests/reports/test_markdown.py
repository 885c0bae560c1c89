"""The Markdown report: as expected, every layer in it, and no name that turns into markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from support.render_cases import HOSTILE, every_status, hostile, large
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


def test_repeated_layers_share_a_row_and_their_times_are_a_range() -> None:
    rows = {row[0]: row for row in _tables(to_markdown(every_status()))}
    assert rows["`encoder.{0-1}.fc` x2"][-3:-1] == ["0.0105 to 0.0107", "0.0169 to 0.0171"]
    assert rows["`encoder.{2,10}.fc` x2"][-3:] == ["-", "-", "-"]
    assert rows["`resnext`"][5] == "eligible (rules said not-eligible)"


def test_times_have_no_column_where_no_layer_was_timed() -> None:
    assert "sparse ms" not in to_markdown(large(8))


@pytest.mark.parametrize("name", ["Reformatting CopyNode for Input Tensor 0", HOSTILE[0]])
def test_unmatched_engine_layers_are_listed(name: str) -> None:
    made = to_markdown(every_status() if "Copy" in name else hostile())
    listed = made.split("## Engine layers not matched")[1].splitlines()
    assert f"- `{name}`" in listed


def test_an_empty_report_is_a_report() -> None:
    assert "| can run sparse | 0 layers | 0 weights (0 %) |  |" in to_markdown(report())


def test_codes_stay_readable_in_the_source_and_emphasis_does_not_happen() -> None:
    text = to_markdown(every_status())
    assert _rendered_names(to_markdown(hostile()))[:-1] == list(map(printable, HOSTILE[:-1]))
    assert "also PATTERN_BROKEN, SMALL_CHANNELS" in text
    assert r"d\*e\*\_f\_ \[g\](http://x)" in to_markdown(hostile())


@given(st.text(alphabet="ab_*`|\\\\[](){}<>&#~$! .:/-\u00e9", min_size=1))
def test_a_sentence_reads_as_it_is(text: str) -> None:
    made = report(matmul("fc", 512, 512))
    said = replace(made.verdicts[0], reasons=(reason(ReasonCode.DENSE_FASTER, text),), remedy=None)
    page = MarkdownIt("commonmark").enable("table")
    shown = page.render(to_markdown(replace(made, verdicts=(said,))).split("## What")[0])
    cells = re.findall(r"<td>(.*?)</td>", shown)
    assert unescape(cells[-2]).split() == ["<code>DENSE_FASTER</code>:", *text.split()]

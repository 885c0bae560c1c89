"""Reports and comparisons in Markdown: every cell in its column, no name that turns into markup."""

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
from support.comparison_cases import COMPARISONS
from support.render_cases import every_status
from support.rendered import to_markdown
from support.report_cases import matmul, reason, report

from twofour.records.weights import ReasonCode
from twofour.words import printable

GOLDEN = Path(__file__).parent / "golden"


def _rendered_names(text: str) -> list[str]:
    """The first cells of the table of layers, as a reader of the rendered page sees them."""
    page = MarkdownIt("commonmark").enable("table").render(text)
    rows = re.findall(r"<tr>\n<td>(.*?)</td>", page.split("<h2>Layers</h2>")[1])
    return [unescape(re.sub(r"</?code>", "", row)) for row in rows]


def test_the_report_of_every_status_is_as_expected(golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN / "report.md", to_markdown(every_status()))


@given(st.text(min_size=1))
def test_a_name_reads_as_it_is(name: str) -> None:
    (shown,) = _rendered_names(to_markdown(report(matmul(name, 512, 512, weight="w"))))
    assert shown == printable(name)


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


@pytest.mark.parametrize("name", ["run_folder", "hostile"])
def test_the_document_is_as_expected(golden: Callable[[Path, str], None], name: str) -> None:
    golden(GOLDEN / f"comparison_{name}.md", to_markdown(COMPARISONS[name]))


def test_no_name_adds_a_tag_or_a_link() -> None:
    text = to_markdown(COMPARISONS["hostile"])
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert set(re.findall(r"<([a-z0-9]+)", page)) <= {
        *("h1", "h2", "p", "ul", "li", "strong", "code", "br"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }

"""A comparison in Markdown: every cell in its column, no name that turns into markup."""

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
from support.comparison_cases import HOSTILE, files, hostile, run_folder
from support.rendered import comparison_markdown

from twofour.words import printable

GOLDEN = Path(__file__).parent / "golden"


def _rendered(text: str) -> str:
    return str(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))


def _cells(page: str, section: str) -> list[list[str]]:
    """Cells of the table under a heading, as a reader sees them."""
    _, _, behind = page.partition(f"<h2>{section}</h2>")
    inside, _, _ = behind.partition("</table>")
    rows = re.findall(r"<tr>(.*?)</tr>", inside, re.DOTALL)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
    return [[unescape(re.sub(r"</?code>", "", cell)) for cell in row] for row in cells]


@pytest.mark.parametrize("name", ["run_folder", "hostile"])
def test_the_document_is_as_expected(golden: Callable[[Path, str], None], name: str) -> None:
    made = {"run_folder": run_folder, "hostile": hostile}[name]()
    golden(GOLDEN / f"comparison_{name}.md", comparison_markdown(made))


def test_no_name_adds_a_cell_a_tag_or_a_link() -> None:
    page = _rendered(comparison_markdown(hostile()))
    assert {len(row) for row in _cells(page, "Times")} == {8}
    assert {len(row) for row in _cells(page, "Not measured")} == {3}
    assert set(re.findall(r"<([a-z0-9]+)", page)) <= {
        *("h1", "h2", "p", "ul", "li", "strong", "code", "br"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    names = [row[0] for row in _cells(page, "Times")[1:]]
    assert names == [printable(f"{name}@onnxruntime:cpu") for name in HOSTILE]


@given(st.text(min_size=1))
def test_an_error_reads_as_it_is(error: str) -> None:
    made = files()
    broken = replace(made, variants=(replace(made.variants[0], samples_ms=(), error=error),))
    _, (_, why) = _cells(_rendered(comparison_markdown(broken)), "Not measured")
    assert why.strip() == printable(error).strip()

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
from support.comparison_cases import HOSTILE, files, hostile, run_folder, sweep
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


def test_the_answer_comes_first_and_every_variant_has_its_row() -> None:
    page = _rendered(comparison_markdown(run_folder()))
    assert page.split("</p>")[0].endswith(
        "<strong>sparse is 1.18x faster than dense in tensorrt:fp16 (1.16 to 1.20); noise 0.8 %"
        "</strong>"
    )
    head, *rows = _cells(page, "Times")
    assert head[5:] == ["time / baseline", "95 % interval", "verdict"]
    assert rows[1] == [
        *("sparse@tensorrt:fp16", "3.649", "3.701", "6.977", "274.1"),
        *("0.847", "0.830 to 0.864", "faster"),
    ]
    assert len(rows) == 8


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


def test_the_ratios_of_a_sweep_keep_their_lines_in_a_cell() -> None:
    page = _rendered(comparison_markdown(sweep()))
    head, sparse, _ = _cells(page, "Time / baseline over batch")
    assert head == ["variant", "batch 1", "batch 8", "batch 32"]
    assert sparse[1].split("<br>") == ["1.000", "0.980 to 1.020", "no difference"]
    assert "PARTIAL: batch 32 ended after 12 of 50 rounds" in page

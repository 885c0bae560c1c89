"""A comparison on its page: text, nothing that a name could break."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.comparison_cases import COMPARISONS, files, run_folder, sweep
from support.html_page import Page
from support.render_cases import build_result, every_status
from support.rendered import to_html

from twofour.records.latency import LatencyComparison
from twofour.reports.latency_words import answer_lines

GOLDEN = Path(__file__).parent / "golden"


def test_the_section_is_as_expected(golden: Callable[[Path, str], None]) -> None:
    page = to_html(run_folder())
    section = page.split("<main>\n")[1].split("</main>")[0]
    lines = section.replace("<g>", "\n<g>").replace("<path", "\n<path").replace("<td", "\n<td")
    golden(GOLDEN / "comparison_section.html.txt", lines)


@pytest.mark.parametrize("made", COMPARISONS.values(), ids=COMPARISONS)
def test_every_tag_is_closed_and_nothing_is_fetched_or_styled_in_place(
    made: LatencyComparison,
) -> None:
    for text in (to_html(made), to_html(every_status(), comparison=made)):
        page = Page(text)
        assert page.unclosed == []
        assert not re.search(r"url\(|@import", "".join(page.texts["style"]))
        tags = {tag for tag, _ in page.tags}
        assert tags.isdisjoint({"link", "img", "iframe", "object", "embed", "base"})
        for _, attributes in page.tags:
            assert "style" not in attributes
            assert not [key for key in attributes if key.startswith("on")]
        assert {a["href"] for _, a in page.tags if "href" in a} <= {"#layers"}


def test_of_the_batches_of_a_sweep_only_the_first_is_open() -> None:
    text = to_html(sweep())
    assert re.findall(r"<details( open)?>\n<summary>(Batch \d+)", text) == [
        (" open", "Batch 1"),
        ("", "Batch 8"),
        ("", "Batch 32"),
    ]
    assert "<details" not in to_html(run_folder())


def test_a_report_shows_the_comparison_instead_of_the_times_of_the_build() -> None:
    built = build_result(run_folder())
    text = to_html(every_status(), build=built, comparison=files())
    assert "<h2>Engines</h2>" in text
    assert "a note &amp; more" in text
    assert answer_lines(files())[0] in html.unescape(text)
    assert answer_lines(built.times)[0] not in html.unescape(text)
    assert answer_lines(built.times)[0] in html.unescape(to_html(every_status(), build=built))

"""HTML pages as text: escaped, self-contained, every layer and every comparison in them."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparison_cases import COMPARISONS, agreement, files, run_folder, sweep
from support.render_cases import HOSTILE, build_result, every_status, hostile, large
from support.rendered import to_html
from support.report_cases import matmul, report

from twofour.eligibility.totals import LayerStatus
from twofour.records.eligibility import EligibilityReport
from twofour.records.export import Accuracy
from twofour.records.latency import LatencyComparison
from twofour.reports.eligibility_document import status_bar
from twofour.reports.latency_words import answer_lines
from twofour.words import printable, share

GOLDEN = Path(__file__).parent / "golden"


class Page(HTMLParser):
    """Tags with attributes, and the texts right inside each kind of tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = defaultdict(list)
        self.unclosed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "wbr", "br", "input", "link", "img"}:
            self.unclosed.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.unclosed:
            self.texts[self.unclosed[-1]].append(data)


def _data(text: str) -> list[dict[str, Any]]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    found: list[dict[str, Any]] = json.loads(match[1])
    return found


def test_only_the_script_and_style_of_the_page_are_allowed_to_run() -> None:
    text = to_html(hostile())
    page = Page(text)
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not [a for _, a in page.tags if "style" in a or any(k.startswith("on") for k in a)]


def test_hostile_names_make_no_tag_and_are_shown_as_they_are() -> None:
    made = hostile()
    text = to_html(made).replace("<wbr>", "")
    plain = Counter(tag for tag, _ in Page(to_html(_renamed(made)).replace("<wbr>", "")).tags)
    page = Page(text)
    assert Counter(tag for tag, _ in page.tags) == plain
    shown = "".join(page.texts["button"])
    assert all(printable(name) in shown for name in HOSTILE)
    assert "49" not in "".join(page.texts["td"])
    assert not {"\u2028", "\u2029", "\u202e", "\x1b"} & set(text)


def _renamed(made: EligibilityReport) -> EligibilityReport:
    """The same report under harmless names, of the same number."""
    verdicts = tuple(
        replace(v, layer="l" * (i + 1), node="n", op="MatMul", engine_layer="e", remedy="r")
        for i, v in enumerate(made.verdicts)
    )
    unmatched = tuple(f"u{i}" for i in range(len(made.unmatched_engine_layers)))
    return replace(made, model="m", verdicts=verdicts, unmatched_engine_layers=unmatched)


@settings(max_examples=30)
@given(st.text())
def test_the_data_of_the_script_cannot_end_it_and_come_back_as_they_were(name: str) -> None:
    text = to_html(report(matmul(name, 512, 512, weight="w")))
    (layer,) = _data(text)
    assert layer["names"] == [printable(name) or "(no name)"]
    inside = text.split('id="data">')[1].split("</script>")[0]
    assert inside.isascii()
    assert not set("<>&") & set(inside)


def test_every_layer_has_a_row_and_data_in_the_order_of_the_model() -> None:
    made = every_status()
    text = to_html(made).replace("<wbr>", "")
    shown = [layer["names"] for layer in _data(text)]
    assert [name for names in shown for name in names] == [v.layer for v in made.verdicts]
    rows = re.findall(r'class="more" aria-expanded="false">([^<]*)<', text)
    assert len(rows) == len(shown) < len(made.verdicts)
    assert rows[0] == made.verdicts[0].layer
    stem = _data(text)[0]
    assert ["reduction axis", "1 (input channels)"] in stem["facts"]
    assert stem["codes"] == ["AXIS_NOT_MULTIPLE", "PATTERN_BROKEN"]


def test_the_first_sentence_of_the_answer_is_the_headline() -> None:
    accuracy = Accuracy(drift=(), examples=8, not_compared="no room")
    text = to_html(every_status(), accuracy=accuracy)
    (headline,) = re.findall(r'<p class="answer">(.*?)</p>', text)
    assert headline.count(". ") == 0


def test_the_layers_that_take_longest_have_a_bar_of_their_time() -> None:
    text = to_html(every_status())
    times = text[text.index("Where the time goes") :]
    ends = re.findall(r'class="segment saved" x="([\d.]+)%" y="0" width="([\d.]+)%', times)
    widths = [round(float(start) + float(width), 2) for start, width in ends]
    assert widths[0] == 100.0
    assert widths == sorted(widths, reverse=True)
    assert "Where the time goes" not in to_html(large(20))


def test_times_are_there_only_where_there_are_figures() -> None:
    timed = to_html(every_status())
    assert 'data-sort="ratio"' in timed
    assert "sparse / dense" in timed
    small = next(layer for layer in _data(timed) if layer["names"] == ["small"])
    assert small["sort"]["ratio"] == 0.0091 / 0.0064  # above 1: dense was faster
    silent = to_html(large(20))
    assert 'data-sort="ratio"' not in silent


def test_how_far_the_outputs_are_is_shown() -> None:
    drift = replace(agreement(1.25, 0.98765432), output="<logits>", shape=(8, 10))
    drift = replace(drift, relative_error=None, dense_largest=None)
    text = to_html(every_status(), accuracy=Accuracy(drift=(drift,), examples=8))
    assert "output &lt;logits&gt; [8x10]" in text
    assert "0.987654" in text
    assert 'id="latency"' not in text


def test_the_bar_has_a_segment_per_status_in_proportion() -> None:
    statuses = {LayerStatus.RUNS: 1, LayerStatus.CAN: 0, LayerStatus.CANNOT: 3}
    bar = status_bar(statuses, "layer", lambda number, _: str(number))
    assert [(one.start, one.width) for one in bar.segments] == [(0, 25), (25, 75)]
    assert bar.segments[1].title == "not-eligible: runs dense: 3 layers"
    bar = status_bar(statuses, "weight", share)
    assert bar.segments[1].title == "not-eligible: runs dense: 3 weights (75.0 %)"


def test_the_section_of_a_comparison_is_as_expected(golden: Callable[[Path, str], None]) -> None:
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
    assert "&lt;b&gt;not installed&lt;/b&gt;" in text
    assert answer_lines(files())[0] in html.unescape(text)
    assert answer_lines(built.times)[0] not in html.unescape(text)
    assert answer_lines(built.times)[0] in html.unescape(to_html(every_status(), build=built))

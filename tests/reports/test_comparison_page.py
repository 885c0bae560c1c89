"""A comparison on its page: text, plots to scale, nothing that a name could break."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import log10
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.comparison_cases import HOSTILE, files, hostile, many, noise, run_folder, sweep
from support.html_page import Page
from support.render_cases import build_result, every_status
from support.rendered import comparison_page, ratio_plot, to_html

from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.reports.latency_words import answer_lines
from twofour.reports.svg import LEFT, RIGHT, WIDTH, Scale, log_range, shortened, ticks
from twofour.words import printable

GOLDEN = Path(__file__).parent / "golden"


def test_the_section_is_as_expected(golden: Callable[[Path, str], None]) -> None:
    page = comparison_page(run_folder())
    section = page.split("<main>\n")[1].split("</main>")[0]
    lines = section.replace("<g>", "\n<g>").replace("<path", "\n<path").replace("<td", "\n<td")
    golden(GOLDEN / "comparison_section.html.txt", lines)


@pytest.mark.parametrize("made", [run_folder(), sweep(), files(), hostile(), many()])
def test_every_tag_is_closed_and_nothing_is_fetched_or_styled_in_place(
    made: LatencyComparison,
) -> None:
    for text in (comparison_page(made), to_html(every_status(), comparison=made)):
        page = Page(text)
        assert page.unclosed == []
        tags = {tag for tag, _ in page.tags}
        assert tags.isdisjoint({"link", "img", "iframe", "object", "embed", "base"})
        for _, attributes in page.tags:
            assert "style" not in attributes
            assert not [key for key in attributes if key.startswith("on")]
        assert {a["href"] for _, a in page.tags if "href" in a} <= {"#layers"}


def test_the_style_of_a_report_with_a_comparison_is_the_one_its_policy_allows() -> None:
    text = to_html(every_status(), comparison=run_folder())
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"sha256-{digest}" in text
    assert ".whisker" in style
    assert ".whisker" not in to_html(every_status())


def test_the_page_says_which_noise_is_shaded() -> None:
    assert "Shaded: noise of the baseline.</p>" in comparison_page(run_folder())


def test_of_the_batches_of_a_sweep_only_the_first_is_open() -> None:
    text = comparison_page(sweep())
    assert re.findall(r"<details( open)?>\n<summary>(Batch \d+)", text) == [
        (" open", "Batch 1"),
        ("", "Batch 8"),
        ("", "Batch 32"),
    ]
    assert "<details" not in comparison_page(run_folder())


def test_names_from_outside_are_text_and_nothing_else() -> None:
    text = comparison_page(hostile())
    page = Page(text)
    for name in HOSTILE:
        assert printable(f"{name}@onnxruntime:cpu") in page.cells
    harmless = Page(comparison_page(files()))
    assert {tag for tag, _ in page.tags} - {tag for tag, _ in harmless.tags} <= {"ul", "br", "wbr"}
    assert "\x1b" not in text
    assert "{{ 7 * 7 }}" in text


def test_a_report_shows_the_comparison_instead_of_the_times_of_the_build() -> None:
    built = build_result(run_folder())
    text = to_html(every_status(), build=built, comparison=files())
    assert "<h2>Engines</h2>" in text
    assert "a note &amp; more" in text
    assert answer_lines(files())[0] in html.unescape(text)
    assert answer_lines(built.times)[0] not in html.unescape(text)
    assert answer_lines(built.times)[0] in html.unescape(to_html(every_status(), build=built))


def test_a_build_without_notes_leaves_no_empty_heading_beside_its_times() -> None:
    silent = replace(build_result(run_folder()), notes=(), not_used=())
    assert "<h2>Engines" not in to_html(every_status(), build=silent)


NUMBER = r"(-?[\d.]+)"


def _ratio_plot(comparison: LatencyComparison, batch: int | None = None) -> str:
    plot = ratio_plot(comparison, batch)
    assert plot is not None
    return plot


def _value(pixel: float, comparison: LatencyComparison) -> float:
    """The ratio at a pixel, from the two outermost ticks of the plot's axis."""
    plot = _ratio_plot(comparison)
    found = re.findall(rf'<text x="{NUMBER}" y="[\d.]+" text-anchor="middle">{NUMBER}<', plot)
    (x0, v0), *_, (x1, v1) = ((float(x), float(v)) for x, v in found)
    part = (pixel - x0) / (x1 - x0)
    return float(10 ** (log10(v0) + part * (log10(v1) - log10(v0))))


def test_a_dot_and_its_whiskers_lie_at_the_ratio_and_its_interval() -> None:
    comparison = files()
    plot = _ratio_plot(comparison)
    (dot,) = re.findall(rf'class="mark slower" transform="translate\({NUMBER} ', plot)
    assert _value(float(dot), comparison) == pytest.approx(1.25, rel=0.002)
    (whisker,) = re.findall(
        rf'class="whisker slower" d="M{NUMBER} [\d.]+V[\d.]+M[\d. ]+H{NUMBER}M', plot
    )
    ends = [_value(float(pixel), comparison) for pixel in whisker]
    assert ends == pytest.approx([1.225, 1.275], rel=0.002)
    (one,) = re.findall(rf'class="one" d="M{NUMBER} ', plot)
    assert _value(float(one), comparison) == pytest.approx(1.0, rel=0.002)


def test_the_noise_is_shaded_as_far_as_it_reaches_to_both_sides() -> None:
    comparison = many()
    plot = _ratio_plot(comparison)
    ((left, width),) = re.findall(rf'class="noise" x="{NUMBER}" y="12" width="{NUMBER}"', plot)
    ends = [_value(pixel, comparison) for pixel in (float(left), float(left) + float(width))]
    assert ends == pytest.approx([1 / 1.03, 1.03], rel=0.003)
    assert 'class="noise"' not in _ratio_plot(files())


def test_the_noise_of_another_engine_is_not_the_band() -> None:
    comparison = many()
    other = noise("dense@torch:eager", 0.5)
    both = replace(comparison, noise=(other, *comparison.noise))
    assert _ratio_plot(both) == _ratio_plot(comparison)
    assert 'class="noise"' not in _ratio_plot(replace(comparison, noise=(other,)))


def test_every_ratio_has_a_row_the_pairs_of_other_engines_too() -> None:
    plot = _ratio_plot(run_folder())
    names = re.findall(r'class="name"[^>]*><title>([^<]*)</title>', plot)
    assert names == [
        "sparse@tensorrt:fp16",
        "dense@onnxruntime:cpu",
        "sparse@onnxruntime:cpu",
        "dense@onnxruntime:int8",
        "dense@torch:compile",
        "sparse / dense in onnxruntime:cpu",
    ]
    assert "0.847 (0.830 to 0.864)" in plot
    marks = re.findall(r'class="mark (\w+)"', plot)
    assert marks == ["faster", "slower", "slower", "slower", "undecided", "same"]


def test_a_ratio_without_an_interval_has_no_whisker() -> None:
    comparison = files()
    bare = replace(comparison.ratios[0], low=None, high=None, verdict=LatencyVerdict.UNDECIDED)
    plot = _ratio_plot(replace(comparison, ratios=(bare,)))
    assert "whisker" not in plot
    assert plot.count('class="mark undecided"') == 1


def test_rows_of_many_variants_do_not_overlap_and_stay_in_the_picture() -> None:
    plot = _ratio_plot(many(18))
    ys = [float(y) for y in re.findall(rf'class="name" x="288" y="{NUMBER}"', plot)]
    assert len(ys) == 17
    assert min(b - a for a, b in pairwise(ys)) == 26
    xs = [float(x) for x in re.findall(rf"translate\({NUMBER} ", plot)]
    assert min(xs) >= LEFT
    assert max(xs) <= WIDTH - RIGHT
    (height,) = re.findall(rf'viewBox="0 0 1000 {NUMBER}"', plot)
    assert max(ys) < float(height)


def test_names_are_escaped_and_shown_whole_in_their_titles() -> None:
    comparison = hostile()
    plot = _ratio_plot(comparison)
    assert "<script" not in plot
    assert "<img" not in plot
    assert "\x1b" not in plot
    assert "x" * 186 + "@onnxruntime:cpu</title>" in plot


@given(st.floats(0.01, 0.99), st.floats(1.01, 300))
def test_an_axis_has_three_to_nine_round_ticks(low: float, high: float) -> None:
    low, high = log_range((low, high))
    found = ticks(Scale(low=low, high=high, start=0, end=1))
    assert 2 <= len(found) <= 9
    assert low <= min(found) < max(found) <= high
    assert all(float(f"{tick:g}") == tick for tick in found)


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    name = "sparse@torch:semi-structured-cusparselt-variant-07"
    assert shortened(name) == "sparse@torch:semi-s…selt-variant-07"[:19] + "…" + name[-18:]
    assert len(shortened(name)) == 38
    assert shortened("short") == "short"

"""The plots of a comparison: every mark where the scale puts its value."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from math import log10

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.comparison_cases import files, hostile, many, noise, run_folder
from support.rendered import ratio_plot

from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.reports.svg import LEFT, RIGHT, WIDTH, Scale, log_range, shortened, ticks

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

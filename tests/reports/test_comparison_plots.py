"""The plots of a comparison: every mark where the scale puts its value."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from math import log10

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.comparison_cases import files, hostile, many, noise, run_folder, sweep, variant
from support.rendered import ratio_plot, sample_plot, sweep_plot, waterfall

from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.reports.svg import LEFT, RIGHT, WIDTH, Scale, apart, log_range, shortened, ticks

NUMBER = r"(-?[\d.]+)"


def _ratio_plot(comparison: LatencyComparison, batch: int | None = None) -> str:
    plot = ratio_plot(comparison, batch)
    assert plot is not None
    return plot


def _sample_plot(comparison: LatencyComparison) -> str:
    plot = sample_plot(comparison, None)
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
    swept = sweep()
    others = tuple(noise("dense@torch:eager", 0.5, batch=n.batch) for n in swept.noise)
    assert sweep_plot(replace(swept, noise=(*others, *swept.noise))) == sweep_plot(swept)


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


def test_without_a_ratio_or_a_sample_there_is_no_plot() -> None:
    empty = replace(files(), ratios=(), variants=())
    assert ratio_plot(empty, None) is None
    assert sample_plot(empty, None) is None
    assert sweep_plot(files()) is None


def test_every_sample_is_a_dot_in_the_order_of_the_rounds() -> None:
    made = replace(variant("a@b:c", 2.0), samples_ms=(2.0, 1.92, 2.08, 2.0, 2.0), median_ms=2.0)
    plot = _sample_plot(replace(files(), variants=(made,)))
    (path,) = re.findall(r'class="samples" d="([^"]*)"', plot)
    dots = [(float(x), float(y)) for x, y in re.findall(rf"M{NUMBER} {NUMBER}h0", path)]
    middle = dots[0][0]
    assert [x < middle for x, _ in dots] == [False, True, False, False, False]
    assert [x > middle for x, _ in dots] == [False, False, True, False, False]
    steps = {round(b[1] - a[1], 1) for a, b in pairwise(dots)}
    assert steps == {6.8}
    (median,) = re.findall(rf'class="median" d="M{NUMBER} ', plot)
    assert float(median) == middle


def test_two_speeds_are_two_columns_and_the_box_spans_both() -> None:
    samples = (1.0, 1.1) * 20 + (1.0,)
    made = replace(variant("a@b:c", 1.0), samples_ms=samples, median_ms=1.0)
    plot = _sample_plot(replace(files(), variants=(made,)))
    (path,) = re.findall(r'class="samples" d="([^"]*)"', plot)
    columns = sorted({float(x) for x in re.findall(rf"M{NUMBER} ", path)})
    ((left, width),) = re.findall(rf'class="middle" x="{NUMBER}" y="[\d.]+" width="{NUMBER}"', plot)
    assert columns == pytest.approx([float(left), float(left) + float(width)])


def test_outliers_beyond_the_axis_are_at_its_edge_and_counted() -> None:
    made = replace(variant("a@b:c", 1.0), samples_ms=(1.0,) * 38 + (3.0, 7.25), median_ms=1.0)
    plot = _sample_plot(replace(files(), variants=(made,)))
    assert "2 beyond, up to 7.25x" in plot
    (path,) = re.findall(r'class="samples" d="([^"]*)"', plot)
    xs = [float(x) for x in re.findall(rf"M{NUMBER} ", path)]
    assert xs[-2:] == [WIDTH - RIGHT + 7] * 2
    assert max(xs[:-2]) < WIDTH - RIGHT


def test_a_line_over_the_batches_falls_where_sparse_gets_faster() -> None:
    plot = sweep_plot(sweep())
    assert plot is not None
    ((xs, ys),) = [
        ([float(x) for x, _ in points], [float(y) for _, y in points])
        for way in re.findall(
            r'class="s0 d0"><title>sparse[^<]*</title><path class="series" d="([^"]*)"', plot
        )
        for points in [re.findall(rf"{NUMBER} {NUMBER}", way)]
    ]
    assert ys == sorted(ys)
    assert (xs[1] - xs[0]) / (xs[2] - xs[0]) == pytest.approx(3 / 5, abs=0.001)
    (one,) = re.findall(rf'class="one" d="M64 {NUMBER}H', plot)
    assert float(one) == ys[0]
    assert re.findall(r'class="name"[^>]*><title>([^<]*)<', plot) == [
        "sparse@tensorrt:fp16",
        "dense@torch:eager",
    ]


def test_the_noise_of_a_sweep_is_a_band_over_its_batches() -> None:
    plot = sweep_plot(sweep())
    assert plot is not None
    (band,) = re.findall(r'class="noise" d="M([^"]*)Z"', plot)
    points = [tuple(map(float, point.split())) for point in band.split("L")]
    (one,) = re.findall(rf'class="one" d="M64 {NUMBER}H', plot)
    assert [y < float(one) for _, y in points] == [True] * 3 + [False] * 3
    assert [x for x, _ in points[:3]] == [x for x, _ in points[:2:-1]]


def test_the_waterfall_goes_from_one_sum_to_the_other_without_a_gap() -> None:
    (contrast,) = run_folder().layers
    plot = waterfall(contrast)
    assert plot is not None
    bars = [
        (slug, float(x), float(x) + float(width))
        for slug, x, width in re.findall(
            rf'class="step (\w+)" x="{NUMBER}" y="[\d.]+" width="{NUMBER}"', plot
        )
    ]
    assert len(bars) == 13
    totals = [float(x) for x in re.findall(rf'class="total" d="M[\d. ]+H{NUMBER}M', plot)]
    at = totals[0]
    for slug, left, right in bars:
        assert (right if slug == "faster" else left) == pytest.approx(at, abs=0.2)
        at = left if slug == "faster" else right
    assert at == pytest.approx(totals[1], abs=0.2)
    assert totals[1] < totals[0]
    assert "29 more layers" in plot
    assert "4.880 ms" in plot
    assert "3.085 ms" in plot


def test_a_waterfall_of_most_of_the_time_starts_at_0() -> None:
    (contrast,) = hostile().layers
    plot = waterfall(contrast)
    assert plot is not None
    assert "does not start at 0" in plot
    small = replace(contrast, variant_ms=0.5, rows=(replace(contrast.rows[0], difference_ms=-1.5),))
    plot = waterfall(small)
    assert plot is not None
    assert "does not start at 0" not in plot
    assert waterfall(replace(contrast, rows=())) is None


def test_a_slower_layer_goes_the_other_way() -> None:
    (contrast,) = run_folder().layers
    slower = next(row for row in contrast.rows if row.difference_ms > 0)
    plot = waterfall(replace(contrast, rows=(slower,), variant_ms=contrast.baseline_ms + 0.05))
    assert plot is not None
    assert re.findall(r'class="step (\w+)"', plot) == ["slower"]


def test_names_are_escaped_and_shown_whole_in_their_titles() -> None:
    comparison = hostile()
    for plot in (_ratio_plot(comparison), _sample_plot(comparison)):
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


@given(st.floats(0, 1e4), st.floats(1e-3, 1e4))
def test_a_linear_axis_has_ticks_too(low: float, span: float) -> None:
    found = ticks(Scale(low=low, high=low + span, start=0, end=1, log=False))
    assert 2 <= len(found) <= 9
    assert low * (1 - 1e-9) <= found[0] < found[-1] <= (low + span) * (1 + 1e-9)


@given(st.lists(st.floats(0, 300), min_size=1, max_size=18))
def test_labels_keep_their_distance_and_their_order(wanted: list[float]) -> None:
    placed = apart(wanted, gap=16, low=0, high=300)
    ranked = sorted(placed)
    assert all(b - a >= 15.8 for a, b in pairwise(ranked))
    assert min(placed) >= -0.1
    assert max(placed) <= 300.1
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    assert [placed[i] for i in order] == ranked


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    name = "sparse@torch:semi-structured-cusparselt-variant-07"
    assert shortened(name) == "sparse@torch:semi-s…selt-variant-07"[:19] + "…" + name[-18:]
    assert len(shortened(name)) == 38
    assert shortened("short") == "short"

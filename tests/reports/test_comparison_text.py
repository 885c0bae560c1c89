"""A comparison in the terminal: the answer first, nothing cut, no number broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.cells import cell_len
from support.comparison_cases import (
    COMPARISONS,
    files,
    many,
    noise,
    ratio,
    run_folder,
    variant,
)
from support.rendered import to_table

from twofour.records.eligibility import EligibilityReport
from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.reports import text
from twofour.reports.document import Kind
from twofour.reports.latency_document import latency_document, layer_table, settings_table
from twofour.reports.latency_words import HOST_BOUND, answer_lines, legend, machine_lines
from twofour.reports.terminal import plain_text
from twofour.words import figure, speed_up

GOLDEN = Path(__file__).parent / "golden"


def _shown(comparison: LatencyComparison, width: int = 80) -> str:
    return plain_text(to_table(comparison), width=width)


def _column(comparison: LatencyComparison, head: str) -> dict[str | None, str | None]:
    """Cells of a column of the first batch by variant."""
    for made in latency_document(comparison).tables:
        for column in made.columns:
            if column.head == head:
                return dict(zip(made.columns[0].cells, column.cells, strict=True))
    raise AssertionError(head)


@pytest.mark.parametrize("name", ["run_folder", "sweep", "hostile"])
def test_the_comparison_is_as_expected(golden: Callable[[Path, str], None], name: str) -> None:
    golden(GOLDEN / f"comparison_{name}.txt", _shown(COMPARISONS[name]))


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_broken(name: str, width: int) -> None:
    comparison = COMPARISONS[name]
    text = _shown(comparison, width)
    assert max(map(cell_len, text.splitlines())) <= width
    figures = [
        line
        for made in latency_document(comparison).tables
        for column in made.columns
        if column.kind is Kind.FIGURE
        for cell in column.cells
        for line in (cell or "-").split("\n")
    ]
    assert len(figures) > 15
    for figure_ in figures:
        assert re.search(rf"(?<!\S){re.escape(figure_)}(?!\S)", text), figure_


def test_the_table_of_outputs_says_on_which_samples_of_the_run_they_are_compared() -> None:
    samples = "samples that pruning uses"
    comparison = replace(run_folder(), inputs_are=samples)
    legends = [made.legend for made in latency_document(comparison).tables if made.legend]
    assert any(samples in legend for legend in legends)


def test_the_noise_of_another_engine_does_not_stand_for_this_one() -> None:
    comparison = files()
    base, other = "a@onnxruntime:cpu", "b@torch:eager"
    local = ratio(other, "a@torch:eager", 0.8)
    pair = (variant("a@torch:eager", 2.0), variant(other, 1.6))
    made = replace(
        comparison,
        variants=(*comparison.variants, *pair),
        ratios=(*comparison.ratios, local),
        noise=(noise(base, 0.02),),
    )
    known, unknown = answer_lines(made)
    assert "1.25x slower" in known
    assert "is 0.800 (0.784 to" in unknown
    twice = replace(made, noise=(*made.noise, noise("a@torch:eager", 0.05)))
    assert "1.25x faster" in answer_lines(twice)[1]


@pytest.mark.parametrize(
    ("floor", "said"),
    [
        (0.1, "no difference between b and a in onnxruntime:cpu; noise 10.0 %"),
        (
            1.137,
            "the noise hides any difference between b and a in onnxruntime:cpu; noise over 100 %",
        ),
    ],
)
def test_where_the_noise_is_large_no_difference_is_not_claimed(floor: float, said: str) -> None:
    comparison = files()
    names = ("b@onnxruntime:cpu", "a@onnxruntime:cpu")
    none = ratio(*names, 1.0, LatencyVerdict.NO_DIFFERENCE)
    noisy = replace(comparison, ratios=(none,), noise=(noise(names[1], floor),))
    assert answer_lines(noisy) == (said,)
    more = replace(noisy, ratios=(replace(none, only_sparsity=False),))
    assert answer_lines(more) == (said,)


def test_the_fastest_is_one_that_is_seen_to_be_faster() -> None:
    made = many()
    lowest, second = made.ratios[:2]
    unclear = replace(lowest, verdict=LatencyVerdict.NO_DIFFERENCE)
    assert answer_lines(replace(made, ratios=(unclear, *made.ratios[1:])))[0].startswith(
        f"fastest of 18 variants: {second.variant} is "
    )
    undecided = replace(made.ratios[9], verdict=LatencyVerdict.UNDECIDED)
    (line,) = answer_lines(replace(made, ratios=(*made.ratios[10:], undecided)))
    assert line.startswith("none of 8 variants")
    assert "too few rounds" in line
    unknown = answer_lines(replace(made, noise=()))[0]
    assert f"time of {lowest.variant} /" in unknown
    assert "is 0.420 (0.412 to" in unknown


def test_too_few_rounds_and_nothing_measured_are_said() -> None:
    pair = files()
    undecided = ratio(
        "b@onnxruntime:cpu", "a@onnxruntime:cpu", 1.1, verdict=LatencyVerdict.UNDECIDED
    )
    few = replace(pair, ratios=(undecided,))
    assert answer_lines(few)[0].startswith("too few rounds")
    alone = replace(pair, ratios=(), variants=pair.variants[:1])
    assert "only a@onnxruntime:cpu ran" in answer_lines(alone)[0]
    apart = replace(pair, ratios=())
    assert "a@onnxruntime:cpu, b@onnxruntime:cpu were not" in answer_lines(apart)[0]
    failed = tuple(v for v in run_folder().variants if v.error is not None)
    assert answer_lines(replace(pair, ratios=(), variants=failed)) == ("nothing was measured",)


@pytest.mark.parametrize(
    ("low", "value", "high", "said"),
    [
        (0.45, 0.5, 0.55, "2.00x faster (1.82 to 2.22)"),
        (1.02, 1.04, 1.06, "1.040x slower (1.020 to 1.060)"),
        (0.98, 0.99, 1.01, "1.010x faster (0.990 to 1.020)"),
    ],
)
def test_a_speed_up_is_the_ratio_turned_over(
    low: float, value: float, high: float, said: str
) -> None:
    made = ratio("a@b:c", "d@b:c", value)
    assert speed_up(replace(made, low=low, high=high)) == said
    assert speed_up(replace(made, low=None, high=None)) == said.partition(" (")[0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.08151, "0.08151"),
        (999.96, "1,000"),
        (0.00001234, "1.23e-05"),
        (None, None),
    ],
)
def test_figures_keep_four_digits(value: float | None, said: str | None) -> None:
    assert figure(value) == said


def test_a_variant_that_failed_on_the_way_keeps_its_times_and_says_after_how_many_rounds() -> None:
    comparison = files()
    first, second = comparison.variants
    broke = replace(second, samples_ms=second.samples_ms[:7], error="out of memory")
    made = replace(comparison, variants=(first, broke))
    assert "after 7 rounds" in _shown(made)
    assert _column(made, "verdict") == {
        "a@onnxruntime:cpu": "baseline",
        "b@onnxruntime:cpu": "slower",
    }


@pytest.mark.parametrize(("enqueue_ms", "is_bound"), [(2.1, False), (2.3, True), (None, False)])
def test_an_engine_that_takes_the_host_half_of_the_gpu_s_time_to_start_is_bound_by_it(
    enqueue_ms: float | None, is_bound: bool
) -> None:
    comparison = run_folder()
    dense = replace(comparison.variants[0], median_ms=4.4)
    assert dense.settings is not None
    timing = replace(dense.settings, timing="mean of launches", enqueue_ms=enqueue_ms)
    dense = replace(dense, settings=timing)
    comparison = replace(comparison, variants=(dense, *comparison.variants[1:]))
    heads = {column.head for made in latency_document(comparison).tables for column in made.columns}
    assert ("note" in heads) is is_bound
    assert (HOST_BOUND in legend(comparison)) is is_bound
    if is_bound:
        assert _column(comparison, "note")[dense.name] == HOST_BOUND
    if enqueue_ms is not None:
        assert _column(comparison, "host ms")[dense.name] == f"{enqueue_ms:.3f}"
    measured_on = "\n".join(machine_lines(comparison))
    assert ("mean of launches" in measured_on) is (enqueue_ms is not None)


def test_the_worst_output_is_shown_with_what_is_not_finite() -> None:
    comparison = run_folder()
    (good,) = comparison.variants[1].agreement
    bad = replace(good, max_abs_error=0.5, cosine=0.9, not_finite=3)
    empty = replace(good, cosine=float("nan"))
    two = replace(comparison.variants[1], agreement=(good, bad, empty))
    changed = replace(comparison, variants=(comparison.variants[0], two))
    shown = _column(changed, "max error")[two.name] or ""
    assert shown.split("\n") == ["0.5", "3 NaN/inf"]
    assert _column(changed, "cosine")[two.name] == "0.900000"


def test_the_forecast_stands_beside_the_measured_answer_and_the_ratio_of_each_layer() -> None:
    (contrast,) = run_folder().layers
    cell = Mock(gpu="L4", in_words="expected 1.10x (1.00 to 1.21), at most 1.22x")
    cell.name = "L4, float16"
    gains = {contrast.rows[0].layer: 1.6}
    report = Mock(EligibilityReport, forecast=cell, forecast_gains=gains)
    made = layer_table(contrast, report)
    assert [c.head for c in made.columns][3:5] == ["ratio", "forecast gain on L4"]
    assert [row[4] for row in made.rows[:2]] == ["1.60", None]
    assert not any("forecast" in c.head for c in layer_table(contrast).columns)
    shown = text.markdown(latency_document(run_folder(), report))
    assert f"forecast for L4, float16: {cell.in_words}" in shown
    assert "forecast for" not in text.markdown(latency_document(run_folder()))


def test_a_layer_of_one_side_only_says_so() -> None:
    (contrast,) = run_folder().layers
    alone = [row for row in contrast.rows if row.baseline_ms is None]
    gone = replace(alone[0], layer="", baseline_layer="old", variant_ms=None, baseline_ms=0.4)
    names = [row[0] for row in layer_table(replace(contrast, rows=(*alone, gone))).rows]
    assert [(name or "").split("\n")[1] for name in names] == [
        "not in the baseline",
        "only in the baseline",
    ]


def test_each_variant_has_a_row_and_equal_columns_are_left_out() -> None:
    first, *others = run_folder().variants
    assert first.settings is not None
    other = replace(first.settings, precision="float16", timing="one enqueue")
    variants = (replace(first, settings=other), *others)
    made = settings_table(replace(run_folder(), variants=variants))
    heads = [c.head for c in made.columns]
    assert heads[:2] == ["variant", "precision"]
    assert "threads" not in heads
    precisions = {row[0]: row[1] for row in made.rows}
    assert len(precisions) == len(made.rows)
    assert not any("again" in (name or "") for name in precisions)
    assert precisions.pop(first.name) == "float16"
    assert set(precisions.values()) == {"float32"}
    (spans,) = (c.cells for c in made.columns if c.head == "one sample is")
    assert set(spans) == {"one enqueue", first.settings.timing}

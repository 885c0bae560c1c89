"""A comparison in the terminal: the answer first, nothing cut, no number broken."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from support.comparison_cases import (
    HOSTILE,
    by_trtexec,
    files,
    hostile,
    machine,
    many,
    noise,
    ratio,
    run_folder,
    sweep,
    variant,
)
from support.rendered import comparison_text

from twofour.records.latency import (
    Clocks,
    Difference,
    LatencyComparison,
    LatencyVerdict,
    Machine,
    RoundLoad,
)
from twofour.reports.document import Kind, Table
from twofour.reports.latency_document import latency_document
from twofour.reports.latency_layers import layer_table
from twofour.reports.latency_words import (
    answer_lines,
    difference_lines,
    legend,
    machine_lines,
    noise_lines,
)
from twofour.reports.terminal import plain_text
from twofour.words import figure, printable, speed_up

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "run_folder": run_folder,
    "sweep": sweep,
    "files": files,
    "hostile": hostile,
    "many": many,
}


def _shown(comparison: LatencyComparison, width: int = 80) -> str:
    return plain_text(comparison_text(comparison), width=width)


def _column(comparison: LatencyComparison, head: str) -> dict[str | None, str | None]:
    """Cells of a column of the first batch by variant."""
    for made in latency_document(comparison).tables:
        for column in made.columns:
            if column.head == head:
                return dict(zip(made.columns[0].cells, column.cells, strict=True))
    raise AssertionError(head)


def _times(comparison: LatencyComparison) -> list[Table]:
    """The table of times of each batch."""
    return [t for t in latency_document(comparison).tables if t.title.startswith("Times")]


@pytest.mark.parametrize("name", ["run_folder", "sweep", "hostile"])
def test_the_comparison_is_as_expected(golden: Callable[[Path, str], None], name: str) -> None:
    golden(GOLDEN / f"comparison_{name}.txt", _shown(CASES[name]()))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    widths = {cell_len(line) for line in _shown(CASES[name](), width).splitlines()}
    assert max(widths) <= width


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [60, 80])
def test_no_number_is_broken_or_cut(name: str, width: int) -> None:
    comparison = CASES[name]()
    text = _shown(comparison, width)
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


def test_the_first_line_says_sparse_against_dense_with_interval_and_noise() -> None:
    first, second = answer_lines(run_folder())
    assert first == "sparse is 1.18x faster than dense in tensorrt:fp16 (1.16 to 1.20); noise 0.8 %"
    assert second == "no difference between sparse and dense in onnxruntime:cpu (noise 2.1 %)"


def test_a_sweep_answers_for_each_batch_and_says_that_it_is_partial() -> None:
    assert answer_lines(sweep()) == (
        "sparse against dense in tensorrt:fp16: no difference at batch 1, 1.087x faster (1.066 to "
        "1.109) at batch 8, 1.19x faster (1.17 to 1.21) at batch 32; noise 1.0 to 1.4 %",
        "PARTIAL: batch 32 ended after 12 of 50 rounds",
    )


def test_a_file_is_said_to_be_slower_only_where_the_noise_of_its_engine_is_known() -> None:
    comparison = files()
    assert answer_lines(comparison) == (
        "time of b / a in onnxruntime:cpu is 1.250 (1.225 to 1.275); noise of this engine not "
        "measured",
    )
    known = replace(comparison, noise=(noise("a@onnxruntime:cpu", 0.02),))
    assert answer_lines(known) == (
        "b is 1.25x slower than a in onnxruntime:cpu (1.23 to 1.27); noise 2.0 %",
    )


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
    assert answer_lines(made) == (
        "b is 1.25x slower than a in onnxruntime:cpu (1.23 to 1.27); noise 2.0 %",
        "time of b / a in torch:eager is 0.800 (0.784 to 0.816); noise of this engine not measured",
    )
    twice = replace(made, noise=(*made.noise, noise("a@torch:eager", 0.05)))
    assert answer_lines(twice)[1] == (
        "b is 1.25x faster than a in torch:eager (1.23 to 1.28); noise 5.0 %"
    )


@pytest.mark.parametrize(
    ("floor", "said"),
    [
        (0.1, "no difference between b and a in onnxruntime:cpu (noise 10.0 %)"),
        (1.137, "too noisy to tell b from a in onnxruntime:cpu (noise 113.7 %)"),
    ],
)
def test_where_the_noise_is_large_no_difference_is_not_claimed(floor: float, said: str) -> None:
    comparison = files()
    names = ("b@onnxruntime:cpu", "a@onnxruntime:cpu")
    none = ratio(*names, 1.0, LatencyVerdict.NO_DIFFERENCE)
    noisy = replace(comparison, ratios=(none,), noise=(noise(names[1], floor),))
    assert answer_lines(noisy) == (said,)
    more = replace(noisy, ratios=(replace(none, only_sparsity=False),))
    reason = "too noisy to tell" if floor > 0.1 else "no difference"
    assert answer_lines(more)[0].startswith(f"{reason}: {names[0]} and {names[1]}; noise")


def test_a_sweep_says_which_batches_are_too_noisy_and_which_have_no_noise() -> None:
    made = sweep()
    none = [replace(r, verdict=LatencyVerdict.NO_DIFFERENCE) for r in made.ratios]
    noisy = replace(made, ratios=tuple(none), noise=(noise(made.baseline, 0.3, batch=8),))
    assert answer_lines(noisy)[0] == (
        "sparse against dense in tensorrt:fp16: no difference at batch 1, too noisy to tell at "
        "batch 8, no difference at batch 32; noise 30.0 %, not measured for all"
    )
    bare = replace(made, noise=made.noise[1:])
    told = replace(made.ratios[0], verdict=LatencyVerdict.FASTER)
    assert (
        "tensorrt:fp16: time ratio 1.000 (0.980 to 1.020) at batch 1, 1.087x faster"
        in (answer_lines(replace(bare, ratios=(told, *made.ratios[1:])))[0])
    )


def test_where_only_engines_differ_the_fastest_is_the_answer() -> None:
    assert answer_lines(many())[0] == (
        "fastest of 18 variants: sparse@torch:semi-structured-cusparselt-variant-00, "
        "2.38x faster than dense@onnxruntime:cpu (2.33 to 2.43); noise 3.0 %"
    )
    slow = many()
    slow = replace(slow, ratios=slow.ratios[8:])
    assert answer_lines(slow) == (
        "none of 9 variants was seen to be faster than dense@onnxruntime:cpu; noise 3.0 %",
    )


def test_the_fastest_is_one_that_is_seen_to_be_faster() -> None:
    made = many()
    lowest, second = made.ratios[:2]
    unclear = replace(lowest, verdict=LatencyVerdict.NO_DIFFERENCE)
    assert answer_lines(replace(made, ratios=(unclear, *made.ratios[1:])))[0].startswith(
        f"fastest of 18 variants: {second.variant}, "
    )
    undecided = replace(made.ratios[9], verdict=LatencyVerdict.UNDECIDED)
    assert answer_lines(replace(made, ratios=(*made.ratios[10:], undecided))) == (
        "too few rounds to tell whether any of 8 variants is faster than dense@onnxruntime:cpu; "
        "noise 3.0 %",
    )
    assert answer_lines(replace(made, noise=()))[0] == (
        f"lowest of 18 variants: {lowest.variant}, time / time of dense@onnxruntime:cpu is 0.420 "
        "(0.412 to 0.428); noise not measured"
    )


def test_too_few_rounds_and_nothing_measured_are_said() -> None:
    pair = files()
    undecided = ratio(
        "b@onnxruntime:cpu", "a@onnxruntime:cpu", 1.1, verdict=LatencyVerdict.UNDECIDED
    )
    few = replace(pair, ratios=(undecided,))
    assert answer_lines(few) == (
        "too few rounds to tell b from a in onnxruntime:cpu (noise of this engine not measured)",
    )
    alone = replace(pair, ratios=(), variants=pair.variants[:1])
    assert answer_lines(alone) == ("nothing to compare: only a@onnxruntime:cpu ran",)
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
        (4.31, "4.310"),
        (999.96, "1,000"),
        (12345.6, "12,346"),
        (0.00001234, "1.23e-05"),
        (0.0, "0.000"),
        (None, None),
    ],
)
def test_figures_keep_four_digits(value: float | None, said: str | None) -> None:
    assert figure(value) == said


def test_a_variant_that_failed_is_a_row_with_its_error_and_what_to_do() -> None:
    text = " ".join(_shown(run_folder(), 160).split())
    row = (
        "sparse@torch:semi-structured-cusparselt no layer could be converted: 53 of 53 are "
        "convolutions 2:4 kernels of torch are for linear layers"
    )
    assert row in text
    assert "dense@torch-tensorrt:fp16 torch_tensorrt is not installed -" in text


def test_a_variant_that_failed_on_the_way_keeps_its_times_and_says_after_how_many_rounds() -> None:
    comparison = files()
    first, second = comparison.variants
    broke = replace(second, samples_ms=second.samples_ms[:7], error="out of memory")
    text = _shown(replace(comparison, variants=(first, broke)))
    assert "after 7 rounds: out of memory" in text
    assert _column(replace(comparison, variants=(first, broke)), "verdict") == {
        "a@onnxruntime:cpu": "baseline",
        "b@onnxruntime:cpu": "slower",
    }


def test_the_baseline_and_its_twin_are_named_and_ratios_have_their_verdicts() -> None:
    verdicts = _column(run_folder(), "verdict")
    assert verdicts["dense@tensorrt:fp16"] == "baseline"
    assert verdicts["dense@tensorrt:fp16 again"] == "baseline again"
    assert verdicts["dense@onnxruntime:cpu again"] == "again"
    assert verdicts["sparse@tensorrt:fp16"] == "faster"
    assert verdicts["dense@torch:compile"] == "undecided"
    over = _column(run_folder(), "time / baseline")
    assert over["dense@tensorrt:fp16"] is None
    assert over["sparse@tensorrt:fp16"] == "0.847"
    assert over["dense@tensorrt:fp16 again"] == "1.001"
    assert over["dense@onnxruntime:cpu again"] is None
    assert over["dense@onnxruntime:cpu"] == "14.2"


def test_the_drop_is_the_metric_of_the_baseline_minus_that_of_the_variant() -> None:
    drops = _column(run_folder(), "drop of accuracy")
    assert drops["sparse@tensorrt:fp16"] == "0.013"
    assert drops["dense@onnxruntime:int8"] == "0.0085"
    assert drops["dense@tensorrt:fp16"] is None
    assert drops["dense@torch:compile"] is None


def test_columns_without_a_value_are_left_out() -> None:
    heads = {column.head for made in latency_document(files()).tables for column in made.columns}
    assert "size MiB" in heads
    assert heads.isdisjoint({"GPU MiB", "max error", "cosine", "top-1", "what to do"})


def test_the_worst_output_is_shown_with_its_bound_and_what_is_not_finite() -> None:
    comparison = run_folder()
    (good,) = comparison.variants[1].agreement
    bad = replace(good, max_abs_error=0.5, cosine=0.9, bound=0.1, not_finite=3)
    empty = replace(good, cosine=float("nan"))
    two = replace(comparison.variants[1], agreement=(good, bad, empty))
    changed = replace(comparison, variants=(comparison.variants[0], two))
    assert _column(changed, "max error")[two.name] == "0.5\nbound 0.1\n3 NaN/inf"
    assert _column(changed, "cosine")[two.name] == "0.900000"


def test_layers_beyond_the_shown_ones_are_summed_up_and_the_sums_are_kept() -> None:
    (contrast,) = run_folder().layers
    rows = layer_table(contrast).rows
    assert len(rows) == 16
    assert rows[-1][0] == "26 more layers"
    shares = [float((row[-1] or "").removesuffix(" %")) for row in rows]
    assert sum(shares) == pytest.approx(100, abs=1)
    differences = [float(row[-2] or "") for row in rows]
    assert sum(differences) == pytest.approx(contrast.variant_ms - contrast.baseline_ms, abs=0.002)


def test_a_layer_of_one_side_only_says_so() -> None:
    (contrast,) = run_folder().layers
    alone = [row for row in contrast.rows if row.baseline_ms is None]
    gone = replace(
        alone[0], layer="", baseline_layer="old", variant_ms=None, baseline_ms=0.4, share=None
    )
    names = [row[0] for row in layer_table(replace(contrast, rows=(*alone, gone))).rows]
    assert names == [
        "Reformatting CopyNode for Input Tensor 0\nnot in the baseline",
        "old\nonly in the baseline",
    ]


def test_pairs_that_differ_alike_share_a_warning() -> None:
    (line,) = difference_lines(run_folder())
    assert line == (
        "more than sparsity differs in dense@onnxruntime:cpu, sparse@onnxruntime:cpu, "
        "dense@onnxruntime:int8, dense@torch:compile: another engine"
    )
    assert difference_lines(files()) == ()


def test_noise_says_which_ratios_cannot_be_told_from_it() -> None:
    assert noise_lines(run_folder()) == (
        "noise 0.8 %: dense@tensorrt:fp16 opened and measured twice gives 1.001 (0.992 to 1.004); "
        "a ratio of 0.992 to 1.008 cannot be told from it",
        "noise 2.1 %: dense@onnxruntime:cpu opened and measured twice gives 1.001 (0.979 to 1.004);"
        " a ratio of 0.979 to 1.021 cannot be told from it",
    )
    assert legend(run_folder()).endswith("cannot be told from one variant measured twice")
    assert legend(files()).endswith('"no difference" has an interval with 1 in it')


def test_clocks_are_said_once_where_they_stayed_and_twice_where_they_moved() -> None:
    clocks = next(line for line in machine_lines(run_folder()) if line.startswith("clocks"))
    assert clocks == (
        "clocks: CPU 2,900 then 2,400 MHz, governor performance, GPU 1,980 then 1,755 MHz, "
        "GPU memory 3,201 MHz, GPU temperature 41 then 64 °C, load average 0.31 then 2.02"
    )
    assert "WARNING: the GPU was held down at the end: power" in machine_lines(run_folder())


def test_what_the_machine_does_not_say_is_left_out() -> None:
    bare: Machine = replace(machine(), memory_bytes=None, packages=(), start=Clocks(), end=None)
    lines = machine_lines(replace(files(), machine=bare))
    assert lines == (
        "Intel Xeon Platinum 8481C, 2 cores · Linux 6.8 x86_64",
        "Python 3.11.9",
        "50 rounds in random order after 5 untimed runs of each variant, seed 0",
    )


def test_samples_that_were_not_taken_in_rounds_are_not_called_rounds() -> None:
    comparison = files()
    apart = replace(comparison, ratios=tuple(replace(r, paired=False) for r in comparison.ratios))
    assert machine_lines(apart)[-1] == (
        "50 runs of each variant, one variant after the other: what drifted in between is in the "
        "ratios and not in their intervals"
    )


def test_the_legend_says_what_the_ratio_is_of() -> None:
    comparison = files()
    apart = replace(comparison, ratios=tuple(replace(r, paired=False) for r in comparison.ratios))
    assert legend(comparison).startswith(
        "time / baseline is the middle of the ratios within each round, which need not equal the "
        "ratio of the medians: below 1 is faster"
    )
    assert legend(apart).startswith("time / baseline is the ratio of the medians: below 1 is")


def test_what_trtexec_timed_has_the_machine_of_its_settings_and_passes_in_rotation() -> None:
    comparison = by_trtexec()
    assert machine_lines(comparison) == (
        "measured elsewhere: trtexec of TensorRT 10.14.1 on NVIDIA H200",
        "20 rounds, order rotated; one sample is the median of a pass",
    )
    runs = replace(comparison, ratios=(), options=replace(comparison.options, rounds=1))
    assert machine_lines(runs)[1].startswith("20 runs of each variant, one variant after the other")
    unknown = tuple(replace(v, settings=None) for v in files().variants)
    assert machine_lines(replace(files(), variants=unknown))[0] == (
        "measured elsewhere: machine not known"
    )


def test_the_99th_percentile_of_few_runs_is_explained_once() -> None:
    said = "p99 of fewer than 100 runs is close to the slowest"
    assert _shown(sweep()).count(said) == 1
    assert [made.legend for made in _times(sweep())] == [said, None, None]
    many_runs = tuple(replace(v, samples_ms=v.samples_ms * 2) for v in files().variants)
    for comparison in (replace(files(), variants=many_runs), by_trtexec()):
        assert [made.legend for made in _times(comparison)] == [None]


def test_without_shares_of_layers_there_is_no_column_of_them_but_a_reason() -> None:
    (contrast,) = run_folder().layers
    assert layer_table(contrast).columns[-1].head == "share"
    bare = replace(contrast, rows=tuple(replace(row, share=None) for row in contrast.rows))
    made = layer_table(bare)
    assert [column.head for column in made.columns[-2:]] == ["ratio", "difference ms"]
    assert made.legend == (
        "no share: no difference end to end, or sums that differ by less than 2 %; "
        "profiling makes layers slower"
    )


def test_no_name_reaches_the_terminal_as_markup_or_control() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(comparison_text(hostile()))
    styled = re.sub(r"\x1b\[[\d;]*m", "", capture.get())
    assert "\x1b" not in styled
    together = re.sub(r"\s", "", styled)
    for name in HOSTILE:
        assert re.sub(r"\s", "", printable(name)) in together


def test_another_version_is_told_where_the_engine_is_the_same() -> None:
    comparison = files()
    newer = Difference(setting="version", variant="1.24", baseline="1.23")
    kernels = Difference(setting="sparse_kernels", variant="allowed", baseline="not allowed")
    engine = Difference(setting="engine", variant="torch", baseline="onnxruntime")
    said: list[str] = []
    for differences in ((newer, kernels), (engine, newer)):
        other = replace(comparison.ratios[0], differences=differences, only_sparsity=False)
        said += difference_lines(replace(comparison, ratios=(other,)))
    assert said == [
        "more than sparsity differs in b@onnxruntime:cpu: version 1.24 instead of 1.23",
        "more than sparsity differs in b@onnxruntime:cpu: another engine",
    ]


def test_milliseconds_of_layers_have_as_many_decimals_as_their_sum_asks_for() -> None:
    (contrast,) = run_folder().layers
    row = replace(contrast.rows[0], variant_ms=0.0123, difference_ms=-0.00004, share=-0.0001)
    for total, variant_ms, difference in (
        (4.88, "0.0123", "0.0000"),
        (0.205, "0.01230", "-0.00004"),
        (31234.0, "0.0", "0.0"),
    ):
        made = layer_table(replace(contrast, variant_ms=1e-9, baseline_ms=total, rows=(row,)))
        ((_, ours, _, _, changed, share),) = made.rows
        assert (ours, changed, share) == (variant_ms, difference, "0.0 %")


def test_a_machine_that_was_busy_before_is_warned_of_where_the_rounds_do_not_tell() -> None:
    comparison = run_folder()
    assert comparison.machine is not None
    start = replace(comparison.machine.start, load_average=1.25)
    busy = replace(comparison, machine=replace(comparison.machine, start=start, cores=2))
    warning = "WARNING: other processes were running: load average 1.25 at the start, on 2 cores"
    assert answer_lines(busy)[0].startswith(f"{warning}. ")
    quiet = RoundLoad(other_cores=0.02, cores=2)
    assert comparison.machine.start.load_average is not None
    for other in (comparison, replace(busy, loads=(quiet,))):
        assert "other processes" not in answer_lines(other)[0]

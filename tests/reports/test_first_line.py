"""The first line of a run's report: accuracy lost and speed won, as far as they are known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support import comparison_cases as cases
from support.render_cases import every_status
from support.report_cases import matmul, prune_result, pruned_row

from twofour.records.export import Accuracy, Metric, OutputAgreement
from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.records.weights import PruneResult
from twofour.reports.document import Lack
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.eligibility_words import (
    FirstLine,
    accuracy_and_speed,
    change_words,
    drift_lines,
)
from twofour.reports.latency_words import kernels_off_lines
from twofour.reports.text import markdown

ACCURACY = Accuracy(
    drift=(cases.agreement(0.01, 0.93),),
    examples=8,
    metrics=(Metric(name="accuracy", dense=0.98, sparse=0.9702),),
)
DENSE, SPARSE = "dense@tensorrt:gpu", "sparse@tensorrt:gpu"


def comparison(value: float, verdict: LatencyVerdict | None = None) -> LatencyComparison:
    variants = [cases.variant(DENSE, 10), cases.variant(SPARSE, 10 * value)]
    kernels = {
        v.name: replace(v.settings, sparse_kernels=v.name == SPARSE) for v in variants if v.settings
    }
    return replace(
        cases.run_folder(),
        baseline=DENSE,
        variants=tuple(replace(v, settings=kernels[v.name]) for v in variants),
        ratios=(cases.ratio(SPARSE, DENSE, value, verdict),),
        noise=(cases.noise(DENSE, 0.02),),
    )


def answer(
    accuracy: Accuracy, times: LatencyComparison | None, pruned: PruneResult | None = None
) -> FirstLine:
    line = accuracy_and_speed(accuracy, times, pruned)
    assert line is not None
    return line


def line_of(accuracy: Accuracy, times: LatencyComparison | None) -> str:
    return answer(accuracy, times).text


def test_what_kernels_gain_alone_is_no_gain_over_dense_and_its_baseline_is_explained() -> None:
    off = "sparse@tensorrt:gpu-sparsity-off"
    times = comparison(0.8)
    (ratio,) = times.ratios
    renamed = tuple(replace(v, name=v.name.replace(DENSE, off)) for v in times.variants)
    kernels = replace(
        times, baseline=off, variants=renamed, ratios=(replace(ratio, baseline=off),), noise=()
    )
    assert "1.25x" in line_of(ACCURACY, times)
    assert "1.25x" not in line_of(ACCURACY, kernels)
    assert off in "".join(kernels_off_lines(kernels))
    assert not list(kernels_off_lines(times))


LOST = "Accuracy: 0.9800 → 0.9702 (−0.98 points)."


@pytest.mark.parametrize(
    ("value", "verdict", "line"),
    [
        (
            0.8,
            None,
            f"Worth shipping: yes, if this accuracy is enough. {LOST} "
            "Speed: 1.25x faster than dense (1.23 to 1.28).",
        ),
        (
            0.99,
            LatencyVerdict.NO_DIFFERENCE,
            f"Not worth shipping: no speed gained (no difference). {LOST}",
        ),
        (1.25, None, f"Not worth shipping: 1.25x slower than dense (1.23 to 1.27). {LOST}"),
        (
            0.8,
            LatencyVerdict.UNDECIDED,
            "Worth shipping: not known, because the speed is not known (too few rounds to "
            f"compare). {LOST}",
        ),
    ],
)
def test_nothing_won_is_not_worth_anything_lost(
    value: float, verdict: LatencyVerdict | None, line: str
) -> None:
    assert line_of(ACCURACY, comparison(value, verdict)) == line


def test_what_is_not_known_of_speed_or_accuracy_is_said() -> None:
    times = comparison(0.99, LatencyVerdict.NO_DIFFERENCE)
    noisy = line_of(ACCURACY, replace(times, noise=(cases.noise(DENSE, 0.3),)))
    without_kernels = line_of(ACCURACY, cases.run_folder())
    came_sparse = line_of(replace(ACCURACY, no_baseline="its weights came in 2:4"), None)
    for line in (noisy, without_kernels, came_sparse):
        assert line.startswith("Worth shipping: not known")
    assert noisy.endswith(f"hides any difference). {LOST}")
    assert without_kernels.endswith(f"ran here. {LOST}")
    assert "no dense model" in came_sparse


def test_it_is_the_first_line_of_the_page() -> None:
    document = eligibility_document(every_status(), accuracy=ACCURACY, comparison=comparison(0.8))
    assert markdown(document).splitlines()[2].startswith("**Worth shipping: yes")
    assert accuracy_and_speed(None, comparison(0.8)) is None


def output(name: str, error: float | None, *, largest: float = 1.0) -> OutputAgreement:
    """One whose direction is hardly changed."""
    row = cases.agreement(0.01, 0.9999)
    return replace(row, output=name, relative_error=error, dense_largest=largest)


def test_without_a_metric_the_relative_error_of_the_worst_output_is_said_and_on_what() -> None:
    drift = (output("logits", 0.12), output("boxes", 0.3), output("aux", 9.0, largest=1e-6))
    accuracy = replace(ACCURACY, metrics=(), drift=drift, inputs_are="random inputs")
    line = line_of(accuracy, comparison(0.8))
    assert line.startswith("Worth shipping: yes")
    assert "Accuracy: output boxes" in line
    assert "0.300 (cosine 1.000)" in line
    assert "on random inputs" in line
    assert "left out: aux)" in line


@pytest.mark.parametrize("shape", [(8, 10), (8, 1), (8,), (1, 1), ()])
def test_single_values_have_no_cosine_of_their_own(shape: tuple[int, ...]) -> None:
    """Each example's cosine is 1 or -1 where it has one value: that of all is shown, if any."""
    made = replace(output("y", 48.1), shape=shape, cosine=0.22)
    accuracy = replace(
        ACCURACY, metrics=(), drift=(replace(made, row_cosine_mean=0.93, row_cosine_min=0.93),)
    )
    line = line_of(accuracy, None)
    (drift,) = drift_lines(accuracy)
    has_cosine = math.prod(shape) > 1
    assert ("(cosine 0.220)" in line) == has_cosine
    assert ("cosine to the dense output 0.220000" in drift) == has_cosine
    assert ("per example" in drift) == (shape == (8, 10))


def test_held_out_samples_decide_where_there_are_some() -> None:
    drift, held_out = (output("y", 0.58),), (output("y", 0.31),)
    are = "20 built-in example sentences"
    accuracy = replace(ACCURACY, metrics=(), drift=drift, inputs_are=are)
    line = line_of(accuracy, None)
    assert line.startswith("Not worth shipping")
    assert f"0.580 (cosine 1.000) on {are} (no metric)" in line
    line = line_of(replace(accuracy, held_out=held_out), None)
    assert "0.310 (cosine 1.000)" in line
    assert "held-out calibration samples" in line
    assert line.startswith("Worth shipping: not known")


@pytest.mark.parametrize(("error", "far"), [(0.39, False), (0.43, True), (math.inf, True)])
def test_outputs_of_another_scale_are_not_worth_shipping(error: float, *, far: bool) -> None:
    accuracy = replace(ACCURACY, metrics=(), drift=(output("boxes", error),))
    assert answer(accuracy, comparison(0.5)).lacks is (Lack.ACCURACY if far else None)


@pytest.mark.parametrize(("sparse", "lacks"), [(11.5, Lack.ACCURACY), (10.9, None), (5.0, None)])
def test_a_loss_that_rises_by_more_than_a_tenth_is_not_worth_shipping(
    sparse: float, lacks: Lack | None
) -> None:
    loss = Metric(name="perplexity", dense=10.0, sparse=sparse, lower_is_better=True)
    assert answer(replace(ACCURACY, metrics=(loss,)), comparison(0.5)).lacks is lacks


def test_outputs_near_zero_say_nothing_of_accuracy() -> None:
    accuracy = replace(ACCURACY, metrics=(), drift=(output("aux", 5.0, largest=1e-6),))
    assert "no output could be" in line_of(accuracy, comparison(0.8))


@pytest.mark.parametrize(
    ("dense", "sparse", "words"),
    [
        (0.9867, 0.9889, "0.9867 → 0.9889 (+0.22 points)"),
        (99.4, 62.4, "99.40 → 62.40 (−37.0 points)"),
        (512.0, 500.0, "512.0 → 500.0 (−12.0)"),
        (0.5, 0.5, "0.5000 → 0.5000 (+0 points)"),
    ],
)
def test_points_are_of_a_hundred(dense: float, sparse: float, words: str) -> None:
    assert change_words(Metric(name="m", dense=dense, sparse=sparse)) == words


@pytest.mark.parametrize("sparse", [62.4, float("nan")])
def test_a_collapsed_model_is_not_worth_shipping_however_fast(sparse: float) -> None:
    metric = Metric(name="accuracy", dense=99.4, sparse=sparse)
    accuracy = replace(ACCURACY, metrics=(metric,))
    lost = f"Not worth shipping as it is: accuracy {change_words(metric)}"
    line = answer(accuracy, comparison(0.5), prune_result(pruned_row(matmul("fc", 64, 64))))
    assert line.lacks is Lack.ACCURACY
    assert line.text.startswith(lost)
    assert line.text.endswith("Try --calibrate DATA.")
    with_data = line_of(accuracy, comparison(0.5))
    assert with_data.startswith(f"{lost}. Try more calibration")
    assert "`twofour finetune`" in with_data


@pytest.mark.parametrize(
    ("rounded", "errors", "advice"),
    [
        (0.1016, (0.2, 0.9, 0.91), "Most of it is lost by rounding alone. Try more cal"),
        (0.9, (0.9, 0.2, 0.91), "Try more calibration samples or `twofour"),
    ],
)
def test_a_rounded_run_is_judged_from_the_float_dense_model(
    rounded: float, errors: tuple[float, ...], advice: str
) -> None:
    metric = Metric(name="agree", dense=rounded, sparse=0.035, unquantized=1.0)
    drift, rounding, whole = ((output("logits", error),) for error in errors)
    made = replace(ACCURACY, drift=drift, rounding=rounding, pruned_and_rounded=whole)
    start, figure = "Not worth shipping as it is: ", "agree 1.000 → 0.03500 (−96.5 points)"
    line = line_of(replace(made, metrics=(metric,)), None)
    assert line.startswith(f"{start}{figure}. {advice}")
    line = line_of(replace(made, metrics=()), None)
    assert line.startswith(f"{start}output logits")
    assert "0.910 (cosine 1.000)" in line
    assert f". {advice}" in line


@pytest.mark.parametrize(("dense", "whose"), [(40, "dense"), (0, "pruned")])
def test_outputs_without_a_finite_value_are_a_broken_model(dense: int, whose: str) -> None:
    nan = replace(
        cases.agreement(float("inf"), float("nan")),
        shape=(4, 10),
        not_finite=40,
        dense_not_finite=dense,
    )
    line = line_of(replace(ACCURACY, drift=(nan,)), comparison(0.5))
    assert line.startswith(f"Not worth shipping: the {whose} model is broken")
    assert "output logits" in line

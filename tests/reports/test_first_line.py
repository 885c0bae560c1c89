"""The first line of a run's report: accuracy lost and speed won, as far as they are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import comparison_cases as cases
from support.render_cases import every_status
from support.report_cases import matmul

from twofour.records.export import Accuracy, Metric
from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.records.weights import HARDWARE_PATTERN, PrunedWeight, PruneResult, Selection
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.eligibility_words import accuracy_and_speed
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


def line_of(accuracy: Accuracy, times: LatencyComparison | None) -> str:
    line = accuracy_and_speed(accuracy, times)
    assert line is not None
    return line


@pytest.mark.parametrize(
    ("value", "verdict", "line"),
    [
        (
            0.8,
            None,
            "Accuracy: 0.9800 → 0.9702 (-0.0098). Speed: 1.25x faster than dense (1.23 to 1.28).",
        ),
        (
            0.99,
            LatencyVerdict.NO_DIFFERENCE,
            "Not worth shipping: no speed won (no difference). "
            "Accuracy: 0.9800 → 0.9702 (-0.0098).",
        ),
        (
            1.25,
            None,
            "Not worth shipping: 1.25x slower than dense (1.23 to 1.27). "
            "Accuracy: 0.9800 → 0.9702 (-0.0098).",
        ),
        (
            0.8,
            LatencyVerdict.UNDECIDED,
            "Accuracy: 0.9800 → 0.9702 (-0.0098). Speed: not known, too few rounds to compare.",
        ),
    ],
)
def test_nothing_won_is_not_worth_anything_lost(
    value: float, verdict: LatencyVerdict | None, line: str
) -> None:
    assert line_of(ACCURACY, comparison(value, verdict)) == line


def test_an_engine_without_sparse_kernels_says_nothing_of_speed() -> None:
    assert line_of(ACCURACY, cases.run_folder()) == (
        "Accuracy: 0.9800 → 0.9702 (-0.0098). "
        "Speed: not known, no engine with sparse kernels ran here."
    )


def test_a_model_that_came_sparse_has_no_accuracy_to_lose() -> None:
    line = line_of(replace(ACCURACY, no_baseline="its weights came in 2:4"), None)
    assert line.startswith("Accuracy: not known, there is no dense model to compare with. Speed: ")


def test_it_is_the_first_line_of_the_page() -> None:
    document = eligibility_document(every_status(), accuracy=ACCURACY, comparison=comparison(0.8))
    assert markdown(document).splitlines()[2].startswith("**Accuracy: 0.9800 → 0.9702")
    assert accuracy_and_speed(None, comparison(0.8)) is None


def test_without_a_metric_the_cosine_of_the_outputs_is_said() -> None:
    assert line_of(replace(ACCURACY, metrics=()), comparison(0.8)).startswith(
        "Accuracy: output logits keeps a cosine of 0.930 to dense (no metric given). Speed: 1.25x"
    )


def test_weights_pruned_without_data_say_what_to_try() -> None:
    weight = PrunedWeight(
        weight=matmul("fc", 64, 64), pruned=True, zeros=2048, kept_magnitude=0.8, reasons=()
    )
    magnitude = PruneResult(
        source="m",
        pattern=HARDWARE_PATTERN,
        method="magnitude",
        selection=Selection(),
        weights=(weight,),
    )
    line = accuracy_and_speed(ACCURACY, None, magnitude)
    assert line is not None
    assert "(-0.0098). Pruned by magnitude without data: try `--calibrate DATA`. Speed" in line

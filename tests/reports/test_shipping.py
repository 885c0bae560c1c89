"""The first line of a run's report: score lost and speed won, as far as they are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import comparison_cases as cases
from support.render_cases import every_status

from twofour.records.export import Accuracy, Metric
from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.eligibility_words import shipping_line
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


def test_score_and_speed_stand_beside_each_other() -> None:
    assert shipping_line(ACCURACY, comparison(0.8)) == (
        "worth shipping: accuracy 0.9800 dense, 0.9702 sparse (-1.0 %); "
        "1.25x faster than dense (1.23 to 1.28)"
    )


@pytest.mark.parametrize(
    ("value", "verdict", "begins", "ends"),
    [
        (
            0.99,
            LatencyVerdict.NO_DIFFERENCE,
            "worth shipping: no: ",
            "no speed won (no difference)",
        ),
        (1.25, None, "worth shipping: no: ", "1.25x slower than dense (1.23 to 1.27)"),
        (
            0.8,
            LatencyVerdict.UNDECIDED,
            "worth shipping: not known yet: ",
            "speed won: too few rounds to tell",
        ),
    ],
)
def test_nothing_won_is_not_worth_anything_lost(
    value: float, verdict: LatencyVerdict | None, begins: str, ends: str
) -> None:
    line = shipping_line(ACCURACY, comparison(value, verdict))
    assert line is not None
    assert line.startswith(begins)
    assert line.endswith(ends)


def test_an_engine_without_sparse_kernels_tells_nothing_of_speed() -> None:
    line = shipping_line(ACCURACY, cases.run_folder())
    assert line is not None
    assert line.startswith("worth shipping: not known yet: accuracy 0.9800 dense")
    assert "once TensorRT has built it on your GPU" in line


def test_a_model_that_came_sparse_has_no_score_to_lose() -> None:
    line = shipping_line(replace(ACCURACY, no_baseline="its weights came in 2:4"), None)
    assert line is not None
    assert "score lost is not known" in line


def test_it_is_the_first_line_of_the_page() -> None:
    document = eligibility_document(every_status(), accuracy=ACCURACY, comparison=comparison(0.8))
    first = markdown(document).splitlines()[2]
    assert first.startswith("**worth shipping: accuracy 0.9800 dense")
    assert shipping_line(None, comparison(0.8)) is None


def test_without_a_metric_the_cosine_of_the_outputs_is_said() -> None:
    line = shipping_line(replace(ACCURACY, metrics=()), comparison(0.8))
    assert line is not None
    assert "output logits keeps a cosine of 0.930 to the dense one (no metric)" in line

"""The first line of a run's report: whether the sparse model is worth shipping.

Score lost and speed won, both as measured. No threshold is ours to set: "no" is said only where
nothing is won, or where a loss is bought for nothing; everything else is told in figures.
"""

from __future__ import annotations

from collections.abc import Iterator

from twofour.records.export import Accuracy, Metric
from twofour.records.latency import LatencyComparison, LatencyRatio, LatencyVerdict
from twofour.records.pruning import Repair
from twofour.reports.latency_words import why_no_difference
from twofour.words import figure, printable, speed_up

_METRICS_SHOWN = 3
UNKNOWN, NO, JUDGE = "worth shipping: not known yet", "worth shipping: no", "worth shipping"
_NEEDS_ENGINE = (
    "speed won is known once TensorRT has built it on your GPU (no engine that ran here has "
    "sparse kernels)"
)


def shipping_line(
    accuracy: Accuracy | None, times: LatencyComparison | None, repair: Repair | None = None
) -> str | None:
    """Score lost and speed won in one sentence; None for a report that has neither."""
    if accuracy is None:
        return None
    score = _score(accuracy, repair)
    ratio = None if times is None else _sparse_over_dense(times)
    if times is None or ratio is None:
        return f"{UNKNOWN}: {score}; {_NEEDS_ENGINE}"
    why_not = why_no_difference(times, ratio)
    if ratio.verdict is LatencyVerdict.FASTER:
        return f"{JUDGE}: {score}; {speed_up(ratio, ' than dense')}"
    if ratio.verdict is LatencyVerdict.SLOWER:
        return f"{NO}: {score}; {speed_up(ratio, ' than dense')}"
    if ratio.verdict is LatencyVerdict.NO_DIFFERENCE:
        return f"{NO}: {score}; no speed won ({why_not})"
    return f"{UNKNOWN}: {score}; speed won: {why_not}"


def _sparse_over_dense(times: LatencyComparison) -> LatencyRatio | None:
    """The first of two weights that differ in sparsity alone, in an engine with sparse kernels."""
    sparse = {
        v.name for v in times.variants if v.settings is not None and v.settings.sparse_kernels
    }
    found = (r for r in times.ratios if r.variant in sparse and r.only_sparsity)
    return next((r for r in found if r.baseline not in sparse), None)


def _score(accuracy: Accuracy, repair: Repair | None) -> str:
    """What pruning cost by the user's metrics, else by the outputs."""
    if accuracy.no_baseline is not None:
        return "score lost is not known (there is no dense model to compare with)"
    if accuracy.metrics:
        shown = accuracy.metrics[:_METRICS_SHOWN]
        more = len(accuracy.metrics) - len(shown)
        words = ", ".join(
            f"{printable(m.name)} {figure(m.dense)} dense, {_pruned_figures(m)}"
            f"{_relative(m.dense, m.sparse)}"
            for m in shown
        )
        return f"{words}{f', and {more} more' if more else ''}"
    lowest = min(_cosines(accuracy), default=None)
    if lowest is None:
        why = accuracy.not_compared
        return f"score lost is not known{'' if why is None else f' ({printable(why)})'}"
    cosine, output = lowest
    kept = f"output {printable(output)} keeps a cosine of {cosine:.3f} to the dense one"
    lost = _error_words(repair)
    return f"{kept} (no metric)" if lost is None else f"{lost} (no metric; {kept})"


def _pruned_figures(metric: Metric) -> str:
    if metric.one_shot is None:
        return f"{figure(metric.sparse)} sparse"
    return f"{figure(metric.one_shot)} one-shot, {figure(metric.sparse)} repaired"


def _error_words(repair: Repair | None) -> str | None:
    """The held-out score of the outputs, by which a repair was judged.

    It comes before the cosine, which is near 1 for any weights where all outputs are much alike.
    """
    if repair is None or repair.error_before is None:
        return None
    before = (
        "of what tells held-out samples apart in the outputs, pruning loses "
        f"{figure(repair.error_before)}"
    )
    if repair.taken is None or repair.error_after is None:
        return before
    return f"{before} one-shot, {figure(repair.error_after)} repaired"


def _relative(dense: float, sparse: float) -> str:
    """The change as a part of the dense figure, where that says something."""
    return f" ({100 * (sparse - dense) / abs(dense):+.1f} %)" if dense else ""


def _cosines(accuracy: Accuracy) -> Iterator[tuple[float, str]]:
    for output in accuracy.drift:
        if output.equal is None and output.row_cosine_mean == output.row_cosine_mean:
            yield output.row_cosine_mean, output.output

"""Words of the eligibility report: its few lines for a hurry, and the cells of one verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan

from twofour.eligibility.predict import count_weights, not_covered_lines, uses_of
from twofour.eligibility.reasons import headline_changes, headlines, obstacles
from twofour.eligibility.rules import holds_trivially
from twofour.eligibility.totals import (
    LayerStatus,
    by_status,
    counted_once,
    status_of,
    weights_by_status,
)
from twofour.records.eligibility import (
    EligibilityReport,
    EligibilitySummary,
    EligibilityTotals,
    Evidence,
    Share,
    ShareUnit,
    Verdict,
    VerdictName,
)
from twofour.records.export import Accuracy, Metric, OutputAgreement
from twofour.records.forecast import ForecastCell
from twofour.records.latency import LatencyComparison, LatencyRatio, LatencyVerdict
from twofour.records.weights import HARDWARE_PATTERN, PruneResult, ReasonCode
from twofour.reports.document import Lack
from twofour.reports.latency_words import TOO_NOISY, why_no_difference
from twofour.words import (
    axis_name,
    count,
    figure,
    listed,
    name_cell,
    printable,
    share,
    speed_up,
    tactic_times_words,
    times,
)

_CHANGES_SHOWN = 3
_HELD_OUT = "held-out calibration samples"
_WARNING = "WARNING"
_WORTH_CHANGING = 0.01
"""Share of the weights below which a change is not proposed up here; its row has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """How many layers share one status, and the main reasons for it."""

    status: LayerStatus
    layers: str
    weights: str
    codes: str


def totals(report: EligibilityReport) -> tuple[Total, ...]:
    """Each layer is counted once, under its main reason; a total of no possible layer is shown too.

    An array that several layers share counts once, with the best that becomes of it. Factors of
    matrix products that no row names come last.
    """
    weights, found = weights_by_status(report.verdicts), by_status(report.verdicts)
    rows = [
        (status, count(len(layers), "layer"), weights[status], _codes(layers))
        for status, layers in found.items()
        if layers or (status is LayerStatus.CAN and not found[LayerStatus.RUNS])
    ]
    if factors := [group for group in report.not_covered if group.multiplies]:
        nodes = count(sum(group.uses for group in factors), "node")
        number = report.summary.weights_not_covered
        rows.append((LayerStatus.UNCOVERED, nodes, number, uses_of(factors)))
    return tuple(
        Total(status=status, layers=layers, weights=_weights(number, report.summary), codes=codes)
        for status, layers, number, codes in rows
    )


def _codes(layers: Sequence[Verdict]) -> str:
    codes = Counter(sorted(r.code.value for v in layers for r in obstacles(v.reasons[:1])))
    return ", ".join(f"{code} {number}" for code, number in codes.most_common())


def title_line(report: EligibilityReport) -> str:
    """Model, pattern, engine and GPU."""
    gpu = report.gpu
    parts = [printable(report.model), f"pattern {report.pattern}", printable(report.engine)]
    if gpu is not None:
        major, minor = gpu.compute_capability
        parts.append(f"{printable(gpu.name)} (compute capability {major}.{minor})")
    elif "compute capability" not in report.engine:  # as a log names the GPU of its build
        parts.append("GPU not known")
    return " · ".join(parts)


def advice_lines(report: EligibilityReport) -> tuple[str, ...]:
    """Warnings, what to change first by the weights it concerns, what the report leaves out."""
    beside = not_covered_lines(report.not_covered)
    lines = (*_changes(report), *beside, *evidence_lines(report), *_footnotes(report))
    if report.not_evidence is not None:
        said = printable(report.not_evidence)
        lines = (f"{_WARNING}: {said}", *(line for line in lines if line != said))
    return tuple(sorted(lines, key=lambda line: not line.startswith(_WARNING)))


def stale_lines(stale: Sequence[str]) -> tuple[str, ...]:
    """A line for each file that changed since the report was made."""
    return tuple(f"STALE: {printable(line)}" for line in stale)


def drift_lines(accuracy: Accuracy) -> tuple[str, ...]:
    """What pruning did to the outputs, and to the user's own metrics where there are any."""
    if accuracy.no_baseline is not None:
        figures = [f"{printable(m.name)}: {m.sparse:.4g}" for m in accuracy.metrics]
        return (printable(accuracy.no_baseline), *figures)
    on = accuracy.inputs_are or "the example inputs"
    drift = [_drift_line(output, on) for output in accuracy.drift]
    held_out = [_drift_line(output, _HELD_OUT) for output in accuracy.held_out]
    metrics = [f"{printable(m.name)}: {change_words(m)}" for m in accuracy.metrics]
    if accuracy.rounding:
        rounded = [_drift_line(output, on) for output in accuracy.rounding]
        rounded += [
            f"{printable(m.name)}: "
            f"{change_words(Metric(name=m.name, dense=m.unquantized, sparse=m.dense))}"
            for m in accuracy.metrics
            if m.unquantized is not None
        ]
        drift = [f"pruning alone, both models rounded: {line}" for line in (*drift, *metrics)]
        held_out = [f"pruning and rounding: {line}" for line in held_out]
        metrics = [f"rounding alone, dense model before and after: {line}" for line in rounded]
    why_not = accuracy.not_compared
    missing = [] if why_not is None else [f"outputs not compared: {printable(why_not)}"]
    how = accuracy.by_module
    missing += [] if how is None else [f"outputs of the module in float32: {printable(how)}"]
    return (*held_out, *drift, *metrics, *missing)


def _drift_line(output: OutputAgreement, measured_on: str) -> str:
    line = f"output {printable(output.output)} [{times(output.shape)}]: "
    if output.equal is not None:
        line += f"{output.equal:.2%} of the values are the same, dense and sparse"
    elif isnan(output.cosine):
        line += "no finite value to compare"
    else:
        error = "" if output.judged is None else f"relative error {output.judged:.4f}, "
        error = "near zero in the dense model, " if output.is_near_zero else error
        line += (
            f"{error}cosine to the dense output {output.cosine:.6f} (1 is the same; per example: "
            f"mean {output.row_cosine_mean:.6f}, lowest {output.row_cosine_min:.6f}), "
            f"largest difference {output.max_abs_error:.4g}"
        )
    if output.not_finite:
        line += f"; {count(output.not_finite, 'value')} NaN or infinite and left out"
    return f"{line}; measured on {printable(measured_on)}"


def _weights(part: int, of: EligibilitySummary) -> str:
    """An engine alone does not say how many weights its layers have."""
    if of.layers and not of.weights:
        return "weights not known"
    return f"{count(part, 'weight')} ({share(part, of.weights)})"


def _changes(report: EligibilityReport) -> tuple[str, ...]:
    """What the rows' own remedies ask to change, by the weights that totals count under them."""
    wanting: dict[str, list[Verdict]] = {}
    known = headlines()
    for verdict in report.verdicts:
        is_open = verdict.verdict is not VerdictName.CHOSEN and verdict.remedy is not None
        for change in headline_changes(verdict.remedy or "", known) if is_open else ():
            wanting.setdefault(change, []).append(verdict)
    of, whole = counted_once(report.verdicts), report.summary.weights
    found = [(c, layers, count_weights(filter(of, layers))) for c, layers in wanting.items()]
    worth = [item for item in found if item[2] >= _WORTH_CHANGING * whole]
    ranked = sorted(worth, key=lambda item: -item[2])
    return tuple(
        f"{'change first' if not i else f'then ({i + 1})'}: {change} "
        f"({count(len(layers), 'layer')}"
        f"{f', {share(weights, whole)} of the weights' if whole else ''})"
        for i, (change, layers, weights) in enumerate(ranked[:_CHANGES_SHOWN])
    )


def _footnotes(report: EligibilityReport) -> tuple[str, ...]:
    notes = []
    products = report.summary.activation_products
    if products:
        notes.append(
            f"neither listed nor counted: {count(products, 'product')} of two activations, "
            "which have no weight"
        )
    if report.unmatched_engine_layers:
        found = count(len(report.unmatched_engine_layers), "engine layer")
        notes.append(f"{found} not matched to a layer of the model")
    if all(v.evidence is not Evidence.MEASURED for v in report.verdicts):
        notes.append("every verdict is predicted: only TensorRT's build log says what it chose")
    shares = () if report.totals is None else report.totals.shares
    if report.forecast is None and all(of.unit is not ShareUnit.MILLISECONDS for of in shares):
        notes.append("time and possible gain are not known: `--gpu A100` forecasts the gain")
    return tuple(notes)


def evidence_lines(report: EligibilityReport) -> tuple[str, ...]:
    """What a build or a profile adds to the prediction, and the notes."""
    of_totals = () if report.totals is None else _of_totals(report.totals)
    return (*of_totals, *map(printable, report.notes))


def _of_totals(totals: EligibilityTotals) -> Iterator[str]:
    yield from (_share_line(of) for of in totals.shares if of.unit is not ShareUnit.WEIGHTS)
    for ceiling in totals.ceilings:
        yield (
            f"at most {ceiling.eligible_gain:.3f}x end to end if every eligible layer ran sparse, "
            f"{ceiling.weighted_gain:.3f}x if every layer with a weight did "
            f"({printable(ceiling.profile)}; {printable(ceiling.assumption)})"
        )
    yield from _agreement(totals)
    yield from (printable(note) for note in totals.notes)


def _share_line(of: Share) -> str:
    """Parts of the multiply-adds or of the time; the totals have those of the weights."""
    by_time = of.unit is ShareUnit.MILLISECONDS
    whole = f"the time ({of.total:.3f} ms)" if by_time else f"the {of.unit.value}"
    found = (
        (of.runs_sparse, "run sparse"),
        (of.eligible - of.doubtful, "can run sparse"),
        (of.doubtful, "are eligible but run dense or likely will"),
        (of.never, "run dense"),
        (of.unknown, "are not known"),
        (of.other, f"are {'in kernels without such a weight' if by_time else 'not in the engine'}"),
        (of.not_covered, f"are {'in kernels of weights ' if by_time else ''}not covered"),
    )
    said = (f"{share(part, of.total)} {words}" for part, words in found if part / of.total >= 5e-4)
    return f"of {whole}, {'; '.join(said)}"


def _agreement(totals: EligibilityTotals) -> Iterator[str]:
    told = [c for c in totals.confusion if c.predicted is not VerdictName.UNKNOWN]
    measured = sum(cell.layers for cell in told)
    if not measured:
        return
    cells = ", ".join(f"{c.predicted.value} -> {c.measured.value} {c.layers}" for c in told)
    yield f"predicted -> measured: {cells}"
    wrong = totals.disagreements
    other = "; probably the log is of another model" if len(wrong) == measured > 1 else ""
    yield f"the rules were wrong about {len(wrong)} of {count(measured, 'measured layer')}{other}"


# --- the first line -------------------------------------------------------------------------------

_COLLAPSED = 0.1
"""Part of a metric whose loss no speed makes good: ten times what MLPerf Inference allows (1 %)."""
_NO_SPEED = "no engine with sparse kernels ran here"
_TRY = ". Try more calibration samples"
_OR_TRAIN = " or `twofour finetune`"
_OR_FEWER = ", or --budget 0.5, which leaves layers dense"  # refused with --quantize
_ROUNDED = (
    ". Most of it is lost by rounding alone. Try more calibration samples, or leave --quantize out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLine:
    """The answer of a report."""

    text: str
    lacks: Lack | None = None
    """Why the model is not worth shipping; None: it is, or that is not known."""


def accuracy_and_speed(
    accuracy: Accuracy | None,
    times: LatencyComparison | None,
    pruned: PruneResult | None = None,
    forecast: ForecastCell | None = None,
) -> FirstLine | None:
    """The first line of a report: worth shipping or not, and the forecast if no speed is measured.

    None without a forecast and a check of accuracy. "No" is said of a broken or collapsed model,
    and where no speed is gained. Any other loss is for the user to accept.
    """
    if times is not None and _sparse_over_dense(times) is not None:
        forecast = None
    first = None if accuracy is None else _worth_shipping(accuracy, times, pruned, forecast)
    if forecast is None:
        return first
    said = f"{printable(forecast.sentence)}."
    return FirstLine(text=said) if first is None else replace(first, text=f"{first.text} {said}")


def _worth_shipping(
    accuracy: Accuracy,
    times: LatencyComparison | None,
    pruned: PruneResult | None,
    forecast: ForecastCell | None,
) -> FirstLine:
    broken = next((output for output in accuracy.drift if output.is_broken), None)
    if broken is not None:
        whose = "dense" if broken.dense_not_finite == broken.not_finite else "pruned"
        what = f"every value of its output {printable(broken.output)} is NaN or infinite"
        said = f"Not worth shipping: the {whose} model is broken, {what}."
        return FirstLine(text=said, lacks=Lack.VALUES)
    without_data = () if pruned is None or pruned.calibration is not None else pruned.weights
    newly = (row for row in without_data if row.pruned and not row.held_before)
    by_magnitude = any(row.method in {None, "magnitude"} for row in newly)
    lost = _accuracy(accuracy)
    how = ", pruned by magnitude without data. Try --calibrate DATA" if by_magnitude else ""
    if lost is not None and _has_collapsed(accuracy):
        advice = _TRY
        if pruned is None or not pruned.source.endswith(".onnx"):
            advice += _OR_TRAIN
        if not accuracy.rounding:
            advice += _OR_FEWER
        how = _ROUNDED if _is_lost_by_rounding(accuracy) else how or advice
        return FirstLine(text=f"Not worth shipping as it is: {lost}{how}.", lacks=Lack.ACCURACY)
    said = "" if lost is None else f" Accuracy: {lost.removeprefix('accuracy ')}{how}."
    ratio = None if times is None else _sparse_over_dense(times)
    why_not = None if times is None or ratio is None else why_no_difference(times, ratio)
    no_dense = "there is no dense model to compare with"
    why_unknown = no_dense if accuracy.no_baseline else "no output could be judged"
    unknown = [why_unknown] if lost is None else []
    yes = "yes, if this accuracy is enough"
    if forecast is not None and not forecast.is_worth:
        return FirstLine(text=f"Not worth shipping by the forecast.{said}", lacks=Lack.SPEED)
    if forecast is not None:
        yes = "perhaps, by the forecast, if this accuracy is enough"
    elif ratio is None:
        unknown.append(_NO_SPEED)
    elif ratio.verdict is LatencyVerdict.UNDECIDED or why_not == TOO_NOISY:
        unknown.append(f"the speed is not known ({why_not})")
    elif ratio.verdict is LatencyVerdict.FASTER:
        said += f" Speed: {speed_up(ratio, ' than dense')}."
    else:
        slower = ratio.verdict is LatencyVerdict.SLOWER
        speed = speed_up(ratio, " than dense") if slower else f"no speed gained ({why_not})"
        return FirstLine(text=f"Not worth shipping: {speed}.{said}", lacks=Lack.SPEED)
    answer = f"not known, because {' and '.join(unknown)}"
    return FirstLine(text=f"Worth shipping: {answer if unknown else yes}.{said}")


def _has_collapsed(accuracy: Accuracy) -> bool:
    """Whether a metric got too much worse, or without metrics an output moved."""
    if metrics := _metrics(accuracy):
        return any(not m.loss <= _COLLAPSED * abs(m.dense) for m in metrics)
    return any(output.is_far for output in _judged(accuracy)[0])


def _judged(accuracy: Accuracy) -> tuple[tuple[OutputAgreement, ...], str]:
    """The outputs that the verdict rests on, and what they were measured on."""
    if accuracy.held_out:
        return accuracy.held_out, _HELD_OUT
    on = accuracy.inputs_are or "the example inputs"
    return accuracy.pruned_and_rounded or accuracy.drift, on


def _metrics(accuracy: Accuracy) -> tuple[Metric, ...]:
    """The user's figures, of the dense model before --quantize and of the sparse one after."""
    known = accuracy.metrics
    return tuple(m if m.unquantized is None else replace(m, dense=m.unquantized) for m in known)


def _is_lost_by_rounding(accuracy: Accuracy) -> bool:
    """Whether --quantize alone loses more of the first figure, or output, than pruning does."""
    for m in accuracy.metrics[:1]:
        return m.unquantized is not None and m.unquantized - m.dense > m.dense - m.sparse
    pairs = zip(accuracy.rounding, accuracy.drift, strict=False)
    return any((rounded.judged or 0) > (pruned.judged or 0) for rounded, pruned in pairs)


def _sparse_over_dense(times: LatencyComparison) -> LatencyRatio | None:
    """The first of two weights that differ in sparsity alone, in an engine with sparse kernels."""
    sparse = {
        v.name for v in times.variants if v.settings is not None and v.settings.sparse_kernels
    }
    found = (r for r in times.ratios if r.variant in sparse and r.only_sparsity)
    return next((r for r in found if r.baseline not in sparse), None)


def _accuracy(accuracy: Accuracy) -> str | None:
    """What pruning, and rounding, did to the metrics, else to the outputs; None: not known."""
    if accuracy.no_baseline is not None:
        return None
    if metrics := _metrics(accuracy):
        return listed([f"{printable(m.name)} {change_words(m)}" for m in metrics])
    outputs, on = _judged(accuracy)
    known = [(output.judged, output) for output in outputs if output.judged is not None]
    if not known:
        return None
    error, worst = max(known, key=lambda pair: pair[0])
    near_zero = [printable(output.output) for output in outputs if output.is_near_zero]
    left_out = f"; near zero and left out: {listed(near_zero)}" if near_zero else ""
    return (
        f"output {printable(worst.output)} has a relative error of {error:.3f} "
        f"(cosine {worst.row_cosine_mean:.3f}) on {printable(on)} (no metric{left_out})"
    )


def change_words(metric: Metric) -> str:
    """A figure of the dense and the sparse model: "0.9800 → 0.9702 (−0.98 points)"."""
    return f"{figure(metric.dense)} → {figure(metric.sparse)} ({points(metric)})"


def points(metric: Metric) -> str:
    """How far a figure changes: "−0.98 points".

    Points are of 100: a figure from 0 to 1 counts a hundredfold; one beyond 100 has no points.
    """
    both = metric.dense, metric.sparse
    unit = 100 if all(0 <= value <= 1 for value in both) else 1
    change = unit * (metric.sparse - metric.dense)
    words = f"{change:+,.1f}" if abs(change) >= 1 else f"{change:+.2g}"
    said = words.replace("-", "\N{MINUS SIGN}")
    return f"{said} points" if max(map(abs, both)) <= 100 else said


# --- one verdict ----------------------------------------------------------------------------------

TRIVIAL = "always holds"
"""The word for a pattern that no weight of such a shape can break."""


def pattern_word(verdict: Verdict) -> str:
    """Whether the array is 2:4; "dense" where it need not be, "?" where nobody looked."""
    if verdict.pattern_holds and holds_trivially(verdict.shape, verdict.axis, HARDWARE_PATTERN):
        return TRIVIAL
    broken = "dense" if verdict.required is False else "broken"
    return {True: str(HARDWARE_PATTERN), False: broken, None: "?"}[verdict.pattern_holds]


def verdict_note(verdict: Verdict) -> str | None:
    """The verdict that the rules predicted, where the engine showed another one; or a doubt."""
    if verdict.refuted is not None:
        return f"rules said {verdict.predicted.value}"
    doubtful = status_of(verdict) is LayerStatus.DOUBTFUL
    return "likely dense" if doubtful and verdict.evidence is not Evidence.MEASURED else None


def main_reason(verdict: Verdict) -> str:
    """The main reason, behind its code if it is an obstacle; predicted: without the sizes."""
    main = verdict.reasons[0]
    if obstacles((main,)):
        return f"{main.code.value}: {printable(main.message)}"
    measured = verdict.evidence is Evidence.MEASURED
    return printable(main.message if measured else main.message.partition("; ")[0])


def other_codes(verdict: Verdict) -> str:
    """The other reasons against sparse kernels: "also PATTERN_BROKEN", or a lone doubt."""
    others = list(dict.fromkeys(r.code.value for r in obstacles(verdict.reasons[1:])))
    if others == [ReasonCode.SMALL_CHANNELS.value] and not obstacles(verdict.reasons[:1]):
        return f"may be slower than dense at this width ({others[0]})"
    return f"also {', '.join(others)}" if others else ""


def facts(verdict: Verdict) -> tuple[tuple[str, str], ...]:
    """Label and value of everything known about a layer that the table's columns do not say."""
    axis, both, how = verdict.axis, tactic_times(verdict), verdict.evidence
    return (
        *_known("node", verdict.node),
        *_known("weight", verdict.weight),
        ("stored shape", times(verdict.shape)),
        ("reduction axis", "none" if axis is None else f"{axis} ({axis_name(verdict, axis)})"),
        ("input channels C", f"{verdict.in_channels:,}"),
        ("output channels K", f"{verdict.out_channels:,}"),
        *((("kernel", times(verdict.kernel)),) if verdict.kernel else ()),
        ("groups", f"{verdict.groups:,}"),
        ("evidence", "none" if how is None else how.value),
        *_known(
            "the rules predicted", None if how is Evidence.PREDICTED else verdict.predicted.value
        ),
        *_known("engine layer", verdict.engine_layer),
        *_known("tactic times", both and tactic_times_words(*both)),
    )


def tactic_times(verdict: Verdict) -> tuple[float, float] | None:
    """Milliseconds of the fastest sparse and the fastest dense tactic, where both were timed."""
    sparse, dense = verdict.sparse_ms, verdict.dense_ms
    if sparse is None or dense is None:
        return None
    if not (isfinite(sparse) and isfinite(dense) and sparse > 0 and dense > 0):
        return None
    return sparse, dense


def _known(label: str, value: str | None) -> tuple[tuple[str, str], ...]:
    return () if value is None else ((label, name_cell(value)),)

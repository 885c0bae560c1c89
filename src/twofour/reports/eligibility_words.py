"""Words of the eligibility report: its few lines for a hurry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isnan, prod

from twofour.eligibility.predict import count_weights, not_covered_lines, uses_of
from twofour.eligibility.reasons import headline_changes, obstacles
from twofour.eligibility.totals import (
    LayerStatus,
    by_status,
    counted_once,
    weights_by_status,
)
from twofour.records import frozen
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
from twofour.records.forecast import ForecastCell, Worth
from twofour.records.latency import (
    LatencyComparison,
    LatencyRatio,
    LatencyVerdict,
    parse_variant_name,
)
from twofour.records.options import Variant
from twofour.records.weights import PruneResult
from twofour.reports.document import Lack
from twofour.reports.latency_words import TOO_NOISY, why_no_difference, with_sparse_kernels
from twofour.words import (
    count,
    figure,
    listed,
    share,
    speed_up,
    times,
)

_CHANGES_SHOWN = 3
_HELD_OUT = "held-out calibration samples"
_EXAMPLES = "the example inputs"
_WARNING = "WARNING"
_WORTH_CHANGING = 0.01
"""Share of the weights below which a change is not proposed up here; its row has it."""
_LEAST_SHARE = 5e-4
"""Share that is written as 0.1 % or more."""


@frozen
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
    gains = report.forecast_gains
    weights = weights_by_status(report.verdicts, gains)
    layers_of = by_status(report.verdicts, gains)
    can = layers_of[LayerStatus.RUNS] or layers_of[LayerStatus.GAINS]
    rows: list[Total] = []
    for status, layers in layers_of.items():
        none_can = status is LayerStatus.CAN and not can and not gains
        if layers or none_can:
            rows.append(
                Total(
                    status=status,
                    layers=count(len(layers), "layer"),
                    weights=_weights(weights[status], report.summary),
                    codes=_codes(layers),
                )
            )
    factors = [group for group in report.not_covered if group.multiplies]
    if factors:
        rows.append(
            Total(
                status=LayerStatus.UNCOVERED,
                layers=count(sum(group.uses for group in factors), "node"),
                weights=_weights(report.summary.weights_not_covered, report.summary),
                codes=uses_of(factors),
            )
        )
    return tuple(rows)


def _weights(part: int, of: EligibilitySummary) -> str:
    """An engine alone does not say how many weights its layers have."""
    if of.layers and not of.weights:
        return "weights not known"
    return f"{count(part, 'weight')} ({share(part, of.weights)})"


def _codes(layers: Sequence[Verdict]) -> str:
    """The main reasons, the most frequent first: "DTYPE 36, GROUPED_CONV 1"."""
    main: list[str] = []
    for verdict in layers:
        main += (reason.code.value for reason in obstacles(verdict.reasons[:1]))
    # sorted first: codes that are equally frequent stay in the order of the alphabet
    codes = Counter(sorted(main))
    return ", ".join(f"{code} {number}" for code, number in codes.most_common())


def title_line(report: EligibilityReport) -> str:
    """Model, pattern, engine and GPU."""
    parts = [report.model, f"pattern {report.pattern}", report.engine]
    if report.gpu is not None:
        major, minor = report.gpu.compute_capability
        parts.append(f"{report.gpu.name} (compute capability {major}.{minor})")
    elif "compute capability" not in report.engine:  # as a log names the GPU of its build
        parts.append("GPU not known")
    return " · ".join(parts)


def advice_lines(report: EligibilityReport) -> tuple[str, ...]:
    """Warnings, what to change first by the weights it concerns, what the report leaves out."""
    beside = not_covered_lines(report.not_covered)
    lines = [*_changes(report), *beside, *evidence_lines(report), *_footnotes(report)]
    if report.not_evidence is not None:
        others = [line for line in lines if line != report.not_evidence]
        lines = [f"{_WARNING}: {report.not_evidence}", *others]
    return tuple(sorted(lines, key=lambda line: not line.startswith(_WARNING)))


def stale_lines(stale: Sequence[str]) -> tuple[str, ...]:
    """A line for each file that changed since the report was made."""
    return tuple(f"STALE: {line}" for line in stale)


def drift_lines(accuracy: Accuracy) -> tuple[str, ...]:
    """What pruning did to the outputs, and to the user's own metrics where there are any."""
    if accuracy.no_baseline is not None:
        figures = (f"{m.name}: {m.sparse:.4g}" for m in accuracy.metrics)
        return (accuracy.no_baseline, *figures)
    inputs = accuracy.inputs_are or _EXAMPLES
    held_out = [_drift_line(output, _HELD_OUT) for output in accuracy.held_out]
    alone = [_drift_line(output, inputs) for output in accuracy.drift]
    alone += map(_metric_line, accuracy.metrics)
    lines = [*held_out, *alone]
    if accuracy.rounding:
        # three steps: dense -> rounded dense -> rounded sparse, each pair with lines of its own
        rounded = [_drift_line(output, inputs) for output in accuracy.rounding]
        for metric in accuracy.metrics:
            if metric.unquantized is not None:
                before_after = replace(metric, dense=metric.unquantized, sparse=metric.dense)
                rounded.append(_metric_line(before_after))
        lines = [f"pruning and rounding: {line}" for line in held_out]
        lines += (f"pruning alone, both models rounded: {line}" for line in alone)
        lines += (f"rounding alone, dense model before and after: {line}" for line in rounded)
    if accuracy.not_compared is not None:
        lines.append(f"outputs not compared: {accuracy.not_compared}")
    if accuracy.by_module is not None:
        lines.append(f"outputs of the module in float32: {accuracy.by_module}")
    return tuple(lines)


def _metric_line(metric: Metric) -> str:
    return f"{metric.name}: {change_words(metric)}"


def _drift_line(output: OutputAgreement, measured_on: str) -> str:
    # output logits [8x10]: relative error 0.1564, cosine ...; measured on the example inputs
    line = f"output {output.output} [{times(output.shape)}]: {_agreement(output)}"
    if output.not_finite:
        line += f"; {count(output.not_finite, 'value')} NaN or infinite and left out"
    return f"{line}; measured on {measured_on}"


def _agreement(output: OutputAgreement) -> str:
    if output.equal is not None:
        return f"{output.equal:.2%} of the values are the same, dense and sparse"
    if isnan(output.cosine):
        return "no finite value to compare"
    error = ""
    if output.is_near_zero:
        error = "near zero in the dense model, "
    elif output.judged is not None:
        error = f"relative error {output.judged:.4f}, "
    each = ""
    if not output.has_single_values:
        mean, lowest = output.row_cosine_mean, output.row_cosine_min
        each = f"; per example: mean {mean:.6f}, lowest {lowest:.6f}"
    cosine = f"cosine to the dense output {output.cosine:.6f} (1 is the same{each}), "
    if prod(output.shape) == 1:
        cosine = ""
    return f"{error}{cosine}largest difference {output.max_abs_error:.4g}"


def _changes(report: EligibilityReport) -> Iterator[str]:
    """What the rows' own remedies ask to change, by the weights that totals count under them."""
    asking: dict[str, list[Verdict]] = {}
    for verdict in report.verdicts:
        if verdict.verdict is not VerdictName.CHOSEN:
            for change in headline_changes(verdict.remedy or ""):
                asking.setdefault(change, []).append(verdict)
    is_counted = counted_once(report.verdicts)
    whole = report.summary.weights
    weights: dict[str, int] = {}
    for change, layers in asking.items():
        concerned = count_weights(filter(is_counted, layers))
        if concerned >= _WORTH_CHANGING * whole:
            weights[change] = concerned
    ranked = sorted(weights, key=weights.__getitem__, reverse=True)
    for place, change in enumerate(ranked[:_CHANGES_SHOWN], 1):
        # change first: use float16 (--precision float16) (36 layers, 42.9 % of the weights)
        label = "change first" if place == 1 else f"then ({place})"
        concerned_words = count(len(asking[change]), "layer")
        if whole:
            concerned_words += f", {share(weights[change], whole)} of the weights"
        yield f"{label}: {change} ({concerned_words})"


def _footnotes(report: EligibilityReport) -> Iterator[str]:
    products = report.summary.activation_products
    if products:
        yield (
            f"neither listed nor counted: {count(products, 'product')} of two activations, "
            "which have no weight"
        )
    unmatched = len(report.unmatched_engine_layers)
    if unmatched:
        yield f"{count(unmatched, 'engine layer')} not matched to a layer of the model"
    if not report.verdicts:
        yield "no layer with a weight is named here"
        return
    if all(verdict.evidence is not Evidence.MEASURED for verdict in report.verdicts):
        yield "every verdict is predicted: only TensorRT's build log says what it chose"
    if report.forecast is not None or not report.summary.weights:
        return
    shares = () if report.totals is None else report.totals.shares
    if all(part.unit is not ShareUnit.MILLISECONDS for part in shares):
        yield "time and possible gain are not known: the option --gpu A100 forecasts the gain"


def evidence_lines(report: EligibilityReport) -> tuple[str, ...]:
    """What a build or a profile adds to the prediction, and the notes."""
    lines = [] if report.totals is None else list(_lines_of_totals(report.totals))
    return (*lines, *report.notes)


def _lines_of_totals(totals: EligibilityTotals) -> Iterator[str]:
    for part in totals.shares:
        if part.unit is not ShareUnit.WEIGHTS:
            yield _share_line(part)
    for ceiling in totals.ceilings:
        yield (
            f"at most {ceiling.eligible_gain:.3f}x end to end if every eligible layer ran sparse, "
            f"{ceiling.weighted_gain:.3f}x if every layer with a weight did "
            f"({ceiling.profile}; {ceiling.assumption})"
        )
    yield from _confusion_lines(totals)
    yield from totals.notes


def _share_line(of: Share) -> str:
    """Parts of the multiply-adds or of the time; the totals have those of the weights."""
    if of.unit is ShareUnit.MILLISECONDS:
        whole = f"the time ({of.total:.3f} ms)"
        other = "are in kernels without such a weight"
        not_covered = "are in kernels of weights not covered"
    else:
        whole = f"the {of.unit.value}"
        other = "are not in the engine"
        not_covered = "are not covered"
    parts = {
        "run sparse": of.runs_sparse,
        "can run sparse": of.eligible - of.doubtful,
        "are eligible but run dense or likely will": of.doubtful,
        "run dense": of.never,
        "are not known": of.unknown,
        other: of.other,
        not_covered: of.not_covered,
    }
    # of the time (2.310 ms), 43.1 % run sparse; 12.0 % can run sparse; 44.9 % run dense
    shown: list[str] = []
    for words, part in parts.items():
        if part / of.total >= _LEAST_SHARE:
            shown.append(f"{share(part, of.total)} {words}")
    return f"of {whole}, {'; '.join(shown)}"


def _confusion_lines(totals: EligibilityTotals) -> Iterator[str]:
    """How often the engine did what the rules predicted: "eligible -> chosen 3"."""
    cells = [cell for cell in totals.confusion if cell.predicted is not VerdictName.UNKNOWN]
    measured = sum(cell.layers for cell in cells)
    if not measured:
        return
    pairs = (f"{cell.predicted.value} -> {cell.measured.value} {cell.layers}" for cell in cells)
    yield f"predicted -> measured: {', '.join(pairs)}"
    # rules that are wrong about every layer hint at a log that does not belong to the model
    wrong = len(totals.disagreements)
    line = f"the rules were wrong about {wrong} of {count(measured, 'measured layer')}"
    if wrong == measured > 1:
        line += "; probably the log is of another model"
    yield line


# --- the first line -------------------------------------------------------------------------------

_COLLAPSED = 0.1
"""Part of a metric whose loss no speed makes good: ten times what MLPerf Inference allows (1 %)."""
_NO_SPEED = "no engine with sparse kernels ran here"
_TRY_DATA = ", pruned by magnitude without data. Try --calibrate DATA"
_TRY = ". Try more calibration samples"
_OR_TRAIN = " or `twofour finetune`"
_OR_FEWER = ", or --budget 0.5, which leaves layers dense"  # refused with --quantize
_ROUNDED = (
    ". Most of it is lost by rounding alone. Try more calibration samples, or leave --quantize out"
)


@frozen
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
    sentence = f"{forecast.sentence}."
    if first is None:
        return FirstLine(text=sentence)
    return replace(first, text=f"{first.text} {sentence}")


def _worth_shipping(
    accuracy: Accuracy,
    times: LatencyComparison | None,
    pruned: PruneResult | None,
    forecast: ForecastCell | None,
) -> FirstLine:
    # a model without one finite output is broken, however fast it is
    for output in accuracy.drift:
        if output.is_broken:
            return _broken_line(output)
    lost = _accuracy(accuracy)
    without_data = _TRY_DATA if _is_by_magnitude(pruned) else ""
    if lost is None:
        no_dense = "there is no dense model to compare with"
        unjudged = no_dense if accuracy.no_baseline else "no output could be judged"
        return _by_speed(times, forecast, unknown=[unjudged], lost="")
    if _has_collapsed(accuracy):
        advice = without_data or _advice(accuracy, pruned)
        if _is_lost_by_rounding(accuracy):
            advice = _ROUNDED
        text = f"Not worth shipping as it is: {lost}{advice}."
        return FirstLine(text=text, lacks=Lack.ACCURACY)
    # " Accuracy: 0.9800 → 0.9702 (−0.98 points), pruned by magnitude without data. Try ..."
    lost = f" Accuracy: {lost.removeprefix('accuracy ')}{without_data}."
    return _by_speed(times, forecast, unknown=[], lost=lost)


def _broken_line(output: OutputAgreement) -> FirstLine:
    # pruning adds no NaN to a model whose dense outputs have as many
    whose = "dense" if output.dense_not_finite == output.not_finite else "pruned"
    what = f"every value of its output {output.output} is NaN or infinite"
    text = f"Not worth shipping: the {whose} model is broken, {what}."
    return FirstLine(text=text, lacks=Lack.VALUES)


def _is_by_magnitude(pruned: PruneResult | None) -> bool:
    """Whether any weight got its zeros without a look at data."""
    if pruned is None or pruned.calibration is not None:
        return False
    return any(row.method in {None, "magnitude"} for row in pruned.pruned_now)


def _advice(accuracy: Accuracy, pruned: PruneResult | None) -> str:
    advice = _TRY
    if pruned is None or not pruned.source.endswith(".onnx"):
        advice += _OR_TRAIN
    if not accuracy.rounding:
        advice += _OR_FEWER
    return advice


def _by_speed(
    times: LatencyComparison | None, forecast: ForecastCell | None, *, unknown: list[str], lost: str
) -> FirstLine:
    """The answer where the accuracy is no obstacle; `unknown` is what keeps it from being one."""
    yes = "yes, if this accuracy is enough"
    speed = ""
    ratio = None if times is None else _sparse_over_dense(times)
    if forecast is not None:
        if not forecast.is_worth:
            text = f"Not worth shipping on {forecast.gpu} (forecast).{lost}"
            return FirstLine(text=text, lacks=Lack.SPEED)
        yes = "perhaps, by the forecast, if this accuracy is enough"
        if forecast.verdict is Worth.TRY_FIRST:
            yes = "perhaps, by the forecast, if a build gains and this accuracy is enough"
    elif times is None or ratio is None:
        unknown.append(_NO_SPEED)
    else:
        why_not = why_no_difference(times, ratio)
        if ratio.verdict is LatencyVerdict.UNDECIDED or why_not == TOO_NOISY:
            unknown.append(f"the speed is not known ({why_not})")
        elif ratio.verdict is LatencyVerdict.FASTER:
            # " Speed: 1.18x faster than dense (1.15 to 1.21)."
            speed = f" Speed: {speed_up(ratio, ' than dense')}."
        else:
            gain = f"no speed gained ({why_not})"
            if ratio.verdict is LatencyVerdict.SLOWER:
                gain = speed_up(ratio, " than dense")
            return FirstLine(text=f"Not worth shipping: {gain}.{lost}", lacks=Lack.SPEED)
    answer = f"not known, because {' and '.join(unknown)}" if unknown else yes
    return FirstLine(text=f"Worth shipping: {answer}.{lost}{speed}")


def _has_collapsed(accuracy: Accuracy) -> bool:
    """Whether a metric got too much worse, or without metrics an output moved."""
    # "not <=" and not ">": a loss that is NaN counts as a collapse
    metrics = _metrics(accuracy)
    if metrics:
        return any(not m.loss <= _COLLAPSED * abs(m.dense) for m in metrics)
    outputs, _ = _judged(accuracy)
    return any(output.is_far for output in outputs)


def _judged(accuracy: Accuracy) -> tuple[tuple[OutputAgreement, ...], str]:
    """The outputs that the verdict rests on, and what they were measured on."""
    if accuracy.held_out:
        return accuracy.held_out, _HELD_OUT
    return accuracy.pruned_and_rounded or accuracy.drift, accuracy.inputs_are or _EXAMPLES


def _metrics(accuracy: Accuracy) -> tuple[Metric, ...]:
    """The user's figures, of the dense model before --quantize and of the sparse one after."""
    metrics: list[Metric] = []
    for metric in accuracy.metrics:
        before = metric.dense if metric.unquantized is None else metric.unquantized
        metrics.append(replace(metric, dense=before))
    return tuple(metrics)


def _is_lost_by_rounding(accuracy: Accuracy) -> bool:
    """Whether --quantize alone loses more of the first figure, or output, than pruning does."""
    if accuracy.metrics:
        first = accuracy.metrics[0]
        before = first.unquantized
        return before is not None and before - first.dense > first.dense - first.sparse
    pairs = zip(accuracy.rounding, accuracy.drift, strict=False)
    return any((rounded.judged or 0) > (pruned.judged or 0) for rounded, pruned in pairs)


def _sparse_over_dense(times: LatencyComparison) -> LatencyRatio | None:
    """The first that differ in sparsity alone, where the sparse one may use sparse kernels."""
    sparse = with_sparse_kernels(times)
    for ratio in times.ratios:
        is_over_dense = parse_variant_name(ratio.baseline).weights == Variant.DENSE
        if ratio.only_sparsity and ratio.variant in sparse and is_over_dense:
            return ratio
    return None


def _accuracy(accuracy: Accuracy) -> str | None:
    """What pruning, and rounding, did to the metrics, else to the outputs; None: not known."""
    if accuracy.no_baseline is not None:
        return None
    metrics = _metrics(accuracy)
    if metrics:
        return listed([f"{m.name} {change_words(m)}" for m in metrics])
    # without a metric: "output logits has a relative error of 0.156 (cosine 0.988) on ..."
    outputs, inputs = _judged(accuracy)
    worst: OutputAgreement | None = None
    error = 0.0
    near_zero: list[str] = []
    for output in outputs:
        if output.judged is not None and (worst is None or output.judged > error):
            worst = output
            error = output.judged
        if output.is_near_zero:
            near_zero.append(output.output)
    if worst is None:
        return None
    left_out = f"; near zero and left out: {listed(near_zero)}" if near_zero else ""
    words = f"output {worst.output} has a relative error of {error:.3f}"
    if prod(worst.shape) > 1:
        words += f" (cosine {worst.cosine:.3f})"
    return f"{words} on {inputs} (no metric{left_out})"


def change_words(metric: Metric) -> str:
    """A figure of the dense and the sparse model: "0.9800 → 0.9702 (−0.98 points)"."""
    return f"{figure(metric.dense)} → {figure(metric.sparse)} ({points(metric)})"


def points(metric: Metric) -> str:
    """How far a figure changes: "−0.98 points".

    Points are of 100: a figure from 0 to 1 counts a hundredfold; one beyond 100 has no points.
    """
    # 0.98 to 0.9702: −0.98 points; 23.1 to 24.6: +1.5 points; 812 to 815: +3.0
    both = (metric.dense, metric.sparse)
    unit = 100 if all(0 <= value <= 1 for value in both) else 1
    change = unit * (metric.sparse - metric.dense)
    words = f"{change:+,.1f}" if abs(change) >= 1 else f"{change:+.2g}"
    words = words.replace("-", "\N{MINUS SIGN}")
    if max(map(abs, both)) <= 100:
        words += " points"
    return words

"""Weights and their checks in, one verdict per layer out, by the rules alone.

The verdict of a layer is the worst of its findings: one obstacle outweighs all else. What no row
names is counted beside the verdicts, and layers that were not exported are rows too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from twofour.eligibility.build_facts import Case, ReportContext
from twofour.eligibility.reasons import REASONS, reason_of
from twofour.eligibility.remedies import LEAVE_NARROW, Finding, LeftDense, Origin, in_turn
from twofour.eligibility.rules import GROUP, holds_trivially
from twofour.errors import BadInputError
from twofour.records.eligibility import (
    EligibilityReport,
    EligibilitySummary,
    Evidence,
    ShareUnit,
    Verdict,
    VerdictName,
)
from twofour.records.weights import (
    HARDWARE_PATTERN,
    LARGEST_PASSED_OVER,
    NotCovered,
    PrunedWeight,
    Reason,
    ReasonCode,
    Validation,
    Weight,
    WeightCheck,
    WeightedLayer,
    shared,
)
from twofour.words import count, printable

NOT_COVERED = "not covered"
NOT_PRUNED = "embeddings and other constants, which are not pruned"
NO_FACTOR = "no factor"
"""The verdict of embeddings, biases and all else that no matrix product multiplies with."""
_SEVERITY = (VerdictName.ELIGIBLE, VerdictName.UNKNOWN, VerdictName.NOT_ELIGIBLE)

Checks = dict[tuple[str, int], WeightCheck]


def predict(
    weights: Sequence[Weight], validation: Validation, context: ReportContext
) -> EligibilityReport:
    """Judge every layer by the rules; each check is joined by the name and axis of its weight.

    Raises BadInputError when the validation was made with another pattern than 2:4, the only one
    that sparse tensor cores run.
    """
    if validation.pattern != HARDWARE_PATTERN:
        raise BadInputError(
            f"the report needs a validation of {HARDWARE_PATTERN}, not of {validation.pattern}",
            hint=f"tensor cores run {HARDWARE_PATTERN} only; a 1:4 weight passes as 2:4",
        )
    context = context.completed()
    checks = {(check.weight, check.axis): check for check in validation.checks}
    users = _users_by_axis(weights, checks)
    verdicts = []
    for weight in weights:
        users_of_array = users[weight.weight].items()
        case = Case(
            weight=weight,
            check=_check_of(weight, checks),
            context=context,
            at_odds=tuple(other for axis, other in users_of_array if axis != weight.axis),
        )
        verdicts.append(_judge(case))
    return EligibilityReport(
        model=context.model,
        pattern=context.pattern,
        engine=context.engine,
        gpu=context.gpu,
        verdicts=tuple(verdicts),
        summary=summarize(verdicts, context.activation_products, context.not_covered),
        not_covered=context.not_covered,
    )


def with_verdicts(report: EligibilityReport, verdicts: Sequence[Verdict]) -> EligibilityReport:
    """The report with other rows, and a summary of them."""
    products = report.summary.activation_products
    summary = summarize(verdicts, products, report.not_covered)
    return replace(report, verdicts=tuple(verdicts), summary=summary)


def summarize(
    verdicts: Sequence[Verdict], activation_products: int, beside: Sequence[NotCovered] = ()
) -> EligibilitySummary:
    """Totals; a weight that several layers share counts once, as eligible if one of them is.

    `beside` is what no row names: factors of matrix products count as weights of the whole.
    """
    not_covered = sum(group.weights for group in beside if group.multiplies)
    names = Counter(v.verdict for v in verdicts)
    usable = [v for v in verdicts if v.verdict.is_usable]
    return EligibilitySummary(
        layers=len(verdicts),
        chosen=names[VerdictName.CHOSEN],
        eligible=names[VerdictName.ELIGIBLE],
        not_eligible=names[VerdictName.NOT_ELIGIBLE],
        not_in_engine=names[VerdictName.NOT_IN_ENGINE],
        unknown=names[VerdictName.UNKNOWN],
        weights=count_weights(verdicts) + not_covered,
        weights_eligible=count_weights(usable),
        activation_products=activation_products,
        weights_not_covered=not_covered,
        weights_elsewhere=sum(group.weights for group in beside) - not_covered,
    )


def count_weights(verdicts: Iterable[Verdict]) -> int:
    """Elements of the stored arrays, each array once; a computed weight has none."""
    stored = {v.weight: prod(v.shape) for v in verdicts if v.weight is not None}
    return sum(stored.values())


def _users_by_axis(
    weights: Sequence[Weight], checks: Checks
) -> Mapping[str | None, Mapping[int | None, Weight]]:
    """A user of each array for each axis along which one needs it to hold the pattern.

    Tied weights are an example: an output layer sums over axis 1 of `embed.weight`, and another
    layer that takes it transposed sums over axis 0.
    """
    users: dict[str | None, dict[int | None, Weight]] = defaultdict(dict)
    for weight in weights:
        check = _check_of(weight, checks)
        if check is None or holds_trivially(weight.shape, weight.axis, HARDWARE_PATTERN):
            continue
        if check.required or not check.violations:
            users[weight.weight].setdefault(weight.axis, weight)
    return users


def _judge(case: Case) -> Verdict:
    causes = findings(case)
    reasons = tuple(finding.reason for finding in causes)
    row = predicted_row(case.weight, verdict(causes), reasons, remedy(case, causes))
    if case.check is not None:
        return replace(row, pattern_holds=not case.is_broken, required=case.check.required)
    # without a check of the saved array, its shape may say that it was not to be pruned
    for finding in causes:
        if REASONS[finding.reason.code].left_dense is LeftDense.UNLESS_ASKED:
            return replace(row, required=False)
    return row


def predicted_row(
    weight: Weight, name: VerdictName, reasons: tuple[Reason, ...], remedy: str | None = None
) -> Verdict:
    """The row of a layer of which nothing is measured."""
    return Verdict(
        **shared(weight, WeightedLayer),
        engine_layer=None,
        dtype=weight.math_dtype,
        pattern_holds=None,
        verdict=name,
        evidence=None if name is VerdictName.UNKNOWN else Evidence.PREDICTED,
        predicted=name,
        reasons=reasons,
        remedy=remedy,
    )


def _check_of(weight: Weight, checks: Checks) -> WeightCheck | None:
    if weight.weight is None or weight.axis is None:
        return None
    return checks.get((weight.weight, weight.axis))


# --- one layer ------------------------------------------------------------------------------------


def findings(case: Case) -> tuple[Finding, ...]:
    """All that is found about a layer, the main reason first; never empty.

    What module or graph had noted, such as EXCLUDED, replaces the broken pattern it explains, and
    comes last where the pattern holds; an open question comes last where something else rules the
    layer out.
    """
    # A Conv that --exclude left dense: EXCLUDED (not-eligible). If its weight
    # happens to be 2:4: QUALIFIES, EXCLUDED (eligible). A ConvTranspose with a broken pattern:
    # PATTERN_BROKEN, UNSUPPORTED_OP, as whether the op can run sparse matters no longer.
    causes = _ruled(Origin.CAUSE, case)
    consequences = _ruled(Origin.CONSEQUENCE, case)
    ruled = {finding.reason.code for finding in causes + consequences}
    noted = [_noted(r, case) for r in case.weight.reasons if r.code not in ruled]
    if _is_left_dense(case) and verdict(causes + noted) is VerdictName.NOT_ELIGIBLE:
        # no pattern was tried, so it is no obstacle that none holds
        consequences = [f for f in consequences if f.best is not VerdictName.NOT_ELIGIBLE]
    everything = causes + noted + consequences
    worst = verdict(everything)
    if worst is VerdictName.NOT_ELIGIBLE:
        return tuple(sorted(everything, key=lambda f: f.best is VerdictName.UNKNOWN))
    if worst is VerdictName.UNKNOWN:
        return tuple(everything)
    remainder = _ruled(Origin.REMAINDER, case)[:1]
    if verdict(remainder) is VerdictName.UNKNOWN:
        return (*remainder, *everything)
    if all(REASONS[finding.reason.code].is_doubt for finding in consequences):
        everything = causes + noted + remainder + consequences
    return tuple(sorted(everything, key=lambda f: REASONS[f.reason.code].explains_dense))


def _is_left_dense(case: Case) -> bool:
    return case.check is not None and not case.check.required


def verdict(causes: Iterable[Finding]) -> VerdictName:
    """The worst of the findings; eligible where there are none."""
    return max((f.best for f in causes), key=_SEVERITY.index, default=VerdictName.ELIGIBLE)


def remedy(case: Case, causes: Sequence[Finding]) -> str | None:
    """What to do about the main obstacle; for an eligible layer about all that slows it, in order.

    None where nothing is known to be in the way, or all that could be done was done.
    """
    # Conv of 3 input channels in float32: AXIS_NOT_MULTIPLE and DTYPE, and both slow it; but three
    # channels gain nothing in any type, so it is left as it is
    worst = verdict(causes)
    texts = []
    for finding in causes:
        row = REASONS[finding.reason.code]
        if finding.best is not worst or not row.remedies:
            continue
        if worst is not VerdictName.ELIGIBLE:
            return in_turn(row.remedy(case))
        # why it was left dense is of no interest where it was not
        if not row.explains_dense:
            texts.append(row.remedy(case))
    if texts and case.weight.in_channels < GROUP:
        return LEAVE_NARROW.text
    return in_turn(*texts)


def contradicted(predicted: VerdictName, rule: Reason) -> Reason:
    """How evidence contradicts the rules, which predicted `predicted` for the reason `said`."""
    why = f"{rule.code.value}: {rule.message}"
    message = f"the rules said {predicted.value} ({why}), the evidence says otherwise"
    return Reason(code=ReasonCode.LOG_CONTRADICTS, message=message)


def _ruled(origin: Origin, case: Case) -> list[Finding]:
    """What the rules of this origin say, in the order of the table."""
    remarks = []
    for row in REASONS.values():
        if row.origin is origin:
            for rule in row.found_by:
                remark = rule(case)
                if remark is not None:
                    remarks.append(row.finding(remark))
    return remarks


def _noted(reason: Reason, case: Case) -> Finding:
    """What module or graph state; why a weight was left dense rules it out where it is broken."""
    row = REASONS[reason.code]
    if row.explains_dense and case.is_broken:
        return Finding(reason=reason, best=VerdictName.NOT_ELIGIBLE)
    best = row.best if row.best in _SEVERITY else VerdictName.ELIGIBLE
    return Finding(reason=reason, best=best)


# --- what no row names ----------------------------------------------------------------------------


def uses_of(groups: Iterable[NotCovered]) -> str:
    """Ops with the number of nodes or modules: "LSTM (2), Einsum (4)"."""
    return ", ".join(f"{printable(group.op)} ({group.uses:,})" for group in groups)


def not_covered_lines(groups: Sequence[NotCovered]) -> tuple[str, ...]:
    """A line on what is neither pruned nor judged, and one on what does no matrix product."""
    factors = [group for group in groups if group.multiplies]
    others = [group for group in groups if not group.multiplies]
    lines = []
    if factors:
        weights = count(sum(group.weights for group in factors), "weight")
        lines.append(f"{NOT_COVERED}: {weights} in {uses_of(factors)}: neither pruned nor judged")
    if others:
        values = count(sum(group.weights for group in others), "value")
        small = f"arrays of up to {LARGEST_PASSED_OVER:,} values are left out"
        lines.append(f"{NOT_PRUNED}: {values} read by {uses_of(others)}; {small}")
    return tuple(lines)


# --- layers that were not exported ----------------------------------------------------------------


def with_not_exported(
    report: EligibilityReport, missing: Sequence[PrunedWeight]
) -> EligibilityReport:
    """The report with a row behind the others for each layer that the graph has no node for.

    Their weights are part of the totals; an array that a layer of the graph stores too is not
    counted again.
    """
    joined = with_verdicts(report, (*report.verdicts, *map(_not_exported_row, missing)))
    if report.totals is None:
        return joined
    added = float(count_weights(joined.verdicts) - count_weights(report.verdicts))
    shares = []
    for share in report.totals.shares:
        more = added if share.unit is ShareUnit.WEIGHTS else 0.0
        shares.append(replace(share, total=share.total + more, other=share.other + more))
    return replace(joined, totals=replace(report.totals, shares=tuple(shares)))


def not_exported(
    rows: Sequence[PrunedWeight], parameters: Sequence[str], constants: Sequence[str]
) -> tuple[PrunedWeight, ...]:
    """Rows of prune.json that the export has neither a product nor a constant of.

    `parameters` are the state_dict keys that weights of the graph come from, `constants` the names
    of its constants.
    """
    there = {*parameters, *constants}
    layers = {row.weight.layer for row in rows if row.weight.weight in there}
    missing = []
    for row in rows:
        if row.weight.weight is None or row.weight.weight in there:
            continue
        if layers.isdisjoint(row.weight.tied_to):
            missing.append(row)
        else:  # a head whose array a layer of the graph holds has no weight of its own
            missing.append(replace(row, weight=replace(row.weight, weight=None)))
    return tuple(missing)


def _not_exported_row(row: PrunedWeight) -> Verdict:
    pruned = "pruned, and " if row.pruned else ""
    message = f"{pruned}no node of the exported graph uses it: a branch that the example inputs do "
    message += "not take, a part for training alone, or one whose result nothing needs"
    reason = reason_of(ReasonCode.NOT_EXPORTED, message)
    absent = predicted_row(row.weight, VerdictName.NOT_IN_ENGINE, (reason,))
    return replace(absent, node=None, required=False)

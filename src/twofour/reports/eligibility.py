"""Weights and their checks in, one verdict per layer out: the eligibility report, predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from twofour.errors import BadInputError
from twofour.records.eligibility import (
    EligibilityReport,
    EligibilitySummary,
    Evidence,
    Verdict,
    VerdictName,
)
from twofour.records.pruning import Validation, WeightCheck
from twofour.records.weights import HARDWARE_PATTERN, LEFT_DENSE_BY_SHAPE, NotCovered, Weight
from twofour.reports.cells import holds_trivially
from twofour.reports.context import ReportContext
from twofour.reports.findings import Case, Finding
from twofour.reports.remedies import remedy
from twofour.reports.rules import findings, verdict
from twofour.reports.uncovered import count_not_covered

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
    checks = {(check.weight, check.axis): check for check in validation.checks}
    of_array: dict[str | None, list[Weight]] = {}
    for weight in weights:
        of_array.setdefault(weight.weight, []).append(weight)
    verdicts = tuple(_judge(_case(w, of_array[w.weight], checks, context)) for w in weights)
    return EligibilityReport(
        model=context.model,
        pattern=context.pattern,
        engine=context.engine,
        gpu=context.gpu,
        verdicts=verdicts,
        summary=summarize(verdicts, context.activation_products, context.not_covered),
        not_covered=context.not_covered,
    )


def summarize(
    verdicts: Sequence[Verdict], activation_products: int, beside: Sequence[NotCovered] = ()
) -> EligibilitySummary:
    """Totals; a weight that several layers share counts once, as eligible if one of them is.

    `beside` is what no row names: factors of matrix products count as weights of the whole.
    """
    not_covered = count_not_covered(beside, multiplies=True)
    names = Counter(v.verdict for v in verdicts)
    usable = [v for v in verdicts if v.verdict in (VerdictName.CHOSEN, VerdictName.ELIGIBLE)]
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
        weights_elsewhere=count_not_covered(beside, multiplies=False),
    )


def count_weights(verdicts: Iterable[Verdict]) -> int:
    """Elements of the stored arrays, each array once; a computed weight has none."""
    stored = {v.weight: prod(v.shape) for v in verdicts if v.weight is not None}
    return sum(stored.values())


def _case(weight: Weight, users: Sequence[Weight], checks: Checks, context: ReportContext) -> Case:
    """One layer to be judged, with those of the array's `users` that need it along another axis."""
    bound = (u for u in users if not holds_trivially(u.shape, u.axis, HARDWARE_PATTERN))
    elsewhere = [(u, _check_of(u, checks)) for u in bound if u.axis != weight.axis]
    at_odds = (u for u, check in elsewhere if check and (check.required or not check.violations))
    return Case(
        weight=weight, check=_check_of(weight, checks), context=context, at_odds=tuple(at_odds)
    )


def _judge(case: Case) -> Verdict:
    found = findings(case)
    name = verdict(found)
    return replace(
        unjudged(case.weight),
        pattern_holds=None if case.check is None else case.check.violations == 0,
        verdict=name,
        evidence=None if name is VerdictName.UNKNOWN else Evidence.PREDICTED,
        predicted=name,
        reasons=tuple(f.reason for f in found),
        remedy=remedy(case, found),
        required=_was_required(case, found),
    )


def unjudged(weight: Weight) -> Verdict:
    """The row of a layer with what the weight itself says, before anything is said of it."""
    return Verdict(
        layer=weight.layer,
        node=weight.node,
        weight=weight.weight,
        op=weight.op,
        engine_layer=None,
        shape=weight.shape,
        axis=weight.axis,
        groups=weight.groups,
        in_channels=weight.in_channels,
        out_channels=weight.out_channels,
        kernel=weight.kernel,
        dtype=weight.math_dtype,
        pattern_holds=None,
        verdict=VerdictName.UNKNOWN,
        evidence=None,
        predicted=VerdictName.UNKNOWN,
        reasons=(),
        remedy=None,
    )


def _was_required(case: Case, found: Sequence[Finding]) -> bool | None:
    """As the check of the saved array says; by its shape where none could be made."""
    if case.check is not None:
        return case.check.required
    return False if any(f.reason.code in LEFT_DENSE_BY_SHAPE for f in found) else None


def _check_of(weight: Weight, checks: Checks) -> WeightCheck | None:
    if weight.weight is None or weight.axis is None:
        return None
    return checks.get((weight.weight, weight.axis))

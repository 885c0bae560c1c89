"""All rules in the order in which they explain a layer, and what they say together.

The verdict of a layer is the worst of its findings: one obstacle outweighs all else.
"""

from __future__ import annotations

from twofour.records.eligibility import Evidence, Verdict, VerdictName
from twofour.records.weights import Reason, ReasonCode
from twofour.reports import obstacles, speed
from twofour.reports.findings import GUIDE, Case, Finding, Rule, eligible
from twofour.reports.words import layer_size

CAUSES: tuple[Rule, ...] = (
    obstacles.old_gpu,
    obstacles.computed_weight,
    obstacles.depthwise,
    obstacles.grouped,
    obstacles.undocumented_op,
    obstacles.product_in_tensorrt_8,
    obstacles.narrow_tail,
    obstacles.axes_at_odds,
)
CONSEQUENCES: tuple[Rule, ...] = (
    obstacles.wrong_axis,
    obstacles.broken_pattern,
    speed.math_type,
    speed.int8_output,
    speed.small_layer,
)
RULED_OUT = frozenset(
    {
        ReasonCode.PATTERN_BROKEN,
        ReasonCode.WRONG_AXIS,
        ReasonCode.GROUPED_CONV,
        ReasonCode.DEPTHWISE_CONV,
        ReasonCode.NOT_CONSTANT,
        ReasonCode.PICKED_AT_RUN_TIME,
        ReasonCode.ZERO_POINT,
        ReasonCode.IN_PLUGIN,
        ReasonCode.GPU_HAS_NO_SPARSE,
        ReasonCode.SPARSITY_OFF,
    }
)
"""Codes that rule sparse math out when the module or graph states them; others only comment."""
EXPLAIN_DENSE = frozenset({ReasonCode.EXCLUDED, ReasonCode.NOT_A_LAYER, ReasonCode.SHARED_WEIGHT})
"""Codes for why a weight was left dense: where it is, they are the point."""
DOUBTS = frozenset({ReasonCode.SMALL_CHANNELS})
"""Codes that are told and foretell nothing: a layer with no other qualifies all the same."""
UNFORETOLD = frozenset(
    {
        ReasonCode.SPARSITY_OFF,
        ReasonCode.GPU_HAS_NO_SPARSE,
        ReasonCode.FOLDED,
        ReasonCode.IN_PLUGIN,
        ReasonCode.FUSED_SIBLINGS,
    }
)
"""Outcomes the rules say nothing about, so that they cannot be wrong about them."""
_SEVERITY = (VerdictName.ELIGIBLE, VerdictName.UNKNOWN, VerdictName.NOT_ELIGIBLE)


def findings(case: Case) -> tuple[Finding, ...]:
    """Everything there is to say about a layer, the main point first; never empty.

    What module or graph had noted (say, EXCLUDED) stands before the broken pattern it explains,
    and last where the pattern holds; an open question comes last where something else rules the
    layer out.
    """
    causes, consequences = _apply(CAUSES, case), _apply(CONSEQUENCES, case)
    ruled = {f.reason.code for f in causes + consequences}
    noted = tuple(_noted(r, case) for r in case.weight.reasons if r.code not in ruled)
    found = causes + noted + consequences
    worst = verdict(found)
    if worst is VerdictName.NOT_ELIGIBLE:
        return tuple(sorted(found, key=lambda f: f.best is VerdictName.UNKNOWN))
    if worst is VerdictName.UNKNOWN:
        return found
    if (missing := obstacles.unchecked(case)) is not None:
        return (missing, *found)
    aside = tuple(f for f in noted if f.reason.code in EXPLAIN_DENSE)
    kept = tuple(f for f in noted if f not in aside)
    if any(f.reason.code not in DOUBTS for f in consequences):
        return (*causes, *kept, *consequences, *aside)
    return (*causes, *kept, _qualifies(case), *consequences, *aside)


def verdict(found: tuple[Finding, ...]) -> VerdictName:
    """The worst of the findings; eligible where there are none."""
    return max((f.best for f in found), key=_SEVERITY.index, default=VerdictName.ELIGIBLE)


def rules_were_wrong(verdict: Verdict) -> bool:
    """Whether a measured verdict is another than the rules foretold.

    They foretell no choice, unknown is no forecast, and of some outcomes they say nothing.
    """
    predicted, found = verdict.predicted, verdict.verdict
    if verdict.evidence is not Evidence.MEASURED or predicted is VerdictName.UNKNOWN:
        return False
    chosen = found is VerdictName.CHOSEN and predicted is VerdictName.ELIGIBLE
    return predicted is not found and not chosen and verdict.reasons[0].code not in UNFORETOLD


def _apply(rules: tuple[Rule, ...], case: Case) -> tuple[Finding, ...]:
    return tuple(found for rule in rules if (found := rule(case)) is not None)


def _noted(reason: Reason, case: Case) -> Finding:
    is_dense = case.check is not None and case.check.violations > 0
    if reason.code in RULED_OUT or (reason.code in EXPLAIN_DENSE and is_dense):
        return Finding(reason=reason, best=VerdictName.NOT_ELIGIBLE)
    if reason.code is ReasonCode.UNSUPPORTED_OP:
        return Finding(reason=reason, best=VerdictName.UNKNOWN)
    return Finding(reason=reason, best=VerdictName.ELIGIBLE)


def _qualifies(case: Case) -> Finding:
    message = f"2:4 holds along input channels; {layer_size(case.weight)}, {case.weight.math_dtype}"
    return eligible(ReasonCode.QUALIFIES, message, f"{GUIDE}; NVIDIA/TensorRT issue 3849")

"""Gates on the layers of a report, for continuous integration: which layers miss them."""

from __future__ import annotations

from collections.abc import Sequence

from twofour.eligibility.predict import not_covered_lines
from twofour.eligibility.remedies import has_code
from twofour.errors import BadInputError
from twofour.records import frozen
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.weights import NotCovered, Reason, ReasonCode
from twofour.words import count

_EACH_COUNTS = (
    f"; each counts as a layer (--allow-reason {ReasonCode.UNSUPPORTED_OP.value} leaves them out)"
)


@frozen
class Gates:
    """What a report must meet; shares are of layers whose weight was to be pruned, from 0 to 1.

    Layers do not count if they were left dense on purpose (by option; by default grouped and
    depthwise convolutions and axes that are not a multiple of 4), are not in the engine, or would
    miss the gate and have an allowed reason, whether it is their main one or not. Weights that
    pruning does not reach (not covered, or used by the model's own code) were left dense by nobody:
    shares count them, UNSUPPORTED_OP and NOT_A_LAYER allow them. With allowed reasons and no other
    gate, every layer left must be eligible or chosen.
    Raises BadInputError for a share outside of 0 to 1.
    """

    min_eligible: float | None = None
    min_chosen: float | None = None
    no_broken: bool = False
    """No weight that was to be pruned may break the pattern; a shared one counts once."""
    allow_reasons: tuple[ReasonCode, ...] = ()

    def __post_init__(self) -> None:
        for name, share in (("eligible", self.min_eligible), ("chosen", self.min_chosen)):
            if share is not None and not 0 <= share <= 1:
                raise BadInputError(
                    f"--min-{name} {share:g} is not a share", hint="give one from 0 to 1, as in 0.9"
                )


def missed_gates(report: EligibilityReport, gates: Gates) -> tuple[str, ...]:
    """A line for each gate that is missed, with the share reached, and one for each bad layer.

    Those have the layer's name, verdict and the reason that counts; () where all is met. A report
    that is stale meets none: the lines say why it is stale. Raises BadInputError for gates that
    cannot be checked: no layer counts, no pattern is known, the build is no evidence, or nothing
    says which layers were chosen.
    """
    if gates == Gates():
        return ()
    if report.stale:
        return report.stale
    least = gates.min_eligible
    if least is None and gates.min_chosen is None and not gates.no_broken:
        least = 1.0
    counted = _counted(report, gates)
    if report.not_evidence is not None and (least is not None or gates.min_chosen is not None):
        raise BadInputError(
            f"no engine to check the gates on: {report.not_evidence}",
            hint="give the log of a finished build of this model, or none",
        )
    lines = []
    if least is not None:
        lines += _short(VerdictName.ELIGIBLE, counted, least)
    if gates.min_chosen is not None:
        _refuse_unseen(counted, gates.min_chosen)
        lines += _short(VerdictName.CHOSEN, counted, gates.min_chosen)
    if gates.no_broken:
        lines += _broken(counted)
    return tuple(dict.fromkeys(lines))


@frozen
class _Counted:
    """What counts for the gates."""

    pruned: list[Verdict]
    """Layers in the engine whose weight was to be pruned."""
    reached: list[Verdict]
    """Those, and layers whose weight the model's own code multiplies by."""
    beside: list[NotCovered]
    """Weights that no row names; each node of them counts as a layer that is not good."""
    allowed: tuple[ReasonCode, ...]

    def is_allowed(self, verdict: Verdict) -> bool:
        """Whether the layer may miss a gate."""
        return has_code(verdict.reasons, *self.allowed)


def _counted(report: EligibilityReport, gates: Gates) -> _Counted:
    pruned = []
    by_hand = []
    for verdict in report.verdicts:
        if verdict.verdict is VerdictName.NOT_IN_ENGINE:
            continue
        if verdict.required is not False:
            pruned.append(verdict)
        elif has_code(verdict.reasons, ReasonCode.NOT_A_LAYER):
            by_hand.append(verdict)
    beside = [group for group in report.not_covered if group.multiplies]
    if ReasonCode.UNSUPPORTED_OP in gates.allow_reasons:
        beside = []
    return _Counted(
        pruned=pruned, reached=pruned + by_hand, beside=beside, allowed=gates.allow_reasons
    )


def _refuse_nothing(counted: Sequence[object]) -> None:
    if not counted:
        raise BadInputError(
            "no layer counts for the gates",
            hint="layers left dense on purpose, not in the engine, or with an allowed reason do "
            "not count",
        )


def _refuse_unseen(counted: _Counted, least: float) -> None:
    """Raise where layers of which no choice is known decide, or where nothing is measured."""
    chosen = 0
    unseen = 0
    total = 0
    for verdict in counted.pruned:
        if verdict.verdict is VerdictName.CHOSEN:
            chosen += 1
        elif counted.is_allowed(verdict):
            continue
        total += 1
        unseen += _is_unseen(verdict)
    measured = any(v.evidence is Evidence.MEASURED for v in counted.pruned)
    # 6 of 10 chosen and 2 unseen: a gate of 0.5 is met and one of 0.9 missed whatever those are,
    # but 0.7 depends on them
    if unseen and (not measured or chosen < least * total <= chosen + unseen):
        raise BadInputError(
            f"it is not known whether sparse kernels run in {count(unseen, 'layer')}",
            hint="give the verbose log of a finished build (--log) or layer information (--layers)",
        )


def _is_unseen(verdict: Verdict) -> bool:
    """Whether the layer may run sparse, and nothing shows whether it does."""
    if verdict.evidence is not Evidence.MEASURED:
        return verdict.verdict is not VerdictName.NOT_ELIGIBLE
    is_eligible = verdict.verdict is VerdictName.ELIGIBLE
    return is_eligible and has_code(verdict.reasons, ReasonCode.LOG_SILENT)


def _short(gate: VerdictName, counted: _Counted, least: float) -> list[str]:
    """The line on a gate that is missed and those on the layers at fault; [] where it is met."""
    # a chosen layer is eligible too, so it is good at either gate
    good = []
    bad = []
    for verdict in counted.reached:
        if verdict.verdict in (gate, VerdictName.CHOSEN):
            good.append(verdict)
        elif not counted.is_allowed(verdict):
            bad.append(verdict)
    _refuse_nothing((*good, *bad, *counted.beside))
    total = len(good) + len(bad) + sum(group.uses for group in counted.beside)
    if len(good) >= least * total:
        return []
    # rounded down: 0.8996 must not be shown as the 0.9 it misses
    share = 100 * len(good) // total / 100
    lines = [f"{len(good)} of {count(total, 'layer')} {gate.value}: {share:g}, gate {least:g}"]
    lines += [_line(v, v.reasons[0]) for v in bad]
    lines += [f"{line}{_EACH_COUNTS}" for line in not_covered_lines(counted.beside)]
    return lines


def _broken(counted: _Counted) -> list[str]:
    bad = []
    whole = []
    for verdict in counted.pruned:
        if verdict.pattern_holds is not False:
            whole.append(verdict)
        elif not counted.is_allowed(verdict):
            bad.append(verdict)
    _refuse_nothing(whole + bad)
    if all(v.pattern_holds is None for v in counted.pruned):
        raise BadInputError(
            "the pattern of no layer is known", hint="name the model too: --onnx model.onnx"
        )
    if not bad:
        return []
    total = count(_weights(whole + bad), "weight")
    lines = [f"pattern broken in {_weights(bad)} of {total}, gate 0"]
    return lines + [_line(v, _about_pattern(v)) for v in bad]


def _weights(verdicts: Sequence[Verdict]) -> int:
    return len({verdict.weight or verdict.layer for verdict in verdicts})


def _about_pattern(verdict: Verdict) -> Reason:
    """The reason that says how the pattern is broken, wherever it is; else the main one."""
    # an engine of another file runs the layer sparse: LOG_CONTRADICTS quotes what the rules said
    for code in (ReasonCode.PATTERN_BROKEN, ReasonCode.WRONG_AXIS, ReasonCode.LOG_CONTRADICTS):
        for reason in verdict.reasons:
            if reason.code is code:
                return reason
    return verdict.reasons[0]


def _line(verdict: Verdict, reason: Reason) -> str:
    return f"{verdict.layer}: {verdict.verdict.value}, {reason.code.value}: {reason.message}"

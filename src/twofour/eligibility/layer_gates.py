"""Gates on the layers of a report, for continuous integration: which layers miss them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twofour.eligibility.predict import contradicted, not_covered_lines
from twofour.eligibility.totals import LayerStatus, status_of
from twofour.errors import BadInputError
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.weights import NotCovered, Reason, ReasonCode
from twofour.words import count

_GOOD = {
    "eligible": frozenset({VerdictName.CHOSEN, VerdictName.ELIGIBLE}),
    "chosen": frozenset({VerdictName.CHOSEN}),
}
_EACH_COUNTS = (
    f"; each counts as a layer (--allow-reason {ReasonCode.UNSUPPORTED_OP.value} leaves them out)"
)
_COUNTS_TOO = (
    f"; it counts all the same (--allow-reason {ReasonCode.NOT_A_LAYER.value} leaves it out)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """A line for each gate that is missed, with the share reached, then one for each bad layer.

    Those have the layer's name, verdict and the reason that counts; () where all is met. A report
    that is stale meets none: the lines say why it is stale. Raises BadInputError for gates that
    cannot be checked: no layer counts, no pattern is known, the build is no evidence, or nothing
    says which layers were chosen.
    """
    if gates == Gates():
        return ()
    if report.stale:
        return report.stale
    least, allowed = gates.min_eligible, gates.allow_reasons
    if least is None and gates.min_chosen is None and not gates.no_broken:
        least = 1.0
    present = [v for v in report.verdicts if v.verdict is not VerdictName.NOT_IN_ENGINE]
    there = [v for v in present if v.required is not False]
    beside = [
        group
        for group in report.not_covered
        if group.multiplies and ReasonCode.UNSUPPORTED_OP not in allowed
    ]
    reached = [*there, *filter(_by_hand, present)]
    _refuse_nothing((*reached, *beside))
    of_engine = least is not None or gates.min_chosen is not None
    if of_engine and report.not_evidence is not None:
        raise BadInputError(
            f"no engine to check the gates on: {report.not_evidence}",
            hint="give the log of a finished build of this model, or none",
        )
    if gates.min_chosen is not None:
        _refuse_unseen(there, gates.min_chosen, allowed)
    if gates.no_broken and all(v.pattern_holds is None for v in there):
        raise BadInputError(
            "the pattern of no layer is known", hint="name the model too: --onnx model.onnx"
        )
    missed = [
        *_short("eligible", reached, beside, least, allowed),
        *_short("chosen", reached, beside, gates.min_chosen, allowed),
        *(_broken(there, allowed) if gates.no_broken else ()),
    ]
    lines = [headline for headline, _ in missed]
    return (*lines, *dict.fromkeys(line for _, offenders in missed for line in offenders))


def _by_hand(verdict: Verdict) -> bool:
    """Whether pruning did not reach the weight, as the model's own code multiplies by it."""
    is_there = verdict.verdict is not VerdictName.NOT_IN_ENGINE and verdict.required is False
    return is_there and any(r.code is ReasonCode.NOT_A_LAYER for r in verdict.reasons)


def _refuse_nothing(counted: Sequence[object]) -> None:
    if not counted:
        raise BadInputError(
            "no layer counts for the gates",
            hint="layers left dense on purpose, not in the engine, or with an allowed reason do "
            "not count",
        )


def _refuse_unseen(there: Sequence[Verdict], least: float, allowed: Sequence[ReasonCode]) -> None:
    """Raise where layers of which no choice is known decide, or where nothing is measured."""
    chosen, unseen, counted = 0, 0, 0
    for v in there:
        if v.verdict is not VerdictName.CHOSEN and _is_allowed(v, allowed):
            continue
        counted += 1
        chosen += v.verdict is VerdictName.CHOSEN
        if v.evidence is not Evidence.MEASURED:
            unseen += v.verdict is not VerdictName.NOT_ELIGIBLE
        elif v.verdict is VerdictName.ELIGIBLE:
            unseen += any(reason.code is ReasonCode.LOG_SILENT for reason in v.reasons)
    measured = any(v.evidence is Evidence.MEASURED for v in there)
    # 6 of 10 chosen and 2 unseen: a gate of 0.5 is met and one of 0.9 missed whatever those are,
    # but 0.7 depends on them
    if unseen and (not measured or chosen < least * counted <= chosen + unseen):
        raise BadInputError(
            f"it is not known whether sparse kernels run in {count(unseen, 'layer')}",
            hint="give the verbose log of a finished build (--log) or layer information (--layers)",
        )


def _short(
    gate: str,
    there: Sequence[Verdict],
    beside: Sequence[NotCovered],
    least: float | None,
    allowed: Sequence[ReasonCode],
) -> Iterator[tuple[str, list[str]]]:
    """The lines on a gate that is missed and on the layers at fault; nothing where it is met.

    Each node of `beside`, whose weights no row names, counts as a layer that is not good.
    """
    if least is None:
        return
    good = [v for v in there if v.verdict in _GOOD[gate]]
    bad = [v for v in there if v.verdict not in _GOOD[gate] and not _is_allowed(v, allowed)]
    total = len(good) + len(bad) + sum(group.uses for group in beside)
    _refuse_nothing((*good, *bad, *beside))
    if len(good) < least * total:
        # 0.8996 must not be shown as the 0.9 it misses
        share = f"{len(good) / total:.2g}"
        share = share if float(share) < least else f"{len(good) / total:.6g}"
        likely = sum(status_of(v) is LayerStatus.DOUBTFUL for v in good)
        doubt = f" ({likely} dense or likely dense)" if likely else ""
        headline = f"{len(good)} of {count(total, 'layer')} {gate}{doubt}: {share}, gate {least:g}"
        uncovered = (f"{line}{_EACH_COUNTS}" for line in not_covered_lines(beside))
        yield headline, [*(_line(v, v.reasons[0]) for v in bad), *uncovered]


def _broken(
    there: Sequence[Verdict], allowed: Sequence[ReasonCode]
) -> Iterator[tuple[str, list[str]]]:
    bad = [v for v in there if v.pattern_holds is False and not _is_allowed(v, allowed)]
    counted = [v for v in there if v.pattern_holds is not False or v in bad]
    _refuse_nothing(counted)
    if not bad:
        return
    weights, total = (len({v.weight or v.layer for v in rows}) for rows in (bad, counted))
    lines = []
    for v in bad:
        # the reason that says how the pattern is broken, wherever it is; else that it is
        codes = (ReasonCode.PATTERN_BROKEN, ReasonCode.WRONG_AXIS)
        about = next((r for code in codes for r in v.reasons if r.code is code), None)
        refuted = v.reasons[0] if v.refuted is None else contradicted(v.predicted, v.refuted)
        lines.append(_line(v, about or refuted))
    yield f"pattern broken in {weights} of {count(total, 'weight')}, gate 0", lines


def _is_allowed(verdict: Verdict, allowed: Sequence[ReasonCode]) -> bool:
    return any(reason.code in allowed for reason in verdict.reasons)


def _line(verdict: Verdict, reason: Reason) -> str:
    line = f"{verdict.layer}: {verdict.verdict.value}, {reason.code.value}: {reason.message}"
    return f"{line}{_COUNTS_TOO}" if _by_hand(verdict) else line

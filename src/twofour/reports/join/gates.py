"""Gates for continuous integration: which layers keep a report from passing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twofour.errors import BadInputError
from twofour.records import EligibilityReport, ReasonCode, Verdict, VerdictName
from twofour.reports.words import count

_GOOD = {
    "eligible": frozenset({VerdictName.CHOSEN, VerdictName.ELIGIBLE}),
    "chosen": frozenset({VerdictName.CHOSEN}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """What a report must meet; shares are of layers, from 0 to 1.

    Layers that are not in the engine do not count, nor do those whose main reason is allowed.
    With allowed reasons and no other gate, every layer left must be eligible or chosen.
    Raises BadInputError for a share outside of 0 to 1.
    """

    min_eligible: float | None = None
    min_chosen: float | None = None
    no_broken: bool = False
    """No weight may break the pattern."""
    allow_reasons: tuple[ReasonCode, ...] = ()

    def __post_init__(self) -> None:
        for name, share in (("eligible", self.min_eligible), ("chosen", self.min_chosen)):
            if share is not None and not 0 <= share <= 1:
                raise BadInputError(
                    f"--min-{name} {share:g} is no share", hint="give one from 0 to 1, such as 0.9"
                )


def check_gates(report: EligibilityReport, gates: Gates) -> tuple[str, ...]:
    """A line for each gate that is missed, with the share reached, then one for each bad layer.

    Those have the layer's name, verdict and main reason; () where all is met. Raises BadInputError
    for gates with nothing to hold to them: no layer that counts, or shares of a build that failed
    or is of another model.
    """
    if gates == Gates():
        return ()
    least = gates.min_eligible
    if least is None and gates.min_chosen is None and not gates.no_broken:
        least = 1.0
    counted = _countable(report, gates, of_engine=least is not None or gates.min_chosen is not None)
    broken = [v for v in counted if gates.no_broken and v.pattern_holds is False]
    missed = [*_short("eligible", counted, least), *_short("chosen", counted, gates.min_chosen)]
    if broken:
        headline = f"pattern broken in {len(broken)} of {count(len(counted), 'layer')}, gate 0"
        missed.append((headline, broken))
    lines = [headline for headline, _ in missed]
    return (*lines, *dict.fromkeys(_line(v) for _, layers in missed for v in layers))


def _countable(report: EligibilityReport, gates: Gates, *, of_engine: bool) -> list[Verdict]:
    if of_engine and report.not_evidence is not None:
        raise BadInputError(
            f"no engine to hold to the gates: {report.not_evidence}",
            hint="give the log of a finished build of this model, or none",
        )
    counted = [v for v in report.verdicts if _counts(v, gates.allow_reasons)]
    if not counted:
        raise BadInputError(
            "no layer to hold to the gates",
            hint="layers that are not in the engine or whose reason is allowed do not count",
        )
    return counted


def _counts(verdict: Verdict, allowed: Sequence[ReasonCode]) -> bool:
    is_there = verdict.verdict is not VerdictName.NOT_IN_ENGINE
    return is_there and verdict.reasons[0].code not in allowed


def _short(
    gate: str, counted: Sequence[Verdict], least: float | None
) -> Iterator[tuple[str, list[Verdict]]]:
    """What is said of a gate and the layers at fault, where the good ones are too few."""
    bad = [v for v in counted if v.verdict not in _GOOD[gate]]
    good = len(counted) - len(bad)
    if least is not None and good < least * len(counted):
        # 0.8996 must not be shown as the 0.9 it misses
        share = f"{good / len(counted):.2g}"
        share = share if float(share) < least else f"{good / len(counted):.6g}"
        yield f"{gate} {share} of {count(len(counted), 'layer')}, gate {least:g}", bad


def _line(verdict: Verdict) -> str:
    main = verdict.reasons[0]
    return f"{verdict.layer}: {verdict.verdict.value}, {main.code.value}: {main.message}"

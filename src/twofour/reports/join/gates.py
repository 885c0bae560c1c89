"""Gates for continuous integration: which layers keep a report from passing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from twofour.errors import BadInputError
from twofour.records import EligibilityReport, ReasonCode, Verdict, VerdictName

_ELIGIBLE = frozenset({VerdictName.CHOSEN, VerdictName.ELIGIBLE})
_CHOSEN = frozenset({VerdictName.CHOSEN})


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
    """A line for each offending layer: its name, verdict and main reason; () where all is met."""
    counted = [v for v in report.verdicts if _counts(v, gates.allow_reasons)]
    least = gates.min_eligible
    if least is None and gates.min_chosen is None and not gates.no_broken and gates.allow_reasons:
        least = 1.0
    offending = [
        *_short(counted, least, _ELIGIBLE),
        *_short(counted, gates.min_chosen, _CHOSEN),
        *(v for v in counted if gates.no_broken and v.pattern_holds is False),
    ]
    return tuple(dict.fromkeys(map(_line, offending)))


def _counts(verdict: Verdict, allowed: Sequence[ReasonCode]) -> bool:
    is_there = verdict.verdict is not VerdictName.NOT_IN_ENGINE
    return is_there and verdict.reasons[0].code not in allowed


def _short(
    counted: Sequence[Verdict], least: float | None, good: Iterable[VerdictName]
) -> Iterator[Verdict]:
    """The layers that are not good, where the good ones are fewer than asked for."""
    bad = [v for v in counted if v.verdict not in good]
    if least is not None and len(counted) - len(bad) < least * len(counted):
        yield from bad


def _line(verdict: Verdict) -> str:
    main = verdict.reasons[0]
    return f"{verdict.layer}: {verdict.verdict.value}, {main.code.value}: {main.message}"

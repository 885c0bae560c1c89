"""Sizes and outcomes in, the rule "C >= c0 and K >= k0" that agrees best with them out.

c0 and k0 are sizes that occur. What agrees best has the highest balanced accuracy, the mean of the
shares that are right among the chosen layers and among the others: where few are chosen, plain
accuracy would praise "never". "always" and "never" are candidates too, at 0.5. Among equals:
"always" and "never" before thresholds (of the two what has more layers right, then "never"), then
the smallest product c0 * k0, then the smallest c0.

No rule is fitted to fewer than FEWEST_LAYERS layers, nor to layers that all had the same outcome.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine_evidence_parts.records import Answer, Fit

FEWEST_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Sizes of one layer, and whether a sparse kernel was chosen for it."""

    in_channels: int
    out_channels: int
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    answer: Answer
    least: tuple[int, int] | None
    score: int
    """Balanced accuracy, times twice the number of chosen and of other layers: exact."""
    right: int


def fit(outcomes: Sequence[Outcome]) -> Fit:
    """The best rule, or in words why there is none."""
    number, chosen = len(outcomes), sum(o.chosen for o in outcomes)
    if number and chosen in (0, number):
        return _counted(outcomes, Answer.ALL_CHOSEN if chosen else Answer.NONE_CHOSEN)
    if number < FEWEST_LAYERS:
        return _counted(outcomes, Answer.TOO_FEW)
    candidates = _candidates(outcomes)
    best = min(candidates, key=_order)
    found = replace(
        _counted(outcomes, best.answer),
        right=best.right,
        wrong=number - best.right,
        balanced_accuracy=best.score / (2 * chosen * (number - chosen)),
    )
    if best.least is None:
        return found
    equal = [c.least for c in candidates if c.least is not None and c.score == best.score]
    return replace(
        found,
        least_in_channels=best.least[0],
        least_out_channels=best.least[1],
        equal_in_channels=(min(c for c, _ in equal), max(c for c, _ in equal)),
        equal_out_channels=(min(k for _, k in equal), max(k for _, k in equal)),
    )


def foretells(fitted: Fit, outcome: Outcome) -> bool | None:
    """Whether the fitted rule says that the layer is chosen; None where there is no rule."""
    if fitted.answer in (Answer.ALWAYS, Answer.NEVER):
        return fitted.answer is Answer.ALWAYS
    if fitted.least_in_channels is None or fitted.least_out_channels is None:
        return None
    return _reaches(outcome, (fitted.least_in_channels, fitted.least_out_channels))


def _reaches(outcome: Outcome, least: tuple[int, int]) -> bool:
    return outcome.in_channels >= least[0] and outcome.out_channels >= least[1]


def _counted(outcomes: Sequence[Outcome], answer: Answer) -> Fit:
    seen: dict[tuple[int, int], set[bool]] = defaultdict(set)
    for outcome in outcomes:
        seen[outcome.in_channels, outcome.out_channels].add(outcome.chosen)
    return Fit(
        answer=answer,
        least_in_channels=None,
        least_out_channels=None,
        layers=len(outcomes),
        chosen=sum(o.chosen for o in outcomes),
        sizes=len(seen),
        mixed_sizes=sum(len(both) > 1 for both in seen.values()),
    )


def _candidates(outcomes: Sequence[Outcome]) -> list[_Candidate]:
    widths = sorted({o.in_channels for o in outcomes})
    outs = sorted({o.out_channels for o in outcomes})
    constant = {answer: [answer is Answer.ALWAYS] * len(outcomes) for answer in _CONSTANTS}
    return [
        *(_scored(outcomes, said, answer, None) for answer, said in constant.items()),
        *(
            _scored(outcomes, [_reaches(o, (c, k)) for o in outcomes], Answer.THRESHOLDS, (c, k))
            for c in widths
            for k in outs
        ),
    ]


_CONSTANTS = (Answer.NEVER, Answer.ALWAYS)


def _scored(
    outcomes: Sequence[Outcome], said: list[bool], answer: Answer, least: tuple[int, int] | None
) -> _Candidate:
    pairs = list(zip(outcomes, said, strict=True))
    chosen = sum(o.chosen for o in outcomes)
    found = sum(o.chosen and s for o, s in pairs)
    spared = sum(not o.chosen and not s for o, s in pairs)
    others = len(outcomes) - chosen
    return _Candidate(
        answer=answer, least=least, score=found * others + spared * chosen, right=found + spared
    )


def _order(candidate: _Candidate) -> tuple[int, int, int, int]:
    """The smallest comes first; see the top of the module."""
    if candidate.least is None:
        return -candidate.score, 0, -candidate.right, _CONSTANTS.index(candidate.answer)
    width, out = candidate.least
    return -candidate.score, 1, width * out, width

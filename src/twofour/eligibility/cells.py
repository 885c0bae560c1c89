"""What a table's cells say about one verdict, in the same words for every format."""

from __future__ import annotations

from math import isfinite

from twofour.eligibility.predict import rules_were_wrong
from twofour.eligibility.reasons import against
from twofour.eligibility.rules import holds_trivially
from twofour.records.eligibility import Evidence, Verdict
from twofour.records.weights import HARDWARE_PATTERN
from twofour.words import axis_name, printable, tactic_times_words, times

NO_NAME = "(no name)"


def name_cell(name: str) -> str:
    """A name with its control characters as escapes; never empty."""
    return printable(name) or NO_NAME


TRIVIAL = "trivial"
"""Of a pattern that no weight of such a shape can break, so that it says nothing."""


def pattern_word(verdict: Verdict) -> str:
    """Whether the array is 2:4; "trivial" where it could not be else, "?" where nobody looked."""
    if verdict.pattern_holds and holds_trivially(verdict.shape, verdict.axis, HARDWARE_PATTERN):
        return TRIVIAL
    return {True: str(HARDWARE_PATTERN), False: "broken", None: "?"}[verdict.pattern_holds]


def surprise(verdict: Verdict) -> str | None:
    """What the rules had said, where the engine showed something else."""
    return f"rules said {verdict.predicted.value}" if rules_were_wrong(verdict) else None


def main_reason(verdict: Verdict) -> str:
    """The sentence of the main reason, without its code."""
    main = verdict.reasons[0]
    if not against((main,)) and verdict.evidence is not Evidence.MEASURED:
        return "nothing rules it out" if verdict.reasons[1:] else "nothing known against it"
    return printable(main.message)


def other_codes(verdict: Verdict) -> str:
    """Codes of the further reasons that say something against it: "also SMALL_CHANNELS"."""
    others = dict.fromkeys(r.code.value for r in against(verdict.reasons[1:]))
    return f"also {', '.join(others)}" if others else ""


def facts(verdict: Verdict) -> tuple[tuple[str, str], ...]:
    """Label and value of everything known about a layer that the table's columns do not say."""
    axis = verdict.axis
    return (
        *_known("node", verdict.node),
        *_known("weight", verdict.weight),
        ("stored shape", times(verdict.shape)),
        ("reduction axis", "none" if axis is None else f"{axis} ({axis_name(verdict, axis)})"),
        ("input channels C", f"{verdict.in_channels:,}"),
        ("output channels K", f"{verdict.out_channels:,}"),
        *((("kernel", times(verdict.kernel)),) if verdict.kernel else ()),
        ("groups", f"{verdict.groups:,}"),
        ("evidence", "none" if verdict.evidence is None else verdict.evidence.value),
        ("by the rules", verdict.predicted.value),
        *_known("engine layer", verdict.engine_layer),
        *_known("tactic times", times_words(verdict)),
    )


def times_words(verdict: Verdict) -> str | None:
    """Both tactic times and their ratio in words; None where one of them is not known."""
    both = tactic_times(verdict)
    return None if both is None else tactic_times_words(*both)


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

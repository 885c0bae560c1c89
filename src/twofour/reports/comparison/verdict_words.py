"""What may be claimed of a ratio: why it tells nothing, and which noise stands behind it."""

from __future__ import annotations

from collections.abc import Sequence

from twofour.records.latency import LatencyComparison, LatencyRatio, LatencyVerdict, Withheld
from twofour.reports.comparison.figures import span
from twofour.reports.comparison.naming import parse_variant_name
from twofour.reports.comparison.noise import floor_at, own_floor

NO_DIFFERENCE = LatencyVerdict.NO_DIFFERENCE.value
TOO_NOISY, TOO_FEW = "too noisy to tell", "too few rounds to tell"
TOO_BUSY, UNSTEADY = "machine too busy to tell", "too unsteady to tell"
NO_DIFFERENCE_WORDS = {
    NO_DIFFERENCE: "no difference between {} and {}",
    TOO_NOISY: "too noisy to tell {} from {}",
    TOO_FEW: "too few rounds to tell {} from {}",
    TOO_BUSY: "machine too busy to tell {} from {}",
    UNSTEADY: "too unsteady to tell {} from {}",
}
"""Reason of `why_no_difference` -> the sentence with both names."""
_TOO_NOISY = 0.1
"""Noise floor above which "no difference" would hide one that matters; a choice, not measured."""


def why_no_difference(comparison: LatencyComparison, ratio: LatencyRatio) -> str | None:
    """A key of NO_DIFFERENCE_WORDS; None where the verdict is faster or slower."""
    if ratio.withheld is not None:
        return TOO_BUSY if ratio.withheld is Withheld.BUSY else UNSTEADY
    if ratio.verdict is LatencyVerdict.UNDECIDED:
        return TOO_FEW
    if ratio.verdict is not LatencyVerdict.NO_DIFFERENCE:
        return None
    floor = own_noise(comparison, ratio)
    if floor is None:
        floor = floor_at(comparison.noise, comparison.baseline, ratio.batch)
    return TOO_NOISY if floor is not None and floor > _TOO_NOISY else NO_DIFFERENCE


def own_noise(comparison: LatencyComparison, ratio: LatencyRatio) -> float | None:
    """The larger floor of the engines and modes of both at the batch; None: not measured."""
    return own_floor(comparison.noise, ratio.variant, ratio.baseline, ratio.batch)


def noise_words(comparison: LatencyComparison, ratios: Sequence[LatencyRatio]) -> str:
    """Smallest to largest noise of these ratios, and whether any has none."""
    found = [own_noise(comparison, ratio) for ratio in ratios]
    floors = [floor for floor in found if floor is not None]
    if not floors:
        this = " of this engine" if all(map(_within_one_engine, ratios)) else ""
        return f"noise{this} not measured"
    missing = ", not measured for all" if len(floors) < len(found) else ""
    return f"noise {span(floors)}{missing}"


def _within_one_engine(ratio: LatencyRatio) -> bool:
    names = map(parse_variant_name, (ratio.variant, ratio.baseline))
    return len({name.engine_mode for name in names}) == 1

"""What a comparison found, in a few sentences: sparse against dense first, then the fastest."""

from __future__ import annotations

from collections.abc import Sequence

from twofour.latency_records import LatencyComparison, LatencyRatio, LatencyVerdict
from twofour.reports.comparison.figures import span, speed_up
from twofour.reports.comparison.naming import without_batch
from twofour.reports.comparison.parts import (
    batches,
    engine_word,
    over_baseline,
    same_engine,
    settings_of,
)
from twofour.reports.words import count, printable

_TOLD = (LatencyVerdict.FASTER, LatencyVerdict.SLOWER)
_Pair = tuple[str, str, str]
"""Weights of the variant, weights of the baseline, engine:mode of both."""


def answer_lines(comparison: LatencyComparison) -> tuple[str, ...]:
    """The answer, its first line the one that was asked for; what was not measured behind it.

    Sparse against dense (two weights in one engine that differ in nothing else) wherever both
    ran: engines with a difference one by one, the others together. Then the fastest of all.
    """
    pairs = _pairs(comparison)
    said = {(r.variant, r.baseline) for ratios in pairs.values() for r in ratios}
    lines = [*_told(comparison, pairs), *_alike(pairs), *_fastest(comparison, said)]
    if not lines:
        lines = [_nothing(comparison)]
    lines[0] += _noise(comparison)
    partial = comparison.partial
    return (*lines, *(() if partial is None else (f"PARTIAL: {printable(partial)}",)))


def _pairs(comparison: LatencyComparison) -> dict[_Pair, list[LatencyRatio]]:
    """Ratios of two weights in one engine that differ in nothing else, by batch."""
    pairs: dict[_Pair, list[LatencyRatio]] = {}
    for ratio in comparison.ratios:
        both = settings_of(comparison, ratio)
        if both is not None and ratio.only_sparsity and same_engine(*both):
            key = (both[0].weights, both[1].weights, engine_word(both[0]))
            pairs.setdefault(key, []).append(ratio)
    return pairs


def _told(comparison: LatencyComparison, pairs: dict[_Pair, list[LatencyRatio]]) -> tuple[str, ...]:
    sweep = len(batches(comparison)) > 1
    return tuple(
        printable(f"{pair[0]} {_verb(ratios, pair, sweep=sweep)}")
        for pair, ratios in pairs.items()
        if any(r.verdict in _TOLD for r in ratios)
    )


def _verb(ratios: Sequence[LatencyRatio], pair: _Pair, *, sweep: bool) -> str:
    _, baseline, engine = pair
    if not sweep:
        return f"is {speed_up(ratios[0], f' than {baseline} in {engine}')}"
    parts = (f"{_found(r)} at batch {r.batch}" for r in ratios)
    return f"against {baseline} in {engine}: {', '.join(parts)}"


def _found(ratio: LatencyRatio) -> str:
    return speed_up(ratio) if ratio.verdict in _TOLD else ratio.verdict.value


def _alike(pairs: dict[_Pair, list[LatencyRatio]]) -> tuple[str, ...]:
    """Engines in which no batch showed a difference, in one line for each verdict."""
    engines: dict[str, list[str]] = {}
    for (variant, baseline, engine), ratios in pairs.items():
        verdicts = {r.verdict for r in ratios}
        if LatencyVerdict.UNDECIDED in verdicts and verdicts.isdisjoint(_TOLD):
            engines.setdefault(f"too few rounds to tell {variant} from {baseline}", []).append(
                engine
            )
        elif verdicts.isdisjoint(_TOLD):
            engines.setdefault(f"no difference between {variant} and {baseline}", []).append(engine)
    return tuple(printable(f"{said} in {', '.join(found)}") for said, found in engines.items())


def _fastest(comparison: LatencyComparison, said: set[tuple[str, str]]) -> tuple[str, ...]:
    """At each batch with several ratios over the baseline, the lowest, unless it is `said`."""
    sweep = len(batches(comparison)) > 1
    lines = []
    for batch in batches(comparison):
        ratios = over_baseline(comparison, batch)
        best = min(ratios, key=lambda r: r.ratio, default=None)
        if best is None or len(ratios) == 1 or (best.variant, best.baseline) in said:
            continue
        all_of_them = count(len(ratios) + 1, "variant") + (f" at batch {batch}" if sweep else "")
        if best.verdict is LatencyVerdict.FASTER:
            name = without_batch(best.variant)
            found = f"{name}, {speed_up(best, f' than {comparison.baseline}')}"
            lines.append(printable(f"fastest of {all_of_them}: {found}"))
        else:
            lines.append(printable(f"none of {all_of_them} is faster than {comparison.baseline}"))
    return tuple(lines)


def _nothing(comparison: LatencyComparison) -> str:
    """What is said where there is neither a pair of weights nor a choice of variants."""
    if comparison.ratios:
        return "; ".join(_single(comparison, ratio) for ratio in comparison.ratios)
    twins = {n.again for n in comparison.noise}
    ran = [v.name for v in comparison.variants if v.samples_ms and v.name not in twins]
    if not ran:
        return "nothing was measured"
    return printable(f"nothing to compare: only {', '.join(ran)} ran")


def _single(comparison: LatencyComparison, ratio: LatencyRatio) -> str:
    """Two variants that differ in more than sparsity, or in nothing that is known."""
    name = without_batch(ratio.variant)
    at = "" if ratio.batch is None or len(comparison.ratios) == 1 else f" at batch {ratio.batch}"
    if ratio.verdict in _TOLD:
        return printable(f"{name} is {speed_up(ratio, f' than {comparison.baseline}')}{at}")
    return printable(f"{ratio.verdict.value}: {name} and {comparison.baseline}{at}")


def _noise(comparison: LatencyComparison) -> str:
    if not comparison.ratios:
        return ""
    floors = [n.floor for n in comparison.noise]
    return f"; noise {span(floors)}" if floors else "; noise not measured"

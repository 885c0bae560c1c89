"""What a comparison found, in a few sentences: sparse against dense first, then the fastest."""

from __future__ import annotations

from collections.abc import Sequence

from twofour.records.latency import LatencyComparison, LatencyRatio, LatencyVerdict
from twofour.reports.comparison.circumstances import busy_lines
from twofour.reports.comparison.figures import ratio_words, speed_up
from twofour.reports.comparison.naming import without_batch
from twofour.reports.comparison.parts import (
    batches,
    engine_word,
    over_baseline,
    same_engine,
    settings_of,
)
from twofour.reports.comparison.verdict_words import (
    NO_DIFFERENCE_WORDS,
    noise_words,
    own_noise,
    why_no_difference,
)
from twofour.reports.words import count, printable

_Pair = tuple[str, str, str]
"""Weights of the variant, weights of the baseline, engine:mode of both."""


def answer_lines(comparison: LatencyComparison) -> tuple[str, ...]:
    """The answer, its first line the one that was asked for; what was not measured behind it.

    Sparse against dense (two weights in one engine that differ in nothing else) wherever both
    ran: engines with a difference one by one, the others together. Then the fastest of all. Each
    says the noise of its engines; faster and slower are said only where that was measured.
    """
    pairs = _pairs(comparison)
    said = {(r.variant, r.baseline) for ratios in pairs.values() for r in ratios}
    lines = (
        *_differing_pairs(comparison, pairs),
        *_alike(comparison, pairs),
        *_fastest(comparison, said),
    )
    partial = comparison.partial
    first, *others = lines or (_nothing(comparison),)
    return (
        " ".join((*busy_lines(comparison), first)),
        *others,
        *(() if partial is None else (f"PARTIAL: {printable(partial)}",)),
    )


def _pairs(comparison: LatencyComparison) -> dict[_Pair, list[LatencyRatio]]:
    """Ratios of two weights in one engine that differ in nothing else, by batch."""
    pairs: dict[_Pair, list[LatencyRatio]] = {}
    for ratio in comparison.ratios:
        both = settings_of(comparison, ratio)
        if both is not None and ratio.only_sparsity and same_engine(*both):
            key = (both[0].weights, both[1].weights, engine_word(both[0]))
            pairs.setdefault(key, []).append(ratio)
    return pairs


def _differing_pairs(
    comparison: LatencyComparison, pairs: dict[_Pair, list[LatencyRatio]]
) -> tuple[str, ...]:
    """Pairs with a difference at some batch, or with several reasons why there is none."""
    sweep = len(batches(comparison)) > 1
    return tuple(
        printable(
            f"{_sentence(comparison, pair, ratios, sweep=sweep)}; {noise_words(comparison, ratios)}"
        )
        for pair, ratios in pairs.items()
        if _one_reason(comparison, ratios) is None
    )


def _sentence(
    comparison: LatencyComparison, pair: _Pair, ratios: Sequence[LatencyRatio], *, sweep: bool
) -> str:
    variant, baseline, engine = pair
    if sweep:
        parts = (f"{_found(comparison, r)} at batch {r.batch}" for r in ratios)
        return f"{variant} against {baseline} in {engine}: {', '.join(parts)}"
    if own_noise(comparison, ratios[0]) is None:
        return f"time of {variant} / {baseline} in {engine} is {ratio_words(ratios[0])}"
    return f"{variant} is {speed_up(ratios[0], f' than {baseline} in {engine}')}"


def _found(comparison: LatencyComparison, ratio: LatencyRatio) -> str:
    why_not = why_no_difference(comparison, ratio)
    if why_not is not None:
        return why_not
    if own_noise(comparison, ratio) is None:
        return f"time ratio {ratio_words(ratio)}"
    return speed_up(ratio)


def _one_reason(comparison: LatencyComparison, ratios: Sequence[LatencyRatio]) -> str | None:
    """Why no batch tells the two apart, where it is the same at all."""
    reasons = {why_no_difference(comparison, r) for r in ratios}
    return reasons.pop() if len(reasons) == 1 else None


def _alike(
    comparison: LatencyComparison, pairs: dict[_Pair, list[LatencyRatio]]
) -> tuple[str, ...]:
    """Engines in which no batch showed a difference, in one line for each reason."""
    engines: dict[str, list[str]] = {}
    for (variant, baseline, engine), ratios in pairs.items():
        reason = _one_reason(comparison, ratios)
        if reason is not None:
            said = NO_DIFFERENCE_WORDS[reason].format(variant, baseline)
            engines.setdefault(said, []).append(f"{engine} ({noise_words(comparison, ratios)})")
    return tuple(printable(f"{said} in {', '.join(found)}") for said, found in engines.items())


def _fastest(comparison: LatencyComparison, said: set[tuple[str, str]]) -> tuple[str, ...]:
    """At each batch with several ratios over the baseline, the best, unless it was `said`."""
    sweep = len(batches(comparison)) > 1
    lines = []
    for batch in batches(comparison):
        ratios = over_baseline(comparison, batch)
        faster = [r for r in ratios if r.verdict is LatencyVerdict.FASTER]
        best = min(faster or ratios, key=lambda r: r.ratio, default=None)
        if best is None or len(ratios) == 1 or (best.variant, best.baseline) in said:
            continue
        at = f" at batch {batch}" if sweep else ""
        if faster:
            words = _best(comparison, best, f"{count(len(ratios) + 1, 'variant')}{at}")
        else:
            words = _none(comparison, ratios, at)
        shown = (best,) if faster else ratios
        lines.append(printable(f"{words}; {noise_words(comparison, shown)}"))
    return tuple(lines)


def _best(comparison: LatencyComparison, best: LatencyRatio, all_of_them: str) -> str:
    name = without_batch(best.variant)
    if own_noise(comparison, best) is None:
        over = f"time / time of {comparison.baseline} is {ratio_words(best)}"
        return f"lowest of {all_of_them}: {name}, {over}"
    return f"fastest of {all_of_them}: {name}, {speed_up(best, f' than {comparison.baseline}')}"


def _none(comparison: LatencyComparison, ratios: Sequence[LatencyRatio], at: str) -> str:
    others = count(len(ratios), "variant") + at
    undecided = [r for r in ratios if r.verdict is LatencyVerdict.UNDECIDED]
    if undecided:
        why = why_no_difference(comparison, undecided[0])
        return f"{why} whether any of {others} is faster than {comparison.baseline}"
    return f"none of {others} was seen to be faster than {comparison.baseline}"


def _nothing(comparison: LatencyComparison) -> str:
    """What is said where there is neither a pair of weights nor a choice of variants."""
    ratios = comparison.ratios
    if ratios:
        found = "; ".join(_single(comparison, ratio) for ratio in ratios)
        return f"{found}; {noise_words(comparison, ratios)}"
    twins = {n.again for n in comparison.noise}
    ran = [v.name for v in comparison.variants if v.samples_ms and v.name not in twins]
    if not ran:
        return "nothing was measured"
    return printable(f"nothing to compare: only {', '.join(ran)} ran")


def _single(comparison: LatencyComparison, ratio: LatencyRatio) -> str:
    """Two variants that differ in more than sparsity, or in nothing that is known."""
    name, base = without_batch(ratio.variant), without_batch(ratio.baseline)
    at = "" if ratio.batch is None or len(comparison.ratios) == 1 else f" at batch {ratio.batch}"
    why_not = why_no_difference(comparison, ratio)
    if why_not is not None:
        return printable(f"{why_not}: {name} and {base}{at}")
    if own_noise(comparison, ratio) is None:
        return printable(f"time of {name} / {base} is {ratio_words(ratio)}{at}")
    return printable(f"{name} is {speed_up(ratio, f' than {base}')}{at}")

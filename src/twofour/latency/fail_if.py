"""--fail-if: a gate over ratios, and whether the samples decide it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import permutations

from twofour.errors import BadInputError
from twofour.latency.noise import Pair, floor_of, own_floor
from twofour.latency.ratios import Measurements, ratio_of
from twofour.logs.facts import finite_number
from twofour.records import frozen
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LatencyVerdict,
    Withheld,
    parse_variant_name,
    without_batch,
)
from twofour.words import per_cent, printable, ratio_words

_GATE = re.compile(r"(?P<first>.+?) / (?P<second>.+?) (?P<operator>[<>]=?) (?P<limit>\S+)")
_HINT = 'write it like "sparse / dense > 1.0"'


@frozen
class Gate:
    """One condition that fails a comparison."""

    text: str
    first: str
    second: str
    upward: bool
    """A ratio above the limit fails, else one below it."""
    limit: float


@frozen
class GateOutcome:
    """What a comparison says to its gates; () in both says that no failure was seen."""

    failed: tuple[str, ...] = ()
    """One line for each ratio that fails."""
    not_judged: tuple[str, ...] = ()
    """One line for each ratio of which nothing can be claimed (`LatencyRatio.withheld`)."""
    left_out: tuple[str, ...] = ()
    """One line for each gate that was judged without some of the ratios that it names."""


def parse_gate(text: str) -> Gate:
    """Read `A / B OP N`, OP one of > >= < <=.

    Raises BadInputError for anything else, and for a limit that no ratio can have.
    """
    match = _GATE.fullmatch(text.strip())
    limit = None if match is None else finite_number(match["limit"])
    if match is None or limit is None or limit <= 0:
        raise BadInputError(f"--fail-if: {text!r} is no condition", hint=_HINT)
    return Gate(
        text=text.strip(),
        first=match["first"],
        second=match["second"],
        upward=match["operator"].startswith(">"),
        limit=limit,
    )


def check_fail_if(comparison: LatencyComparison, texts: Iterable[str]) -> GateOutcome:
    """Hold every ratio that the gates name to them (docs/decisions/0004-compare.md).

    A and B are weights labels, which stand for every engine, mode and batch that has both, or names
    of variants, with or without the batch of a sweep. What has no times fails, except what cannot
    run here. Raises BadInputError for a gate that cannot be read or that names nothing.
    """
    measured = Measurements(
        variants=comparison.variants,
        baseline=comparison.baseline,
        seed=comparison.options.seed,
        noise=comparison.noise,
        loads=comparison.loads,
    )
    failed: list[str] = []
    not_judged: list[str] = []
    left_out: list[str] = []
    for gate in map(parse_gate, texts):
        pairs = named_pairs(comparison.variants, gate)
        can_run = [pair for pair in pairs if pair[0].can_run and pair[1].can_run]
        others = [f"{v.name} / {b.name}" for v, b in pairs if not (v.can_run and b.can_run)]
        if others:
            names = ", ".join(others)
            left_out.append(f"{gate.text}: left out, because it cannot run here: {names}")
        if not can_run:
            failed.append(f"{gate.text}: nothing was measured: {_why_not(pairs[0])}")
        for pair in can_run:
            lines = _judge(measured, gate, pair)
            failed += lines.failed
            not_judged += lines.not_judged
    return GateOutcome(
        failed=_lines(failed), not_judged=_lines(not_judged), left_out=_lines(left_out)
    )


def _lines(texts: Iterable[str]) -> tuple[str, ...]:
    """Each once, without what a terminal would take for a command."""
    return tuple(map(printable, dict.fromkeys(texts)))


def named_pairs(variants: Sequence[ComparedVariant], gate: Gate) -> list[Pair]:
    """The pairs that A and B mean; raises BadInputError where there are none."""
    # "sparse / dense" of a sweep over two batches: sparse:b1 / dense:b1 and sparse:b8 / dense:b8
    every = permutations(variants, 2)
    pairs = [(variant, base) for variant, base in every if _is_meant(variant, base, gate)]
    if not pairs:
        labels = dict.fromkeys(parse_variant_name(v.name).weights for v in variants)
        names = dict.fromkeys(without_batch(v.name) for v in variants)
        raise BadInputError(
            f"--fail-if: {gate.text!r} names no two variants that can be compared",
            hint=f"known are {', '.join((*labels, *names))}",
        )
    return pairs


def _is_meant(variant: ComparedVariant, baseline: ComparedVariant, gate: Gate) -> bool:
    """Whether the gate names both, by their weights in one engine and mode or by their names.

    "sparse / dense" is sparse@onnxruntime:cpu over dense@onnxruntime:cpu, never over
    dense@tensorrt:gpu. A variant that was never timed has no batch and is missing at each.
    """
    never = any(v.batch is None and not v.samples_ms for v in (variant, baseline))
    if variant.batch != baseline.batch and not never:
        return False
    first = {variant.name, without_batch(variant.name)}
    second = {baseline.name, without_batch(baseline.name)}
    if gate.first in first and gate.second in second:
        return True
    name = parse_variant_name(variant.name)
    base = parse_variant_name(baseline.name)
    labels = (name.weights, base.weights) == (gate.first, gate.second)
    return labels and name.engine_mode == base.engine_mode and not (name.again or base.again)


def _judge(measured: Measurements, gate: Gate, pair: Pair) -> GateOutcome:
    """The line of one ratio where the gate fails or cannot be judged; none where it holds."""
    variant, baseline = pair
    ratio = ratio_of(pair, measured, gate.limit)
    if ratio is None or variant.error is not None or baseline.error is not None:
        return GateOutcome(failed=(f"{gate.text}: not measured: {_why_not(pair)}",))
    line = f"{gate.text}: {variant.name} / {baseline.name} is {ratio_words(ratio)}"
    if ratio.verdict is (LatencyVerdict.SLOWER if gate.upward else LatencyVerdict.FASTER):
        return GateOutcome(failed=(line + _noise_words(measured, pair),))
    if ratio.verdict is not LatencyVerdict.UNDECIDED:
        return GateOutcome()
    is_beyond = (ratio.ratio > gate.limit) is gate.upward
    why = "too few rounds for an interval"
    if ratio.withheld is not None:
        if not is_beyond and ratio.withheld is not Withheld.BUSY:
            return GateOutcome()
        why = ratio.withheld.value
    return GateOutcome(not_judged=(f"{line}, not judged: {why}",))


def _noise_words(measured: Measurements, pair: Pair) -> str:
    variant, baseline = pair
    floor = floor_of(measured.noise, pair, measured.baseline)
    if floor is None:
        return ""
    own = own_floor(measured.noise, variant.name, baseline.name, variant.batch)
    whose = "noise" if own is not None else f"noise of {measured.baseline}"
    return f", {whose} {per_cent(floor)}"


def _why_not(pair: Pair) -> str:
    untimed = [v for v in pair if v.error is not None or not v.samples_ms]
    reasons = [f"{v.name}: {v.error or 'it has no times'}" for v in untimed]
    return "; ".join(reasons) or "no round has times of both"

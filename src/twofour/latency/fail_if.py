"""--fail-if: a gate over ratios, and whether the samples decide it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from twofour.errors import BadInputError
from twofour.latency.noise import floor_at, load_on, own_floor
from twofour.latency.ratios import ratio_of
from twofour.logs.facts import finite_number
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
_Pair: TypeAlias = tuple[ComparedVariant, ComparedVariant]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One condition that fails a comparison."""

    text: str
    first: str
    second: str
    upward: bool
    """A ratio above the limit fails, else one below it."""
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOutcome:
    """What a comparison says to its gates; () in both says that no failure was seen."""

    failed: tuple[str, ...]
    """One line for each ratio that fails."""
    not_judged: tuple[str, ...]
    """One line for each ratio of which nothing can be claimed (`LatencyRatio.withheld`)."""
    left_out: tuple[str, ...]
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
    failed: dict[str, None] = {}
    not_judged: dict[str, None] = {}
    left_out: list[str] = []
    for gate in map(parse_gate, texts):
        pairs = named_pairs(comparison.variants, gate)
        can_run = [pair for pair in pairs if all(v.can_run for v in pair)]
        if rest := [f"{v.name} / {b.name}" for v, b in pairs if (v, b) not in can_run]:
            left_out.append(f"{gate.text}: left out, because it cannot run here: {', '.join(rest)}")
        if not can_run:
            failed[f"{gate.text}: nothing was measured: {_why_not(pairs[0])}"] = None
        for found in (_judge(comparison, gate, pair) for pair in can_run):
            if found is not None:
                (failed if found[0] else not_judged)[found[1]] = None
    return GateOutcome(
        failed=tuple(map(printable, failed)),
        not_judged=tuple(map(printable, not_judged)),
        left_out=tuple(map(printable, left_out)),
    )


def named_pairs(variants: Sequence[ComparedVariant], gate: Gate) -> list[_Pair]:
    """The pairs that A and B mean; raises BadInputError where there are none."""
    pairs = [(v, b) for v in variants for b in variants if v is not b and _is_meant(v, b, gate)]
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
    if all(
        wanted in {v.name, without_batch(v.name)}
        for wanted, v in ((gate.first, variant), (gate.second, baseline))
    ):
        return True
    one, other = parse_variant_name(variant.name), parse_variant_name(baseline.name)
    labels = (one.weights, other.weights) == (gate.first, gate.second)
    return labels and one.engine_mode == other.engine_mode and not (one.again or other.again)


def _judge(comparison: LatencyComparison, gate: Gate, pair: _Pair) -> tuple[bool, str] | None:
    """Whether the gate fails, else cannot be judged, and the line that says so; None: it holds."""
    variant, baseline = pair
    own = own_floor(comparison.noise, variant.name, baseline.name, variant.batch)
    floor = floor_at(comparison.noise, comparison.baseline, variant.batch) if own is None else own
    ratio = ratio_of(
        pair,
        among=comparison.variants,
        seed=comparison.options.seed,
        floor=floor or 0.0,
        load=load_on(comparison.loads, *pair),
        limit=gate.limit,
    )
    if ratio is None or variant.error is not None or baseline.error is not None:
        return True, f"{gate.text}: not measured: {_why_not(pair)}"
    said = f"{gate.text}: {variant.name} / {baseline.name} is {ratio_words(ratio)}"
    if ratio.verdict is (LatencyVerdict.SLOWER if gate.upward else LatencyVerdict.FASTER):
        whose = "noise" if own is not None else f"noise of {comparison.baseline}"
        return True, said + ("" if floor is None else f", {whose} {per_cent(floor)}")
    if ratio.verdict is not LatencyVerdict.UNDECIDED:
        return None
    if ratio.withheld is None:
        return False, f"{said}, not judged: too few rounds for an interval"
    is_beyond = (ratio.ratio > gate.limit) is gate.upward
    if is_beyond or ratio.withheld is Withheld.BUSY:
        return False, f"{said}, not judged: {ratio.withheld.value}"
    return None


def _why_not(pair: _Pair) -> str:
    failed = [v for v in pair if v.error is not None or not v.samples_ms]
    reasons = (f"{v.name}: {v.error or 'it has no times'}" for v in failed)
    return "; ".join(reasons) or "no round has times of both"

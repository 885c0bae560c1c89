"""--fail-if: a gate over ratios, and whether the samples decide it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from twofour.errors import BadInputError
from twofour.latency.noise import floor_at, load_on, own_floor, widened
from twofour.latency.ratios import ratio_of
from twofour.latency.variants import engine_mode_of, parse_variant_name, without_batch
from twofour.logs.names import number
from twofour.records.latency import ComparedVariant, LatencyComparison, LatencyRatio, Withheld
from twofour.words import per_cent, printable, ratio_words

NOISE = "noise"
_EXPRESSION = re.compile(r"(?P<quantity>.*\S)\s*(?P<op>>=|<=|>|<)\s*(?P<limit>\S+)", re.DOTALL)
_HINT = 'write it like "sparse/dense > 1.0" or "noise > 0.05"'
_QUOTES = ("'", '"')


@dataclass(frozen=True, slots=True, kw_only=True)
class GateExpression:
    """One expression; which variants its quantity means is settled by the comparison."""

    text: str
    quantity: str
    """Before the operator: "noise", or two names with a slash between."""
    operator: str
    """One of > >= < <=."""
    limit: float

    @property
    def upward(self) -> bool:
        """Values above the limit fail."""
        return self.operator in (">", ">=")

    def holds_for(self, value: float) -> bool:
        """Whether `value OP limit` is true."""
        return self.beyond(value, self.limit)

    def beyond(self, value: float, limit: float) -> bool:
        """Whether `value OP limit` is true for another limit than its own."""
        if self.operator in (">=", "<=") and value == limit:
            return True
        return value > limit if self.upward else value < limit

    def splits(self) -> Iterator[tuple[str, str]]:
        """Every way to read the quantity as A / B, as names may hold slashes themselves."""
        for match in re.finditer("/", self.quantity):
            before, after = self.quantity[: match.start()], self.quantity[match.end() :]
            yield before.strip(), after.strip()


def parse_fail_if(text: str) -> GateExpression:
    """Read `A / B OP NUMBER` or `noise OP NUMBER`, OP one of > >= < <=.

    Raises BadInputError for anything else, and for a limit that no ratio or noise can have.
    """
    match = _EXPRESSION.fullmatch(text.strip())
    if match is None:
        raise BadInputError(f"--fail-if: {text!r} is no condition", hint=_HINT)
    quantity = match["quantity"].strip()
    if quantity != NOISE and "/" not in quantity:
        raise BadInputError(f"--fail-if: {quantity!r} is neither noise nor a ratio", hint=_HINT)
    limit = number(match["limit"])
    if limit is None or limit < 0 or (limit == 0 and quantity != NOISE):
        raise BadInputError(f"--fail-if: {match['limit']!r} is no limit for a ratio", hint=_HINT)
    return GateExpression(text=text, quantity=quantity, operator=match["op"], limit=limit)


def unquoted(name: str) -> str:
    """The name without the quotes around it."""
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in _QUOTES
    return name[1:-1] if quoted else name


_Pair: TypeAlias = tuple[ComparedVariant, ComparedVariant]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOutcome:
    """What a comparison says to its gates; () in both says that no failure was seen."""

    failed: tuple[str, ...]
    """One line for each ratio or noise that fails."""
    not_judged: tuple[str, ...]
    """One line for each ratio of which nothing can be claimed (`LatencyRatio.withheld`)."""


def check_fail_if(comparison: LatencyComparison, expressions: Iterable[str]) -> GateOutcome:
    """Hold every ratio and noise that the expressions name to them.

    A ratio fails when its whole interval lies beyond the limit by more than the noise floor of its
    engines (of a limit of 1: when the verdict is "slower" or "faster"), so that a large noise hides
    failures: a gate on the noise keeps it small. Without an interval it is not judged.
    Noise fails when the floor of any engine meets the condition, and where it was not measured.

    A and B are weights labels, which stand for every engine, mode and batch that has both, or names
    of variants, with or without the batch of a sweep. What has no times fails, except engines that
    did not run at all and were not asked for by name. A ratio is not judged where the machine was
    too busy, and where a failure is not in both halves of the rounds and with the twins too. Raises
    BadInputError for an expression that cannot be read or that names nothing.
    """
    gates = [parse_fail_if(text) for text in expressions]
    found = [line for gate in gates for line in _failing(comparison, gate)]
    failed, not_judged = (
        tuple(dict.fromkeys(printable(line.text) for line in found if line.judged is judged))
        for judged in (True, False)
    )
    return GateOutcome(failed=failed, not_judged=not_judged)


def check_names(variants: Sequence[ComparedVariant], expressions: Iterable[str]) -> None:
    """Raises BadInputError as `check_fail_if` does, from variants that need not have times yet."""
    for gate in map(parse_fail_if, expressions):
        if gate.quantity != NOISE:
            _pairs_meant(variants, gate)


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    judged: bool = True


def _failing(comparison: LatencyComparison, gate: GateExpression) -> Iterator[_Line]:
    if gate.quantity == NOISE:
        yield from map(_Line, _failing_noise(comparison, gate))
        return
    pairs = _pairs_meant(comparison.variants, gate)
    judged = [pair for pair in pairs if not _passed_over(comparison, pair)]
    if not judged:
        yield _Line(f"{gate.text}: nothing was measured: {_why_not(pairs[0])}")
    for variant, baseline in judged:
        yield from _failing_pair(comparison, gate, variant, baseline)


def _failing_noise(comparison: LatencyComparison, gate: GateExpression) -> Iterator[str]:
    known = {n.batch for n in comparison.noise if without_batch(n.variant) == comparison.baseline}
    batches = dict.fromkeys(v.batch for v in comparison.variants if v.samples_ms)
    if not known or any(batch not in known for batch in batches):
        yield f"{gate.text}: the noise was not measured{' at every batch' if known else ''}"
    for engine in dict.fromkeys(_engines_without_noise(comparison)):
        yield f"{gate.text}: the noise of {engine} was not measured"
    for noise in comparison.noise:
        if gate.holds_for(noise.floor):
            name = without_batch(noise.variant)
            of = "" if name == comparison.baseline else f" of {name}"
            at = "" if noise.batch is None else f" at batch {noise.batch}"
            yield f"{gate.text}: the noise{of} is {per_cent(noise.floor)}{at}"


def _engines_without_noise(comparison: LatencyComparison) -> Iterator[str]:
    """Other engines than the baseline's in which two weights were compared, but none twice."""
    for ratio in comparison.ratios:
        engine = engine_mode_of(ratio.baseline)
        if without_batch(ratio.baseline) == comparison.baseline:
            continue
        if own_floor(comparison.noise, ratio.variant, ratio.baseline, ratio.batch) is None:
            yield engine if ratio.batch is None else f"{engine} at batch {ratio.batch}"


def _failing_pair(
    comparison: LatencyComparison,
    gate: GateExpression,
    variant: ComparedVariant,
    baseline: ComparedVariant,
) -> Iterator[_Line]:
    own = own_floor(comparison.noise, variant.name, baseline.name, variant.batch)
    floor = own
    if own is None:
        floor = floor_at(comparison.noise, comparison.baseline, variant.batch)
    ratio = _ratio(comparison, variant, baseline, floor or 0.0)
    if ratio is None or variant.error is not None or baseline.error is not None:
        yield _Line(f"{gate.text}: not measured: {_why_not((variant, baseline))}")
        return
    said = f"{gate.text}: {variant.name} / {baseline.name} is {ratio_words(ratio)}"
    held_to = widened(floor or 0.0, load_on(comparison.loads, variant, baseline))
    why = _not_judged(gate, ratio, held_to)
    if why is not None:
        yield _Line(f"{said}, not judged: {why}", judged=False)
    elif _fails(gate, ratio, held_to):
        whose = "noise" if own is not None else f"noise of {comparison.baseline}"
        noise = "" if floor is None else f", {whose} {per_cent(floor)}"
        yield _Line(f"{said}{noise}")


def _fails(gate: GateExpression, ratio: LatencyRatio, floor: float) -> bool:
    """Whether the whole interval lies beyond the limit; without one it is not known to."""
    end = ratio.low if gate.upward else ratio.high
    return end is not None and _beyond(gate, end, floor)


def _not_judged(gate: GateExpression, ratio: LatencyRatio, floor: float) -> str | None:
    """Why the evidence does not decide the gate; None where it does."""
    if ratio.low is None or ratio.high is None:
        return "too few rounds for an interval"
    if ratio.withheld is Withheld.BUSY:
        return Withheld.BUSY.value
    if not _fails(gate, ratio, floor):
        return None
    if not all(_beyond(gate, value, floor) for value in ratio.half_ratios):
        return Withheld.HALVES.value
    if not all(_beyond(gate, value, 0.0) for value in ratio.twin_ratios):
        return Withheld.TWIN.value
    return None


def _beyond(gate: GateExpression, value: float, floor: float) -> bool:
    """Whether a ratio lies beyond the limit by more than the noise."""
    limit = gate.limit * (1 + floor) if gate.upward else gate.limit / (1 + floor)
    return gate.beyond(value, limit)


def _ratio(
    comparison: LatencyComparison,
    variant: ComparedVariant,
    baseline: ComparedVariant,
    floor: float,
) -> LatencyRatio | None:
    """The ratio that the comparison reports, or else the one that its samples give."""
    for ratio in comparison.ratios:
        if (ratio.variant, ratio.baseline) == (variant.name, baseline.name):
            return ratio
    return ratio_of(
        (variant, baseline),
        among=comparison.variants,
        seed=comparison.options.seed,
        floor=floor,
        load=load_on(comparison.loads, variant, baseline),
        paired=all(ratio.paired for ratio in comparison.ratios),
    )


def _passed_over(comparison: LatencyComparison, pair: _Pair) -> bool:
    ran = any(v.samples_ms for v in pair)
    return not ran and not comparison.options.engines


def _why_not(pair: _Pair) -> str:
    reasons = [
        f"{v.name}: {v.error or 'it has no times'}"
        for v in pair
        if v.error is not None or not v.samples_ms
    ]
    return "; ".join(reasons) or "no round has times of both"


def _pairs_meant(variants: Sequence[ComparedVariant], gate: GateExpression) -> list[_Pair]:
    """The pairs of the one reading of A / B that names something."""
    readings = {
        tuple((v.name, v.batch, b.name) for v, b in pairs): pairs
        for split in gate.splits()
        for names in (split, (unquoted(split[0]), unquoted(split[1])))
        for by_label in (True, False)
        if (pairs := _matched(variants, *names, by_label=by_label))
    }
    if len(readings) == 1:
        return next(iter(readings.values()))
    if readings:
        raise BadInputError(
            f"--fail-if: {gate.quantity!r} can be read in {len(readings)} ways",
            hint="give both names in full, as the table has them",
        )
    raise BadInputError(
        f"--fail-if: {gate.quantity!r} names no two variants that can be compared",
        hint=f"known are {_known(variants)}",
    )


def _matched(
    variants: Sequence[ComparedVariant], first: str, second: str, *, by_label: bool
) -> list[_Pair]:
    """The pairs that two weights labels mean, or two names of variants."""
    if first == second:
        return []
    answers = _answers_to_label if by_label else _answers_to_name
    return [
        (v, b)
        for v in variants
        if answers(v, first)
        for b in variants
        if answers(b, second)
        and v is not b
        and _same_batch(v, b)
        and (not by_label or engine_mode_of(v.name) == engine_mode_of(b.name))
    ]


def _same_batch(one: ComparedVariant, other: ComparedVariant) -> bool:
    """A variant that was never timed has no batch, and is missing at each."""
    never = any(v.batch is None and not v.samples_ms for v in (one, other))
    return one.batch == other.batch or never


def _answers_to_label(variant: ComparedVariant, label: str) -> bool:
    name = parse_variant_name(variant.name)
    return name.weights == label and not name.again


def _answers_to_name(variant: ComparedVariant, name: str) -> bool:
    return name in (variant.name, without_batch(variant.name))


def _known(variants: Sequence[ComparedVariant]) -> str:
    labels = dict.fromkeys(parse_variant_name(v.name).weights for v in variants)
    names = dict.fromkeys(without_batch(v.name) for v in variants)
    return ", ".join((*labels, *names))

"""Sums over the verdicts: layers, weights and time, by what becomes of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum
from itertools import chain, product
from types import MappingProxyType

from twofour.eligibility.predict import NOT_COVERED, count_weights
from twofour.eligibility.reasons import obstacles
from twofour.eligibility.remedies import has_code
from twofour.eligibility.sightings import Sightings, Timed
from twofour.records.eligibility import (
    ConfusionCell,
    Disagreement,
    EligibilityTotals,
    Evidence,
    GainCeiling,
    Share,
    ShareUnit,
    Verdict,
    VerdictName,
)
from twofour.records.export import GraphNode
from twofour.records.weights import NotCovered, ReasonCode
from twofour.words import count, listed, printable


class LayerStatus(str, Enum):
    """Titles of the summary, best first: the words of the rows, with eligible split in three."""

    RUNS = "chosen: runs sparse"
    GAINS = "eligible: likely gains"
    CAN = "eligible: can run sparse"
    """Whether it gains is not known."""
    DOUBTFUL = "eligible: gains nothing"
    """It runs dense or likely will."""
    CANNOT = "not-eligible: runs dense"
    ABSENT = "not-in-engine"
    UNKNOWN = "unknown"
    UNCOVERED = NOT_COVERED

    @property
    def slug(self) -> str:
        """One word for classes and keys, such as "doubtful"."""
        return self.name.lower()


STATUS_OF_VERDICT = {
    VerdictName.CHOSEN: LayerStatus.RUNS,
    VerdictName.ELIGIBLE: LayerStatus.CAN,
    VerdictName.NOT_ELIGIBLE: LayerStatus.CANNOT,
    VerdictName.NOT_IN_ENGINE: LayerStatus.ABSENT,
    VerdictName.UNKNOWN: LayerStatus.UNKNOWN,
}
"""The status where nothing more is known than the name of the verdict."""


_NOT_FORECAST: Mapping[str, float] = MappingProxyType({})


def status_of(verdict: Verdict, gains: Mapping[str, float] = _NOT_FORECAST) -> LayerStatus:
    """The status of a layer; an eligible one is doubtful if its main reason is an obstacle.

    `gains` are forecast, by layer. A build without sparse weights settles every layer of its
    engine, as an old GPU does.
    """
    if verdict.verdict is not VerdictName.ELIGIBLE:
        return STATUS_OF_VERDICT[verdict.verdict]
    if obstacles(verdict.reasons[:1]):
        return LayerStatus.DOUBTFUL
    gain = gains.get(verdict.layer)
    if gain is None:
        return LayerStatus.CAN
    return LayerStatus.GAINS if gain > 1 else LayerStatus.DOUBTFUL


def by_status(
    verdicts: Sequence[Verdict], gains: Mapping[str, float] = _NOT_FORECAST
) -> dict[LayerStatus, list[Verdict]]:
    """Layers of each status, the best status first; statuses of no layer are there too."""
    layers: dict[LayerStatus, list[Verdict]] = {status: [] for status in LayerStatus}
    for verdict in verdicts:
        layers[status_of(verdict, gains)].append(verdict)
    return layers


def counted_once(
    verdicts: Sequence[Verdict], gains: Mapping[str, float] = _NOT_FORECAST
) -> Callable[[Verdict], bool]:
    """Whether the weights of a layer count under its own status, not under a better one.

    An array that several layers share counts once, under the best that becomes of it.
    """
    # embed.weight of an eligible lm_head and of a layer that cannot run sparse: eligible
    best: dict[str, LayerStatus] = {}
    for status, layers in by_status(verdicts, gains).items():
        for verdict in layers:
            best.setdefault(verdict.weight or "", status)
    return lambda v: v.weight is None or best[v.weight] is status_of(v, gains)


def weights_by_status(
    verdicts: Sequence[Verdict], gains: Mapping[str, float] = _NOT_FORECAST
) -> dict[LayerStatus, int]:
    """Weights of each status, as `counted_once` counts them."""
    is_own = counted_once(verdicts, gains)
    layers = by_status(verdicts, gains)
    return {
        status: count_weights(filter(is_own, of_status)) for status, of_status in layers.items()
    }


SPARSE_SPEEDUP = 2.0
"""Speed of sparse tensor cores over dense ones in arithmetic (NVIDIA A100 whitepaper, 2:4)."""
_ASSUMPTION = (
    "every layer counted is bound by arithmetic and runs 2x as fast when sparse; "
    "real kernels gain less"
)
_SPARSE = "sparse engine"
_DENSE = "dense engine"


def count_totals(
    verdicts: Sequence[Verdict], seen: Sightings, beside: Sequence[NotCovered] = ()
) -> EligibilityTotals:
    """Confusion table, disagreements, shares by weights, multiply-adds and time, possible gains.

    `beside` is what no row names.
    """
    factors = [group for group in beside if group.multiplies]
    not_covered = float(sum(group.weights for group in factors))
    weights = _share(ShareUnit.WEIGHTS, weights_by_status(verdicts).items(), not_covered)
    products, products_notes = _shares_of_products(verdicts, seen, factors)
    times, ceilings, times_notes = _shares_of_time(verdicts, seen, _uncovered(seen, factors))
    notes = [
        f"none of the {count(rows, 'layer')} of the profile is in this model or engine"
        for rows in seen.unmatched_profiles
    ]
    disagreements = []
    for verdict in verdicts:
        if verdict.refuted is not None:
            disagreement = Disagreement(
                layer=verdict.layer,
                predicted=verdict.predicted,
                measured=verdict.verdict,
                message=verdict.reasons[0].message,
            )
            disagreements.append(disagreement)
    return EligibilityTotals(
        confusion=_confusion(verdicts),
        disagreements=tuple(disagreements),
        shares=tuple(share for share in (weights, *products, *times) if share.total),
        ceilings=tuple(ceilings),
        notes=(*products_notes, *notes, *times_notes),
    )


def _users(factors: Sequence[NotCovered]) -> dict[str, None]:
    """Labels of the nodes that multiply by weights which no row names, such as an LSTM's."""
    return dict.fromkeys(chain.from_iterable(group.users for group in factors))


def _shares_of_products(
    verdicts: Sequence[Verdict], seen: Sightings, factors: Sequence[NotCovered]
) -> tuple[list[Share], list[str]]:
    """Shares of the multiply-adds, and a note on the layers where they are not known.

    Where these are more than half, there are no shares: those of the others would mislead.
    """
    amounts: list[tuple[LayerStatus, float]] = []
    missing = []
    users = _users(factors)
    for verdict, row in zip(verdicts, seen.rows, strict=True):
        node = seen.nodes[row.node]
        users.pop(node.label, None)
        number = multiply_adds(verdict, node)
        if number is None:
            missing.append(verdict.layer)
        else:
            amounts.append((status_of(verdict), float(number)))
    layers = len(verdicts) + len(users)
    not_covered = 0.0
    of_label = {node.label: node.multiply_adds for node in seen.nodes}
    for user in users:
        number = of_label.get(user)
        if number is None:
            missing.append(user)
        else:
            not_covered += number
    shares = []
    if 2 * len(missing) <= layers:
        shares.append(_share(ShareUnit.MULTIPLY_ADDS, amounts, not_covered))
    if not missing:
        return shares, []
    note = (
        f"{uncounted(missing)}: onnx does not know their shapes or operators, or how often a loop "
        "runs. Export with fixed sizes and loops, or other operators"
    )
    return shares, [note]


def uncounted(layers: Sequence[str]) -> str:
    """Words for layers whose multiply-adds are not known: how many, and the first three."""
    named = listed([*map(printable, layers)])
    return f"multiply-adds are not counted in {count(len(layers), 'layer')} ({named})"


def _shares_of_time(
    verdicts: Sequence[Verdict], seen: Sightings, uncovered: Set[int]
) -> tuple[list[Share], list[GainCeiling], list[str]]:
    """Shares of the time of one engine, possible gains of both, and notes on what is missing."""
    shares: list[Share] = []
    ceilings: list[GainCeiling] = []
    notes: list[str] = []
    nodes = [row.node for row in seen.rows]
    statuses = dict(zip(nodes, map(status_of, verdicts), strict=True))
    expected = dict(zip(nodes, map(_expected, verdicts), strict=True))
    for engine, profile in ((_SPARSE, seen.profile), (_DENSE, seen.dense_profile)):
        share = _by_time(statuses, profile, uncovered)
        if not share.total:
            continue
        shares.append(share)
        ceiling = _ceiling(_by_time(expected, profile, uncovered), engine)
        timed = chain.from_iterable(row.nodes for row in profile)
        if any(expected.get(node) is LayerStatus.UNKNOWN for node in timed):
            notes.append(_unknown_gain(ceiling))
        else:
            ceilings.append(ceiling)
    return shares[:1], ceilings, notes


def _uncovered(seen: Sightings, factors: Sequence[NotCovered]) -> set[int]:
    """Indices of the nodes that multiply by weights which no row names."""
    users = _users(factors)
    nodes = {at for at, node in enumerate(seen.nodes) if node.label in users}
    return nodes.difference(row.node for row in seen.rows)


def _expected(verdict: Verdict) -> LayerStatus:
    """What a build that allows sparse weights may make of it, by the rules if need be."""
    if _is_switched_off(verdict):
        return STATUS_OF_VERDICT[verdict.predicted]
    return STATUS_OF_VERDICT[verdict.verdict]


def _unknown_gain(ceiling: GainCeiling) -> str:
    return (
        "the possible gain in the eligible layers is unknown, because it is not known which layers "
        f"are eligible: at most {ceiling.weighted_gain:.3f}x end to end if every layer with a "
        f"weight ran sparse ({ceiling.profile}; {ceiling.assumption})"
    )


def multiply_adds(verdict: Verdict, node: GraphNode) -> int | None:
    """Multiply-adds of a layer in one run, 0 for a layer that stores no weight; None: not known."""
    return 0 if verdict.weight is None else node.multiply_adds


def _confusion(verdicts: Iterable[Verdict]) -> tuple[ConfusionCell, ...]:
    measured = (v for v in verdicts if v.evidence is Evidence.MEASURED and not _is_switched_off(v))
    layers = Counter((v.predicted, v.verdict) for v in measured)
    cells = []
    for predicted, name in product(VerdictName, VerdictName):
        number = layers[predicted, name]
        if number:
            cells.append(ConfusionCell(predicted=predicted, measured=name, layers=number))
    return tuple(cells)


def _is_switched_off(verdict: Verdict) -> bool:
    return has_code(verdict.reasons, ReasonCode.SPARSITY_OFF)


def _by_time(
    statuses: Mapping[int, LayerStatus], profile: Sequence[Timed], uncovered: Set[int]
) -> Share:
    """Time of each engine layer under the status that all its nodes with a weight have in common.

    A layer that holds a node of `uncovered` and none with a row counts as not covered.
    """
    amounts: list[tuple[LayerStatus, float]] = []
    not_covered = 0.0
    for row in profile:
        there = {statuses[node] for node in row.nodes if node in statuses}
        if there:
            amounts.append((_common(there, row), row.ms))
        elif not uncovered.isdisjoint(row.nodes):
            not_covered += row.ms
        elif row.matched:
            amounts.append((LayerStatus.ABSENT, row.ms))
        else:
            amounts.append((LayerStatus.UNKNOWN, row.ms))
    return _share(ShareUnit.MILLISECONDS, amounts, not_covered)


def _common(statuses: set[LayerStatus], row: Timed) -> LayerStatus:
    """The one status of an engine layer that holds layers of the model with these."""
    # `conv1 + conv2` of 0.4 ms, one eligible and one doubtful, is doubtful; if one runs sparse and
    # one cannot, the 0.4 ms are those of neither
    if row.sparse is False and LayerStatus.RUNS in statuses:
        # beside the kernel of a layer that runs sparse, a dense one does something else
        statuses = statuses - {LayerStatus.RUNS} | {LayerStatus.ABSENT}
    if statuses == {LayerStatus.CAN, LayerStatus.DOUBTFUL}:
        return LayerStatus.DOUBTFUL
    if len(statuses) > 1:
        return LayerStatus.UNKNOWN
    return next(iter(statuses))


def _share(
    unit: ShareUnit, amounts: Iterable[tuple[LayerStatus, float]], not_covered: float = 0.0
) -> Share:
    parts: dict[LayerStatus, float] = defaultdict(float)
    for status, amount in amounts:
        parts[status] += amount
    return Share(
        unit=unit,
        total=sum(parts.values()) + not_covered,
        runs_sparse=parts[LayerStatus.RUNS],
        eligible=parts[LayerStatus.CAN] + parts[LayerStatus.DOUBTFUL],
        never=parts[LayerStatus.CANNOT],
        unknown=parts[LayerStatus.UNKNOWN],
        other=parts[LayerStatus.ABSENT],
        doubtful=parts[LayerStatus.DOUBTFUL],
        not_covered=not_covered,
    )


def _ceiling(share: Share, engine: str) -> GainCeiling:
    """The possible gain by Amdahl's law; in a dense engine layers that run sparse now count too."""
    # 10 ms, 4 of them in eligible layers: 10 / (10 - 4 / 2) = 1.25x
    eligible = share.eligible
    if engine == _DENSE:
        eligible += share.runs_sparse
    weighted = eligible + share.never + share.unknown + share.not_covered
    return GainCeiling(
        profile=engine,
        total_ms=share.total,
        eligible_ms=eligible,
        weighted_ms=weighted,
        eligible_gain=_gain(share.total, eligible),
        weighted_gain=_gain(share.total, weighted),
        assumption=_ASSUMPTION,
    )


def _gain(total: float, part: float) -> float:
    return total / (total - part * (1 - 1 / SPARSE_SPEEDUP))

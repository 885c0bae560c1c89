"""Sums over the verdicts: layers, weights and time, by what becomes of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum

from twofour.eligibility.predict import NOT_COVERED, count_not_covered, count_weights
from twofour.eligibility.reasons import obstacles
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
    """Titles of the summary, best first: the words of the rows, with eligible split in two."""

    RUNS = "chosen: runs sparse"
    CAN = "eligible: can run sparse"
    DOUBTFUL = "eligible: runs dense or likely will"
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


def status_of(verdict: Verdict) -> LayerStatus:
    """The status of a layer; an eligible one is doubtful if its main reason is an obstacle.

    A build without sparse weights settles every layer of its engine, as an old GPU does.
    """
    if verdict.verdict is not VerdictName.ELIGIBLE:
        return STATUS_OF_VERDICT[verdict.verdict]
    return LayerStatus.DOUBTFUL if obstacles(verdict.reasons[:1]) else LayerStatus.CAN


def by_status(verdicts: Sequence[Verdict]) -> dict[LayerStatus, list[Verdict]]:
    """Layers of each status, the best status first; statuses of no layer are there too."""
    found: dict[LayerStatus, list[Verdict]] = {status: [] for status in LayerStatus}
    for verdict in verdicts:
        found[status_of(verdict)].append(verdict)
    return found


def counted_once(verdicts: Sequence[Verdict]) -> Callable[[Verdict], bool]:
    """Whether the weights of a layer count under its own status, not under a better one.

    An array that several layers share counts once, under the best that becomes of it.
    """
    best: dict[str, LayerStatus] = {}
    for status, layers in by_status(verdicts).items():
        best = {v.weight: status for v in layers if v.weight is not None} | best
    return lambda v: v.weight is None or best[v.weight] is status_of(v)


def weights_by_status(verdicts: Sequence[Verdict]) -> dict[LayerStatus, int]:
    """Weights of each status, as `counted_once` counts them."""
    is_own = counted_once(verdicts)
    found = by_status(verdicts)
    return {status: count_weights(filter(is_own, layers)) for status, layers in found.items()}


SPARSE_SPEEDUP = 2.0
"""Speed of sparse tensor cores over dense ones in arithmetic (NVIDIA A100 whitepaper, 2:4)."""
_ASSUMPTION = (
    "every layer counted is bound by arithmetic and runs 2x as fast when sparse; "
    "real kernels gain less"
)
_SPARSE, _DENSE = "sparse engine", "dense engine"
_ELIGIBLE = frozenset({LayerStatus.CAN, LayerStatus.DOUBTFUL})


def count_totals(
    verdicts: Sequence[Verdict], seen: Sightings, beside: Sequence[NotCovered] = ()
) -> EligibilityTotals:
    """Confusion table, disagreements, shares by weights, multiply-adds and time, possible gains.

    `beside` is what no row names.
    """
    factors = [group for group in beside if group.multiplies]
    not_covered = float(count_not_covered(factors, multiplies=True))
    weights = _share(ShareUnit.WEIGHTS, weights_by_status(verdicts).items(), not_covered)
    shares = [weights] if weights.total else []
    products, notes = _of_products(verdicts, seen, factors)
    times, ceilings, of_time = _of_profiles(verdicts, seen, factors)
    return EligibilityTotals(
        confusion=_confusion(verdicts),
        disagreements=tuple(
            Disagreement(
                layer=v.layer,
                predicted=v.predicted,
                measured=v.verdict,
                message=v.reasons[0].message,
            )
            for v in verdicts
            if v.refuted is not None
        ),
        shares=(*shares, *products, *times),
        ceilings=tuple(ceilings),
        notes=(*notes, *of_time),
    )


def _of_products(
    verdicts: Sequence[Verdict], seen: Sightings, factors: Sequence[NotCovered]
) -> tuple[list[Share], list[str]]:
    """Shares of the multiply-adds, and a note on the layers where they are not known.

    Where these are more than half, there are no shares: those of the others would mislead.
    """
    rows = [
        (v.layer, status_of(v), multiply_adds(v, seen.nodes[row.node]))
        for v, row in zip(verdicts, seen.rows, strict=True)
    ]
    of_label = {node.label: node.multiply_adds for node in seen.nodes}
    of_rows = {seen.nodes[row.node].label for row in seen.rows}
    users = {u: of_label.get(u) for group in factors for u in group.users if u not in of_rows}
    missing = [layer for layer, _, number in rows if number is None]
    missing += [user for user, number in users.items() if number is None]
    known = [(status, float(number)) for _, status, number in rows if number is not None]
    share = _share(ShareUnit.MULTIPLY_ADDS, known, float(sum(filter(None, users.values()))))
    enough = share.total and 2 * len(missing) <= len(rows) + len(users)
    note = (
        f"{uncounted(missing)}: onnx does not know their shapes or operators, or how often a loop "
        "runs. Export with fixed sizes and loops, or other operators"
    )
    return [share] if enough else [], [note] if missing else []


def uncounted(layers: Sequence[str]) -> str:
    """Words for layers whose multiply-adds are not known: how many, and the first three."""
    named = listed([*map(printable, layers)])
    return f"multiply-adds are not counted in {count(len(layers), 'layer')} ({named})"


def _of_profiles(
    verdicts: Sequence[Verdict], seen: Sightings, factors: Sequence[NotCovered]
) -> tuple[list[Share], list[GainCeiling], list[str]]:
    """Shares of the time of one engine, possible gains of both, and notes on what is missing."""
    shares: list[Share] = []
    ceilings: list[GainCeiling] = []
    notes = [
        f"none of the {count(rows, 'layer')} of the profile is in this model or engine"
        for rows in seen.unmatched_profiles
    ]
    of_node = [(row.node, v) for v, row in zip(verdicts, seen.rows, strict=True)]
    statuses = {node: status_of(v) for node, v in of_node}
    # what a build that allows sparse weights may make of it, by the rules if need be
    expected = {
        node: STATUS_OF_VERDICT[v.predicted if _is_switched_off(v) else v.verdict]
        for node, v in of_node
    }
    users = {user for group in factors for user in group.users}
    uncovered = {node for node, n in enumerate(seen.nodes) if n.label in users} - statuses.keys()
    for engine, profile in ((_SPARSE, seen.profile), (_DENSE, seen.dense_profile)):
        share = _by_time(statuses, profile, uncovered)
        if not share.total:
            if profile:
                what = f"the profile of the {engine} has no time above zero"
                notes.append(f"time per layer is unknown: {what}")
            continue
        shares = shares or [share]
        ceiling = _ceiling(_by_time(expected, profile, uncovered), engine, dense=engine == _DENSE)
        if LayerStatus.UNKNOWN in {expected.get(node) for row in profile for node in row.nodes}:
            notes.append(
                "the possible gain in the eligible layers is unknown, because it is not known "
                f"which layers are eligible: at most {ceiling.weighted_gain:.3f}x end to end if "
                f"every layer with a weight ran sparse ({ceiling.profile}; {ceiling.assumption})"
            )
        else:
            ceilings.append(ceiling)
    return shares, ceilings, notes


def multiply_adds(verdict: Verdict, node: GraphNode) -> int | None:
    """Multiply-adds of a layer in one run, 0 for a layer that stores no weight; None: not known."""
    return 0 if verdict.weight is None else node.multiply_adds


def _confusion(verdicts: Iterable[Verdict]) -> tuple[ConfusionCell, ...]:
    measured = (v for v in verdicts if v.evidence is Evidence.MEASURED and not _is_switched_off(v))
    cells = Counter((v.predicted, v.verdict) for v in measured)
    best_first = tuple(VerdictName)
    order = sorted(cells, key=lambda cell: tuple(map(best_first.index, cell)))
    return tuple(
        ConfusionCell(predicted=said, measured=found, layers=cells[said, found])
        for said, found in order
    )


def _is_switched_off(verdict: Verdict) -> bool:
    return any(reason.code is ReasonCode.SPARSITY_OFF for reason in verdict.reasons)


def _by_time(
    statuses: Mapping[int, LayerStatus], profile: Sequence[Timed], uncovered: Set[int]
) -> Share:
    """Time of each engine layer under the status that all its nodes with a weight have in common.

    A layer that holds a node of `uncovered` and none with a row counts as not covered.
    """
    amounts: list[tuple[LayerStatus, float]] = []
    not_covered = 0.0
    for row in profile:
        # beside the kernel of a layer that runs sparse, a dense one does something else
        there = {
            LayerStatus.ABSENT if status is LayerStatus.RUNS and row.sparse is False else status
            for status in (statuses[node] for node in row.nodes if node in statuses)
        }
        if not there and not uncovered.isdisjoint(row.nodes):
            not_covered += row.ms
            continue
        if not there:
            status = LayerStatus.ABSENT if row.matched else LayerStatus.UNKNOWN
        elif there <= _ELIGIBLE:
            status = LayerStatus.DOUBTFUL if LayerStatus.DOUBTFUL in there else LayerStatus.CAN
        else:  # the time of layers of several statuses is that of none
            status = next(iter(there)) if len(there) == 1 else LayerStatus.UNKNOWN
        amounts.append((status, row.ms))
    return _share(ShareUnit.MILLISECONDS, amounts, not_covered)


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


def _ceiling(share: Share, engine: str, *, dense: bool) -> GainCeiling:
    """The possible gain by Amdahl's law; in a dense engine layers that run sparse now count too."""
    eligible = share.eligible + (share.runs_sparse if dense else 0.0)
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
    left = total - part * (1 - 1 / SPARSE_SPEEDUP)
    return total / left if left > 0 else 1.0

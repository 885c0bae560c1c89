"""Sums over the verdicts: layers, weights and time, by what becomes of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum
from math import prod

from twofour.eligibility.predict import NOT_COVERED, count_not_covered, count_weights, uses_of
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
from twofour.words import count


class LayerStatus(str, Enum):
    """Titles of the summary, best first: the verdict, with eligible told in two."""

    RUNS = "runs sparse"
    CAN = "can run sparse"
    DOUBTFUL = "eligible, dense or doubtful"
    CANNOT = "cannot run sparse"
    ABSENT = "not in the engine"
    UNKNOWN = "not known"
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
"""Where nothing more is known than the name of the verdict."""


def status_of(verdict: Verdict) -> LayerStatus:
    """An eligible layer is doubtful, or dense, where its main reason speaks against sparse kernels.

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
    of = counted_once(verdicts)
    return {
        status: count_weights(filter(of, found)) for status, found in by_status(verdicts).items()
    }


SPARSE_SPEEDUP = 2.0
"""Of the arithmetic of sparse tensor cores over dense ones (NVIDIA A100 whitepaper, 2:4)."""
_ASSUMPTION = (
    "every layer counted is bound by arithmetic and runs 2x as fast when sparse; "
    "real kernels gain less"
)
_SPARSE, _DENSE = "sparse engine", "dense engine"
_ELIGIBLE = frozenset({LayerStatus.CAN, LayerStatus.DOUBTFUL})
_BEST_FIRST = tuple(VerdictName)


def count_totals(
    verdicts: Sequence[Verdict], seen: Sightings, beside: Sequence[NotCovered] = ()
) -> EligibilityTotals:
    """Confusion, disagreements, shares by weights, multiply-adds and time, and the ceilings.

    `beside` is what no row names. How often its weights are multiplied is not known, so with
    factors among it there are no shares of multiply-adds.
    """
    factors = [group for group in beside if group.multiplies]
    amounts = ((status, float(n)) for status, n in weights_by_status(verdicts).items())
    not_covered = float(count_not_covered(factors, multiplies=True))
    weights = _share(ShareUnit.WEIGHTS, amounts, not_covered)
    shares = [weights] if weights.total else []
    products, missing = _by_products(verdicts, seen)
    notes = []
    if factors:
        notes.append(f"no shares of multiply-adds: those in {uses_of(factors)} are not known")
    elif missing:
        unknown = count(missing, "layer")
        notes.append(f"no shares of multiply-adds: {unknown} without a declared output shape")
    elif products.total:
        shares.append(products)
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
        shares=(*shares, *times),
        ceilings=tuple(ceilings),
        notes=(*notes, *of_time),
    )


def _of_profiles(
    verdicts: Sequence[Verdict], seen: Sightings, factors: Sequence[NotCovered]
) -> tuple[list[Share], list[GainCeiling], list[str]]:
    """Shares of the time of one engine, the ceilings of both, and why one is missing."""
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
        node: STATUS_OF_VERDICT[v.predicted if _switched_off(v) else v.verdict]
        for node, v in of_node
    }
    users = {user for group in factors for user in group.users}
    uncovered = {node for node, n in enumerate(seen.nodes) if n.label in users} - statuses.keys()
    for engine, profile in ((_SPARSE, seen.profile), (_DENSE, seen.dense_profile)):
        share = _by_time(statuses, profile, uncovered)
        if profile and not share.total:
            notes.append(f"no shares of time: the profile of the {engine} has no time above zero")
        if not share.total:
            continue
        if not shares:
            shares.append(share)
        ceiling = _ceiling(_by_time(expected, profile, uncovered), engine, dense=engine == _DENSE)
        there = {expected.get(node) for row in profile for node in row.nodes}
        if LayerStatus.UNKNOWN in there:
            notes.append(
                "what sparse math could gain end to end in the eligible layers is not known, as it "
                f"is not known which are eligible: at most {ceiling.weighted_gain:.3f}x if every "
                f"layer with a weight ran sparse ({ceiling.profile}; {ceiling.assumption})"
            )
        else:
            ceilings.append(ceiling)
    if not seen.profile and not seen.dense_profile and not seen.unmatched_profiles:
        notes.append("no shares of time and no ceiling of the gain: there is no profile")
    return shares, ceilings, notes


def multiply_adds(verdict: Verdict, node: GraphNode) -> int | None:
    """Of one run with the declared shapes; a first dimension that is no number counts as 1.

    A convolution: output elements x input channels of a group x kernel. A transposed one uses each
    input element for that many outputs, so it is left out (None), like a shape that is not known.
    """
    if verdict.weight is None:
        return 0
    shape = node.output_shape
    if shape is None or not shape or verdict.op == "ConvTranspose":
        return None
    first, *rest = shape
    if any(dim is None for dim in rest):
        return None
    elements = prod(dim for dim in (first or 1, *rest) if dim is not None)
    return elements * (verdict.in_channels // verdict.groups) * prod(verdict.kernel)


def _confusion(verdicts: Iterable[Verdict]) -> tuple[ConfusionCell, ...]:
    told = (v for v in verdicts if v.evidence is Evidence.MEASURED and not _switched_off(v))
    cells = Counter((v.predicted, v.verdict) for v in told)
    order = sorted(cells, key=lambda cell: tuple(map(_BEST_FIRST.index, cell)))
    return tuple(
        ConfusionCell(predicted=said, measured=found, layers=cells[said, found])
        for said, found in order
    )


def _switched_off(verdict: Verdict) -> bool:
    return any(reason.code is ReasonCode.SPARSITY_OFF for reason in verdict.reasons)


def _by_products(verdicts: Sequence[Verdict], seen: Sightings) -> tuple[Share, int]:
    """The share, and how many layers have no known number of multiply-adds."""
    amounts = [
        (status_of(v), multiply_adds(v, seen.nodes[row.node]))
        for v, row in zip(verdicts, seen.rows, strict=True)
    ]
    known = ((name, float(n)) for name, n in amounts if n is not None)
    missing = sum(n is None for _, n in amounts)
    return _share(ShareUnit.MULTIPLY_ADDS, known), missing


def _by_time(
    statuses: Mapping[int, LayerStatus], profile: Sequence[Timed], uncovered: Set[int]
) -> Share:
    """Time of each engine layer under the status that all its nodes with a weight have in common.

    A layer that holds a node of `uncovered` and none with a row counts as not covered.
    """
    amounts: list[tuple[LayerStatus, float]] = []
    not_covered = 0.0
    for row in profile:
        names = {_status_there(statuses[node], row) for node in row.nodes if node in statuses}
        if not names and not uncovered.isdisjoint(row.nodes):
            not_covered += row.ms
        elif not names:
            amounts.append((LayerStatus.ABSENT if row.matched else LayerStatus.UNKNOWN, row.ms))
        else:
            amounts.append((_common(names), row.ms))
    return _share(ShareUnit.MILLISECONDS, amounts, not_covered)


def _common(statuses: Set[LayerStatus]) -> LayerStatus:
    """Of layers in one engine layer, whose time cannot be told apart."""
    if statuses <= _ELIGIBLE:
        return LayerStatus.DOUBTFUL if LayerStatus.DOUBTFUL in statuses else LayerStatus.CAN
    return next(iter(statuses)) if len(statuses) == 1 else LayerStatus.UNKNOWN


def _status_there(status: LayerStatus, row: Timed) -> LayerStatus:
    """Of a layer that runs sparse, a dense kernel does something else than the product."""
    beside = status is LayerStatus.RUNS and row.sparse is False
    return LayerStatus.ABSENT if beside else status


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


def _ceiling(share: Share, words: str, *, dense: bool) -> GainCeiling:
    """Amdahl's law; in a dense engine the layers that now run sparse still have all to gain."""
    eligible = share.eligible + (share.runs_sparse if dense else 0.0)
    weighted = eligible + share.never + share.unknown + share.not_covered
    return GainCeiling(
        profile=words,
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

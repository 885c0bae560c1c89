"""What layers took in the engines of the user's runs, kept in a table that forecasts read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.sightings import Timed, find_sightings
from twofour.errors import system_errors
from twofour.forecasting.kernels import learned_file, read_products
from twofour.records.eligibility import EligibilityReport, VerdictName
from twofour.records.forecast import ProductTimes
from twofour.store import write_text

_HEADER = """\
# Times of layers in TensorRT engines of your runs, by `twofour forecast --learn`: the medians of a
# run's layers of one size, of the last run that has it. Forecasts for the GPU stand on them.
gpu,precision,rows,outputs,reduction,dense_us,sparse_us
"""


def learn(
    report: EligibilityReport,
    evidence: BuildEvidence,
    forecast: Mapping[str | None, tuple[ProductTimes, int]],
) -> tuple[int, dict[str, list[str]]]:
    """Write the times of one run's layers into the table, in the place of older ones.

    Gives the number of these layers, and the others by the reason why they are left out.
    """
    seen = find_sightings(report, evidence)
    layers = frozenset(sighting.node for sighting in seen.rows)
    dense, sparse = (_alone(t, layers) for t in (seen.dense_profile, seen.profile))
    found: dict[tuple[object, ...], list[tuple[float, ...]]] = defaultdict(list)
    left_out = defaultdict(list)
    for verdict, sighting in zip(report.verdicts, seen.rows, strict=True):
        at, (times, products) = sighting.node, forecast.get(verdict.node, (None, 0))
        if verdict.verdict is not VerdictName.CHOSEN:
            left_out["no sparse kernel was chosen"].append(verdict.layer)
        elif at not in dense or at not in sparse:
            left_out["no row of both profiles is theirs alone"].append(verdict.layer)
        elif times is None or products > 1:
            left_out["no single product in a type that forecasts know"].append(verdict.layer)
        else:
            size = (times.gpu, times.precision, times.rows, times.outputs, times.reduction)
            found[size].append((dense[at], sparse[at]))
    _write(found)
    return sum(map(len, found.values())), left_out


def _alone(profile: Sequence[Timed], layers: frozenset[int]) -> dict[int, float]:
    """Microseconds of each layer that has one row of the profile, alone."""
    rows = [(layers.intersection(row.nodes), 1e3 * row.ms) for row in profile if row.ms > 0]
    times = Counter(chain.from_iterable(nodes for nodes, _ in rows))
    return {node: us for nodes, us in rows for node in nodes if len(nodes) == times[node] == 1}


def _write(found: Mapping[tuple[object, ...], Sequence[tuple[float, ...]]]) -> None:
    before = {
        (*place, *map(int, row[:3])): (row[3:],)
        for place, rows in read_products(learned_file()).items()
        for row in rows
    }
    lines = (
        ",".join((*map(str, size), *(f"{median(column):.3f}" for column in zip(*us, strict=True))))
        for size, us in {**before, **found}.items()
    )
    with system_errors(f"cannot write {learned_file()}"):
        learned_file().parent.mkdir(parents=True, exist_ok=True)
    write_text(learned_file(), _HEADER + "".join(f"{line}\n" for line in lines))

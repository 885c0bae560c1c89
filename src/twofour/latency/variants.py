"""Variants of a comparison: names such as `weights@engine:mode again:b8`, and their figures."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from twofour.errors import BadInputError
from twofour.records.latency import ComparedVariant

_WORD = r"[^@:\s]+"
_NAME = re.compile(
    rf"(?P<weights>.*)@(?P<engine>{_WORD}):(?P<mode>{_WORD})"
    r"(?P<again> again)?(?::b(?P<batch>\d+))?",
    re.DOTALL,
)
_BATCH = re.compile(r":b\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantName:
    """What a variant's name says."""

    weights: str
    engine: str
    mode: str
    again: bool
    """The second opening of the variant, for the noise."""
    batch: int | None
    """Of a sweep; None where there is none."""

    @property
    def engine_mode(self) -> str:
        """engine:mode, as --engines takes it."""
        return f"{self.engine}:{self.mode}"


def variant_name(
    weights: str, engine: str, mode: str, *, again: bool = False, batch: int | None = None
) -> str:
    """`sparse@onnxruntime:cpu`, `dense@onnxruntime:cpu again`, `dense@onnxruntime:cpu again:b8`.

    `weights` may be any text; engine and mode are words without "@", ":" and white space, which is
    what makes the name readable from its end.
    """
    twin = " again" if again else ""
    sweep = "" if batch is None else f":b{batch}"
    return f"{weights}@{engine}:{mode}{twin}{sweep}"


def parse_variant_name(name: str) -> VariantName:
    """The inverse of `variant_name`; raises BadInputError for what is no variant's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise BadInputError(
            f"{name!r} is not the name of a variant", hint="one is like dense@onnxruntime:cpu"
        )
    return VariantName(
        weights=match["weights"],
        engine=match["engine"],
        mode=match["mode"],
        again=match["again"] is not None,
        batch=None if match["batch"] is None else int(match["batch"]),
    )


def engine_mode_of(name: str) -> str:
    """engine:mode of a variant's name."""
    return parse_variant_name(name).engine_mode


def without_batch(name: str) -> str:
    """The name as it is outside of a sweep, and as LatencyComparison.baseline has it."""
    parse_variant_name(name)
    return _BATCH.sub("", name)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` % of all samples do not exceed (nearest rank)."""
    rank = math.ceil(len(samples) * percent / 100)
    return sorted(samples)[max(rank, 1) - 1]


def with_samples(
    row: ComparedVariant, samples_ms: Sequence[float], runs_ms: Sequence[float] | None = None
) -> ComparedVariant:
    """The row with samples, their median (mean of the middle two), percentiles and throughput.

    Percentiles are of `runs_ms` where a sample is the median of several runs. Without samples the
    row is as it was.
    """
    runs = samples_ms if runs_ms is None else runs_ms
    if not samples_ms:
        return row
    median_ms = statistics.median(samples_ms)
    return replace(
        row,
        samples_ms=tuple(samples_ms),
        median_ms=median_ms,
        p90_ms=percentile(runs, 90) if runs else None,
        p99_ms=percentile(runs, 99) if runs else None,
        throughput=1e3 * (row.batch or 1) / median_ms if median_ms else None,
    )

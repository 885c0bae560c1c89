"""What is kept of a log: bytes over all, and a bounded number of tactics of every tuned layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from twofour.logs.names import finite_ms, is_sparse_kernel, normal_id
from twofour.records.log import Tactic, TunedLayer

KEPT_TACTICS = 512
"""Per layer; beyond it the slower half goes. Real layers time up to some 300."""
_DENSE_RUNNERS = (
    "Cublas", "Cuda", "Cudnn", "ElementWise", "FusedConvAct", "GemmDeconvolution", "LogSoftmax",
    "MatrixMultiply", "Plugin", "PointWise", "Reduce", "Reformat", "Shuffle", "SoftMax",
    "TiledPooling", "TopK",
)  # fmt: skip
"""Runners (by the start of their names) that print no kernel names and have no sparse kernels.

Sparse kernels belong to the CASK runners and to Myelin, whose one time for a whole region covers
many kernels, dense and sparse alike; of a runner unknown here nothing is known either.
"""

RECORD_BYTES = 260
"""What one kept fact costs besides its text, measured on CPython 3.11 with its record."""
TEXT_BYTES = 50
"""What a text costs besides its characters."""
KEPT_BYTES = 40 << 20
_RESERVED_PART = 3
"""One third is kept for what matters more than one more tactic of a layer."""


class Budget:
    """Bytes that all the builds of one reading may still keep."""

    __slots__ = ("_reserved", "left")

    def __init__(self, size_bytes: int = KEPT_BYTES) -> None:
        self.left = size_bytes
        self._reserved = size_bytes // _RESERVED_PART

    def take_text(self, length: int) -> bool:
        """The same for one more text of a fact that is kept already."""
        return self.take(length + TEXT_BYTES - RECORD_BYTES)

    def take(self, text_length: int) -> bool:
        """Whether there is room for one more fact of that length; if so, it is taken."""
        cost = text_length + RECORD_BYTES
        if cost > self.left:
            return False
        self.left -= cost
        return True

    def take_spare(self, text_length: int) -> bool:
        """The same for facts whose essence is kept in any case: they leave the reserve alone."""
        cost = text_length + RECORD_BYTES
        if self.left <= self._reserved or cost > self.left:
            return False
        self.left -= cost
        return True


class Timing:
    """One tactic's fastest time so far."""

    __slots__ = ("kernel", "line", "ms", "raw")

    def __init__(self, kernel: str | None, ms: float, line: int) -> None:
        self.kernel = kernel
        self.ms = ms
        self.line = line
        self.raw: str | None = None
        """The message, of the fastest so far of its kind."""


@dataclass(slots=True)
class Layer:
    """One layer (or one operation inside a Myelin region: `foreign_node`) while the log is read."""

    foreign_node: bool = False
    runner: str | None = None
    by_runner: dict[str | None, dict[str, Timing]] = field(default_factory=dict)
    kept: int = 0
    dropped: int = 0
    cached: int = 0
    pruned: int = 0
    fastest: dict[bool | None, Timing] = field(default_factory=dict)
    """By `is_sparse_kernel`: a report may quote the fastest sparse and the fastest dense one."""
    quoted_above: float = math.inf
    """No slower tactic is the fastest of its kind; inf until a sparse and a dense one are known."""
    best_dropped: dict[bool | None, tuple[str | None, str, Timing]] = field(default_factory=dict)
    """The fastest dense, sparse (True) and nameless (None) tactic among those without room."""

    def timed_by(self, runner: str | None) -> dict[str, Timing]:
        """The tactics of one runner, by the number as it is printed."""
        timed = self.by_runner.get(runner)
        if timed is None:
            timed = self.by_runner[runner] = {}
        return timed

    def drop(self, runner: str | None, tactic: str, timing: Timing) -> None:
        """Keep a tactic only where it is the fastest of its kind without room."""
        sparse = _known_sparse(is_sparse_kernel(timing.kernel), runner)
        known = self.best_dropped.get(sparse)
        if known is None or timing.ms < known[2].ms:
            self.best_dropped[sparse] = (runner, tactic, timing)
        self.dropped += known is not None

    def keep_fastest(self) -> None:
        """Give up the slower half of the tactics, but no sparse one that is its layer's best."""
        rows = sorted(
            (
                (t.ms, key, runner, t)
                for runner, timed in self.by_runner.items()
                for key, t in timed.items()
            ),
            key=lambda row: row[0],
        )
        kept = KEPT_TACTICS // 2
        for _, key, runner, timing in rows[kept:]:
            self.drop(runner, key, timing)
            del self.by_runner[runner][key]
        self.kept = kept

    def rows(self) -> Iterator[tuple[str | None, str, Timing]]:
        """Runner, number and timing of every kept tactic."""
        for runner, timed in self.by_runner.items():
            for key, timing in timed.items():
                yield runner, key, timing
            for place, key, timing in self.best_dropped.values():
                if place == runner and key not in timed:
                    yield runner, key, timing


def tactics_of(layer: Layer) -> tuple[Tactic, ...]:
    """The kept tactics, fastest first."""
    found = [
        Tactic(
            kernel=timing.kernel,
            id=normal_id(key),
            ms=finite_ms(timing.ms),
            sparse=is_sparse_kernel(timing.kernel),
            runner=runner,
            line=timing.line,
            raw=timing.raw,
        )
        for runner, key, timing in layer.rows()
    ]
    return tuple(sorted(found, key=lambda t: (t.ms is None, t.ms or 0.0, t.raw is None)))


def tuned_layer(name: str, layer: Layer) -> TunedLayer:
    """The record of one layer; whether it is eligible or chosen is not known here."""
    tactics = tactics_of(layer)
    timed = [t for t in tactics if t.ms is not None]
    sparse = [t.ms for t in timed if t.sparse and t.ms is not None]
    dense = [t.ms for t in timed if _known_sparse(t.sparse, t.runner) is False and t.ms is not None]
    return TunedLayer(
        name=name,
        runner=layer.runner,
        tactics=tactics,
        best_dense_ms=finite_ms(min(dense, default=math.inf)),
        best_sparse_ms=finite_ms(min(sparse, default=math.inf)),
        runners=tuple(runner for runner in layer.by_runner if runner is not None),
        foreign_node=layer.foreign_node,
        cached=layer.cached,
        pruned_tactics=layer.pruned,
        dropped_tactics=layer.dropped,
    )


def _known_sparse(by_kernel: bool | None, runner: str | None) -> bool | None:
    """What the kernel's name says; without one, False for a runner that has no sparse kernels."""
    if by_kernel is None and runner is not None and runner.startswith(_DENSE_RUNNERS):
        return False
    return by_kernel

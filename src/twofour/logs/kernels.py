"""Kernels that the builder timed: what their names say, and a bounded number for every layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from twofour.records.log import Tactic, TunedLayer

_SPARSE_KERNEL = re.compile(
    r"(?<![a-z])(?:sparse(?!_?(?:embed|lookup|attention|gather|scatter|segment))"
    r"|spmma|sptensor|spgemm|sp_mma)",
    re.IGNORECASE,
)
_GENERATED_KERNEL = "__my"
_NO_TACTIC = 0xD15EA5EDD15EA5ED
_LARGEST_MS = 3.4e38
"""TensorRT 7 prints the largest float32 where later versions print inf."""
_KERNELS = 4096
"""Kernels whose answer is remembered: a log times the same few hundred for every layer."""
_MASK = (1 << 64) - 1
_ID_LENGTH = 18


@lru_cache(maxsize=_KERNELS)
def is_sparse_kernel(kernel: str | None) -> bool | None:
    """Whether a kernel's name says that it computes on 2:4 weights; None without a name.

    Families: sm80_xmma_fprop_sparse_conv_*, sm80_xmma_fprop_avdt_sparse_*, sm80_xmma_sparse_gemm_*
    and *_sptensor* (TensorRT 10.1 to 10.16). A kernel that Myelin generates is named after the
    operations it fuses, so the word means nothing there.
    """
    if not kernel:
        return None
    if "sp" not in kernel.lower() or kernel.startswith(_GENERATED_KERNEL):
        return False
    return _SPARSE_KERNEL.search(kernel) is not None


def normal_id(text: str | None) -> str | None:
    """A tactic's number as 0x and 16 digits; None for no number, or the one that means no tactic.

    TensorRT prints it as a signed decimal up to 8.2 and in hex since.
    """
    # -3 is 0xfffffffffffffffd: the mask takes the 64 bits of the two's complement
    if not text:
        return None
    is_hex = text[:2].lower() == "0x"
    try:
        value = int(text, 16 if is_hex else 10) & _MASK
    except ValueError:
        return None
    if value == _NO_TACTIC:
        return None
    is_normal = is_hex and len(text) == _ID_LENGTH and text.isalnum() and text.islower()
    return text if is_normal else f"0x{value:016x}"


def finite_ms(value: float) -> float | None:
    """None for inf, NaN and the largest float32: all three mean that nothing was measured."""
    return value if math.isfinite(value) and 0 <= value < _LARGEST_MS else None


def finite_number(text: str) -> float | None:
    """A finite decimal number, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


KEPT_TACTICS = 512
"""Tactics kept of a layer; when there are more the slower half goes. Real layers have up to 300."""
_DENSE_RUNNERS = (
    "Cublas", "Cuda", "Cudnn", "ElementWise", "FusedConvAct", "GemmDeconvolution", "LogSoftmax",
    "MatrixMultiply", "Plugin", "PointWise", "Reduce", "Reformat", "Shuffle", "SoftMax",
    "TiledPooling", "TopK",
)  # fmt: skip
"""Runners (by the start of their names) that print no kernel names and have no sparse kernels.

Sparse kernels belong to the CASK runners and to Myelin, whose one time for a whole region covers
many kernels, dense and sparse alike; about other runners nothing is known.
"""
RECORD_BYTES = 260
"""Bytes of one kept fact besides its text, measured on CPython 3.11 with its record."""
TEXT_BYTES = 50
"""Bytes of a text besides its characters."""
KEPT_BYTES = 40 << 20
_RESERVED_PART = 3
"""One third is kept for what matters more than one more tactic of a layer."""


class Budget:
    """Bytes that all the builds of one reading may still keep."""

    __slots__ = ("_reserved", "left")

    def __init__(self, size_bytes: int = KEPT_BYTES) -> None:
        self.left = size_bytes
        self._reserved = size_bytes // _RESERVED_PART

    def take(self, text_length: int) -> bool:
        """Whether there is room for one more fact of that length; if so, it is taken."""
        cost = text_length + RECORD_BYTES
        if cost > self.left:
            return False
        self.left -= cost
        return True

    def take_spare(self, text_length: int) -> bool:
        """Like `take`, for facts of which the essence is kept in any case: the reserve stays."""
        return self.left > self._reserved and self.take(text_length)


class TacticTime:
    """One tactic's fastest time so far."""

    __slots__ = ("kernel", "line", "ms", "raw")

    def __init__(self, kernel: str | None, ms: float, line: int) -> None:
        self.kernel = kernel
        self.ms = ms
        self.line = line
        self.raw: str | None = None
        """The message, where the tactic is the fastest of its kind so far."""


@dataclass(slots=True)
class OpenLayer:
    """One layer (or one operation inside a Myelin region: `foreign_node`) while the log is read."""

    foreign_node: bool = False
    runner: str | None = None
    by_runner: dict[str | None, dict[str, TacticTime]] = field(default_factory=dict)
    """The tactics of each runner, by their number as it is printed."""
    kept: int = 0
    dropped: int = 0
    cached: int = 0
    pruned: int = 0
    listed: bool = False
    fastest: dict[bool | None, TacticTime] = field(default_factory=dict)
    """The fastest tactic for each answer of `is_sparse_kernel`: a report may quote these lines."""
    quoted_above: float = math.inf
    """A slower tactic is never its kind's fastest; inf until a sparse and a dense one exist."""
    best_dropped: dict[bool | None, tuple[str | None, str, TacticTime]] = field(
        default_factory=dict
    )
    """The fastest dense, sparse (True) and nameless (None) tactic among those without room."""

    def drop(self, runner: str | None, tactic: str, timing: TacticTime) -> None:
        """Keep a tactic for which there is no room only where it is its kind's fastest."""
        sparse = _known_sparse(is_sparse_kernel(timing.kernel), runner)
        known = self.best_dropped.get(sparse)
        if known is None or timing.ms < known[2].ms:
            self.best_dropped[sparse] = (runner, tactic, timing)
        self.dropped += known is not None

    def keep_fastest(self) -> None:
        """Give up the slower half of the tactics, but no sparse one that is its layer's best."""
        every = [(runner, key, t) for runner, timed in self.by_runner.items()
                 for key, t in timed.items()]  # fmt: skip
        every.sort(key=lambda row: row[2].ms)
        self.kept = KEPT_TACTICS // 2
        for runner, key, timing in every[self.kept :]:
            self.drop(runner, key, timing)
            del self.by_runner[runner][key]

    def rows(self) -> Iterator[tuple[str | None, str, TacticTime]]:
        """Runner, number and timing of every kept tactic."""
        for runner, timed in self.by_runner.items():
            for key, timing in timed.items():
                yield runner, key, timing
            for place, key, timing in self.best_dropped.values():
                if place == runner and key not in timed:
                    yield runner, key, timing


def tuned_layer(name: str, layer: OpenLayer) -> TunedLayer:
    """The record of one layer, fastest tactics first; eligible and chosen are not known yet."""
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
    tactics = sorted(found, key=lambda t: (t.ms is None, t.ms or 0.0, t.raw is None))
    times: dict[bool | None, float] = {}
    for tactic in reversed(tactics):
        if tactic.ms is not None:
            times[_known_sparse(tactic.sparse, tactic.runner)] = tactic.ms
    return TunedLayer(
        name=name,
        runner=layer.runner,
        tactics=tuple(tactics),
        best_dense_ms=times.get(False),
        best_sparse_ms=times.get(True),
        runners=tuple(runner for runner in layer.by_runner if runner is not None),
        foreign_node=layer.foreign_node,
        cached=layer.cached,
        pruned_tactics=layer.pruned,
        listed=layer.listed,
        dropped_tactics=layer.dropped,
    )


def _known_sparse(by_kernel: bool | None, runner: str | None) -> bool | None:
    """Whether a tactic is sparse; by its runner where the kernel has no name."""
    if by_kernel is None and runner is not None and runner.startswith(_DENSE_RUNNERS):
        return False
    return by_kernel

"""Timed tactics of every layer: kernels, times, what was skipped and why, in bounded memory."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from twofour.logs.messages import LogicalLine, Message
from twofour.logs.sparsity import FOREIGN_NODE
from twofour.records.log import AutotuningCounts, SkippedTactic, SkipReason, Tactic, TunedLayer

# --- what a kernel's name and a tactic's number say ---------------------------------------------

_SPARSE_KERNEL = re.compile(
    r"(?<![a-z])(?:sparse(?!_?(?:embed|lookup|attention|gather|scatter|segment))"
    r"|spmma|sptensor|spgemm|sp_mma)",
    re.IGNORECASE,
)
_GENERATED_KERNEL = "__my"
_NO_TACTIC = 0xD15EA5EDD15EA5ED
_LARGEST_MS = 3.4e38
"""TensorRT 7 prints the largest float32 where later versions print inf."""
_DENSE_RUNNERS = (
    "Cublas",
    "Cuda",
    "Cudnn",
    "ElementWise",
    "FusedConvAct",
    "GemmDeconvolution",
    "LogSoftmax",
    "MatrixMultiply",
    "Plugin",
    "PointWise",
    "Reduce",
    "Reformat",
    "Shuffle",
    "SoftMax",
    "TiledPooling",
    "TopK",
)
"""Runners (by the start of their names) that print no kernel names and have no sparse kernels.

Sparse kernels belong to the CASK runners and to Myelin, whose one time for a whole region covers
many kernels, dense and sparse alike; about other runners nothing is known.
"""


@lru_cache(maxsize=4096)  # a log times the same few hundred kernels for every layer
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
    base = 16 if text[:2].lower() == "0x" else 10
    try:
        value = int(text, base) & 0xFFFFFFFFFFFFFFFF
    except ValueError:
        return None
    return None if value == _NO_TACTIC else f"0x{value:016x}"


def _finite_ms(value: float) -> float | None:
    """None for inf, NaN and the largest float32: all three mean that nothing was measured."""
    return value if 0 <= value < _LARGEST_MS else None


# --- what is kept of a layer --------------------------------------------------------------------

_RECORD_BYTES = 260
"""Bytes of one kept fact besides its text, measured on CPython 3.11 with its record."""
_KEPT_BYTES = 40 << 20
_RESERVED_PART = 3
"""One third is kept for what matters more than one more tactic of a layer."""


class Budget:
    """Bytes that all the builds of one reading may still keep."""

    __slots__ = ("_left", "_reserved")

    def __init__(self, size_bytes: int = _KEPT_BYTES) -> None:
        self._left = size_bytes
        self._reserved = size_bytes // _RESERVED_PART

    def take(self, text_length: int) -> bool:
        """Whether there is room for one more fact of that length; if so, it is taken."""
        cost = text_length + _RECORD_BYTES
        if cost > self._left:
            return False
        self._left -= cost
        return True

    def take_spare(self, text_length: int) -> bool:
        """Like `take`, for facts of which the essence is kept in any case: the reserve stays."""
        return self._left > self._reserved and self.take(text_length)


class TacticTime:
    """One tactic's fastest time so far, with one runner in one layer."""

    __slots__ = ("kernel", "line", "ms", "number", "raw", "runner")

    def __init__(self, runner: str | None, number: str, kernel: str | None) -> None:
        self.runner = runner
        self.number = number
        """The digits are as printed in the log."""
        self.kernel = kernel
        self.ms = math.inf
        self.line = 0
        self.raw: str | None = None
        """The message, where the tactic is the fastest of its kind so far."""


@dataclass(slots=True)
class OpenLayer:
    """One layer (or one operation inside a Myelin region: `foreign_node`) while the log is read."""

    foreign_node: bool = False
    runner: str | None = None
    by_runner: dict[str | None, dict[str, TacticTime]] = field(default_factory=dict)
    """The tactics of each runner, by their numbers."""
    kept: int = 0
    dropped: int = 0
    cached: int = 0
    pruned: int = 0
    listed: bool = False
    fastest: dict[bool | None, TacticTime] = field(default_factory=dict)
    """The fastest tactic for each answer of `is_sparse_kernel`: a report may quote these lines."""
    quoted_above: float = math.inf
    """A slower tactic is never its kind's fastest; inf until a sparse and a dense one exist."""
    best_dropped: dict[bool | None, TacticTime] = field(default_factory=dict)
    """The fastest dense, sparse (True) and nameless (None) tactic among those without room."""

    def drop(self, timing: TacticTime) -> None:
        """Keep a tactic for which there is no room only where it is its kind's fastest."""
        kind = _kind(timing)
        best = self.best_dropped.get(kind)
        if best is not None:
            self.dropped += 1
        if best is None or timing.ms < best.ms:
            self.best_dropped[kind] = timing

    def timings(self) -> Iterator[TacticTime]:
        """Every tactic that was kept, runner by runner."""
        for runner, timed in self.by_runner.items():
            yield from timed.values()
            for timing in self.best_dropped.values():
                if timing.runner == runner and timing.number not in timed:
                    yield timing


def _kind(timing: TacticTime) -> bool | None:
    """Whether a tactic is sparse; by its runner where the kernel has no name."""
    sparse = is_sparse_kernel(timing.kernel)
    if sparse is None and (timing.runner or "").startswith(_DENSE_RUNNERS):
        return False
    return sparse


def tuned_layer(name: str, layer: OpenLayer) -> TunedLayer:
    """The record of one layer, fastest tactics first; eligible and chosen are not known yet."""
    tactics = []
    best_ms: dict[bool | None, float] = {}
    for timing in layer.timings():
        ms = _finite_ms(timing.ms)
        if ms is not None:
            kind = _kind(timing)
            best_ms[kind] = min(ms, best_ms.get(kind, ms))
        tactic = Tactic(
            kernel=timing.kernel,
            id=normal_id(timing.number),
            ms=ms,
            sparse=is_sparse_kernel(timing.kernel),
            runner=timing.runner,
            line=timing.line,
            raw=timing.raw,
        )
        tactics.append(tactic)
    tactics.sort(key=lambda tactic: (tactic.ms is None, tactic.ms or 0.0, tactic.raw is None))
    return TunedLayer(
        name=name,
        runner=layer.runner,
        tactics=tuple(tactics),
        best_dense_ms=best_ms.get(False),
        best_sparse_ms=best_ms.get(True),
        runners=tuple(filter(None, layer.by_runner)),
        foreign_node=layer.foreign_node,
        cached=layer.cached,
        pruned_tactics=layer.pruned,
        listed=layer.listed,
        dropped_tactics=layer.dropped,
    )


# --- skipped tactics ----------------------------------------------------------------------------

SKIPPED_BY_GPU = "GPU error during getBestTactic"
SKIPPING = "Skipping tactic "
_LONGEST_MESSAGE = 4000
_SKIPPED = (
    (
        SkipReason.WORKSPACE,
        r"Tactic: (?P<id>\S+) skipped\. "
        r"Scratch requested: (?P<size>\d{1,19})\d*, available: (?P<available>\d{1,19})",
    ),
    (
        SkipReason.MEMORY,
        r"Skipping tactic (?P<id>\S+) due to (?:insufficient memory|oom)"
        r"(?:.*?requested size of (?P<size>\d{1,19}))?"
        r"(?:.*?detected for tactic (?P<real_id>0x\w+|-?\d+))?",
    ),
    (SkipReason.ERROR, r"Skipping tactic (?P<id>\S+) due to (?:exception|.{0,40}error)"),
    (SkipReason.ERROR, SKIPPED_BY_GPU),
)
"""Why a tactic was skipped -> the words that say so."""


def _skipped_tactic(message: str, line: int, layer: str | None) -> SkippedTactic | None:
    """The record of a message that a tactic was skipped; None for any other message."""
    for reason, words in _SKIPPED:
        match = re.search(words, message[:_LONGEST_MESSAGE])
        if match is not None:
            values = match.groupdict()
            return SkippedTactic(
                line=line,
                layer=layer,
                id=normal_id(values.get("real_id") or values.get("id")),
                reason=reason,
                requested_bytes=_bytes(values.get("size")),
                available_bytes=_bytes(values.get("available")),
            )
    return None


def _bytes(text: str | None) -> int | None:
    return None if text is None else int(text)


# --- autotuning ---------------------------------------------------------------------------------

RUNNER = "--------------- Timing Runner: "
TACTIC = "Tactic: "
CHOICE = ">>>>>>>>>>>>>>> Chose Runner Type: "
COSTS = "=============== Computing costs for"
NAME = "Tactic Name:"
SET_NAME = "Set Tactic Name: "
MYELIN = "Myelin"
DLA = "DLA"
DLA_LAYER = "[DlaLayer] "
CACHED = "] got cached result: "
_OPERATION = "Autotuning op "
_NAME_END = re.compile(r": (?=\[)|:?\s*$")
_REFORMAT = "Optimizer Reformat"
"""The name under which format changes between layers are timed; no layer of the engine."""
_RUNNER_ID = re.compile(r"\[0x[0-9a-fA-F]+\]$")
_PRUNED = re.compile(r"(.*): \d+ available tactics, \d+ unparsable, (\d{1,9})\d* pruned")


class Tuning:
    """The state of autotuning at one place of a log."""

    # Up to 8.5 a tactic has two lines, the name of its kernel and then its time, behind the line
    # of its runner; from 8.6 on one line has both:
    #     --------------- Timing Runner: conv1 + relu1 (CaskConvolution)
    #     conv1 + relu1 Set Tactic Name: ampere_scudnn_128x64_relu Tactic: 0x3cf3672bfafcee02
    #     Tactic: 0x3cf3672bfafcee02 Time: 0.155209
    # Between the last two, `_kernel` and `_kernel_number` have what the first of them says.

    def __init__(self, budget: Budget) -> None:
        self.layers: dict[str, OpenLayer] = {}
        self.before: dict[str, OpenLayer] = {}
        """The layers as they were before the builder's latest pass."""
        self.skipped: list[SkippedTactic] = []
        self.dropped = 0
        self.counts: Counter[str] = Counter()
        """How many lines of each kind there were, by the fields of AutotuningCounts."""
        self.cached = 0
        self.silent = 0
        self._budget = budget
        self._name: str | None = None
        self._layer: OpenLayer | None = None
        self._runner: str | None = None
        self._timed: dict[str, TacticTime] | None = None
        """The tactics of that runner in that layer; None for what is no layer of the engine."""
        self._kernel: str | None = None
        self._kernel_number = ""
        """Number of the kernel named last, or what a broken line left of it."""
        self._numbered = False
        """A kernel's name has been followed by its number."""
        self._explained = True
        """Something says why the last combination of formats has no times."""
        self._operation = ""
        self._columns: list[str] = []

    # --- the lines that matter for speed -----------------------------------------------------

    def named_and_timed(self, line: Message) -> None:
        """`Tactic Name: K Tactic: ID Time: T` (from 8.6 on).

        For some runners of 8.5 the line has the name alone, and the next line has the time.
        """
        named = line[0][len(NAME) :]
        kernel, number_follows, rest = named.rpartition(" Tactic: ")
        if not number_follows:
            self._name_kernel(named, "")
            return
        cells = rest.split()
        if len(cells) == 3 and self._add(cells[0], cells[2], kernel.strip() or None, line):
            self.counts["tactic_names"] += 1

    def timed(self, line: Message) -> None:
        """`Tactic: ID Time: T` and, where scratch memory was short, `Tactic: ID skipped. ...`."""
        cells = line[0].split()
        if len(cells) != 4 or cells[2][:4].lower() != "time":
            self.skipping(LogicalLine._make(line))
            return
        number = cells[1]
        kernel = self._kernel if number.startswith(self._kernel_number) else None
        self._kernel = None
        self._add(number, cells[3], kernel, line)

    def set_name(self, line: Message) -> None:
        """`LAYER Set Tactic Name: K Tactic: ID` (to 8.5).

        7.x prints no number there; in a log that has printed one, a name without it is half a name,
        and half of "..._sparse_..." would read as dense.
        """
        layer, _, named = line[0].partition(SET_NAME)
        layer = layer.strip()
        if self._timed is None and layer and not layer.startswith(_REFORMAT):
            self._start(layer, None)
        kernel, number_follows, number = named.rstrip().rpartition(TACTIC)
        if number_follows and number:
            self._numbered = True
            self._name_kernel(kernel, number.split(" ", 1)[0])
        elif number_follows or self._numbered:
            self._name_kernel("", "")
        else:
            self._name_kernel(named, "")

    def _name_kernel(self, kernel: str, number: str) -> None:
        """Note the kernel that the next time belongs to."""
        self.counts["tactic_names"] += 1
        self._kernel = kernel.strip() or None
        self._kernel_number = number

    def _add(self, number: str, printed: str, kernel: str | None, line: Message) -> bool:
        """Keep a time in milliseconds; False where it is no number."""
        try:
            ms = float(printed)
        except ValueError:
            return False
        layer = self._layer
        if layer is None or self._timed is None:
            return True
        timing = self._timed.get(number)
        is_new = timing is None
        if timing is None:
            timing = TacticTime(self._runner, number, kernel and sys.intern(kernel))
        elif ms >= timing.ms:
            return True
        timing.ms = ms
        timing.line = line[1]
        if is_new and self._budget.take_spare(len(number)):
            self._timed[number] = timing
            layer.kept += 1
        elif is_new:
            layer.drop(timing)
        if ms < layer.quoted_above:
            self._quote(layer, timing, line)
        return True

    def _quote(self, layer: OpenLayer, timing: TacticTime, line: Message) -> None:
        """Keep the line of the fastest kernel of its kind; a nameless one is never quoted."""
        sparse = is_sparse_kernel(timing.kernel)
        best = layer.fastest.get(sparse)
        if best is not None and best is not timing and timing.ms >= best.ms:
            return
        layer.fastest[sparse] = timing
        if sparse is None:
            return
        raw = LogicalLine._make(line).first_row
        if best is not None:
            best.raw = None
            timing.raw = raw
        elif self._budget.take(len(raw)):
            timing.raw = raw
        if True in layer.fastest and False in layer.fastest:
            layer.quoted_above = max(layer.fastest[True].ms, layer.fastest[False].ms)

    # --- the lines around them ---------------------------------------------------------------

    def runner(self, line: LogicalLine) -> None:
        """`--------------- Timing Runner: LAYER (RUNNER[0x...])`."""
        name, bracket, runner = line.text[len(RUNNER) :].rstrip().rpartition(" (")
        if bracket and runner.endswith(")"):
            self.counts["timing_runners"] += 1
            self._explained = True
            self._start(name, _RUNNER_ID.sub("", runner[:-1]))

    def _start(self, name: str, runner: str | None) -> None:
        self._kernel = None
        self._name = name
        if name.startswith(_REFORMAT):
            self._tune(None, None)
        else:
            self._tune(self._layer_named(name), runner)

    def _tune(self, layer: OpenLayer | None, runner: str | None) -> None:
        """The times that follow are this layer's, with this runner."""
        self._layer = layer
        self._runner = runner
        self._timed = None
        if layer is not None:
            self._timed = layer.by_runner.setdefault(runner, {})

    def _layer_named(self, name: str, *, foreign_node: bool = False) -> OpenLayer | None:
        layer = self.layers.get(name)
        if layer is None:
            if not self._budget.take(len(name)):
                self.dropped += 1
                return None
            layer = self.layers[name] = OpenLayer(foreign_node=foreign_node)
        return layer

    def combination(self, _line: LogicalLine) -> None:
        """A new combination of formats begins."""
        self.counts["format_combinations"] += 1
        self.end_combination()
        self._explained = False

    def end_combination(self) -> None:
        """No more timings of the last combination can come."""
        if not self._explained:
            self.silent += 1
        self._explained = True

    def costs(self, line: LogicalLine) -> None:
        """`=============== Computing costs for LAYER`: the layer's name is often missing."""
        self.end_combination()
        self._tune(None, None)
        name = line.text[len(COSTS) :].strip()
        self._name = name
        if name and not name.startswith("all"):
            self._layer = self._layer_named(name)

    def choice(self, line: LogicalLine) -> None:
        """`>>>>>>>>>>>>>>> Chose Runner Type: RUNNER Tactic: ID`: of one combination, not final."""
        runner, is_whole, _ = line.text[len(CHOICE) :].partition(" Tactic: ")
        if is_whole:
            self.counts["runner_choices"] += 1
            if self._layer is not None:
                self._layer.runner = runner

    def on_dla(self, line: LogicalLine) -> None:
        """`[DlaLayer] LAYER`: it runs on the deep learning accelerator, not on the GPU."""
        layer = self._layer_named(line.text[len(DLA_LAYER) :].strip())
        if layer is not None:
            layer.runner = DLA

    def autotuning_counts(self) -> AutotuningCounts:
        """How many lines of each kind there were."""
        return AutotuningCounts(**self.counts)

    def lists_sparsity(self) -> None:
        """Note that the region being tuned has (Sparsity) lists of its own."""
        if self._layer is not None:
            self._layer.listed = True

    def no_tactics(self, _line: LogicalLine) -> None:
        """`RUNNER has no valid tactics ...`, or the form of 10.x: the runner offers nothing."""
        self._explained = True

    def cached_result(self, line: LogicalLine) -> None:
        """`LAYER [formats] got cached result: RUNNER, tactic ID, T ms` (10.x)."""
        name = line.text.partition(CACHED)[0].rpartition(" [")[0]
        self.cached += 1
        self._explained = True
        layer = self._layer_named(name) if name else None
        if layer is not None:
            layer.cached += 1

    def pruned(self, line: LogicalLine) -> None:
        """`LAYER: N available tactics, U unparsable, P pruned, ...` (8.5, 8.6)."""
        match = _PRUNED.match(line.text)
        layer = self._layer_named(match[1]) if match else None
        if match and layer is not None:
            layer.pruned += int(match[2])

    def skipping(self, line: LogicalLine) -> None:
        """Keep a message that a tactic was skipped, and why."""
        skipped = _skipped_tactic(line.text, line.number, self._name or None)
        if skipped is None:
            return
        self._explained = True
        raw = line.first_row
        if self._budget.take(len(raw)):
            self.skipped.append(replace(skipped, raw=raw))
        else:
            self.dropped += 1

    def end_pass(self, *, keep_last: bool) -> None:
        """Drop the times of the pass that is not kept, except what the other has from a cache."""
        last = self.layers if keep_last else {}
        timed = {name: layer for name, layer in last.items() if layer.kept}
        self.layers = last | self.before | timed
        self.before = {}

    # --- Myelin ------------------------------------------------------------------------------

    def myelin(self, line: LogicalLine) -> tuple[str, str] | None:
        """Read a line of Myelin's tables; name and metadata of the operation that it begins."""
        # (foreignNode) Autotuning op fc1: [ONNX Layer: fc1]
        # (foreignNode) Sorted table of all evaluated tactics:
        # (foreignNode) tactic_id, cost(in ms), ..., kernel_name, tactic_hash, ...
        # (foreignNode)   64, 0.0237376, ..., sm80_xmma_gemm_f32f32, 0x42ef0222eb98e,
        text = line.text.partition(FOREIGN_NODE)[2].strip()
        if text[:1].isdigit():
            self._table_row(text, line)
        elif text.startswith(_OPERATION):
            name, *metadata = _NAME_END.split(text[len(_OPERATION) :], maxsplit=1)
            self._operation = name.strip()
            return self._operation, "".join(metadata)
        elif text.startswith("Sorted table of all evaluated tactics"):
            self.counts["foreign_node_tables"] += 1
        elif "kernel_name" in text:
            self._columns = [column.strip() for column in text.split(",")]
        return None

    def _table_row(self, text: str, line: LogicalLine) -> None:
        row = dict(zip(self._columns, text.split(", "), strict=False))
        number = row.get("tactic_hash", "").strip(" ,")
        if not self._operation or not number:
            return
        outer = (self._layer, self._runner, self._timed)
        self._tune(self._layer_named(self._operation, foreign_node=True), MYELIN)
        self._add(number, row.get("cost(in ms)", ""), row.get("kernel_name"), line)
        self._layer, self._runner, self._timed = outer

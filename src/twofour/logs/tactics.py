"""Timed tactics, by layer: kernels, times, what was skipped and why."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from twofour.logs.kernels import (
    KEPT_TACTICS,
    RECORD_BYTES,
    TEXT_BYTES,
    Budget,
    OpenLayer,
    TacticTime,
    finite_ms,
    is_sparse_kernel,
    normal_id,
)
from twofour.logs.messages import LogicalLine, Message
from twofour.logs.sparsity import FOREIGN_NODE
from twofour.records.log import SkippedTactic, SkipReason

GPU_ERROR = "GPU error during getBestTactic"
_SCRATCH = re.compile(r"Tactic: (\S+) skipped\. Scratch requested: (\d+), available: (\d+)")
_SKIPPING = re.compile(
    r"Skipping tactic (?P<id>\S+) due to (?P<why>insufficient memory|oom|exception|.{0,40}error)"
    r"(?:.*?requested size of (?P<size>\d+))?(?:.*?detected for tactic (?P<real>0x\w+|-?\d+))?"
)
_LONGEST_NUMBER = 19
_LONGEST_MESSAGE = 4000


def skipped_tactic(message: str, line: int, layer: str | None) -> SkippedTactic | None:
    """The record of a message that a tactic was skipped; None for any other message."""
    message = message[:_LONGEST_MESSAGE].strip()
    scratch = _SCRATCH.match(message)
    if scratch is not None:
        return SkippedTactic(
            line=line,
            layer=layer,
            id=normal_id(scratch[1]),
            reason=SkipReason.WORKSPACE,
            requested_bytes=_bytes(scratch[2]),
            available_bytes=_bytes(scratch[3]),
        )
    match = _SKIPPING.search(message)
    if match is not None:
        memory = match["why"] in {"insufficient memory", "oom"} or match["size"]
        return SkippedTactic(
            line=line,
            layer=layer,
            id=normal_id(match["real"] or match["id"]),
            reason=SkipReason.MEMORY if memory else SkipReason.ERROR,
            requested_bytes=_bytes(match["size"]),
        )
    if GPU_ERROR not in message:
        return None
    return SkippedTactic(line=line, layer=layer, id=None, reason=SkipReason.ERROR)


def _bytes(text: str | None) -> int | None:
    return None if text is None else int(text[:_LONGEST_NUMBER])


REGION = "ForeignNode {"
METADATA = " metadata: "
"""`ForeignNode {ForeignNode[a...b]} metadata: [ONNX Layer: a][ONNX Layer: c]`."""
_OP = "Autotuning op "
_NAME_END = re.compile(r": (?=\[)|:?\s*$")


class MyelinTactic(NamedTuple):
    """One tactic in a table."""

    kernel: str
    tactic: str
    ms: float


class MyelinTables:
    """Follows the tables line by line."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.metadata = ""
        """The nodes that the operation is made of, in the words of the line that names it."""
        self._columns: dict[str, int] = {}

    def feed(self, message: str) -> MyelinTactic | None:
        """The tactic where the message is a row of the operation `name`."""
        text = message.partition(FOREIGN_NODE)[2].strip()
        if text[:1].isdigit():
            return None if self.name is None else self._row(text)
        if text.startswith(_OP):
            self.name, self.metadata, *_ = (*_NAME_END.split(text[len(_OP) :], maxsplit=1), "")
            self.name = self.name.strip()
            self._columns = {}
        elif "kernel_name" in text and "cost" in text:
            names = (column.strip() for column in text.split(","))
            self._columns = {
                "cost" if name.startswith("cost(") else name: at for at, name in enumerate(names)
            }
        return None

    def _row(self, text: str) -> MyelinTactic | None:
        cells, columns = text.split(", "), self._columns
        try:
            kernel = cells[columns["kernel_name"]]
            cost = float(cells[columns["cost"]])
            tactic = cells[columns.get("tactic_hash", columns["tactic_id"])]
        except (KeyError, IndexError, ValueError):
            return None
        return MyelinTactic(kernel, tactic.strip(" ,"), cost)


RUNNER = "--------------- Timing Runner: "
COMBINATION = "*************** Autotuning format combination:"
TACTIC = "Tactic: "
CHOICE = ">>>>>>>>>>>>>>> Chose Runner Type: "
COSTS = "=============== Computing costs for"
NAME = "Tactic Name:"
SET_NAME = "Set Tactic Name: "
MYELIN = "Myelin"
DLA, DLA_LAYER = "DLA", "[DlaLayer] "
_REFORMAT = "Optimizer Reformat"
"""The name under which format changes between layers are timed; no layer of the engine."""
_RUNNER_ID = re.compile(r"\[0x[0-9a-fA-F]+\]$")
_CACHED = "] got cached result: "
_PRUNED = re.compile(r"(.*): \d+ available tactics, \d+ unparsable, (\d+) pruned")


class Tuning:
    """The state of autotuning at one place of a log."""

    def __init__(self, budget: Budget) -> None:
        self.layers: dict[str, OpenLayer] = {}
        self.before: dict[str, OpenLayer] = {}
        """The layers as they were before the builder's latest pass."""
        self.skipped: list[SkippedTactic] = []
        self.dropped = 0
        self.counts: Counter[str] = Counter()
        """How many lines of each kind there were, by the fields of AutotuningCounts."""
        self.cached = self.silent = 0
        self._budget = budget
        self._layer: OpenLayer | None = None
        self._name: str | None = None
        self._kernels: dict[str | None, str | None] = {}
        self._timed: dict[str, TacticTime] | None = None
        self._runner: str | None = None
        self._kernel: str | None = None
        self._kernel_id = ""
        """Number of the kernel named last, or what a broken line left of it."""
        self._explained = True
        self._numbered = False

    # --- the lines that matter for speed -----------------------------------------------------

    def named_and_timed(self, line: Message) -> None:
        """`Tactic Name: K Tactic: ID Time: T` (from 8.6 on).

        For some runners of 8.5 the line has the name alone, and the next line has the time.
        """
        text = line[0]
        parts = text.split()
        if len(parts) == 7 and parts[3] == "Tactic:":
            self.counts["tactic_names"] += self._add(parts[4], parts[6], parts[2], line)
            return
        kernel, found, rest = text[len(NAME) :].rpartition(" Tactic: ")
        cells = rest.split()
        if found and len(cells) == 3:
            self.counts["tactic_names"] += self._add(
                cells[0], cells[2], kernel.strip() or None, line
            )
        elif not found:
            self._name_alone(text[len(NAME) :].strip())

    def _name_alone(self, kernel: str) -> None:
        self.counts["tactic_names"] += 1
        self._kernel, self._kernel_id = kernel or None, ""

    def timed(self, line: Message) -> None:
        """`Tactic: ID Time: T` and, where scratch memory was short, `Tactic: ID skipped. ...`."""
        parts = line[0].split()
        if len(parts) == 4 and parts[2][:4].lower() == "time":
            tactic = parts[1]
            kernel = self._kernel if tactic.startswith(self._kernel_id) else None
            self._kernel = None
            self._add(tactic, parts[3], kernel, line)
        else:
            self.skipping(LogicalLine._make(line))

    def set_name(self, line: Message) -> None:
        """`LAYER Set Tactic Name: K Tactic: ID` (to 8.5).

        7.x prints no number there; in a later log a name without one is half a name.
        """
        before, _, after = line[0].partition(SET_NAME)
        kernel, found, tactic = after.rstrip().rpartition(TACTIC)
        if self._timed is None and before.strip() and not before.startswith(_REFORMAT):
            self._start(before.strip(), None)
        if not tactic or not found:
            half = self._numbered or found
            self._name_alone("" if half else after.strip().split(" ", 1)[0])
            return
        self._numbered = True
        self.counts["tactic_names"] += 1
        self._kernel, self._kernel_id = kernel.strip() or None, tactic.split(" ", 1)[0]

    def _add(self, tactic: str, text: str, kernel: str | None, line: Message) -> bool:
        """Keep a time; False where it is no number."""
        try:
            ms = float(text)
        except ValueError:
            return False
        timed, layer = self._timed, self._layer
        if timed is None or layer is None:
            return True
        known = timed.get(tactic)
        if known is not None:
            if ms >= known.ms:
                return True
            known.ms, known.line = ms, line[1]
        elif self._budget.take_spare(len(tactic)):
            kernel = self._kernels.setdefault(kernel, kernel)
            known = timed[tactic] = TacticTime(kernel, ms, line[1])
            layer.kept += 1
            if layer.kept > KEPT_TACTICS:
                layer.keep_fastest()
        else:
            known = TacticTime(kernel, ms, line[1])
            layer.drop(self._runner, tactic, known)
        if ms < layer.quoted_above:
            best = layer.fastest.get(is_sparse_kernel(known.kernel))
            if best is None or ms <= best.ms:
                self._quote(layer, known, best, line)
        return True

    def _quote(
        self, layer: OpenLayer, timing: TacticTime, best: TacticTime | None, line: Message
    ) -> None:
        """Keep the line of the fastest kernel of its kind; a nameless one is never quoted."""
        if best is not None and best is not timing and timing.ms >= best.ms:
            return
        sparse = is_sparse_kernel(timing.kernel)
        layer.fastest[sparse] = timing
        if sparse is None:
            return
        raw = LogicalLine._make(line).first_row
        timing.raw = (
            raw
            if best is not None or self._budget.take(len(raw) + TEXT_BYTES - RECORD_BYTES)
            else None
        )
        if best is not None and best is not timing:
            best.raw = None
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
        self._kernel, self._name = None, name
        if name.startswith(_REFORMAT):
            self._layer, self._timed = None, None
            return
        layer = self._layer_named(name)
        self._layer = layer
        self._runner = runner
        self._timed = None if layer is None else layer.by_runner.setdefault(runner, {})

    def _layer_named(self, name: str, *, foreign_node: bool = False) -> OpenLayer | None:
        layer = self.layers.get(name)
        if layer is None:
            if not self._budget.take(len(name)):
                self.dropped += 1
                return None
            layer = self.layers[name] = OpenLayer(foreign_node=foreign_node)
        return layer

    def combination(self) -> None:
        """A new combination of formats begins."""
        self.counts["format_combinations"] += 1
        self.silent += not self._explained
        self._explained = False

    def costs(self, line: LogicalLine) -> None:
        """`=============== Computing costs for LAYER`: the layer's name is often missing."""
        self.end_combination()
        self._layer, self._timed = None, None
        self._name = name = line.text[len(COSTS) :].strip()
        if name and not name.startswith("all"):
            self._layer = self._layer_named(name)

    def end_combination(self) -> None:
        """No more timings of the last combination can come."""
        self.silent += not self._explained
        self._explained = True

    def choice(self, line: LogicalLine) -> None:
        """`>>>>>>>>>>>>>>> Chose Runner Type: RUNNER Tactic: ID`: of one combination, not final."""
        runner, found, _ = line.text[len(CHOICE) :].partition(" Tactic: ")
        self.counts["runner_choices"] += bool(found)
        if found and self._layer is not None:
            self._layer.runner = runner

    def on_dla(self, line: LogicalLine) -> None:
        """`[DlaLayer] LAYER`: it runs on the deep learning accelerator, not on the GPU."""
        layer = self._layer_named(line.text[len(DLA_LAYER) :].strip())
        if layer is not None:
            layer.runner = DLA

    def lists_sparsity(self) -> None:
        """Note that the region being tuned has (Sparsity) lists of its own."""
        if self._layer is not None:
            self._layer.listed = True

    def no_tactics(self) -> None:
        """`RUNNER has no valid tactics ...`, or the form of 10.x: the runner offers nothing."""
        self._explained = True

    def cached_result(self, line: LogicalLine) -> None:
        """`LAYER [formats] got cached result: RUNNER, tactic ID, T ms` (10.x)."""
        name = line.text.partition(_CACHED)[0].rpartition(" [")[0]
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
            layer.pruned += int(match[2][:9])

    def end_pass(self, *, keep_last: bool) -> None:
        """Drop the times of the pass that is not kept, except what the other has from a cache."""
        last = self.layers if keep_last else {}
        timed = {name: layer for name, layer in last.items() if layer.kept}
        self.layers, self.before = last | self.before | timed, {}

    # --- skipped -----------------------------------------------------------------------------

    def skipping(self, line: LogicalLine) -> None:
        """Keep a message that a tactic was skipped, and why."""
        found = skipped_tactic(line.text, line.number, self._name or None)
        if found is None:
            return
        raw = line.first_row
        self._explained = True
        if self._budget.take(len(raw)):
            self.skipped.append(replace(found, raw=raw))
        else:
            self.dropped += 1

    # --- Myelin ------------------------------------------------------------------------------

    def myelin_row(self, name: str, row: MyelinTactic, line: LogicalLine) -> None:
        """A row of Myelin's table for one operation."""
        layer = self._layer_named(name, foreign_node=True)
        if layer is None:
            return
        outer = self._layer, self._timed, self._runner
        self._layer, self._timed = layer, layer.by_runner.setdefault(MYELIN, {})
        self._runner = MYELIN
        if finite_ms(row.ms) is not None:
            self._add(row.tactic, repr(row.ms), row.kernel, line)
        self._layer, self._timed, self._runner = outer

"""Timed tactics, by layer: kernels, times, what was skipped and why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from twofour.logs.budget import Budget
from twofour.logs.layers import KEPT_TACTICS, Layer, Timing
from twofour.logs.names import finite_ms, is_sparse_kernel, normal_id
from twofour.records.log import LONGEST_RAW_LINE, AutotuningCounts, SkippedTactic, SkipReason

GPU_ERROR = "GPU error during getBestTactic"
_SCRATCH = re.compile(r"Tactic: (\S+) skipped\. Scratch requested: (\d+), available: (\d+)")
_SKIPPING = re.compile(
    r"Skipping tactic (?P<id>\S+) due to (?P<why>insufficient memory|oom|exception|.{0,40}error)"
    r"(?:.*?requested size of (?P<size>\d+))?(?:.*?detected for tactic (?P<real>0x\w+|-?\d+))?"
)
_LONGEST_NUMBER = 19
_LONGEST_MESSAGE = 4000


def skipped_tactic(message: str, line: int, layer: str | None) -> SkippedTactic | None:
    """The record of any of the three forms; None where the message is none of them."""
    message = message[:_LONGEST_MESSAGE].strip()
    raw = message[:LONGEST_RAW_LINE]
    scratch = _SCRATCH.match(message)
    if scratch is not None:
        return SkippedTactic(
            line=line,
            layer=layer,
            id=normal_id(scratch[1]),
            reason=SkipReason.WORKSPACE,
            requested_bytes=_bytes(scratch[2]),
            available_bytes=_bytes(scratch[3]),
            raw=raw,
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
            raw=raw,
        )
    if GPU_ERROR not in message:
        return None
    return SkippedTactic(line=line, layer=layer, id=None, reason=SkipReason.ERROR, raw=raw)


def _bytes(text: str | None) -> int | None:
    return None if text is None else int(text[:_LONGEST_NUMBER])


_TAG = "(foreignNode)"
REGION = "ForeignNode {"
METADATA = " metadata: "
"""`ForeignNode {ForeignNode[a...b]} metadata: [ONNX Layer: a][ONNX Layer: c]`."""
_OP = "Autotuning op "
_NAME_END = re.compile(r": (?=\[)|:?\s*$")


class ForeignRow(NamedTuple):
    """One tactic in a table."""

    kernel: str
    tactic: str
    ms: float
    message: str
    line: int


class ForeignTables:
    """Follows the tables line by line."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.metadata = ""
        """What the line that names the operation says of the nodes it is made of."""
        self._columns: dict[str, int] = {}

    def feed(self, message: str, line: int) -> ForeignRow | None:
        """The tactic where the message is a row of the operation `name`."""
        text = message.partition(_TAG)[2].strip()
        if text[:1].isdigit():
            return None if self.name is None else self._row(text, message, line)
        if text.startswith(_OP):
            self.name, self.metadata, *_ = (*_NAME_END.split(text[len(_OP) :], maxsplit=1), "")
            self.name = self.name.strip()
            self._columns = {}
        elif "kernel_name" in text and "cost" in text:
            names = [column.strip() for column in text.split(",")]
            self._columns = dict(_numbered(names))
        return None

    def _row(self, text: str, message: str, line: int) -> ForeignRow | None:
        cells = text.split(", ")
        columns = self._columns
        try:
            kernel = cells[columns["kernel_name"]]
            cost = float(cells[columns["cost"]])
            tactic = cells[columns.get("tactic_hash", columns["tactic_id"])]
        except (KeyError, IndexError, ValueError):
            return None
        return ForeignRow(kernel, tactic.strip(" ,"), cost, message, line)


def _numbered(names: list[str]) -> Iterator[tuple[str, int]]:
    for place, name in enumerate(names):
        yield ("cost" if name.startswith("cost(") else name), place


RUNNER = "--------------- Timing Runner: "
COMBINATION = "*************** Autotuning format combination:"
CHOICE = ">>>>>>>>>>>>>>> Chose Runner Type: "
COSTS = "=============== Computing costs for"
NAME = "Tactic Name:"
SET_NAME = "Set Tactic Name: "
FOREIGN_RUNNER = "Myelin"
_REFORMAT = "Optimizer Reformat"
"""Timings of format changes between layers, not of a layer of the engine."""
_RUNNER_ID = re.compile(r"\[0x[0-9a-fA-F]+\]$")
_CACHED = "] got cached result: "
_PRUNED = re.compile(r"(.*): \d+ available tactics, \d+ unparsable, (\d+) pruned")
_MAX_LAYERS = 50_000
_MOST_DIGITS = 6
"""Of a time: C++ prints floating-point numbers with six significant digits."""


class CutTime(NamedTuple):
    """A time put together of two lines."""

    ms: str
    cut: bool
    """The first part alone is no number that is printed so."""


class Tuning:
    """The state of autotuning at one place of a log."""

    def __init__(self, budget: Budget) -> None:
        self.layers: dict[str, Layer] = {}
        self.skipped: list[SkippedTactic] = []
        self.dropped = 0
        self.names = self.runners = self.combinations = self.choices = self.tables = 0
        self.cached = self.silent = 0
        self._budget = budget
        self._layer: Layer | None = None
        self._name: str | None = None
        self._kernels: dict[str | None, str | None] = {}
        self._timed: dict[str, Timing] | None = None
        self._runner: str | None = None
        self._kernel: str | None = None
        self._kernel_id = ""
        """Number of the kernel named last, or what a broken line left of it."""
        self._explained = True
        self._alone = 0
        self._numbered = False
        self._last = ""
        self.last_line = 0
        """Of the last tactic that was timed."""
        self._undo: tuple[dict[str, Timing], str, float | None, int] | None = None

    # --- the lines that matter for speed -----------------------------------------------------

    def named_and_timed(self, message: str, line: int) -> bool:
        """`Tactic Name: K Tactic: ID Time: T` (8.6 on); False for a line that may go on.

        8.5 has the name alone on the line for some runners, and the time on the next.
        """
        parts = message.split()
        if len(parts) == 7 and parts[3] == "Tactic:":
            kernel, tactic, ms = parts[2], parts[4], parts[6]
        else:
            kernel, found, rest = message[len(NAME) :].rpartition(" Tactic: ")
            if not found:
                self._name_alone(rest.strip(), line)
                return False
            cells = rest.split()
            if len(cells) != 3:
                return False
            kernel, tactic, ms = kernel.strip(), cells[0], cells[2]
        if not self._add(tactic, ms, kernel or None, message, line):
            return False
        self._last, self.last_line = message, line
        self.names += line != self._alone
        return True

    def _name_alone(self, kernel: str, line: int) -> None:
        self.names += line != self._alone
        self._alone = line
        self._kernel, self._kernel_id = kernel or None, ""

    def timed(self, message: str, line: int) -> bool:
        """`Tactic: ID Time: T` and, where scratch memory was short, `Tactic: ID skipped. ...`."""
        parts = message.split()
        if len(parts) == 4 and parts[2][:4].lower() == "time":
            tactic = parts[1]
            kernel = self._kernel if tactic.startswith(self._kernel_id) else None
            self._kernel = None
            self._last, self.last_line = message, line
            return self._add(tactic, parts[3], kernel, message, line)
        return self.skipping(message, line)

    def set_name(self, message: str, line: int) -> bool:
        """`LAYER Set Tactic Name: K Tactic: ID` (to 8.5); False for a line that may go on.

        7.x has no number there; in any later log a name without one is half a name.
        """
        before, _, after = message.partition(SET_NAME)
        kernel, found, tactic = after.rstrip().rpartition("Tactic: ")
        if self._timed is None and before.strip() and not before.startswith(_REFORMAT):
            self._start(before.strip(), None)
        if not tactic or not found:
            half = self._numbered or found
            self._name_alone("" if half else after.strip().split(" ", 1)[0], line)
            return False
        self._numbered = True
        self.names += line != self._alone
        self._kernel, self._kernel_id = kernel.strip() or None, tactic.split(" ", 1)[0]
        return True

    def _add(self, tactic: str, text: str, kernel: str | None, message: str, line: int) -> bool:
        try:
            ms = float(text)
        except ValueError:
            return False
        self._undo = None
        timed, layer = self._timed, self._layer
        if timed is None or layer is None:
            return True
        known = timed.get(tactic)
        if known is None:
            known = self._new(layer, tactic, Timing(kernel, ms, line))
            self._undo = (timed, tactic, None, line)
        else:
            known.timings += 1
            if ms >= known.ms:
                return True
            self._undo = (timed, tactic, known.ms, known.line)
            known.ms, known.line = ms, line
        best = layer.fastest.get(is_sparse_kernel(known.kernel))
        if best is None or ms < best.ms or best is known:
            self._quote(layer, known, message)
        return True

    def _new(self, layer: Layer, tactic: str, timing: Timing) -> Timing:
        if self._timed is None or not self._budget.take_spare(len(tactic)):
            layer.drop(self._runner, tactic, timing)
            return timing
        timing.kernel = self._kernels.setdefault(timing.kernel, timing.kernel)
        self._timed[tactic] = timing
        layer.kept += 1
        if layer.kept > KEPT_TACTICS:
            layer.keep_fastest()
        return timing

    def _quote(self, layer: Layer, timing: Timing, message: str) -> None:
        """Keep the message of the fastest kernel of its kind; a nameless one is never quoted."""
        sparse = is_sparse_kernel(timing.kernel)
        best = layer.fastest.get(sparse)
        raw = message.strip()[:LONGEST_RAW_LINE]
        if sparse is None or (best is None and not self._budget.take_text(len(raw))):
            return
        if best is not None:
            best.raw = None
        layer.fastest[sparse], timing.raw = timing, raw

    def time_with(self, digits: str) -> CutTime | None:
        """The last time with more digits; None where no number comes of it that is printed so."""
        time = self._last.rstrip().rpartition(" ")[2]
        try:
            float(time + digits)
        except ValueError:
            return None
        if len((time + digits).partition("e")[0].replace(".", "").lstrip("0")) > _MOST_DIGITS:
            return None
        cut = time.endswith((".", "e", "-", "+")) or ("." not in time and digits[0] in ".e")
        return CutTime(ms=time + digits, cut=cut)

    def lengthen(self, digits: str) -> None:
        """The number of the last time went on in the next line of a wrapped paste."""
        self._take_back()
        message, line = self._last + digits, self.last_line
        if message.startswith(NAME):
            self.names -= 1
            self.named_and_timed(message, line)
        else:
            self.timed(message, line)

    def _take_back(self) -> None:
        if self._undo is None:
            return
        timed, tactic, ms, line = self._undo
        if self._layer is not None:
            self._layer.fastest.clear()
        if ms is None:
            timed.pop(tactic, None)
        elif tactic in timed:
            timed[tactic].ms, timed[tactic].line = ms, line
            timed[tactic].timings -= 1
        self._undo = None

    # --- the lines around them ---------------------------------------------------------------

    def runner(self, message: str) -> bool:
        """`--------------- Timing Runner: LAYER (RUNNER[0x...])`; False for a cut line."""
        body = message[len(RUNNER) :].rstrip()
        name, bracket, runner = body.rpartition(" (")
        if not bracket or not runner.endswith(")"):
            return False
        self.runners += 1
        self._explained = True
        self._start(name, _RUNNER_ID.sub("", runner[:-1]))
        return True

    def _start(self, name: str, runner: str | None) -> None:
        self._kernel, self._undo = None, None
        self._name = name
        if name.startswith(_REFORMAT):
            self._layer, self._timed = None, None
            return
        layer = self._layer_named(name)
        self._layer = layer
        self._runner = runner
        self._timed = None if layer is None else layer.timed_by(runner)

    def _layer_named(self, name: str, *, foreign: bool = False) -> Layer | None:
        layer = self.layers.get(name)
        if layer is None:
            if len(self.layers) >= _MAX_LAYERS or not self._budget.take(len(name)):
                self.dropped += 1
                return None
            layer = self.layers[name] = Layer(foreign=foreign)
        return layer

    def combination(self) -> None:
        """A new combination of formats begins."""
        self.combinations += 1
        self.silent += not self._explained
        self._explained = False

    def costs(self, message: str) -> None:
        """`=============== Computing costs for LAYER`: the layer's name is often missing."""
        self.end_combination()
        self._layer, self._timed = None, None
        self._name = name = message[len(COSTS) :].strip()
        if name and not name.startswith("all"):
            self._layer = self._layer_named(name)

    def end_combination(self) -> None:
        """No more timings of the last combination can come."""
        self.silent += not self._explained
        self._explained = True

    def choice(self, message: str) -> bool:
        """`>>>>>>>>>>>>>>> Chose Runner Type: RUNNER Tactic: ID`: of one combination, not final."""
        runner, found, _ = message[len(CHOICE) :].partition(" Tactic: ")
        if not found:
            return False
        self.choices += 1
        if self._layer is not None:
            self._layer.runner = runner
        return True

    def no_tactics(self) -> None:
        """A runner had nothing to offer: `RUNNER has no valid tactics ...` or the form of 10.x."""
        self._explained = True

    def cached_result(self, message: str) -> None:
        """`LAYER [formats] got cached result: RUNNER, tactic ID, T ms` (10.x)."""
        name = message.partition(_CACHED)[0].rpartition(" [")[0]
        self.cached += 1
        self._explained = True
        layer = self._layer_named(name) if name else None
        if layer is not None:
            layer.cached += 1

    def pruned(self, message: str) -> None:
        """`LAYER: N available tactics, U unparsable, P pruned, ...` (8.5, 8.6)."""
        match = _PRUNED.match(message)
        layer = self._layer_named(match[1]) if match else None
        if match and layer is not None:
            layer.pruned += int(match[2][:9])

    # --- skipped -----------------------------------------------------------------------------

    def skipping(self, message: str, line: int) -> bool:
        """A tactic that was not timed, whatever the reason; False where the line is none."""
        found = skipped_tactic(message, line, self._name or None)
        if found is None:
            return False
        self._explained = True
        if self._budget.take(len(found.raw)):
            self.skipped.append(found)
        else:
            self.dropped += 1
        return True

    # --- Myelin ------------------------------------------------------------------------------

    def foreign_row(self, name: str, row: ForeignRow) -> None:
        """A row of Myelin's table for one operation."""
        layer = self._layer_named(name, foreign=True)
        if layer is None:
            return
        timed = layer.timed_by(FOREIGN_RUNNER)
        outer = self._layer, self._timed, self._runner
        self._layer, self._timed, self._runner = layer, timed, FOREIGN_RUNNER
        if finite_ms(row.ms) is not None:
            self._add(row.tactic, repr(row.ms), row.kernel, row.message, row.line)
        self._layer, self._timed, self._runner = outer
        self._undo = None

    def counts(self) -> AutotuningCounts:
        """The counts of lines so far."""
        return AutotuningCounts(
            tactic_names=self.names,
            timing_runners=self.runners,
            format_combinations=self.combinations,
            runner_choices=self.choices,
            foreign_node_tables=self.tables,
        )

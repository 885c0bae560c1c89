"""The parser: whole messages in, builds out. One pass, bounded memory, whatever the text.

The loop in `feed` is what a large log spends its time in: messages behind a prefix that is known
take the short way while nothing unusual is open. What each message means is in the table
`WORDINGS`, from its first words to what is done with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from twofour.logs import facts, segments, sparsity, tactics
from twofour.logs.build import OpenBuild
from twofour.logs.layer_info import detailed_layer, listed_layer
from twofour.logs.layers import Budget
from twofour.logs.names import normal_id
from twofour.logs.outer import OuterPrefixes, OuterSuffixes
from twofour.logs.prefix import ANY, BARE, LogicalLine, named
from twofour.logs.sparsity import FOREIGN_NODE, FUSING, MARK
from twofour.logs.tactics import NAME, SET_NAME, TACTIC
from twofour.logs.unwrap import KEY_LENGTH, Unwrapper
from twofour.records.log import LONGEST_RAW, Build, CheckedTensor, EngineLayer, Fusion, Producer

Handler = Callable[[OpenBuild, LogicalLine], None]
_Start = tuple[str, Handler]
"""The first words of a message, and what is done with it."""
_EVENTS = (*segments.ENDS, "Loaded engine size: ", "Constructing optimization profile number ")
_OLD_FIGURES = ("min: ", "max: ", "mean: ")
_POLYGRAPHY_ENDS = tuple(
    f"{word} | {what}: " for word in ("PASSED", "FAILED") for what in ("Runtime", "Command")
)
"""The end of a command of Polygraphy; `PASSED | Output: ...` is about one tensor's comparison."""
_COMPLAINTS = frozenset("WEF")
_TIMED, _NAMED = TACTIC[:KEY_LENGTH], NAME[:KEY_LENGTH]
_EVERYDAY = ("Removing ", "Merging layers", "Running: ", "Model: ", "Loading model: ")
"""Words other programs print too; believed only in a log whose lines have no prefixes at all."""
_TELLING = ("Tactic", "-----", "*****", ">>>>>", "=====", FOREIGN_NODE)
"""What a line without a prefix must hold to be looked at further in than its first word."""


class LogParser:
    """Reads the lines of one source; `finish` gives its builds."""

    def __init__(self, file: str, budget: Budget) -> None:
        self._segments = segments.Segments(file, budget)
        self._number = 0
        self._calm = True
        """No table, list or undecided build is open: the short way may be taken."""
        self._in_list = False
        """Inside a list of bare layer names, after `Layers:`."""
        self._prefixed_seen = False
        self._style: Producer | str | None = None
        starts = (*segments.STARTS, segments.PERHAPS, *_EVENTS)
        ends = tuple(f"&&&& {word} " for word in ("RUNNING", "PASSED", "FAILED", "WAIVED"))
        self._table = _table(
            *_all(starts, self._event),
            *_all(_POLYGRAPHY_ENDS, self._polygraphy_end),
            *_all((tactics.RUNNER, tactics.COSTS), self._tuning_event),
            *_all(ends, self._banner),
            *_all(("=== Profile (",), self._table_begins),
        )
        self._outer = OuterPrefixes()
        self._behind = OuterSuffixes()
        self._unwrap = Unwrapper(
            {key: tuple(start for start, _ in entry) for key, entry in self._table.items()},
            self._knows_layer,
        )

    def _knows_layer(self, name: str) -> bool:
        return self._segments.build.knows_layer(name)

    def feed(self, lines: Sequence[str], raw: Sequence[str] | None = None) -> None:
        """Read the next lines, which carry no line ends; `raw` as they stand in the file."""
        raw = lines if raw is None else raw
        lines = self._behind.removed(self._outer.removed(lines))
        table, parts = self._table.get, self._segments
        for line in self._unwrap.messages(lines, raw):
            message, _, _, _, style = line
            if style is not None or not self._calm:
                self._careful(named(line))
                continue
            key = message[:KEY_LENGTH]
            if key == _TIMED:
                parts.build.tuning.timed(line)
            elif key == _NAMED and message.startswith(NAME):
                parts.build.tuning.named_and_timed(line)
            elif (handlers := table(key)) is not None:
                for start, handler in handlers:
                    if message.startswith(start):
                        handler(parts.build, named(line))
            elif SET_NAME in message:
                parts.build.tuning.set_name(line)
            elif "actic" in message or FUSING in message or "(" in message[:2]:
                self._unlisted(named(line))

    def finish(self) -> list[Build]:
        """The builds, in order."""
        line = self._unwrap.last()
        if line is not None:
            self._careful(named(line))
        self._decide(new=False)
        self._segments.build.last_line = max(self._unwrap.number, 1)
        self._segments.close()
        return self._segments.done

    # --- the long way ------------------------------------------------------------------------

    def _careful(self, line: LogicalLine) -> None:
        self._number = line.number
        if line.style is BARE:
            self._bare(line)
        elif line.text.startswith("&&&& "):
            self._banner(line)
        else:
            self._in_list = False
            self._prefixed(line)
        self._refresh()

    def _banner(self, line: LogicalLine) -> None:
        self._in_list = False
        self._decide(new=True)
        self._segments.banner(line)
        self._refresh()

    def _prefixed(self, line: LogicalLine) -> None:
        style = None if line.style == ANY else line.style
        if isinstance(style, Producer) or (style and self._style is None):
            self._style = style
        build = self._segments.build
        if build.finished and line.text.strip():
            build = self._segments.open(line.number)
        if style is not None:
            build.count_style(style)
        self._prefixed_seen = True
        if self._segments.held is not None and not self._resolves(line):
            if self._segments.hold(line):
                return
            self._decide(new=False)
        self._message(line)

    def _message(self, line: LogicalLine) -> None:
        build = self._segments.build
        if build.results.in_profile:
            if build.results.row(line.text):
                return
            build.results.in_profile = False
        if line.severity in _COMPLAINTS:
            if self._segments.next_fails(line):
                build = self._segments.open(line.number)
                self._count_style(build)
            build.complain(line)
        if not self._listed(line):
            self._unlisted(line)

    def _bare(self, line: LogicalLine) -> None:
        """A line without a prefix: of a list of layers, of a profile, or of another program."""
        build, text = self._segments.build, line.text
        if self._in_list and text and text != "Bindings:" and not text.startswith("Name: "):
            build.add_engine_layer(EngineLayer(name=text), detailed=False)
            return
        self._in_list = text == "Layers:"
        if text.startswith(("Layer(", "Name: ")):
            detailed = text.startswith("Name: ")
            layer = detailed_layer(text) if detailed else listed_layer(text)
            if layer is not None:
                build.add_engine_layer(layer, detailed=detailed)
        elif not text or self._in_list or text == "Bindings:" or build.explain(line):
            return
        elif MARK in text[:60]:
            self._sparsity(line)
        elif not (build.results.in_profile and build.results.row(text)):
            known = not self._is_everyday(text) and self._listed(line)
            if not known and any(word in text for word in _TELLING):
                self._unlisted(line)

    def _is_everyday(self, text: str) -> bool:
        believed = self._segments.build.touched and not self._prefixed_seen
        return text.startswith(_EVERYDAY) and not believed

    def _listed(self, line: LogicalLine) -> bool:
        """Handle a message that begins with a known word; whether it does."""
        known = False
        for start, handler in self._table.get(line.text[:KEY_LENGTH], ()):
            if line.text.startswith(start):
                known = True
                handler(self._segments.build, line)
        return known

    def _unlisted(self, line: LogicalLine) -> None:
        """Handle a message that is known by a word further in."""
        build, message = self._segments.build, line.text
        if MARK in message[:60]:
            self._sparsity(line)
        elif FOREIGN_NODE in message[:20]:
            self._of_myelin(line)
        elif message.startswith(_OLD_FIGURES):
            build.results.figure(message)
        else:
            self._by_word(build, line)

    def _by_word(self, build: OpenBuild, line: LogicalLine) -> None:
        tuning, message = build.tuning, line.text
        if SET_NAME in message:
            tuning.set_name(line)
        elif "Skipping tactic " in message or tactics.GPU_ERROR in message:
            tuning.skipping(line)
        elif "no valid tactics for" in message:
            tuning.no_tactics()
        elif "available tactics, " in message:
            tuning.pruned(line)
        elif "got cached result: " in message:
            tuning.cached_result(line)
        elif FUSING in message and (fusion := sparsity.fused(message, line.number)) is not None:
            build.add_fusion(fusion, line)

    def _sparsity(self, line: LogicalLine) -> None:
        raw = sparsity.raw_line(line.text, line.number)
        if raw is not None:
            raw = replace(raw, rows=line.quote[:LONGEST_RAW])
            self._segments.before_sparsity(raw).add_sparsity(raw)

    def _of_myelin(self, line: LogicalLine) -> None:
        build = self._segments.build
        if "Sorted table of all evaluated tactics" in line.text:
            build.tuning.tables += 1
            return
        row = build.tables.feed(line.text)
        if row is not None and build.tables.name is not None:
            build.tuning.myelin_row(build.tables.name, row, line)
        elif build.tables.name is not None and build.tables.metadata:
            build.add_sources(build.tables.name, build.tables.metadata)
            build.tables.metadata = ""

    # --- where builds begin ------------------------------------------------------------------

    def _event(self, line: LogicalLine) -> None:
        parts = self._segments
        if line.text.startswith(segments.PERHAPS):
            if parts.may_begin():
                parts.held = []
                self._refresh()
            return
        if line.text.startswith(_EVENTS) or parts.starts(line):
            segments.notes_end(parts.build, line.text)
        self._count_style(parts.build)

    def _count_style(self, build: OpenBuild) -> None:
        if self._style is not None:
            build.count_style(self._style)

    def _polygraphy_end(self, _line: LogicalLine) -> None:
        """`PASSED | Runtime: ...`: a run of Polygraphy's command line is over."""
        self._segments.build.finished = True
        self._calm = False

    def _table_begins(self, _line: LogicalLine) -> None:
        self._calm = False

    def _tuning_event(self, line: LogicalLine) -> None:
        """Autotuning after a finished engine is that of the next, however little was logged."""
        if self._segments.build.generated:
            self._event(line)

    def _resolves(self, line: LogicalLine) -> bool:
        """Whether the message decides what the ones held back belong to."""
        if self._segments.next_fails(line) or line.text.startswith(segments.STARTS):
            self._decide(new=True)
            return True
        ends = line.text.startswith(("Loaded engine size: ", "Engine generation"))
        if ends or MARK in line.text[:60]:
            self._decide(new=False)
            return True
        return False

    def _decide(self, *, new: bool) -> None:
        held, self._segments.held = self._segments.held, None
        if held is None:
            return
        if new and held:
            self._segments.open(held[0].number)
        for line in held:
            self._message(line)
        self._refresh()

    def _refresh(self) -> None:
        build = self._segments.build
        build.last_line = max(build.last_line, self._number)
        self._calm = not (
            self._in_list
            or build.results.in_profile
            or build.finished
            or self._segments.held is not None
        )


_REPLAY = re.compile(r"Algorithm: \(Implementation: -?\d+, Tactic: (-?\w{1,20})\)")
_PROVE_NOTHING = frozenset(
    ("Model: ", "Input filename: ", "Loading model: ", "Precision: ", "Profiling verbosity: ")
)
"""Words that other programs print too: they make no build where there is none."""
_POLYGRAPHY_SAYS = (
    "Loaded Module: ", "Configuring with profiles:", "Building engine with configuration:",
    "Finished engine building in ",
)  # fmt: skip
"""Words of Polygraphy's own (its backend/trt/config.py and loader.py, logger/logger.py)."""
_RESULTS = (
    "Throughput: ", "throughput: ", "Latency: ", "Enqueue Time", "H2D Latency", "D2H Latency",
    "GPU Compute", "End-to-End Host Latency: ", "Total Host Walltime: ", "walltime: ",
    "Total GPU Compute Time: ", "total compute time: ", "Host Latency", "Host latency",
    "percentile: ", "median: ",
)  # fmt: skip
_SILENT = (
    "Layers:", "Average on ", "Searching for ", "Registering tensor", "Parsing node", "Importing ",
)  # fmt: skip


def _all(starts: tuple[str, ...], handle: Callable[[LogicalLine], None]) -> list[_Start]:
    return [(start, lambda _, line: handle(line)) for start in starts]


def _table(*first: _Start) -> dict[str, tuple[_Start, ...]]:
    """First characters of a message -> the messages that begin so, in the order they are done."""
    table: dict[str, tuple[_Start, ...]] = {}
    for start, handler in (*first, *WORDINGS):
        key = start[:KEY_LENGTH]
        table[key] = (*table.get(key, ()), (start, handler))
    return table


def _proof(handle: Handler) -> Handler:
    """The same for a message that alone is worth a record."""

    def proven(build: OpenBuild, line: LogicalLine) -> None:
        build.touched = True
        handle(build, line)

    return proven


def _fact(start: str, put: facts.Setter) -> Handler:
    def handle(build: OpenBuild, line: LogicalLine) -> None:
        put(build.facts, line.text[len(start) :].strip())
        build.touch(start not in _PROVE_NOTHING)

    return handle


def _fusion(make: Callable[[str, int], Fusion | None]) -> Handler:
    def handle(build: OpenBuild, line: LogicalLine) -> None:
        fusion = make(line.text, line.number)
        if fusion is not None:
            build.add_fusion(fusion, line)

    return handle


def _registered(build: OpenBuild, line: LogicalLine) -> None:
    layer = sparsity.renamed(line.text)
    if layer is not None:
        build.add_renamed(layer)


def _region_sources(build: OpenBuild, line: LogicalLine) -> None:
    region, _, metadata = line.text[len(tactics.REGION) - 1 :].partition(tactics.METADATA)
    build.add_sources(region.strip(), metadata)


def _no_tactics(build: OpenBuild, line: LogicalLine) -> None:
    if ": No valid tactics for" in line.text:
        build.tuning.no_tactics()


def _built(build: OpenBuild, _line: LogicalLine) -> None:
    build.generated = True


def _loaded(build: OpenBuild, _line: LogicalLine) -> None:
    build.loaded = True


def _checked(build: OpenBuild, line: LogicalLine, *, sparse: bool) -> None:
    name = line.text.partition(": ")[2].strip()
    if build.budget.take(len(name)):
        build.checked.append(CheckedTensor(name=name, sparse=sparse))


def _replayed(build: OpenBuild, line: LogicalLine) -> None:
    """A layer of Polygraphy's tactic replay; its tactic is on the next line."""
    build.replayed = line.text[len("Layer: ") :].strip()


def _replay(build: OpenBuild, line: LogicalLine) -> None:
    match = _REPLAY.match(line.text)
    name, build.replayed = build.replayed, None
    if match is not None and name is not None:
        build.count_style(Producer.POLYGRAPHY)
        layer = EngineLayer(name=name, tactic_id=normal_id(match[1]))
        build.add_engine_layer(layer, detailed=False)


def _polygraphy_command(build: OpenBuild, line: LogicalLine) -> None:
    facts.command(build.facts, line.text.partition(": ")[2].strip())
    build.count_style(Producer.POLYGRAPHY)


def _inspected(build: OpenBuild, _line: LogicalLine) -> None:
    build.inspected = True
    build.count_style(Producer.POLYGRAPHY)


WORDINGS: list[_Start] = [
    ("Tactic Name: ", lambda b, x: b.tuning.named_and_timed(x)),
    ("Tactic: ", lambda b, x: b.tuning.timed(x)),
    (tactics.RUNNER, _proof(lambda b, x: b.tuning.runner(x))),
    (tactics.COMBINATION, _proof(lambda b, _: b.tuning.combination())),
    (tactics.CHOICE, _proof(lambda b, x: b.tuning.choice(x))),
    (tactics.COSTS, lambda b, x: b.tuning.costs(x)),
    ("Skipping tactic ", lambda b, x: b.tuning.skipping(x)),
    ("Skipping ", _no_tactics),
    ("Set Tactic Name: ", lambda b, x: b.tuning.set_name(x)),
    ("=== Profile (", lambda b, x: b.touch(b.results.title(x.text))),
    ("Engine built in ", _proof(_built)),
    ("Building graph using backend strategy ", lambda b, x: b.next_pass(x.number)),
    ("Use backend strategy ", lambda b, x: b.compare_passes(x.number, keep_last=True)),
    ("Skip backend strategy ", lambda b, x: b.compare_passes(x.number, keep_last=False)),
    ("Engine deserialized in ", _proof(_loaded)),
    ("Found sparse tensor: ", _proof(lambda b, x: _checked(b, x, sparse=True))),
    ("Found non-sparse tensor: ", _proof(lambda b, x: _checked(b, x, sparse=False))),
    ("Layer: ", _replayed),
    ("Algorithm: (Implem", _replay),
    ("RUNNING | Command: ", _polygraphy_command),
    *((start, lambda b, _: b.count_style(Producer.POLYGRAPHY)) for start in _POLYGRAPHY_SAYS),
    ("==== TensorRT Network ====", _inspected),
    ("==== TensorRT Engine ====", _inspected),
    ("In JIT build, ", lambda b, _: b.count_style(Producer.TENSORRT_RTX)),
    *((start, _fact(start, put)) for start, put in facts.ONE_LINERS),
    *((start, _fusion(make)) for start, make in sparsity.BY_START),
    (sparsity.REGISTERING, _registered),
    (tactics.REGION, _region_sources),
    *((start, lambda b, x: b.touch(b.results.figure(x.text))) for start in _RESULTS),
    *((start, lambda _b, _x: None) for start in _SILENT),
]
"""What each message means. Where several begin alike all are done, in this order."""

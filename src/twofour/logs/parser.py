"""The parser: whole messages in, builds out. One pass, bounded memory, whatever the text.

A large log spends its time in the loop in `feed`: messages behind a known prefix take the short way
while nothing unusual is open. The table `WORDINGS` says what is done with each message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twofour.logs.facts import banner
from twofour.logs.layer_info import detailed_layer, listed_layer
from twofour.logs.messages import ANY, BARE, LogicalLine, Messages
from twofour.logs.open_build import OpenBuild, finished_build
from twofour.logs.sparsity import FOREIGN_NODE, FUSING, MARK, sparsity_line
from twofour.logs.tactics import NAME, SET_NAME, TACTIC, Budget
from twofour.logs.wordings import FURTHER_IN, KEY_LENGTH, WORDINGS, Turn, by_key
from twofour.records.log import LONGEST_RAW, Build, EngineLayer, Producer

_COMPLAINTS = frozenset("WEF")
_TIMED = TACTIC[:KEY_LENGTH]
_NAMED = NAME[:KEY_LENGTH]
_EVERYDAY = ("Removing ", "Merging layers", "Running: ", "Model: ", "Loading model: ")
"""Words that other programs print too; believed only in a log whose lines have no prefixes."""


class LogParser:
    """Reads the lines of one source; `finish` gives its builds."""

    def __init__(self, file: str, budget: Budget) -> None:
        self._file = file
        self._budget = budget
        self._build = OpenBuild(file, 1, budget)
        self._finished: list[Build] = []
        self._calm = True
        """No table or list is open, so messages may take the short way."""
        self._in_list = False
        """The line is inside a list of bare layer names, after `Layers:`."""
        self._prefixed_seen = False
        self._style: Producer | str | None = None
        self._table = by_key(WORDINGS)
        sure = (row.start for row in WORDINGS if row.is_sure)
        marks = (f"{MARK} ", f"{FOREIGN_NODE} ")
        self._messages = Messages((*marks, *(row.start for row in WORDINGS)), (*marks, *sure))

    def feed(self, lines: Sequence[str]) -> None:
        """Read the next lines, without their ends."""
        table = self._table.get
        for line in self._messages.of(lines):
            message, _, _, style = line
            if style is not None or not self._calm:
                self._careful(LogicalLine._make(line))
                continue
            key = message[:KEY_LENGTH]
            if key == _TIMED:
                self._build.tuning.timed(line)
            elif key == _NAMED and message.startswith(NAME):
                self._build.tuning.named_and_timed(line)
            elif SET_NAME in message:
                self._build.tuning.set_name(line)
            elif (
                table(key) is not None
                or "actic" in message
                or FUSING in message
                or "(" in message[:2]
            ):
                self._careful(LogicalLine._make(line))

    def finish(self) -> list[Build]:
        """The builds, in order."""
        self._build.last_line = max(self._messages.number, 1)
        self._close()
        return self._finished

    # --- the long way ------------------------------------------------------------------------

    def _careful(self, line: LogicalLine) -> None:
        if line.text.startswith("&&&& "):
            self._banner(line)
        elif line.style is BARE:
            self._bare(line)
        else:
            self._in_list = False
            self._prefixed(line)
        build = self._build
        self._calm = not (self._in_list or build.results.in_profile or build.finished)

    def _prefixed(self, line: LogicalLine) -> None:
        style = None if line.style == ANY else line.style
        if isinstance(style, Producer) or (style and self._style is None):
            self._style = style
        build = self._build
        if build.finished and line.text.strip():
            build = self._open(line.number)
        if style is not None:
            build.count_style(style)
        self._prefixed_seen = True
        if build.results.in_profile:
            build.results.in_profile = build.results.row(line.text)
            if build.results.in_profile:
                return
        if line.severity in _COMPLAINTS:
            if self._next_fails(line):
                build = self._open(line.number)
                self._count_style()
            build.complain(line)
        if not self._listed(line):
            self._unlisted(line)

    def _bare(self, line: LogicalLine) -> None:
        """Handle a line without a prefix: in a list of layers, a profile, or of another program."""
        build = self._build
        text = line.text
        is_heading = text in {"", "Layers:", "Bindings:"}
        if self._in_list and not is_heading and not text.startswith("Name: "):
            build.add_engine_layer(EngineLayer(name=text), detailed=False)
            return
        self._in_list = text == "Layers:"
        if is_heading or self._layer_of_engine(text) or build.explain(line):
            return
        if not (build.results.in_profile and build.results.row(text)):
            is_believed = build.touched and not self._prefixed_seen
            if not is_believed and text.startswith(_EVERYDAY):
                return
            if not self._listed(line):
                self._unlisted(line)

    def _layer_of_engine(self, text: str) -> bool:
        """Keep a layer of the finished engine; whether the line looks like one."""
        is_detailed = text.startswith("Name: ")
        if not is_detailed and not text.startswith("Layer("):
            return False
        layer = detailed_layer(text) if is_detailed else listed_layer(text)
        if layer is not None:
            self._build.add_engine_layer(layer, detailed=is_detailed)
        return True

    def _listed(self, line: LogicalLine) -> bool:
        """Handle a message that begins with words of the table; whether it does."""
        is_listed = False
        for row in self._table.get(line.text[:KEY_LENGTH], ()):
            if line.text.startswith(row.start):
                is_listed = True
                if row.turn is not None:
                    self._turn(row.turn, line)
                row.handle(self._build, line)
        return is_listed

    def _unlisted(self, line: LogicalLine) -> None:
        """Handle a message that is recognised by a word further in."""
        if MARK in line.text[:60]:
            self._sparsity(line)
        elif FOREIGN_NODE in line.text[:20]:
            operation = self._build.tuning.myelin(line)
            if operation is not None:
                self._build.add_sources(*operation)
        else:
            for words, handle in FURTHER_IN:
                if words in line.text:
                    handle(self._build, line)
                    return

    def _sparsity(self, line: LogicalLine) -> None:
        listed = sparsity_line(line.text, line.number)
        if listed is None:
            return
        build = self._build
        is_after_last_list = build.native_chosen and not build.is_run
        if is_after_last_list or build.finished:
            build = self._open(line.number)
        build.add_sparsity(replace(listed, raw=line.text.strip()[:LONGEST_RAW]))

    # --- where builds begin ------------------------------------------------------------------

    def _turn(self, turn: Turn, line: LogicalLine) -> None:
        """Begin or end a build where the message says so."""
        build = self._build
        if turn is Turn.TUNES and not build.generated:
            return
        if turn is Turn.ENDS:
            build.generated = True
            build.touched = True
            build.tuning.end_combination()
        elif turn is not Turn.USES and self._is_over(line):
            self._open(line.number)
        self._count_style()

    def _is_over(self, line: LogicalLine) -> bool:
        """Whether a builder that is at work belongs to the next build."""
        build = self._build
        if line.text.startswith("RUNNING | Command: ") and build.touched:
            return True
        return build.finished or ((build.generated or build.failed) and not build.is_run)

    def _open(self, line: int) -> OpenBuild:
        """Close the open build and begin another; complaints before a build belong to it."""
        if not self._build.only_complains:
            if not self._build.finished:
                self._build.last_line = line - 1
            self._close()
            self._build = OpenBuild(self._file, line, self._budget)
        return self._build

    def _close(self) -> None:
        """Make the open build a record, unless nothing was found of it."""
        build = self._build
        is_after_last = build.only_complains and self._finished
        if (build.touched or build.complained) and not is_after_last:
            self._finished.append(finished_build(build))

    def _banner(self, line: LogicalLine) -> None:
        """Handle trtexec's RUNNING, PASSED and FAILED lines."""
        self._in_list = False
        word = line.text.split(" ", 2)[1]
        if word == "RUNNING":
            self._open(line.number)
            self._build.is_run = True
            self._build.touched = True
        build = self._build
        if not banner(build.facts, line.text):
            return
        build.count_style(Producer.TRTEXEC)
        build.touched = True
        build.last_line = line.number
        if word != "RUNNING":
            build.finished = True
            build.passed = word == "PASSED"
            build.run_failed = word == "FAILED"

    def _next_fails(self, line: LogicalLine) -> bool:
        """Whether the message is an error of a build that comes after the last, finished one."""
        build = self._build
        if line.severity not in {"E", "F"} or not build.generated or build.is_run:
            return False
        return "Skipping tactic " in line.text[:2000] or build.ends_with(line.text)

    def _count_style(self) -> None:
        if self._style is not None:
            self._build.count_style(self._style)

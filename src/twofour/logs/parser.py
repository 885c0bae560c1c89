"""The parser: batches of lines in, builds out. One pass, bounded memory, whatever the text.

The loop in `feed` is what a large log spends its time in: prefixes of fixed width and messages that
begin with a known word take the short way, everything else goes through `prefix.take_apart`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twofour.logs import segments
from twofour.logs.bare_lines import BareLines
from twofour.logs.budget import Budget
from twofour.logs.build import OpenBuild
from twofour.logs.messages import KEY_LENGTH, Handler, dispatch_table
from twofour.logs.outer import OuterPrefixes, OuterSuffixes
from twofour.logs.prefix import (
    AFTER_DATE,
    BRACKETS,
    DATE_END,
    MESSAGE,
    PLAIN,
    KnownPrefixes,
    take_apart,
    without_polygraphy_extras,
)
from twofour.logs.sparsity import FUSING, MARK, fused
from twofour.logs.tactics import COSTS, GPU_ERROR, RUNNER
from twofour.logs.unwrap import Surroundings
from twofour.records.log import Build, Producer

_FOREIGN = "(foreignNode)"
_EVENTS = (*segments.ENDS, "Loaded engine size: ", "Constructing optimization profile number ")
_OLD_FIGURES = ("min: ", "max: ", "mean: ")
_POLYGRAPHY_ENDS = tuple(
    f"{word} | {what}: " for word in ("PASSED", "FAILED") for what in ("Runtime", "Command")
)
"""The end of a command of Polygraphy; `PASSED | Output: ...` is about one tensor's comparison."""


class LogParser:
    """Reads the lines of one source; `finish` gives its builds."""

    def __init__(self, file: str, budget: Budget) -> None:
        self.segments = segments.Segments(file, budget)
        self.bare = BareLines(self)
        self.table: dict[str, tuple[tuple[str, Handler], ...]] = dispatch_table()
        self.number = 0
        self.calm = True
        """No table, broken line or undecided build is open: the short way may be taken."""
        self._style: Producer | str | None = None
        self.around = Surroundings()
        self._outer = OuterPrefixes()
        self._behind = OuterSuffixes()
        self._prefixes = KnownPrefixes()
        for start in (*segments.STARTS, segments.PERHAPS, *_EVENTS):
            self._put_first(start, self._event)
        for start in _POLYGRAPHY_ENDS:
            self._put_first(start, self._polygraphy_end)
        for start in (RUNNER, COSTS):
            self._put_first(start, self._tuning_event)

    def _put_first(self, start: str, handler: Callable[[str, int], bool]) -> None:
        key = start[:KEY_LENGTH]
        entry = (start, lambda _build, message, line: handler(message, line))
        self.table[key] = (entry, *self.table.get(key, ()))

    def feed(self, lines: Sequence[str]) -> None:
        """Read the next lines, which carry no line ends."""
        lines = self._behind.removed(self._outer.removed(lines))
        self.around.next_batch(lines, self.number + 1)
        after_date, table = AFTER_DATE.get, self.table.get
        number = self.number
        build = self.segments.build
        prefix, size = self._prefixes.first
        for line in lines:
            number += 1
            if line.startswith(prefix) and self.calm and line[size : size + 1] not in BRACKETS:
                message = line[size:]
            elif (
                (style := after_date(line[DATE_END:MESSAGE])) is not None
                and style is self._style
                and self.calm
            ):
                message = line[MESSAGE:]
            elif self.calm and (known := self._prefixes.length(line)):
                message = line[known:]
            else:
                self.number = number
                self._long_way(line, number)
                build = self.segments.build
                prefix, size = self._prefixes.first
                continue
            message = message.lstrip() if message[:1] == " " else message
            handlers = table(message[:KEY_LENGTH])
            if handlers is None:
                if "actic" in message or FUSING in message or "(" in message[:2]:
                    self.unlisted(message, number)
                    build = self.segments.build
                continue
            for start, handler in handlers:
                if message.startswith(start):
                    if not handler(build, message, number):
                        self.bare.begin(message, number)
                    build = self.segments.build
        self.number = number

    def finish(self) -> list[Build]:
        """The builds, in order."""
        self.bare.flush()
        self._decide(new=False)
        self.segments.build.last_line = max(self.number, 1)
        self.segments.close()
        return self.segments.done

    # --- the long way ------------------------------------------------------------------------

    def _long_way(self, line: str, number: int) -> None:
        if not line and self.calm:
            return
        for piece in line.split("\r") if "\r" in line else (line,):
            found = take_apart(piece) if piece else None
            if found is None:
                self.bare.line(piece, number)
                continue
            self.bare.flush()
            if found.message.startswith("&&&& "):
                self._decide(new=True)
                self.segments.banner(found.message, number)
                self._refresh()
                continue
            if isinstance(found.style, Producer) or (found.style and self._style is None):
                self._style = found.style
            if "\r" not in line and '"' not in line[:2]:
                self._prefixes.learn(line, found.message, found.severity)
            self._prefixed(found.style, found.severity, found.message, number)
        self._refresh()

    def _prefixed(
        self, style: Producer | str | None, severity: str, message: str, number: int
    ) -> None:
        if style in {PLAIN, None, Producer.POLYGRAPHY}:
            message = without_polygraphy_extras(message)
        build = self.segments.build
        if build.finished and message.strip():
            build = self.segments.open(number)
        if style is not None:
            build.styles[style] += 1
        self.bare.prefixed_seen = True
        if self.segments.held is not None and not self._resolves(severity, message):
            if self.segments.hold(severity, message, number):
                return
            self._decide(new=False)
        self.message(severity, message, number)

    def message(self, severity: str, message: str, number: int) -> None:
        """One message of known severity, its prefix gone."""
        build = self.segments.build
        if build.results.in_profile:
            if build.results.row(message):
                return
            build.results.in_profile = False
        if severity in {"W", "E", "F"}:
            if self.segments.next_fails(severity, message):
                build = self.segments.open(number)
                self._count_style(build)
            build.complain(severity, message.strip(), number)
        if not self.listed(message, number):
            self.unlisted(message, number)

    def listed(self, message: str, number: int) -> bool:
        """Handle a message that begins with a known word; whether it does."""
        known = False
        text = message.lstrip()
        for start, handler in self.table.get(text[:KEY_LENGTH], ()):
            if text.startswith(start):
                known = True
                if not handler(self.segments.build, text, number):
                    self.bare.begin(text, number)
        return known

    def unlisted(self, message: str, number: int) -> None:
        """Handle a message that is known by a word further in."""
        build = self.segments.build
        if MARK in message[:60]:
            self.bare.begin(message.strip(), number)
        elif _FOREIGN in message[:20]:
            self._foreign(message, number)
        elif message.lstrip().startswith(_OLD_FIGURES):
            build.results.figure(message)
        else:
            self._by_word(build, message, number)

    def _by_word(self, build: OpenBuild, message: str, number: int) -> None:
        tuning = build.tuning
        if "Set Tactic Name: " in message:
            if not tuning.set_name(message, number):
                self.bare.begin(message, number)
        elif "Skipping tactic " in message or GPU_ERROR in message:
            tuning.skipping(message, number)
        elif "no valid tactics for" in message:
            tuning.no_tactics()
        elif "available tactics, " in message:
            tuning.pruned(message)
        elif "got cached result: " in message:
            tuning.cached_result(message)
        elif FUSING in message and (fusion := fused(message, number)) is not None:
            build.add_fusion(fusion, message)

    def _foreign(self, message: str, number: int) -> None:
        build = self.segments.build
        if "Sorted table of all evaluated tactics" in message:
            build.tuning.tables += 1
            return
        row = build.tables.feed(message, number)
        if row is not None and build.tables.name is not None:
            build.tuning.foreign_row(build.tables.name, row)
        elif build.tables.name is not None and build.tables.metadata:
            build.add_sources(build.tables.name, build.tables.metadata)
            build.tables.metadata = ""

    # --- where builds begin ------------------------------------------------------------------

    def _event(self, message: str, number: int) -> bool:
        parts = self.segments
        if message.startswith(segments.PERHAPS):
            if parts.may_begin():
                parts.held = []
                self._refresh()
            return True
        if message.startswith(_EVENTS) or parts.starts(message, number):
            segments.notes_end(parts.build, message)
        self._count_style(parts.build)
        return True

    def _count_style(self, build: OpenBuild) -> None:
        if self._style is not None:
            build.styles[self._style] += 1

    def _polygraphy_end(self, _message: str, _number: int) -> bool:
        """`PASSED | Runtime: ...`: a run of Polygraphy's command line is over."""
        self.segments.build.finished = True
        self.calm = False
        return True

    def _tuning_event(self, message: str, number: int) -> bool:
        """Autotuning after a finished engine is that of the next, however little was logged."""
        return not self.segments.build.generated or self._event(message, number)

    def _resolves(self, severity: str, message: str) -> bool:
        """Whether the message decides what the ones held back belong to."""
        failing = self.segments.next_fails(severity, message)
        if failing or message.startswith(segments.STARTS):
            self._decide(new=True)
            return True
        if (
            message.startswith(("Loaded engine size: ", "Engine generation"))
            or MARK in message[:60]
        ):
            self._decide(new=False)
            return True
        return False

    def _decide(self, *, new: bool) -> None:
        held, self.segments.held = self.segments.held, None
        if held is None:
            return
        if new and held:
            self.segments.open(held[0][2])
        for severity, message, number in held:
            self.message(severity, message, number)
        self._refresh()

    def _refresh(self) -> None:
        build = self.segments.build
        build.last_line = max(build.last_line, self.number)
        self.calm = not (
            self.bare.broken is not None
            or self.bare.in_list
            or build.results.in_profile
            or build.finished
            or self.segments.held is not None
        )

"""The parser: batches of lines in, builds out. One pass, bounded memory, whatever the text.

The loop in `feed` is what a large log spends its time in: prefixes of fixed width and messages that
begin with a known word take the short way, everything else goes through `prefix.take_apart`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twofour.engines.buildlog import segments
from twofour.engines.buildlog.bare_lines import BareLines
from twofour.engines.buildlog.budget import Budget
from twofour.engines.buildlog.fusions import FUSING, fused
from twofour.engines.buildlog.messages import KEY_LENGTH, Handler, dispatch_table
from twofour.engines.buildlog.open_build import OpenBuild
from twofour.engines.buildlog.prefix import PLAIN, take_apart, without_polygraphy_extras
from twofour.engines.buildlog.skipped import GPU_ERROR
from twofour.engines.buildlog.sparsity import MARK
from twofour.engines.buildlog.tuning import COSTS, RUNNER
from twofour.log_records import Build, Producer

_DATE_END, _MESSAGE = 22, 32
"""Places in `[MM/DD/YYYY-HH:MM:SS] [V] [TRT] message`."""
_AFTER_DATE = {
    "[V] [TRT] ": Producer.TRTEXEC,
    "[I] [TRT] ": Producer.TRTEXEC,
    "[TRT] [V] ": Producer.PYTHON,
    "[TRT] [I] ": Producer.PYTHON,
}
_FOREIGN = "(foreignNode)"
_EVENTS = ("Engine generation completed in ", "Finished engine building in ",
           "Loaded engine size: ", "Constructing optimization profile number ")  # fmt: skip
_OLD_FIGURES = ("min: ", "max: ", "mean: ")
_AVERAGE = "[I] Average on "
"""trtexec's progress, the most frequent line of all and without a fact."""
_POLYGRAPHY_ENDS = tuple(
    f"{word} | {what}: " for word in ("PASSED", "FAILED") for what in ("Runtime", "Command")
)
"""The end of a command of Polygraphy; `PASSED | Output: ...` is about one tensor's comparison."""
_MOST_LEARNED = 6
_AROUND = 20
"""Lines before and after a broken one that show how wide the paste is."""


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
        self._batch: Sequence[str] = ()
        self._first = 1
        """Line number of the batch's first line."""
        self._learned: list[tuple[str, int]] = []
        """Prefixes that are the same on every line (no clock in them), with their length."""
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
        self._batch, self._first = lines, self.number + 1
        after_date, table = _AFTER_DATE.get, self.table.get
        number = self.number
        build = self.segments.build
        for line in lines:
            number += 1
            style = after_date(line[_DATE_END:_MESSAGE])
            if style is not None and style is self._style and self.calm:
                message = line[_MESSAGE:]
            elif self.calm and (size := self._known_prefix(line)):
                message = line[size:]
            else:
                self.number = number
                self._long_way(line, number)
                build = self.segments.build
                continue
            if message[:1] == " ":
                message = message.lstrip()
            handlers = table(message[:KEY_LENGTH])
            if handlers is None:
                if "actic" in message or FUSING in message or "(" in message[:2]:
                    self.unlisted(message, number)
                    build = self.segments.build
                continue
            for start, handler in handlers:
                if message.startswith(start):
                    if not handler(build, message, number):
                        self.bare.begin(message, number, len(line))
                    build = self.segments.build
        self.number = number

    def finish(self) -> list[Build]:
        """The builds, in order."""
        self.bare.flush()
        self._decide(new=False)
        self.segments.build.last_line = max(self.number, 1)
        self.segments.close()
        return self.segments.done

    def _known_prefix(self, line: str) -> int:
        """Length of a prefix met before, or of a whole line without a fact; 0 for any other."""
        for prefix, size in self._learned:
            if line.startswith(prefix):
                return 0 if line[size : size + 1] in {"(", "["} else size
        return len(line) if line.startswith(_AVERAGE, _DATE_END) else 0

    def _learn(self, line: str, message: str, severity: str) -> None:
        """Remember a prefix that will be the same on the next lines."""
        prefix = line[: len(line) - len(message)]
        if severity in {"V", "I", ""} and prefix and not any(c.isdigit() for c in prefix):
            pair = (prefix, len(prefix))
            if len(self._learned) < _MOST_LEARNED and pair not in self._learned:
                self._learned.append(pair)

    # --- the long way ------------------------------------------------------------------------

    def _long_way(self, line: str, number: int) -> None:
        for piece in line.split("\r") if "\r" in line else (line,):
            found = take_apart(piece)
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
                self._learn(line, found.message, found.severity)
            self._prefixed(found.style, found.severity, found.message, number, len(piece))
        self._refresh()

    def _prefixed(
        self, style: Producer | str | None, severity: str, message: str, number: int, length: int
    ) -> None:
        if style in {PLAIN, None, Producer.POLYGRAPHY}:
            message = without_polygraphy_extras(message)
        build = self.segments.build
        if build.finished and message.strip():
            build = self.segments.open(number)
        if style is not None:
            build.styles[style] += 1
        self.bare.prefixed_seen = True
        self.bare.physical = length
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
                    self.bare.begin(text, number, self.bare.physical)
        return known

    def unlisted(self, message: str, number: int) -> None:
        """Messages that are known by a word further in."""
        build = self.segments.build
        if MARK in message[:60]:
            self.bare.begin(message.strip(), number, self.bare.physical)
        elif _FOREIGN in message[:20]:
            self._foreign(message, number)
        elif message.lstrip().startswith(_OLD_FIGURES):
            build.results.figure(message)
        else:
            self._by_word(build, message, number)

    def _by_word(self, build: OpenBuild, message: str, number: int) -> None:
        tuning = build.tuning
        if "Set Tactic Name: " in message:
            if not tuning.set_name(message):
                self.bare.begin(message, number, self.bare.physical)
        elif "Skipping tactic " in message or GPU_ERROR in message:
            tuning.skipping(message, number)
        elif "no valid tactics for" in message:
            tuning.no_tactics(message)
        elif "available tactics, " in message:
            tuning.pruned(message)
        elif "got cached result: " in message:
            tuning.cached_result(message)
        elif FUSING in message and (fusion := fused(message, number)) is not None:
            build.add_fusion(fusion)

    def _foreign(self, message: str, number: int) -> None:
        build = self.segments.build
        if "Sorted table of all evaluated tactics" in message:
            build.tuning.tables += 1
            return
        row = build.tables.feed(message, number)
        if row is not None:
            build.tuning.foreign_rows(*row)

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

    def width(self) -> int:
        """Longest line around, of the same build."""
        start = max(self.segments.build.first_line, self.number - _AROUND) - self._first
        end = self.number + _AROUND - self._first
        return max(map(len, self._batch[max(start, 0) : max(end, 0)]), default=0)

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

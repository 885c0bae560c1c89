"""Anyone's TensorRT build log, from a file to a record: whole messages in, builds out.

One pass in bounded memory, whatever the text. A large log spends its time in `LogParser.feed`:
messages behind a known prefix take the short way while nothing unusual is open. The table
`WORDINGS` says what is done with each message.
"""

from __future__ import annotations

import codecs
import gzip
import html
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import cast

from twofour.errors import system_errors
from twofour.logs.facts import banner
from twofour.logs.layer_info import detailed_layer, listed_layer, nothing_in
from twofour.logs.messages import ANY, BARE, LogicalLine, Messages
from twofour.logs.open_build import OpenBuild, finished_build
from twofour.logs.sparsity import FOREIGN_NODE, FUSING, MARK, sparsity_line
from twofour.logs.tactics import NAME, SET_NAME, TACTIC, Budget
from twofour.logs.wordings import FURTHER_IN, KEY_LENGTH, WORDINGS, Turn, by_key
from twofour.records.log import LONGEST_RAW, Build, BuildLog, EngineLayer, LogFile, Producer

STDIN = "-"
CHUNK_BYTES = 1 << 20
LONGEST_LINE = 1 << 20
"""Characters; a longer line is cut (the longest real ones have some 50,000)."""
CUT_MARK = "..."
"""The end of a cut line: dots, with which authors, too, shorten lists of names."""
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_BLANKS = re.compile("[\N{NO-BREAK SPACE}\u1680\u2000-\u200a\u202f\u205f\u3000]")
_NO_WIDTH = re.compile("[\u200b-\u200d\u2060\ufeff]")
_ENTITY = re.compile(r"&(?:\w{2,6}|#\w{2,4});")
_GZIP_MAGIC = b"\x1f\x8b"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""PowerShell writes logs so."""


Lines = tuple[list[str], list[str]]
"""Some thousand lines without their ends: cleaned of colours and of what web pages make of blanks
and brackets, and as they stand in the source."""


class OpenSource:
    """One source while it is read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size_bytes = 0
        self.lines = 0
        self.notes: list[str] = []


def read_build_log(*sources: Path | str) -> BuildLog:
    """Read logs: paths (plain, .gz, .ipynb), "-" for stdin, or text of more than one line.

    Any bytes are read without an error; only a file that cannot be opened raises BadInputError.
    Memory is bounded, and each record says how much was dropped.
    """
    budget = Budget()
    files: list[LogFile] = []
    builds: list[Build] = []
    for source in sources:
        opened = OpenSource("log" if "\n" in str(source) else str(source))
        parser = LogParser(opened.name, budget)
        for lines, raw in _source_lines(source, opened):
            parser.feed(lines, raw)
        its_builds = parser.finish()
        builds += its_builds
        if not its_builds:
            opened.notes.append(nothing_in(source))
        file = LogFile(
            name=opened.name,
            lines=opened.lines,
            size_bytes=opened.size_bytes,
            notes=tuple(opened.notes),
        )
        files.append(file)
    return BuildLog(files=tuple(files), builds=tuple(builds))


def _source_lines(source: Path | str, opened: OpenSource) -> Iterator[Lines]:
    """Lines of the source, some thousand at a time.

    `-` is stdin. Compression is recognised by the content. Raises BadInputError for a file that
    cannot be opened; damage further in ends the reading with a note.
    """
    if str(source) == STDIN:
        yield from lines_of(_chunks(cast("BufferedReader", sys.stdin.buffer), opened), opened)
        return
    if "\n" in str(source):
        yield from lines_of(iter([str(source).encode()]), opened)
        return
    path = Path(source)
    hint = "name a build log: text, .gz, .ipynb, or - for stdin"
    with system_errors(f"cannot read {path}", hint), path.open("rb") as file:
        chunks = _chunks(file, opened)
        if path.suffix == ".ipynb":
            chunks = iter([_notebook_text(b"".join(chunks), opened)])
        yield from lines_of(chunks, opened)


def _chunks(file: BufferedReader, opened: OpenSource) -> Iterator[bytes]:
    """The bytes, those of every gzip member up to the last that can be read of a cut file."""
    if not file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
        yield from iter(partial(file.read, CHUNK_BYTES), b"")
        return
    try:
        yield from iter(partial(gzip.GzipFile(fileobj=file).read1, CHUNK_BYTES), b"")
    except (OSError, EOFError, zlib.error):
        opened.notes.append(
            "the compressed file is damaged or cut; everything before that was read"
        )


def _notebook_text(data: bytes, opened: OpenSource) -> bytes:
    """What the cells of a notebook printed."""
    texts = []
    try:
        for cell in json.loads(data)["cells"]:
            for output in cell.get("outputs", ()):
                text = output.get("text") or output.get("data", {}).get("text/plain", "")
                texts.append("".join(text).removesuffix("\n"))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        opened.notes.append("not a complete notebook; read as plain text")
        return data
    return "\n".join(texts).encode("utf-8", "replace")


def lines_of(chunks: Iterator[bytes], opened: OpenSource) -> Iterator[Lines]:
    """Lines in chunks of bytes, UTF-8 or UTF-16: without ANSI codes, damaged bytes replaced."""
    decoder: codecs.IncrementalDecoder | None = None
    rest = ""
    for chunk in chunks:
        opened.size_bytes += len(chunk)
        if decoder is None:
            encoding = "utf-16" if chunk.startswith(_UTF_16) else "utf-8-sig"
            decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        whole, end, rest = (rest + decoder.decode(chunk)).rpartition("\n")
        if end:
            yield _split(whole, opened)
        rest = rest[: LONGEST_LINE + 1]  # enough to see that the line is too long
    if decoder is not None:
        rest += decoder.decode(b"", True)
    if _cleaned(rest):
        yield _split(rest, opened)


def _split(text: str, opened: OpenSource) -> Lines:
    raw = text.split("\n")
    if len(text) > LONGEST_LINE and max(map(len, raw)) > LONGEST_LINE:
        raw = [_shortened(line) for line in raw]
        text = "\n".join(raw)
        note = f"a line of more than {LONGEST_LINE:,} characters was cut"
        if note not in opened.notes:
            opened.notes.append(note)
    opened.lines += len(raw)
    clean = _cleaned(text)
    return raw if clean == text else clean.split("\n"), raw


def _shortened(line: str) -> str:
    return line[:LONGEST_LINE] + CUT_MARK if len(line) > LONGEST_LINE else line


def _cleaned(text: str) -> str:
    """The text without carriage returns at line ends and without colours."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").removesuffix("\r")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return without_web_marks(text)


def without_web_marks(text: str) -> str:
    """The text without what web pages make of it: `-&gt;` is an arrow, a wide blank a blank."""
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]).replace("\n", " "), text)
    if not text.isascii():
        text = _NO_WIDTH.sub("", _BLANKS.sub(" ", text))
    return text


# --- messages become builds -----------------------------------------------------------------------

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

    def feed(self, lines: Sequence[str], raw: Sequence[str] | None = None) -> None:
        """Read the next lines, without their ends; `raw`: as they stand in the file."""
        table = self._table.get
        for line in self._messages.of(lines, lines if raw is None else raw):
            message, _, _, _, style = line
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
        build.add_sparsity(replace(listed, raw=line.quote[:LONGEST_RAW]))

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

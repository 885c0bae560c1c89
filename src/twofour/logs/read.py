"""Anyone's TensorRT build log, from a file to a record: encodings, formats and limits."""

from __future__ import annotations

import codecs
import gzip
import html
import json
import re
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import cast

from twofour.errors import system_errors
from twofour.logs.layer_info import nothing_in
from twofour.logs.parser import LogParser
from twofour.logs.tactics import Budget
from twofour.records.log import Build, BuildLog, LogFile

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


Lines = list[str]
"""Some thousand lines without their ends, cleaned of colours and of what web pages make of blanks
and brackets."""


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
        for lines in _source_lines(source, opened):
            parser.feed(lines)
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
    lines = _cleaned(text).split("\n")
    if len(text) > LONGEST_LINE and max(map(len, lines)) > LONGEST_LINE:
        lines = [_shortened(line) for line in lines]
        note = f"a line of more than {LONGEST_LINE:,} characters was cut"
        if note not in opened.notes:
            opened.notes.append(note)
    opened.lines += len(lines)
    return lines


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

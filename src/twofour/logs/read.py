"""A TensorRT build log of anyone, from a file to a record: encodings, formats and limits."""

from __future__ import annotations

import codecs
import gzip
import html
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from twofour.errors import BadInputError
from twofour.logs.layer_info import nothing_in
from twofour.logs.layers import Budget
from twofour.logs.parser import LogParser
from twofour.records.log import Build, BuildLog, LogFile

STDIN = "-"
CHUNK_BYTES = 1 << 20
LONGEST_LINE = 1 << 20
"""Characters; a line beyond it is cut (the longest real ones have some 50,000)."""
CUT_MARK = "..."
"""Stands for the rest of a cut line, as an author's dots do for names left out of a list."""
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_BLANKS = re.compile("[\N{NO-BREAK SPACE}\u1680\u2000-\u200a\u202f\u205f\u3000]")
_NO_WIDTH = re.compile("[\u200b-\u200d\u2060\ufeff]")
_ENTITY = re.compile(r"&(?:\w{2,6}|#\w{2,4});")
_GZIP_MAGIC = b"\x1f\x8b"
_LARGEST_NOTEBOOK = 256 << 20


@dataclass(slots=True)
class Reading:
    """What is learned of a source while it is read."""

    name: str
    size_bytes: int = 0
    lines: int = 0
    notes: list[str] = field(default_factory=list)


class Batch(NamedTuple):
    """Some thousand lines without their ends."""

    lines: list[str]
    """Without colours and what web pages make of blanks and brackets."""
    raw: list[str]
    """As they stand in the source; the same list where nothing had to be cleaned."""


def batches(source: Path | str, reading: Reading) -> Iterator[Batch]:
    """Lines of the source, batch by batch.

    `-` is stdin. Compression is told by the content. Raises BadInputError for a file that cannot be
    opened; damage further in ends the reading with a note.
    """
    if str(source) == STDIN:
        yield from _lines(sys.stdin.buffer, reading)
        return
    path = Path(source)
    try:
        with path.open("rb") as file:
            if path.suffix == ".ipynb":
                yield from _notebook(file, reading)
            else:
                yield from _lines(file, reading)
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error


def lines_of(chunks: Iterator[bytes], reading: Reading) -> Iterator[Batch]:
    """Decode and split chunks of bytes; ANSI codes are removed, undecodable bytes replaced."""
    decoder: codecs.IncrementalDecoder | None = None
    rest, cut = "", False
    for chunk in chunks:
        reading.size_bytes += len(chunk)
        decoder = decoder or _decoder(chunk)
        text = decoder.decode(chunk)
        if cut:
            text = text[text.find("\n") :] if "\n" in text else ""
        text = rest + text
        end = text.rfind("\n") + 1
        whole, rest = text[:end], text[end:]
        cut = cut and not whole
        if len(rest) > LONGEST_LINE and not cut:
            rest, cut = _cut(rest, reading), True
        if whole:
            yield _batch(whole, reading)
    rest += decoder.decode(b"", True) if decoder else ""
    if _cleaned(rest):
        yield _batch(f"{rest}\n", reading)


def _batch(text: str, reading: Reading) -> Batch:
    clean = _cleaned(text)
    lines = clean.split("\n")[:-1]
    reading.lines += len(lines)
    return Batch(lines, lines if clean == text else text.split("\n")[:-1])


def _lines(file: BinaryIO, reading: Reading) -> Iterator[Batch]:
    buffered = io.BufferedReader(cast("io.RawIOBase", file), CHUNK_BYTES)
    try:
        packed = buffered.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
        chunks = iter(partial(buffered.read, CHUNK_BYTES), b"")
        yield from lines_of(_unpacked(buffered, reading) if packed else chunks, reading)
    finally:
        buffered.detach()  # stdin stays open


def _unpacked(file: BinaryIO, reading: Reading) -> Iterator[bytes]:
    """Text of every gzip member, up to the last byte that can be had of a cut file."""
    try:
        yield from iter(partial(gzip.GzipFile(fileobj=file).read1, CHUNK_BYTES), b"")
    except (OSError, EOFError, zlib.error):
        reading.notes.append("the compressed file is damaged or cut: read up to there")


def _decoder(start: bytes) -> codecs.IncrementalDecoder:
    """UTF-8, or UTF-16 where a byte order mark says so."""
    wide = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return codecs.getincrementaldecoder("utf-16" if wide else "utf-8-sig")(errors="replace")


def plain(text: str) -> str:
    """The text without what a web page makes of it: blanks that do not break, HTML's entities."""
    if "&" in text:
        text = _ENTITY.sub(lambda found: html.unescape(found[0]).replace("\n", " "), text)
    if not text.isascii():
        text = _NO_WIDTH.sub("", _BLANKS.sub(" ", text))
    return text


def _cleaned(text: str) -> str:
    if "\r\n" in text:
        text = text.replace("\r\n", "\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return plain(text)


def _cut(rest: str, reading: Reading) -> str:
    note = f"a line of more than {LONGEST_LINE:,} characters was cut"
    if note not in reading.notes:
        reading.notes.append(note)
    return rest[:LONGEST_LINE] + CUT_MARK


def _notebook(file: BinaryIO, reading: Reading) -> Iterator[Batch]:
    data = file.read(_LARGEST_NOTEBOOK)
    try:
        cells = json.loads(data)["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        texts = [output.get("text") or output.get("data", {}).get("text/plain", "")
                 for output in outputs]  # fmt: skip
        whole = "\n".join("".join(text).removesuffix("\n") for text in texts)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        reading.notes.append("not a whole notebook: read as plain text")
        yield from lines_of(iter([data]), reading)
        return
    yield from lines_of(iter([whole.encode("utf-8", "replace")]), reading)


def read_build_log(*sources: Path | str) -> BuildLog:
    """Read logs: paths (plain, .gz, .ipynb) or "-" for stdin.

    Any bytes are read without an error; only a file that cannot be opened raises BadInputError.
    What is kept is bounded, and each record says how much was dropped.
    """
    budget = Budget()
    files: list[LogFile] = []
    builds: list[Build] = []
    for source in sources:
        reading = Reading(str(source))
        found = _builds_of(source, reading, budget)
        builds += found
        if not found:
            reading.notes.append(nothing_in(source))
        files.append(
            LogFile(
                name=reading.name,
                lines=reading.lines,
                size_bytes=reading.size_bytes,
                notes=tuple(reading.notes),
            )
        )
    return BuildLog(files=tuple(files), builds=tuple(builds))


def _builds_of(source: Path | str, reading: Reading, budget: Budget) -> list[Build]:
    parser = LogParser(reading.name, budget)
    for lines, raw in batches(source, reading):
        parser.feed(lines, raw)
    return parser.finish()


def parse_lines(lines: Iterable[str], *, name: str = "log") -> tuple[Build, ...]:
    """Builds in lines of text that is already at hand (line ends are removed)."""
    parser = LogParser(name, Budget())
    raw = [line.rstrip("\n") for line in lines]
    parser.feed([plain(line) for line in raw], raw)
    return tuple(parser.finish())

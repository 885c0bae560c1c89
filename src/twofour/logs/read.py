"""A TensorRT build log of anyone, from a file to a record: encodings, formats and limits."""

from __future__ import annotations

import codecs
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

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
_ENTITIES = {
    "amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'", "nbsp": " ", "#39": "'",
    "#x27": "'", "#34": '"', "#x22": '"', "#38": "&", "#60": "<", "#62": ">", "#160": " ",
    "#x2f": "/", "#47": "/", "#43": "+", "#124": "|", "#x7c": "|", "#xa0": " ",
}  # fmt: skip
_ENTITY = re.compile(rf"&({'|'.join(_ENTITIES)});", re.IGNORECASE)
_SAMPLE_BYTES = 4096
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 31
"""zlib: a gzip header, and the largest window."""
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
    start = file.read(len(_GZIP_MAGIC))
    joined = _Rejoined(start, file)
    if start != _GZIP_MAGIC:
        yield from lines_of(_chunks(joined), reading)
        return
    yield from lines_of(_unpacked(joined, reading), reading)


class _Rejoined(io.RawIOBase):
    """A stream whose first bytes were already taken, for a stdin that cannot seek."""

    def __init__(self, start: bytes, rest: BinaryIO) -> None:
        super().__init__()
        self._start = start
        self._rest = rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        start, self._start = self._start, b""
        return start + self._rest.read(size)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # Buffer is 3.12
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Inflater(Protocol):
    """What zlib.decompressobj gives."""

    @property
    def eof(self) -> bool: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def _unpacked(file: io.RawIOBase, reading: Reading) -> Iterator[bytes]:
    """Text of every gzip member, up to the last byte that can be had of a cut file."""
    inflater: _Inflater | None = None
    try:
        for packed in _chunks(file):
            data = packed
            while data:
                if inflater is None:
                    data = data.lstrip(b"\0")  # padding between members, as gzip allows
                    if not data:
                        break
                    inflater = zlib.decompressobj(_GZIP_WBITS)
                yield inflater.decompress(data, CHUNK_BYTES)
                data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
                inflater = None if inflater.eof else inflater
        if inflater is not None:
            yield inflater.decompress(b"", CHUNK_BYTES)
    except zlib.error as error:
        reading.notes.append(f"the compressed file is damaged, read up to there: {error}")
        return
    if inflater is not None:
        reading.notes.append("the compressed file is damaged or cut: read up to its end")


def _chunks(file: io.RawIOBase) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _decoder(start: bytes) -> codecs.IncrementalDecoder:
    """UTF-8, or UTF-16 where a byte order mark or the zeros of Latin letters say so."""
    wide = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    name = "utf-16" if wide else _wide_without_mark(start) or "utf-8-sig"
    return codecs.getincrementaldecoder(name)(errors="replace")


def _wide_without_mark(start: bytes) -> str | None:
    """UTF-16 as PowerShell and others append it, told by where the zeros of its letters stand."""
    sample = start[:_SAMPLE_BYTES]
    zeros = [sample[place::2].count(0) for place in (0, 1)]
    if max(zeros) < len(sample) // 3 or min(zeros) > max(zeros) // 8:
        return None
    return "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"


def plain(text: str) -> str:
    """The text without what a web page makes of it: blanks that do not break, HTML's entities."""
    if not text.isascii():
        text = _NO_WIDTH.sub("", _BLANKS.sub(" ", text))
    if "&" in text and _ENTITY.search(text):
        text = _ENTITY.sub(lambda found: _ENTITIES[found[1].lower()], text)
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
        texts = _output_texts(json.loads(data))
    except (ValueError, RecursionError):
        reading.notes.append("not a whole notebook: read as plain text")
        yield from lines_of(iter([data]), reading)
        return
    yield from lines_of((text.encode("utf-8", "replace") for text in texts), reading)


def _output_texts(notebook: object) -> Iterator[str]:
    """Text of every output, each ending its last line (nbformat 3 and 4)."""
    for output in _outputs(notebook):
        text = output.get("text")
        if text is None and isinstance(data := output.get("data"), dict):
            text = data.get("text/plain")
        if isinstance(text, list):
            text = "".join(part for part in text if isinstance(part, str))
        if isinstance(text, str):
            yield text if text.endswith("\n") else f"{text}\n"


def _outputs(notebook: object) -> Iterator[dict[str, object]]:
    if not isinstance(notebook, dict):
        return
    sheets = [notebook, *_dicts(notebook.get("worksheets"))]
    for sheet in sheets:
        for cell in _dicts(sheet.get("cells")):
            yield from _dicts(cell.get("outputs"))


def _dicts(value: object) -> Iterator[dict[str, object]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


_TAG = re.compile(
    r"(?P<tag>\[\d{1,5},\d{1,5}\]<std(?:out|err)>:|\[?(?i:rank|worker|proc|process|gpu|node)"
    r"[ _:-]?\d{1,5}\]?[:|](?= )|\d{1,5}: |[A-Za-z][\w.-]{0,60} *\|(?= ))"
)
_ONCE = re.compile(
    r"\[MemUsageChange\] Init CUDA|Loaded shared library \S*nvinfer_builder_resource"
    r"|Engine generation completed in|&&&& RUNNING|(?:Local|Global) timing cache in use"
    r"|Detected \d+ inputs and \d+ output|Input filename:|\(Sparsity\) Found \d+ layer"
)
"""What one build prints once, or nearly so."""
_MOST_TAGS = 64
_SHORTEST = 2


def tags_of(lines: Sequence[str]) -> frozenset[str]:
    """The tags of processes that each build an engine in the lines; empty where one does.

    Two must print the same message of those that one build prints once, and their lines must
    alternate; a tag that changes within one build is no process.
    """
    if not lines or sum(_TAG.match(line) is not None for line in lines[:40]) < _SHORTEST:
        return frozenset()
    tags = [match["tag"] if (match := _TAG.match(line)) else "" for line in lines]
    said: dict[str, set[str]] = {}
    for tag, line in zip(tags, lines, strict=True):
        if tag and (once := _ONCE.search(line)) is not None:
            said.setdefault(once[0], set()).add(tag)
    building = {tag for found in said.values() if len(found) > 1 for tag in found}
    if not building or len(building) > _MOST_TAGS:
        return frozenset()
    own = [tag for tag in tags if tag in building]
    if 2 * len(own) < len(lines):  # the numbers of `cat -n` are no processes
        return frozenset()
    switches = sum(a != b for a, b in pairwise(own))
    return frozenset(building) if switches >= len(building) else frozenset()


def lines_with(tag: str, lines: Sequence[str], tags: frozenset[str]) -> list[str]:
    """The lines of one process, and empty ones in the place of the others; "" has the rest."""
    found = []
    for line in lines:
        match = _TAG.match(line)
        own = match["tag"] if match is not None and match["tag"] in tags else ""
        found.append(line[len(own) :].removeprefix(" ") if own == tag else "")
    return found


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
    """The builds of one source; processes that wrote it together are read apart by their tags."""
    parsers: dict[str, LogParser] = {}
    tags: frozenset[str] = frozenset()
    for lines, raw in batches(source, reading):
        if not parsers:
            tags = tags_of(lines)
            parsers = {tag: LogParser(reading.name, budget) for tag in ("", *sorted(tags))}
        for tag, parser in parsers.items():
            parser.feed(lines_with(tag, lines, tags) if tags else lines, raw)
    if tags:
        names = ", ".join(tag.strip(" :|") for tag in sorted(tags))
        reading.notes.append(f"lines of {len(tags)} processes, read apart by their tags: {names}")
    found = [build for parser in parsers.values() for build in parser.finish()]
    return sorted(found, key=lambda build: build.first_line)


def parse_lines(lines: Iterable[str], *, name: str = "log") -> tuple[Build, ...]:
    """Builds in lines of text that is already at hand (line ends are removed)."""
    parser = LogParser(name, Budget())
    raw = [line.rstrip("\n") for line in lines]
    parser.feed([plain(line) for line in raw], raw)
    return tuple(parser.finish())

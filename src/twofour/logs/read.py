"""Anyone's TensorRT build log, from a file to a record: encodings, formats and limits."""

from __future__ import annotations

import codecs
import gzip
import html
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from twofour.errors import system_errors
from twofour.logs.kernels import Budget
from twofour.logs.layer_info import nothing_in
from twofour.logs.parser import LogParser
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


def _source_lines(source: Path | str, opened: OpenSource) -> Iterator[Lines]:
    """Lines of the source, some thousand at a time.

    `-` is stdin. Compression is recognised by the content. Raises BadInputError for a file that
    cannot be opened; damage further in ends the reading with a note.
    """
    if str(source) == STDIN:
        yield from _lines(sys.stdin.buffer, opened)
        return
    path = Path(source)
    hint = "name a build log: text, .gz, .ipynb, or - for stdin"
    with system_errors(f"cannot read {path}", hint), path.open("rb") as file:
        if path.suffix == ".ipynb":
            yield from _notebook(file, opened)
        else:
            yield from _lines(file, opened)


def lines_of(chunks: Iterator[bytes], opened: OpenSource) -> Iterator[Lines]:
    """Lines in chunks of bytes, UTF-8 or UTF-16: without ANSI codes, damaged bytes replaced."""
    decoder: codecs.IncrementalDecoder | None = None
    rest, cut = "", False
    for chunk in chunks:
        opened.size_bytes += len(chunk)
        if decoder is None:
            wide = chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            name = "utf-16" if wide else "utf-8-sig"
            decoder = codecs.getincrementaldecoder(name)(errors="replace")
        text = decoder.decode(chunk)
        if cut:
            text = text[text.find("\n") :] if "\n" in text else ""
        text = rest + text
        end = text.rfind("\n") + 1
        whole, rest = text[:end], text[end:]
        cut = cut and not whole
        if len(rest) > LONGEST_LINE and not cut:
            rest, cut = rest[:LONGEST_LINE] + CUT_MARK, True
            note = f"a line of more than {LONGEST_LINE:,} characters was cut"
            opened.notes += [] if note in opened.notes else [note]
        if whole:
            yield _split(whole, opened)
    rest += decoder.decode(b"", True) if decoder else ""
    if _cleaned(rest):
        yield _split(f"{rest}\n", opened)


def _split(text: str, opened: OpenSource) -> Lines:
    clean = _cleaned(text)
    lines = clean.split("\n")[:-1]
    opened.lines += len(lines)
    return lines, lines if clean == text else text.split("\n")[:-1]


def _lines(file: BinaryIO, opened: OpenSource) -> Iterator[Lines]:
    buffered = io.BufferedReader(cast("io.RawIOBase", file), CHUNK_BYTES)
    try:
        packed = buffered.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
        chunks = iter(partial(buffered.read, CHUNK_BYTES), b"")
        yield from lines_of(_unpacked(buffered, opened) if packed else chunks, opened)
    finally:
        buffered.detach()  # stdin stays open


def _unpacked(file: BinaryIO, opened: OpenSource) -> Iterator[bytes]:
    """Bytes of every gzip member, up to the last one that can be read of a cut file."""
    try:
        yield from iter(partial(gzip.GzipFile(fileobj=file).read1, CHUNK_BYTES), b"")
    except (OSError, EOFError, zlib.error):
        opened.notes.append(
            "the compressed file is damaged or cut; everything before that was read"
        )


def without_web_marks(text: str) -> str:
    """The text without what web pages make of it: blanks that do not break, HTML's entities."""
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
    return without_web_marks(text)


def _notebook(file: BinaryIO, opened: OpenSource) -> Iterator[Lines]:
    data = file.read()
    try:
        cells = json.loads(data)["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        texts = [output.get("text") or output.get("data", {}).get("text/plain", "")
                 for output in outputs]  # fmt: skip
        whole = "\n".join("".join(text).removesuffix("\n") for text in texts)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        opened.notes.append("not a complete notebook; read as plain text")
        yield from lines_of(iter([data]), opened)
        return
    yield from lines_of(iter([whole.encode("utf-8", "replace")]), opened)


def read_build_log(*sources: Path | str) -> BuildLog:
    """Read logs: paths (plain, .gz, .ipynb) or "-" for stdin.

    Any bytes are read without an error; only a file that cannot be opened raises BadInputError.
    Memory is bounded, and each record says how much was dropped.
    """
    budget = Budget()
    files: list[LogFile] = []
    builds: list[Build] = []
    for source in sources:
        opened = OpenSource(str(source))
        parser = LogParser(opened.name, budget)
        for lines, raw in _source_lines(source, opened):
            parser.feed(lines, raw)
        found = parser.finish()
        builds += found
        if not found:
            opened.notes.append(nothing_in(source))
        files.append(
            LogFile(
                name=opened.name,
                lines=opened.lines,
                size_bytes=opened.size_bytes,
                notes=tuple(opened.notes),
            )
        )
    return BuildLog(files=tuple(files), builds=tuple(builds))

"""The entry: files of anyone, read into one record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from twofour.engines.buildlog.budget import Budget
from twofour.engines.buildlog.interleaved import lines_with, tags_of
from twofour.engines.buildlog.layer_information import nothing_in
from twofour.engines.buildlog.parser import LogParser
from twofour.engines.buildlog.source import Reading, batches, plain
from twofour.records.log import Build, BuildLog, LogFile


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
    for lines in batches(source, reading):
        if not parsers:
            tags = tags_of(lines)
            parsers = {tag: LogParser(reading.name, budget) for tag in ("", *sorted(tags))}
        for tag, parser in parsers.items():
            parser.feed(lines_with(tag, lines, tags) if tags else lines)
    if tags:
        names = ", ".join(tag.strip(" :|") for tag in sorted(tags))
        reading.notes.append(f"lines of {len(tags)} processes, read apart by their tags: {names}")
    found = [build for parser in parsers.values() for build in parser.finish()]
    return sorted(found, key=lambda build: build.first_line)


def parse_lines(lines: Iterable[str], *, name: str = "log") -> tuple[Build, ...]:
    """Builds in lines of text that is already at hand (line ends are removed)."""
    parser = LogParser(name, Budget())
    batch: Sequence[str] = [plain(line.rstrip("\n")) for line in lines]
    parser.feed(batch)
    return tuple(parser.finish())

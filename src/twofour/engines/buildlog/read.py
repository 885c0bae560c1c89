"""The entry: files of anyone, read into one record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from twofour.engines.buildlog.budget import Budget
from twofour.engines.buildlog.layer_information import nothing_in
from twofour.engines.buildlog.parser import LogParser
from twofour.engines.buildlog.source import Reading, batches, plain
from twofour.log_records import Build, BuildLog, LogFile


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
        parser = LogParser(reading.name, budget)
        for lines in batches(source, reading):
            parser.feed(lines)
        found = parser.finish()
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


def parse_lines(lines: Iterable[str], *, name: str = "log") -> tuple[Build, ...]:
    """Builds in lines of text that is already at hand (line ends are removed)."""
    parser = LogParser(name, Budget())
    batch: Sequence[str] = [plain(line.rstrip("\n")) for line in lines]
    parser.feed(batch)
    return tuple(parser.finish())

"""Builds in lines of text, as if they stood in a log."""

from __future__ import annotations

from collections.abc import Iterable

from twofour.logs.read import LogParser
from twofour.logs.tactics import Budget
from twofour.records.log import Build


def parse_lines(lines: Iterable[str], *, name: str = "log") -> tuple[Build, ...]:
    """Builds in lines of text that is already in memory (line ends are removed)."""
    parser = LogParser(name, Budget())
    parser.feed([line.rstrip("\n") for line in lines])
    return tuple(parser.finish())

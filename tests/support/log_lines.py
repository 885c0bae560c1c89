"""Builds in lines of text, as if they stood in a log."""

from __future__ import annotations

from collections.abc import Iterable

from twofour.logs.kernels import Budget
from twofour.logs.parser import LogParser
from twofour.logs.read import without_web_marks
from twofour.records.log import Build


def parse_lines(lines: Iterable[str], *, name: str = "log") -> tuple[Build, ...]:
    """Builds in lines of text that is already in memory (line ends are removed)."""
    parser = LogParser(name, Budget())
    raw = [line.rstrip("\n") for line in lines]
    parser.feed([without_web_marks(line) for line in raw], raw)
    return tuple(parser.finish())

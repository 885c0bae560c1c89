"""Where a statement stands: "file:line: what the log says there", to the letter."""

from __future__ import annotations

from twofour.records.log import Fusion, LogMessage, SkippedTactic, SparsityLine, Tactic
from twofour.reports.join.log_sightings import Mention

_LONGEST = 300
"""Characters that are quoted of one line."""
_BETWEEN = ", "


def line_source(file: str, line: SparsityLine, name: str | None = None) -> str:
    """A (Sparsity) line, or the row of it that names a layer: one piece of it, without marks."""
    rows = line.raw.split("\n")
    at, place = next(
        ((at, place) for at, row in enumerate(rows) if (place := _place(row, name)) >= 0), (0, 0)
    )
    return _cited(file, line.line + at, _piece(rows[at], place, len(name or "")))


def mention_source(file: str, mention: Mention) -> str:
    """The line that names a layer."""
    return line_source(file, mention.line, mention.name)


def quoted_source(file: str, said: Tactic | SkippedTactic | Fusion) -> str:
    """The line of a tactic's fastest time, of why it has none, of a fusion."""
    return _cited(file, said.line, (said.raw or "")[:_LONGEST])


def error_source(file: str, error: LogMessage) -> str:
    """The line of an error, without what follows it on the next."""
    return _cited(file, error.line, error.text.partition("\n")[0][:_LONGEST])


def _cited(file: str, line: int, words: str) -> str:
    return f"{file}:{line}: {words}" if words else f"{file}:{line}"


def _place(row: str, name: str | None) -> int:
    """Where the name is a whole entry of the row; -1 where it is none."""
    if name is None:
        return 0
    place = row.find(name)
    while place >= 0:
        before, after = row[:place].rstrip(), row[place + len(name) :].lstrip()
        if before[-1:] in {"", ":", ",", "|"} and after[:1] in {"", ",", "[", "|"}:
            return place
        place = row.find(name, place + 1)
    return -1


def _piece(row: str, place: int, length: int) -> str:
    """The row's start where that holds the place; else the entries up to the one there."""
    end = place + length
    if end > _LONGEST:
        start = row.find(_BETWEEN, max(0, end - _LONGEST), place)
        return row[place if start < 0 else start + len(_BETWEEN) : end][:_LONGEST]
    if len(row) <= _LONGEST:
        return row
    cut = row.rfind(_BETWEEN, end, _LONGEST)
    return row[: _LONGEST if cut < 0 else cut]

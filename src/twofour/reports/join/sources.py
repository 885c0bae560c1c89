"""Where a statement stands: "file:line: what the log says there"."""

from __future__ import annotations

from twofour.records.log import SparsityKind, SparsityLine, Tactic
from twofour.reports import words
from twofour.reports.join.log_sightings import Mention

_MORE = "..."


def line_source(file: str, line: SparsityLine, name: str | None = None) -> str:
    """A (Sparsity) line, its list shortened to the one name that matters here."""
    return f"{file}:{line.line}: {_words(line)}{_listed(line, name)}"


def mention_source(file: str, mention: Mention) -> str:
    """The line that names a layer."""
    return line_source(file, mention.line, mention.name)


def tactic_source(file: str, tactic: Tactic) -> str:
    """The line with a tactic's fastest time, as TensorRT 8.6 and later write it."""
    number = "" if tactic.id is None else f" Tactic: {tactic.id}"
    kernel = tactic.kernel or "(no name)"
    return f"{file}:{tactic.line}: Tactic Name: {kernel}{number} Time: {tactic.ms:g}"


def _words(line: SparsityLine) -> str:
    tag = "(foreignNode) (Sparsity)" if line.foreign_node else "(Sparsity)"
    count = line.printed_count
    if line.kind is SparsityKind.ELIGIBLE:
        if count is None:
            return f"{tag} Layers eligible for sparse math:"
        return f"{tag} Found {count} layer(s) eligible to use sparse tactics:"
    if count is None:
        return f"{tag} TRT inference plan picked sparse implementation for layers:"
    return f"{tag} Chose {count} layer(s) using sparse tactics:"


def _listed(line: SparsityLine, name: str | None) -> str:
    names = line.names or ()
    if name is None:
        return f" {_MORE} ({words.count(len(names), 'name')})" if names else ""
    before = f"{_MORE}, " if names and names[0] != name else ""
    after = f", {_MORE}" if names and names[-1] != name else ""
    return f" {before}{name}{after}"

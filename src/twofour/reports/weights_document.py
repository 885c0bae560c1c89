"""Weights that were pruned, and weights that were read back, as documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from twofour.eligibility.predict import not_covered_lines
from twofour.eligibility.rules import holds_trivially
from twofour.records.pruning import PrunedWeight, PruneResult, Validation, WeightCheck
from twofour.records.weights import Reason
from twofour.reports.document import Column, Document, Kind, Lines, Role, Table, column, present
from twofour.reports.eligibility_words import TRIVIAL
from twofour.words import count, nothing_pruned, printable, shape_cell, share, times


def prune_document(result: PruneResult) -> Document:
    """A row per weight: pruned or not, its zeros, the magnitude that is left, and why not."""
    rows = result.weights
    pruned = column("pruned", Kind.VERDICT, rows, lambda r: "yes" if r.pruned else "no")
    columns = (
        column("layer", Kind.NAME, rows, lambda r: printable(r.weight.layer)),
        column("op", Kind.VERDICT, rows, lambda r: r.weight.op),
        column("C x K kernel", Kind.TEXT, rows, lambda r: shape_cell(r.weight)),
        replace(pruned, slugs=tuple("holds" if r.pruned else "dense" for r in rows)),
        column("zeros", Kind.FIGURE, rows, lambda r: share(r.zeros, prod(r.weight.shape))),
        column("kept |w|", Kind.VERDICT, rows, _kept_magnitude),
        column("notes", Kind.TEXT, rows, lambda r: _sentences(r.reasons)),
    )
    lines = (_prune_line(result), *not_covered_lines(result.not_covered))
    return Document(
        name=printable(result.source),
        about="pruned weights",
        title="Pruned weights",
        lead=(Lines(lines=lines, role=Role.TEXT),),
        blocks=(Table(title="", columns=columns, style="rows"),),
    )


def validation_document(validation: Validation) -> Document:
    """A row per weight that was read back, file by file, then those that could not be checked."""
    files = dict.fromkeys(check.file for check in validation.checks)
    skipped = tuple(
        f"not checked: {printable(w.layer)}: {_sentences(w.reasons) or '-'}"
        for w in validation.skipped
    )
    lines = (_validation_line(validation), *not_covered_lines(validation.not_covered))
    return Document(
        name=printable(", ".join(validation.files)),
        about="weights read back",
        title="Weights read back",
        lead=(Lines(lines=lines, role=Role.TEXT),),
        blocks=present(
            *(_checks_table(file, validation) for file in files),
            Lines(lines=skipped, role=Role.TEXT),
        ),
    )


def holding_words(validation: Validation) -> str:
    """In how many weights the pattern holds; those that could not break it count apart."""
    pattern, checks = validation.pattern, validation.checks
    breakable = [c for c in checks if not holds_trivially(c.shape, c.axis, pattern)]
    holding = sum(not c.violations for c in breakable)
    line = f"{pattern} holds in {holding} of {count(len(breakable), 'weight')}"
    narrow = len(checks) - len(breakable)
    return f"{line} ({narrow:,} more too narrow to break it)" if narrow else line


def _kept_magnitude(row: PrunedWeight) -> str | None:
    return None if row.kept_magnitude is None else f"{100 * row.kept_magnitude:.1f} %"


def _prune_line(result: PruneResult) -> str:
    pruned = sum(row.pruned for row in result.weights)
    held = sum(row.held_before for row in result.weights)
    line = f"{pruned} of {count(len(result.weights), 'weight')} pruned to {result.pattern}"
    if held and held == pruned:
        line = nothing_pruned(result.pattern, held)
    elif held:
        line += f" ({held} held it as they came)"
    return f"{line} by {result.method}"


def _checks_table(file: str, validation: Validation) -> Table:
    rows = [check for check in validation.checks if check.file == file]
    columns = (
        column("layer", Kind.NAME, rows, lambda c: printable(c.layer)),
        column("op", Kind.VERDICT, rows, lambda c: c.op),
        column("shape", Kind.TEXT, rows, lambda c: times(c.shape)),
        column("axis", Kind.VERDICT, rows, lambda c: str(c.axis)),
        column("groups", Kind.FIGURE, rows, lambda c: f"{c.groups_checked:,}"),
        column("violations", Kind.FIGURE, rows, lambda c: f"{c.violations:,}"),
        column("first at", Kind.TEXT, rows, _first_violation),
        _verdicts(rows, validation),
    )
    return Table(title=printable(file), columns=columns, style="rows")


def _first_violation(check: WeightCheck) -> str | None:
    return None if check.first_violation is None else str(list(check.first_violation))


def _verdicts(checks: Sequence[WeightCheck], validation: Validation) -> Column:
    slugs = ["holds" if not c.violations else "broken" if c.required else "dense" for c in checks]

    def words(check: WeightCheck) -> str:
        if not check.violations:
            trivial = holds_trivially(check.shape, check.axis, validation.pattern)
            return TRIVIAL if trivial else "holds"
        word = "broken" if check.required else "dense"
        along = check.holds_along
        return word if along is None else f"{word}, holds along axis {along}"

    return replace(column("verdict", Kind.TEXT, checks, words), slugs=tuple(slugs))


def _validation_line(validation: Validation) -> str:
    line, broken = holding_words(validation), len(validation.broken)
    if broken:
        return f"{line}; broken in {count(broken, 'weight')} that had to be {validation.pattern}"
    required = sum(c.required for c in validation.checks)
    return f"{line}; required: {required}, all hold" if required else f"{line}; none is required to"


def _sentences(reasons: tuple[Reason, ...]) -> str | None:
    return "; ".join(f"{r.code.value}: {printable(r.message)}" for r in reasons) or None

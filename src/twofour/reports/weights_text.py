"""Weights that were pruned, and weights that were read back, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twofour.eligibility.predict import not_covered_lines
from twofour.eligibility.rules import holds_trivially
from twofour.records.pruning import PrunedWeight, PruneResult, Validation, WeightCheck
from twofour.records.weights import Pattern, Reason
from twofour.reports.eligibility_words import TRIVIAL
from twofour.reports.terminal import headed
from twofour.words import count, nothing_pruned, printable, shape_cell, share, times

_LONGEST_WORD = len("ConvTranspose")


def validation_table(validation: Validation) -> RenderableType:
    """A row per weight that was read back, file by file, then those that could not be checked."""
    files = tuple(dict.fromkeys(check.file for check in validation.checks))
    tables: list[RenderableType] = []
    for file in files:
        if file:
            tables.append(Text(printable(file), style="bold"))
        checks = [c for c in validation.checks if c.file == file]
        tables.append(_checks_table(checks, validation.pattern))
    skipped = [
        Text.assemble("not checked: ", printable(w.layer), ": ", _sentences(w.reasons))
        for w in validation.skipped
    ]
    beside = map(Text, not_covered_lines(validation.not_covered))
    return Group(*tables, *skipped, Text(_validation_line(validation)), *beside)


def holding_words(validation: Validation) -> str:
    """In how many weights the pattern holds; those that could not break it count apart."""
    pattern, checks = validation.pattern, validation.checks
    telling = [c for c in checks if not holds_trivially(c.shape, c.axis, pattern)]
    holding = sum(not c.violations for c in telling)
    line = f"{pattern} holds in {holding} of {count(len(telling), 'weight')}"
    narrow = len(checks) - len(telling)
    return f"{line} ({narrow:,} more too narrow to break it)" if narrow else line


def _checks_table(checks: Sequence[WeightCheck], pattern: Pattern) -> Table:
    table = headed("layer", "op", "shape", "axis", "groups", "violations", "first at", "verdict")
    for check in checks:
        table.add_row(
            Text(printable(check.layer), overflow="fold"),
            Text(check.op, overflow="fold"),
            Text(times(check.shape)),
            Text(str(check.axis)),
            Text(f"{check.groups_checked:,}", justify="right"),
            Text(f"{check.violations:,}", justify="right"),
            Text("-" if check.first_violation is None else str(list(check.first_violation))),
            _check_cell(check, pattern),
        )
    _keep_whole(table, "op", "axis", "groups", "violations")
    return table


def prune_table(result: PruneResult) -> RenderableType:
    """A row per weight: pruned or not, its zeros, the magnitude that is left, and why not."""
    table = headed("layer", "op", "C x K kernel", "pruned", "zeros", "kept |w|", "notes")
    for row in result.weights:
        table.add_row(
            Text(printable(row.weight.layer), overflow="fold"),
            Text(row.weight.op, overflow="fold"),
            Text(shape_cell(row.weight)),
            Text("yes" if row.pruned else "no", style="green" if row.pruned else "yellow"),
            Text(_zeros(row), justify="right"),
            Text("-" if row.kept_magnitude is None else f"{100 * row.kept_magnitude:.1f} %"),
            Text(_sentences(row.reasons)),
        )
    _keep_whole(table, "op", "pruned", "zeros", "kept |w|")
    pruned = sum(row.pruned for row in result.weights)
    held = sum(row.held_before for row in result.weights)
    line = f"{pruned} of {count(len(result.weights), 'weight')} pruned to {result.pattern}"
    if held and held == pruned:
        line = nothing_pruned(result.pattern, held)
    elif held:
        line += f" ({held} held it as they came)"
    beside = map(Text, not_covered_lines(result.not_covered))
    return Group(table, Text(f"{line} by {result.method}"), *beside)


def _keep_whole(table: Table, *titles: str) -> None:
    """Columns of short words and figures give none of their room away while others can."""
    for column in table.columns:
        if column.header in titles:
            longest = max((len(str(cell)) for cell in column.cells), default=0)
            column.width = max(min(longest, _LONGEST_WORD), len(str(column.header)))


def _check_cell(check: WeightCheck, pattern: Pattern) -> Text:
    if not check.violations:
        trivial = holds_trivially(check.shape, check.axis, pattern)
        return Text(TRIVIAL if trivial else "holds", style="green")
    word = "broken" if check.required else "dense"
    if check.holds_along is not None:
        word += f", holds along axis {check.holds_along}"
    return Text(word, style="red" if check.required else "yellow")


def _validation_line(validation: Validation) -> str:
    line, broken = holding_words(validation), len(validation.broken)
    if broken:
        return f"{line}; broken in {count(broken, 'weight')} that had to be {validation.pattern}"
    required = sum(c.required for c in validation.checks)
    return f"{line}; required: {required}, all hold" if required else f"{line}; none is required to"


def _zeros(row: PrunedWeight) -> str:
    return share(row.zeros, prod(row.weight.shape))


def _sentences(reasons: tuple[Reason, ...]) -> str:
    return "; ".join(f"{r.code.value}: {printable(r.message)}" for r in reasons) or "-"

"""Weights that were pruned, and weights that were read back, as documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from statistics import median

from twofour.eligibility.predict import not_covered_lines
from twofour.eligibility.rules import holds_trivially
from twofour.records.weights import PrunedWeight, PruneResult, Reason, Validation, WeightCheck
from twofour.reports.document import (
    Column,
    Document,
    Kind,
    Lines,
    Role,
    Section,
    Table,
    column,
    figures,
    folds,
    present,
    section,
)
from twofour.reports.eligibility_words import TRIVIAL, stale_lines
from twofour.words import count, nothing_pruned, per_cent, printable, shape_cell, times


def prune_document(result: PruneResult) -> Document:
    """A row per weight: pruned or not, its zeros, what is left, what it cost, and why not."""
    lines = (
        _prune_line(result),
        *calibration_lines(result),
        *not_covered_lines(result.not_covered),
    )
    return Document(
        name=printable(result.source),
        about="pruned weights",
        title="Pruned weights",
        lead=(Lines(lines=lines, role=Role.TEXT),),
        blocks=(pruned_table(result.weights),),
    )


def pruning_section(result: PruneResult) -> Section | None:
    """What pruning did, as a part of a run's report: only the weights that it changed."""
    changed = [row for row in result.weights if row.pruned]
    return section(
        "What pruning did to each layer",
        Lines(lines=(_prune_line(result), *calibration_lines(result)), role=Role.LIST),
        pruned_table(changed) if changed else None,
    )


def pruned_table(rows: Sequence[PrunedWeight]) -> Table:
    """A row per weight; columns that would say nothing (all pruned, no data) are left out."""
    pruned = replace(
        column("pruned", Kind.VERDICT, rows, lambda r: "yes" if r.pruned else "no"),
        slugs=tuple("holds" if r.pruned else "dense" for r in rows),
    )
    some_dense = not all(row.pruned for row in rows)
    columns = (
        column("layer", Kind.NAME, rows, lambda r: printable(r.weight.layer)),
        column("op", Kind.VERDICT, rows, lambda r: r.weight.op),
        column("C x K kernel", Kind.TEXT, rows, lambda r: shape_cell(r.weight)),
        *((pruned,) if some_dense else ()),
        figures("zeros", rows, lambda r: r.zeros / max(1, prod(r.weight.shape)), per_cent),
        figures("kept |w|", rows, lambda r: r.kept_magnitude, per_cent),
    )
    errors = [row.output_error for row in rows]
    measured = (
        column("method", Kind.VERDICT, rows, lambda r: r.method),
        figures(
            "output error", errors, lambda e: None if e is None else e.calibration, _error_words
        ),
        figures("held out", errors, lambda e: None if e is None else e.held_out, _error_words),
    )
    notes = column("notes", Kind.TEXT, rows, _notes)
    return Table(
        title="",
        columns=(*columns, *(measured if any(errors) else ()), notes),
        folds=lambda: folds((r.weight.layer, _alike(r)) for r in rows),
        style="rows",
    )


def _alike(row: PrunedWeight) -> tuple[object, ...]:
    weight = row.weight
    sizes = weight.in_channels, weight.out_channels, weight.kernel, weight.groups
    return weight.op, *sizes, row.pruned, row.method, row.output_error is None, _notes(row)


def calibration_lines(result: PruneResult) -> tuple[str, ...]:
    """The data, and the errors of all layers in one line; () without data."""
    if result.calibration is None:
        return ()
    data = result.calibration
    lines = [
        f"calibrated with {count(data.samples, 'sample')} of {printable(data.source)}, "
        f"{data.held_out:,} of them held out",
        *map(printable, data.notes),
    ]
    errors = sorted(
        (row.output_error.judged, row.weight.layer)
        for row in result.weights
        if row.output_error is not None
    )
    if errors:
        middle, (most, layer) = median(error for error, _ in errors), errors[-1]
        lines.append(
            f"error of layer outputs: median {_error_words(middle)}, "
            f"largest {_error_words(most)} ({printable(layer)})"
        )
    return tuple(lines)


def _error_words(error: float) -> str:
    """The part of a layer's output that is lost: "0.12 %", "7.3 %"."""
    return f"{100 * error:.0f} %" if error >= 0.1 else f"{100 * error:.2g} %"


def _notes(row: PrunedWeight) -> str | None:
    said = (_sentences(row.reasons), None if row.note is None else printable(row.note))
    return "; ".join(filter(None, said)) or None


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
        lead=present(
            Lines(lines=stale_lines(validation.stale), role=Role.WARNING),
            Lines(lines=lines, role=Role.TEXT),
        ),
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
        column(
            "first at",
            Kind.TEXT,
            rows,
            lambda c: str(list(c.first_violation)) if c.first_violation else None,
        ),
        _verdicts(rows, validation),
    )
    return Table(title=printable(file), columns=columns, style="rows")


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

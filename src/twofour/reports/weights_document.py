"""Weights that were pruned, and weights that were read back, as documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from statistics import fmean, median

from twofour.eligibility.predict import not_covered_lines
from twofour.eligibility.rules import holds_trivially
from twofour.records.pruning import (
    FixedChannels,
    Permutation,
    PermutedClass,
    PermutedLayer,
    PrunedWeight,
    PruneResult,
    Repair,
    Validation,
    WeightCheck,
)
from twofour.records.weights import Reason
from twofour.reports.document import (
    Column,
    Document,
    Kind,
    Lines,
    Plot,
    Role,
    Section,
    Table,
    column,
    figures,
    present,
    section,
)
from twofour.reports.eligibility_words import TRIVIAL, stale_lines
from twofour.reports.folds import folds
from twofour.reports.pruning_plots import draw_errors, error_key
from twofour.words import (
    count,
    in_seconds,
    nothing_pruned,
    per_cent,
    printable,
    shape_cell,
    times,
)


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
        blocks=present(
            pruned_table(result.weights),
            error_plot(result.weights),
            None if result.permutation is None else permutation_section(result.permutation),
        ),
    )


def pruning_section(result: PruneResult) -> Section | None:
    """What pruning did, as a part of a run's report: only the weights that it changed."""
    changed = [row for row in result.weights if row.pruned]
    return section(
        "What pruning did to each layer",
        Lines(lines=(_prune_line(result), *calibration_lines(result)), role=Role.LIST),
        error_plot(changed),
        pruned_table(changed) if changed else None,
    )


def permutation_section(found: Permutation) -> Section | None:
    """Which channels were put in another order and what that saves; which stay, and why."""
    return section(
        "Channel permutation",
        Lines(lines=tuple(permutation_lines(found)), role=Role.LIST),
        _classes_table(found.classes) if found.classes else None,
        _fixed_table(found.fixed) if found.fixed else None,
    )


def permutation_lines(found: Permutation) -> Iterator[str]:
    """What became of the search, and what its orders do to the whole model."""
    if found.refused is not None:
        yield f"refused: {printable(found.refused)}"
    elif not found.classes:
        yield "no input channels of the pruned layers can change places"
    else:
        classes = f"{found.taken:,} of {len(found.classes):,} classes of channels"
        yield f"{classes} are in another order, in which the dense model gives the same outputs"
    if found.taken:
        yield "the saved weights have this order, in every layer that the channels go through"
    if found.error_permuted is not None and found.error_unpermuted is not None:
        yield (
            "error of the pruned model's outputs on held-out samples: "
            f"{_error_words(found.error_permuted)} with it, "
            f"{_error_words(found.error_unpermuted)} without it"
        )
    elif found.taken:
        yield (
            "whether the outputs of the pruned model are nearer with it is not known: that takes "
            "calibration data, of which some are held out, and repair, which measures them"
        )
    if found.is_time_cut:
        yield (
            f"the time ({in_seconds(found.seconds)}) ended the search: more of it may find better "
            "orders"
        )


def _classes_table(rows: Sequence[PermutedClass]) -> Table:
    """A row per class: what its order does to the layers that read it."""
    taken = column("taken", Kind.VERDICT, rows, lambda r: "yes" if r.taken else "no")
    columns = (
        column("layers", Kind.NAME, rows, lambda r: _first_of([x.layer for x in r.layers])),
        column("channels", Kind.FIGURE, rows, lambda r: f"{r.channels:,}"),
        column(
            "efficacy", Kind.FIGURE, rows, lambda r: per_cent(r.efficacy) if r.efficacy else None
        ),
        column("kept", Kind.FIGURE, rows, lambda r: _change(r, _kept, per_cent)),
        column("output error", Kind.FIGURE, rows, lambda r: _change(r, _errors, _error_words)),
        replace(taken, slugs=tuple("holds" if r.taken else "dense" for r in rows)),
        column("why", Kind.TEXT, rows, lambda r: printable(r.reason)),
    )
    legend = (
        "Channels of a class may stand in any order without changing the model. Efficacy: of what "
        "magnitude loses and some order could save, the share that is saved. Kept and output error "
        "are means over the layers, before and after."
    )
    return Table(title="", columns=columns, legend=legend, style="rows")


def _fixed_table(rows: Sequence[FixedChannels]) -> Table:
    columns = (
        column("layer", Kind.NAME, rows, lambda r: printable(r.layer)),
        column("channels", Kind.FIGURE, rows, lambda r: f"{r.channels:,}" if r.channels else None),
        column("why they stay", Kind.TEXT, rows, lambda r: printable(r.reason)),
    )
    return Table(title="Channels that stay where they are", columns=columns, style="rows")


def _first_of(layers: Sequence[str]) -> str:
    """The first, and how many more."""
    more = f" and {len(layers) - 1:,} more" if len(layers) > 1 else ""
    return f"{printable(layers[0])}{more}"


def _kept(layer: PermutedLayer) -> tuple[float | None, float | None]:
    return layer.kept_before, layer.kept_after


def _errors(layer: PermutedLayer) -> tuple[float | None, float | None]:
    return layer.error_before, layer.error_after


def _change(
    of: PermutedClass,
    values: Callable[[PermutedLayer], tuple[float | None, float | None]],
    words: Callable[[float], str],
) -> str | None:
    """Means over the layers that were judged, before and after; None where none was."""
    pairs = [values(layer) for layer in of.layers]
    sides = ([x for x in side if x is not None] for side in zip(*pairs, strict=True))
    return " to ".join(words(fmean(side)) for side in sides if side) or None


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
        figures("zeros", rows, _zeros, per_cent),
        figures("kept |w|", rows, lambda r: r.kept_magnitude, per_cent),
    )
    known = [row for row in rows if row.output_error is not None]
    measured = (
        column("method", Kind.VERDICT, rows, lambda r: r.method),
        figures("output error", rows, _seen_error, _error_words),
        figures("held out", rows, _held_out_error, _error_words),
    )
    notes = column("notes", Kind.TEXT, rows, _notes)
    return Table(
        title="",
        columns=(*columns, *(measured if known else ()), notes),
        folds=lambda: folds((r.weight.layer, _alike(r)) for r in rows),
        style="rows",
    )


def _alike(row: PrunedWeight) -> tuple[object, ...]:
    """What weights have in common that share a row."""
    weight = row.weight
    sizes = weight.in_channels, weight.out_channels, weight.kernel, weight.groups
    return weight.op, *sizes, row.pruned, row.method, row.output_error is None, _notes(row)


def _zeros(row: PrunedWeight) -> float:
    """Share of the stored array; 0 of one without elements."""
    return row.zeros / max(1, prod(row.weight.shape))


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
            f"output error of {count(len(errors), 'layer')}: median {_error_words(middle)}, "
            f"largest {_error_words(most)} in {printable(layer)}"
        )
    if result.repair is not None:
        lines.append(_repair_line(result.repair))
    return tuple(lines)


def _repair_line(repair: Repair) -> str:
    """What was tried after pruning, what was taken, and by which figures."""
    if repair.taken is None:
        line = f"repair: none taken: {repair.why}"
    else:
        changed = next(each.changed for each in repair.tried if each.kind is repair.taken)
        line = f"repair: {repair.taken.value} of {count(changed, 'layer')} taken: {repair.why}"
    if repair.error_before is None:
        return line
    errors = [f"{_error_words(repair.error_before)} one-shot"]
    if repair.taken is not None and repair.error_after is not None:
        errors.append(f"{_error_words(repair.error_after)} repaired")
    errors += (
        f"{'not known' if each.error is None else _error_words(each.error)} by {each.kind.value}"
        for each in repair.tried
        if each.kind is not repair.taken
    )
    return (
        f"{line}; error of the outputs on {count(repair.judged_on, 'held-out sample')}: "
        f"{', '.join(errors)} (squared distance to the dense ones over the variance of their "
        "columns)"
    )


def error_plot(rows: Sequence[PrunedWeight]) -> Plot | None:
    """Output error of each layer, in the order of the model; None where none was measured."""
    known = [row for row in rows if row.output_error is not None]
    if not known:
        return None
    return Plot(
        caption="Output error of each pruned layer",
        draw=partial(draw_errors, known),
        key=error_key(),
        note="||(W - W')X||² / ||WX||² in the order of the layers, logarithmic: 0.01 is one "
        "per cent of the output's energy. Held out: calibration samples that the method did not "
        "see.",
    )


def _seen_error(row: PrunedWeight) -> float | None:
    return None if row.output_error is None else row.output_error.calibration


def _held_out_error(row: PrunedWeight) -> float | None:
    return None if row.output_error is None else row.output_error.held_out


def _error_words(error: float) -> str:
    return f"{error:.2g}" if error < 0.001 else f"{error:.4f}"


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

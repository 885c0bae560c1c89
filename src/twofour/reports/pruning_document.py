"""Pruning as documents: weights pruned, weights read back, and what each layer loses and saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from statistics import median

from twofour.eligibility.predict import not_covered_lines
from twofour.eligibility.rules import holds_trivially
from twofour.records.eligibility import ShareUnit
from twofour.records.export import Metric
from twofour.records.run import (
    BudgetResult,
    Conversion,
    Finetuning,
    LayerCost,
    Measured,
    ModelSizes,
    SensitivityResult,
)
from twofour.records.weights import PrunedWeight, PruneResult, Reason, Validation, WeightCheck
from twofour.reports.document import (
    Block,
    Column,
    Document,
    Kind,
    Lines,
    Role,
    Section,
    Table,
    column,
    figures,
    fold_rows,
    present,
    section,
    table,
    verdict_column,
)
from twofour.reports.eligibility_words import TRIVIAL, change_words, points, stale_lines
from twofour.words import (
    count,
    figure,
    in_seconds,
    listed,
    mebibytes,
    name_cell,
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


_PRUNED_LEGEND = "kept |w|: part of the sum of absolute weights that stays."
_ERROR_LEGEND = (
    " output error: part of the layer's output that changes, on calibration samples; held out: on "
    "held-out samples, in a trial with some rows of the layer."
)


def pruned_table(rows: Sequence[PrunedWeight]) -> Table:
    """A row per weight; columns that would say nothing (all pruned, no data) are left out."""
    words, slugs = {True: "yes", False: "no"}, {True: "holds", False: "dense"}
    pruned = verdict_column("pruned", rows, lambda r: words[r.pruned], lambda r: slugs[r.pruned])
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
        legend=_PRUNED_LEGEND + _ERROR_LEGEND * any(errors),
        folds=lambda: fold_rows((r.weight.layer, _alike(r)) for r in rows),
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
        f"{data.held_out:,} of them held out to choose settings and measure errors",
        *map(printable, data.notes),
    ]
    errors = sorted(
        (row.output_error.judged, row.weight.layer)
        for row in result.weights
        if row.output_error is not None
    )
    if errors:
        middle, (most, layer) = median(error for error, _ in errors), errors[-1]
        samples = "held-out samples, in a trial without them" if data.held_out else "all samples"
        lines.append(
            f"error of layer outputs on {samples}: median {_error_words(middle)}, "
            f"largest {_error_words(most)} ({printable(layer)})"
        )
    return tuple(lines)


def finetuning_lines(result: Finetuning) -> tuple[str, ...]:
    """What training brought, on which samples, and the user's figures."""
    before, after = (result.measured[place].distance for place in (0, result.best))
    data, took = result.train, in_seconds(result.seconds)
    steps, samples = count(result.steps, "step"), count(data.samples, "sample")
    held_out = count(data.held_out, "held-out sample")
    few = ", too few to be sure" if data.held_out < 16 else ""  # two batches
    lines = [
        f"fine-tuned for {took} ({steps}) on {samples} of {printable(data.source)}; squared "
        "distance of the outputs to the dense ones, as a share of their variance over samples: "
        f"{_error_words(before)} -> {_error_words(after)} on {held_out}{few}"
    ]
    if result.best == 0:
        lines.append("training made nothing better, so the pruned weights stay: try more samples")
    if result.stopped is not None:
        lines.append(f"training ended after {took}: {result.stopped}")
    for name in result.metrics.get("dense", ()):
        figures = (f"{kind} {of[name]:.4g}" for kind, of in result.metrics.items())
        lines.append(f"{printable(name)}: {', '.join(figures)}")
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
    totals = [holding_words(validation)]
    if len(files) > 1:
        rows = {f: tuple(c for c in validation.checks if c.file == f) for f in files}
        parts = ((f, replace(validation, checks=checks)) for f, checks in rows.items())
        totals = [f"{printable(f)}: {holding_words(part)}" for f, part in parts]
    lines = (*totals, *not_covered_lines(validation.not_covered))
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
    """The number of weights in which the pattern holds; those that cannot break it count apart."""
    pattern, checks = validation.pattern, validation.checks
    breakable = [c for c in checks if not holds_trivially(c.shape, c.axis, pattern)]
    needed = sum(c.required for c in breakable)
    holding = needed - len(validation.broken)
    held = sum(not c.violations for c in breakable if not c.required)
    others = (
        ("not to be pruned, in which it holds", held),
        ("that may stay dense", len(breakable) - needed - held),
        ("with so few inputs that it always holds", len(checks) - len(breakable)),
    )
    said = (f"{count(number, 'weight')} {words}" for words, number in others if number)
    line = f"{pattern} holds in {holding} of {count(needed, 'weight')} to be pruned"
    return "; ".join((line if needed else "no weight was to be pruned", *said))


def _prune_line(result: PruneResult) -> str:
    pruned = sum(row.pruned for row in result.weights)
    held = sum(row.held_before for row in result.weights)
    line = f"{pruned} of {count(len(result.weights), 'weight')} pruned to {result.pattern}"
    if held and held == pruned:
        line = nothing_pruned(result.pattern, held)
    elif held:
        line += f" ({held} held it as they came)"
    used = {row.method or result.method for row in result.weights if row.pruned}
    return f"{line} by {' and '.join(sorted(used)) or result.method}"


def _checks_table(file: str, validation: Validation) -> Table:
    rows = [check for check in validation.checks if check.file == file]
    size = f"groups of {validation.pattern.m}"
    # violations of a weight that is dense on purpose mean nothing
    found = [f"{c.violations:,}" if c.required or not c.violations else None for c in rows]
    at = [c.first_violation if c.required else None for c in rows]
    columns = (
        column("layer", Kind.NAME, rows, lambda c: printable(c.layer)),
        column("op", Kind.VERDICT, rows, lambda c: c.op),
        column("shape", Kind.TEXT, rows, lambda c: times(c.shape)),
        column("axis", Kind.VERDICT, rows, lambda c: str(c.axis)),
        column(size, Kind.FIGURE, rows, lambda c: f"{c.groups_checked:,}"),
        column("violations", Kind.FIGURE, found, lambda cell: cell),
        column("first at", Kind.TEXT, at, lambda cell: None if cell is None else str(list(cell))),
        _verdicts(rows, validation),
    )
    return Table(title=printable(file), columns=columns, style="rows")


def _verdicts(checks: Sequence[WeightCheck], validation: Validation) -> Column:
    slugs = ["holds" if not c.violations else "broken" if c.required else "dense" for c in checks]

    def words(check: WeightCheck, slug: str) -> str:
        if check.holds_along is not None:
            return f"{slug}, holds along axis {check.holds_along}"
        trivial = slug == "holds" and holds_trivially(check.shape, check.axis, validation.pattern)
        return TRIVIAL if trivial else slug

    cells = tuple(map(words, checks, slugs))
    return Column(head="verdict", kind=Kind.TEXT, cells=cells, slugs=tuple(slugs))


def _sentences(reasons: tuple[Reason, ...]) -> str | None:
    return "; ".join(f"{r.code.value}: {printable(r.message)}" for r in reasons) or None


# --- what each layer loses and saves --------------------------------------------------------------

_UNITS = {
    ShareUnit.MILLISECONDS: "ms",
    ShareUnit.FORECAST: "forecast ms",
    ShareUnit.MULTIPLY_ADDS: "multiply-adds",
    ShareUnit.WEIGHTS: "zeros",
}
_LEGEND = (
    "saves: part of the {unit} that all layers together could save. {figure}layer error, output "
    "error: part of this layer's output, and of the model's, that changes when this layer alone is "
    "pruned. The layer that is most worth pruning comes first."
)
_PARETO_LEGEND = "Each row is a set of layers that were pruned and measured together."


def sensitivity_document(result: SensitivityResult) -> Document:
    """The answer, a row per layer in the order of worth, and sets of them."""
    return Document(
        name=name_cell(result.source),
        about="sensitivity",
        title="Sensitivity",
        lead=present(Lines(lines=sensitivity_lines(result), role=Role.ANSWER)),
        blocks=_cost_blocks(result),
    )


def sensitivity_section(result: SensitivityResult) -> Section | None:
    """The same as a part of a run's report."""
    lines = Lines(lines=sensitivity_lines(result), role=Role.LIST)
    return section("What each layer loses, and what was chosen", lines, *_cost_blocks(result))


def _cost_blocks(result: SensitivityResult) -> tuple[Block, ...]:
    return present(
        _costs_table(result),
        _left_dense(result),
        _sets(result),
        Lines(lines=tuple(map(printable, result.notes)), role=Role.NOTE),
    )


def in_order_of_worth(result: SensitivityResult) -> tuple[LayerCost, ...]:
    """Layers that lose least for what they save first, then those that no budget prunes."""

    def worth(row: LayerCost) -> tuple[bool, float, float]:
        loss = math.inf if row.loss is None else row.loss
        cost = max(loss, 0.0) / row.saves if row.saves > 0 else math.inf
        return row.why_dense is not None, cost, -row.saves

    return tuple(sorted(result.layers, key=worth))


def sensitivity_lines(result: SensitivityResult) -> tuple[str, ...]:
    """What was chosen and what it loses; without a budget, what everything loses."""
    if result.no_gain is not None:
        return (printable(result.no_gain),)
    if result.budget is not None:
        return (_budget_line(result, result.budget),)
    return tuple(
        f"all {count(s.layers, 'layer')} pruned: {_lost(result, s.loss, s.measured)}"
        for s in result.pareto[-1:]
    )


def _budget_line(result: SensitivityResult, budget: BudgetResult) -> str:
    chosen, asked = budget.chosen, budget.asked
    dense = f"; left dense: {listed(tuple(map(name_cell, chosen.dense)))}" if chosen.dense else ""
    allowed = ""
    if asked.max_drop is not None:
        drop = -asked.max_drop if asked.lower_is_better else asked.max_drop
        limit = result.dense.metrics.get(result.figure or "", math.nan) - drop
        allowed = f"; --max-drop {asked.max_drop:g} allows {figure(limit)}"
    if not chosen.layers:
        return f"no layer can be pruned: each loses too much{allowed}{dense}"
    saved = f"{100 * chosen.share:.1f} % of the possible saving{result.forecast}"
    lost = _lost(result, chosen.loss, chosen.measured)
    return f"prune {count(chosen.layers, 'layer')}: {saved}, {lost}{allowed}{dense}"


def _lost(result: SensitivityResult, loss: float | None, measured: Measured) -> str:
    """The figure before and after, or without a metric the error of the outputs."""
    if loss is None:
        return f"the loss is not known ({printable(measured.error or 'no figure')})"
    if (changed := _metric(result, measured)) is not None:
        return f"{printable(changed.name)} {change_words(changed)}"
    return f"output error {_error_words(loss)}"


def _metric(result: SensitivityResult, measured: Measured) -> Metric | None:
    """The user's figure of the dense model and of this one; None where one is missing."""
    name = result.figure or ""
    before, after = result.dense.metrics.get(name), measured.metrics.get(name)
    if before is None or after is None:
        return None
    return Metric(name=name, dense=before, sparse=after)


def _loss_columns(result: SensitivityResult, rows: Sequence[Measured]) -> tuple[Column, Column]:
    """The user's figure with its change, and how far the outputs move."""

    def words(of: Measured) -> str | None:
        changed = _metric(result, of)
        return None if changed is None else f"{figure(changed.sparse)} ({points(changed)})"

    name = result.figure or ""
    return (
        column(printable(name), Kind.FIGURE, rows, words, lambda m: m.metrics.get(name)),
        figures("output error", rows, lambda m: m.outputs, _error_words),
    )


def _costs_table(result: SensitivityResult) -> Table:
    rows = [row for row in in_order_of_worth(result) if row.why_dense is None]
    whole = math.fsum(r.saves for r in rows)
    unit, timed = _UNITS[result.unit], result.unit.value.endswith("milliseconds")
    part = 100 / whole if whole else 0.0
    columns: list[Column] = [
        column("layer", Kind.NAME, rows, _layer_and_members),
        figures(
            f"saves{result.forecast}", rows, lambda r: r.saves * part or None, "{:.1f} %".format
        ),
        *((figures(unit, rows, lambda r: r.saves or None),) if timed else ()),
    ]
    alone = [row.alone or Measured() for row in rows]
    errors = [row.output_error.judged if row.output_error else None for row in rows]
    said, outputs = _loss_columns(result, alone)
    columns += [
        said,
        figures("layer error", errors, lambda e: e, _error_words),
        outputs,
        _decisions(rows, result),
    ]
    of = "of the model with this layer alone pruned"
    metric = "" if result.figure is None else f"{printable(result.figure)}: {of}. "
    legend = _LEGEND.format(figure=metric, unit=unit)
    title = f"Layers, each pruned alone to {result.pattern} by {result.method}"
    return table(title, columns, legend=legend)


def _layer_and_members(row: LayerCost) -> str:
    others = [name for name in row.members if name != row.layer]
    with_it = f"\nwith {listed(tuple(map(name_cell, others)))}" if others else ""
    return name_cell(row.layer) + with_it


def _decisions(rows: Sequence[LayerCost], result: SensitivityResult) -> Column:
    """What the budget decided; without one, what it could choose from."""

    def word(row: LayerCost) -> str:
        if row.pruned is False:
            return "dense"
        return "prune" if result.budget is not None else "possible"

    return verdict_column(
        "decision", rows, word, lambda row: "dense" if row.pruned is False else "holds"
    )


def _left_dense(result: SensitivityResult) -> Table:
    """Layers that no budget prunes, with the reasons."""
    rows = [row for row in result.layers if row.why_dense is not None]
    columns = (
        column("layer", Kind.NAME, rows, _layer_and_members),
        column("stays dense because", Kind.REASON, rows, lambda r: printable(r.why_dense or "")),
    )
    return table("Layers that are never pruned", columns)


def _sets(result: SensitivityResult) -> Table:
    chosen = None if result.budget is None else result.budget.chosen
    found = (*result.pareto, *(() if chosen is None or chosen in result.pareto else (chosen,)))
    rows = sorted((s for s in found if s.layers), key=lambda s: s.share)
    columns: list[Column] = [
        figures(f"saves{result.forecast}", rows, lambda s: 100 * s.share, "{:.1f} %".format),
        column("layers", Kind.FIGURE, rows, lambda s: f"{s.layers:,}", lambda s: s.layers),
        *_loss_columns(result, [s.measured for s in rows]),
        column(
            "left dense",
            Kind.TEXT,
            rows,
            lambda s: ", ".join(f.name for f in fold_rows((n, None) for n in s.dense)) or "none",
        ),
        column("decision", Kind.TEXT, rows, lambda s: "chosen" if s == chosen else None),
    ]
    return table("What can be saved for which loss", columns, legend=_PARETO_LEGEND)


# --- how large weights are ------------------------------------------------------------------------

_SIZES_LEGEND = (
    "On disk. 2:4 is the pruned weight with its metadata; a weight without groups of four counts "
    "as dense. COO and CSR have the narrowest indices that fit."
)


def sizes_document(found: ModelSizes) -> Document:
    """A row per format, and what converting the largest weight costs."""
    formats, name = found.sizes, name_cell(found.source)
    on = ", ".join((found.machine.cpu, count(found.machine.cores, "core"), *found.machine.packages))
    like = f"ones and zeros in the shape and type of {printable(found.converted)}"
    measured = f"Converting {like} on {printable(on)}, median of 5:"
    columns = (
        column("format", Kind.NAME, formats, lambda row: row.format),
        figures("MiB", formats, lambda row: mebibytes(row.size_bytes)),
    )
    answer = f"{count(found.weights, 'weight')}, 2:4 holds in {found.holding}"
    return Document(
        name=name,
        about="sizes",
        title=f"Sizes of {name}",
        lead=(Lines(role=Role.ANSWER, lines=(answer,)),),
        blocks=(
            table("", columns, legend=_SIZES_LEGEND),
            Lines(role=Role.LIST, lines=(measured, *map(_way, found.conversions))),
        ),
    )


def _way(way: Conversion) -> str:
    low, middle, high = (figure(f(way.samples_ms)) for f in (min, median, max))
    peak = figure(mebibytes(way.peak_bytes))
    return f"{way.format}: {middle} ms ({low} to {high}), peak memory {peak} MiB with the result"

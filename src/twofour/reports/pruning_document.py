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
from twofour.records.weights import (
    Pattern,
    PrunedWeight,
    PruneResult,
    Reason,
    Validation,
    Weight,
    WeightCheck,
)
from twofour.reports.document import (
    Blocks,
    Column,
    Document,
    Kind,
    Role,
    Section,
    Table,
    column,
    figures,
    fold_rows,
    lines_of,
    names,
    present,
    section,
    table,
    texts,
    verdict_column,
)
from twofour.reports.eligibility_words import change_words, points, stale_lines
from twofour.words import (
    TRIVIAL,
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
        lead=(lines_of(Role.TEXT, lines),),
        blocks=(pruned_table(result.weights),),
    )


def pruning_section(result: PruneResult | None) -> Section | None:
    """What pruning did, as a part of a run's report: only the weights that it changed."""
    if result is None:
        return None
    changed = [row for row in result.weights if row.pruned]
    return section(
        "What pruning did to each layer",
        lines_of(Role.LIST, (_prune_line(result), *calibration_lines(result))),
        pruned_table(changed) if changed else None,
    )


_PRUNED_LEGEND = "kept |w|: part of the sum of absolute weights that stays."
_ERROR_LEGEND = (
    " output error: part of the layer's output that changes, on calibration samples; held out: on "
    "held-out samples, in a trial with some rows of the layer."
)


def pruned_table(rows: Sequence[PrunedWeight]) -> Table:
    """A row per weight; columns that would say nothing (all pruned, no data) are left out."""
    columns = [
        names("layer", rows, lambda r: r.weight.layer),
        column("op", Kind.VERDICT, rows, lambda r: r.weight.op),
        texts("C x K kernel", rows, lambda r: shape_cell(r.weight)),
    ]
    if not all(row.pruned for row in rows):
        columns.append(_pruned_or_not(rows))
    columns += (
        figures("zeros", rows, lambda r: r.zeros / max(1, prod(r.weight.shape)), per_cent),
        figures("kept |w|", rows, lambda r: r.kept_magnitude, per_cent),
    )
    legend = _PRUNED_LEGEND
    if any(row.output_error for row in rows):
        columns += _error_columns(rows)
        legend += _ERROR_LEGEND
    columns.append(texts("notes", rows, _notes))
    return Table(
        title="",
        columns=tuple(columns),
        legend=legend,
        folds=lambda: fold_rows((row.weight.layer, _alike(row)) for row in rows),
    )


def _pruned_or_not(rows: Sequence[PrunedWeight]) -> Column:
    words = {True: "yes", False: "no"}
    slugs = {True: "holds", False: "dense"}
    return verdict_column("pruned", rows, lambda r: words[r.pruned], lambda r: slugs[r.pruned])


def _error_columns(rows: Sequence[PrunedWeight]) -> tuple[Column, ...]:
    errors = [row.output_error for row in rows]
    return (
        column("method", Kind.VERDICT, rows, lambda r: r.method),
        figures("output error", errors, lambda e: e.calibration, _error_words),
        figures("held out", errors, lambda e: e.held_out, _error_words),
    )


def _alike(row: PrunedWeight) -> tuple[object, ...]:
    weight = row.weight
    sizes = (weight.in_channels, weight.out_channels, weight.kernel, weight.groups)
    return weight.op, *sizes, row.pruned, row.method, row.output_error is None, _notes(row)


def calibration_lines(result: PruneResult) -> tuple[str, ...]:
    """The data, and the errors of all layers in one line; () without data."""
    data = result.calibration
    if data is None:
        return ()
    lines = [
        f"calibrated with {count(data.samples, 'sample')} of {data.source}, "
        f"{data.held_out:,} of them held out to choose settings and measure errors",
        *data.notes,
    ]
    errors = [(r.output_error.judged, r.weight.layer) for r in result.weights if r.output_error]
    if errors:
        # "layer output error on samples that pruning did not see: median 3.1 %, worst 12 % (conv1)"
        middle = median(error for error, _ in errors)
        most, layer = max(errors)
        samples = "samples that pruning did not see" if data.held_out else "all samples"
        lines.append(
            f"layer output error on {samples}: median {_error_words(middle)}, "
            f"worst {_error_words(most)} ({layer})"
        )
    return tuple(lines)


def finetuning_lines(result: Finetuning) -> tuple[str, ...]:
    """What training brought, on which samples, and the user's figures."""
    took = in_seconds(result.seconds)
    data = result.train
    samples = f"{count(data.samples, 'sample')} of {data.source}"
    held_out = count(data.held_out, "held-out sample")
    if data.held_out < 16:  # two batches
        held_out += ", too few to be sure"
    before = _error_words(result.measured[0].distance)
    after = _error_words(result.measured[result.best].distance)
    lines = [
        f"fine-tuned for {took} ({count(result.steps, 'step')}) on {samples}; squared "
        "distance of the outputs to the dense ones, as a share of their variance over samples: "
        f"{before} -> {after} on {held_out}"
    ]
    if result.best == 0:
        lines.append("training made nothing better, so the pruned weights stay: try more samples")
    if result.stopped is not None:
        lines.append(f"training ended after {took}: {result.stopped}")
    for name in result.metrics.get("dense", ()):
        values = [f"{variant} {of[name]:.4g}" for variant, of in result.metrics.items()]
        lines.append(f"{name}: {', '.join(values)}")
    return tuple(lines)


def _error_words(error: float) -> str:
    """The part of a layer's output that is lost: "0.12 %", "7.3 %"."""
    return f"{100 * error:.0f} %" if error >= 0.1 else f"{100 * error:.2g} %"


def _notes(row: PrunedWeight) -> str:
    notes = _sentences(row.reasons)
    if row.note:
        notes.append(row.note)
    return "; ".join(notes)


def _sentences(reasons: Sequence[Reason]) -> list[str]:
    return [f"{reason.code.value}: {reason.message}" for reason in reasons]


def _prune_line(result: PruneResult) -> str:
    pruned = [row for row in result.weights if row.pruned]
    # "21 of 24 weights pruned to 2:4 (3 held it as they came) by magnitude"
    held = sum(row.held_before for row in result.weights)
    line = f"{len(pruned)} of {count(len(result.weights), 'weight')} pruned to {result.pattern}"
    if held and held == len(pruned):
        line = nothing_pruned(result.pattern, held)
    elif held:
        line += f" ({held} held it as they came)"
    methods = {row.method or result.method for row in pruned} or {result.method}
    return f"{line} by {' and '.join(sorted(methods))}"


# --- weights read back ----------------------------------------------------------------------------


def validation_document(validation: Validation) -> Document:
    """A row per weight that was read back, file by file, then those that could not be checked."""
    parts: dict[str, Validation] = {}
    for file in dict.fromkeys(check.file for check in validation.checks):
        checks = tuple(check for check in validation.checks if check.file == file)
        parts[file] = replace(validation, checks=checks)
    lines = [holding_words(validation)]
    if len(parts) > 1:
        lines = [f"{file}: {holding_words(part)}" for file, part in parts.items()]
    lines += not_covered_lines(validation.not_covered)
    return Document(
        name=printable(", ".join(validation.files)),
        about="weights read back",
        title="Weights read back",
        lead=present(
            lines_of(Role.WARNING, stale_lines(validation.stale)),
            lines_of(Role.TEXT, lines),
        ),
        blocks=present(
            *(_checks_table(file, part) for file, part in parts.items()),
            lines_of(Role.TEXT, map(_not_checked, validation.skipped)),
        ),
    )


def _not_checked(weight: Weight) -> str:
    reasons = "; ".join(_sentences(weight.reasons)) or "-"
    return f"not checked: {weight.layer}: {reasons}"


def holding_words(validation: Validation) -> str:
    """The number of weights in which the pattern holds; those that cannot break it count apart."""
    pattern = validation.pattern
    checks = validation.checks
    # C=1 or depthwise: one weight in each group of four, so no value can break 2:4
    breakable = [c for c in checks if not holds_trivially(c.shape, c.axis, pattern)]
    needed = sum(check.required for check in breakable)
    held = sum(not check.violations for check in breakable if not check.required)
    line = "no weight was to be pruned"
    if needed:
        holding = needed - len(validation.broken)
        line = f"{pattern} holds in {holding} of {count(needed, 'weight')} to be pruned"
    others = {
        "not to be pruned, in which it holds": held,
        "that may stay dense": len(breakable) - needed - held,
        "with so few inputs that it always holds": len(checks) - len(breakable),
    }
    for words, number in others.items():
        if number:
            line += f"; {count(number, 'weight')} {words}"
    return line


def _checks_table(file: str, validation: Validation) -> Table:
    rows = validation.checks
    pattern = validation.pattern
    verdicts = texts("verdict", rows, lambda c: _verdict(c, pattern))
    columns = (
        names("layer", rows, lambda c: c.layer),
        column("op", Kind.VERDICT, rows, lambda c: c.op),
        texts("shape", rows, lambda c: times(c.shape)),
        column("axis", Kind.VERDICT, rows, lambda c: str(c.axis)),
        column(f"groups of {pattern.m}", Kind.FIGURE, rows, lambda c: f"{c.groups_checked:,}"),
        column("violations", Kind.FIGURE, rows, _violations),
        texts("first at", rows, _first_violation),
        replace(verdicts, slugs=tuple(map(_slug, rows))),
    )
    return Table(title=printable(file), columns=columns)


def _violations(check: WeightCheck) -> str | None:
    # those of a weight that is dense on purpose mean nothing
    return f"{check.violations:,}" if check.required or not check.violations else None


def _first_violation(check: WeightCheck) -> str | None:
    at = check.first_violation
    return str(list(at)) if check.required and at is not None else None


def _slug(check: WeightCheck) -> str:
    if not check.violations:
        return "holds"
    return "broken" if check.required else "dense"


def _verdict(check: WeightCheck, pattern: Pattern) -> str:
    if check.holds_along is not None:
        return f"{_slug(check)}, holds along axis {check.holds_along}"
    if not check.violations and holds_trivially(check.shape, check.axis, pattern):
        return TRIVIAL
    return _slug(check)


# --- what each layer loses and saves --------------------------------------------------------------

_UNITS = {
    ShareUnit.MILLISECONDS: "ms",
    ShareUnit.FORECAST: "forecast ms",
    ShareUnit.MULTIPLY_ADDS: "multiply-adds",
    ShareUnit.WEIGHTS: "zeros",
}
_TIMES = {ShareUnit.MILLISECONDS, ShareUnit.FORECAST}
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
        lead=present(lines_of(Role.ANSWER, sensitivity_lines(result))),
        blocks=_cost_blocks(result),
    )


def sensitivity_section(result: SensitivityResult | None) -> Section | None:
    """The same as a part of a run's report."""
    if result is None:
        return None
    lines = lines_of(Role.LIST, sensitivity_lines(result))
    return section("What each layer loses, and what was chosen", lines, *_cost_blocks(result))


def _cost_blocks(result: SensitivityResult) -> Blocks:
    return present(
        _costs_table(result),
        _left_dense(result),
        _sets(result),
        lines_of(Role.NOTE, result.notes),
    )


def in_order_of_worth(result: SensitivityResult) -> tuple[LayerCost, ...]:
    """Layers that lose least for what they save first, then those that no budget prunes.

    Of layers that lose nothing, as a metric of few samples sees it, the one first that moves the
    outputs least.
    """

    def worth(row: LayerCost) -> tuple[bool, float, float]:
        if row.loss is None or row.alone is None or row.saves <= 0:
            return row.why_dense is not None, math.inf, 0.0
        # a loss of 0.02 that saves 4 ms costs 0.005
        moved = row.alone.outputs or 0.0
        return row.why_dense is not None, max(row.loss, 0.0) / row.saves, moved / row.saves

    return tuple(sorted(result.layers, key=worth))


def sensitivity_lines(result: SensitivityResult) -> tuple[str, ...]:
    """What was chosen and what it loses; without a budget, what everything loses."""
    if result.no_gain is not None:
        return (result.no_gain,)
    if result.budget is not None:
        return (_budget_line(result, result.budget),)
    if not result.pareto:
        return ()
    whole = result.pareto[-1]
    lost = _lost(result, whole.loss, whole.measured)
    return (f"all {count(whole.layers, 'layer')} pruned: {lost}",)


def _budget_line(result: SensitivityResult, budget: BudgetResult) -> str:
    chosen = budget.chosen
    asked = budget.asked
    limits = ""
    if asked.max_drop is not None:
        # dense 0.98 and --max-drop 0.01 allow 0.97; of a loss, lower is better: 2.10 allows 2.11
        drop = -asked.max_drop if asked.lower_is_better else asked.max_drop
        limit = result.dense.metrics.get(result.figure or "", math.nan) - drop
        limits = f"; --max-drop {asked.max_drop:g} allows {figure(limit)}"
    if chosen.dense:
        limits += f"; left dense: {listed(tuple(map(name_cell, chosen.dense)))}"
    if not chosen.layers:
        return f"no layer can be pruned: each loses too much{limits}"
    saved = f"{100 * chosen.share:.1f} % of the possible saving{result.forecast}"
    lost = _lost(result, chosen.loss, chosen.measured)
    return f"prune {count(chosen.layers, 'layer')}: {saved}, {lost}{limits}"


def _lost(result: SensitivityResult, loss: float | None, measured: Measured) -> str:
    """The figure before and after, or without a metric the error of the outputs."""
    if loss is None:
        return f"the loss is not known ({measured.error or 'no figure'})"
    changed = _metric(result, measured)
    if changed is None:
        return f"output error {_error_words(loss)}"
    return f"{changed.name} {change_words(changed)}"


def _metric(result: SensitivityResult, measured: Measured) -> Metric | None:
    """The user's figure of the dense model and of this one; None where one is missing."""
    name = result.figure or ""
    before = result.dense.metrics.get(name)
    after = measured.metrics.get(name)
    if before is None or after is None:
        return None
    return Metric(name=name, dense=before, sparse=after)


def _loss_columns(result: SensitivityResult, rows: Sequence[Measured]) -> tuple[Column, Column]:
    """The user's figure with its change, and how far the outputs move."""
    name = result.figure or ""

    def words(of: Measured) -> str | None:
        changed = _metric(result, of)
        return None if changed is None else f"{figure(changed.sparse)} ({points(changed)})"

    return (
        column(name, Kind.FIGURE, rows, words, lambda m: m.metrics.get(name)),
        figures("output error", rows, lambda m: m.outputs, _error_words),
    )


def _costs_table(result: SensitivityResult) -> Table:
    rows = [row for row in in_order_of_worth(result) if row.why_dense is None]
    unit = _UNITS[result.unit]
    columns = [
        column("layer", Kind.NAME, rows, _layer_and_members),
        _savings(rows, f"saves{result.forecast}"),
    ]
    if result.unit in _TIMES:
        columns.append(figures(unit, rows, lambda r: r.saves or None))
    metric, outputs = _loss_columns(result, [row.alone or Measured() for row in rows])
    errors = [row.output_error for row in rows]
    columns += (
        metric,
        figures("layer error", errors, lambda e: e.judged, _error_words),
        outputs,
        _decisions(rows, result),
    )
    meaning = ""
    if result.figure is not None:
        meaning = f"{printable(result.figure)}: of the model with this layer alone pruned. "
    title = f"Layers, each pruned alone to {result.pattern} by {result.method}"
    return table(title, columns, legend=_LEGEND.format(figure=meaning, unit=unit))


def _savings(rows: Sequence[LayerCost], head: str) -> Column:
    whole = math.fsum(row.saves for row in rows)
    # in per cent of what all layers save together; "-" for a layer that saves nothing
    per_cent_of = 100 / whole if whole else 0.0
    return figures(head, rows, lambda r: r.saves * per_cent_of or None, "{:.1f} %".format)


def _layer_and_members(row: LayerCost) -> str:
    others = [name_cell(name) for name in row.members if name != row.layer]
    name = name_cell(row.layer)
    return f"{name}\nwith {listed(others)}" if others else name


def _decisions(rows: Sequence[LayerCost], result: SensitivityResult) -> Column:
    """What the budget decided; without one, what it could choose from."""
    otherwise = "possible" if result.budget is None else "prune"
    return verdict_column(
        "decision",
        rows,
        lambda row: "dense" if row.pruned is False else otherwise,
        lambda row: "dense" if row.pruned is False else "holds",
    )


def _left_dense(result: SensitivityResult) -> Table:
    """Layers that no budget prunes, with the reasons."""
    rows = [row for row in result.layers if row.why_dense is not None]
    columns = (
        column("layer", Kind.NAME, rows, _layer_and_members),
        texts("stays dense because", rows, lambda r: r.why_dense),
    )
    return table("Layers that are never pruned", columns)


def _sets(result: SensitivityResult) -> Table:
    """Sets of layers, from what saves least; the one that the budget chose is always among them."""
    sets = list(result.pareto)
    chosen = None if result.budget is None else result.budget.chosen
    if chosen is not None and chosen not in sets:
        sets.append(chosen)
    rows = sorted((one for one in sets if one.layers), key=lambda one: one.share)
    columns = (
        figures(f"saves{result.forecast}", rows, lambda s: 100 * s.share, "{:.1f} %".format),
        figures("layers", rows, lambda s: s.layers, "{:,}".format),
        *_loss_columns(result, [one.measured for one in rows]),
        texts("left dense", rows, lambda s: _folded_names(s.dense)),
        texts("decision", rows, lambda s: "chosen" if s == chosen else None),
    )
    return table("What can be saved for which loss", columns, legend=_PARETO_LEGEND)


def _folded_names(names: Sequence[str]) -> str:
    # "encoder.{0-3}.fc, head"
    folds = fold_rows((name, None) for name in names)
    return ", ".join(fold.name for fold in folds) or "none"


# --- how large weights are ------------------------------------------------------------------------

_SIZES_LEGEND = (
    "On disk. 2:4 is the pruned weight with its metadata; a weight without groups of four counts "
    "as dense. COO and CSR have the narrowest indices that fit."
)


def sizes_document(sizes: ModelSizes) -> Document:
    """A row per format, and what converting the largest weight costs."""
    name = name_cell(sizes.source)
    host = sizes.machine
    machine = ", ".join((host.cpu, count(host.cores, "core"), *host.packages))
    like = f"ones and zeros in the shape and type of {sizes.converted}"
    measured = f"Converting {like} on {machine}, median of 5:"
    columns = (
        names("format", sizes.sizes, lambda row: row.format),
        figures("MiB", sizes.sizes, lambda row: mebibytes(row.size_bytes)),
    )
    answer = f"{count(sizes.weights, 'weight')}, 2:4 holds in {sizes.holding}"
    return Document(
        name=name,
        about="sizes",
        title=f"Sizes of {name}",
        lead=(lines_of(Role.ANSWER, [answer]),),
        blocks=(
            table("", columns, legend=_SIZES_LEGEND),
            lines_of(Role.LIST, (measured, *map(_conversion, sizes.conversions))),
        ),
    )


def _conversion(way: Conversion) -> str:
    middle = figure(median(way.samples_ms))
    ends = f"{figure(min(way.samples_ms))} to {figure(max(way.samples_ms))}"
    peak = figure(mebibytes(way.peak_bytes))
    return f"{way.format}: {middle} ms ({ends}), peak memory {peak} MiB with the result"

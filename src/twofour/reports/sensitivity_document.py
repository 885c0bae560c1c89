"""What pruning each layer loses and saves, and the set that a budget chooses, as a document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from twofour.records.eligibility import ShareUnit
from twofour.records.options import LossKind
from twofour.records.run import LayerCost, Measured, PrunedSet, SensitivityResult
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
    present,
    section,
    table,
)
from twofour.words import count, figure, listed, name_cell, printable

_UNITS = {
    ShareUnit.MILLISECONDS: "ms",
    ShareUnit.MULTIPLY_ADDS: "multiply-adds",
    ShareUnit.WEIGHTS: "zeros",
}
_LOSSES = {
    LossKind.METRIC: "how far {figure} falls",
    LossKind.OUTPUTS: "||y - y'||^2 / ||y||^2 of the outputs",
}
_LEGEND = (
    "loss: {loss}, with that layer alone pruned; saves: part of the {unit} that all of them could "
    "save. Worth pruning most stands first."
)
_PARETO_LEGEND = (
    "Each row is a set of layers, measured as a whole: the one that is predicted to lose least for "
    "what it saves. Losses of single layers do not add up exactly."
)


def sensitivity_document(result: SensitivityResult) -> Document:
    """The answer, a row per layer in the order of worth, and sets of them."""
    title = f"{result.pattern} by {result.method}: what each layer loses"
    return Document(
        name=name_cell(result.source),
        about="sensitivity",
        title="Sensitivity",
        lead=present(
            Lines(lines=(title,), role=Role.TEXT),
            Lines(lines=answer_lines(result), role=Role.ANSWER),
        ),
        blocks=_blocks(result),
    )


def sensitivity_section(result: SensitivityResult) -> Section | None:
    """The same as a part of a run's report."""
    lines = Lines(lines=answer_lines(result), role=Role.LIST)
    return section("What each layer loses, and what was chosen", lines, *_blocks(result))


def _blocks(result: SensitivityResult) -> tuple[Block, ...]:
    return present(
        _layers(result),
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


def loss_words(result: SensitivityResult) -> str:
    """What the losses are, in words."""
    return _LOSSES[result.loss].format(figure=printable(result.figure or "the metric"))


def answer_lines(result: SensitivityResult) -> tuple[str, ...]:
    """What was chosen and what it loses, what everything loses, and the worst layer."""
    everything = max(result.pareto, key=lambda s: s.share, default=None)
    lines = [_budget_line(result)]
    if result.budget is not None and result.budget.trials:
        lines.append(f"chosen from {count(len(result.budget.trials), 'measured set')}")
    if everything is not None:
        lines.append(f"all {count(everything.layers, 'layer')} pruned: {_lost(result, everything)}")
    losses = {r.layer: r.loss for r in result.layers if r.loss is not None and not r.why_dense}
    worst = max(losses, key=losses.__getitem__, default=None)
    if worst is not None:
        lines.append(f"alone, {name_cell(worst)} loses most: {figure(losses[worst])}")
    return tuple(line for line in lines if line)


def _budget_line(result: SensitivityResult) -> str:
    if result.budget is None:
        return ""
    chosen, asked = result.budget.chosen, result.budget.asked
    dense = f"; dense: {listed(tuple(map(name_cell, chosen.dense)))}" if chosen.dense else ""
    if not chosen.layers:
        return f"no layer can be pruned: none keeps {_allowed(result)}{dense}"
    saved = f"{100 * chosen.share:.1f} % of the possible saving"
    allowed = f" ({_allowed(result)})" if asked.max_drop is not None else ""
    line = f"prune {count(chosen.layers, 'layer')}: {saved}, {_lost(result, chosen)}"
    return f"{line}{allowed}{dense}"


def _allowed(result: SensitivityResult) -> str:
    assert result.budget is not None
    return f"at most {figure(result.budget.asked.max_drop) or 0} is allowed"


def _lost(result: SensitivityResult, of: PrunedSet) -> str:
    if of.loss is None:
        return f"the loss is not known ({printable(of.measured.error or 'no figure')})"
    if result.loss is not LossKind.METRIC and result.figure not in of.measured.metrics:
        return f"loss {figure(of.loss)}"
    name = result.figure or ""
    before, after = result.dense.metrics.get(name), of.measured.metrics.get(name)
    if before is None or after is None:
        return f"loss {figure(of.loss)}"
    return f"{printable(name)} {figure(before)} dense, {figure(after)} pruned"


def _layers(result: SensitivityResult) -> Table:
    rows = [row for row in in_order_of_worth(result) if row.why_dense is None]
    whole = math.fsum(r.saves for r in rows)
    timed = result.unit is ShareUnit.MILLISECONDS
    part = 100 / whole if whole else 0.0
    columns: list[Column] = [
        column("layer", Kind.NAME, rows, _names),
        figures("saves", rows, lambda r: r.saves * part or None, "{:.1f} %".format),
        *((figures("ms", rows, lambda r: r.saves or None),) if timed else ()),
        figures("loss", rows, lambda r: r.loss, _small),
    ]
    alone = [row.alone or Measured() for row in rows]
    if result.figure is not None:
        name = result.figure
        columns.append(figures(printable(name), alone, lambda m: m.metrics.get(name)))
    errors = [row.output_error for row in rows]
    columns.append(
        figures("layer error", errors, lambda e: None if e is None else e.judged, _small)
    )
    if result.loss is not LossKind.OUTPUTS:
        columns.append(figures("outputs", alone, lambda m: m.outputs, _small))
    columns.append(_decisions(rows, result))
    legend = _LEGEND.format(loss=loss_words(result), unit=_UNITS[result.unit])
    return table("Layers", columns, legend=legend)


def _names(row: LayerCost) -> str:
    others = [name for name in row.members if name != row.layer]
    with_it = f"\nwith {listed(tuple(map(name_cell, others)))}" if others else ""
    return name_cell(row.layer) + with_it


def _small(value: float) -> str:
    return f"{value:.3g}"


def _decisions(rows: Sequence[LayerCost], result: SensitivityResult) -> Column:
    """What the budget decided; without one, what it could choose from."""

    def word(row: LayerCost) -> str:
        if row.pruned is False:
            return "dense"
        return "prune" if result.budget is not None else "possible"

    found = column("decision", Kind.VERDICT, rows, word)
    return replace(found, slugs=tuple("dense" if w == "dense" else "holds" for w in found.cells))


def _left_dense(result: SensitivityResult) -> Table | None:
    """Layers that no budget prunes, with the reasons."""
    rows = [row for row in result.layers if row.why_dense is not None]
    if not rows:
        return None
    columns = (
        column("layer", Kind.NAME, rows, _names),
        column("stays dense because", Kind.REASON, rows, lambda r: printable(r.why_dense or "")),
    )
    return table("Layers that cost nothing, as they stay dense", columns)


def _sets(result: SensitivityResult) -> Table:
    rows = result.pareto
    columns: list[Column] = [
        figures("saves", rows, lambda s: 100 * s.share, "{:.1f} %".format),
        column("layers", Kind.FIGURE, rows, lambda s: f"{s.layers:,}", lambda s: s.layers),
        figures("predicted", rows, lambda s: s.predicted, _small),
        figures("measured", rows, lambda s: s.loss, _small),
    ]
    if result.figure is not None:
        name = result.figure
        columns.append(figures(printable(name), rows, lambda s: s.measured.metrics.get(name)))
    columns += [
        figures("outputs", rows, lambda s: s.measured.outputs, _small),
        column(
            "left dense",
            Kind.TEXT,
            rows,
            lambda s: listed(tuple(map(name_cell, s.dense))) if s.dense else "none",
        ),
    ]
    return table("What can be saved for which loss", columns, legend=_PARETO_LEGEND)

"""What pruning each layer loses and saves, and the set that a budget chooses, as a document."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from twofour.records.eligibility import ShareUnit
from twofour.records.options import LossKind
from twofour.records.sensitivity import LayerCost, PrunedSet, SensitivityResult
from twofour.reports.document import (
    Block,
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
    table,
)
from twofour.reports.eligibility_words import name_cell
from twofour.reports.sensitivity_plots import draw_pareto, pareto_key
from twofour.words import count, figure, listed, printable

_UNITS = {
    ShareUnit.MILLISECONDS: "ms",
    ShareUnit.MULTIPLY_ADDS: "multiply-adds",
    ShareUnit.WEIGHTS: "zeros",
}
_LOSSES = {
    LossKind.METRIC: "how far {figure} falls",
    LossKind.OUTPUTS: "||y - y'||^2 / ||y||^2 of the outputs",
    LossKind.KL: "KL(dense || pruned) of the outputs, softmax over the last axis, in nats",
    LossKind.FISHER: "first-order estimate of ||y - y'||^2 / ||y||^2, from one backward pass of "
    "the model's own outputs against its dense ones",
    LossKind.LAYER: "||(W - W')X||^2 / ||WX||^2 of the layer itself",
}
_LEGEND = (
    "loss: {loss}, with that layer alone pruned; saves: part of the {unit} that all of them could "
    "save. Worth pruning most stands first."
)
_PARETO_LEGEND = (
    "Each row is a set of layers, measured as a whole: the one that is foretold to lose least for "
    "what it saves. Losses of single layers do not add up exactly."
)


def sensitivity_document(result: SensitivityResult) -> Document:
    """The answer, a row per layer in the order of worth, sets of them, and a plot of those."""
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
        Plot(
            caption="What is saved against what is lost",
            draw=lambda: draw_pareto(result),
            note="one set of layers each: measured, and as the losses of its layers foretell",
            key=pareto_key(),
        ),
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
    lines = [_budget_line(result), *_trials_line(result)]
    if everything is not None:
        lines.append(f"all {count(everything.layers, 'layer')} pruned: {_lost(result, everything)}")
    worst = _worst(result)
    if worst is not None and worst.loss is not None:
        lines.append(f"alone, {name_cell(worst.layer)} loses most: {figure(worst.loss)}")
    left = [row.layer for row in result.layers if row.why_dense is not None]
    if left:
        lines.append(f"stay dense for nothing lost: {listed(tuple(map(name_cell, left)))}")
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


def _trials_line(result: SensitivityResult) -> Iterator[str]:
    if result.budget is not None and result.budget.trials:
        yield f"chosen from {count(len(result.budget.trials), 'measured set')}"


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


def _worst(result: SensitivityResult) -> LayerCost | None:
    known = [r for r in result.layers if r.loss is not None and r.why_dense is None]
    return max(known, key=lambda r: r.loss or 0.0, default=None)


def _layers(result: SensitivityResult) -> Table:
    rows = [row for row in in_order_of_worth(result) if row.why_dense is None]
    whole = math.fsum(r.saves for r in rows)
    names = [result.figure] if result.figure is not None else []
    timed = result.unit is ShareUnit.MILLISECONDS
    part = 100 / whole if whole else 0.0
    columns: list[Column] = [
        column("layer", Kind.NAME, rows, _names),
        figures("saves", rows, lambda r: r.saves * part or None, "{:.1f} %".format),
        *((figures("ms", rows, lambda r: r.saves or None),) if timed else ()),
        figures("loss", rows, lambda r: r.loss, _small),
        *(
            figures(printable(name), rows, lambda r, n=name: _metric(r, n))  # type: ignore[misc]  # a default argument binds the name
            for name in names
        ),
        *(of for kind, of in _beside(rows) if kind is not result.loss),
        _decisions(rows, result),
    ]
    legend = _LEGEND.format(loss=loss_words(result), unit=_UNITS[result.unit])
    return table("Layers", columns, legend=legend)


def _beside(rows: Sequence[LayerCost]) -> Iterator[tuple[LossKind, Column]]:
    """What else was found out of each layer, by the loss that it would be."""
    yield LossKind.LAYER, figures("layer error", rows, _layer_error, _small)
    yield LossKind.OUTPUTS, figures("outputs", rows, lambda r: _outputs(r, "error"), _small)
    yield LossKind.KL, figures("KL", rows, lambda r: _outputs(r, "kl"), _small)
    yield LossKind.FISHER, figures("Fisher", rows, lambda r: r.fisher, _small)


def _names(row: LayerCost) -> str:
    others = [name for name in row.members if name != row.layer]
    with_it = f"\nwith {listed(tuple(map(name_cell, others)))}" if others else ""
    return name_cell(row.layer) + with_it


def _metric(row: LayerCost, name: str) -> float | None:
    return None if row.alone is None else row.alone.metrics.get(name)


def _outputs(row: LayerCost, name: str) -> float | None:
    if row.alone is None or row.alone.outputs is None:
        return None
    value: float | None = getattr(row.alone.outputs, name)
    return value


def _layer_error(row: LayerCost) -> float | None:
    return None if row.output_error is None else row.output_error.judged


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
        figures("foretold", rows, lambda s: s.predicted, _small),
        figures("measured", rows, lambda s: s.loss, _small),
    ]
    if result.figure is not None:
        name = result.figure
        columns.append(figures(printable(name), rows, lambda s: s.measured.metrics.get(name)))
    columns += [
        figures(
            "outputs",
            rows,
            lambda s: None if s.measured.outputs is None else s.measured.outputs.error,
            _small,
        ),
        column(
            "left dense",
            Kind.TEXT,
            rows,
            lambda s: listed(tuple(map(name_cell, s.dense))) if s.dense else "none",
        ),
    ]
    return table("What can be saved for which loss", columns, legend=_PARETO_LEGEND)

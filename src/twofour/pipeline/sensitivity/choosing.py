"""What a budget means for a run: which figure counts, which layers stay dense, and what if none
holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from twofour.errors import BadInputError, PatternBrokenError
from twofour.pipeline.folder import STAGES
from twofour.pipeline.reporting import SENSITIVITY
from twofour.pipeline.stages import Run
from twofour.records.options import BudgetOptions
from twofour.records.sensitivity import LayerCost, SensitivityResult, TakenBack
from twofour.store import read_record, sha256_file, write_record
from twofour.words import figure, printable

_TAKEN_BACK = f"{STAGES}/taken-back.json"


def figure_of(budget: BudgetOptions, metrics: Mapping[str, float]) -> str | None:
    """Which of the user's figures counts, the first where nothing hangs on it; None without any.

    Raises BadInputError for one that the metric does not give, and where --max-drop has to be of
    one of several.
    """
    names = list(metrics)
    listed = ", ".join(map(printable, names))
    if budget.figure is not None and budget.figure not in names:
        raise BadInputError(
            f"the metric gives no figure {budget.figure!r}",
            hint=f"it gives {listed}" if names else "name the metric with --metric",
        )
    if budget.figure is None and budget.max_drop is not None and len(names) > 1:
        raise BadInputError(
            f"the metric gives {len(names)} figures: {listed}",
            hint=f"say which may fall: --max-drop {printable(names[0])}={budget.max_drop:g}",
        )
    return budget.figure if budget.figure is not None else next(iter(names), None)


def figure_drop(
    chosen: SensitivityResult, dense: Mapping[str, float], sparse: Mapping[str, float]
) -> float:
    """How far the figure of the budget falls; infinitely where it is missing."""
    assert chosen.budget is not None
    found = fall(chosen.budget.asked, chosen.figure, dense, sparse)
    return math.inf if math.isnan(found) else found


def fall(
    budget: BudgetOptions,
    name: str | None,
    dense: Mapping[str, float],
    pruned: Mapping[str, float],
) -> float:
    """How much worse a figure is than that of the dense model; NaN where it is missing."""
    if name is None or name not in dense or name not in pruned:
        return math.nan
    before, after = dense[name], pruned[name]
    return after - before if budget.lower_is_better else before - after


def leaving(run: Run, chosen: SensitivityResult, more: Iterable[LayerCost]) -> Run:
    """The run with the layers left dense that the budget leaves, and with these."""
    taken = {row.layer for row in more}
    whole = sum(row.saves for row in chosen.layers if row.why_dense is None)
    said_by = dict(run.options.selection.said_by)
    for row in chosen.layers:
        if row.alone is None or (row.pruned and row.layer not in taken):
            continue
        for glob in row.globs:
            said_by.setdefault(glob, f"the budget: {_why(row, whole)}")
    selection = run.options.selection
    new = [glob for glob in said_by if glob not in selection.said_by]
    exclude = (*selection.exclude, *new)
    return replace(
        run,
        options=replace(
            run.options, selection=replace(selection, exclude=exclude, said_by=said_by)
        ),
    )


def worst_first(chosen: SensitivityResult) -> Sequence[LayerCost]:
    """Layers that the budget prunes, those first that lose most for what they save."""

    def worth(row: LayerCost) -> tuple[float, float]:
        moved = 0.0
        if row.alone is not None and row.alone.outputs is not None:
            moved = row.alone.outputs.error
        return -max(row.loss or 0.0, 0.0) / row.saves, -moved / row.saves

    return sorted((row for row in chosen.layers if row.pruned and row.saves > 0), key=worth)


def taken_before(run: Run) -> int:
    """How many layers an earlier run of the same choice took back."""
    try:
        kept = read_record(TakenBack, run.file(_TAKEN_BACK))
    except BadInputError:
        return 0
    return kept.layers if kept.chosen == sha256_file(run.file(SENSITIVITY)) else 0


def keep_taken(run: Run, layers: int) -> None:
    """Note it for the next run, which goes on from here."""
    kept = TakenBack(chosen=sha256_file(run.file(SENSITIVITY)), layers=layers)
    write_record(run.file(_TAKEN_BACK), kept)


def nothing_holds(
    chosen: SensitivityResult, last: LayerCost | None = None, drop: float | None = None
) -> PatternBrokenError:
    """The error for a limit within which no layer can be pruned.

    The `drop` is that of the model that came out with the `last` layer alone pruned, else the least
    that any layer loses is said.
    """
    assert chosen.budget is not None
    known = [r for r in chosen.layers if r.loss is not None and r.why_dense is None]
    least = min(known, key=lambda r: r.loss or 0.0, default=None)
    why = ""
    if last is not None:
        why = f"; with {printable(last.layer)} alone pruned the model loses {figure(drop)}"
    elif least is not None:
        why = f"; the least, {printable(least.layer)} alone, loses {figure(least.loss)}"
    calibrated = any(row.output_error is not None for row in chosen.layers)
    data = "" if calibrated else "prune with calibration data (--calibrate), "
    return PatternBrokenError(
        f"no layer can be pruned within --max-drop {chosen.budget.asked.max_drop:g}{why}",
        hint=f"allow more, {data}or fine-tune with the mask",
    )


def _why(row: LayerCost, whole: float) -> str:
    if row.why_dense is not None:
        return row.why_dense
    lost = "" if row.loss is None else f"it loses {figure(row.loss) or 0} alone and "
    return f"{lost}saves {100 * row.saves / whole:.1f} % of what all could"

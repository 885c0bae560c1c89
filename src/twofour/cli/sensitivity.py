"""`twofour sensitivity`: what each layer loses when it is pruned, and what that saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twofour.cli import options as opt
from twofour.cli.budget_options import BudgetArguments
from twofour.cli.console import show_result
from twofour.cli.groups import with_groups
from twofour.cli.guard import guarded, running
from twofour.cli.pruning_options import PruningArguments
from twofour.records.options import RunOptions
from twofour.records.weights import Pattern

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twofour.records.sensitivity import SensitivityResult


@guarded
@with_groups
def sensitivity(
    model: opt.Model,
    *,
    out: opt.Out = None,
    metric: opt.MetricOption = None,
    budget: BudgetArguments,
    pruning: PruningArguments,
    precision: opt.PrecisionOption = None,
    keep_float32: opt.KeepFloat32 = None,
    inputs: opt.Inputs = None,
    input_shape: opt.InputShapes = None,
    seed: opt.Seed = 0,
    source: opt.Sources = None,
    trust: opt.TrustFlag = False,
    fresh: opt.Fresh = False,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure every layer pruned alone, then sets of them, and choose a set within a budget.

    sensitivity.json, .md and .html, and layers.txt, which `prune-export-build --layers` takes, are
    in the run folder. Measurements are kept: the same command goes on where it was stopped.
    MODEL may be a run folder too; code that it names is run with --source or --trust.

    Example: twofour sensitivity model.py:make --metric model.py:evaluate --max-drop 0.5
    """
    from twofour.pipeline.run import run_sensitivity

    shapes, names = opt.parse_input_shapes(input_shape)
    options = RunOptions(
        pattern=Pattern.parse(pruning.pattern),
        selection=pruning.selection(),
        calibration=pruning.calibration_options(),
        method=pruning.method_options(),
        precision=precision,
        keep_float32=tuple(keep_float32 or ()),
        inputs=None if inputs is None else str(inputs),
        input_shapes=shapes,
        input_shape_names=names,
        metric=metric,
        seed=seed,
        budget=budget.budget_options(),
        side_by_side=budget.side_by_side(),
        fresh=fresh,
        trust=opt.trust(source, everything=trust),
    )
    with running(out, quiet=quiet) as progress:
        folder, result = run_sensitivity(model, out, options, progress)
    show_result(result, lambda: _view(result), folder, json=json, quiet=quiet)


def _view(result: SensitivityResult) -> RenderableType:
    from twofour.reports.sensitivity_document import sensitivity_document
    from twofour.reports.terminal import render

    return render(sensitivity_document(result))

"""`twofour sensitivity`: what each layer loses when it is pruned, and what that saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twofour.cli import options as opt
from twofour.cli import pruning_options as how
from twofour.cli.console import show_result
from twofour.cli.guard import guarded, running
from twofour.records.options import RunOptions
from twofour.records.weights import Pattern

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twofour.records.sensitivity import SensitivityResult


@guarded
def sensitivity(
    model: opt.Model,
    *,
    out: opt.Out = None,
    metric: opt.MetricOption = None,
    max_drop: opt.MaxDrop = None,
    budget: opt.BudgetShare = None,
    lower_is_better: opt.LowerIsBetter = False,
    loss: opt.LossOption = None,
    profile: opt.LayerTimes = None,
    siblings: opt.Siblings = False,
    pattern: opt.PatternText = "2:4",
    all_layers: opt.AllLayers = False,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    layers: opt.Layers = None,
    calibrate: how.Calibrate = None,
    calibrate_samples: how.CalibrateSamples = how.SAMPLES,
    mean: how.Mean = None,
    std: how.Std = None,
    size: how.Size = None,
    method: how.MethodName = None,
    refit: how.Refit = None,
    damping: how.Damping = None,
    bias_correction: how.BiasCorrection = True,
    precision: opt.PrecisionOption = None,
    keep_float32: opt.KeepFloat32 = None,
    inputs: opt.Inputs = None,
    input_shape: opt.InputShapes = None,
    seed: opt.Seed = 0,
    jobs: opt.Jobs = None,
    ray: opt.Ray = None,
    fresh: opt.Fresh = False,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure every layer pruned alone, then sets of them, and choose a set within a budget.

    sensitivity.json, .md and .html, and layers.txt, which `prune-export-build --layers` takes, are
    in the run folder. Measurements are kept: the same command goes on where it was stopped.

    Example: twofour sensitivity model.py:make --metric model.py:evaluate --max-drop 0.5
    """
    from twofour.pipeline.run import run_sensitivity

    shapes, names = opt.parse_input_shapes(input_shape)
    options = RunOptions(
        pattern=Pattern.parse(pattern),
        selection=opt.selection(
            all_layers=all_layers, include=include, exclude=exclude, layers=layers
        ),
        calibration=how.calibration_options(
            data=calibrate, samples=calibrate_samples, mean=mean, std=std, size=size
        ),
        method=how.method_options(
            name=method,
            refit=refit,
            damping=damping,
            bias_correction=bias_correction,
            repair=None,
            permute_seconds=0.0,
        ),
        precision=precision,
        keep_float32=tuple(keep_float32 or ()),
        inputs=None if inputs is None else str(inputs),
        input_shapes=shapes,
        input_shape_names=names,
        metric=metric,
        seed=seed,
        budget=opt.budget_options(
            max_drop=max_drop,
            share=budget,
            lower_is_better=lower_is_better,
            loss=loss,
            profile=profile,
            siblings=siblings,
        ),
        side_by_side=opt.side_by_side(jobs, ray),
        fresh=fresh,
    )
    with running(out, quiet=quiet) as progress:
        folder, result = run_sensitivity(model, out, options, progress)
    show_result(result, lambda: _view(result), folder, json=json, quiet=quiet)


def _view(result: SensitivityResult) -> RenderableType:
    from twofour.reports.sensitivity_document import sensitivity_document
    from twofour.reports.terminal import render

    return render(sensitivity_document(result))

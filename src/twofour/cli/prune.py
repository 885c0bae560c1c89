"""`twofour prune`: pruned weights and what was done to each."""

from __future__ import annotations

from twofour.cli import options as opt
from twofour.cli import pruning_options as how
from twofour.cli.console import show_result
from twofour.cli.guard import guarded, running
from twofour.records.options import RunOptions
from twofour.records.weights import Pattern


@guarded
def prune(
    model: opt.Model,
    *,
    out: opt.Out = None,
    pattern: opt.PatternText = "2:4",
    all_layers: opt.AllLayers = False,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    calibrate: how.Calibrate = None,
    calibrate_samples: how.CalibrateSamples = how.SAMPLES,
    mean: how.Mean = None,
    std: how.Std = None,
    size: how.Size = None,
    method: how.MethodName = None,
    refit: how.Refit = None,
    damping: how.Damping = None,
    bias_correction: how.BiasCorrection = True,
    repair: how.Repair = None,
    permute_seconds: how.PermuteSeconds = 0.0,
    layers: opt.Layers = None,
    stream: opt.Stream = None,
    seed: opt.Seed = 0,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prune a model to N:M, save it, and check what was saved.

    A torch model gives weights.safetensors, an ONNX file sparse.onnx, a checkpoint that is larger
    than memory a pruned copy of its folder; prune.json says for every weight what was done and why
    not more.

    Example: twofour prune model.onnx --calibrate images.npz --exclude 'head*' --out runs/model
    """
    from twofour.pipeline.run import run_prune
    from twofour.reports.terminal import render
    from twofour.reports.weights_document import prune_document

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
            repair=repair,
            permute_seconds=permute_seconds,
        ),
        stream=stream,
        seed=seed,
    )
    with running(out, quiet=quiet) as progress:
        folder, result, _ = run_prune(model, out, options, progress)
    show_result(result, lambda: render(prune_document(result)), folder, json=json, quiet=quiet)

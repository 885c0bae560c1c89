"""`twofour prune`: pruned weights and what was done to each."""

from __future__ import annotations

from twofour.cli import options as opt
from twofour.cli.console import show_result
from twofour.cli.groups import with_groups
from twofour.cli.guard import guarded, running
from twofour.cli.pruning_options import PermuteSeconds, PruningArguments, Repair
from twofour.records.options import RunOptions
from twofour.records.weights import Pattern


@guarded
@with_groups
def prune(
    model: opt.Model,
    *,
    out: opt.Out = None,
    pruning: PruningArguments,
    repair: Repair = None,
    permute_seconds: PermuteSeconds = 0.0,
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
        pattern=Pattern.parse(pruning.pattern),
        selection=pruning.selection(),
        calibration=pruning.calibration_options(),
        method=pruning.method_options(repair=repair, permute_seconds=permute_seconds),
        stream=stream,
        seed=seed,
    )
    with running(out, quiet=quiet) as progress:
        folder, result, _ = run_prune(model, out, options, progress)
    show_result(result, lambda: render(prune_document(result)), folder, json=json, quiet=quiet)

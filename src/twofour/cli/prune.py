"""`twofour prune`: pruned weights and what was done to each."""

from __future__ import annotations

from twofour.cli import options as opt
from twofour.cli.console import TerminalProgress, say, show, show_text
from twofour.cli.guard import guarded, keep_tracebacks_in
from twofour.cli.run import selection
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
    seed: opt.Seed = 0,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prune a model to N:M by magnitude, save it, and check what was saved.

    A torch model gives weights.safetensors, an ONNX file sparse.onnx; prune.json says for every
    weight what was done and why not more.

    Example: twofour prune model.onnx --exclude 'head*' --out runs/model
    """
    from twofour.pipeline.run import run_prune
    from twofour.reports.weights_text import prune_table
    from twofour.store import to_json

    options = RunOptions(
        pattern=Pattern.parse(pattern),
        selection=selection(all_layers=all_layers, include=include, exclude=exclude),
        seed=seed,
    )
    if out is not None:
        keep_tracebacks_in(out)
    with TerminalProgress(quiet=quiet) as progress:
        folder, result, _ = run_prune(model, out, options, progress)
    if json:
        show_text(to_json(result))
        return
    show(prune_table(result))
    if not quiet:
        say(f"everything is in {folder}")

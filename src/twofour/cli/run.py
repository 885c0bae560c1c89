"""`twofour prune-export-build`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twofour.cli import options as opt
from twofour.cli.budget_options import BudgetArguments
from twofour.cli.build import build_view
from twofour.cli.console import show_result
from twofour.cli.engine_options import EngineArguments
from twofour.cli.groups import with_groups
from twofour.cli.guard import guarded, running
from twofour.cli.pruning_options import PermuteSeconds, PruningArguments, Repair
from twofour.records.options import RunOptions
from twofour.records.weights import Pattern

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twofour.records.run import RunResult

_MB = 1e6


@guarded
@with_groups
def prune_export_build(
    model: opt.Model,
    *,
    out: opt.Out = None,
    pruning: PruningArguments,
    repair: Repair = None,
    permute_seconds: PermuteSeconds = 0.0,
    precision: opt.PrecisionOption = None,
    keep_float32: opt.KeepFloat32 = None,
    opset: opt.Opset = None,
    static_batch: opt.StaticBatch = False,
    dynamic: opt.Dynamic = None,
    inputs: opt.Inputs = None,
    input_shape: opt.InputShapes = None,
    dense_reference: opt.DenseReference = None,
    metric: opt.MetricOption = None,
    budget: BudgetArguments,
    seed: opt.Seed = 0,
    fresh: opt.Fresh = False,
    engine: EngineArguments,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prune to N:M, validate, export to ONNX, build engines and report on every layer.

    The run folder holds everything that was made. The same command goes on where it was stopped,
    and does again only what a changed option or input asks for. An engine that crashes is a row of
    the report and, when all else is done, exit code 5.

    Example: twofour prune-export-build model.py:make --calibrate data.py:batches --out runs/model
    """
    from twofour.pipeline.building import refuse_crashed
    from twofour.pipeline.run import run_all

    asked_shapes, asked_names = opt.parse_input_shapes(input_shape)
    options = RunOptions(
        pattern=Pattern.parse(pruning.pattern),
        selection=pruning.selection(),
        calibration=pruning.calibration_options(),
        method=pruning.method_options(repair=repair, permute_seconds=permute_seconds),
        precision=precision,
        keep_float32=tuple(keep_float32 or ()),
        opset=opset,
        dynamic_batch=not static_batch,
        dynamic=opt.parse_dynamic(dynamic),
        inputs=None if inputs is None else str(inputs),
        input_shapes=asked_shapes,
        input_shape_names=asked_names,
        dense_reference=dense_reference,
        metric=metric,
        budget=budget.budget_options(),
        side_by_side=budget.side_by_side(),
        seed=seed,
        fresh=fresh,
        engine=engine.engine,
        build=engine.build_options(),
    )
    with running(out, quiet=quiet) as progress:
        result = run_all(model, out, options, progress)
    show_result(result, lambda: _view(result), Path(result.folder), json=json, quiet=quiet)
    refuse_crashed(result.build)


def _view(result: RunResult) -> RenderableType:
    """The whole run: verdicts first, then what pruning cost, the engines and the files."""
    from rich.console import Group
    from rich.text import Text

    from twofour.reports.eligibility_document import eligibility_document
    from twofour.reports.eligibility_words import drift_lines
    from twofour.reports.sensitivity_document import answer_lines
    from twofour.reports.terminal import render
    from twofour.reports.weights_document import (
        calibration_lines,
        holding_words,
        permutation_lines,
    )

    found, files = result.export.pattern, result.export.files
    permutation, chosen = result.prune.permutation, result.sensitivity
    report = eligibility_document(
        result.report,
        accuracy=result.accuracy,
        comparison=result.build.times,
        pruned=result.prune,
    )
    return Group(
        render(report),
        Text(),
        *map(Text, () if chosen is None else answer_lines(chosen)),
        *map(Text, () if permutation is None else permutation_lines(permutation)),
        *map(Text, calibration_lines(result.prune)),
        *map(Text, drift_lines(result.accuracy)),
        Text(),
        build_view(result.build),
        Text(),
        Text(f"{holding_words(found)} of {found.files[0]}, read back from the file"),
        *(Text(f"{file.file}: {file.size_bytes / _MB:.1f} MB") for file in files),
    )

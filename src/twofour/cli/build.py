"""`twofour build`: a dense and a sparse engine from one ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twofour.cli import options as opt
from twofour.cli.console import TerminalProgress, say, show, show_text
from twofour.cli.guard import guarded, keep_tracebacks_in
from twofour.cli.run import build_options
from twofour.records import RunOptions


@guarded
def build(
    onnx: Annotated[Path, typer.Argument(metavar="ONNX", help="The pruned model, an .onnx file.")],
    *,
    out: opt.Out = None,
    inputs: opt.Inputs = None,
    input_shape: opt.InputShapes = None,
    seed: opt.Seed = 0,
    engine: opt.EngineOption = opt.EngineChoice.AUTO,
    shapes: opt.Shapes = None,
    workspace: opt.Workspace = None,
    opt_level: opt.OptimizationLevel = None,
    tf32: opt.Tf32 = True,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Build a TensorRT engine with sparse weights allowed and one without, and time both.

    Leaves plan, verbose log, layer information and per-layer profile of each. Without TensorRT
    the model is run by ONNX Runtime, and the record says so.

    Example: twofour build sparse.onnx --shapes x=1x3x224x224:8x3x224x224:16x3x224x224
    """
    from twofour.cli.views import build_view
    from twofour.pipeline.run import run_build
    from twofour.store import to_json

    options = RunOptions(
        inputs=None if inputs is None else str(inputs),
        input_shapes=opt.parse_input_shapes(input_shape),
        seed=seed,
        engine=engine.value,
        build=build_options(shapes=shapes, workspace=workspace, level=opt_level, tf32=tf32),
    )
    if out is not None:
        keep_tracebacks_in(out)
    with TerminalProgress(quiet=quiet) as progress:
        folder, built = run_build(onnx, out, options, progress)
    if json:
        show_text(to_json(built))
        return
    show(build_view(built))
    if not quiet:
        say(f"everything is in {folder}")

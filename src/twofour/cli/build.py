"""`twofour build`: a dense and a sparse engine from one ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twofour.cli import options as opt
from twofour.cli.console import say, show_record, show_result, show_text
from twofour.cli.engine_options import EngineArguments
from twofour.cli.groups import with_groups
from twofour.cli.guard import guarded, running
from twofour.engines.registry import AUTO
from twofour.errors import BadInputError
from twofour.records.options import RunOptions
from twofour.words import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twofour.records.run import BuildResult

_EMITTED_FOR = "10"
"""TensorRT of the other machine where nobody says which."""


@guarded
@with_groups
def build(
    onnx: Annotated[Path, typer.Argument(metavar="ONNX", help="The pruned model, an .onnx file.")],
    *,
    out: opt.Out = None,
    precision: opt.PrecisionOption = None,
    keep_float32: opt.KeepFloat32 = None,
    inputs: opt.Inputs = None,
    input_shape: opt.InputShapes = None,
    seed: opt.Seed = 0,
    engine: EngineArguments,
    emit_trtexec: Annotated[
        Path | None,
        typer.Option(
            "--emit-trtexec",
            metavar="DIR",
            help="Build nothing here: write a folder with a build.sh for a machine with trtexec.",
        ),
    ] = None,
    tensorrt_version: Annotated[
        str | None,
        typer.Option(
            "--tensorrt-version",
            help="TensorRT of that machine: 8.0 to 8.6, 10.x or 11.x.",
            show_default="10",
        ),
    ] = None,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Build a TensorRT engine with sparse weights allowed and one without, and time both.

    Leaves plan, verbose log, layer information and per-layer profile of each. Without TensorRT
    the model is run by ONNX Runtime, and the record says so. With --emit-trtexec the engines are
    built by trtexec elsewhere: run build.sh there, bring the folder back, then twofour report DIR.
    Without --shapes a free batch of the file is 1:8:8, and every other free size must be given.

    Example: twofour build sparse.onnx --shapes x=1x3x224x224:8x3x224x224:16x3x224x224
    """
    asked_shapes, asked_names = opt.parse_input_shapes(input_shape)
    options = RunOptions(
        precision=precision,
        keep_float32=tuple(keep_float32 or ()),
        inputs=None if inputs is None else str(inputs),
        input_shapes=asked_shapes,
        input_shape_names=asked_names,
        seed=seed,
        engine=engine.engine,
        build=engine.build_options(),
    )
    if emit_trtexec is None:
        if tensorrt_version is not None:
            raise BadInputError(
                "--tensorrt-version is of the machine that --emit-trtexec writes for",
                hint="add --emit-trtexec DIR; a build here takes the TensorRT that is installed",
            )
        _build(onnx, out, options, json=json, quiet=quiet)
        return
    if (engine.engine != AUTO or out is not None or seed) and not quiet:
        say("--emit-trtexec builds nothing here: --engine, --out and --seed are not used")
    version = tensorrt_version or _EMITTED_FOR
    _emit(onnx, emit_trtexec, options, version=version, json=json, quiet=quiet)


def _build(onnx: Path, out: Path | None, options: RunOptions, *, json: bool, quiet: bool) -> None:
    from twofour.pipeline.building import refuse_all_failed, refuse_crashed
    from twofour.pipeline.run import run_build

    with running(out, quiet=quiet) as progress:
        folder, built = run_build(onnx, out, options, progress)
    show_result(built, lambda: build_view(built), folder, json=json, quiet=quiet)
    refuse_crashed(built)
    refuse_all_failed(built)


def build_view(built: BuildResult) -> RenderableType:
    """Engine, why not another, and the times of its variants."""
    from twofour.reports.document import Lines, Role
    from twofour.reports.eligibility_document import engine_lines
    from twofour.reports.latency_document import build_times
    from twofour.reports.terminal import draw

    engine = Lines(lines=(f"engine: {built.engine.in_words}",), role=Role.TEXT)
    return draw((engine, engine_lines(built, Role.TEXT), *build_times(built.times)))


def _emit(
    onnx: Path, folder: Path, options: RunOptions, *, version: str, json: bool, quiet: bool
) -> None:
    from twofour.pipeline.emitting import emit_trtexec

    emitted = emit_trtexec(onnx, folder, options, version)
    for note in () if quiet else emitted.notes:
        say(f"note: {note}")
    if json:
        show_record(emitted)
        return
    shown = printable(str(folder))
    show_text(
        f"{shown} is ready for trtexec of TensorRT {emitted.tensorrt}\n"
        f"copy it there, run: sh {emitted.script}\n"
        f"copy it back, then: twofour report {shown}, twofour compare {shown}\n"
    )

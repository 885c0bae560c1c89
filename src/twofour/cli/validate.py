"""`twofour validate`: does the pattern hold in the files that were saved?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twofour.cli import options as opt
from twofour.cli.console import say_error, show, show_record
from twofour.cli.guard import guarded
from twofour.errors import PatternBrokenError
from twofour.records.options import Selection
from twofour.records.weights import Pattern


@guarded
def validate(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="An .onnx, .safetensors, .pt, .pth or .bin file, a checkpoint or a run folder.",
        ),
    ],
    *,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern", "-p", metavar="N:M", help="Pattern.", show_default="the run's, else 2:4"
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="GLOB", help="Hold only these layers to it; repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="GLOB", help="Let these layers pass; repeatable."),
    ] = None,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Check every weight of a saved file against the pattern; exit 4 when one is broken.

    In a run folder the weights that were pruned must hold it; elsewhere all that sparse math
    could use, less --exclude; and no file may be another than the run left.

    Example: twofour validate runs/model/sparse.onnx
    """
    from twofour.pipeline.validating import validate_path
    from twofour.reports.terminal import render
    from twofour.reports.weights_document import validation_document

    chosen = Selection(include=tuple(include or ()), exclude=tuple(exclude or ()))
    validation = validate_path(path, None if pattern is None else Pattern.parse(pattern), chosen)
    if json:
        show_record(validation)
    elif not quiet:
        show(render(validation_document(validation)))
    if validation.broken:
        error = PatternBrokenError(
            f"{len(validation.broken)} of {len(validation.checks)} weights "
            f"in {path} are not {validation.pattern}"
        )
        say_error(error)
        raise typer.Exit(error.exit_code)
    if validation.stale:
        error = PatternBrokenError(
            f"{path} is stale: {'; '.join(validation.stale)}",
            hint="the command that made the folder brings it up to date",
        )
        say_error(error)
        raise typer.Exit(error.exit_code)

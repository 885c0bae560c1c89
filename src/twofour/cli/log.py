"""`twofour log`: what build logs say about sparsity; facts only, no model needed."""

from __future__ import annotations

from typing import Annotated

import typer

from twofour.cli import options as opt
from twofour.cli.console import show_json, show_rows
from twofour.cli.guard import guarded
from twofour.errors import BadInputError


@guarded
def log(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Build logs: text, .gz, .ipynb, or - for stdin."),
    ],
    *,
    json: opt.AsJson = False,
) -> None:
    """Say what TensorRT's build logs hold: eligible and chosen layers, and the tactics timed.

    Logs of trtexec, Python, Polygraphy, Torch-TensorRT, ONNX Runtime and others; TensorRT 7 to 11.

    Example: trtexec --onnx=model.onnx --sparsity=enable --verbose 2>&1 | twofour log -
    """
    from twofour.logs.read import read_build_log
    from twofour.reports.log_document import log_document
    from twofour.reports.terminal import render
    from twofour.store import json_pieces

    found = read_build_log(*files)
    if json:
        show_json(json_pieces(found))
    elif found.builds:
        show_rows(render(log_document(found)))
    if not found.builds:
        notes = [f"{file.name}: {note}" for file in found.files for note in file.notes]
        raise BadInputError(
            "; ".join(notes),
            hint="give the log of a build with a verbose logger (trtexec --verbose), "
            "stdout and stderr",
        )

"""The Typer application: which command is which module."""

from __future__ import annotations

from typing import Annotated

import typer

from twofour.cli import compare, report, run
from twofour.packages import __version__

app = typer.Typer(
    name="twofour",
    help="From a dense PyTorch or ONNX model to a 2:4-sparse TensorRT engine, "
    "with the reason for every layer that does not run sparse.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("prune-export-build")(run.prune_export_build)
app.command("prune")(run.prune)
app.command("sensitivity")(run.sensitivity)
app.command("validate")(report.validate)
app.command("export")(run.export)
app.command("build")(run.build)
app.command("log")(report.log)
app.command("report")(report.report)
app.command("explain")(report.explain)
app.command("compare")(compare.compare)
app.command("doctor")(report.doctor)


def _version(wanted: bool) -> None:  # Typer's callback signature
    if wanted:
        typer.echo(f"twofour {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass

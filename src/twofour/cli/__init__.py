"""The command line, the only place that prints or exits: which command is which function."""

from __future__ import annotations

import faulthandler
import functools
import sys
from typing import TYPE_CHECKING

from twofour.errors import INTERRUPTED
from twofour.packages import __version__, missing

if TYPE_CHECKING:  # what is missing must be named, typer too
    from typer import Typer


def main() -> None:
    """Entry point of the `twofour` command."""
    from twofour.cli.console import flushed, open_streams

    open_streams()
    faulthandler.enable()  # a crash inside a runtime library leaves a traceback
    code = 0
    try:
        application()()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:  # while modules are loaded
        code = INTERRUPTED
    except ModuleNotFoundError as error:  # a package that the command line itself needs
        if (absent := missing(error)) is None:
            raise
        sys.stderr.write(f"error: {absent}\n")
        code = absent.exit_code
    sys.exit(flushed(code))


@functools.cache
def application() -> Typer:
    """The Typer application with every command."""
    import typer

    from twofour.cli import compare, report, run

    app = typer.Typer(
        name="twofour",
        help="From a dense PyTorch or ONNX model to a 2:4-sparse TensorRT engine, "
        "with the reason for every layer that does not run sparse.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    staged = (run.prune_export_build, run.prune, run.sensitivity, report.validate, run.export)
    others = (report.log, report.report, report.explain, compare.compare, report.doctor)
    for command in (*staged, run.build, *others):
        app.command()(command)

    def show_version(wanted: bool) -> None:  # Typer's callback signature
        if wanted:
            typer.echo(f"twofour {__version__}")
            raise typer.Exit

    flag = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Print the version."
    )

    @app.callback()
    def options(*, version: bool = flag) -> None:
        pass

    return app

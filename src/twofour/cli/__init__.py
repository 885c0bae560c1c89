"""The command line, the only place that prints or exits: which command is which function."""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn, cast

from twofour.errors import INTERRUPTED, BadInputError
from twofour.packages import __version__, missing

if TYPE_CHECKING:  # what is missing must be named, typer too
    from typer import BadParameter, Typer
    from typer.core import TyperGroup


def main() -> None:
    """Entry point of the `twofour` command."""
    from twofour.cli.console import flushed, open_streams

    open_streams()
    faulthandler.enable(os.dup(2))  # a crash inside a runtime library leaves a traceback
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


def _group() -> type[TyperGroup]:
    """The group of the commands, whose usage errors have the form of all other errors."""
    import typer
    from typer.core import TyperGroup

    from twofour.cli.console import say_error

    usage_error = cast("type[BadParameter]", typer.BadParameter.__mro__[1])  # without a public name

    class Group(TyperGroup):
        def main(self, *args: Any, **extra: Any) -> NoReturn:  # noqa: ANN401  # Typer's
            try:
                code = super().main(*args, **{**extra, "standalone_mode": False})
            except usage_error as error:
                command = "twofour" if error.ctx is None else error.ctx.command_path
                code = error.exit_code
                message = error.format_message().rstrip(".")
                if message:  # else the help was shown
                    say_error(BadInputError(message, hint=f"see {command} --help"))
            sys.exit(code)

    return Group


@functools.cache
def application() -> Typer:
    """The Typer application with every command."""
    import typer

    from twofour.cli import report, run

    app = typer.Typer(
        name="twofour",
        cls=_group(),
        help="From a dense PyTorch or ONNX model to a 2:4-sparse TensorRT engine, "
        "with the reason for every layer that does not run sparse.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    staged = (run.prune_export_build, run.prune, run.sensitivity, run.finetune, report.validate)
    models = (run.export, report.sizes, run.build, run.fleet, report.forecast)
    others = (report.log, report.report, report.explain, run.compare, report.doctor)
    for command in (*staged, *models, *others):
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

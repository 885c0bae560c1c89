"""The command line: one module per command; the only place that prints or exits."""

from __future__ import annotations

import faulthandler
import sys

from twofour.errors import INTERRUPTED
from twofour.packages import missing


def main() -> None:
    """Entry point of the `twofour` command."""
    from twofour.cli.console import flushed, open_streams

    open_streams()
    sys.exit(flushed(_exit_code()))


def _exit_code() -> int:
    faulthandler.enable()  # a crash inside a runtime library is not to pass without a word
    try:
        from twofour.cli.app import app

        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:  # while modules are loaded
        return INTERRUPTED
    except ModuleNotFoundError as error:  # what the command line itself is made with
        if (lacking := missing(error)) is None:
            raise
        sys.stderr.write(f"error: {lacking}\n")
        return lacking.exit_code
    return 0

"""The command line: one module per command; the only place that prints or exits."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `twofour` command."""
    import faulthandler

    from twofour.cli.app import app

    faulthandler.enable()  # a crash inside a runtime library is not to pass without a word
    app()

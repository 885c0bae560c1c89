"""The command line: one module per command; the only place that prints or exits."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `twofour` command."""
    from twofour.cli.app import app

    app()

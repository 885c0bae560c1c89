"""Where the command line talks: data on stdout, everything else on stderr."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich takes a third of the time of --help
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console, RenderableType
    from rich.progress import TaskID

_UNFOLDED = 1 << 20
"""Columns; no name in a log is longer."""


def data_console() -> Console:
    """Console of stdout, for reports; colour only on a terminal and without NO_COLOR."""
    from rich.console import Console

    from twofour.reports.terminal import PLAIN_WIDTH

    return Console(
        width=None if sys.stdout.isatty() else PLAIN_WIDTH,
        soft_wrap=False,
        highlight=False,
        no_color=_no_color(),
    )


def talk_console() -> Console:
    """Console of stderr, for progress and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, no_color=_no_color(), soft_wrap=True)


def say(text: str) -> None:
    """A line on stderr, taken literally."""
    talk_console().print(text, markup=False)


def show(report: RenderableType) -> None:
    """A report on stdout; a text is taken literally."""
    if isinstance(report, str):
        show_text(report)
    else:
        data_console().print(report)


def show_rows(renderable: RenderableType) -> None:
    """A table on stdout; where that is no terminal every row is one line and no name is folded."""
    if sys.stdout.isatty():
        show(renderable)
        return
    from twofour.reports.terminal import plain_text

    show_text(plain_text(renderable, width=_UNFOLDED))


def show_text(text: str) -> None:
    """A record or a document on stdout, and nothing else there."""
    sys.stdout.write(text)


def _no_color() -> bool:
    return bool(os.environ.get("NO_COLOR"))


def show_result(
    record: object,
    view: Callable[[], RenderableType],
    folder: Path,
    *,
    json: bool,
    quiet: bool,
) -> None:
    """What a command that fills a run folder says at its end: the record, or its view and where."""
    if json:
        from twofour.store import to_json

        show_text(to_json(record))
        return
    show(view())
    if not quiet:
        say(f"everything is in {folder}")


class TerminalProgress:
    """Draws the stages of a run on stderr: a spinner and bar on a terminal, nothing elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = talk_console()
        self._console = console
        self._quiet = quiet
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, name: str, title: str) -> None:  # noqa: ARG002  # the Protocol's names
        """Start a new line for the stage."""
        self._clear()
        self._task = self._bar.add_task(title, total=None)
        self._title = title

    def done(self, name: str, *, seconds: float, reused: bool) -> None:  # noqa: ARG002  # Protocol
        """Leave a finished line behind."""
        self._clear()
        if not self._quiet and self._console.is_terminal:
            mark = "as before" if reused else f"{seconds:.1f} s"
            self._bar.console.print(f"  {self._title} [dim]({mark})[/dim]", highlight=False)

    def step(self, text: str, done: int, total: int | None) -> None:
        """Move the bar of the running stage."""
        if self._task is not None:
            description = f"{self._title}: {text}" if text else self._title
            self._bar.update(self._task, description=description, completed=done, total=total)

    def note(self, text: str) -> None:
        """Say something that matters even when the bar is not drawn."""
        if not self._quiet:
            self._bar.console.print(text, markup=False)

    def _clear(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

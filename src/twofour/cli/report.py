"""`twofour report`: the eligibility of every layer, from a run folder or an ONNX file."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from twofour.cli import options as opt
from twofour.cli.console import show, show_text
from twofour.cli.guard import guarded
from twofour.errors import BadInputError
from twofour.records import EligibilityReport


class Format(str, Enum):
    """What --format takes."""

    TABLE = "table"
    MARKDOWN = "markdown"
    CSV = "csv"
    HTML = "html"


@guarded
def report(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN_FOLDER]", help="A run folder.")
    ] = None,
    *,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", help="An ONNX file, instead of a run folder.")
    ] = None,
    layout: Annotated[
        Format, typer.Option("--format", "-f", help="Of what is printed on stdout.")
    ] = Format.TABLE,
    json: opt.AsJson = False,
) -> None:
    """Say for every layer whether sparse math can run in it, why not, and what to do.

    Example: twofour report runs/model --format html > report.html
    """
    from twofour.pipeline.reporting import report_folder, report_onnx
    from twofour.reports.text import eligibility_table
    from twofour.store import to_json

    if (folder is None) == (onnx is None):
        raise BadInputError(
            "report takes a run folder or --onnx FILE, one of the two",
            hint="twofour report runs/model, or twofour report --onnx model.onnx",
        )
    verdicts = report_folder(folder) if folder is not None else report_onnx(onnx or Path())
    if json:
        show_text(to_json(verdicts))
    elif layout is Format.TABLE:
        show(eligibility_table(verdicts))
    else:
        show_text(_as_text(verdicts, layout))


def _as_text(verdicts: EligibilityReport, layout: Format) -> str:
    from twofour.reports.csv_table import to_csv
    from twofour.reports.html import to_html
    from twofour.reports.markdown import to_markdown

    return {Format.MARKDOWN: to_markdown, Format.CSV: to_csv, Format.HTML: to_html}[layout](
        verdicts
    )

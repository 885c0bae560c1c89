"""`twofour explain`: everything known about one layer, with log lines and tactics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twofour.cli.console import show
from twofour.cli.guard import guarded
from twofour.errors import BadInputError


@guarded
def explain(
    layer: Annotated[
        str, typer.Argument(metavar="LAYER", help="A layer, ONNX node or engine layer.")
    ],
    *,
    onnx: Annotated[Path | None, typer.Option("--onnx", help="The ONNX model.")] = None,
    log: Annotated[Path | None, typer.Option("--log", help="Build log of the engine.")] = None,
    layers: Annotated[
        Path | None, typer.Option("--layers", help="Layer information of the engine (JSON).")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Per-layer profile of the engine (JSON).")
    ] = None,
    dense_log: Annotated[
        Path | None, typer.Option("--dense-log", help="Build log of the dense engine.")
    ] = None,
) -> None:
    """Tell one layer's whole story: weight, rules, log lines, tactics, and what to do.

    Example: twofour explain /model.2/cv1/conv/Conv --onnx model.onnx --log build.log
    """
    from twofour.pipeline.evidence import read_evidence
    from twofour.pipeline.reporting import report_onnx
    from twofour.reports.join.explain_text import explain as story
    from twofour.reports.join.from_log import report_from_engine
    from twofour.reports.join.joined import join_report

    if onnx is None and log is None and layers is None:
        raise BadInputError(
            "explain needs the model, a log or layer information",
            hint="twofour explain LAYER --onnx model.onnx --log build.log",
        )
    evidence = read_evidence(
        onnx=onnx, log=log, layers=layers, profile=profile, dense_log=dense_log
    )
    if onnx is None:
        report = report_from_engine(evidence)
    else:
        report = join_report(report_onnx(onnx), evidence)
    show(story(report, evidence, layer))

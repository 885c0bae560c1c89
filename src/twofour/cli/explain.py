"""`twofour explain`: everything known about one layer, with log lines and tactics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twofour.cli import options as opt
from twofour.cli.console import show
from twofour.cli.guard import guarded


@guarded
def explain(
    layer: Annotated[
        str, typer.Argument(metavar="LAYER", help="A layer, ONNX node or engine layer.")
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="A run folder, or one of build --emit-trtexec."),
    ] = None,
    *,
    onnx: opt.OnnxFile = None,
    log: opt.LogFile = None,
    layers: opt.LayersFile = None,
    profile: opt.ProfileFile = None,
    dense_log: opt.DenseLogFile = None,
    dense_profile: opt.DenseProfileFile = None,
    layer_map: opt.LayerMapFile = None,
) -> None:
    """Tell one layer's whole story: weight, rules, log lines, tactics, and what to do.

    Example: twofour explain layer1.0.conv1 runs/resnet
    """
    from twofour.pipeline.reporting import explained_folder, report_files
    from twofour.reports.explain import explain as story

    files = opt.evidence_files(
        folder,
        onnx=onnx,
        log=log,
        layers=layers,
        profile=profile,
        dense_log=dense_log,
        dense_profile=dense_profile,
        layer_map=layer_map,
    )
    report, evidence = explained_folder(folder) if folder is not None else report_files(files)
    show(story(report, evidence, layer))

"""`twofour report`: the eligibility of every layer, from a run folder or from files of anyone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twofour.cli import options as opt
from twofour.cli.console import say, say_error, show, show_record
from twofour.cli.guard import guarded
from twofour.errors import PatternBrokenError
from twofour.records.weights import ReasonCode
from twofour.reports import TABLE

if TYPE_CHECKING:
    from twofour.eligibility.gates import Gates
    from twofour.records.eligibility import EligibilityReport


@guarded
def report(
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
    min_eligible: Annotated[
        float | None,
        typer.Option("--min-eligible", help="Gate: share of the layers to be pruned, 0 to 1."),
    ] = None,
    min_chosen: Annotated[
        float | None,
        typer.Option("--min-chosen", help="Gate: share of the layers to be pruned, 0 to 1."),
    ] = None,
    no_broken: Annotated[
        bool,
        typer.Option("--no-broken", help="Gate: no weight to be pruned breaks the pattern."),
    ] = False,
    allow_reason: Annotated[
        list[ReasonCode] | None,
        typer.Option(
            "--allow-reason",
            help="Layers with this reason pass the gates; repeatable. UNSUPPORTED_OP: weights that "
            "no row names too.",
        ),
    ] = None,
    layout: opt.Layout = TABLE,
    json: opt.AsJson = False,
) -> None:
    """Say for every layer whether sparse math can run in it, why not, and what to do.

    From a run folder, an ONNX file, or what a build left (of trtexec, Polygraphy and others):
    then the verdicts are measured. Gates that are not met end in exit 4. They hold for the weights
    that were to be pruned: the run's own, or in an ONNX file those that pruning takes by default.
    Shares also count what pruning does not reach: each node with weights that no row names (LSTM;
    --allow-reason UNSUPPORTED_OP leaves them out), and weights that the model's own code uses
    (--allow-reason NOT_A_LAYER).

    Example: twofour report --onnx model.onnx --log build.log --layers layers.json
    """
    from twofour.eligibility.gates import Gates
    from twofour.pipeline.reporting import report_document, report_files, report_folder

    gates = Gates(
        min_eligible=min_eligible,
        min_chosen=min_chosen,
        no_broken=no_broken,
        allow_reasons=tuple(allow_reason or ()),
    )
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
    render = opt.report_format(layout, json=json)
    verdicts = report_folder(folder) if folder is not None else report_files(files)[0]
    if json:
        show_record(verdicts)
    else:
        show(render(report_document(folder, verdicts)))
    for line in verdicts.stale if json or layout != TABLE else ():
        say(f"warning: {line}")
    _hold_to(verdicts, gates)


def _hold_to(verdicts: EligibilityReport, gates: Gates) -> None:
    from twofour.eligibility.gates import check_gates

    failing = check_gates(verdicts, gates)
    if failing:
        error = PatternBrokenError("the report does not meet the gates")
        say_error(error)
        for line in failing:
            say(f"  {line}")
        raise typer.Exit(error.exit_code)

"""The commands that only read: what was built or saved, logs, this machine, what 2:4 may gain."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twofour.cli import options as opt
from twofour.cli.console import (
    document_view,
    guarded,
    running,
    say,
    say_error,
    show,
    show_record,
    show_rows,
)
from twofour.errors import BadInputError, PatternBrokenError
from twofour.packages import installed_version
from twofour.records.options import ForecastOptions, MathPrecision, RunOptions
from twofour.records.weights import Pattern, ReasonCode, Selection, Validation
from twofour.reports import TABLE, document_of
from twofour.words import count

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from twofour.eligibility.layer_gates import Gates
    from twofour.pipeline.reporting import Judged
    from twofour.records.eligibility import EligibilityReport
    from twofour.records.export import Diagnosis, EngineStatus, Gpu
    from twofour.records.forecast import Forecast
    from twofour.records.log import BuildLog

_Folder = Annotated[
    Path | None,
    typer.Argument(metavar="[FOLDER]", help="A run folder, or a folder of build --emit-trtexec."),
]


def _kept(flag: str, help: str, kind: Any = list[Path]) -> opt.Option:  # noqa: A002, ANN401  # Typer's
    """An option whose value is kept in a dict under the name of the option."""
    field = flag.removeprefix("--").replace("-", "_")
    one = {list[Path]: "FILE", list[ReasonCode]: "CODE"}.get(kind)
    return opt.option(lambda d, v: {**d, field: v}, flag, kind=kind, help=help, metavar=one)


_EVIDENCE = (
    _kept("--onnx", "The ONNX model."),
    _kept("--log", "The log of the build with sparse weights allowed."),
    _kept("--layers", "Layer information of that engine, such as sparse.layers.json."),
    _kept("--profile", "Per-layer profile of that engine, such as sparse.profile.json."),
    _kept("--dense-log", "The log of the build without sparse weights."),
    _kept("--dense-profile", "Per-layer profile of the dense engine, such as dense.profile.json."),
    _kept(
        "--layer-map", "The layers.json of a run, or your own JSON: engine layer to layer or node."
    ),
)


_GPU = _kept("--gpu", "Forecast the gain on this GPU, such as A100; else on the build's.", str)


def _judged(folder: Path | None, options: dict[str, Any]) -> Judged:
    """The verdicts on a folder or on files, with a forecast where a GPU is named or known."""
    from twofour.pipeline.reporting import judge

    gpu = options.pop("gpu", None)
    for name, files in options.items():
        if len(files) > 1:
            raise BadInputError(f"--{name.replace('_', '-')} was given twice", hint="name one")
    return judge(folder, {name: file for name, (file,) in options.items()}, gpu)


_GATES = (
    _kept(
        "--min-eligible",
        "Gate: at least this share (0 to 1) of layers to prune is eligible, even if likely dense.",
        float,
    ),
    _kept("--min-chosen", "Gate: at least this share of these layers runs sparse.", float),
    _kept("--no-broken", "Gate: no weight to be pruned may break the pattern.", bool),
    _kept(
        "--allow-reason",
        "Layers with this reason, such as GROUPED_CONV, pass the gates; repeatable. "
        "UNSUPPORTED_OP also covers weights that no row names.",
        list[ReasonCode],
    ),
)


_All = Annotated[
    bool, typer.Option("--all", help="A row for each layer, also for layers that are alike.")
]
_Target = Annotated[
    Path | None,
    typer.Option(
        "--annotate",
        metavar="OUT.onnx",
        help="Also write the model with verdict, reason codes and forecast gain in the metadata of "
        "its nodes, where Netron shows them.",
    ),
]


@guarded
@opt.with_options(dict, *_GATES, parameter="gates")
@opt.with_options(dict, *_EVIDENCE, _GPU)
def report(
    folder: _Folder = None,
    *,
    options: dict[str, Any],
    gates: dict[str, Any],
    annotate: _Target = None,
    layout: opt.Layout = TABLE,
    unfold: _All = False,
    json: opt.AsJson = False,
) -> None:
    """Say for every layer whether sparse math can run in it, why not, and what to do.

    Reads a run folder, an ONNX file, or the files of a build (by trtexec, Polygraphy and others),
    whose verdicts are measured. Exit 4: a gate is not met. Gates count the weights that were to be
    pruned: those of the run, or for an ONNX file those that are pruned by default. They also count
    weights that cannot be pruned: of nodes without a row in the report, such as LSTM, unless you
    add --allow-reason UNSUPPORTED_OP, and weights that the model's own code uses, unless you add
    --allow-reason NOT_A_LAYER.

    Example: twofour report --onnx model.onnx --log build.log --layers sparse.layers.json
    """
    from twofour.eligibility.layer_gates import Gates
    from twofour.pipeline import reporting
    from twofour.reports.document import unfolded

    wanted = Gates(allow_reasons=tuple(gates.pop("allow_reason", ())), **gates)
    render = opt.report_format(layout, json=json)
    judged = _judged(folder, options)
    verdicts = judged.report
    if annotate is not None:
        reporting.annotate(judged, annotate)
    if json:
        show_record(verdicts)
    else:
        document = reporting.report_document(folder, verdicts)
        show(render(unfolded(document) if unfold else document))
        if folder is None and layout == TABLE:
            command = shlex.join(("twofour", *sys.argv[1:], "--format", "html"))
            say(f"Next: `{command} > report.html` makes a page of it")
    for line in verdicts.stale if json or layout != TABLE else ():
        say(f"warning: {line}")
    _refuse_missed(verdicts, wanted)


def _refuse_missed(verdicts: EligibilityReport, wanted: Gates) -> None:
    from twofour.eligibility.layer_gates import missed_gates

    failing = missed_gates(verdicts, wanted)
    if failing:
        raise PatternBrokenError("\n".join(("the report does not meet the gates", *failing)))


@guarded
@opt.with_options(dict, *_EVIDENCE, _GPU)
def explain(
    layer: Annotated[
        str, typer.Argument(metavar="LAYER", help="A layer, ONNX node or engine layer.")
    ],
    folder: _Folder = None,
    *,
    options: dict[str, Any],
) -> None:
    """Say everything about one layer: weight, rules, log lines, tactics, and what to do.

    Example: twofour explain layer1.0.conv1 runs/resnet
    """
    from twofour.reports.explain import layer_story

    is_elsewhere = folder.is_dir() if folder is not None else bool(options)
    if not is_elsewhere and Path(layer).is_dir():
        raise BadInputError(
            f"{layer} is a folder, not a layer",
            hint=f"twofour explain {folder or 'LAYER'} {layer}",
        )
    judged = _judged(folder, options)
    show(layer_story(judged.report, judged.evidence(), layer))


_WEIGHTS = typer.Argument(
    metavar="PATH",
    help="An .onnx, .safetensors, .pt, .pth or .bin file, a checkpoint or a run folder.",
)

_Pattern = Annotated[
    str | None,
    typer.Option(
        "--pattern", "-p", metavar="N:M", help="Pattern.", show_default="the run's, else 2:4"
    ),
]


@guarded
def validate(
    paths: Annotated[list[Path], _WEIGHTS],
    *,
    pattern: _Pattern = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="GLOB", help="Check only these layers; repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="GLOB", help="These layers may break it; repeatable."),
    ] = None,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Check every weight of saved files against the pattern; exit 4 when one is broken.

    In a run folder the pruned weights must hold the pattern and no file may have changed since.
    In other files all weights that sparse kernels could use must hold it, except --exclude.

    Example: twofour validate runs/model/sparse.onnx
    """
    from twofour.pipeline.validating import validate_path

    chosen = Selection(include=tuple(include or ()), exclude=tuple(exclude or ()))
    wanted = None if pattern is None else Pattern.parse(pattern)
    errors: list[PatternBrokenError] = []
    for path in paths:
        validation = validate_path(path, wanted, chosen)
        if json:
            show_record(validation)
        elif not quiet:
            show(document_view(validation))
        errors += _broken(path, validation)
    for error in errors[:-1]:
        say_error(error)
    if errors:
        raise errors[-1]


def _broken(path: Path, validation: Validation) -> Iterator[PatternBrokenError]:
    if validation.broken:
        yield PatternBrokenError(
            f"{path}: {validation.pattern} is broken in "
            f"{count(len(validation.broken), 'weight')} to be pruned",
            hint="prune the model, or name with --exclude what may stay dense",
        )
    elif validation.stale:
        yield PatternBrokenError(
            f"{path} is stale: {'; '.join(validation.stale)}",
            hint="the command that made the folder brings it up to date",
        )


@guarded
def sizes(
    path: Annotated[Path, _WEIGHTS], *, layout: opt.Layout = TABLE, json: opt.AsJson = False
) -> None:
    """Say how many bytes the weights take dense, as 2:4, COO, CSR and bitmask.

    A matrix like the largest weight is converted here: time and peak memory.

    Example: twofour sizes runs/model
    """
    from twofour.pipeline.weight_sizes import model_sizes

    render = opt.report_format(layout, json=json)
    weights = model_sizes(path)
    if json:
        show_record(weights)
    else:
        show(render(document_of(weights)))


@guarded
def log(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Build logs: text, .gz, .ipynb, or - for stdin."),
    ],
    *,
    json: opt.AsJson = False,
) -> None:
    """Say what TensorRT's build logs contain: eligible and chosen layers, and the timed tactics.

    Logs of trtexec, Python, Polygraphy, Torch-TensorRT, ONNX Runtime and others; TensorRT 7 to 10.

    Example: trtexec --onnx=model.onnx --sparsity=enable --verbose 2>&1 | twofour log -
    """
    from twofour.logs.read import read_build_log

    logs = read_build_log(*files)
    if json:
        show_record(logs)
    elif logs.builds:
        show_rows(document_view(logs))
    if not logs.builds:
        _refuse_no_build(logs)


def _refuse_no_build(logs: BuildLog) -> None:
    notes = [f"{file.name}: {note}" for file in logs.files for note in file.notes]
    hint: str | None = "give all that a build with a verbose logger prints (trtexec --verbose)"
    if any("`twofour report" in note for note in notes):
        hint = None  # the note says what to do with such a file
    raise BadInputError("; ".join(notes), hint=hint)


@guarded
def doctor(*, json: opt.AsJson = False) -> None:
    """Say what is installed, which engines can run here and why not, and what the GPU can do.

    Example: twofour doctor
    """
    from twofour.jobs import diagnose

    diagnosis = diagnose()
    if json:
        show_record(diagnosis)
    else:
        show(_diagnosis_view(diagnosis))


def _diagnosis_view(diagnosis: Diagnosis) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    head = (
        f"twofour {diagnosis.twofour_version}, Python {diagnosis.python_version}, "
        f"{diagnosis.platform}"
    )
    lines = [
        *map(_engine_line, diagnosis.engines),
        _gpu_line(diagnosis.gpu),
        *(f"note: {note}" for note in diagnosis.notes),
    ]
    return Group(Text(head), Text(), _package_table(diagnosis), Text(), *map(Text, lines))


def _package_table(diagnosis: Diagnosis) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("package", "version", "needed for", "install with"):
        table.add_column(heading, overflow="fold")
    for package in diagnosis.packages:
        is_there = package.version is not None
        if package.name == "onnxruntime" and installed_version("onnxruntime-gpu"):
            is_there = True  # the same module under another name
        install = Text("" if is_there else package.install)
        table.add_row(
            package.name, package.version or "-", package.needed_for, install, end_section=True
        )
    return table


def _engine_line(status: EngineStatus) -> str:
    name = f"engine {status.engine} {status.version or ''}".rstrip()
    if status.can_run:
        return f"{name}: can run here on {status.device}"
    hint = f" ({status.hint})" if status.hint else ""
    return f"{name}: cannot run here: {status.why_not}{hint}"


def _gpu_line(gpu: Gpu | None) -> str:
    if gpu is None:
        return "GPU: no NVIDIA GPU with a working driver found"
    major, minor = gpu.compute_capability
    cores = "has" if gpu.has_sparse_tensor_cores else "has no"
    return f"GPU: {gpu.name}, compute capability {major}.{minor}: {cores} sparse tensor cores"


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _precisions(text: str) -> tuple[MathPrecision, ...]:
    try:
        return tuple(map(MathPrecision, _names(text)))
    except ValueError:
        known = ", ".join(MathPrecision)
        message = f"--precision: {text!r} names a type that no kernel was measured in"
        raise BadInputError(message, hint=f"name some of {known}") from None


class GainFigure(str, Enum):
    """Figures of a forecast that a gate can be about."""

    EXPECTED = "expected"
    LOW = "low"
    AT_MOST = "at-most"


def _refuse_below(least: float, figure: GainFigure, forecast: Forecast) -> None:
    """Raise PatternBrokenError that names the cells whose gain is smaller."""
    below: list[str] = []
    for cell in forecast.cells:
        gain = cell.expected.gain
        if figure is GainFigure.LOW:
            gain = cell.expected.low
        elif figure is GainFigure.AT_MOST:
            gain = cell.answer.gain
        if not round(gain, 2) >= least:  # a bound that is no number is not met
            below.append(f"{cell.name}: {figure.value} {gain:.2f}x, below {least:g}x")
    if below:
        raise PatternBrokenError("\n".join(("the forecast does not meet --min-gain", *below)))


_ASKED = (
    opt.option(
        "gpus", "--gpu", read=_names, metavar="A100,RTX4090|all",
        show_default="those whose kernels were measured", help="GPUs by name.",
    ),
    opt.option(
        "batches", "--batch", read=opt.batch_sizes, metavar="1,8,64", help="Batch sizes.",
        show_default="that of --inputs or --input-shape, else 1,8,64",
    ),
    opt.option(
        "precisions", "--precision", read=_precisions, metavar="float16,int8,fp8",
        show_default="float16",
        help="Types to compute in: float16, bfloat16, int8, fp8, fp4; the file may have others.",
    ),
    opt.option(
        "profile", "--profile", metavar="FILE",
        help="The per-layer profile of a dense engine of the model, for one GPU, precision and "
        "batch: the model's gain is then computed from its measured times.",
    ),
)  # fmt: skip


@guarded
@opt.with_options(ForecastOptions, *_ASKED, parameter="asked")
@opt.with_options(RunOptions, *opt.INPUTS, opt.SHAPES, *opt.FREE_SIZES)
def forecast(
    model: opt.Model,
    *,
    asked: ForecastOptions,
    options: RunOptions,
    min_gain: Annotated[
        float | None,
        typer.Option("--min-gain", help="Gate: least gain of the model in each cell, such as 1.1."),
    ] = None,
    min_gain_of: Annotated[
        GainFigure, typer.Option("--min-gain-of", help="The figure that --min-gain is about.")
    ] = GainFigure.EXPECTED,
    layout: opt.Layout = TABLE,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Forecast what 2:4 may gain by GPU, precision and batch, before anything is pruned.

    The times of products come from kernels of cuBLASLt and cuSPARSELt that others measured, and
    the model gains at most what its products gain. A torch model is exported to learn its sizes,
    and is not pruned. Exit 4: --min-gain is not met.

    Example: twofour forecast model.onnx --gpu A100,RTX4090 --batch 1,8,64 --precision float16,int8
    """
    from twofour.jobs import run_forecast

    render = opt.report_format(layout, json=json)
    with running(None, quiet=quiet) as progress:
        answers = run_forecast(model, asked, options, progress)
    if json:
        show_record(answers)
    else:
        show(render(document_of(answers)))
        if layout == TABLE and len(answers.cells) > 1 and not quiet:
            say("Next: name one --gpu, --precision and --batch to see the layers")
    if min_gain is not None:
        _refuse_below(min_gain, min_gain_of, answers)

"""The commands that run a model: the whole job, its parts on their own, and the comparison."""

from __future__ import annotations

import contextlib
import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twofour.cli import options as opt
from twofour.cli.console import (
    TerminalProgress,
    document_view,
    guarded,
    keep_tracebacks_in,
    running,
    say,
    show,
    show_record,
    show_result,
    show_text,
)
from twofour.engines.protocol import ENGINES
from twofour.errors import INTERRUPTED, NOT_JUDGED, BadInputError, PatternBrokenError
from twofour.records.options import CompareOptions, RunOptions
from twofour.reports import TABLE, Renderer
from twofour.words import count, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twofour.records.latency import LatencyComparison
    from twofour.records.run import BuildResult, ExportedVariant, RunResult, VariantCheck
    from twofour.reports.document import Document, Lack

_MB = 1e6


@guarded
@opt.with_options(
    RunOptions,
    *(*opt.PRUNING, *opt.EXPORT, opt.QUANTIZE, opt.DENSE_REFERENCE, *opt.BUDGET, opt.GPU),
    *(opt.RESUME, *opt.ENGINE),
)
def prune_export_build(
    model: opt.Model,
    *,
    out: opt.Out = None,
    options: RunOptions,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prune to N:M, validate, export to ONNX, build engines and report on every layer.

    All results are in the run folder. With --resume only stages that are missing there, or whose
    options or inputs changed, are run. An engine that crashes is a row of the report and, when
    everything else is done, exit code 5.

    Example: twofour prune-export-build model.py:make --calibrate data.py:batches --out runs/model
    """
    from twofour.jobs import run_all
    from twofour.pipeline.building import refuse_crashed
    from twofour.pipeline.reporting import report_document

    here = Path.cwd()  # user code may change it
    with running(out, quiet=quiet) as progress:
        result = run_all(model, out, options, progress)
    place = f"{result.folder} (open report.html)"
    document = report_document(here / result.folder, result.report)
    view = functools.partial(_run_view, result, document)
    then = f"`twofour compare {shlex.quote(str(result.folder))}` times both files in more rounds"
    if not ENGINES[result.build.engine.engine].is_tensorrt:
        then = f"{_emit_next(Path(result.folder, 'sparse.onnx'))}; {then}"
    if document.lacks is not None:
        then = _instead(document.lacks, model, result)
    show_result(result, view, place, json=json, quiet=quiet, then=then)
    refuse_crashed(result.build)


def _instead(lacks: Lack, model: str, result: RunResult) -> str:
    """What to do with a model that is not worth shipping, with the options of its run."""
    from twofour.pipeline.folder import OPTIONS

    folder = Path(result.folder)
    named = shlex.join((model, "--options", str(folder / OPTIONS)))
    if lacks.value == "speed":
        return f"`twofour forecast {named} --gpu all` shows where it may gain; try larger batches"
    if lacks.value == "values":
        return f"`twofour export {named} --precision float32` shows whether float16 overflows"
    if result.prune.calibration is None:
        return f"`{_resumed(model, folder)} --calibrate DATA` keeps more accuracy"
    if model.endswith(".onnx"):
        return f"`twofour sensitivity {named}` shows which layers to leave dense"
    out = shlex.quote(str(folder))
    return f"`twofour finetune {named} --out {out} --train DATA` trains the pruned weights"


def _emit_next(onnx: Path) -> str:
    named = shlex.quote(str(onnx))
    return f"`twofour build {named} --emit-trtexec FOLDER` for a machine with TensorRT"


def _run_view(result: RunResult, document: Document) -> RenderableType:
    """The whole run: verdicts first, then what pruning cost, the engines and the files."""
    from rich.console import Group
    from rich.text import Text

    from twofour.reports.eligibility_words import drift_lines
    from twofour.reports.pruning_document import calibration_lines, holding_words, sensitivity_lines
    from twofour.reports.terminal import render

    saved = result.export.pattern
    chosen = result.sensitivity
    return Group(
        render(document),
        Text(),
        *map(Text, () if chosen is None else sensitivity_lines(chosen)),
        *map(Text, calibration_lines(result.prune)),
        *map(Text, drift_lines(result.accuracy)),
        Text(),
        build_view(result.build),
        Text(),
        Text(f"Checked {saved.files[0]} as saved: {holding_words(saved)}"),
    )


@guarded
@opt.with_options(RunOptions, *opt.PRUNING, opt.STREAM, opt.SEED, opt.RESUME)
def prune(
    model: opt.Model,
    *,
    out: opt.Out = None,
    options: RunOptions,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prune a model to N:M, save it, and check what was saved.

    The result is weights.safetensors for a torch model, sparse.onnx for an ONNX file, and a pruned
    copy of the folder for a checkpoint that is larger than memory. prune.json says for every weight
    whether it was pruned and, if not, why.

    Example: twofour prune model.onnx --calibrate images.npz --exclude 'head*' --out runs/model
    """
    from twofour.jobs import run_prune

    with running(out, quiet=quiet) as progress:
        folder, result, saved = run_prune(model, out, options, progress)
    file = folder / saved.files[0]
    then = f"`{_resumed(model, folder)}` exports it and builds engines"
    if file.suffix == ".onnx":
        then = _emit_next(file)
    elif file.parent != folder:  # a checkpoint that was pruned in a copy of its files
        copy = shlex.join(("twofour", "prune-export-build", str(file.parent), "--method", "keep"))
        then = f"`{copy}` exports it and builds engines"
    view = functools.partial(document_view, result)
    show_result(result, view, folder, json=json, quiet=quiet, then=then)


def _resumed(model: str, folder: Path, *more: str) -> str:
    """The main job's command, with the options that pruned the weights of the run folder."""
    from twofour.pipeline.folder import OPTIONS

    return _main_job(model, folder / OPTIONS, "--out", str(folder), "--resume", *more)


def _main_job(model: str, options: Path, *more: str) -> str:
    """The main job's command with the options of a file."""
    words = ("twofour", "prune-export-build", model, "--options", str(options), *more)
    return shlex.join(words)


@guarded
@opt.with_options(
    RunOptions, *opt.BUDGET, opt.GPU, *opt.PRUNING, *opt.MODEL, *opt.TRUST, opt.RESUME
)
def sensitivity(
    model: opt.Model,
    *,
    out: opt.Out = None,
    options: RunOptions,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure every layer pruned alone, then sets of them, and choose a set within a budget.

    The run folder gets sensitivity.json, .md and .html, and layers.txt for `prune-export-build
    --layers`. MODEL may be a run folder too; the code that it names runs only with --source or
    --trust.

    Example: twofour sensitivity model.py:make --metric model.py:evaluate --max-drop 0.005
    """
    from twofour.jobs import run_sensitivity
    from twofour.pipeline.folder import SENSITIVITY_OPTIONS

    with running(out, quiet=quiet) as progress:
        folder, result = run_sensitivity(model, out, options, progress)
    place = f"{folder} (open sensitivity.html)"
    view = functools.partial(document_view, result)
    layers = ("--layers", f"{folder}/layers.txt")
    build = _main_job(result.source, folder / SENSITIVITY_OPTIONS, *layers)
    then = f"`{build}` prunes the layers that were chosen"
    if options.calibration.data is None:
        then += "; adding `--calibrate DATA` to both commands keeps more accuracy"
    show_result(result, view, place, json=json, quiet=quiet, then=None if result.no_gain else then)


@guarded
@opt.with_options(
    RunOptions, *opt.TRAINING, opt.METRIC, opt.DENSE_REFERENCE, *opt.INPUTS, *opt.TRUST, opt.RESUME
)
def finetune(
    model: opt.Model,
    *,
    out: opt.Out = None,
    options: RunOptions,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Train pruned weights until the model gives the dense outputs again; the zeros stay.

    Needs no labels. Starts from the weights that `prune` left in the run folder and writes
    finetuned.safetensors, which prune-export-build then takes. With --resume it continues at its
    last checkpoint. MODEL may be the run folder too; the code that it names runs only with --source
    or --trust.

    Example: twofour finetune model.py:make --train data.py:batches --metric model.py:evaluate
    """
    from twofour.jobs import run_finetune
    from twofour.reports.pruning_document import finetuning_lines

    with running(out, quiet=quiet) as progress:
        folder, result = run_finetune(model, out, options, progress)
    metric = ("--metric", options.metric) if options.metric else ()
    then = f"`{_resumed(result.source, folder, *metric)}` exports these weights"
    view = functools.partial("\n".join, (*finetuning_lines(result), ""))
    show_result(result, view, folder, json=json, quiet=quiet, then=then)


@guarded
@opt.with_options(RunOptions, *opt.EXPORT, opt.RESUME)
def export(
    model: opt.Model,
    *,
    out: opt.Out = None,
    options: RunOptions,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Export a model as it is to dense.onnx, and compare the file with the module.

    Example: twofour export model.py:make --precision float16 --out runs/model
    """
    from twofour.jobs import run_export

    with running(out, quiet=quiet) as progress:
        folder, exported, checked = run_export(model, out, options, progress)
    show_result(exported, lambda: _export_view(exported, checked), folder, json=json, quiet=quiet)


def _export_view(exported: ExportedVariant, checked: VariantCheck) -> RenderableType:
    """The file, its types and how well it agrees with the module."""
    from rich.console import Group
    from rich.text import Text

    types = "its own types" if exported.precision is None else exported.precision.value
    lines = [
        f"{exported.onnx.file}: {exported.onnx.size_bytes / _MB:.1f} MB, {types}, "
        f"opset {exported.opset}, layer names for {count(len(exported.layers.layers), 'weight')}"
    ]
    for row in checked.agreement:
        if row.bound is not None:
            lines.append(
                f"output {row.output}: differs from its source by at most {row.max_abs_error:.3g} "
                f"(allowed {row.bound:.3g}), relative error {row.relative_error:.3g}, "
                f"cosine {row.cosine:.6f} (1: the same)"
            )
    for size in exported.ranges:
        largest = "no limit known" if size.max is None else size.max
        lines.append(f"size {size.name}: {size.min} to {largest}{_agreeing(checked, size.name)}")
    if checked.not_compared:
        lines.append(f"not compared: {checked.not_compared}")
    return Group(*map(Text, lines))


def _agreeing(checked: VariantCheck, name: str) -> str:
    """The values of a free size at which file and module gave the same outputs."""
    values = [
        str(compared.sizes[name])
        for compared in checked.sizes
        if compared.holds and name in compared.sizes
    ]
    return f", agrees with the module at {' and '.join(values)} too" if values else ""


@guarded
@opt.with_options(RunOptions, *opt.MODEL, opt.DENSE_REFERENCE, *opt.ENGINE, opt.RESUME)
def build(
    onnx: Annotated[Path, typer.Argument(metavar="ONNX", help="The pruned model, an .onnx file.")],
    *,
    out: opt.Out = None,
    options: RunOptions,
    emit_trtexec: Annotated[
        Path | None,
        typer.Option(
            "--emit-trtexec",
            metavar="DIR",
            help="Build nothing here: write a folder with a build.sh for a machine with trtexec.",
        ),
    ] = None,
    tensorrt_version: Annotated[
        str | None,
        typer.Option(
            "--tensorrt-version",
            help="TensorRT on that machine: 8.4 to 8.6, 10.x or 11.x.",
            show_default="10",
        ),
    ] = None,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Build a TensorRT engine with sparse weights allowed and one without, and time both.

    The second is of --dense-reference, else of the same file.
    Writes the plan, verbose log, layer information and per-layer profile of each. Without TensorRT,
    ONNX Runtime runs the model, and the record says so. With --emit-trtexec, trtexec builds the
    engines on another machine: run build.sh there, bring the folder back, then twofour report DIR.
    Without --shapes a free batch size gets the profile 1:8:8; every other free size must be given.

    Example: twofour build sparse.onnx --shapes x=1x3x224x224:8x3x224x224:16x3x224x224
    """
    if emit_trtexec is not None:
        _emit(onnx, emit_trtexec, options, tensorrt_version or "10", json=json, quiet=quiet)
        return
    if tensorrt_version is not None:
        raise _without_emit()
    from twofour.jobs import run_build
    from twofour.pipeline.building import refuse_all_failed, refuse_crashed

    with running(out, quiet=quiet) as progress:
        folder, built = run_build(onnx, out, options, progress)
    then = _after_build(built, onnx, folder)
    show_result(built, lambda: build_view(built), folder, json=json, quiet=quiet, then=then)
    refuse_crashed(built)
    refuse_all_failed(built)


def _without_emit() -> BadInputError:
    return BadInputError(
        "--tensorrt-version is the version on the machine of --emit-trtexec",
        hint="add --emit-trtexec DIR; a build here takes the TensorRT that is installed",
    )


def _after_build(built: BuildResult, onnx: Path, folder: Path) -> str | None:
    """What to run next; None for a dense file, whose note says that it is to be pruned."""
    if ENGINES[built.engine.engine].is_tensorrt:
        place = shlex.quote(str(folder))
        return f"`twofour report {place}`, `twofour compare {place}`"
    if built.variants[-1].variant == "sparse":
        return _emit_next(onnx)
    return None


@guarded
@opt.with_options(RunOptions, opt.RAY, *opt.ENGINE, opt.RESUME)
def fleet(
    model: opt.Model,
    *,
    options: RunOptions,
    compare: Annotated[
        bool, typer.Option("--compare", help="Time in more rounds, as compare does.")
    ] = False,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Build and measure one model on a node of every kind of accelerator in a Ray cluster.

    MODEL is a run folder, or a model source, for which prune-export-build runs first. Every node
    needs this version of twofour. With --resume only kinds that are not done yet are measured.

    Example: twofour fleet runs/resnet --ray 10.0.0.1:6379 --compare
    """
    from twofour.fleet import refuse_unbuilt, run_fleet

    with running(None, quiet=quiet) as progress:
        folder, nodes = run_fleet(model, options, progress, compared=compare)
    place = f"{folder} (open fleet.html)"
    show_result(nodes, lambda: document_view(nodes), place, json=json, quiet=quiet)
    refuse_unbuilt(nodes)


def _emit(
    onnx: Path, folder: Path, options: RunOptions, tensorrt: str, *, json: bool, quiet: bool
) -> None:
    """Write the folder for the other machine and say what to do with it."""
    from twofour.pipeline.emitting import emit_trtexec

    emitted = emit_trtexec(onnx, folder, options, tensorrt)
    for note in () if quiet else emitted.notes:
        say(f"note: {note}")
    if json:
        show_record(emitted)
        return
    shown = printable(shlex.quote(str(folder)))
    show_text(
        f"copy the folder {shown} to the machine with trtexec of TensorRT {emitted.tensorrt}\n"
        f"run in it: sh {emitted.script}\n"
        f"copy the folder back, then: twofour report {shown}, twofour compare {shown}\n"
    )


def build_view(built: BuildResult) -> RenderableType:
    """Engine, why not another, and the times of its variants."""
    from twofour.reports.document import Lines, Role
    from twofour.reports.eligibility_document import engine_lines
    from twofour.reports.latency_document import build_times
    from twofour.reports.terminal import draw

    engine = Lines(lines=(f"engine: {built.engine.in_words}",), role=Role.TEXT)
    return draw((engine, engine_lines(built, Role.TEXT), *build_times(built.times)))


# --- compare: the same model through several engines, interleaved, with its noise ----------------

_COMPARED = (
    opt.option(
        "engines", "--engines", kind=list[str], metavar="ENGINE:MODE,…",
        show_default="that of the run",
        help="Such as onnxruntime:cpu,torch:eager; an engine alone: all its modes.",
    ),
    opt.option(
        "variants", "--variants", kind=bool,
        help="All that can run here: other engines, types, and modes of torch.",
    ),
    opt.option(
        "batches", "--batch", read=opt.batch_sizes, metavar="1,8,32", help="Batch sizes.",
        show_default="that of the inputs",
    ),
    opt.option(
        "rounds", "--rounds", kind=int, default=CompareOptions().rounds,
        help="Most rounds per batch size.",
    ),
    opt.option(
        "warmup", "--warmup", kind=int, default=CompareOptions().warmup,
        help="Untimed runs of each variant.",
    ),
    opt.option(
        "time_limit_s", "--time-limit", kind=float, default=CompareOptions().time_limit_s,
        metavar="S", help="Seconds for the rounds of one batch size.",
    ),
    opt.option(
        "threads", "--threads", kind=int, show_default="cores of this process",
        help="CPU threads.",
    ),
    opt.option(
        "baseline", "--baseline", metavar="NAME", show_default="the first",
        help="The variant to compare with, such as dense@torch:eager.",
    ),
    *opt.INPUTS,
    opt.shapes(),
    opt.METRIC,
    *opt.TRUST,
    opt.option(
        "fail_if", "--fail-if", kind=list[str], metavar="EXPRESSION",
        help='Exit 4 if this is true, such as "sparse / dense > 1.0"; repeatable.',
    ),
)  # fmt: skip


@guarded
@opt.with_options(CompareOptions, *_COMPARED)
def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER|FILE…",
            help="A run folder, a folder of build --emit-trtexec, or ONNX files and engines.",
        ),
    ],
    *,
    options: CompareOptions,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the results.", show_default="the run folder"),
    ] = None,
    layout: opt.Layout = TABLE,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Time a model's variants in interleaved rounds, and say what is faster and what is noise.

    The dense and the sparse file run in the engine of the run folder, else in the first that can
    run here; --engines and --variants time others. Every variant runs once per round, in random
    order, in a process of its own. One variant of each engine is measured twice: the difference
    between these two is the noise. A ratio is the time of a variant divided by that of the
    baseline, with a 95 % bootstrap interval. Exit 4: a --fail-if condition is true; exit 6: it
    cannot be judged, as on a busy machine. Ctrl-C keeps the rounds. Variants in torch need the code
    that made the run folder: name it with --source, or add --trust.

    Example: twofour compare runs/resnet --engines onnxruntime:cpu,torch:compile --batch 1,8
    """
    render = opt.report_format(layout, json=json)
    _end(_measured(paths, out, options, render=None if json else render, quiet=quiet))


def _measured(
    paths: list[Path],
    out: Path | None,
    options: CompareOptions,
    *,
    render: Renderer | None,
    quiet: bool,
) -> LatencyComparison:
    """Measure, save and print; None prints JSON."""
    from twofour.comparing.comparison import first_interrupt_only, measure_paths, save_comparison
    from twofour.pipeline.reporting import saved_report
    from twofour.reports.latency_document import latency_document

    if out is not None:
        keep_tracebacks_in(out)
    with first_interrupt_only(until_exit=True), contextlib.ExitStack() as lock:
        with TerminalProgress(quiet=quiet) as progress:
            measuring = measure_paths(paths, out, options, progress)
            folder, comparison = lock.enter_context(measuring)
        try:
            save_comparison(folder, comparison)
        finally:  # on a full disk, the output is all that is left of the measurement
            if render is None:
                show_record(comparison)
            else:
                show(render(latency_document(comparison, saved_report(folder))))
    if not quiet:
        say(f"Results: {folder} (open latency.html)")
    return comparison


def _end(comparison: LatencyComparison) -> None:
    """Exit 130 where it was interrupted, 4 where a gate is met, 6 where one was not judged.

    And 5, whatever the gates say, where no variant lived to the end.
    """
    from twofour.comparing.comparison import refuse_unfinished
    from twofour.latency.fail_if import check_fail_if

    refuse_unfinished(comparison)
    outcome = check_fail_if(comparison, comparison.options.fail_if)
    for line in outcome.left_out:
        say(f"note: {line}")
    for line in (*outcome.failed, *outcome.not_judged):
        say(f"error: {line}")
    if comparison.partial is not None:
        say(comparison.partial)
        raise typer.Exit(INTERRUPTED)
    if outcome.failed:
        raise typer.Exit(PatternBrokenError.exit_code)
    if outcome.not_judged:
        say("hint: compare again on a quieter machine, or with more --rounds")
        raise typer.Exit(NOT_JUDGED)

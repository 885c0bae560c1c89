"""The main job: every stage of prune-export-build, in order, in one run folder.

Reading order of a run: torch_stages (or onnx_stages), checks, building, validating, reporting.
The torch module is let go before any engine runs, and one ONNX Runtime session at a time serves
check and timing of a file, so that memory holds the model about once.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModels
from twofour.pipeline import onnx_stages, streaming, torch_stages
from twofour.pipeline.building import (
    build_result,
    build_variant,
    check_asked_shapes,
    time_variants,
    with_profiles,
)
from twofour.pipeline.checks import (
    accuracy,
    check,
    check_one_shot,
    check_reference_fits,
    lost_without_data,
    was_repaired,
    why_no_baseline,
)
from twofour.pipeline.engine_host import EngineHost, Sessions
from twofour.pipeline.folder import (
    STAGES,
    RunFolder,
    is_run_folder,
    open_run_folder,
    own_folder,
    read_manifest,
)
from twofour.pipeline.permuting import permute
from twofour.pipeline.reporting import Facts, report
from twofour.pipeline.sensitivity.choosing import (
    figure_drop,
    keep_taken,
    leaving,
    nothing_holds,
    taken_before,
    worst_first,
)
from twofour.pipeline.sensitivity.study import sensitivity
from twofour.pipeline.settings import resolve
from twofour.pipeline.sources.onnx import OnnxSource
from twofour.pipeline.sources.open import identity, open_source
from twofour.pipeline.sources.source import Source, TorchSource
from twofour.pipeline.stages import DENSE, LAYERS, SPARSE, Progress, Run, Runner, Silent, onnx_name
from twofour.pipeline.torch_model import TorchModel
from twofour.pipeline.trust import refuse_untrusted
from twofour.pipeline.validating import put_together
from twofour.records.options import RunOptions
from twofour.records.pruning import PruneResult, Validation
from twofour.records.run import (
    BuildResult,
    ExportedVariant,
    RunResult,
    VariantCheck,
)
from twofour.records.sensitivity import SensitivityResult
from twofour.store import write_record
from twofour.words import count, figure

if TYPE_CHECKING:
    from twofour.pipeline.sources.module import ModuleSource

RUNS = Path("runs")


def run_all(
    model: str | ModuleSource,
    out: Path | None,
    options: RunOptions,
    progress: Progress | None = None,
) -> RunResult:
    """Prune, validate, export, build and report; resumes what is already in the run folder.

    Raises the kinds of TwofourError that the stages name.
    """
    with open_run(model, out, options, progress or Silent(), builds=True) as run:
        return run_stages(run)


def run_stages(run: Run) -> RunResult:
    """Every stage of the main job, in order."""
    if run.options.builder.row.is_reference:
        run.sessions.kept = frozenset(run.file(onnx_name(v)) for v in (DENSE, SPARSE))
    dense = export_dense(run)
    check_asked_shapes(run, dense.inputs)
    dense = make_inputs(run, dense)
    build = with_profiles(run, dense)
    run, chosen = within_budget(run, dense)
    pruned, validation = prune(run)
    repaired = was_repaired(run, pruned)
    if repaired and run.model is not None:
        run.do(torch_stages.export_one_shot(run, dense))
    sparse = export_sparse(run, dense)
    check_reference_fits(run, dense, sparse)
    no_baseline = why_no_baseline(pruned) if run.reference is None else None
    if no_baseline is not None:
        run.progress.note(no_baseline)
    checks, builds = [], []
    for exported in (dense, sparse):
        checks.append(run.do(check(run, exported)))
        builds.append(run.do(build_variant(run, build, exported.onnx.variant)))
    exports = run.do(put_together(run, pruned, (dense, sparse), checks))
    one_shot = run.do(check_one_shot(run)) if repaired else None
    drift = run.do(accuracy(run, checks[0], checks[1], one_shot, no_baseline))
    times = run.do(time_variants(run, build, builds, sparse.precision))
    built = run.do(build_result(run, build, tuple(builds), times, no_baseline))
    facts = Facts(
        pruned=pruned,
        exported=exports,
        layers=sparse.layers,
        built=built,
        accuracy=drift,
        chosen=chosen,
    )
    verdicts = run.do(report(run, facts))
    return RunResult(
        folder=str(run.shown),
        prune=pruned,
        validation=validation,
        export=exports,
        build=built,
        accuracy=drift,
        report=verdicts,
        sensitivity=chosen,
    )


def within_budget(run: Run, dense: ExportedVariant) -> tuple[Run, SensitivityResult | None]:
    """The run with the layers left dense that the budget leaves; as it is without a budget.

    With --max-drop the model that comes out was pruned, exported and measured: where it falls
    further than the sets that chose it, layers are taken back, the worst first.
    """
    budget = run.options.budget
    if not budget.is_set:
        return run, None
    chosen = sensitivity(run, dense)
    if budget.max_drop is None:
        return leaving(run, chosen, ()), chosen
    order = worst_first(chosen)
    taken = min(taken_before(run), max(0, len(order) - 1))
    while True:
        found = leaving(run, chosen, order[:taken])
        drop = _drop(found, dense, chosen)
        if drop <= budget.max_drop:
            return found, chosen
        if taken >= len(order) - 1:  # the next would leave all of them dense
            raise nothing_holds(chosen, order[-1] if order else None, drop)
        taken = min(len(order) - 1, max(1, 2 * taken))
        keep_taken(run, taken)
        run.progress.note(
            f"the pruned model loses {figure(drop)}, {figure(budget.max_drop) or 0} is allowed: "
            f"{count(taken, 'layer')} more left dense"
        )


def _drop(run: Run, dense: ExportedVariant, chosen: SensitivityResult) -> float:
    """How far the figure falls in the model that is really pruned and exported."""
    if not any(row.pruned for row in chosen.layers):
        raise nothing_holds(chosen)
    prune(run)
    sparse = export_sparse(run, dense)
    check_reference_fits(run, dense, sparse)
    run.sessions.close()  # sparse.onnx may have been another file until now
    before, after = (run.do(check(run, of)) for of in (dense, sparse))
    return figure_drop(chosen, before.metrics, after.metrics)


def run_prune(
    model: str, out: Path | None, options: RunOptions, progress: Progress | None = None
) -> tuple[Path, PruneResult, Validation]:
    """Only prune and validate; the run folder can be gone on with."""
    with open_run(model, out, options, progress or Silent()) as run:
        if streaming.is_streamed(run):
            pruned = run.do(streaming.prune(run))
            return run.shown, pruned, run.do(streaming.validate(run, pruned))
        if run.model is None:
            dense = onnx_stages.take_over(run)
            if run.options.method.permute_seconds and run.options.calibration.data is None:
                make_inputs(run, dense)
        elif run.options.method.permute_seconds:
            export_dense(run)
        pruned, validation = prune(run)
        return run.shown, pruned, validation


def run_sensitivity(
    model: str, out: Path | None, options: RunOptions, progress: Progress | None = None
) -> tuple[Path, SensitivityResult]:
    """Only measure what each layer loses and saves; the run folder can be gone on with.

    `model` may be a run folder itself: its model, on the example inputs that it was given. Code
    that it names is run as far as `options.trust` goes, else BadInputError is raised.
    """
    if is_run_folder(Path(model)):
        folder = Path(model)
        model, out, options = _as_it_was(folder, out, options)
        refuse_untrusted(folder, model, options.trust)
    with open_run(model, out, options, progress or Silent()) as run:
        dense = make_inputs(run, export_dense(run))
        return run.shown, sensitivity(run, dense)


def _as_it_was(folder: Path, out: Path | None, options: RunOptions) -> tuple[str, Path, RunOptions]:
    """Model, folder and options of a run that was made before."""
    manifest = read_manifest(folder)
    if options.inputs is None and not options.input_shapes:
        options = replace(
            options,
            inputs=manifest.inputs,
            input_shapes=manifest.input_shapes,
            input_shape_names=manifest.input_shape_names,
        )
    return manifest.source, out if out is not None else folder, options


def run_export(
    model: str, out: Path | None, options: RunOptions, progress: Progress | None = None
) -> tuple[Path, ExportedVariant, VariantCheck]:
    """Only export the model as it is, with its layer map, and compare it with the module."""
    with open_run(model, out, options, progress or Silent()) as run:
        run.host.start()
        exported = export_dense(run)
        exported = make_inputs(run, exported)
        checked = run.do(check(run, exported))
        write_record(run.file(LAYERS), exported.layers)
        return run.shown, exported, checked


def run_build(
    onnx: Path, out: Path | None, options: RunOptions, progress: Progress | None = None
) -> tuple[Path, BuildResult]:
    """Only build: the file is taken over as sparse.onnx, and timed as it is."""
    if onnx.suffix != ".onnx":
        raise BadInputError(f"{onnx} is not an .onnx file", hint="export the model first")
    with open_run(str(onnx), out, options, progress or Silent(), builds=True) as run:
        taken = onnx_stages.take_over(run, SPARSE)
        check_asked_shapes(run, taken.inputs)
        taken = make_inputs(run, taken)
        build = with_profiles(run, taken)
        if taken.reference is not None:
            run.do(check(run, taken))
        variants = (DENSE, SPARSE) if run.options.builder.builds_from_sparse else (SPARSE,)
        built = tuple(run.do(build_variant(run, build, variant)) for variant in variants)
        times = run.do(time_variants(run, build, built, taken.precision))
        return run.shown, run.do(build_result(run, build, built, times))


@contextlib.contextmanager
def open_run(
    model: str | ModuleSource,
    out: Path | None,
    options: RunOptions,
    progress: Progress,
    *,
    builds: bool = False,
) -> Iterator[Run]:
    """The source and its run folder (default `runs/<model name>`), locked; the options resolved.

    A job that `builds` gets an engine.
    """
    source = open_source(model, options) if isinstance(model, str) else model
    reference = _reference(source, options)
    # absolute: user code may change the working directory
    shown = out if out is not None else RUNS / source.name
    path = shown.absolute()
    with open_run_folder(path, identity(source.text)) as folder:
        own_folder(path / STAGES)
        folder.remember(options, None if reference is None else identity(reference.text))
        if options.fresh:
            folder.forget()
        with EngineHost(note=progress.note) as host:
            if builds:
                host.start()
                _import_meanwhile(source, folder)
            status_of = host.status if builds else None
            yield Run(
                path=path,
                shown=shown,
                runner=Runner(folder, progress),
                source=source,
                options=resolve(options, source, status_of, progress.note),
                progress=progress,
                host=host,
                sessions=Sessions(host, options.build.threads),
                models=OpenedModels(),
                model=_torch_model(source, progress),
                reference=reference,
                reference_model=None if reference is None else _torch_model(reference, progress),
            )


def _torch_model(
    source: OnnxSource | TorchSource | ModuleSource, progress: Progress
) -> TorchModel | None:
    return None if isinstance(source, OnnxSource) else TorchModel(source, progress.note)


def _reference(source: Source, options: RunOptions) -> OnnxSource | TorchSource | None:
    """The dense model; a torch one for a torch model, an ONNX file for an ONNX file."""
    text = options.dense_reference
    if text is None:
        return None
    reference = open_source(text, options)
    if isinstance(reference, OnnxSource) != isinstance(source, OnnxSource):
        raise BadInputError(
            f"--dense-reference {text} and {source.text} are not of one kind",
            hint="name an ONNX file for an ONNX file, and a torch model for a torch model",
        )
    return reference


def export_dense(run: Run) -> ExportedVariant:
    """dense.onnx from the source, or the ONNX file taken over."""
    if run.model is None:
        return onnx_stages.take_over(run)
    return run.do(torch_stages.export_dense(run))


def make_inputs(run: Run, taken: ExportedVariant) -> ExportedVariant:
    """inputs.npz for an ONNX file, and the outputs of one whose precision was changed.

    A torch source left both with its export.
    """
    if run.model is not None:
        return taken
    run.do(onnx_stages.make_inputs(run, taken))
    return taken if taken.precision is None else onnx_stages.with_original_outputs(run, taken)


def prune(run: Run) -> tuple[PruneResult, Validation]:
    """Permuted where that is asked for, pruned, read back and judged."""
    permuted = run.do(permute(run)) if run.options.method.permute_seconds else None
    stages = onnx_stages if run.model is None else torch_stages
    pruned = run.do(stages.prune(run, permuted))
    lost = lost_without_data(pruned)
    if lost is not None:
        run.progress.note(lost)
    return pruned, run.do(stages.validate(run, pruned))


def export_sparse(run: Run, dense: ExportedVariant) -> ExportedVariant:
    """sparse.onnx as an export: from the pruned module, or as pruning left the file."""
    if run.model is None:
        return run.do(onnx_stages.describe_sparse(run))
    return run.do(torch_stages.export_sparse(run, dense))


def _import_meanwhile(source: Source, folder: RunFolder) -> None:
    """While the engines' process starts, import what the first stage needs where it is to run."""
    if not folder.manifest.stages:
        importlib.import_module("onnx" if isinstance(source, OnnxSource) else "torch")

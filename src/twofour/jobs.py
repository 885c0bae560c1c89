"""Every job: the main one, prune-export-build, and the commands that do a part of it.

Start at `run_stages`: it shows the order of the main job. The command line (`cli.run`) or
`twofour.run` calls `run_all`. The stages come from `pipeline.torch.model` or `pipeline.onnx.model`
(export, prune), `budget.study` (only with a budget), `pipeline.validating`, `pipeline.quantizing`,
`pipeline.checks`, `pipeline.building` and `pipeline.reporting`; `pipeline.stages` does each, or
keeps it.

The torch module is freed before any engine runs, and one ONNX Runtime session at a time serves
check and timing of a file, so that memory contains the model about once.
"""

from __future__ import annotations

import contextlib
import importlib
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from twofour.eligibility.build_facts import LLM_RUNTIMES, of_machine
from twofour.engines.machine import find_gpu
from twofour.engines.protocol import builders
from twofour.errors import BadInputError, BuildFailedError, TwofourError
from twofour.inputs.examples import opt_shapes
from twofour.inputs.fits import batch_names
from twofour.packages import PACKAGES, __version__, installed_version
from twofour.pipeline.building import build_result, build_variant, time_variants, with_profiles
from twofour.pipeline.checks import (
    check_reference_fits,
    check_variant,
    compare_outputs,
    lost_without_data,
    what_came_pruned,
    why_in_turn,
)
from twofour.pipeline.evidence_files import files_of_folder, map_beside
from twofour.pipeline.folder import (
    DENSE,
    FINETUNED,
    LAYERS,
    OPTIONS,
    SENSITIVITY_OPTIONS,
    SPARSE,
    STAGES,
    is_run_folder,
    onnx_name,
    open_run_folder,
    read_manifest,
    unused_finetuning,
)
from twofour.pipeline.quantizing import quantize_files, refuse_quantized
from twofour.pipeline.reporting import forecast_file, make_report, model_to_forecast
from twofour.pipeline.stages import (
    ExportedPair,
    Model,
    Progress,
    Run,
    Runner,
    StatusOf,
    ToProgress,
    progress_of,
    resolve_options,
    shapes_of_file,
    with_inputs_beside,
)
from twofour.pipeline.validating import (
    combine_exports,
    refuse_other_files,
    validate_weights,
    why_not_sparse,
)
from twofour.records.export import Diagnosis, InstalledPackage
from twofour.records.options import (
    BudgetOptions,
    BuildOptions,
    ExampleInputs,
    ForecastOptions,
    RunOptions,
)
from twofour.records.run import (
    BuildResult,
    ExportedVariant,
    Finetuning,
    RunResult,
    SensitivityResult,
    VariantCheck,
)
from twofour.records.weights import PruneResult, Validation, shared
from twofour.sources.source import OnnxSource, TorchSource, identity, open_source, refuse_untrusted
from twofour.store import write_options, write_record
from twofour.workers.host import EngineHost, Sessions

if TYPE_CHECKING:
    from twofour.records.export import VariantBuild
    from twofour.records.forecast import Forecast
    from twofour.sources.callable import ModuleSource

RUNS = Path("runs")
M = TypeVar("M")
DEFAULT_BATCHES = (1, 8, 64)
"""What a forecast is made for where a model leaves its batch free and nobody gives one."""


def run_all(
    model: str | ModuleSource, out: Path | None, options: RunOptions, progress: ToProgress = None
) -> RunResult:
    """Prune, validate, export, build and report."""
    with open_run(model, out, options, progress, builds=True) as run:
        _keep_options(run, OPTIONS, options)
        return run_stages(run)


def _keep_options(run: Run, name: str, options: RunOptions) -> None:
    """Write the options into the run folder, for the command that continues from there."""
    write_options(run.file(name), replace(options, resume=False))


def run_stages(run: Run) -> RunResult:
    """Every stage of the main job, in order."""
    dense = run.model.export_dense(run)  # dense.onnx and the example inputs
    refuse_quantized(run, dense)
    options = with_profiles(run, dense)
    _note_forecast(run, dense)
    run, sensitivity = within_budget(run, dense)  # which layers stay dense
    pruned = run.model.prune(run)  # pruned weights
    validation = validate_pruned(run, pruned)  # read back from the file
    files = _export_pair(run, dense, pruned)  # sparse.onnx; with --quantize both are rounded
    came_pruned = what_came_pruned(run, pruned)
    # of weights that all came so, dense.onnx and sparse.onnx are one model
    no_baseline = None if pruned.pruned_now else came_pruned
    checks, builds = _check_and_build(run, files, options)
    export = run.do(combine_exports(run, pruned, validation, files, checks))
    accuracy = run.do(compare_outputs(run, files, checks, no_baseline))
    times = run.do(time_variants(run, options, builds, files.sparse.precision))
    built = run.do(build_result(run, options, builds, times, came_pruned))
    report = run.do(make_report(run, pruned, export, files.sparse.layers, built))
    return RunResult(
        folder=str(run.shown),
        prune=pruned,
        validation=validation,
        export=export,
        build=built,
        accuracy=accuracy,
        report=report,
        sensitivity=sensitivity,
    )


def _note_forecast(run: Run, dense: ExportedVariant) -> None:
    """Say what the model may gain on the GPU of --gpu, before hours of work."""
    if run.options.gpu is not None:
        files = files_of_folder(run.path, dense.onnx.file)
        run.progress.note(forecast_file(files, dense.layers, run.options.gpu).sentence)


def _export_pair(run: Run, dense: ExportedVariant, pruned: PruneResult) -> ExportedPair:
    """Both files as they are compared and built."""
    files = ExportedPair(dense=dense, sparse=run.model.export_sparse(run, dense))
    if run.options.quantize is not None:
        files = quantize_files(run, pruned, files)
    check_reference_fits(run, files)
    return files


def within_budget(run: Run, dense: ExportedVariant) -> tuple[Run, SensitivityResult | None]:
    """The run with the layers excluded that the budget leaves dense; as it is without a budget.

    With --max-drop the final model is measured too, and more layers stay dense, the worst first.
    """
    if not run.options.budget.is_set:
        return run, None
    from twofour.budget.choosing import drop_of, leave_dense
    from twofour.budget.study import sensitivity

    chosen = sensitivity(run, dense)

    def lost_in(run: Run) -> float:
        """Prune and export with these options; how far the user's figure drops."""
        run.model.prune(run)
        sparse = run.model.export_sparse(run, dense)
        check_reference_fits(run, ExportedPair(dense=dense, sparse=sparse))
        run.sessions.close()  # sparse.onnx may have been another file until now
        before = run.do(check_variant(run, dense))
        after = run.do(check_variant(run, sparse))
        if after.outputs is None:
            why = f"what the pruned model loses cannot be measured: {after.not_compared}"
            raise BuildFailedError(why)
        return drop_of(run.options.budget, chosen.figure, before.metrics, after.metrics)

    return leave_dense(run, chosen, lost_in), chosen


def _check_and_build(
    run: Run, files: ExportedPair, options: BuildOptions
) -> tuple[list[VariantCheck], tuple[VariantBuild, ...]]:
    """Run each file and build its engine, one file after the other; TensorRT the sparse one first.

    The dense build then takes the timing cache that the sparse one has filled.
    """
    if run.options.engine_row.checks_files and why_in_turn(run) is None:
        # both sessions stay open: the engine that checks the files is the one that is timed
        run.sessions.kept = frozenset(run.onnx(v) for v in (DENSE, SPARSE))
    ordered = [files.dense, files.sparse]
    if run.options.engine_row.is_tensorrt:
        ordered.reverse()
    checks = {}
    builds = {}
    for exported in ordered:
        variant = exported.onnx.variant
        checks[variant] = run.do(check_variant(run, exported))
        builds[variant] = run.do(build_variant(run, options, variant, variant))
    return [checks[DENSE], checks[SPARSE]], (builds[DENSE], builds[SPARSE])


def run_prune(
    model: str, out: Path | None, options: RunOptions, progress: ToProgress = None
) -> tuple[Path, PruneResult, Validation]:
    """Only prune and validate."""
    from twofour.pipeline.torch.checkpoint_copy import (
        checkpoint_files,
        is_streamed,
        prune_checkpoint,
    )
    from twofour.sources.hf import HfSource

    with open_run(model, out, options, progress, keeps_types=True) as run:
        _keep_options(run, OPTIONS, options)
        if isinstance(run.source, HfSource) and run.source.generates_text:
            ended = "; ".join(row.in_words for row in LLM_RUNTIMES.values())
            run.progress.note(f"sparse kernels take an engine of prune-export-build: {ended}")
        if is_streamed(run):
            pruned = run.do(prune_checkpoint(run))
            validation = run.do(validate_weights(run, pruned, checkpoint_files(run)))
        else:
            pruned = run.model.prune(run)
            validation = validate_pruned(run, pruned)
        return run.shown, pruned, validation


def validate_pruned(run: Run, pruned: PruneResult) -> Validation:
    """Read the saved weights back and judge them."""
    weights = run.model.weights(run)
    lost = lost_without_data(pruned)
    if lost is not None and weights != (FINETUNED,):
        run.progress.note(lost)
    for note in unused_finetuning(run.path):
        run.progress.note(note)
    return run.do(validate_weights(run, pruned, weights))


def run_sensitivity(
    model: str | ModuleSource, out: Path | None, options: RunOptions, progress: ToProgress = None
) -> tuple[Path, SensitivityResult]:
    """Only measure what each layer loses and saves.

    `model` may be a run folder: its model, as far as `options.trust` allows code.
    """
    from twofour.budget.study import sensitivity

    model, out, options = _of_folder(model, out, options)
    with open_run(model, out, options, progress) as run:
        measured = sensitivity(run, run.model.export_dense(run))
        chosen = replace(options, budget=BudgetOptions())  # layers.txt is the answer to it
        _keep_options(run, SENSITIVITY_OPTIONS, chosen)
        return run.shown, measured


def run_finetune(
    model: str, out: Path | None, options: RunOptions, progress: ToProgress = None
) -> tuple[Path, Finetuning]:
    """Only train the pruned weights of a run folder, so that the outputs come near the dense ones.

    `model` is the model of the folder, or the folder itself: its model, as far as `options.trust`
    allows code.
    """
    from twofour.pipeline.torch.finetuning import finetune, refuse_untrainable

    model, out, options = _of_folder(model, out, options)
    source = open_source(model, options)
    out = out or RUNS / source.name
    refuse_untrainable(source, out, options.training)  # before a folder is made
    with open_run(model, out, options, progress) as run:
        return run.shown, run.do(finetune(run))


def _of_folder(
    model: M, out: Path | None, options: RunOptions
) -> tuple[M | str, Path | None, RunOptions]:
    """The model, example inputs and dense model of a run folder, where `model` names one."""
    if not isinstance(model, str) or not is_run_folder(Path(model)):
        return model, out, options
    folder = Path(model)
    manifest = read_manifest(folder)
    if options.inputs is None and not options.input_shapes:
        options = replace(options, **shared(manifest, ExampleInputs) | {"seed": options.seed})
    options = replace(options, dense_reference=options.dense_reference or manifest.dense_reference)
    for source in filter(None, (manifest.source, manifest.dense_reference)):
        refuse_untrusted(folder, source, options.trust)
    return manifest.source, out or folder, options


def run_export(
    model: str | ModuleSource, out: Path | None, options: RunOptions, progress: ToProgress = None
) -> tuple[Path, ExportedVariant, VariantCheck]:
    """Only export the model as it is, with its layer map, and compare it with the module."""
    with open_run(model, out, options, progress) as run:
        run.host.start()
        exported = run.model.export_dense(run)
        checked = run.do(check_variant(run, exported))
        write_record(run.file(LAYERS), exported.layers)
        return run.shown, exported, checked


def run_forecast(
    model: str | ModuleSource,
    asked: ForecastOptions,
    options: RunOptions,
    progress: ToProgress = None,
) -> Forecast:
    """What pruning the model may gain by GPU, precision and batch; it is neither pruned nor run.

    A torch model is traced for its sizes, an ONNX file only read; nothing is written.
    """
    from twofour.forecasting.model_forecast import forecast_model

    source, options = _open_source(model, options)
    if isinstance(source, OnnxSource):
        opened = source.opened()
        layers = map_beside(source.path)
        shapes = shapes_of_file(opened, options)
    else:
        from twofour.pipeline.torch.graph import described_model

        note = progress_of(progress).note
        opened, layers, examples = described_model(source, options, note)
        shapes = examples | opt_shapes(options.build.shapes)
    given = asked.batches or options.file or options.input_shapes or options.build.shapes
    if not given and batch_names(opened.inputs):
        asked = replace(asked, batches=DEFAULT_BATCHES)
    described = model_to_forecast(source.name, opened, layers)
    if isinstance(model, str):
        described = replace(described, source=model)
    return forecast_model(described, shapes, asked)


def run_build(
    onnx: Path, out: Path | None, options: RunOptions, progress: ToProgress = None
) -> tuple[Path, BuildResult]:
    """Only build: a copy as sparse.onnx (dense.onnx if it is), timed beside the dense reference."""
    refuse_other_files(onnx)
    with open_run(str(onnx), out, options, progress, builds=True, keeps_types=True) as run:
        return run.shown, _build_as_it_is(run, str(onnx))


def _build_as_it_is(run: Run, named: str) -> BuildResult:
    """build.json of the run's ONNX file, which is not pruned; `named` as the user named it."""
    from twofour.pipeline.onnx.model import OnnxModel

    assert isinstance(run.source, OnnxSource), "only a file is built as it is"
    assert isinstance(run.model, OnnxModel)
    is_dense = why_not_sparse(run.source.opened(), named)
    has_dense = run.dense_source is not run.source
    builds_two = run.options.engine_row.is_tensorrt or has_dense
    variant = SPARSE if builds_two or is_dense is None else DENSE
    exported = run.model.export_as_it_is(run, variant, run.source)
    build = with_profiles(run, exported)
    if exported.reference is not None:
        run.do(check_variant(run, exported))
    if has_dense:
        run.model.export_dense(run)
    # without a dense model the dense engine has the zeros too, and is not allowed sparse kernels
    weights = DENSE if has_dense else variant
    built = [run.do(build_variant(run, build, variant, variant))]
    if builds_two:
        built.insert(0, run.do(build_variant(run, build, DENSE, weights)))
    times = run.do(time_variants(run, build, built, exported.precision))
    return run.do(build_result(run, build, tuple(built), times, is_dense))


def diagnose() -> Diagnosis:
    """What is installed here: engines are tried, not guessed from version numbers."""
    with EngineHost() as host:
        engines = tuple(map(host.status, builders()))
    versions = {status.engine: status.version for status in engines}
    gpu = find_gpu()
    return Diagnosis(
        twofour_version=__version__,
        python_version=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages=tuple(
            InstalledPackage(
                name=package.name,
                version=installed_version(package.name),
                needed_for=package.needed_for,
                install=package.install,
            )
            for package in PACKAGES
        ),
        engines=engines,
        gpu=gpu,
        notes=of_machine(
            gpu, versions.get("tensorrt"), tuple(filter(installed_version, LLM_RUNTIMES))
        ),
    )


@contextlib.contextmanager
def open_run(
    model: str | ModuleSource,
    out: Path | None,
    options: RunOptions,
    progress: ToProgress,
    *,
    builds: bool = False,
    keeps_types: bool = False,
) -> Iterator[Run]:
    """The source and its run folder (default `runs/<model name>`), locked; the options resolved.

    A job that `builds` gets an engine; in one that `keeps_types` an ONNX file has its own types.
    """
    progress = progress_of(progress)
    source, options = _open_source(model, options)
    reference = _reference(options)
    to_prune = _model(source, reference, progress, keeps_types=keeps_types)
    shown = out or RUNS / source.name
    path = shown.absolute()  # user code may change the working directory
    note = progress.note
    with open_run_folder(path, identity(source.text)) as folder, EngineHost(note=note) as host:
        folder.remember(options, None if reference is None else identity(reference.text))
        status_of = _start(host, to_prune, options) if builds else None
        run = Run(
            path=path,
            shown=shown,
            runner=Runner(folder, progress, resume=options.resume),
            source=source,
            options=resolve_options(options, to_prune, status_of, note),
            progress=progress,
            host=host,
            sessions=Sessions(host, options.build.threads),
            model=to_prune,
            dense_source=reference or source,
        )
        with _naming_files(run):
            yield run


def _reference(options: RunOptions) -> OnnxSource | TorchSource | None:
    """The source of the dense model, where --dense-reference names one."""
    if options.dense_reference is None:
        return None
    return open_source(options.dense_reference, options)


def _start(host: EngineHost, model: Model, options: RunOptions) -> StatusOf:
    """Start the engines' process, and meanwhile import what reads the model."""
    host.start()
    if not options.resume:  # a stage that is kept may need none of it
        importlib.import_module(model.package)
    return host.status


@contextlib.contextmanager
def _naming_files(run: Run) -> Iterator[None]:
    """Put what the user knows in the place of the paths of the run's own files in an error."""
    try:
        yield
        run.runner.say_kept()
    except TwofourError as error:
        named = {
            run.file(f"{STAGES}/graph.onnx"): run.source.text,
            run.file(f"{STAGES}/calibrated.onnx"): run.source.text,
            run.file(f"{STAGES}/reference.onnx"): run.dense_source.text,
        }
        if isinstance(run.dense_source, OnnxSource):  # dense.onnx is a copy of a file of the user's
            dense = onnx_name(DENSE)
            named[run.file(dense)] = f"{run.dense_source.text} ({run.shown / dense})"
        for path, name in named.items():
            error.message = error.message.replace(str(path), name, 1)
        raise


def _open_source(
    model: str | ModuleSource, options: RunOptions
) -> tuple[OnnxSource | TorchSource | ModuleSource, RunOptions]:
    """The source, and the options with the example inputs of the run folder that it is in."""
    if not isinstance(model, str):
        return model, options
    options = with_inputs_beside(Path(model), options)
    return open_source(model, options), options


def _model(
    source: OnnxSource | TorchSource | ModuleSource,
    dense_source: OnnxSource | TorchSource | None,
    progress: Progress,
    *,
    keeps_types: bool,
) -> Model:
    """The model of a run; raises BadInputError for a torch model beside an ONNX file."""
    if isinstance(source, OnnxSource):
        from twofour.pipeline.onnx.model import OnnxModel

        if dense_source is None or isinstance(dense_source, OnnxSource):
            return OnnxModel(source, dense_source, keeps_types=keeps_types)
    else:
        from twofour.pipeline.torch.model import TorchModel

        if not isinstance(dense_source, OnnxSource):
            return TorchModel(source, progress.note, dense_source)
    raise BadInputError(
        f"--dense-reference {dense_source.text} and {source.text} are not of one kind",
        hint="name an ONNX file for an ONNX file, and a torch model for a torch model",
    )

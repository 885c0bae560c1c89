"""The main job, prune-export-build: every stage in order, in one run folder.

Start at `run_stages`: it shows the order. The command line (`cli.run`) or `twofour.run` calls
`run_all`. The stages come from `pipeline.torch.model` or `pipeline.onnx.model` (export, prune),
`budget.study` (only with a budget), `pipeline.validating`, `pipeline.checks`, `pipeline.building`
and `pipeline.reporting`; `pipeline.stages` does each, or keeps it.

The torch module is freed before any engine runs, and one ONNX Runtime session at a time serves
check and timing of a file, so that memory contains the model about once.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.eligibility.build_facts import LLM_RUNTIMES
from twofour.errors import BadInputError, TwofourError
from twofour.graph.opened import OpenedModels
from twofour.inputs.examples import asked_shapes, example_shapes, load_exact_inputs, opt_shapes
from twofour.inputs.fits import batch_names, shapes_of
from twofour.pipeline.building import build_result, build_variant, time_variants, with_profiles
from twofour.pipeline.checks import (
    check_reference_fits,
    check_variant,
    compare_outputs,
    is_quantized,
    lost_without_data,
    why_in_turn,
    why_no_baseline,
)
from twofour.pipeline.evidence_files import (
    files_of_folder,
    map_beside,
)
from twofour.pipeline.folder import (
    DENSE,
    FINETUNED,
    INPUTS,
    LAYERS,
    SPARSE,
    STAGES,
    is_run_folder,
    onnx_name,
    open_run_folder,
    own_folder,
    read_manifest,
    unused_finetuning,
)
from twofour.pipeline.forecasts import forecast_file, model_to_forecast
from twofour.pipeline.reporting import make_report
from twofour.pipeline.stages import Model, Progress, Run, Runner, Silent, resolve_options
from twofour.pipeline.validating import combine_exports, validate_weights, why_not_sparse
from twofour.records.export import LayerMap
from twofour.records.options import ExampleInputs, ForecastOptions, RunOptions
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
from twofour.store import write_record
from twofour.workers.host import EngineHost, Sessions

if TYPE_CHECKING:
    from twofour.records.forecast import Forecast
    from twofour.sources.callable import ModuleSource

RUNS = Path("runs")
DEFAULT_BATCHES = (1, 8, 64)
"""What a forecast is made for where a model leaves its batch free and nobody gives one."""


def run_all(
    model: str | ModuleSource,
    out: Path | None,
    options: RunOptions,
    progress: Progress | None = None,
) -> RunResult:
    """Prune, validate, export, build and report."""
    with open_run(model, out, options, progress or Silent(), builds=True) as run:
        return run_stages(run)


def run_stages(run: Run) -> RunResult:
    """Every stage of the main job, in order."""
    dense = run.model.export_dense(run)  # dense.onnx and the example inputs
    if run.options.quantize is not None and is_quantized(run, dense):
        hint = "leave --quantize out: it is pruned and exported as it is"
        raise BadInputError(f"{run.dense_source.text} is quantized already", hint=hint)
    options = with_profiles(run, dense)
    if run.options.gpu is not None:
        files = files_of_folder(run.path, dense.onnx.file)
        run.progress.note(forecast_file(files, dense.layers, run.options.gpu).sentence)
    run, sensitivity = within_budget(run, dense)  # which layers stay dense
    pruned = run.model.prune(run)  # pruned weights
    validation = validate_pruned(run, pruned)  # read back from the file
    sparse = run.model.export_sparse(run, dense)  # sparse.onnx
    before = None
    if run.options.quantize is not None:
        from twofour.pipeline.quantizing import quantize_files

        dense, sparse, before = quantize_files(run, dense, sparse, pruned)
    check_reference_fits(run, dense, sparse)
    if run.options.builder.row.checks_files and why_in_turn(run) is None:
        run.sessions.kept = frozenset(run.file(onnx_name(v)) for v in (DENSE, SPARSE))
    no_baseline = why_no_baseline(pruned) if run.dense_source is run.source else None
    if no_baseline is not None:
        run.progress.note(no_baseline)
    checks, builds = [], []
    for exported in (dense, sparse):
        checks.append(run.do(check_variant(run, exported)))
        builds.append(run.do(build_variant(run, options, exported.onnx.variant)))
    export = run.do(combine_exports(run, pruned, validation, (dense, sparse), checks))
    accuracy = run.do(compare_outputs(run, (dense, sparse), checks, before, no_baseline))
    times = run.do(time_variants(run, options, builds, sparse.precision))
    built = run.do(build_result(run, options, tuple(builds), times, no_baseline))
    verdicts = run.do(make_report(run, pruned, export, sparse.layers, built))
    return RunResult(
        folder=str(run.shown),
        prune=pruned,
        validation=validation,
        export=export,
        build=built,
        accuracy=accuracy,
        report=verdicts,
        sensitivity=sensitivity,
    )


def within_budget(run: Run, dense: ExportedVariant) -> tuple[Run, SensitivityResult | None]:
    """The run with the layers excluded that the budget leaves dense; as it is without a budget.

    With --max-drop the final model is measured too, and more layers stay dense, the worst first.
    """
    if not run.options.budget.is_set:
        return run, None
    from twofour.budget.choosing import leave_dense
    from twofour.budget.study import sensitivity

    def figures_of(run: Run) -> tuple[dict[str, float], dict[str, float]]:
        """The user's figures of the dense model, and of the one that is pruned and exported."""
        run.model.prune(run)
        sparse = run.model.export_sparse(run, dense)
        check_reference_fits(run, dense, sparse)
        run.sessions.close()  # sparse.onnx may have been another file until now
        before, after = (run.do(check_variant(run, of)) for of in (dense, sparse))
        return before.metrics, after.metrics

    chosen = sensitivity(run, dense)
    return leave_dense(run, chosen, figures_of), chosen


def run_prune(
    model: str, out: Path | None, options: RunOptions, progress: Progress | None = None
) -> tuple[Path, PruneResult, Validation]:
    """Only prune and validate."""
    from twofour.pipeline.torch.checkpoint_copy import (
        checkpoint_files,
        is_streamed,
        prune_checkpoint,
    )
    from twofour.sources.hf import HfSource

    with open_run(model, out, options, progress or Silent(), keeps_types=True) as run:
        if isinstance(run.source, HfSource) and run.source.generates_text:
            ended = "; ".join(row.in_words for row in LLM_RUNTIMES.values())
            run.progress.note(f"sparse kernels take an engine of prune-export-build: {ended}")
        if is_streamed(run):
            pruned = run.do(prune_checkpoint(run))
            return run.shown, pruned, run.do(validate_weights(run, pruned, checkpoint_files(run)))
        pruned = run.model.prune(run)
        return run.shown, pruned, validate_pruned(run, pruned)


def run_sensitivity(
    model: str, out: Path | None, options: RunOptions, progress: Progress | None = None
) -> tuple[Path, SensitivityResult]:
    """Only measure what each layer loses and saves.

    `model` may be a run folder: its model, as far as `options.trust` allows code.
    """
    from twofour.budget.study import sensitivity

    model, out, options = _of_folder(model, out, options)
    with open_run(model, out, options, progress or Silent()) as run:
        return run.shown, sensitivity(run, run.model.export_dense(run))


def run_finetune(
    model: str, out: Path | None, options: RunOptions, progress: Progress | None = None
) -> tuple[Path, Finetuning]:
    """Only train the pruned weights of a run folder, so that the outputs come near the dense ones.

    `model` is the model of the folder, or the folder itself: its model, as far as `options.trust`
    allows code.
    """
    from twofour.pipeline.torch.finetuning import finetune, refuse_untrainable

    model, out, options = _of_folder(model, out, options)
    source = open_source(model, options)
    out = RUNS / source.name if out is None else out
    refuse_untrainable(source, out, options.training)  # before a folder is made
    with open_run(model, out, options, progress or Silent()) as run:
        return run.shown, run.do(finetune(run))


def _of_folder(
    model: str, out: Path | None, options: RunOptions
) -> tuple[str, Path | None, RunOptions]:
    """The model, example inputs and dense model of a run folder, where `model` names one."""
    folder = Path(model)
    if not is_run_folder(folder):
        return model, out, options
    manifest = read_manifest(folder)
    if options.inputs is None and not options.input_shapes:
        options = replace(options, **shared(manifest, ExampleInputs) | {"seed": options.seed})
    options = replace(options, dense_reference=options.dense_reference or manifest.dense_reference)
    for source in filter(None, (manifest.source, manifest.dense_reference)):
        refuse_untrusted(folder, source, options.trust)
    return manifest.source, out or folder, options


def run_export(
    model: str, out: Path | None, options: RunOptions, progress: Progress | None = None
) -> tuple[Path, ExportedVariant, VariantCheck]:
    """Only export the model as it is, with its layer map, and compare it with the module."""
    with open_run(model, out, options, progress or Silent()) as run:
        run.host.start()
        exported = run.model.export_dense(run)
        checked = run.do(check_variant(run, exported))
        write_record(run.file(LAYERS), exported.layers)
        return run.shown, exported, checked


def run_forecast(
    model: str | ModuleSource,
    asked: ForecastOptions,
    options: RunOptions,
    progress: Progress | None = None,
) -> Forecast:
    """What pruning the model may gain by GPU, precision and batch; it is neither pruned nor run.

    A torch model is traced for its sizes, an ONNX file only read; nothing is written.
    """
    from twofour.forecasting.model_forecast import forecast_model

    if isinstance(model, str):
        options = with_inputs_beside(model, options)
    source = open_source(model, options) if isinstance(model, str) else model
    layers: LayerMap | None
    if isinstance(source, OnnxSource):
        opened, layers = source.opened(), map_beside(source.path)
        if options.file is not None:
            shapes = shapes_of(load_exact_inputs(options.file, opened.inputs))
        else:
            sizes = asked_shapes(opened.inputs, options, options.build.shapes)
            shapes = example_shapes(opened.inputs, sizes, source.text)
    else:
        from twofour.pipeline.torch.graph import described_model

        note = (progress or Silent()).note
        opened, layers, examples = described_model(source, options, note)
        shapes = examples | opt_shapes(options.build.shapes)
    given = asked.batches or options.file or options.input_shapes or options.build.shapes
    if not given and batch_names(opened.inputs):
        asked = replace(asked, batches=DEFAULT_BATCHES)
    return forecast_model(model_to_forecast(source.name, opened, layers), shapes, asked)


def run_build(
    onnx: Path, out: Path | None, options: RunOptions, progress: Progress | None = None
) -> tuple[Path, BuildResult]:
    """Only build: a copy as sparse.onnx (dense.onnx if it is), timed beside the dense reference."""
    from twofour.pipeline.onnx.model import OnnxModel

    if onnx.suffix != ".onnx":
        raise BadInputError(f"{onnx} is not an .onnx file", hint="name one, like RUN/sparse.onnx")
    opened = open_run(str(onnx), out, options, progress or Silent(), builds=True, keeps_types=True)
    with opened as run:
        assert isinstance(run.model, OnnxModel)
        assert isinstance(run.source, OnnxSource)
        is_dense = why_not_sparse(run.source.opened(), str(onnx))
        two = run.options.builder.row.is_tensorrt
        has_dense = run.dense_source is not run.source
        variant = SPARSE if two or has_dense or is_dense is None else DENSE
        taken = run.model.export_as_it_is(run, variant, run.source)
        build = with_profiles(run, taken)
        if taken.reference is not None:
            run.do(check_variant(run, taken))
        if has_dense:
            run.model.export_dense(run)
        variants = (DENSE, SPARSE) if two or has_dense else (variant,)
        built = tuple(run.do(build_variant(run, build, variant)) for variant in variants)
        times = run.do(time_variants(run, build, built, taken.precision))
        return run.shown, run.do(build_result(run, build, built, times, is_dense))


@contextlib.contextmanager
def open_run(
    model: str | ModuleSource,
    out: Path | None,
    options: RunOptions,
    progress: Progress,
    *,
    builds: bool = False,
    keeps_types: bool = False,
) -> Iterator[Run]:
    """The source and its run folder (default `runs/<model name>`), locked; the options resolved.

    A job that `builds` gets an engine; in one that `keeps_types` an ONNX file has its own types.
    """
    if isinstance(model, str):
        options = with_inputs_beside(model, options)
    source = open_source(model, options) if isinstance(model, str) else model
    dense_source = None
    if options.dense_reference is not None:
        dense_source = open_source(options.dense_reference, options)
    to_prune = _model(source, dense_source, progress, keeps_types=keeps_types)
    # absolute: user code may change the working directory
    shown = out if out is not None else RUNS / source.name
    path = shown.absolute()
    with open_run_folder(path, identity(source.text)) as folder:
        own_folder(path / STAGES)
        folder.remember(options, None if dense_source is None else identity(dense_source.text))
        runner = Runner(folder, progress, resume=options.resume)
        with EngineHost(note=progress.note) as host:
            if builds:
                host.start()
                if not options.resume:
                    importlib.import_module(to_prune.package)
            status_of = host.status if builds else None
            run = Run(
                path=path,
                shown=shown,
                runner=runner,
                source=source,
                options=resolve_options(options, to_prune, status_of, progress.note),
                progress=progress,
                host=host,
                sessions=Sessions(host, options.build.threads),
                models=OpenedModels(),
                model=to_prune,
                dense_source=dense_source or source,
            )
            try:
                yield run
                runner.say_kept()
            except TwofourError as error:
                texts = {"graph": source, "calibrated": source, "reference": run.dense_source}
                for name, of in texts.items():  # files that the user does not know
                    traced = str(path / STAGES / f"{name}.onnx")
                    error.message = error.message.replace(traced, of.text, 1)
                if isinstance(run.dense_source, OnnxSource):  # which the user knows
                    named = f"{run.dense_source.text} ({shown / onnx_name(DENSE)})"
                    error.message = error.message.replace(str(path / onnx_name(DENSE)), named, 1)
                raise


def with_inputs_beside(model: str, options: RunOptions) -> RunOptions:
    """The options with the example inputs of the run folder that an ONNX file of ours is in.

    They are as they were where somebody gave inputs or their shapes.
    """
    path = Path(model)
    inputs = path.parent / INPUTS
    ours = path.name in (onnx_name(DENSE), onnx_name(SPARSE)) and is_run_folder(path.parent)
    if not ours or not inputs.is_file() or options.inputs or options.input_shapes:
        return options
    return replace(options, inputs=str(inputs))


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


def validate_pruned(run: Run, pruned: PruneResult) -> Validation:
    """Read the saved weights back and judge them."""
    lost, weights = lost_without_data(pruned), run.model.weights(run)
    if lost is not None and weights != (FINETUNED,):
        run.progress.note(lost)
    for note in unused_finetuning(run.path):
        run.progress.note(note)
    return run.do(validate_weights(run, pruned, weights))

"""The eligibility report and its forecast: the last stage of a run, or from anyone's files.

`annotate` writes its verdicts into a copy of the model.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofour.eligibility.build_evidence import NO_ENGINE, BuildEvidence, engine_layers, name_places
from twofour.eligibility.build_facts import BuildFacts, ReportContext, build_facts
from twofour.eligibility.join import join_report, own_evidence, report_from_engine
from twofour.eligibility.predict import not_covered_lines, not_exported, predict, with_not_exported
from twofour.engines.machine import find_gpu
from twofour.engines.protocol import ENGINES
from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, inlined, open_onnx
from twofour.graph.weights import find_weights
from twofour.inputs.examples import example_shapes
from twofour.inputs.fits import Shapes, shapes_of, stored_arrays
from twofour.packages import __version__
from twofour.pipeline.evidence_files import (
    EvidenceFiles,
    failed_variants,
    files_of_folder,
    is_emitted_folder,
    map_beside,
    read_emitted,
    read_evidence,
    with_module_names,
)
from twofour.pipeline.folder import (
    ACCURACY,
    BUILD,
    DENSE,
    EXPORT,
    FINETUNE,
    FINETUNED,
    LAYERS,
    PRUNE,
    SPARSE,
    changed_files,
    final_weights,
    is_run_folder,
    onnx_files,
    onnx_name,
    read_manifest,
    recorded_hashes,
    unused_finetuning,
)
from twofour.pipeline.stages import Run, Stage, StageOutput
from twofour.pruning.selection import sharing_reasons, wanted_by_default
from twofour.pruning.verify import check_onnx
from twofour.records import frozen
from twofour.records.eligibility import EligibilityReport
from twofour.records.export import Accuracy, ExportResult, Gpu, LayerMap
from twofour.records.latency import LatencyComparison
from twofour.records.options import ForecastOptions, MathPrecision
from twofour.records.run import BuildResult, Finetuning, SensitivityResult
from twofour.records.weights import HARDWARE_PATTERN, PrunedWeight, PruneResult, Validation, Weight
from twofour.reports.document import Document
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.html import write_pages
from twofour.reports.log_document import answer
from twofour.reports.pruning_document import finetuning_lines
from twofour.store import atomic_file, read_record, record_if_there
from twofour.words import printable

if TYPE_CHECKING:
    from twofour.forecasting.model_forecast import ForecastModel
    from twofour.records.forecast import ForecastCell

REPORT = "eligibility.json"
PAGES = "report.md", "report.html"
SENSITIVITY = "sensitivity.json"
LATENCY = "latency.json"
"""What `twofour compare` writes; the page shows it."""


@frozen
class Judged:
    """The verdicts of a model, and what they were made from."""

    report: EligibilityReport
    files: EvidenceFiles
    """`onnx` of them is the model that is forecast, in a run the dense one."""
    evidence: Callable[[], BuildEvidence]
    """Gives the evidence; behind a saved report it is read only then, because logs are large."""
    onnx: Path | None = None
    """The model that the verdicts are of."""


def judge(folder: Path | None, given: Mapping[str, Path | str], gpu: str | None) -> Judged:
    """The verdicts on a run folder, or on files by the field of EvidenceFiles that they are.

    The forecast is for `gpu`, else for the GPU of the build where that is known. Raises
    BadInputError unless either is given, and what `report_folder` and `report_files` raise.
    """
    if folder is not None and "layer_map" in given:
        raise BadInputError(
            "a run folder has its own layer map", hint="give --layer-map with --onnx and --log"
        )
    if (folder is not None) == bool(given):
        raise BadInputError(
            "name either a run folder, or files with --onnx, --log or --layers",
            hint="for example runs/model, or --onnx model.onnx --log build.log",
        )
    if folder is not None:
        return report_folder(folder, gpu)
    files: dict[str, Any] = {}
    for name, file in given.items():
        files[name] = file if "\n" in str(file) else Path(file)  # the text of a log
    return with_forecast(report_files(EvidenceFiles(**files)), gpu)


def make_report(
    run: Run, pruned: PruneResult, exported: ExportResult, layers: LayerMap, built: BuildResult
) -> Stage[EligibilityReport]:
    """eligibility.json, report.md and report.html; `layers` are those of sparse.onnx."""

    def work() -> StageOutput[EligibilityReport]:
        judged = _judge_run(run, pruned, exported, layers, built)
        report = with_forecast(judged, run.options.gpu, pruned).report
        write_pages(run.path, PAGES, report_document(run.path, report))
        return report, PAGES

    return Stage(
        name="report",
        title="report",
        record=REPORT,
        kind=EligibilityReport,
        work=work,
        depends_on=(run.options.gpu,),
        reads=(
            PRUNE,
            EXPORT,
            LAYERS,
            BUILD,
            ACCURACY,
            *files_of_folder(run.path, onnx_name(SPARSE)).names(),
            *onnx_files(run.onnx(SPARSE)),
            *onnx_files(run.onnx(DENSE)),
            *run.there(SENSITIVITY, LATENCY),
        ),
    )


def _judge_run(
    run: Run, pruned: PruneResult, exported: ExportResult, layers: LayerMap, built: BuildResult
) -> Judged:
    """The verdicts of sparse.onnx, with what pruning, the export and the build of the run know."""
    model = run.opened(SPARSE)
    evidence = read_evidence(files_of_folder(run.path, onnx_name(SPARSE)), model, layers)
    engine = built.engine
    facts = _facts_of(evidence)
    if ENGINES[engine.engine].is_tensorrt:
        facts = replace(facts, tensorrt_version=facts.tensorrt_version or engine.version)
        evidence = replace(evidence, built_with=engine.in_words)
    context = replace(
        _context(model, facts, built.gpu),
        model=run.source.name,
        pattern=exported.pattern.pattern,
        engine=engine.in_words,
    )
    weights = with_module_names(model.weights().weights, layers, pruned)
    predicted = predict(weights, _hardware_validation(model, exported), context)
    report = join_report(predicted, evidence)
    report = with_not_exported(report, _left_out(model, pruned, layers))
    report = replace(report, notes=report.notes + exported.notes)
    dense = files_of_folder(run.path, onnx_name(DENSE))
    return Judged(report=report, files=dense, evidence=lambda: evidence)


def _left_out(
    model: OpenedModel, pruned: PruneResult, layers: LayerMap
) -> tuple[PrunedWeight, ...]:
    """What was pruned, but is in no file: the model's own code does not come to it."""
    graph = model.weights()
    known = [name for group in graph.not_covered for name in group.arrays]
    known += [weight.weight for weight in graph.weights if weight.weight is not None]
    parameters = [name.parameter for name in layers.layers]
    return not_exported(pruned.weights, parameters, known)


def _hardware_validation(model: OpenedModel, exported: ExportResult) -> Validation:
    """The validation for 2:4, the pattern of the engine, made again for a run in another one."""
    if exported.pattern.pattern == HARDWARE_PATTERN:
        return exported.pattern
    pruned = {check.weight for check in exported.pattern.checks if check.required}
    return check_onnx(model, HARDWARE_PATTERN, required=pruned)


def _context(model: OpenedModel, build: BuildFacts, gpu: Gpu | None) -> ReportContext:
    """What the rules know besides the weights, for a file that no run of ours made."""
    graph = model.weights()
    return ReportContext(
        model=model.path.stem,
        pattern=HARDWARE_PATTERN,
        engine=NO_ENGINE,
        gpu=gpu,
        activation_products=graph.activation_products,
        not_covered=graph.not_covered,
        build=build,
    )


def _facts_of(evidence: BuildEvidence) -> BuildFacts:
    return build_facts(evidence.build, engine_layers(evidence)[0])


def report_files(
    files: EvidenceFiles,
    layers: LayerMap | None = None,
    *,
    gpu: Gpu | None = None,
    pruned: PruneResult | None = None,
) -> Judged:
    """Verdicts from anyone's files; without an ONNX file, for the layers of the engine alone.

    Names of modules come from the layer map, else from the layers.json beside the ONNX file.
    Without evidence the rules are those of `gpu`, else of this machine's. `pruned` says why weights
    are dense. Raises BadInputError for a damaged graph, a model without a weight, and where there
    is neither a model nor anything about an engine.
    """
    if files.onnx is not None:
        model = open_onnx(files.onnx)
        evidence = read_evidence(files, model, layers or map_beside(files.onnx))
        if not evidence.is_empty:  # then the build says which GPU counts
            gpu = None
        elif gpu is None:
            gpu = find_gpu()
        report = _judge_model(model, evidence, gpu, pruned)
        _check_names(evidence, report, files)
    else:
        evidence = _engine_evidence(files)
        report = _of_engine(evidence)
    return Judged(report=report, files=files, evidence=lambda: evidence, onnx=files.onnx)


def _judge_model(
    model: OpenedModel, evidence: BuildEvidence, gpu: Gpu | None, pruned: PruneResult | None
) -> EligibilityReport:
    """The predicted verdicts of a model, and in their place what the evidence shows."""
    graph = model.weights()
    if not graph.weights:
        what = f"{model.path}: no convolution or matrix product in it has a weight"
        raise BadInputError(
            "; ".join((what, *not_covered_lines(graph.not_covered))),
            hint="leave --onnx out to report on the engine alone (--log, --layers)",
        )
    weights = with_module_names(_with_sharing(graph.weights), evidence.layer_map, pruned)
    validation = check_onnx(model, HARDWARE_PATTERN)

    def predicted(build: BuildFacts) -> EligibilityReport:
        return predict(weights, validation, _context(model, build, gpu))

    facts = _facts_of(evidence)
    report = predicted(facts)
    own_facts = _facts_of(own_evidence(report, evidence))
    if own_facts != facts:  # the version and flags of another model's build say nothing
        report = predicted(own_facts)
    return join_report(report, evidence)


def _with_sharing(weights: Iterable[Weight]) -> list[Weight]:
    """The weights with the reasons that follow from other layers' use of the same arrays."""
    return [replace(w, reasons=(*w.reasons, *sharing_reasons(w))) for w in weights]


def _of_engine(evidence: BuildEvidence) -> EligibilityReport:
    """The report of an engine alone; a log that names no layer still has its answer."""
    report = report_from_engine(evidence)
    build = evidence.build
    if build is None or report.verdicts or report.not_evidence:
        return report
    return replace(report, notes=(answer(build), *report.notes))


def _engine_evidence(files: EvidenceFiles) -> BuildEvidence:
    """The evidence about an engine alone; raises BadInputError where there is none."""
    if files.layer_map is not None:
        raise BadInputError(
            "--layer-map leads to the layers of a model, and none is given",
            hint="name it too: --onnx model.onnx",
        )
    if files.log is None and files.layers is None:
        raise BadInputError(
            "no file here names a layer with a weight",
            hint="name a run folder, --onnx, or what a build left: --log, --layers",
        )
    return read_evidence(files)


def _check_names(evidence: BuildEvidence, report: EligibilityReport, files: EvidenceFiles) -> None:
    """Raise BadInputError for a layer in the user's layer map that the model does not have."""
    if not evidence.engine_names:
        return
    known = name_places(report, evidence.nodes)
    for engine, layers in evidence.engine_names:
        for layer in layers:
            if layer in known:
                continue
            raise BadInputError(
                f"{files.layer_map}: {printable(layer)!r}, named for {printable(engine)!r}, is no "
                "layer of the model",
                hint="name layers as the report does, or nodes",
            )


def report_folder(folder: Path, gpu: str | None = None) -> Judged:
    """The verdicts of a run folder, or of a folder of --emit-trtexec; `stale` says what changed.

    The forecast is for `gpu`, else for the GPU of the build where that is known. Raises
    BadInputError for another folder, and one without a model.
    """
    if not is_run_folder(folder):
        return _report_emitted(folder, gpu)
    saved = saved_report(folder)
    if saved is None:
        judged = _report_unfinished(folder, gpu)
    else:
        judged = _saved(folder, saved)
        if gpu is not None:
            judged = with_forecast(judged, gpu, record_if_there(PruneResult, folder / PRUNE))
    return replace(judged, report=_with_stale(folder, judged.report))


def saved_report(folder: Path) -> EligibilityReport | None:
    """The report of the run's last stage; None where no run came so far."""
    return record_if_there(EligibilityReport, folder / REPORT) if is_run_folder(folder) else None


def _saved(folder: Path, report: EligibilityReport) -> Judged:
    """The report of a run's last stage."""
    sparse = onnx_name(SPARSE)

    @functools.cache  # a forecast and `explain` both ask
    def evidence() -> BuildEvidence:
        layers = record_if_there(LayerMap, folder / LAYERS)
        return read_evidence(files_of_folder(folder, sparse), open_onnx(folder / sparse), layers)

    # the forecast is of the model before it was pruned
    files = files_of_folder(folder, onnx_name(DENSE))
    return Judged(report=report, files=files, evidence=evidence, onnx=folder / sparse)


def _report_emitted(folder: Path, gpu: str | None) -> Judged:
    """The verdicts of a folder that came back from the machine that built in it."""
    if not folder.exists():
        raise BadInputError(
            f"{folder} does not exist",
            hint="name a run folder, or files, such as --onnx model.onnx",
        )
    if not is_emitted_folder(folder):
        raise BadInputError(
            f"{folder} is not a run folder", hint="name one that prune-export-build made, or --onnx"
        )
    judged = _judge_folder(folder, read_emitted(folder).onnx, gpu)
    # build.sh goes on after a failure, so one of the two logs may tell of a whole build
    failed = (
        f"trtexec failed for the {name} engine: {name}.log says why"
        for name in failed_variants(folder)
    )
    return _with_notes(judged, *failed)


def _judge_folder(folder: Path, onnx: str, gpu: str | None) -> Judged:
    layers = record_if_there(LayerMap, folder / LAYERS)
    return with_forecast(report_files(files_of_folder(folder, onnx), layers), gpu)


def _report_unfinished(folder: Path, gpu: str | None) -> Judged:
    """The verdicts of a run folder that no report was written into yet."""
    for variant in (SPARSE, DENSE):
        if not (folder / onnx_name(variant)).is_file():
            continue
        judged = _judge_folder(folder, onnx_name(variant), gpu)
        if variant == DENSE and (folder / PRUNE).is_file():
            note = "these are the verdicts of dense.onnx: what `prune` made is not exported yet"
            judged = _with_notes(judged, f"{note} (prune-export-build)")
        return judged
    raise BadInputError(
        f"{folder} contains no ONNX file yet", hint="run prune-export-build, export or build first"
    )


def _with_notes(judged: Judged, *notes: str) -> Judged:
    report = judged.report
    return replace(judged, report=replace(report, notes=(*notes, *report.notes)))


def _with_stale(folder: Path, report: EligibilityReport) -> EligibilityReport:
    """The report with the files that changed since; a later comparison is no such change."""
    model = onnx_name(SPARSE)
    evidence = files_of_folder(folder, model).names()
    files = (REPORT, PRUNE, EXPORT, BUILD, ACCURACY, *evidence, *onnx_files(folder / model))
    stale = changed_files(folder, files, (LAYERS, SENSITIVITY))
    made_by = read_manifest(folder).twofour_version
    if made_by != __version__:
        stale = (f"twofour {made_by} made the folder, this is {__version__}", *stale)
    return replace(report, stale=stale)


def with_forecast(judged: Judged, gpu: str | None, pruned: PruneResult | None = None) -> Judged:
    """The report of 2:4 with a forecast: for the GPU asked for, else that of the build if known.

    Raises what `forecast_file` raises for a GPU that is asked for.
    """
    report, evidence = judged.report, judged.evidence()
    name = gpu
    if not name and report.gpu is not None:
        name = report.gpu.name
    elif not name and evidence.build is not None:
        name = evidence.build.gpu
    if name is None or report.pattern != HARDWARE_PATTERN:
        return judged
    try:
        cell = forecast_file(judged.files, evidence.layer_map, name, pruned)
    except BadInputError:
        if gpu:
            raise
        return judged  # nobody asked for it, so its lack is no error
    return replace(judged, report=replace(report, forecast=cell))


def forecast_file(
    files: EvidenceFiles, layers: LayerMap | None, gpu: str, pruned: PruneResult | None = None
) -> ForecastCell:
    """The forecast for a file on this GPU, in its type and at its sizes.

    Without `pruned` the layers that are pruned by default count. Raises BadInputError for an
    unknown GPU, a precision that it lacks, and free sizes other than the batch.
    """
    from twofour.forecasting.gpus import gpu_named
    from twofour.forecasting.model_forecast import forecast_model

    gpu_named(gpu)  # an unknown one is said before the file is read
    if files.onnx is None:
        raise BadInputError(f"--gpu {gpu}: a forecast needs the model", hint="add --onnx FILE")
    opened = open_onnx(files.onnx)
    arrays = None if pruned is None else _pruned_arrays(pruned, layers)
    model = model_to_forecast(opened.path.stem, opened, layers, arrays)
    if files.inputs is not None:
        shapes: Shapes = shapes_of(stored_arrays(files.inputs))
    else:
        shapes = _default_shapes(opened, gpu)
    precision, instead_of = _math_of(model)
    asked = ForecastOptions(gpus=(gpu,), precisions=(precision,))
    forecast = forecast_model(model, shapes, asked)
    (cell,) = forecast.cells
    return replace(cell, sentence=f"{cell.sentence}; {forecast.notes[0]}{instead_of}")


def model_to_forecast(
    name: str, opened: OpenedModel, layers: LayerMap | None, pruned: Set[str] | None = None
) -> ForecastModel:
    """A graph with its functions inlined; `pruned` are its arrays, those of the default if None."""
    from twofour.forecasting.model_forecast import ForecastModel

    whole = inlined(opened)  # in a function no product has a weight of its own
    if whole is not None:
        opened = OpenedModel(opened.path, whole)
    stored = opened.weights().weights
    if pruned is None:
        pruned = wanted_by_default(stored, HARDWARE_PATTERN)
    return ForecastModel(
        name=name,
        opened=opened,
        weights=with_module_names(_with_sharing(stored), layers),
        pruned=pruned,
        layer_map=layers,
    )


def _pruned_arrays(pruned: PruneResult, layers: LayerMap | None) -> set[str]:
    """Arrays of the graph that were pruned, under both names that one can have there."""
    # the key fc.weight of a torch module may be the initializer fc.weight, or MatMul_12_weight
    keys = {str(row.weight.weight) for row in pruned.weights if row.pruned}
    arrays = set(keys)
    if layers is not None:
        arrays |= {name.initializer for name in layers.layers if name.parameter in keys}
    return arrays


def _default_shapes(opened: OpenedModel, gpu: str) -> Shapes:
    """The shapes that the file has; raises BadInputError for free sizes other than the batch."""
    try:
        return example_shapes(opened.inputs, {}, opened.path.name)
    except BadInputError as error:
        error.hint = f"`twofour forecast {opened.path} --gpu {gpu}` takes them: {error.hint}"
        raise


def _math_of(model: ForecastModel) -> tuple[MathPrecision, str]:
    """The type that most pruned weights compute in; float16, with words, if it has no kernels."""
    sizes: Counter[str] = Counter()
    for weight in model.weights:
        sizes[weight.math_dtype] += prod(weight.shape) * (weight.weight in model.pruned)
    # {"float16": 84_934_656, "float32": 23_040}: the second are weights that nobody prunes
    dtype = max(sizes, key=sizes.__getitem__, default="float16")
    precision = MathPrecision.of_dtype(dtype)
    if precision is not None:
        return precision, ""
    return MathPrecision.FLOAT16, f"; no sparse kernel is known for {dtype}, the model's own type"


def report_document(folder: Path | None, report: EligibilityReport) -> Document:
    """The report with the other records of its run folder, for the page and the terminal."""
    if folder is None:
        return eligibility_document(report)
    notes = list(report.notes)
    comparison = record_if_there(LatencyComparison, folder / LATENCY)
    # stages of the run may have left other files since they were compared
    files = {} if comparison is None else comparison.files
    if files and recorded_hashes(folder, files) != files:
        comparison = None
        notes.append(
            f"{LATENCY} was measured on earlier models: its times are left out (compare again)"
        )
    finetuned = final_weights(folder) == FINETUNED
    if finetuned:
        notes += finetuning_lines(read_record(Finetuning, folder / FINETUNE))
    notes += unused_finetuning(folder)
    chosen = record_if_there(SensitivityResult, folder / SENSITIVITY)
    if chosen is not None and chosen.budget is None:  # a study without a budget chose nothing
        chosen = None
    return eligibility_document(
        replace(report, notes=tuple(notes)),
        accuracy=record_if_there(Accuracy, folder / ACCURACY),
        build=record_if_there(BuildResult, folder / BUILD),
        comparison=comparison,
        chosen=chosen,
        pruned=record_if_there(PruneResult, folder / PRUNE),
        finetuned=finetuned,
    )


def check_page(folder: Path) -> None:
    """Raises BadInputError for a damaged record among those that the page is made of."""
    record_if_there(EligibilityReport, folder / REPORT)
    record_if_there(Accuracy, folder / ACCURACY)
    record_if_there(BuildResult, folder / BUILD)


def annotate(judged: Judged, target: Path) -> None:
    """Write the model with verdict, reason codes and forecast gain in the metadata of its nodes.

    Both files refer to the same external data. Raises BadInputError without a model, and for a
    target in another folder than the data.
    """
    from onnx import helper

    if judged.onnx is None:
        raise BadInputError("--annotate: no model is given", hint="add --onnx FILE")
    opened = open_onnx(judged.onnx)
    if target.resolve() == opened.path.resolve():
        raise BadInputError(f"--annotate {target} is the model itself", hint="name another file")
    if opened.data_files and target.parent.resolve() != opened.path.parent.resolve():
        raise BadInputError(
            f"{target} is not beside the data of {opened.path}",
            hint=f"--annotate {opened.path.parent / target.name}",
        )
    model = opened.whole()
    entries = dict(_entries(judged.report))
    for layer in find_weights(model, path=opened.path).layers:
        node = layer.node.proto
        there = {entry.key: entry.value for entry in node.metadata_props}
        own = entries.get((layer.weight.node, layer.weight.weight), {})
        helper.set_metadata_props(node, there | own)
    with atomic_file(target) as temporary:
        temporary.write_bytes(model.SerializeToString())


def _entries(report: EligibilityReport) -> Iterator[tuple[object, dict[str, str]]]:
    """Metadata for the node of each layer."""
    gains = report.forecast_gains
    place = report.forecast.name if report.forecast else ""
    for row in report.verdicts:
        entry = {"twofour.verdict": row.verdict.value}
        if row.evidence is not None:
            entry["twofour.evidence"] = row.evidence.value
        entry["twofour.reasons"] = " ".join(reason.code.value for reason in row.reasons)
        if row.layer in gains:
            entry["twofour.forecast_gain"] = f"{gains[row.layer]:.2f}x on {place}"
        yield (row.node, row.weight), entry

"""The eligibility report: the last stage of a run, or made from a folder or anyone's files."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TypeVar

from twofour.eligibility.build_evidence import NO_ENGINE, BuildEvidence, engine_layers, name_places
from twofour.eligibility.build_facts import NOTHING_KNOWN, BuildFacts, ReportContext, build_facts
from twofour.eligibility.join import join_report, own_evidence, report_from_engine
from twofour.eligibility.predict import not_covered_lines, not_exported, predict, with_not_exported
from twofour.eligibility.reasons import REASONS
from twofour.engines.machine import find_gpu
from twofour.engines.protocol import ENGINES
from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.packages import __version__
from twofour.pipeline.evidence_files import (
    EvidenceFiles,
    WeightPlace,
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
from twofour.pipeline.forecasts import with_forecast
from twofour.pipeline.stages import Run, Stage, StageOutput
from twofour.records.eligibility import EligibilityReport
from twofour.records.export import Accuracy, ExportResult, Gpu, LayerMap
from twofour.records.latency import LatencyComparison
from twofour.records.run import BuildResult, Finetuning, SensitivityResult
from twofour.records.weights import (
    HARDWARE_PATTERN,
    PruneResult,
    Validation,
    Weight,
)
from twofour.reports.document import Document
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.html import write_pages
from twofour.reports.pruning_document import finetuning_lines
from twofour.store import read_record
from twofour.words import printable

T = TypeVar("T")
REPORT = "eligibility.json"
PAGES = "report.md", "report.html"
SENSITIVITY = "sensitivity.json"
LATENCY = "latency.json"
"""What `twofour compare` writes; the page shows it."""


def make_report(
    run: Run, pruned: PruneResult, exported: ExportResult, layers: LayerMap, built: BuildResult
) -> Stage[EligibilityReport]:
    """eligibility.json, report.md and report.html; `layers` are those of sparse.onnx."""
    path = run.file(onnx_name(SPARSE))
    files = files_of_folder(run.path, onnx_name(SPARSE))
    dense_files = replace(files, onnx=run.file(onnx_name(DENSE)))

    def work() -> StageOutput[EligibilityReport]:
        model = run.models.open(path)
        found = model.weights(HARDWARE_PATTERN)
        weights = with_module_names(found.weights, layers, known_to_pruning(pruned))
        evidence = read_evidence(files, model, layers)
        version = None
        if ENGINES[built.engine.engine].is_tensorrt:
            version = built.engine.version
            evidence = replace(evidence, built_with=built.engine.in_words)
        context = ReportContext(
            model=run.source.name,
            pattern=exported.pattern.pattern,
            engine=built.engine.in_words,
            gpu=built.gpu,
            activation_products=found.activation_products,
            not_covered=found.not_covered,
            tensorrt_version=version,
            build=_facts_of(evidence),
        )
        report = predict(weights, _hardware_validation(model, exported), context)
        report = join_report(report, evidence)
        known = [name for group in found.not_covered for name in group.arrays]
        known += [weight.weight for weight in found.weights if weight.weight is not None]
        parameters = [name.parameter for name in layers.layers]
        report = with_not_exported(report, not_exported(pruned.weights, parameters, known))
        report = replace(report, notes=(*report.notes, *exported.notes))
        report = with_forecast(report, dense_files, evidence, run.options.gpu, pruned)
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
            *files.names(),
            *onnx_files(path),
            *onnx_files(run.file(onnx_name(DENSE))),
            *(name for name in (SENSITIVITY, LATENCY) if run.file(name).is_file()),
        ),
    )


def known_to_pruning(pruned: PruneResult) -> dict[WeightPlace, Weight]:
    """What only pruning knows about a weight: the user's choice, and who else uses it."""
    return {
        (row.weight.weight, node): replace(
            row.weight, reasons=tuple(r for r in row.reasons if REASONS[r.code].explains_dense)
        )
        for row in pruned.weights
        if row.weight.weight is not None
        for node in (row.weight.node, None)
    }


def _hardware_validation(model: OpenedModel, exported: ExportResult) -> Validation:
    """The validation for 2:4, the pattern of the engine, made again for a run in another one."""
    from twofour.pruning.verify import check_onnx

    if exported.pattern.pattern == HARDWARE_PATTERN:
        return exported.pattern
    pruned = {check.weight for check in exported.pattern.checks if check.required}
    return check_onnx(model, HARDWARE_PATTERN, required=pruned)


def report_onnx(
    model: OpenedModel,
    layers: LayerMap | None = None,
    *,
    gpu: Gpu | None,
    build: BuildFacts = NOTHING_KNOWN,
    pruned: PruneResult | None = None,
) -> EligibilityReport:
    """Predicted verdicts for anyone's ONNX file, on this GPU (None: not known) and build.

    `pruned` says why weights are dense. Raises BadInputError for a damaged graph, and for a model
    without a weight.
    """
    from twofour.pruning.selection import sharing_reasons
    from twofour.pruning.verify import check_onnx

    found = model.weights(HARDWARE_PATTERN)
    if not found.weights:
        what = f"{model.path}: no convolution or matrix product in it has a weight"
        raise BadInputError(
            "; ".join((what, *not_covered_lines(found.not_covered))),
            hint="leave --onnx out to report on the engine alone (--log, --layers)",
        )
    context = ReportContext(
        model=model.path.stem,
        pattern=HARDWARE_PATTERN,
        engine=NO_ENGINE,
        gpu=gpu,
        activation_products=found.activation_products,
        not_covered=found.not_covered,
        tensorrt_version=build.tensorrt_version,
        build=build,
    )
    weights = [replace(w, reasons=(*w.reasons, *sharing_reasons(w))) for w in found.weights]
    known = {} if pruned is None else known_to_pruning(pruned)
    judged = with_module_names(weights, layers or LayerMap(layers=()), known)
    return predict(judged, check_onnx(model, HARDWARE_PATTERN), context)


def report_files(
    files: EvidenceFiles,
    layers: LayerMap | None = None,
    *,
    gpu: Gpu | None = None,
    pruned: PruneResult | None = None,
) -> tuple[EligibilityReport, BuildEvidence]:
    """Verdicts from anyone's files; without an ONNX file, for the layers of the engine alone.

    Names of modules come from the layer map, else from the layers.json beside the ONNX file.
    Without evidence the rules are those of `gpu`, else of this machine's. Raises BadInputError
    where there is neither a model nor anything about an engine.
    """
    if files.onnx is None and files.layer_map is not None:
        raise BadInputError(
            "--layer-map leads to the layers of a model, and none is given",
            hint="name it too: --onnx model.onnx",
        )
    if layers is None and files.onnx is not None:
        layers = map_beside(files.onnx)
    model = None if files.onnx is None else open_onnx(files.onnx)
    evidence = read_evidence(files, model, layers)
    if model is not None:
        gpu = gpu or find_gpu() if evidence.is_empty else None
        facts = _facts_of(evidence)
        predict_for = partial(report_onnx, model, evidence.layer_map, gpu=gpu, pruned=pruned)
        predicted = predict_for(build=facts)
        of_this_model = _facts_of(own_evidence(predicted, evidence))
        if of_this_model != facts:  # the version and flags of another model's build say nothing
            predicted = predict_for(build=of_this_model)
        _check_names(evidence, predicted, files)
        return join_report(predicted, evidence), evidence
    if evidence.is_empty:
        raise BadInputError(
            "there is nothing to report on",
            hint="name a run folder, --onnx, or what a build left: --log, --layers",
        )
    return report_from_engine(evidence), evidence


def explained_files(
    files: EvidenceFiles, layers: LayerMap | None = None, gpu: str | None = None
) -> tuple[EligibilityReport, BuildEvidence]:
    """`report_files` with the forecast for a GPU: this one, else that of the build."""
    report, evidence = report_files(files, layers)
    return with_forecast(report, files, evidence, gpu), evidence


def _check_names(evidence: BuildEvidence, report: EligibilityReport, files: EvidenceFiles) -> None:
    """Raise BadInputError for a layer in the user's layer map that the model does not have."""
    known = name_places(report, evidence.nodes) if evidence.engine_names else {}
    for engine, layers in evidence.engine_names:
        for layer in (layer for layer in layers if layer not in known):
            near = ", ".join(map(printable, get_close_matches(layer, known, n=3)))
            raise BadInputError(
                f"{files.layer_map}: {printable(layer)!r}, named for {printable(engine)!r}, is no "
                "layer of the model",
                hint=f"did you mean {near}" if near else "name layers as the report does, or nodes",
            )


def _facts_of(evidence: BuildEvidence) -> BuildFacts:
    return build_facts(evidence.build, engine_layers(evidence)[0])


def report_folder(folder: Path, gpu: str | None = None) -> EligibilityReport:
    """The verdicts of a run folder, or of a folder of --emit-trtexec; `stale` says what changed."""
    saved = None if gpu is not None else saved_report(folder)
    return explained_folder(folder, gpu)[0] if saved is None else _with_stale(folder, saved)


def explained_folder(
    folder: Path, gpu: str | None = None
) -> tuple[EligibilityReport, BuildEvidence]:
    """`report_folder` with the evidence behind it, for which logs are read again."""
    report = saved_report(folder)
    if report is None:
        report, evidence = _joined(folder, gpu)
        return _with_stale(folder, report), evidence
    files = files_of_folder(folder, onnx_name(SPARSE))
    model = open_onnx(folder / onnx_name(SPARSE))
    evidence = read_evidence(files, model, _if_there(LayerMap, folder / LAYERS))
    if gpu is not None:
        files = replace(files, onnx=folder / onnx_name(DENSE))
        report = with_forecast(report, files, evidence, gpu, _if_there(PruneResult, folder / PRUNE))
    return _with_stale(folder, report), evidence


def saved_report(folder: Path) -> EligibilityReport | None:
    """The report of the run's last stage; None where no run came so far."""
    return _if_there(EligibilityReport, folder / REPORT) if is_run_folder(folder) else None


def _with_stale(folder: Path, report: EligibilityReport) -> EligibilityReport:
    """The report with the files that changed since; a later comparison is no such change."""
    if not is_run_folder(folder):
        return report
    model = onnx_name(SPARSE)
    files = (REPORT, PRUNE, EXPORT, BUILD, ACCURACY, *files_of_folder(folder, model).names())
    found = changed_files(folder, (*files, *onnx_files(folder / model)), (LAYERS, SENSITIVITY))
    made_by = read_manifest(folder).twofour_version
    if made_by != __version__:
        found = (f"twofour {made_by} made the folder, this is {__version__}", *found)
    return replace(report, stale=found)


def _joined(folder: Path, gpu: str | None) -> tuple[EligibilityReport, BuildEvidence]:
    if is_emitted_folder(folder):
        emitted = read_emitted(folder)
        failed = tuple(
            f"trtexec failed for the {name} engine: {name}.log says why"
            for name in failed_variants(folder)
        )
        files = files_of_folder(folder, emitted.onnx)
        report, evidence = explained_files(files, _if_there(LayerMap, folder / LAYERS), gpu)
        return replace(report, notes=(*failed, *report.notes)), evidence
    if not folder.is_dir():
        raise BadInputError(f"{folder} does not exist", hint="name a run folder, or files")
    if not is_run_folder(folder):
        raise BadInputError(
            f"{folder} is not a run folder", hint="name one that prune-export-build made, or --onnx"
        )
    layers = _if_there(LayerMap, folder / LAYERS)
    for variant in (SPARSE, DENSE):
        if (folder / onnx_name(variant)).is_file():
            files = files_of_folder(folder, onnx_name(variant))
            report, evidence = explained_files(files, layers, gpu)
            if variant == DENSE and (folder / PRUNE).is_file():
                note = "these are the verdicts of dense.onnx: what `prune` made is not exported yet"
                report = replace(report, notes=(f"{note} (prune-export-build)", *report.notes))
            return report, evidence
    raise BadInputError(
        f"{folder} contains no ONNX file yet", hint="run prune-export-build, export or build first"
    )


def report_document(folder: Path | None, report: EligibilityReport) -> Document:
    """The report with the other records of its run folder, for the page and the terminal."""
    if folder is None:
        return eligibility_document(report)
    others: tuple[str, ...] = ()
    comparison = _if_there(LatencyComparison, folder / LATENCY)
    if (
        comparison is not None
        and comparison.files
        and recorded_hashes(folder, comparison.files) != comparison.files
    ):
        said = f"{LATENCY} was measured on earlier models: its times are left out (compare again)"
        comparison, others = None, (said,)
    finetuned = final_weights(folder) == FINETUNED
    if finetuned:
        others += finetuning_lines(read_record(Finetuning, folder / FINETUNE))
    others += unused_finetuning(folder)
    chosen = _if_there(SensitivityResult, folder / SENSITIVITY)
    if chosen is not None and chosen.budget is None:  # a study without a budget chose nothing
        chosen = None
    return eligibility_document(
        replace(report, notes=(*report.notes, *others)),
        accuracy=_if_there(Accuracy, folder / ACCURACY),
        build=_if_there(BuildResult, folder / BUILD),
        comparison=comparison,
        chosen=chosen,
        pruned=_if_there(PruneResult, folder / PRUNE),
        finetuned=finetuned,
    )


def check_page(folder: Path) -> None:
    """Raises BadInputError for a damaged record among those that the page is made of."""
    _if_there(EligibilityReport, folder / REPORT)
    _if_there(Accuracy, folder / ACCURACY)
    _if_there(BuildResult, folder / BUILD)


def _if_there(kind: type[T], path: Path) -> T | None:
    return read_record(kind, path) if path.is_file() else None

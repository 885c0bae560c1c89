"""The report stage: the weights of sparse.onnx, named, judged and given a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from twofour.engines.gpu import find_gpu
from twofour.errors import BadInputError
from twofour.graph import find_weights, load_model
from twofour.pipeline.context import DENSE, LAYERS, SPARSE, Run, onnx_files, onnx_name
from twofour.pipeline.folder import is_run_folder
from twofour.pipeline.stages import Stage, versions
from twofour.records import (
    BuildResult,
    EligibilityReport,
    EngineName,
    ExportResult,
    LayerMap,
    LayerName,
    Pattern,
    PruneResult,
    Reason,
    ReasonCode,
    Validation,
    Weight,
)
from twofour.reports.context import ReportContext
from twofour.reports.eligibility import predict
from twofour.store import read_record

REPORT = "eligibility.json"
HARDWARE = Pattern(2, 4)
"""The only pattern sparse tensor cores run (TensorRT developer guide, structured sparsity)."""


def report(
    run: Run, pruned: PruneResult, exported: ExportResult, layers: LayerMap, built: BuildResult
) -> EligibilityReport:
    """eligibility.json."""
    path = run.file(onnx_name(SPARSE))

    def work() -> tuple[EligibilityReport, Sequence[str]]:
        found = find_weights(load_model(path, weights=False), HARDWARE, path=path)
        weights = named(found.weights, layers, excluded(pruned))
        context = ReportContext(
            model=run.source.name,
            pattern=pruned.pattern,
            engine=_engine(built),
            gpu=built.gpu,
            activation_products=found.activation_products,
            tensorrt_version=_builder_version(built),
        )
        return predict(weights, _hardware_validation(run, exported), context), ()

    stage = Stage(
        name="report",
        title="report",
        record=REPORT,
        depends={"versions": versions()},
        reads=("prune.json", "export.json", LAYERS, "build.json", *onnx_files(path)),
    )
    return run.runner.run(stage, EligibilityReport, work)


def named(
    weights: Sequence[Weight], layers: LayerMap, more: Mapping[str, tuple[Reason, ...]]
) -> tuple[Weight, ...]:
    """Weights of the graph under their modules' names, with what pruning said about each.

    `more` has the reasons by state_dict key (by initializer for an ONNX source).
    """
    by_place: dict[tuple[str | None, str | None], LayerName] = {
        (name.node, name.initializer): name for name in layers.layers
    }
    by_initializer: dict[str | None, LayerName] = {name.initializer: name for name in layers.layers}
    return tuple(
        _renamed(
            w,
            by_place.get((w.node or "", w.weight or "")) or by_initializer.get(w.weight or ""),
            more,
        )
        for w in weights
    )


def excluded(pruned: PruneResult) -> dict[str, tuple[Reason, ...]]:
    """Why the user's own choice left a weight dense, by state_dict key."""
    return {
        row.weight.weight: tuple(r for r in row.reasons if r.code is ReasonCode.EXCLUDED)
        for row in pruned.weights
        if row.weight.weight is not None and not row.pruned
    }


def _renamed(
    weight: Weight, name: LayerName | None, more: Mapping[str, tuple[Reason, ...]]
) -> Weight:
    if name is None:
        return weight
    reasons = weight.reasons + more.get(name.parameter, ())
    return replace(weight, layer=name.layer or weight.layer, reasons=reasons)


def _hardware_validation(run: Run, exported: ExportResult) -> Validation:
    """The validation by 2:4, the one the engine goes by; done anew for other patterns."""
    from twofour.pruning.validate import validate_onnx

    if exported.pattern.pattern == HARDWARE:
        return exported.pattern
    return validate_onnx(run.file(onnx_name(SPARSE)), HARDWARE, required=frozenset())


def _builder_version(built: BuildResult) -> str | None:
    return built.engine.version if built.engine.engine is EngineName.TENSORRT else None


def _engine(built: BuildResult) -> str:
    status = built.engine
    return f"{status.engine.value} {status.version} on {status.device}"


def report_onnx(path: Path, layers: LayerMap | None = None) -> EligibilityReport:
    """Predicted verdicts for an ONNX file of anyone.

    Raises BadInputError for a file that is no ONNX model.
    """
    from twofour.pruning.validate import validate_onnx

    found = find_weights(load_model(path, weights=False), HARDWARE, path=path)
    context = ReportContext(
        model=path.stem,
        pattern=HARDWARE,
        engine="no engine",
        gpu=find_gpu(),
        activation_products=found.activation_products,
    )
    validation = validate_onnx(path, HARDWARE, required=frozenset())
    return predict(named(found.weights, layers or LayerMap(layers=()), {}), validation, context)


def report_folder(folder: Path) -> EligibilityReport:
    """The verdicts of a run folder: eligibility.json, else from the ONNX file that is there.

    Raises BadInputError for a folder that is no run folder or holds no ONNX file yet.
    """
    if not is_run_folder(folder):
        raise BadInputError(
            f"{folder} is not a run folder", hint="name one that prune-export-build made, or --onnx"
        )
    if (folder / REPORT).is_file():
        return read_record(EligibilityReport, folder / REPORT)
    for variant in (SPARSE, DENSE):
        if (folder / onnx_name(variant)).is_file():
            layers = folder / LAYERS
            names = read_record(LayerMap, layers) if layers.is_file() else None
            return report_onnx(folder / onnx_name(variant), names)
    raise BadInputError(
        f"{folder} holds no ONNX file yet", hint="run prune-export-build, export or build first"
    )

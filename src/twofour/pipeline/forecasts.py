"""Forecasts of ONNX files: the one that `twofour forecast` shows, and the cell of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, inlined, open_onnx
from twofour.inputs.examples import example_shapes
from twofour.inputs.fits import shapes_of, stored_arrays
from twofour.pipeline.evidence_files import EvidenceFiles, with_module_names
from twofour.pruning.selection import sharing_reasons, wanted_by_default
from twofour.records.eligibility import EligibilityReport
from twofour.records.export import LayerMap
from twofour.records.options import ForecastOptions, MathPrecision
from twofour.records.weights import HARDWARE_PATTERN, PruneResult

if TYPE_CHECKING:
    from twofour.forecasting.model_forecast import ForecastModel
    from twofour.records.forecast import ForecastCell


def model_to_forecast(
    name: str, opened: OpenedModel, layers: LayerMap | None, pruned: Set[str] | None = None
) -> ForecastModel:
    """A graph with its functions inlined; `pruned` are its arrays, those of the default if None."""
    from twofour.forecasting.model_forecast import ForecastModel

    if (whole := inlined(opened)) is not None:
        opened = OpenedModel(opened.path, whole)
    found = opened.weights(HARDWARE_PATTERN).weights
    weights = [replace(w, reasons=(*w.reasons, *sharing_reasons(w))) for w in found]
    return ForecastModel(
        name=name,
        opened=opened,
        weights=with_module_names(weights, layers or LayerMap(layers=()), {}),
        pruned=wanted_by_default(found, HARDWARE_PATTERN) if pruned is None else pruned,
        layer_map=layers,
    )


def with_forecast(
    report: EligibilityReport,
    files: EvidenceFiles,
    evidence: BuildEvidence,
    gpu: str | None,
    pruned: PruneResult | None = None,
) -> EligibilityReport:
    """The report of 2:4 with a forecast: for the GPU asked for, else that of the build if known.

    Raises what `forecast_file` raises for a GPU that is asked for.
    """
    built_on = None if evidence.build is None else evidence.build.gpu
    name = gpu or (built_on if report.gpu is None else report.gpu.name)
    if name is not None and report.pattern == HARDWARE_PATTERN:
        with suppress(*(() if gpu else (BadInputError,))):
            return replace(report, forecast=forecast_file(files, evidence.layer_map, name, pruned))
    return report


def forecast_file(
    files: EvidenceFiles,
    layers: LayerMap | None,
    gpu: str,
    pruned: PruneResult | None = None,
) -> ForecastCell:
    """The forecast for a file on this GPU, in its type and at its sizes.

    Without `pruned` the layers that are pruned by default count. Raises BadInputError for an
    unknown GPU, a precision that it lacks, and free sizes other than the batch.
    """
    from twofour.forecasting.gpus import find_gpu
    from twofour.forecasting.model_forecast import forecast_model

    find_gpu(gpu)
    if files.onnx is None:
        raise BadInputError(f"--gpu {gpu}: a forecast needs the model", hint="add --onnx FILE")
    opened, arrays = open_onnx(files.onnx), None
    if pruned is not None:
        keys = {row.weight.weight for row in pruned.weights if row.pruned}
        named = () if layers is None else layers.layers
        arrays = {str(key) for key in keys} | {x.initializer for x in named if x.parameter in keys}
    model = model_to_forecast(opened.path.stem, opened, layers, arrays)
    if files.inputs is not None:
        shapes = shapes_of(stored_arrays(files.inputs))
    else:
        try:
            shapes = example_shapes(opened.inputs, {}, opened.path.name)
        except BadInputError as error:
            hint = f"`twofour forecast {opened.path} --gpu {gpu}` takes sizes by --input-shape"
            raise BadInputError(error.message, hint=hint) from error
    precision, instead_of = _math_of(model)
    asked = ForecastOptions(gpus=(gpu,), precisions=(precision,))
    found = forecast_model(model, shapes, asked)
    (cell,) = found.cells
    return replace(cell, sentence=f"{cell.sentence}; {found.notes[0]}{instead_of}")


def _math_of(model: ForecastModel) -> tuple[MathPrecision, str]:
    """The type that most pruned weights compute in; float16, with words, if it has no kernels."""
    sizes: Counter[str] = Counter()
    for weight in model.weights:
        sizes[weight.math_dtype] += prod(weight.shape) * (weight.weight in model.pruned)
    dtype = max(sizes, key=sizes.__getitem__, default="float16")
    if (precision := MathPrecision.of_dtype(dtype)) is not None:
        return precision, ""
    return MathPrecision.FLOAT16, f"; no sparse kernel is known for {dtype}, the model's own type"

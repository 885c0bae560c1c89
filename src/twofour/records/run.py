"""The run folder: its stages, what each of them leaves for the next, and the whole of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from twofour.records import Glance
from twofour.records.build import EngineStatus, FailedTry, Gpu, VariantBuild
from twofour.records.eligibility import EligibilityReport
from twofour.records.export import (
    Accuracy,
    ExportedModel,
    ExportResult,
    LayerMap,
    OnnxFile,
    OutputAgreement,
)
from twofour.records.latency import LatencyComparison
from twofour.records.options import BuildOptions, DynamicAxis, ExampleInputs, Variant
from twofour.records.pruning import PruneResult, Validation
from twofour.records.sensitivity import SensitivityResult
from twofour.records.weights import SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSizes:
    """A run of the module at other sizes than the example's."""

    sizes: dict[str, int]
    file: str
    """The .npz with inputs ("input:NAME") and outputs ("output:NAME")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCheck:
    """An exported file against the module at other sizes than the example's."""

    sizes: dict[str, int]
    agreement: tuple[OutputAgreement, ...]
    error: str | None = None
    """Why the file could not be run, or gives other shapes."""

    @property
    def holds(self) -> bool:
        """It ran, and every output is within its bound."""
        return self.error is None and all(row.within for row in self.agreement)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedVariant(ExportedModel):
    """stages/export-<variant>.json: one ONNX file as it was written, before anything ran it."""

    onnx: OnnxFile
    reference: str | None
    """The .npz with the outputs, on the example inputs, of the module, or of the ONNX file before
    its precision was changed; None: there is nothing to compare with."""
    layers: LayerMap
    changed: tuple[str, ...] = ()
    """Its tensors, between the nodes of the main graph, that are half precision now."""
    dynamic: tuple[DynamicAxis, ...] = ()
    """Axes whose size is free besides the batch."""
    other_sizes: tuple[OtherSizes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleArrays:
    """stages/inputs.json: the example inputs of a model that came as ONNX."""

    shapes: dict[str, tuple[int, ...]]
    note: str | None = None
    """What was taken for a batch that nobody gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalOutputs:
    """stages/original.json: an ONNX file run before its precision was changed."""

    outputs: str | None
    """The .npz with its outputs on the example inputs; None where it cannot run here."""
    why_not: str | None = None
    failed_tries: tuple[FailedTry, ...] = ()
    """Before this result; without `outputs`, the last of them is why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantCheck:
    """stages/check-<variant>.json: one ONNX file run by ONNX Runtime on the example inputs."""

    variant: Variant
    outputs: str | None
    """The .npz with its outputs; None where ONNX Runtime cannot run the file here."""
    agreement: tuple[OutputAgreement, ...]
    """Against the module's outputs; () where there is nothing to compare."""
    not_compared: str | None
    """Why `agreement` is empty."""
    metrics: dict[str, float]
    failed_tries: tuple[FailedTry, ...] = ()
    """Before this result; without `outputs`, the last of them is why."""
    level: str | None = None
    """Optimization level it was run at where that is not the usual one."""
    sizes: tuple[SizeCheck, ...] = ()
    """The same at other sizes, where some are free besides the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShotCheck:
    """stages/check-one-shot.json: the user's metric of the pruned model before its repair."""

    metrics: dict[str, float]
    not_measured: str | None = None
    """Why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """build.json."""

    engine: EngineStatus
    asked_for: str
    """auto, tensorrt or onnxruntime."""
    not_used: tuple[EngineStatus, ...]
    """Engines that were preferred and cannot run here, with their reasons."""
    gpu: Gpu | None
    options: BuildOptions
    variants: tuple[VariantBuild, ...]
    times: LatencyComparison
    """Of all of them, in rounds; a row says why a variant has none."""
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One finished stage of a run folder: the key of its inputs and the hashes of its outputs."""

    stage: str
    key: str
    """sha256 over the stage's inputs, options and versions."""
    inputs: dict[str, str] = field(default_factory=dict)
    """File of the run folder that the stage read -> its sha256 then."""
    outputs: dict[str, str] = field(default_factory=dict)
    """File name in the run folder -> sha256."""
    watched: dict[str, str] = field(default_factory=dict)
    """Data file that the user's code read -> its size and time of change."""
    seconds: float = 0.0
    lasting: bool = True
    """False: the result may be another next time (memory ran out, say), so it is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest(ExampleInputs):
    """run.json: what makes a folder a run folder, and the example inputs it was given last."""

    source: str
    twofour_version: str
    stages: tuple[StageRecord, ...]
    dense_reference: str | None = None
    """The source of dense.onnx, where it is not `source`."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunResult(Glance):
    """What a whole run gives back: its folder and the records in it."""

    folder: str
    prune: PruneResult
    validation: Validation
    export: ExportResult
    build: BuildResult
    accuracy: Accuracy
    report: EligibilityReport
    sensitivity: SensitivityResult | None = None
    """How the layers were chosen that were pruned; None: by no budget."""

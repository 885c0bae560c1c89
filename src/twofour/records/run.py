"""The run folder: its stages, what each leaves, what layers lose, all of it; runs of a fleet."""

from __future__ import annotations

from dataclasses import field

from twofour.records import frozen
from twofour.records.eligibility import EligibilityReport, ShareUnit
from twofour.records.export import (
    Accuracy,
    EngineStatus,
    ExportedModel,
    ExportResult,
    FailedTry,
    Gpu,
    LayerMap,
    OnnxFile,
    OutputAgreement,
    VariantBuild,
)
from twofour.records.forecast import ForecastGain
from twofour.records.latency import LatencyComparison, Machine
from twofour.records.options import (
    BudgetOptions,
    BuildOptions,
    DynamicAxis,
    ExampleInputs,
    LossKind,
    Variant,
)
from twofour.records.weights import (
    SCHEMA_VERSION,
    Calibration,
    OutputError,
    PrunedModel,
    PruneResult,
    Record,
    Report,
    Validation,
)


@frozen
class OtherSizes:
    """A run of the module at other sizes than the example's."""

    sizes: dict[str, int]
    file: str


@frozen
class SizeCheck:
    """An exported file against the module at other sizes than the example's."""

    sizes: dict[str, int]
    agreement: tuple[OutputAgreement, ...]
    error: str | None = None
    """Why the file could not be run, or that it gives other shapes."""

    @property
    def holds(self) -> bool:
        """It ran, and every output is within its bound."""
        return self.error is None and all(row.within for row in self.agreement)


@frozen(repr=False)
class ExportedVariant(ExportedModel):
    """stages/export-<variant>.json: one ONNX file as it was written, before anything ran it.

    stages/graph.json is of stages/graph.onnx, the graph that torch traced.
    """

    onnx: OnnxFile
    reference: str | None
    """The .npz with the outputs, on the example inputs, of the module, or of the ONNX file before
    its precision was changed; None: there is nothing to compare with."""
    layers: LayerMap
    overflows: bool = False
    """Some operator of the module gave finite values that float16 cannot hold."""
    too_large: tuple[str, ...] = ()
    """Tensors whose values float16 cannot hold; what makes and reads them keeps float32."""
    dynamic: tuple[DynamicAxis, ...] = ()
    """Axes whose size is free besides the batch."""
    inputs_are: str | None = None
    """What the example inputs are, for `Accuracy.inputs_are`."""
    other_sizes: tuple[OtherSizes, ...] = ()


@frozen
class ExampleArrays:
    """stages/inputs.json: the example inputs of a model that came as ONNX."""

    are: str
    """What they are, for `Accuracy.inputs_are`."""


@frozen
class OriginalOutputs:
    """stages/original.json: an ONNX file run before its precision was changed."""

    outputs: str | None
    """The .npz with its outputs on the example inputs; None where it cannot run here."""
    too_large: tuple[str, ...] = ()
    """Tensors whose values float16 cannot hold."""
    why_not: str | None = None
    failed_tries: tuple[FailedTry, ...] = ()


@frozen
class VariantCheck:
    """stages/check-<variant>.json: one ONNX file run by ONNX Runtime on the example inputs."""

    variant: Variant
    outputs: str | None
    """The .npz with its outputs; None where ONNX Runtime cannot run the file here."""
    agreement: tuple[OutputAgreement, ...]
    """Agreement with the module's outputs; () where there is nothing to compare."""
    not_compared: str | None
    metrics: dict[str, float]
    failed_tries: tuple[FailedTry, ...] = ()
    level: str | None = None
    sizes: tuple[SizeCheck, ...] = ()


@frozen(repr=False)
class BuildResult(Record):
    """build.json."""

    engine: EngineStatus
    asked_for: str
    not_used: tuple[EngineStatus, ...]
    """Engines that were preferred and cannot run here, with their reasons."""
    gpu: Gpu | None
    options: BuildOptions
    variants: tuple[VariantBuild, ...]
    times: LatencyComparison
    """Times of all variants, in rounds; a row says why a variant has none."""
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


@frozen
class StageRecord:
    """One finished stage of a run folder: the key of its inputs and the hashes of its outputs."""

    stage: str
    key: str
    """sha256 over the stage's inputs, options and versions."""
    inputs: dict[str, str] = field(default_factory=dict)
    """File of the run folder that the stage read -> its sha256 then."""
    outputs: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    lasting: bool = True
    """False: memory ran out or a process ended, so that no run keeps it."""


@frozen
class RunManifest(ExampleInputs):
    """run.json: what makes a folder a run folder, and the example inputs it was given last."""

    source: str
    twofour_version: str
    stages: tuple[StageRecord, ...]
    dense_reference: str | None = None
    """The source of dense.onnx, where it is not `source`."""
    schema_version: int = SCHEMA_VERSION


@frozen
class Measured:
    """What was found out about the model with some layers pruned."""

    outputs: float | None = None
    """||y - y'||^2 / ||y||^2 of the outputs of the whole model: 0 where nothing changes; the mean
    over its outputs of floats, None without one."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@frozen
class LayerCost:
    """A row of sensitivity.json: one layer, or those that are pruned together."""

    layer: str
    members: tuple[str, ...]
    """Every layer that is decided with it, itself among them."""
    globs: tuple[str, ...]
    """Globs that leave it dense, for --exclude or a line of a --layers file."""
    saves: float
    """What it saves by running sparse, in the unit of the result; 0 where TensorRT cannot."""
    alone: Measured | None
    """The model with this layer pruned and every other dense; None: not pruned at all."""
    output_error: OutputError | None = None
    """Error of the layer's own outputs on the calibration samples, found by pruning."""
    loss: float | None = None
    """The figure that counts; below 0 where the model became better."""
    why_dense: str | None = None
    pruned: bool | None = None
    """What the budget decided; None: there was none."""


@frozen
class PrunedSet:
    """Some layers pruned at once."""

    layers: int
    saves: float
    share: float
    """Part of what pruning everything would save, 0 to 1."""
    predicted: float
    """Sum of what its layers lose alone."""
    loss: float | None
    """Measured on the whole set; None where the model could not be run."""
    measured: Measured
    dense: tuple[str, ...]
    """Layers that would save something and are left dense."""


@frozen
class BudgetResult:
    """The set that the budget allows."""

    asked: BudgetOptions
    chosen: PrunedSet
    trials: tuple[PrunedSet, ...]


@frozen
class TakenBack:
    """stages/taken-back.json: layers that were left dense once the whole model was measured."""

    chosen: str
    """sha256 of the sensitivity.json that they were taken from."""
    layers: int


@frozen(repr=False)
class SensitivityResult(PrunedModel):
    """sensitivity.json."""

    loss: LossKind
    figure: str | None
    unit: ShareUnit
    dense: Measured
    layers: tuple[LayerCost, ...]
    pareto: tuple[PrunedSet, ...]
    """Sets from little to everything pruned; the last one is everything."""
    budget: BudgetResult | None = None
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def forecast(self) -> str:
        """What stands beside every figure of a saving that is a forecast: " (forecast)"."""
        return " (forecast)" if self.unit is ShareUnit.FORECAST else ""

    @property
    def no_gain(self) -> str | None:
        """The note on why no layer is worth a choice, the first one; None where one saves."""
        return None if any(row.saves for row in self.layers) else next(iter(self.notes), None)


@frozen
class HeldOut:
    """Held-out samples, measured during training."""

    step: int
    distance: float
    """Squared distance to the dense model's outputs, as a share of their variance over samples."""


@frozen(repr=False)
class Finetuning(Record):
    """finetune.json: pruned weights, trained to give the dense model's outputs again."""

    source: str = ""
    train: Calibration
    """The training samples, of which some were held out."""
    minutes: float
    """What was given; the learning rate follows it."""
    seconds: float
    steps: int
    measured: tuple[HeldOut, ...]
    """The first is that of the pruned model."""
    best: int
    """Place in `measured` of the weights that were kept; 0: training did not make them better."""
    stopped: str | None = None
    """Why it ended before the time was over."""
    weights: int
    """Number of weights whose zeros were held."""
    blocks: tuple[str, ...]
    """Blocks whose outputs were trained too."""
    bfloat16: bool = False
    """Whether steps multiplied in bfloat16, because the processor is fast in it."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """The user's figures of the dense, the pruned and the fine-tuned model."""
    schema_version: int = SCHEMA_VERSION


@frozen
class FormatSize:
    """All weights in a format in which values keep their type; COO and CSR have narrow indices."""

    format: str
    size_bytes: int


@frozen
class Conversion:
    """A matrix made COO or CSR; beside it `peak_bytes` are held at most."""

    format: str
    samples_ms: tuple[float, ...]
    peak_bytes: int


@frozen(repr=False)
class ModelSizes(Report):
    """The result of `twofour sizes`: each stored weight counts once."""

    source: str
    weights: int
    holding: int
    """Number of weights in which 2:4 holds."""
    sizes: tuple[FormatSize, ...]
    converted: str
    """The layer whose shape, type and share of zeros the converted matrix has."""
    conversions: tuple[Conversion, ...]
    machine: Machine
    schema_version: int = SCHEMA_VERSION


@frozen(repr=False)
class RunResult(Record):
    """The result of a whole run: its folder and the records in it."""

    folder: str
    prune: PruneResult
    validation: Validation
    export: ExportResult
    build: BuildResult
    accuracy: Accuracy
    report: EligibilityReport
    sensitivity: SensitivityResult | None = None


# --- one model on every kind of accelerator of a cluster ------------------------------------------


@frozen
class FleetKind:
    """fleet/<kind>/kind.json: one kind of accelerator; without `built`, `error` says why."""

    kind: str
    """Ray's accelerator type."""
    node: str | None = None
    built: BuildResult | None = None
    times: LatencyComparison | None = None
    """Times of all engines of the node where that was asked for, else those of the build."""
    report: EligibilityReport | None = None
    """A verdict per layer, in the same order on every kind."""
    forecast: ForecastGain | None = None
    """What the model gains at most on this GPU, by kernels measured elsewhere: no measurement."""
    expected: ForecastGain | None = None
    """The gain to expect, by the same kernels."""
    error: str | None = None
    hint: str | None = None


@frozen(repr=False)
class Fleet(Report):
    """fleet.json."""

    source: str
    """The model that the run folder was made from."""
    kinds: tuple[FleetKind, ...]
    schema_version: int = SCHEMA_VERSION

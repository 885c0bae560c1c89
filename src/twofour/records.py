"""READ FIRST: every record that flows through twofour, in pipeline order. Standard library only.

    source -> prune -> validate -> export -> build -> report
    Weight    PruneResult  Validation  ExportResult  BuildResult  EligibilityReport

Records are frozen; sequences in them are tuples; `None` means unknown and `()` means none.
Names of the fields are a contract for whoever reads our JSON: fields may be added, never renamed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from twofour.errors import BadInputError
from twofour.notebook import Glance

SCHEMA_VERSION = 1
LARGEST_M = 32
LARGEST_PASSED_OVER = 1024
"""Elements of an array that is no weight of its own: biases, scales, axes of small layers."""


# --- the rule -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pattern:
    """N:M: at most `n` non-zeros in every `m` consecutive weights along the reduction axis.

    Raises BadInputError unless 1 <= n < m <= 32.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 1 <= self.n < self.m <= LARGEST_M:
            raise BadInputError(
                f"pattern {self.n}:{self.m} is not an N:M pattern",
                hint=f"N:M keeps N of M weights: 1 <= N < M <= {LARGEST_M}, for example 2:4",
            )

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read "2:4"; raises BadInputError for anything else than two numbers and a colon."""
        match = re.fullmatch(r"\s*(\d{1,3})\s*:\s*(\d{1,3})\s*", text)
        if match is None:
            raise BadInputError(f"{text!r} is not an N:M pattern", hint="write it like 2:4")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternCheck:
    """What the rule says about one array along one axis (the judge is pattern.py)."""

    groups: int
    """Groups looked at, tails included."""
    violations: int
    """Groups with more than N non-zeros."""
    first_violation: tuple[int, ...] | None
    """Index, in C order of the array, of the first element of the first violating group."""
    tail: int
    """Length of the last group where the axis is no multiple of M, else 0."""

    @property
    def holds(self) -> bool:
        """No group violates the pattern."""
        return self.violations == 0


# --- reasons --------------------------------------------------------------------------------------


class ReasonCode(str, Enum):
    """Why a layer does not run sparse, or may not."""

    PATTERN_BROKEN = "PATTERN_BROKEN"
    WRONG_AXIS = "WRONG_AXIS"
    GROUPED_CONV = "GROUPED_CONV"
    DEPTHWISE_CONV = "DEPTHWISE_CONV"
    AXIS_NOT_MULTIPLE = "AXIS_NOT_MULTIPLE"
    SMALL_CHANNELS = "SMALL_CHANNELS"
    NOT_CONSTANT = "NOT_CONSTANT"
    UNSUPPORTED_OP = "UNSUPPORTED_OP"
    DTYPE = "DTYPE"
    INT8_OUTPUT_NOT_QUANTIZED = "INT8_OUTPUT_NOT_QUANTIZED"
    ZERO_POINT = "ZERO_POINT"
    SHARED_WEIGHT = "SHARED_WEIGHT"
    EXCLUDED = "EXCLUDED"
    NOT_A_LAYER = "NOT_A_LAYER"
    GUESSED = "GUESSED"
    DENSE_FASTER = "DENSE_FASTER"
    TACTIC_SKIPPED = "TACTIC_SKIPPED"
    IN_PLUGIN = "IN_PLUGIN"
    GPU_HAS_NO_SPARSE = "GPU_HAS_NO_SPARSE"
    SPARSITY_OFF = "SPARSITY_OFF"
    LOG_SILENT = "LOG_SILENT"
    LOG_CONTRADICTS = "LOG_CONTRADICTS"
    QUALIFIES = "QUALIFIES"
    """Nothing known speaks against sparse math: the reason of a plainly eligible layer."""
    NOT_EXPORTED = "NOT_EXPORTED"
    """Pruning knows the layer, and no node of the exported graph is of it."""
    PICKED_AT_RUN_TIME = "PICKED_AT_RUN_TIME"
    """Another matrix of a stored stack is the weight in every run, as with experts."""
    NOT_CHECKED = "NOT_CHECKED"
    """The validation has no row for this weight, so nothing is known of its pattern."""
    NOT_LISTED = "NOT_LISTED"
    """The builder printed its list of eligible layers, and this one is not in it."""
    NO_SPARSE_TACTIC = "NO_SPARSE_TACTIC"
    """The builder timed kernels for an eligible layer, and none of them was sparse."""
    DENSE_TAKEN = "DENSE_TAKEN"
    """The builder took a dense kernel for an eligible layer; no times of both are in the log."""
    FUSED_SIBLINGS = "FUSED_SIBLINGS"
    """It runs as one engine layer with others that read the same input (horizontal fusion)."""
    SPARSITY_FORCED = "SPARSITY_FORCED"
    """trtexec overwrote the weights, so the log says nothing about those of the model."""
    FOLDED = "FOLDED"
    """No layer of the engine holds the node: folded into a constant, or fused or left out."""


LEFT_DENSE_BY_SHAPE = frozenset(
    {ReasonCode.GROUPED_CONV, ReasonCode.DEPTHWISE_CONV, ReasonCode.AXIS_NOT_MULTIPLE}
)
"""What pruning leaves dense unless it is asked for, and gates do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason: its code, a sentence with the numbers of this layer, and what it rests on."""

    code: ReasonCode
    message: str
    source: str | None = None
    """The rule's document, the log line with its number, or None where the message says it all."""


# --- what could be sparse -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight of one layer, in a torch module or in an ONNX graph.

    A layer whose weight is computed at run time has `weight=None` and a NOT_CONSTANT reason.
    """

    layer: str
    """Module path ("encoder.0.fc1"); the ONNX node name where no module is known."""
    node: str | None
    """ONNX node name; None in a torch module."""
    weight: str | None
    """state_dict key, or the name of the ONNX initializer or Constant output."""
    op: str
    """ONNX: Conv, ConvTranspose, Gemm, MatMul, Einsum. torch: name of the class, such as Linear."""
    shape: tuple[int, ...]
    """Of the array as it is stored."""
    axis: int | None
    """Reduction axis of the stored array; None where it has none."""
    groups: int
    """Convolution groups; 1 for everything else."""
    in_channels: int
    """C: the whole reduction width, all groups together (1x1 kernel position)."""
    out_channels: int
    """K."""
    kernel: tuple[int, ...]
    """Spatial kernel; () for a matrix product."""
    dtype: str
    """Of the stored array, numpy's name ("float32", "bfloat16", "int8", "float8_e4m3fn")."""
    math_dtype: str
    """What the layer computes in: the stored type behind Cast and Quantize/DequantizeLinear."""
    output_quantized: bool | None = None
    """For int8 math: whether the layer's output is quantised again; None elsewhere."""
    trace: tuple[str, ...] = ()
    """ONNX: the op types between the node and the constant, from the node's side."""
    tied_to: tuple[str, ...] = ()
    """Other layers (module paths or node names) that use the same stored array."""
    looked_up_by: tuple[str, ...] = ()
    """Those of them that take rows of the array as a table: embeddings, Gather nodes."""
    reasons: tuple[Reason, ...] = ()
    """What the module or graph alone says against sparse math in this layer."""

    @property
    def is_depthwise(self) -> bool:
        """One input channel per group."""
        return self.groups > 1 and self.groups == self.in_channels


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCovered:
    """Stored arrays of more than 1,024 elements that no row names, by what uses them."""

    op: str
    """ONNX op type or class of the torch module, and the part of what is no factor: "Gemm bias"."""
    uses: int
    """Nodes, or modules."""
    weights: int
    """Elements of the arrays; an array with several uses counts once, under the first of them."""
    multiplies: bool
    """Whether they are, or may be, factors of a matrix product: these count in every share."""
    users: tuple[str, ...]
    """Names of the nodes or modules."""
    arrays: tuple[str, ...]
    """Names of the initializers or state_dict keys."""


# --- prune ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which weights are to be pruned; the globs match layer names (fnmatch, case-sensitive)."""

    all_layers: bool = False
    """Prune also what sparse math cannot use, as long as there is an axis to group along."""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedWeight:
    """A row of prune.json: one weight, what was done to it, and why not more."""

    weight: Weight
    pruned: bool
    zeros: int
    """Zeros in the saved array."""
    kept_magnitude: float | None
    """Sum of |w| after over sum of |w| before, 0 to 1; None where nothing was pruned."""
    reasons: tuple[Reason, ...]
    """Why it was left dense; for a pruned weight, what else the user should know."""
    held_before: bool = False
    """`pruned`, and the weight came in N:M: nothing was taken from it."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PruneResult(Glance):
    """prune.json."""

    source: str
    pattern: Pattern
    method: str
    selection: Selection
    weights: tuple[PrunedWeight, ...]
    not_covered: tuple[NotCovered, ...] = ()
    """What else the model stores: neither pruned nor judged."""
    schema_version: int = SCHEMA_VERSION


# --- validate -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCheck:
    """A row of validate.json: one weight, read back from a saved file."""

    layer: str
    node: str | None
    weight: str
    op: str
    shape: tuple[int, ...]
    axis: int
    groups_checked: int
    violations: int
    first_violation: tuple[int, ...] | None
    tail: int
    holds_along: int | None
    """Another axis along which the pattern does hold, looked for only where this one is broken."""
    required: bool
    """Whether this weight was to be pruned: a broken one fails the validation."""
    file: str = ""
    """Which of the validation's files it is from, where there are several."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Validation(Glance):
    """validate.json: the rule applied to every weight of the files that were saved."""

    files: tuple[str, ...]
    pattern: Pattern
    checks: tuple[WeightCheck, ...]
    skipped: tuple[Weight, ...] = ()
    """Weights that cannot be checked (not constant, no axis), each with its reasons."""
    not_covered: tuple[NotCovered, ...] = ()
    """What else the files store; () for safetensors, which do not say what uses an array."""
    schema_version: int = SCHEMA_VERSION

    @property
    def broken(self) -> tuple[WeightCheck, ...]:
        """The rows that make the validation fail."""
        return tuple(c for c in self.checks if c.required and c.violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """What `twofour.load_weights` put into a module."""

    path: str
    keys: tuple[str, ...]
    """state_dict keys that were filled: all that the module has."""
    tied: dict[str, str]
    """Keys that share the tensor saved under another one."""
    made_permanent: tuple[str, ...]
    """Weights that the module computed (parametrizations, weight norm, masks), plain ones now."""


# --- export ---------------------------------------------------------------------------------------


class Precision(str, Enum):
    """Type of weights and arithmetic in the ONNX graph; strongly typed builds keep it."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @classmethod
    def _missing_(cls, value: object) -> Precision | None:
        """Other words for the same: fp16, half, bf16, fp32, float."""
        known = _PRECISION_WORDS.get(str(value).strip().lower())
        return None if known is None else cls(known)


_PRECISION_WORDS = {
    **dict.fromkeys(("float32", "fp32", "f32", "float", "single", "full"), "float32"),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicAxis:
    """An axis of an input whose size stays free in the file; one name is one size."""

    input: str
    axis: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRange:
    """What a free size of an ONNX file may be: from the module, written into the file."""

    name: str
    """Of the dimensions that have it."""
    min: int
    max: int | None
    """None: no limit is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How a torch module becomes an ONNX file; the same for the dense and the sparse one."""

    precision: Precision = Precision.FLOAT32
    opset: int | None = None
    """None: what torch takes by default, and 22 for bfloat16."""
    dynamic_batch: bool = True
    """Axis 0 of every input that has the batch there is the dimension `batch`."""
    dynamic: tuple[DynamicAxis, ...] = ()
    """What else stays free."""
    ranges: tuple[SizeRange, ...] = ()
    """Of the free sizes, as far as known: written into the file, and told to torch.export."""
    input_names: tuple[str, ...] | None = None
    output_names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerName:
    """Which module and parameter a weight of the ONNX file comes from."""

    layer: str
    parameter: str
    """state_dict key."""
    node: str
    initializer: str
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """layers.json: keyed by initializer and node name of the ONNX files beside it."""

    layers: tuple[LayerName, ...]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputAgreement:
    """One output of two programs that were given the same inputs."""

    # an overflow is an infinite error, and JSON has no word for it
    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_inf_nan": "strings"}

    output: str
    shape: tuple[int, ...]
    max_abs_error: float
    cosine: float
    """Over the whole output, flattened; 1.0 where both are zero everywhere."""
    row_cosine_mean: float
    """Mean over the first axis (the batch) of the cosine of each row."""
    row_cosine_min: float
    """Cosines leave out what is not finite; NaN where nothing is left to compare."""
    not_finite: int = 0
    """Values that are NaN or infinity in one of the two, or in both."""
    bound: float | None = None
    """Largest max_abs_error that is accepted, in units of the output; None: not judged."""
    equal: float | None = None
    """Share of equal values, 0 to 1, of whole numbers, booleans and texts, which have no cosine;
    None for an output of floats."""

    @property
    def within(self) -> bool:
        """The error is not above its bound."""
        return self.bound is None or self.max_abs_error <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """One ONNX file (its weights may lie in `<name>.data` beside it)."""

    variant: str
    """"dense" or "sparse"."""
    file: str
    size_bytes: int
    """Graph and external data together."""
    agreement: tuple[OutputAgreement, ...]
    """ONNX Runtime against the torch module; () where neither can run it here."""
    not_compared: str | None = None
    """Why `agreement` is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """An input or output of an ONNX model; a dimension is a number or a name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def in_words(self) -> str:
        """Name and dimensions: x (batch x 3 x height x width)."""
        return f"{self.name} ({' x '.join(map(str, self.shape)) or 'scalar'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """export.json."""

    precision: Precision | None
    """None: the model came as ONNX and kept its types."""
    opset: int
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    files: tuple[ExportedFile, ...]
    pattern: Validation
    """The rule applied to sparse.onnx as it was saved."""
    ranges: tuple[SizeRange, ...] = ()
    """Of the free sizes besides the batch, by the names in `inputs`."""
    notes: tuple[str, ...] = ()
    """Sizes that were to be free and are not, each with the reason."""
    schema_version: int = SCHEMA_VERSION


# --- build ----------------------------------------------------------------------------------------


class EngineName(str, Enum):
    """The engines there are."""

    TENSORRT = "tensorrt"
    ONNXRUNTIME = "onnxruntime"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Whether an engine can run on this machine, established by trying."""

    engine: EngineName
    version: str | None
    can_run: bool
    why_not: str | None
    hint: str | None = None
    device: str | None = None
    """What it runs on: a GPU's name or "CPU"."""

    @property
    def in_words(self) -> str:
        """Name, version and device of an engine that can run."""
        return f"{self.engine.value} {self.version} on {self.device}"


FIRST_WITH_SPARSE = (8, 0)
"""Compute capability from which tensor cores run 2:4 (TensorRT developer guide)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU, as its driver describes it."""

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    driver: str | None

    @property
    def has_sparse_tensor_cores(self) -> bool:
        """Whether it can run 2:4 at all."""
        return self.compute_capability >= FIRST_WITH_SPARSE


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeProfile:
    """Smallest, usual and largest shape of one input (a TensorRT optimization profile)."""

    input: str
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


class AllowedType(str, Enum):
    """What a weakly typed builder (TensorRT before 11) may run float32 layers in."""

    FP16 = "fp16"
    INT8 = "int8"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What both builds, dense and sparse, are given alike."""

    shapes: tuple[ShapeProfile, ...] = ()
    workspace_bytes: int | None = None
    optimization_level: int | None = None
    tf32: bool = True
    allow: tuple[AllowedType, ...] = ()
    """Not empty: the network is weakly typed, even where this TensorRT has strong typing."""
    iterations: int = 10
    """Timed runs after the warm-up."""
    warmup: int = 2
    threads: int | None = None
    """ONNX Runtime on the CPU: threads inside an operator; None: every core of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Mean time of one engine layer or node over the profiled runs."""

    name: str
    mean_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantLatency:
    """End-to-end times of one variant; all statistics derive from `samples_ms`."""

    name: str
    samples_ms: tuple[float, ...]
    median_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    throughput: float | None
    """Runs per second at the median."""
    peak_memory_bytes: int | None
    error: str | None = None
    threads: int | None = None
    """CPU threads that were used; None on a GPU."""
    timing: str | None = None
    """What one sample spans, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTry:
    """A try of an engine that ended its process; a lower optimization level was tried next."""

    doing: str
    """"loading dense.onnx", say."""
    level: str
    """Optimization level: ALL or EXTENDED of ONNX Runtime, 0 to 5 of TensorRT."""
    ending: str
    """The signal (SIGSEGV), the exit code, or that there was no sign of life."""
    passing: bool
    """It may go well another time (memory ran out, say): what came of it is not used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantBuild:
    """One engine: what it was built from, the files it left, how long its runs took."""

    variant: str
    """"dense" (sparse weights not allowed) or "sparse" (allowed)."""
    onnx: str
    sparse_weights: bool
    """Whether the builder was allowed to use sparse kernels."""
    providers: tuple[str, ...]
    """ONNX Runtime: the providers in use, as the session reports them."""
    build_s: float
    size_bytes: int | None
    """Of the plan; None where the engine keeps none."""
    plan: str | None
    log: str | None
    layers: str | None
    profile: str | None
    latency: VariantLatency
    failed_tries: tuple[FailedTry, ...] = ()
    """Before this result; with `latency.error`, the last of them is that error."""
    level: str | None = None
    """Optimization level it was built at where that is not the usual one."""


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
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtexecVariant:
    """One engine that trtexec builds elsewhere: its command, and the files that it leaves."""

    variant: str
    """"dense" (sparse weights not allowed) or "sparse" (allowed)."""
    sparse_weights: bool
    arguments: tuple[str, ...]
    """Of trtexec, without the program."""
    plan: str
    log: str
    """Standard output and error: build, times and per-layer profile."""
    layers: str | None
    """None: this TensorRT has no layer information."""
    profile: str
    times: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtexecRounds:
    """How the script times the engines, once both are built: round by round, each in every round.

    A pass leaves `<folder>/<engine>.<round>.json` (trtexec's --exportTimes) and a `.log` beside it.
    """

    folder: str
    engines: tuple[str, ...]
    """Names of variants; with "-again" behind, the same plan a second time in the round."""
    rounds: int
    """Unless ROUNDS says another number."""
    arguments: tuple[str, ...]
    """Of trtexec in every pass, without those that name the engine and the file of its times."""
    warmup_ms: int
    duration_ms: int
    """Of a pass, behind the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtexecFolder:
    """emitted.json: a folder that is built on another machine and reported on here."""

    source: str
    """The ONNX file it was made from, as the user named it."""
    twofour_version: str
    tensorrt: str
    """Which TensorRT releases the commands are for, in words."""
    onnx: str
    script: str
    layer_map: str | None
    """A LayerMap from the run folder that the model came from."""
    options: BuildOptions
    """As asked for; `shapes` are those of the commands."""
    variants: tuple[TrtexecVariant, ...]
    rounds: TrtexecRounds | None = None
    """None: the script builds and does not time in rounds."""
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


# --- accuracy -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure of the user's own evaluation, for each variant."""

    name: str
    dense: float
    sparse: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """accuracy.json: what pruning did to the outputs."""

    drift: tuple[OutputAgreement, ...]
    """sparse.onnx against dense.onnx on the example inputs."""
    examples: int
    """Rows of the example inputs."""
    metrics: tuple[Metric, ...] = ()
    not_compared: str | None = None
    """Why `drift` and `metrics` are empty."""
    no_baseline: str | None = None
    """Why dense.onnx is no dense model to compare with: its weights came in N:M."""
    by_module: str | None = None
    """Why `drift` is of the torch module in float32, before and after, and not of the files."""
    schema_version: int = SCHEMA_VERSION


# --- report ---------------------------------------------------------------------------------------


class VerdictName(str, Enum):
    """What becomes of a layer's weight in the engine."""

    CHOSEN = "chosen"
    ELIGIBLE = "eligible"
    NOT_ELIGIBLE = "not-eligible"
    NOT_IN_ENGINE = "not-in-engine"
    UNKNOWN = "unknown"


class Evidence(str, Enum):
    """From a log or layer information, or from the rules."""

    MEASURED = "measured"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One node of an ONNX graph, as far as joining it with an engine needs it."""

    name: str
    """As in Weight.node: the node's name, or op type and index where it has none."""
    label: str
    """The name, preceded by the way through the subgraphs it lies in."""
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[str, ...] = ()
    """Those of `inputs` that are initializers or outputs of Constant nodes."""
    output_shape: tuple[int | None, ...] | None = None
    """Of the first output, as declared; None inside for a dimension that is no number."""
    unnamed: bool = False
    """The ONNX file gives it no name, so the builder makes one up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One layer: whether sparse math runs in it, why, and what to do."""

    layer: str
    node: str | None
    op: str
    engine_layer: str | None
    shape: tuple[int, ...]
    axis: int | None
    groups: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    dtype: str
    pattern_holds: bool | None
    verdict: VerdictName
    evidence: Evidence | None
    """None only together with the verdict `unknown`."""
    predicted: VerdictName
    reasons: tuple[Reason, ...]
    remedy: str | None
    weight: str | None = None
    """Name of the stored array; layers that share it share its weights in the totals."""
    sparse_ms: float | None = None
    """Fastest sparse tactic that the builder timed."""
    dense_ms: float | None = None
    """Fastest dense tactic."""
    profile_ms: float | None = None
    """Mean time of its engine layer in the profile of the sparse engine."""
    required: bool | None = None
    """Whether the weight was to be pruned; False: left dense on purpose; None: nothing says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EligibilitySummary:
    """Totals over the layers of the report; weights are counted once each."""

    layers: int
    chosen: int
    eligible: int
    not_eligible: int
    not_in_engine: int
    unknown: int
    weights: int
    """The whole that shares are of: weights of the layers and those that no row names."""
    weights_eligible: int
    """Weights in layers that are eligible or chosen."""
    activation_products: int
    """MatMul nodes without a constant operand: nothing to prune, not listed."""
    weights_not_covered: int = 0
    """Factors of matrix products that no row names (LSTM, ...): part of `weights`."""
    weights_elsewhere: int = 0
    """Embeddings, normalisation, biases: no factors of matrix products, no part of `weights`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfusionCell:
    """How many layers the rules judged one way and the evidence another (or the same)."""

    predicted: VerdictName
    measured: VerdictName
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """One layer whose measured verdict the rules did not foretell."""

    layer: str
    predicted: VerdictName
    measured: VerdictName
    message: str


class ShareUnit(str, Enum):
    """What a share is a share of."""

    WEIGHTS = "weights"
    MULTIPLY_ADDS = "multiply-adds"
    MILLISECONDS = "milliseconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How much of the whole runs sparse, could, and never can; the parts add up to `total`."""

    unit: ShareUnit
    total: float
    runs_sparse: float
    eligible: float
    """Eligible and not known to run sparse."""
    never: float
    """Not eligible as the model is."""
    unknown: float
    """No verdict, or one engine layer that holds layers of several verdicts."""
    other: float = 0.0
    """Milliseconds in engine layers without a weight that sparse math could use."""
    not_covered: float = 0.0
    """Factors of matrix products that no row names."""
    doubtful: float = 0.0
    """The part of `eligible` that runs dense or that something speaks against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GainCeiling:
    """The most that sparse math could gain end to end (Amdahl's law), from one profile."""

    profile: str
    """Which profile it is computed from, in words."""
    total_ms: float
    eligible_ms: float
    """Time in layers that are eligible and run dense."""
    weighted_ms: float
    """Time in all layers with a weight that run dense, whether eligible or not."""
    eligible_gain: float
    """total / (total - eligible / 2): 1.0 is no gain."""
    weighted_gain: float
    """The same with every layer that has a weight made eligible."""
    assumption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EligibilityTotals:
    """What can still be won, and how well the rules foretold what was measured."""

    confusion: tuple[ConfusionCell, ...]
    """Layers with measured evidence and a prediction; cells without a layer are left out."""
    disagreements: tuple[Disagreement, ...]
    shares: tuple[Share, ...]
    ceilings: tuple[GainCeiling, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be computed, and why."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EligibilityReport(Glance):
    """eligibility.json."""

    model: str
    pattern: Pattern
    engine: str
    """Which engine ran, in words; the verdicts say themselves whether they are measured."""
    gpu: Gpu | None
    verdicts: tuple[Verdict, ...]
    summary: EligibilitySummary
    unmatched_engine_layers: tuple[str, ...] = ()
    """Names in the engine, its log or profile that lead to no node of the model."""
    not_covered: tuple[NotCovered, ...] = ()
    """What else the model stores, which no row names."""
    totals: EligibilityTotals | None = None
    """None in a report that is predicted alone."""
    notes: tuple[str, ...] = ()
    """What holds for the whole report: contradictions in the log, a cache that hides timings."""
    not_evidence: str | None = None
    """Why what was given about an engine proves nothing: a failed build, another model's log."""
    schema_version: int = SCHEMA_VERSION


# --- the run --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything a run can be told; what it leaves out is decided once, when the run starts."""

    pattern: Pattern = Pattern(2, 4)
    selection: Selection = Selection()
    precision: Precision | None = None
    """None: float16 for a torch module (sparse kernels need it), as it is for an ONNX file."""
    keep_float32: tuple[str, ...] = ()
    """Globs over the nodes of an ONNX file that keep float32 when its precision is changed."""
    opset: int | None = None
    dynamic_batch: bool = True
    dynamic: tuple[DynamicAxis, ...] | None = None
    """Axes of a torch model whose size stays free besides the batch; None: what the source has."""
    inputs: str | None = None
    """Path of the example inputs: .npz, or .txt for a text model."""
    input_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of random example inputs, by position, or by the names beside them."""
    input_shape_names: tuple[str, ...] = ()
    """Inputs that `input_shapes` are of, one for each; (): by position."""
    dense_reference: str | None = None
    """Model source that stands for the dense model, where `model` was fine-tuned with its mask."""
    metric: str | None = None
    """file.py:callable, called with a predict function for each variant."""
    seed: int = 0
    fresh: bool = False
    """Do every stage again, whatever is in the run folder."""
    engine: str = "auto"
    shapes: tuple[str, ...] = ()
    """TensorRT optimization profiles as text, `input=min:opt:max`."""
    build: BuildOptions = BuildOptions()


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
class ExportedVariant:
    """stages/export-<variant>.json: one ONNX file as it was written, before anything ran it."""

    variant: str
    file: str
    size_bytes: int
    reference: str | None
    """The .npz with the outputs, on the example inputs, of the module, or of the ONNX file before
    its precision was changed; None: there is nothing to compare with."""
    precision: Precision | None
    opset: int
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    layers: LayerMap
    notes: tuple[str, ...] = ()
    """What a change of precision did to an ONNX file; which sizes of a module stay fixed."""
    changed: tuple[str, ...] = ()
    """Its tensors, between the nodes of the main graph, that are half precision now."""
    dynamic: tuple[DynamicAxis, ...] = ()
    """Axes whose size is free besides the batch."""
    ranges: tuple[SizeRange, ...] = ()
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

    variant: str
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
class RunManifest:
    """run.json: what makes a folder a run folder."""

    source: str
    twofour_version: str
    stages: tuple[StageRecord, ...]
    inputs: str | None = None
    """Absolute path of the example inputs that the run was given last."""
    input_shapes: tuple[tuple[int, ...], ...] = ()
    input_shape_names: tuple[str, ...] = ()
    dense_reference: str | None = None
    """The source of dense.onnx, where it is not `source`."""
    seed: int = 0
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


# --- doctor ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPackage:
    """One package twofour uses, and what for."""

    name: str
    version: str | None
    """None: not installed."""
    needed_for: str
    install: str
    """The command that installs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What `twofour doctor` finds on this machine."""

    twofour_version: str
    python_version: str
    platform: str
    packages: tuple[InstalledPackage, ...]
    engines: tuple[EngineStatus, ...]
    gpu: Gpu | None
    schema_version: int = SCHEMA_VERSION

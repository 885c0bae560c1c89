"""Records of what build logs, layer information and profiles say.

They are facts from anyone's files: nothing here needs the model, and nothing is judged.
`None` means that the file is silent and `()` that it lists nothing.
"""

from __future__ import annotations

from enum import Enum

from twofour.records import frozen
from twofour.records.weights import Report

LOG_SCHEMA_VERSION = 1
LONGEST_RAW = 1 << 16
"""Characters of a list that are kept as printed in the log; the longest real list has 50,000."""
LONGEST_RAW_LINE = 1000


class Producer(str, Enum):
    """Which program wrote the lines of a build."""

    TRTEXEC = "trtexec"
    PYTHON = "python"
    POLYGRAPHY = "polygraphy"
    TORCH_TENSORRT = "torch-tensorrt"
    TENSORRT_LLM = "tensorrt-llm"
    ONNXRUNTIME = "onnxruntime"
    DEEPSTREAM = "deepstream"
    JETSON_INFERENCE = "jetson-inference"
    TENSORRT_RTX = "tensorrt-rtx"
    UNKNOWN = "unknown"


class SparsityFlag(str, Enum):
    """Whether the builder was allowed to use sparse kernels."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    FORCED = "forced"
    """trtexec overwrote the weights: what the log calls eligible says nothing of the model."""
    UNKNOWN = "unknown"


class SparsityKind(str, Enum):
    """Which of the two lists a (Sparsity) line is."""

    ELIGIBLE = "eligible"
    CHOSEN = "chosen"


class BuildOutcome(str, Enum):
    """How a build or run ended, as far as the log shows."""

    BUILT = "built"
    LOADED = "loaded"
    """An engine was loaded, none built."""
    FAILED = "failed"
    UNFINISHED = "unfinished"
    """No end in the log: cut, still running, or not verbose enough to say."""


class SkipReason(str, Enum):
    """Why the builder did not time a tactic."""

    WORKSPACE = "workspace"
    MEMORY = "memory"
    ERROR = "error"


class FusionKind(str, Enum):
    """What a graph optimisation did to its layers."""

    FUSED = "fused"
    MERGED = "merged"
    REMOVED = "removed"
    SWAPPED = "swapped"
    TRANSFORMED = "transformed"


@frozen
class SparsityLine:
    """One "(Sparsity) ..." message."""

    line: int
    kind: SparsityKind
    foreign_node: bool
    """It is about the layers inside one Myelin region."""
    printed_count: int | None
    """TensorRT up to 8.4 prints none."""
    names: tuple[str, ...] | None
    """The entries of its list, without the mark of a profile; None where it carries no list."""
    constituents: tuple[str, ...] | None = None
    elided: bool = False
    """The list was shortened by hand (`....`) or ends inside a name: there are more names."""
    missing: int = 0
    """How many more layers the line counts than it names, with fusions taken apart."""
    uncertain: bool = False
    """The list cannot be split with certainty: a name contains the separator or an odd bracket."""
    discarded: bool | None = False
    """The builder did not keep this pass, so its choices do not count; None: not said."""
    profiles: tuple[int, ...] = ()
    """Number of the optimization profile of every name; empty where all have the first, 0."""
    raw: str = ""
    """The text of the log from the message on, at most LONGEST_RAW characters.

    A wrapped list has a row for every line of the log, the first of them line `line`.
    """


@frozen
class Contradiction:
    """Two things the log says that cannot both be right."""

    line: int | None
    message: str


@frozen
class Tactic:
    """One kernel that was timed for a layer, at its fastest over all formats."""

    kernel: str | None
    """None: the runner prints no kernel names."""
    id: str | None
    """64 bits as 0x and sixteen digits, however the log writes them."""
    ms: float | None
    sparse: bool | None
    """Whether the kernel's name says that it is sparse; None where there is no name."""
    runner: str | None = None
    line: int = 0
    """The line with its fastest time."""
    raw: str | None = None
    """The text of `line`; kept only for a layer's fastest sparse and fastest dense kernel."""


@frozen
class TunedLayer:
    """What autotuning printed about one engine layer, or one operation inside a Myelin region."""

    name: str
    runner: str | None
    """The runner chosen last; "DLA" for what the log lists as running there."""
    tactics: tuple[Tactic, ...]
    """Fastest first."""
    best_dense_ms: float | None
    """Fastest kernel that is not sparse.

    A tactic without a kernel's name counts as neither, unless its runner has no sparse kernels.
    """
    best_sparse_ms: float | None
    runners: tuple[str, ...] = ()
    foreign_node: bool = False
    """An operation inside a Myelin region, from its table of sorted tactics."""
    eligible: bool | None = None
    chosen: bool | None = None
    kernel: str | None = None
    """Kernel of the tactic in the engine, where layer information gives its number or name."""
    cached: int = 0
    """Format combinations answered by the timing cache, as far as the log says so."""
    pruned_tactics: int = 0
    """Tactics left out by the builder's own estimate."""
    listed: bool = False
    """A Myelin region whose own (Sparsity) lists were printed while it was tuned."""
    dropped_tactics: int = 0
    """Tactics that were read and not kept, to bound memory; the fastest of each kind are kept."""


@frozen
class SkippedTactic:
    """A tactic that was not timed."""

    line: int
    layer: str | None
    id: str | None
    reason: SkipReason
    requested_bytes: int | None = None
    available_bytes: int | None = None
    raw: str = ""


@frozen
class TimingCache:
    """What the log says about the timing cache."""

    mode: str | None
    """"local", "global", or None."""
    hits: int | None = None
    cached_results: int = 0
    """Single lookups that the log reports."""
    silent_combinations: int = 0
    """Format combinations without any timing or reason, as a hit looks up to TensorRT 8."""

    @property
    def hides_timings(self) -> bool:
        """Whether some layer may have been tuned without a timing in this log."""
        return bool(self.hits or self.cached_results or self.silent_combinations)


@frozen
class Fusion:
    """Layers that became one, went away or changed their kind."""

    line: int
    kind: FusionKind
    rule: str | None
    """TensorRT's name of the optimisation."""
    layers: tuple[str, ...]
    raw: str = ""


@frozen
class RenamedLayer:
    """A layer that the ONNX parser gave another name than the node it is made of."""

    layer: str
    """TensorRT's name: that of every later line (fusions, tactics, lists)."""
    node: str


@frozen
class LayerSources:
    """The ONNX nodes that the log states for a Myelin region, or for an operation inside one."""

    layer: str
    onnx_nodes: tuple[str, ...]


@frozen
class LogMessage:
    """A warning or an error."""

    line: int
    text: str
    raw: str = ""
    """The text of `line`; where the message continues on the next line, that is a second row."""


@frozen
class EngineLayer:
    """One layer of the finished engine, from layer information."""

    name: str
    layer_type: str | None = None
    tactic_id: str | None = None
    kernel: str | None = None
    sparse: bool | None = None
    has_sparse_weights: bool | None = None
    """The weights satisfy the pattern: eligibility, not a sparse kernel."""
    parameter_type: str | None = None
    groups: int | None = None
    out_maps: int | None = None
    kernel_shape: tuple[int, ...] | None = None
    weights_type: str | None = None
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    onnx_nodes: tuple[str, ...] = ()
    """Source layers named in Metadata."""
    metadata: str | None = None


@frozen
class LayerInformation:
    """One file of layer information (or the part of a log with it)."""

    file: str
    layers: tuple[EngineLayer, ...]
    detailed: bool = True
    """False: the layers are bare names, so nothing is known of kernels or sparsity."""


@frozen
class LayerProfile:
    """Time of one engine layer over all profiled iterations."""

    name: str
    total_ms: float | None
    average_ms: float | None
    median_ms: float | None


@frozen
class Profile:
    """One per-layer profile: a file, or a table in a log."""

    iterations: int | None
    layers: tuple[LayerProfile, ...]


@frozen
class Percentile:
    """One percentile of a latency."""

    percent: float
    ms: float


@frozen
class LatencyMetric:
    """One line (or block, in TensorRT 7) of trtexec's summary."""

    name: str
    min_ms: float | None = None
    max_ms: float | None = None
    mean_ms: float | None = None
    median_ms: float | None = None
    percentiles: tuple[Percentile, ...] = ()


@frozen
class LatencySummary:
    """trtexec's performance summary."""

    throughput_qps: float | None
    metrics: tuple[LatencyMetric, ...]


@frozen
class CheckedTensor:
    """One weight that `polygraphy inspect sparsity` looked at."""

    name: str
    sparse: bool


@frozen
class AutotuningCounts:
    """How many lines of each kind there are."""

    tactic_names: int = 0
    timing_runners: int = 0
    format_combinations: int = 0
    runner_choices: int = 0
    foreign_node_tables: int = 0


@frozen
class Build:
    """One engine build, or one run of a loaded engine, in a log."""

    file: str
    first_line: int
    last_line: int
    producer: Producer
    tensorrt_version: str | None
    gpu: str | None
    compute_capability: tuple[int, int] | None
    outcome: BuildOutcome
    engine_loaded: bool = False
    """An engine was loaded from a file and none built: no option printed here belongs to it."""
    loads_engine: bool = False
    """An engine was loaded: the one that was built, or another."""
    command: str | None
    model: str | None
    sparsity: SparsityFlag
    precision: str | None
    optimization_level: int | None
    """None: the default, or not said."""
    build_s: float | None
    """Time of the builder, its passes added up; trtexec's own figure where no pass prints one."""
    eligible: tuple[str, ...] | None
    """Union by name over all passes; None: the log has no such line with names."""
    chosen: tuple[str, ...] | None
    sparsity_lines: tuple[SparsityLine, ...]
    contradictions: tuple[Contradiction, ...]
    layers: tuple[TunedLayer, ...]
    counts: AutotuningCounts
    skipped_tactics: tuple[SkippedTactic, ...]
    timing_cache: TimingCache
    fusions: tuple[Fusion, ...]
    renamed_layers: tuple[RenamedLayer, ...] = ()
    """`Registering layer: A for ONNX node: B` wherever the two names differ."""
    layer_sources: tuple[LayerSources, ...] = ()
    """`ForeignNode A metadata: [ONNX Layer: B]...` and the same of the operations in it."""
    warnings: tuple[LogMessage, ...]
    errors: tuple[LogMessage, ...]
    warning_count: int
    error_count: int
    engine_layers: tuple[EngineLayer, ...] | None
    latency: LatencySummary | None
    profile: Profile | None
    checked_tensors: tuple[CheckedTensor, ...] = ()
    workspace_wanted_bytes: int | None = None
    """Largest workspace that would have allowed more tactics."""
    dropped: int = 0

    @property
    def made_no_engine(self) -> bool:
        """Whether the build itself failed: a run may also fail after it, with a whole engine."""
        made = self.engine_loaded or self.build_s is not None or bool(self.engine_layers)
        return self.outcome is BuildOutcome.FAILED and not made


@frozen
class LogFile:
    """One input, as it was read."""

    name: str
    lines: int
    size_bytes: int
    """After decompression."""
    notes: tuple[str, ...] = ()
    """Damage that was met: a truncated archive, lines that were cut."""


@frozen(repr=False)
class BuildLog(Report):
    """Everything the given logs say, build by build in the order of the files."""

    files: tuple[LogFile, ...]
    builds: tuple[Build, ...]
    schema_version: int = LOG_SCHEMA_VERSION

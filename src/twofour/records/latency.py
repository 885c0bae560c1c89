"""The records of a latency comparison: what is compared, the samples, and what follows from them.

    CompareOptions -> ComparedVariant (settings, samples) -> LatencyRatio, NoiseFloor, LayerContrast
                   -> LatencyComparison (latency.json)

A ratio is time over time: the variant's divided by the baseline's. Below 1 the variant is faster.
"""

from __future__ import annotations

import re
from dataclasses import field
from enum import Enum

from twofour.errors import BadInputError
from twofour.records import frozen
from twofour.records.export import Host, LayerTime, OutputAgreement
from twofour.records.options import CompareOptions
from twofour.records.weights import SCHEMA_VERSION, Report

SPARSITY_OFF = "gpu-sparsity-off"
"""Mode of an engine of TensorRT with the zeros of the sparse model and no sparse kernels."""
_WORD = r"[^@:\s]+"
_NAME = re.compile(
    rf"(?P<weights>.*)@(?P<engine_mode>{_WORD}:{_WORD})(?P<again> again)?(?::b\d+)?", re.DOTALL
)


_HOST_PART = 0.5
"""Part of the GPU's time for a run; a choice, not measured."""


@frozen
class VariantSettings:
    """Everything about a variant that can change its time; two variants differ in these fields."""

    engine: str
    """onnxruntime, torch, tensorrt, torch-tensorrt, trtexec."""
    mode: str
    """cpu, eager, compile, ...: the word after the colon of --engines."""
    version: str | None
    """Version of the engine."""
    device: str
    """"CPU" or the GPU's name."""
    model: str
    """The file or model source that was loaded."""
    weights: str
    """Label of the weights: dense, sparse, or the file's stem."""
    precision: str
    """Types the layers run in, as far as known: float32, float16, int8, ..."""
    sparse_kernels: bool | None
    """Whether kernels for 2:4 weights may be used; None: the engine has none."""
    threads: int | None
    """CPU threads inside an operator; None on a GPU."""
    timing: str
    """What one sample spans, in words."""
    options: tuple[str, ...] = ()
    """Further options of the engine, name=value."""
    launches: int = 1
    """Runs in a row on a GPU, whose mean is one sample; measured, so it may differ."""
    enqueue_ms: float | None = None
    """Median host time that starting one run without a CUDA graph takes; None: not measured."""


@frozen
class ComparedVariant:
    """One variant at one batch: what it is, what it cost, its samples; or why there are none."""

    name: str
    """weights@engine:mode, then " again" for a variant's twin, then ":b8" for a sweep's batch:
    "dense@onnxruntime:cpu again:b8"."""
    samples_ms: tuple[float, ...] = ()
    """One sample for each round; fewer than the others have where the variant failed on the way."""
    median_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    throughput: float | None = None
    """Rows of the batch per second at the median; runs per second where `batch` is None."""
    peak_memory_bytes: int | None = None
    """Most resident memory of the process that this variant alone ran in, libraries included; None
    where several share one."""
    error: str | None = None
    hint: str | None = None
    can_run: bool = True
    """Whether its engine takes the model on this machine; `error` says why not."""
    batch: int | None = None
    """Length of the inputs' first axis; None: inputs without a common first axis."""
    settings: VariantSettings | None = None
    """None: it could not be opened."""
    peak_device_memory_bytes: int | None = None
    """Most GPU memory that its own loading and runs took; None on a CPU, or where nobody says."""
    size_bytes: int | None = None
    """Size of the model file or the engine."""
    open_s: float | None = None
    """Loading, compiling or building, until it could run."""
    agreement: tuple[OutputAgreement, ...] = ()
    """Agreement with the dense float32 reference, on the example inputs."""
    top1_agreement: float | None = None
    """Share of rows whose largest output is where the reference has it; None: no class scores."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The user's metric."""
    layers: tuple[LayerTime, ...] = ()
    """Mean times of the engine's layers; () where it has no profile."""

    @property
    def enqueue_ms(self) -> float | None:
        """That of its settings."""
        return None if self.settings is None else self.settings.enqueue_ms

    @property
    def is_host_bound(self) -> bool:
        """Whether starting a run takes the host above half of the GPU's time for it."""
        if self.enqueue_ms is None or self.median_ms is None:
            return False
        return self.enqueue_ms > _HOST_PART * self.median_ms


class LatencyVerdict(str, Enum):
    """What a ratio and its interval say."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference"
    """The interval reaches into the noise: the larger NoiseFloor.floor of the engines and modes of
    both at the batch; where neither has one, the baseline's."""
    UNDECIDED = "undecided"
    """Nothing is claimed: too few rounds for an interval, or what `LatencyRatio.withheld` says."""


class Withheld(str, Enum):
    """Why a ratio has no verdict although it has an interval."""

    BUSY = "the machine was busy"
    """Other processes kept too many of the cores busy while the rounds ran."""
    HALVES = "the halves of the rounds differ"
    """The difference is not in both halves of the rounds."""
    TWIN = "a twin does not show it"
    """The difference disappears with the twin of one of the two instead of it."""


@frozen
class Interval:
    """A ratio of two times of one batch, and how sure it is."""

    ratio: float
    """Mean of the middle half of the log ratios within each round, as a ratio."""
    low: float | None
    high: float | None
    """95 % bootstrap interval of `ratio`; None where rounds are too few."""
    batch: int | None = None


@frozen
class LatencyRatio(Interval):
    """Time of a variant over time of a baseline, at one batch."""

    variant: str
    baseline: str
    verdict: LatencyVerdict
    rounds: int
    """Rounds in which both ran."""
    only_sparsity: bool = True
    """They differ in nothing but the weights and whether sparse kernels may be used."""
    withheld: Withheld | None = None
    """Why the verdict is `undecided` in spite of an interval."""


@frozen
class NoiseFloor(Interval):
    """One variant, opened twice and measured twice, at one batch: the noise of its engine."""

    variant: str
    again: str
    """Name of the twin, which is in no LatencyRatio."""
    floor: float
    """How far from 1 the interval of the two reaches, as a part: 0.02 is 2 %. Ratios of
    1/(1 + floor) to 1 + floor cannot be distinguished from noise."""


@frozen
class RoundLoad:
    """What other processes took of the cores while the rounds of one batch ran."""

    other_cores: float
    """Cores that were busy, on average, with neither this program nor its variants; time that a
    hypervisor took away counts."""
    cores: int
    """Cores that this process may use; time of others on further cores does not count."""
    batch: int | None = None

    @property
    def part(self) -> float:
        """Part of the cores, 0 to 1."""
        return self.other_cores / self.cores


@frozen
class LayerContrastRow:
    """Layers of two engines that do the same part of the model."""

    layer: str
    """Name in the variant's engine; several joined with " + "."""
    baseline_layer: str
    variant_ms: float | None
    """Sum of mean times; None where only the baseline has the layer."""
    baseline_ms: float | None
    ratio: float | None
    """variant_ms / baseline_ms."""
    difference_ms: float
    """variant_ms - baseline_ms, a missing layer counted as 0."""


@frozen
class LayerContrast:
    """Two profiles matched layer by layer, largest absolute difference first."""

    variant: str
    baseline: str
    variant_ms: float
    """Sum over the variant's layers; profiling itself makes it larger than a run."""
    baseline_ms: float
    rows: tuple[LayerContrastRow, ...]


@frozen
class Clocks:
    """The machine's clocks at one moment; None where they cannot be read."""

    cpu_mhz: float | None = None
    """Mean over the cores."""
    cpu_governor: str | None = None
    gpu_sm_mhz: int | None = None
    gpu_memory_mhz: int | None = None
    gpu_temperature_c: int | None = None
    gpu_throttled: str | None = None
    """Why the driver lowers the clocks, in words; None: it does not, or does not say."""
    load_average: float | None = None
    """Runnable processes over the last minute."""


@frozen
class Machine(Host):
    """Where a comparison was measured."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int | None
    packages: tuple[str, ...]
    """name==version of what can change a time."""
    start: Clocks
    end: Clocks | None


@frozen(repr=False)
class LatencyComparison(Report):
    """latency.json."""

    source: str
    """The run folder or the files, as the user named them."""
    baseline: str
    """Name of the baseline, without the batch of a sweep."""
    machine: Machine | None
    """None: measured by trtexec elsewhere."""
    options: CompareOptions
    variants: tuple[ComparedVariant, ...]
    ratios: tuple[LatencyRatio, ...]
    """Every variant over the baseline; then sparse over dense within every other engine."""
    noise: tuple[NoiseFloor, ...]
    """The baseline's for every batch; then those of the first weights in every other engine and
    mode in which two weights were compared. () where nothing ran twice."""
    loads: tuple[RoundLoad, ...] = ()
    """Load during the rounds of each batch; () where the system does not report it."""
    layers: tuple[LayerContrast, ...] = ()
    partial: str | None = None
    """What was not measured because it was interrupted; None: everything was."""
    files: dict[str, str] = field(default_factory=dict)
    """Models of the run folder -> their sha256; {} for files from anywhere."""
    notes: tuple[str, ...] = ()
    inputs_are: str | None = None
    """What the outputs were compared on, where these are the run's example inputs."""
    schema_version: int = SCHEMA_VERSION


@frozen
class VariantName:
    """What a variant's name says, apart from the batch of a sweep."""

    weights: str
    engine_mode: str
    """engine:mode, as --engines takes it."""
    again: bool
    """The second opening of the variant, for the noise."""


def variant_name(
    weights: str, engine: str, mode: str, *, again: bool = False, batch: int | None = None
) -> str:
    """`sparse@onnxruntime:cpu`, `dense@onnxruntime:cpu again`, `dense@onnxruntime:cpu again:b8`.

    `weights` may be any text; engine and mode are words without "@", ":" and white space, which is
    what makes the name readable from its end.
    """
    twin = " again" if again else ""
    sweep = "" if batch is None else f":b{batch}"
    return f"{weights}@{engine}:{mode}{twin}{sweep}"


def parse_variant_name(name: str) -> VariantName:
    """The inverse of `variant_name`; raises BadInputError for what is no variant's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise BadInputError(
            f"{name!r} is not the name of a variant", hint="a name looks like dense@onnxruntime:cpu"
        )
    return VariantName(
        weights=match["weights"],
        engine_mode=match["engine_mode"],
        again=match["again"] is not None,
    )


def engine_mode_of(name: str) -> str:
    """engine:mode of a variant's name."""
    return parse_variant_name(name).engine_mode


def without_batch(name: str) -> str:
    """The name as it is outside of a sweep, and as LatencyComparison.baseline has it."""
    parse_variant_name(name)
    return re.sub(r":b\d+$", "", name)

"""Engines and GPUs: what is on this machine, and what was built and run with it."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.records.options import BuildOptions, Variant
from twofour.records.weights import SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Whether an engine can run on this machine, established by trying."""

    engine: str
    version: str | None
    can_run: bool
    why_not: str | None
    hint: str | None = None
    device: str | None = None
    """What it runs on: a GPU's name or "CPU"."""

    @property
    def in_words(self) -> str:
        """Name, version and device of an engine that can run."""
        return f"{self.engine} {self.version} on {self.device}"


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
class LayerTime:
    """Mean time of one engine layer or node over the profiled runs."""

    name: str
    mean_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTry:
    """A try of an engine that ended its process."""

    doing: str
    """"loading dense.onnx", say."""
    level: str
    """Optimization level: ALL or EXTENDED of ONNX Runtime, default or 0 to 5 of TensorRT."""
    ending: str
    """The signal (SIGSEGV), the exit code, or that there was no sign of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFiles:
    """What the build of one engine leaves."""

    variant: Variant
    sparse_weights: bool
    """Whether the builder was allowed to use sparse kernels."""
    plan: str | None = None
    log: str | None = None
    layers: str | None = None
    """None: the engine has no layer information, as in old releases of TensorRT."""
    profile: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantBuild(EngineFiles):
    """One engine: what it was built from and the files it left."""

    onnx: str
    providers: tuple[str, ...] = ()
    """ONNX Runtime: the providers in use, as the session reports them."""
    build_s: float
    size_bytes: int | None = None
    """Of the plan; None where the engine keeps none."""
    error: str | None = None
    failed_tries: tuple[FailedTry, ...] = ()
    """Before this result; with `error`, the last of them is that error."""
    level: str | None = None
    """Optimization level it was built at where that is not the usual one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtexecVariant(EngineFiles):
    """One engine that trtexec builds elsewhere: its command, and the files that it leaves."""

    arguments: tuple[str, ...]
    """Of trtexec, without the program."""
    plan: str
    log: str
    """Standard output and error: build, times and per-layer profile."""
    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtexecRounds:
    """How the script times the engines: `<folder>/<engine>.<round>.json` of each pass."""

    folder: str
    engines: tuple[str, ...]
    """Names of variants; with "-again" behind, the same plan a second time in the round."""
    rounds: int
    arguments: tuple[str, ...]
    """Of trtexec in every pass, without those that name the engine and the file of its times."""
    warmup_ms: int
    duration_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtexecFolder:
    """emitted.json: a folder that is built on another machine and reported on here."""

    source: str
    """The ONNX file it was made from, as the user named it."""
    twofour_version: str
    tensorrt: str
    onnx: str
    script: str
    layer_map: str | None
    """A LayerMap from the run folder that the model came from."""
    options: BuildOptions
    """As asked for; `shapes` are those of the commands."""
    variants: tuple[TrtexecVariant, ...]
    rounds: TrtexecRounds
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPackage:
    """One package twofour uses, and what for."""

    name: str
    version: str | None
    needed_for: str
    install: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine, and the Python on it."""

    platform: str
    python_version: str
    gpu: Gpu | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Host):
    """What `twofour doctor` finds on this machine."""

    twofour_version: str
    packages: tuple[InstalledPackage, ...]
    engines: tuple[EngineStatus, ...]
    schema_version: int = SCHEMA_VERSION

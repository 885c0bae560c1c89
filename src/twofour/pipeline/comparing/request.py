"""What a variant's worker is asked to load: picklable, and enough to load it without the parent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twofour.engines.timed.protocol import OpenOptions
from twofour.pipeline.sources.source import SourceOptions
from twofour.pipeline.workers.process import WorkerProcess
from twofour.records.export import TensorShape
from twofour.records.latency import VariantSettings

_SERVICE = "twofour.pipeline.comparing.worker:Worker"


def start_worker(threads: int) -> WorkerProcess:
    """A process for one variant, whose libraries use so many threads."""
    return WorkerProcess(_SERVICE, threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRequest:
    """A torch module to build from its source, with dense or saved weights."""

    source: str
    arguments: SourceOptions
    weights: Path | None
    """Saved by the prune stage; None: those of the source."""
    input_names: tuple[str, ...]
    """Of the ONNX file, in its order, which is that of the module's arguments."""
    output_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest:
    """An INT8 file to write before it can be opened."""

    onnx: Path
    target: Path
    examples: Path
    activations: str
    """int8 (symmetric, as TensorRT takes it) or uint8 (fast on x86 CPUs)."""
    optimized: bool = True
    """Whether ONNX Runtime simplifies the graph before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """One variant to load."""

    engine: str
    mode: str
    options: OpenOptions
    model: str
    """The file or source as the settings show it."""
    precision: str
    """Of the file's graph; torch modes say their own."""
    file: Path | None = None
    """ONNX file or plan."""
    torch: TorchRequest | None = None
    sparse_kernels: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What is known of a variant once it is loaded."""

    settings: VariantSettings
    inputs: tuple[TensorShape, ...]
    size_bytes: int | None
    open_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peaks since the last `prepare`."""

    host_bytes: int | None
    device_bytes: int | None

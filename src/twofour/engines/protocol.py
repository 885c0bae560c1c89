"""What an engine is: the Protocol, what it is asked, and the model that it opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from twofour.records.export import EngineStatus, LayerTime, TensorShape, VariantBuild
from twofour.records.latency import VariantSettings
from twofour.records.options import BuildOptions, ShapeProfile, Variant

Arrays = Mapping[str, npt.NDArray[Any]]
"""Inputs or outputs of one run, by tensor name."""

Untyped: TypeAlias = Any
"""An object of a library that carries no types: TensorRT's bindings, ONNX Runtime."""


class ProgressCallback(Protocol):
    """Told what is done and how far it is; called from the builder's threads, one at a time."""

    def __call__(self, text: str, done: int, total: int | None, /) -> None:
        """`done` of `total` steps; a total of None means that it is not known."""


def no_progress(text: str, done: int, total: int | None) -> None:
    """The ProgressCallback of a caller that shows none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """One variant to build.

    The engine writes `<stem>.plan`, `.log`, `.layers.json` and `.profile.json` into `folder`, as
    far as it has them.
    """

    variant: Variant
    onnx: Path
    folder: Path
    sparse_weights: bool
    """Whether the builder may use sparse kernels."""
    options: BuildOptions
    inputs: Mapping[str, npt.NDArray[np.generic]]
    """Example inputs: shapes for profiles that were not asked for, and data for the runs."""
    timing_cache: Path | None = None
    """Read where it exists, and updated: one file for both variants saves most of the second."""
    stem: str | None = None
    """Of the file names; None: the variant."""

    def file(self, suffix: str) -> Path:
        """`<folder>/<stem><suffix>`."""
        return self.folder / f"{self.stem or self.variant}{suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """One model to load in one mode."""

    mode: str
    weights: str
    """Label of the weights, for the settings: dense, sparse, or the file's stem."""
    threads: int
    """CPU threads inside an operator."""
    model: str
    """The file or source as the settings show it."""
    precision: str
    """Of the file's graph, types joined with "+"; modes of torch say their own."""
    level: str | None = None
    """One of the engine's `open_levels`; None: the first."""
    shapes: tuple[ShapeProfile, ...] = ()
    """Smallest, usual and largest shape of every input in the comparison, for engines that are
    built for shapes."""
    file: Path | None = None
    """ONNX file or plan."""
    program: Untyped = None
    """A TorchProgram, for engines that take a torch module."""
    sparse_kernels: bool | None = None
    """What the builder of a plan was allowed; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeStatus:
    """Whether one mode of an engine can run on this machine, established by trying."""

    engine: str
    mode: str
    why_not: str | None
    """None: it can run."""
    hint: str | None = None

    @property
    def name(self) -> str:
        """engine:mode, as --engines takes it."""
        return f"{self.engine}:{self.mode}"


def mode_statuses(found: EngineStatus, modes: Sequence[str]) -> tuple[ModeStatus, ...]:
    """The status of an engine as that of each of its modes."""
    return tuple(
        ModeStatus(engine=found.engine, mode=mode, why_not=found.why_not, hint=found.hint)
        for mode in modes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way in which an engine runs a model."""

    name: str
    """The word behind `engine:`."""
    sparse_kernels: bool | None = None
    """Whether it may use kernels for 2:4 weights; None: it has no such switch."""
    needs_sparse: bool = False
    """With dense weights it would prune them, or be the same as another mode."""
    activations: str | None = None
    """It runs a file quantised to int8, with activations of this type."""
    widens_half: bool = False
    """It computes most of a graph in half precision in float32."""

    def precision_words(self, graph: str) -> str:
        """What the settings say of the types that layers run in, from those of the file's graph."""
        if self.activations is not None:
            other = "" if self.activations == "int8" else f" ({self.activations} activations)"
            return f"int8{other}"
        half = graph in {"float16", "bfloat16"}
        return f"{graph} (graph)" if self.widens_half and half else graph


class TimedModel(Protocol):
    """One model in one engine and mode, loaded, in a process of its own."""

    @property
    def settings(self) -> VariantSettings:
        """Everything about it that can change its time."""

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """Its inputs by name; a dynamic dimension is a name or "?"."""

    @property
    def size_bytes(self) -> int | None:
        """Of the file or engine it was loaded from."""

    def prepare(self, inputs: Arrays) -> None:
        """Take the inputs of the runs that follow, to the device where there is one, and run once.

        Raises BadInputError where they do not fit the model (a fixed batch, another profile) and
        BuildFailedError where it cannot run them.
        """

    def run_ms(self) -> float:
        """One run with the prepared inputs, in milliseconds of the clock that fits the device.

        Returns when the run is over. Raises BuildFailedError.
        """

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Every output by name, in the model's order. Raises as `prepare`."""

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:
        """Mean time of each layer with the prepared inputs; () where the engine has no profile."""

    def peak_device_memory_bytes(self) -> int | None:
        """Most device memory in use so far; None on a CPU or where it cannot be had."""

    def close(self) -> None:
        """Let go of it."""


class Engine(Protocol):
    """Says whether it can run, and opens models that run and are timed.

    What is known of it without loading it stands in its row of `registry.ENGINES`.
    """

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What a comparison can ask of it, the usual one first; nothing is tried."""

    @property
    def open_levels(self) -> tuple[str, ...]:
        """Optimization levels of `open`, the usual one first.

        Where one ends the process, the next is tried; (): there is no second try.
        """

    def status(self) -> EngineStatus:
        """Whether it can run on this machine, established by trying; never raises."""

    def statuses(self, modes: Sequence[str]) -> tuple[ModeStatus, ...]:
        """The same for some of its modes."""

    def open(self, request: OpenRequest) -> TimedModel:
        """Load a model.

        Raises BadInputError for a mode that there is not, MissingToolError where the mode needs
        what this machine lacks, and BuildFailedError where the model cannot run in it.
        """


class Builder(Engine, Protocol):
    """An engine that builds files; without it a run takes sessions that are open."""

    def build(self, request: BuildRequest, report: ProgressCallback) -> VariantBuild:
        """Build one variant.

        Raises BuildFailedError when no engine comes out, with what the engine said. An engine that
        was built and cannot run is returned with `error`.
        """

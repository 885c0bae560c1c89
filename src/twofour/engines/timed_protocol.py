"""What a comparison needs of a loaded model, and what it may be opened with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from twofour.engines.onnxruntime.session import LEVELS
from twofour.engines.protocol import Arrays
from twofour.records.build import LayerTime
from twofour.records.export import TensorShape
from twofour.records.latency import VariantSettings
from twofour.records.options import ShapeProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """What every variant is opened with alike."""

    weights: str
    """Label of the weights, for the settings: dense, sparse, or the file's stem."""
    threads: int
    """CPU threads inside an operator."""
    level: str = LEVELS[0]
    """Graph optimization level of ONNX Runtime."""
    shapes: tuple[ShapeProfile, ...] = ()
    """Smallest, usual and largest shape of every input in the comparison, for engines that are
    built for shapes."""


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

"""What an engine is: the Protocol, what a build is asked, and how it says its progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from twofour.records.build import EngineStatus, LayerTime, VariantBuild
from twofour.records.options import BuildOptions, EngineName

Arrays = Mapping[str, npt.NDArray[Any]]
"""Inputs or outputs of one run, by tensor name."""

Untyped: TypeAlias = Any
"""An object of a library that carries no types: TensorRT's bindings, ONNX Runtime."""


class ProgressCallback(Protocol):
    """Told what is done and how far it is; called from the builder's threads, one at a time."""

    def __call__(self, text: str, done: int, total: int | None, /) -> None:
        """`done` of `total` steps; a total of None means that it is not known."""


def say_nothing(text: str, done: int, total: int | None) -> None:
    """The ProgressCallback of a caller that shows none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """One variant to build and time.

    The engine writes `<variant>.plan`, `.log`, `.layers.json` and `.profile.json` into `folder`, as
    far as it has them.
    """

    variant: str
    onnx: Path
    folder: Path
    sparse_weights: bool
    """Whether the builder may use sparse kernels."""
    options: BuildOptions
    inputs: Mapping[str, npt.NDArray[np.generic]]
    """Example inputs: shapes for profiles that were not asked for, and data for the timed runs."""
    timing_cache: Path | None = None
    """Read where it exists, and updated: one file for both variants saves most of the second."""

    def file(self, suffix: str) -> Path:
        """`<folder>/<variant><suffix>`."""
        return self.folder / f"{self.variant}{suffix}"


class Engine(Protocol):
    """Builds a variant from ONNX, runs it and times its layers."""

    @property
    def name(self) -> EngineName:
        """Which of the engines this is."""

    def status(self) -> EngineStatus:
        """Whether it can run on this machine, established by trying; never raises."""

    def build(self, request: BuildRequest, report: ProgressCallback) -> VariantBuild:
        """Build and time one variant.

        Raises BuildFailedError when no engine comes out, with what the engine said. An engine that
        was built and cannot be timed is returned with `latency.error`.
        """

    def run(self, model: Path, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Outputs of what `build` left: the plan, or the ONNX file where an engine keeps none."""

    def profile(self, model: Path, inputs: Arrays, iterations: int) -> tuple[LayerTime, ...]:
        """Mean time of each layer over `iterations` runs, in the order the engine runs them."""

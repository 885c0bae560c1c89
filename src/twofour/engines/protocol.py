"""What an engine is: the Protocol, what it is asked, and a row for each engine there is.

A row is what has to be known of an engine before it is loaded, in this process or another.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from twofour.errors import BadInputError, BuildFailedError, MissingToolError
from twofour.packages import with_parts
from twofour.records import frozen

if TYPE_CHECKING:  # the command line reads the rows for its options
    from pathlib import Path

    from twofour.inputs.fits import Array, Arrays
    from twofour.records.export import EngineStatus, LayerTime, TensorShape, VariantBuild
    from twofour.records.latency import VariantSettings
    from twofour.records.options import BuildOptions, ShapeProfile, Variant

AUTO = "auto"
Untyped: TypeAlias = Any
"""An object of a library that carries no types: TensorRT's bindings, ONNX Runtime."""


ProgressCallback: TypeAlias = "Callable[[str, int, int | None], None]"
"""Takes what is done, and how many steps of how many; None: their number is not known.

It is called from the builder's threads, one at a time."""


def no_progress(text: str, done: int, total: int | None) -> None:
    """The ProgressCallback of a caller that shows none."""


@frozen
class BuildRequest:
    """One variant to build, and the folder that its plan, log, layers and profile go to."""

    variant: Variant
    onnx: Path
    folder: Path
    sparse_weights: bool
    """Whether the builder may use sparse kernels."""
    options: BuildOptions
    inputs: Arrays
    """Example inputs: shapes for profiles that were not asked for, and data for the runs."""
    timing_cache: Path | None = None
    """Read if it is there, and updated; one that a dense build filled may hide sparse tactics."""
    stem: str | None = None
    """Begins the file names; None: the variant."""

    def file(self, suffix: str) -> Path:
        """`<folder>/<stem><suffix>`."""
        return self.folder / f"{self.stem or self.variant}{suffix}"

    def result(self, build_s: float, error: str | None) -> VariantBuild:
        """The record of a build of TensorRT, with the names of the files that it left."""
        from twofour.records.export import VariantBuild

        def name_if_there(suffix: str) -> str | None:
            file = self.file(suffix)
            return file.name if file.is_file() else None

        return VariantBuild(
            variant=self.variant,
            onnx=self.onnx.name,
            sparse_weights=self.sparse_weights,
            build_s=build_s,
            plan=name_if_there(".plan"),
            log=name_if_there(".log"),
            layers=name_if_there(".layers.json"),
            profile=name_if_there(".profile.json"),
            error=error,
        )


@frozen
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
    """Types in the file's graph, joined with "+"; modes of torch say their own."""
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


@frozen
class Mode:
    """One way in which an engine runs a model."""

    name: str
    """The word behind `engine:`."""
    sparse_kernels: bool | None = None
    """Whether it may use kernels for 2:4 weights; None: it has no such switch."""
    needs_sparse: bool = False
    """It is only for sparse weights: it would prune dense ones, or be the same as another mode."""
    activations: str | None = None
    """It runs a file quantised to int8, with activations of this type."""
    widens_half: bool = False
    """It computes most of a graph in half precision in float32."""

    def precision_words(self, graph: str) -> str:
        """The types that layers run in, as settings say them; `graph` has those of the file."""
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
        """Size of the file or engine that it was loaded from."""

    def prepare(self, inputs: Arrays) -> None:
        """Take the inputs of the runs that follow, to the device where there is one, and run once.

        Raises BadInputError where they do not fit the model (a fixed batch, another profile) and
        BuildFailedError where it cannot run them.
        """

    def run_ms(self) -> float:
        """One run with the prepared inputs, in milliseconds of the clock that fits the device.

        The mean of `settings.launches` runs in a row. Returns when they are over. Raises
        BuildFailedError.
        """

    def outputs(self, inputs: Arrays) -> dict[str, Array]:
        """Every output by name, in the model's order. Raises as `prepare`."""

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:
        """Mean time of each layer with the prepared inputs; () where the engine has no profile."""

    def peak_device_memory_bytes(self) -> int | None:
        """Most device memory that it took so far; None on a CPU or where it cannot be had."""

    def close(self) -> None:
        """Let go of it."""


class Engine(Protocol):
    """Says whether it can run, and opens models that run and are timed.

    What is known of it without loading it stands in its row of `ENGINES`.
    """

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What a comparison can ask of it, the usual one first; nothing is tried."""

    @property
    def open_levels(self) -> tuple[str, ...]:
        """Optimization levels of `open`, the usual one first.

        Where one ends the process, the next is tried; (): there is no second try.
        """

    def status(self, mode: str | None = None) -> EngineStatus:
        """Whether it can run on this machine, established by trying; never raises.

        In this mode, or without one in the usual way.
        """

    def open(self, request: OpenRequest) -> TimedModel:
        """Load a model in one of `modes`; raises MissingToolError where this machine cannot run it,
        and BuildFailedError where the model cannot run in it.
        """


class Builder(Engine, Protocol):
    """An engine that builds files; without it a run takes sessions that are open."""

    def build(self, request: BuildRequest, report: ProgressCallback) -> VariantBuild:
        """Build one variant; raises BuildFailedError with the engine's reason when none comes out.

        An engine that was built and cannot run is returned with `error`.
        """


class EngineInput(str, Enum):
    """What an engine opens in a comparison."""

    ONNX = "an ONNX file"
    PLAN = "a plan"
    """Built from an ONNX file where there is none."""
    MODULE = "a torch module"


@frozen
class EngineRow:
    """One engine."""

    name: str
    """The word that --engine and --engines take, and records keep."""
    title: str
    code: str
    """`package.module:Class` of what meets the Engine Protocol, imported when it is used."""
    takes: EngineInput
    is_tensorrt: bool = False
    """Its builder is TensorRT: opsets, types and rules are those of its version."""
    checks_files: bool = False
    """Its sessions check the files of a run: the one that is open is timed, not a second one."""
    packages: tuple[str, ...] = ()
    """What its times and results depend on: names of `twofour.packages`."""
    leaves: tuple[str, ...] = ()
    """Suffixes of the files of a build, after the name of the variant."""

    @property
    def builds(self) -> bool:
        """Whether it can be the engine of a run, whose models are ONNX files."""
        return self.takes is not EngineInput.MODULE

    @functools.cache  # noqa: B019  # rows live as long as the process
    def engine(self) -> Engine:
        """The engine itself, one in a process."""
        made: Engine = pkgutil.resolve_name(self.code)()
        return made


ENGINES: dict[str, EngineRow] = {
    row.name: row
    for row in (
        EngineRow(
            name="tensorrt",
            title="TensorRT",
            code="twofour.engines.tensorrt.engine:TensorRtEngine",
            takes=EngineInput.PLAN,
            is_tensorrt=True,
            packages=with_parts("tensorrt", "polygraphy"),
            leaves=(".plan", ".log", ".layers.json", ".profile.json"),
        ),
        EngineRow(
            name="onnxruntime",
            title="ONNX Runtime",
            code="twofour.engines.onnxruntime.engine:OnnxRuntimeEngine",
            takes=EngineInput.ONNX,
            checks_files=True,
            packages=with_parts("onnxruntime", "onnxruntime-gpu"),
        ),
        EngineRow(
            name="torch",
            title="torch",
            code="twofour.engines.torch.engine:TorchEngine",
            takes=EngineInput.MODULE,
            packages=with_parts("torch"),
        ),
        EngineRow(
            name="torch-tensorrt",
            title="torch-tensorrt",
            code="twofour.engines.torch.engine:TorchTensorRtEngine",
            takes=EngineInput.MODULE,
        ),
    )
}
"""Every engine by name, the preferred one first: `auto` takes the first that runs, and a comparison
its baseline from it."""


def builders() -> tuple[EngineRow, ...]:
    """The engines that a run can have, the preferred one first."""
    return tuple(row for row in ENGINES.values() if row.builds)


def choose_engine(
    asked: str, status_of: Callable[[EngineRow], EngineStatus]
) -> tuple[EngineStatus, tuple[EngineStatus, ...]]:
    """The status of the engine to use, and of those that were preferred and cannot run here.

    `asked` is auto or the name of a builder; `status_of` tries one. Raises BadInputError for
    another word and MissingToolError, with the reason and what to install, when no engine that was
    asked for runs; BuildFailedError where trying one ended its process.
    """
    names = [row.name for row in builders()]
    if asked not in {AUTO, *names}:
        raise BadInputError(
            f"there is no engine {asked!r}", hint=f"choose one of {AUTO}, {', '.join(names)}"
        )
    not_used: list[EngineStatus] = []
    for row in builders():
        if asked in {AUTO, row.name}:
            status = status_of(row)
            if status.can_run:
                return status, tuple(not_used)
            not_used.append(status)
    reasons = "; ".join(f"{status.engine} cannot run here: {status.why_not}" for status in not_used)
    if any(status.crashed for status in not_used):
        raise BuildFailedError(reasons, hint="free memory, then run the same command again")
    raise MissingToolError(reasons, hint=not_used[-1].hint)

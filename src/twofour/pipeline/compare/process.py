"""A variant with a process of its own: asked from this one, and what it can do there.

A process of its own gives each variant its own peak memory and thread pools, and lets one crash
without the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twofour.engines.machine import (
    available_bytes,
    has_room_for,
    peak_resident_bytes,
    reset_peak,
)
from twofour.engines.protocol import OpenRequest, ProgressCallback
from twofour.engines.registry import EngineRow
from twofour.engines.timing import WarmModel
from twofour.errors import BuildFailedError, TwofourError
from twofour.pipeline.compare.plan import Planned, TorchRequest
from twofour.pipeline.engine_host import Tries
from twofour.pipeline.workers import WorkerProcess
from twofour.records.build import LayerTime
from twofour.records.export import OutputAgreement, TensorShape
from twofour.records.latency import VariantSettings

if TYPE_CHECKING:
    from twofour.engines.protocol import ModeStatus, TimedModel
    from twofour.engines.torch.placed import TorchProgram
    from twofour.pipeline.sources.source import LoadedModule

_SERVICE = "twofour.pipeline.compare.process:Worker"
_RUN = "run_ms"


def start_worker(threads: int) -> WorkerProcess:
    """A process for one variant, whose libraries use so many threads."""
    return WorkerProcess(_SERVICE, threads)


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
class VariantRequest:
    """One variant to load."""

    engine: EngineRow
    opening: OpenRequest
    torch: TorchRequest | None = None
    """For engines that take a module: the worker loads it and opens that."""


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


@dataclass(slots=True, kw_only=True)
class VariantProcess:
    """A variant with a process of its own, until it fails or the comparison ends."""

    planned: Planned
    process: WorkerProcess | None = None
    opened: Opened | None = None
    error: TwofourError | None = None
    """Why it cannot be measured any more."""
    agreement: tuple[OutputAgreement, ...] = ()
    top1_agreement: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    layers: tuple[LayerTime, ...] = ()
    build_s: float | None = None
    peak: Memory | None = None
    """Of the rounds that were timed last."""

    @property
    def name(self) -> str:
        """Its name, without the batch of a sweep."""
        return self.planned.name

    @property
    def runs(self) -> bool:
        """It is loaded and has not failed."""
        return self.opened is not None and self.error is None

    def open(self, request: VariantRequest, note: Callable[[str], None]) -> None:
        """Load it; a failure is kept as `error`.

        Where its process dies it is tried at the engine's lower optimization levels, and `note`
        told.
        """
        opening, levels = request.opening, request.engine.engine().open_levels

        def load(level: str | None) -> None:
            self.close()
            self.process = start_worker(opening.options.threads)
            options = replace(opening.options, level=level)
            wanted = replace(request, opening=replace(opening, options=options))
            self.opened = self.process.call("open", wanted)

        try:
            if levels:
                tries = Tries(engine=self.name, levels=levels, note=note)
                tries.until_alive(load, lambda: f"loading {opening.model}")
            else:
                load(None)
        except TwofourError as error:
            self.fail(error)

    def fail(self, error: TwofourError) -> None:
        """Note why, and let the process go."""
        self.error = error
        self.close()

    def prepare(self, inputs: Mapping[str, np.ndarray], warmup: int) -> None:
        """Take the inputs of the rounds that follow; raises TwofourError."""
        self.call("prepare", inputs, warmup)
        assert self.process is not None, "it was asked"
        self.process.forget(_RUN)

    def run_ms(self) -> float:
        """One timed run; one that hangs is ended by what those before took."""
        assert self.process is not None, "it was opened"
        return float(self.process.repeat(_RUN))

    def memory(self, *, within_s: float = math.inf) -> Memory:
        """Peaks since `prepare`; a process that does not answer within that time is ended."""
        assert self.process is not None, "it was opened"
        try:
            self.process.begin("memory")
            found: Memory = self.process.answer(within_s=within_s)
        except TwofourError:
            return Memory(host_bytes=None, device_bytes=None)
        return found

    def call(self, command: str, *arguments: object) -> Any:  # noqa: ANN401  # each command has its own
        """Ask its process."""
        assert self.process is not None, "it was opened"
        return self.process.call(command, *arguments)

    def close(self) -> None:
        """End its process."""
        if self.process is not None:
            self.process.close()
            self.process = None


def refuse_without_memory(largest_bytes: int) -> None:
    """Raise BuildFailedError where another variant as large as the largest would not fit."""
    if not has_room_for(largest_bytes):
        raise BuildFailedError(
            f"not opened: {available_bytes() / 2**30:.1f} GiB of memory are left, and the "
            f"largest variant took {largest_bytes / 2**30:.1f} GiB",
            hint="every variant stays loaded while the rounds run: name fewer with --engines",
        )


class Worker:
    """The commands; each is a method, and what it raises goes back to the parent."""

    def __init__(self, _report: ProgressCallback) -> None:
        self._loaded: WarmModel | None = None

    def open(self, request: VariantRequest) -> Opened:
        """Load the variant; everything else needs that first, `quantize` apart."""
        started = time.perf_counter()
        model = _open_variant(request)
        open_s = time.perf_counter() - started
        self._loaded = WarmModel(request.opening.model, model)
        return Opened(
            settings=model.settings,
            inputs=model.inputs,
            size_bytes=model.size_bytes,
            open_s=open_s,
        )

    def statuses(self, engine: EngineRow, modes: Sequence[str]) -> Mapping[str, ModeStatus]:
        """Which modes of an engine can run here."""
        return {status.mode: status for status in engine.engine().statuses(modes)}

    def quantize(self, request: QuantizeRequest) -> None:
        """Write an INT8 file beside the others of the comparison."""
        from twofour.export.int8 import Activations, quantize_int8
        from twofour.pipeline.sources.inputs import stored_arrays

        request.target.parent.mkdir(parents=True, exist_ok=True)
        quantize_int8(
            request.onnx,
            request.target,
            stored_arrays(request.examples),
            activations=Activations(request.activations),
            optimized=request.optimized,
        )

    def prepare(self, inputs: Mapping[str, np.ndarray], warmup: int) -> None:
        """Take the inputs of the rounds and warm up; peaks count from here."""
        reset_peak()
        self._warm.prepare(inputs, warmup)

    def run_ms(self) -> float:
        """One timed run."""
        return self._warm.run_ms()

    def outputs(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name."""
        return self._opened.outputs(inputs)

    def metric(self, reference: str, seed: int) -> dict[str, float]:
        """The user's metric, with this variant behind `predict`."""
        from twofour.pipeline.sources.metric import load_metric, predictor, run_metric

        names = [tensor.name for tensor in self._opened.inputs]
        predict = predictor(names, self._opened.outputs)
        return run_metric(load_metric(reference), predict, seed=seed)

    def check_metric(self, reference: str) -> None:
        """Import the user's metric, so that a typo is found before anything is timed."""
        from twofour.pipeline.sources.metric import load_metric

        load_metric(reference)

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:
        """Mean times of the layers."""
        return self._opened.layer_times(iterations)

    def memory(self) -> Memory:
        """Peaks since `prepare`."""
        return Memory(
            host_bytes=peak_resident_bytes(),
            device_bytes=self._opened.peak_device_memory_bytes(),
        )

    @property
    def _warm(self) -> WarmModel:
        assert self._loaded is not None, "open comes first"
        return self._loaded

    @property
    def _opened(self) -> TimedModel:
        return self._warm.model


def _open_variant(request: VariantRequest) -> TimedModel:
    """Load it with its engine.

    Raises BadInputError, MissingToolError and BuildFailedError as the engines do.
    """
    opening, torch = request.opening, request.torch
    if torch is not None:
        opening = replace(opening, program=_program(torch))
    return request.engine.engine().open(opening)


def _program(torch: TorchRequest) -> TorchProgram:
    from twofour.engines.torch.placed import TorchProgram

    loaded = _load(torch)
    return TorchProgram(
        module=loaded.module,
        args=loaded.args,
        kwargs=loaded.kwargs,
        input_names=torch.input_names,
        output_names=torch.output_names,
        source=torch.source,
    )


def _load(request: TorchRequest) -> LoadedModule:
    """The module with the weights of the source, or with those that the prune stage saved."""
    from twofour.pipeline.sources.onnx import OnnxSource
    from twofour.pipeline.sources.open import open_source
    from twofour.pipeline.torch_model import TorchModel

    source = open_source(request.source, request.arguments)
    assert not isinstance(source, OnnxSource), "planned only for torch sources"
    model = TorchModel(source, lambda _note: None)
    return model.dense() if request.weights is None else model.pruned(request.weights)

"""An engine of ten lines of work: ONNX's own reference evaluator, timed by the host's clock."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import onnx
from onnx.reference import ReferenceEvaluator

from twofour.engines.protocol import (
    BuildRequest,
    Mode,
    OpenRequest,
    ProgressCallback,
)
from twofour.inputs.fits import Arrays
from twofour.records.export import EngineStatus, LayerTime, TensorShape, VariantBuild
from twofour.records.latency import VariantSettings

NAME = "toy"


class ToyEngine:
    """Meets the Engine Protocol."""

    modes = (Mode(name="plain"), Mode(name="sparse-only", needs_sparse=True))
    open_levels: tuple[str, ...] = ()

    def status(self, mode: str | None = None) -> EngineStatus:  # noqa: ARG002  # all need the same
        return EngineStatus(
            engine=NAME, version=onnx.__version__, can_run=True, why_not=None, device="CPU"
        )

    def build(self, request: BuildRequest, report: ProgressCallback) -> VariantBuild:
        report("reading", 1, 1)
        request.file(".toy").write_bytes(request.onnx.read_bytes())
        return VariantBuild(
            variant=request.variant,
            onnx=request.onnx.name,
            sparse_weights=False,
            build_s=0.5,
            size_bytes=request.file(".toy").stat().st_size,
        )

    def open(self, request: OpenRequest) -> ToyModel:
        return ToyModel(request)


class ToyModel:
    """Meets TimedModel."""

    size_bytes = None

    def __init__(self, request: OpenRequest) -> None:
        assert request.file is not None
        graph = onnx.load(request.file).graph
        self._run = ReferenceEvaluator(str(request.file))
        self._inputs: Arrays = {}
        self.inputs = tuple(
            TensorShape(
                name=value.name,
                dtype="float32",
                shape=tuple(
                    dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim
                ),
            )
            for value in graph.input
        )
        self.settings = VariantSettings(
            engine=NAME,
            mode=request.mode,
            version=onnx.__version__,
            device="CPU",
            model=request.model,
            weights=request.weights,
            precision=request.precision,
            sparse_kernels=None,
            threads=1,
            timing="one run",
        )

    def prepare(self, inputs: Arrays) -> None:
        self._inputs = inputs
        self.run_ms()

    def run_ms(self) -> float:
        started = time.perf_counter()
        self.outputs(self._inputs)
        return (time.perf_counter() - started) * 1e3

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        found = self._run.run(None, dict(inputs))
        return dict(zip(self._run.output_names, found, strict=True))

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:  # noqa: ARG002  # as every model
        return ()

    def peak_device_memory_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        pass


class LateEngine(ToyEngine):
    """One that knows how its runs are timed once it has run, as on a GPU."""

    def open(self, request: OpenRequest) -> ToyModel:
        return LateModel(request)


class LateModel(ToyModel):
    def prepare(self, inputs: Arrays) -> None:
        super().prepare(inputs)
        rows = len(inputs["x"])
        self.settings = replace(self.settings, timing="late", launches=3, enqueue_ms=float(rows))

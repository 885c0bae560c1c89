"""Running a TensorRT plan: buffers, streams and the CUDA runtime."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from twofour.engines.inputs import fit_inputs, numpy_dtype
from twofour.engines.protocol import Arrays, Untyped
from twofour.engines.tensorrt.log import MessageLog, build_failed, failures_named
from twofour.errors import BadInputError
from twofour.records.build import LayerTime
from twofour.records.export import TensorShape

_SEARCHED = "LD_LIBRARY_PATH"


def cuda_runtime_folders(search: list[str] | None = None) -> tuple[Path, ...]:
    """Folders of CUDA runtime wheels (nvidia/cu13/lib and its kin) on Python's path."""
    roots = [Path(entry, "nvidia") for entry in (sys.path if search is None else search) if entry]
    found = (library.parent for root in roots for library in root.glob("cu*/lib/libcudart.so*"))
    return tuple(sorted(set(found)))


def load_cuda_runtime() -> None:
    """Load libcudart through Polygraphy, with the wheels' folders searched last.

    Polygraphy reads the variable once, when it loads the library; it is put back after. Raises
    what Polygraphy raises (OSError where there is no such library).
    """
    from polygraphy import cuda

    before = os.environ.get(_SEARCHED)
    parts = [*filter(None, [before]), *map(str, cuda_runtime_folders())]
    os.environ[_SEARCHED] = os.pathsep.join(parts)
    try:
        cuda.wrapper()
    finally:
        if before is None:
            del os.environ[_SEARCHED]
        else:
            os.environ[_SEARCHED] = before


class LoadedPlan:
    """An engine with one execution context; use it inside the `build_log` given as `log`.

    Raises BuildFailedError where the plan cannot be deserialized (another TensorRT or GPU built it)
    or no context can be created.
    """

    def __init__(self, trt: ModuleType, plan: Path, log: MessageLog) -> None:
        from polygraphy.backend.trt import EngineFromBytes, TrtRunner

        self._trt = trt
        self._plan = plan
        self._log = log
        try:
            content = plan.read_bytes()
        except OSError as error:
            raise BadInputError(f"cannot read {plan}: {error.strerror or error}") from error
        with failures_named(f"TensorRT cannot load {plan}", log):
            self.engine = EngineFromBytes(content)()
        self._runner = TrtRunner(self.engine)

    def __enter__(self) -> LoadedPlan:
        with failures_named(f"TensorRT cannot run {self._plan}", self._log):
            load_cuda_runtime()
            self._runner.activate()
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.deactivate()

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """The engine's inputs; a dynamic dimension is "?"."""
        return tuple(
            TensorShape(
                name=name,
                dtype=self._dtype_name(name),
                shape=tuple(
                    "?" if dim < 0 else int(dim) for dim in self.engine.get_tensor_shape(name)
                ),
            )
            for name in self._tensors()
            if self.engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT
        )

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Every output by name, ml_dtypes for types numpy lacks; inputs fitted by `fit_inputs`."""
        feed = {name: _bits(array) for name, array in fit_inputs(inputs, self.inputs).items()}
        with failures_named(f"TensorRT failed while running {self._plan}", self._log):
            # raw buffers: Polygraphy's own conversion knows only numpy's types
            found = self._runner.infer(feed, check_inputs=False, return_raw_buffers=True)
        return {name: self._array(name, value) for name, value in found.items()}

    def layer_information(self) -> str | None:
        """The inspector's JSON as TensorRT writes it; None where it gives none."""
        inspector = self.engine.create_engine_inspector()
        if inspector is None:
            return None
        inspector.execution_context = self._runner.context  # for dimensions of dynamic shapes
        text = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        return str(text) if text else None

    def layer_times(self, inputs: Arrays, iterations: int) -> LayerProfile:
        """Times of each layer; taken last, because profiling slows the runs that follow."""
        profiler, profile = _profiler(self._trt)
        self.outputs(inputs)
        context = self._runner.context
        context.profiler = profiler
        with failures_named(f"TensorRT failed while profiling {self._plan}", self._log):
            for _ in range(iterations):
                self._run()
        profile.runs = iterations
        return profile

    @property
    def stream(self) -> int:
        """The CUDA stream that runs are enqueued on, as a pointer."""
        return int(self._runner.stream.ptr)

    def enqueue(self) -> None:
        """Start one run with the shapes and inputs of the last `outputs`; does not wait for it."""
        if not self._runner.context.execute_async_v3(self._runner.stream.ptr):
            raise build_failed(f"TensorRT failed while running {self._plan}", self._log, "enqueue")

    def _run(self) -> None:
        self.enqueue()
        self._runner.stream.synchronize()

    def _tensors(self) -> list[str]:
        return [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]

    def _dtype_name(self, name: str) -> str:
        from polygraphy.datatype import DataType

        kind = self.engine.get_tensor_dtype(name)
        return _NAMES.get(text := str(DataType.from_dtype(kind, "tensorrt").name), text)

    def _array(self, name: str, value: Untyped) -> npt.NDArray[Any]:
        dtype = numpy_dtype(self._dtype_name(name))
        shape = tuple(value.shape)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # the buffer is Polygraphy's and is used again by the next run
        raw: npt.NDArray[Any] = np.array(value.array, copy=True).view(np.uint8).reshape(-1)
        return raw[:size].view(dtype).reshape(shape)


_NAMES = {"float8e4m3fn": "float8_e4m3fn", "boolean": "bool"}


@dataclass(slots=True)
class LayerProfile:
    """Times of each layer as TensorRT reported them, in the order of the first report."""

    times_ms: dict[str, list[float]] = field(default_factory=dict)
    runs: int = 0

    def layers(self) -> tuple[LayerTime, ...]:
        """Mean ms per run of each layer."""
        return tuple(
            LayerTime(name=name, mean_ms=sum(times) / self.runs)
            for name, times in self.times_ms.items()
        )

    def to_json(self) -> str:
        """The form of trtexec --exportProfile: a count, then a row for each layer."""
        total = sum(map(sum, self.times_ms.values())) or 1.0
        rows: list[Mapping[str, object]] = [{"count": self.runs}]
        rows += [
            {
                "name": name,
                "timeMs": sum(times),
                "averageMs": sum(times) / self.runs,
                "medianMs": statistics.median(times),
                "percentage": 100 * sum(times) / total,
            }
            for name, times in self.times_ms.items()
        ]
        return json.dumps(rows, indent=1) + "\n"


def _profiler(trt: ModuleType) -> tuple[Any, LayerProfile]:
    """A trt.IProfiler, to be kept while it is attached, and the record it fills."""
    profile = LayerProfile()

    class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]  # bindings have no types
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            profile.times_ms.setdefault(layer_name, []).append(ms)

    return Profiler(), profile


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Types that numpy lacks as unsigned integers of the same size: only the bytes are copied."""
    return (
        array.view(np.dtype(f"uint{8 * array.dtype.itemsize}"))
        if array.dtype.kind == "V"
        else array
    )

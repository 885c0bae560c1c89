"""The embedded default engine: ONNX Runtime on the CPU, or a GPU where its CUDA provider loads."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from twofour.engines.gpu import find_gpu
from twofour.engines.inputs import at_shapes, fit_inputs, numpy_dtype
from twofour.engines.latency import latency_of, no_latency, time_runs
from twofour.engines.ort_values import from_ort_value, to_ort_value
from twofour.engines.protocol import Arrays, BuildRequest, ProgressCallback, Untyped
from twofour.engines.shapes import check_shapes, opt_shapes
from twofour.errors import BadInputError, BuildFailedError
from twofour.records import (
    BuildOptions,
    EngineName,
    EngineStatus,
    LayerTime,
    TensorShape,
    VariantBuild,
    VariantLatency,
)

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
HINT = "pip install onnxruntime (or onnxruntime-gpu, exactly one of the two)"
_TIMING = "one session.run from host arrays to host arrays"
_NO_MESSAGES = 4  # ONNX Runtime's severities: 4 is fatal
_KERNEL_TIME = "_kernel_time"
_OUTSIDE_NUMPY = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}


class CannotRunError(BuildFailedError):
    """A valid model that this machine's ONNX Runtime has no kernel for."""


class OrtSession:
    """One loaded ONNX model: its outputs and times, from a single session.

    `threads` of None takes every core this process may use. Raises BadInputError where the file is
    missing, CannotRunError where a kernel is, and BuildFailedError where ONNX Runtime refuses the
    model.
    """

    def __init__(
        self, model: Path, *, threads: int | None = None, profile_prefix: Path | None = None
    ) -> None:
        if not model.is_file():
            raise BadInputError(f"cannot read {model}: no such file")
        self.model = model
        self.threads = threads or usable_cores()
        started = time.perf_counter()
        with _errors_named(f"ONNX Runtime cannot load {model}"):
            self._session = _open(model, self.threads, profile_prefix)
        self.load_s = time.perf_counter() - started

    def __enter__(self) -> OrtSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the session; nothing can be run after."""
        self._session = None

    @property
    def providers(self) -> tuple[str, ...]:
        """The providers in use: what was asked for may have been left out silently."""
        return tuple(self._session.get_providers())

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """The model's inputs; an unnamed dynamic dimension is "?"."""
        return tuple(map(_tensor_shape, self._session.get_inputs()))

    @property
    def output_shapes(self) -> tuple[TensorShape, ...]:
        """The model's outputs, likewise."""
        return tuple(map(_tensor_shape, self._session.get_outputs()))

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Every output by name, for inputs fitted by `fit_inputs` (BadInputError as there)."""
        return self._run(fit_inputs(inputs, self.inputs))

    def measure(self, variant: str, inputs: Arrays, options: BuildOptions) -> VariantLatency:
        """Time runs from host arrays to host arrays, at the opt shapes where `options` has some.

        A model that fails while it runs gives a record with `error`.
        """
        check_shapes(options.shapes, self.inputs)
        feed = fit_inputs(at_shapes(inputs, opt_shapes(options.shapes)), self.inputs)
        try:
            samples = time_runs(lambda: self._run(feed), options)
        except BuildFailedError as error:
            return no_latency(variant, error.message)
        threads = self.threads if self.providers == (CPU,) else None
        return latency_of(variant, samples, timing=_TIMING, threads=threads)

    def end_profiling(self) -> Path:
        """The file of ONNX Runtime's events; only with `profile_prefix`."""
        return Path(self._session.end_profiling())

    def _run(self, feed: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        tensors = self.output_shapes
        names = [tensor.name for tensor in tensors]
        with _errors_named(f"ONNX Runtime failed while running {self.model}"):
            if _OUTSIDE_NUMPY.isdisjoint(tensor.dtype for tensor in (*self.inputs, *tensors)):
                return dict(zip(names, self._session.run(names, feed), strict=True))
            wrapped = {name: to_ort_value(array) for name, array in feed.items()}
            values = self._session.run_with_ort_values(names, wrapped)
            return {
                tensor.name: from_ort_value(value, numpy_dtype(tensor.dtype))
                for tensor, value in zip(tensors, values, strict=True)
            }


class OnnxRuntimeEngine:
    """Meets the Engine Protocol; what it builds is a session, so no plan or log is left."""

    @property
    def name(self) -> EngineName:
        """EngineName.ONNXRUNTIME."""
        return EngineName.ONNXRUNTIME

    def status(self) -> EngineStatus:
        """Whether a session can be made here, and on which device."""
        try:
            import onnxruntime as ort
        except (ImportError, OSError) as error:
            why = f"onnxruntime cannot be imported: {_first_line(error)}"
            return _status(None, why_not=why, hint=HINT)
        try:
            providers = _try_providers()
        except Exception as error:  # noqa: BLE001  # doctor reports whatever keeps it from running
            return _status(ort.__version__, why_not=_first_line(error), hint=HINT)
        gpu = find_gpu() if CUDA in providers else None
        return _status(ort.__version__, device=gpu.name if gpu else "CPU")

    def build(self, request: BuildRequest, report: ProgressCallback) -> VariantBuild:
        """Load the model and time it; a model without a kernel here gets `latency.error`."""
        report("loading the session", 0, 2)
        try:
            session = OrtSession(request.onnx, threads=request.options.threads)
        except CannotRunError as error:
            return _variant(
                request, build_s=0.0, latency=no_latency(request.variant, error.message)
            )
        with session:
            return self.build_from(session, request, report)

    def build_from(
        self, session: OrtSession, request: BuildRequest, report: ProgressCallback
    ) -> VariantBuild:
        """`build` with a session that is already open and stays open."""
        report("timing", 1, 2)
        latency = session.measure(request.variant, request.inputs, request.options)
        report("timing", 2, 2)
        return _variant(
            request, build_s=session.load_s, latency=latency, providers=session.providers
        )

    def run(self, model: Path, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Outputs of the ONNX file."""
        with OrtSession(model) as session:
            return session.outputs(inputs)

    def profile(self, model: Path, inputs: Arrays, iterations: int) -> tuple[LayerTime, ...]:
        """Mean time of each node of ONNX Runtime's own, fused graph: its names, not the file's."""
        with tempfile.TemporaryDirectory() as folder:
            with OrtSession(model, profile_prefix=Path(folder, "ort")) as session:
                for _ in range(iterations):
                    session.outputs(inputs)
                events = session.end_profiling()
            return node_times(events.read_text(encoding="utf-8"), iterations)


def node_times(events: str, iterations: int) -> tuple[LayerTime, ...]:
    """Mean ms per run of each node in ONNX Runtime's profiling JSON, in order of execution."""
    total_us: dict[str, float] = {}
    for event in json.loads(events):
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_KERNEL_TIME):
            node = name[: -len(_KERNEL_TIME)]
            total_us[node] = total_us.get(node, 0.0) + float(event["dur"])
    return tuple(
        LayerTime(name=name, mean_ms=us / 1e3 / iterations) for name, us in total_us.items()
    )


def usable_cores() -> int:
    """Cores this process may use, containers and affinity regarded where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _open(model: Path | bytes, threads: int, profile_prefix: Path | None = None) -> Untyped:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = _NO_MESSAGES
    options.intra_op_num_threads = threads
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile_prefix)
    source = model if isinstance(model, bytes) else str(model)
    if CUDA not in ort.get_available_providers() or find_gpu() is None:
        return ort.InferenceSession(source, options, providers=[CPU])
    # a CUDA provider that cannot load says so on both streams and is then left out
    ort.set_default_logger_severity(_NO_MESSAGES)
    with contextlib.redirect_stdout(io.StringIO()):
        if hasattr(ort, "preload_dlls"):  # from 1.21: takes CUDA's libraries from pip wheels
            ort.preload_dlls()
        return ort.InferenceSession(source, options, providers=[CUDA, CPU])


def _try_providers() -> tuple[str, ...]:
    from onnx import TensorProto, helper

    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "probe", tensors[:1], tensors[1:]
    )
    opset = helper.make_opsetid("", 14)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=7)
    session = _open(model.SerializeToString(), 1)
    session.run(None, {"x": np.ones(1, np.float32)})
    return tuple(session.get_providers())


@contextlib.contextmanager
def _errors_named(what: str) -> Iterator[None]:
    """ONNX Runtime's exceptions (direct children of Exception) as ours, with its own words."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kinds = (
        state.EPFail,
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NoSuchFile,
        state.RuntimeException,
        RuntimeError,
    )
    try:
        yield
    except state.NotImplemented as error:
        raise CannotRunError(f"{what}: {_first_line(error)}") from error
    except kinds as error:
        raise BuildFailedError(f"{what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _tensor_shape(argument: Untyped) -> TensorShape:
    # "tensor(float8e4m3fn)" -> "float8_e4m3fn", "tensor(float)" -> "float32"
    kind = str(argument.type).removeprefix("tensor(").removesuffix(")")
    kind = {"float": "float32", "double": "float64"}.get(kind, kind)
    return TensorShape(
        name=str(argument.name),
        dtype=kind.replace("float8e", "float8_e"),
        shape=tuple("?" if dim is None else dim for dim in argument.shape),
    )


def _status(
    version: str | None,
    *,
    why_not: str | None = None,
    hint: str | None = None,
    device: str | None = None,
) -> EngineStatus:
    return EngineStatus(
        engine=EngineName.ONNXRUNTIME,
        version=version,
        can_run=why_not is None,
        why_not=why_not,
        hint=hint,
        device=device,
    )


def _variant(
    request: BuildRequest,
    *,
    build_s: float,
    latency: VariantLatency,
    providers: tuple[str, ...] = (),
) -> VariantBuild:
    return VariantBuild(
        variant=request.variant,
        onnx=request.onnx.name,
        sparse_weights=False,  # ONNX Runtime's own providers have no sparse kernels to allow
        providers=providers,
        build_s=build_s,
        size_bytes=None,
        plan=None,
        log=None,
        layers=None,
        profile=None,
        latency=latency,
    )

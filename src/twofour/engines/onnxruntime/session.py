"""ONNX Runtime sessions, and values in and out of them."""

from __future__ import annotations

import contextlib
import ctypes
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from twofour.engines.gpu import find_gpu
from twofour.engines.inputs import fit_inputs, numpy_dtype
from twofour.engines.machine import usable_cores
from twofour.engines.protocol import Arrays, Untyped
from twofour.errors import BadInputError, BuildFailedError, first_line
from twofour.records.export import TensorShape


def to_ort_value(array: npt.NDArray[Any]) -> Untyped:
    """The array as a value on the CPU; bfloat16 and float8 pass as their bits.

    The value may share the array's memory: keep the array until the run is over.
    """
    import onnxruntime as ort

    if array.dtype.kind != "V":
        return ort.OrtValue.ortvalue_from_numpy(array)
    from onnx import helper

    bits = array.view(np.dtype(f"uint{8 * array.dtype.itemsize}"))
    number = int(helper.np_dtype_to_tensor_dtype(array.dtype))
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, number)


def from_ort_value(value: Untyped, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A copy of a value that lies on the CPU."""
    if dtype.kind != "V":
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), dtype).reshape(shape)


CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TIMING = "one session.run from host arrays to host arrays"
NO_MESSAGES = 4  # ONNX Runtime's severities: 4 is fatal
LEVELS = ("ALL", "EXTENDED")
"""Graph optimization levels of a session, the usual one first; EXTENDED goes without the layout
changes and the last fusions, in which ONNX Runtime crashes on some float16 graphs (1.31.1)."""
HINT = "pip install onnxruntime (or onnxruntime-gpu, exactly one of the two)"
PROBE = (
    b'\x08\x07:7\n\x0c\n\x01x\x12\x01y"\x04Relu\x12\x05probe'
    b"Z\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01"
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x0e"
)
"""The smallest model that shows whether a session can run: y = Relu(x), one float32 each, opset 14.

Written out, because importing onnx to make it takes as long as starting the session."""
# Threads that wait for work by spinning take the cores from the session that runs next; this stops
# them at the end of a run and keeps what spinning gains within it (benchmarks/LOG.md).
QUIET_AFTER_RUN = {"session.force_spinning_stop": "1"}
_OUTSIDE_NUMPY = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """What every session is opened with, whatever its providers."""

    threads: int
    """Inside an operator."""
    level: str = LEVELS[0]
    """One of LEVELS."""
    profile_prefix: Path | None = None
    """Of the file with ONNX Runtime's events; None: it does not profile."""

    def options(self) -> Untyped:
        """ONNX Runtime's own object."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = NO_MESSAGES
        options.intra_op_num_threads = self.threads
        options.graph_optimization_level = getattr(
            ort.GraphOptimizationLevel, f"ORT_ENABLE_{self.level}"
        )
        for key, value in QUIET_AFTER_RUN.items():
            options.add_session_config_entry(key, value)
        if self.profile_prefix is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(self.profile_prefix)
        return options


SessionOpener: TypeAlias = Callable[[Path, SessionSetup], Untyped]


class CannotRunError(BuildFailedError):
    """A valid model that this machine's ONNX Runtime has no kernel for."""


class OrtSession:
    """One loaded ONNX model: its outputs, from a single session.

    `threads` of None takes every core this process may use, `level` is one of LEVELS, and `opener`
    of None is `open_session`.
    Raises BadInputError where the file is missing, CannotRunError where a kernel is, and
    BuildFailedError where ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        model: Path,
        *,
        threads: int | None = None,
        level: str = LEVELS[0],
        profile_prefix: Path | None = None,
        opener: SessionOpener | None = None,
    ) -> None:
        if not model.is_file():
            raise BadInputError(f"cannot read {model}: no such file")
        self.model = model
        self.threads = threads or usable_cores()
        self.level = level
        setup = SessionSetup(threads=self.threads, level=level, profile_prefix=profile_prefix)
        started = time.perf_counter()
        with errors_named(f"ONNX Runtime cannot load {model}"):
            self._session = (opener or open_session)(model, setup)
        self.load_s = time.perf_counter() - started

    def __enter__(self) -> OrtSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the session; nothing can be run after."""
        self._session = None

    @property
    def session(self) -> Untyped:
        """ONNX Runtime's own object, for what this class does not do."""
        return self._session

    @property
    def needs_values(self) -> bool:
        """An input or output has a type that numpy lacks: it goes through OrtValues."""
        tensors = (*self.inputs, *self.output_shapes)
        return not _OUTSIDE_NUMPY.isdisjoint(tensor.dtype for tensor in tensors)

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

    def end_profiling(self) -> Path:
        """The file of ONNX Runtime's events; only with `profile_prefix`."""
        return Path(self._session.end_profiling())

    def _run(self, feed: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        tensors = self.output_shapes
        names = [tensor.name for tensor in tensors]
        with errors_named(f"ONNX Runtime failed while running {self.model}"):
            if not self.needs_values:
                return dict(zip(names, self._session.run(names, feed), strict=True))
            wrapped = {name: to_ort_value(array) for name, array in feed.items()}
            values = self._session.run_with_ort_values(names, wrapped)
            return {
                tensor.name: from_ort_value(value, numpy_dtype(tensor.dtype))
                for tensor, value in zip(tensors, values, strict=True)
            }


def open_session(model: Path | bytes, setup: SessionSetup) -> Untyped:
    """A session on CUDA where a GPU is found and the provider loads, else on the CPU."""
    import onnxruntime as ort

    options = setup.options()
    source = model if isinstance(model, bytes) else str(model)
    if CUDA not in ort.get_available_providers() or find_gpu() is None:
        return ort.InferenceSession(source, options, providers=[CPU])
    # a CUDA provider that cannot load says so on both streams and is then left out
    ort.set_default_logger_severity(NO_MESSAGES)
    with contextlib.redirect_stdout(io.StringIO()):
        if hasattr(ort, "preload_dlls"):  # from 1.21: takes CUDA's libraries from pip wheels
            ort.preload_dlls()
        return ort.InferenceSession(source, options, providers=[CUDA, CPU])


@contextlib.contextmanager
def errors_named(what: str) -> Iterator[None]:
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
        raise CannotRunError(f"{what}: {first_line(error)}") from error
    except kinds as error:
        raise BuildFailedError(f"{what}: {first_line(error)}") from error


def _tensor_shape(argument: Untyped) -> TensorShape:
    # "tensor(float8e4m3fn)" -> "float8_e4m3fn", "tensor(float)" -> "float32"
    kind = str(argument.type).removeprefix("tensor(").removesuffix(")")
    kind = {"float": "float32", "double": "float64"}.get(kind, kind)
    return TensorShape(
        name=str(argument.name),
        dtype=kind.replace("float8e", "float8_e"),
        shape=tuple("?" if dim is None else dim for dim in argument.shape),
    )

"""ONNX Runtime sessions on the providers that were asked for, and values in and out of them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from twofour.engines.machine import find_gpu, usable_cores
from twofour.engines.protocol import Untyped
from twofour.errors import BadInputError, BuildFailedError, MissingToolError, first_line
from twofour.inputs.fits import Array, Arrays, fit_inputs, numpy_type
from twofour.records import frozen
from twofour.records.export import TensorShape

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
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
EXACT_INT8 = {"session.x64quantprecision": "1"}
"""Without it sums of INT8 products saturate on x86 processors that have no VNNI instructions."""
_OUTSIDE_NUMPY = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
HINTS = {
    CUDA: "pip install 'onnxruntime-gpu[cuda,cudnn]' instead of onnxruntime, on a machine with an "
    "NVIDIA GPU",
    TENSORRT: "onnxruntime-gpu from PyPI needs CUDA, cuDNN and TensorRT 10 (pip install "
    "'tensorrt-cu13<11'), on a machine with an NVIDIA GPU",
}
_ERRORS = 3  # ONNX Runtime's severities
_STDERR = 2
_LIBRARY = re.compile(r"with error: (.+)")
_COLOUR = re.compile(r"\x1b?\[[\d;]*m")
_PREFIX = re.compile(r"^\S+ \S+ \[[EW]:[^\]]*\] ")


def to_ort_value(array: Array) -> Untyped:
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


def from_ort_value(value: Untyped, dtype: np.dtype[Any]) -> Array:
    """A copy of a value that lies on the CPU."""
    if dtype.kind != "V":
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), dtype).reshape(shape)


def session_options(
    *, threads: int, level: str = LEVELS[0], profile_prefix: Path | None = None
) -> Untyped:
    """What every session is opened with, whatever its providers."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = NO_MESSAGES
    options.intra_op_num_threads = threads
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    for key, value in {**QUIET_AFTER_RUN, **EXACT_INT8}.items():
        options.add_session_config_entry(key, value)
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile_prefix)
    return options


class CannotRunError(BuildFailedError):
    """A valid model that this machine's ONNX Runtime has no kernel for, or no ONNX Runtime."""


class OrtSession(contextlib.AbstractContextManager["OrtSession"]):
    """One loaded ONNX model: its outputs, from a single session.

    `threads` of None takes every core this process may use, `level` is one of LEVELS, and without
    `providers` it is CUDA where that loads, else the CPU.
    Raises BadInputError where the file is missing, CannotRunError where a kernel or ONNX Runtime
    is, and BuildFailedError where ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        model: Path,
        *,
        threads: int | None = None,
        level: str = LEVELS[0],
        profile_prefix: Path | None = None,
        providers: ProviderSetup | None = None,
    ) -> None:
        if not model.is_file():
            raise BadInputError(f"cannot read {model}: no such file")
        self.model = model
        self.threads = threads or usable_cores()
        self.level = level
        started = time.perf_counter()
        with errors_named(f"ONNX Runtime cannot load {model}"):
            options = session_options(
                threads=self.threads, level=level, profile_prefix=profile_prefix
            )
            opened = open_session if providers is None else partial(open_on, providers)
            try:
                self.session: Untyped = opened(model, options)
                """ONNX Runtime's own object, for what this class does not do."""
            except Exception as error:  # ONNX Runtime's own kinds
                if "float8" not in str(error):
                    raise
                # ONNX Runtime 1.31.1 fuses FP8 Q/DQ nodes into INT8 operators and refuses these;
                # above "basic" (1) it also removes a Relu in front of one: outputs are wrong
                options.graph_optimization_level = type(options.graph_optimization_level)(1)
                self.session = opened(model, options)
        self.load_s = time.perf_counter() - started

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the session; nothing can be run after."""
        self.session = None

    @property
    def needs_values(self) -> bool:
        """An input or output has a type that numpy lacks: it goes through OrtValues."""
        tensors = (*self.inputs, *self.output_shapes)
        return not _OUTSIDE_NUMPY.isdisjoint(tensor.dtype for tensor in tensors)

    @property
    def providers(self) -> tuple[str, ...]:
        """The providers in use: what was asked for may have been left out silently."""
        return tuple(self.session.get_providers())

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """The model's inputs; an unnamed dynamic dimension is "?"."""
        return tuple(map(_tensor_shape, self.session.get_inputs()))

    @property
    def output_shapes(self) -> tuple[TensorShape, ...]:
        """The model's outputs, likewise."""
        return tuple(map(_tensor_shape, self.session.get_outputs()))

    def bound(self, feed: Arrays) -> Callable[[], Any]:
        """A run with fitted inputs, which are to be kept until it is over; gives a list."""
        names = [tensor.name for tensor in self.output_shapes]
        if not self.needs_values:
            return partial(self.session.run, names, feed)
        values = {name: to_ort_value(array) for name, array in feed.items()}
        return partial(self.session.run_with_ort_values, names, values)

    def outputs(self, inputs: Arrays) -> dict[str, Array]:
        """Every output by name, for inputs fitted by `fit_inputs` (BadInputError as there)."""
        feed = fit_inputs(inputs, self.inputs)
        tensors = self.output_shapes
        with errors_named(f"ONNX Runtime failed while running {self.model}"):
            values = self.bound(feed)()
            if self.needs_values:
                types = [numpy_type(tensor.dtype) for tensor in tensors]
                values = map(from_ort_value, values, types)
            return dict(zip((tensor.name for tensor in tensors), values, strict=True))

    def end_profiling(self) -> Path:
        """The file of ONNX Runtime's events; only with `profile_prefix`."""
        return Path(self.session.end_profiling())


def open_session(model: Path | bytes, options: Untyped) -> Untyped:
    """A session on CUDA where a GPU is found and the provider loads, else on the CPU."""
    if find_gpu() is not None:
        with contextlib.suppress(MissingToolError, RuntimeError):
            on_cuda = ProviderSetup(providers=((CUDA, {}), (CPU, {})))
            return open_on(on_cuda, model, options)
    return open_on(ProviderSetup(), model, options)


@contextlib.contextmanager
def errors_named(what: str) -> Iterator[None]:
    """ONNX Runtime's exceptions (direct children of Exception) as ours, with its own words."""
    try:
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ImportError as error:
        raise CannotRunError(f"ONNX Runtime cannot be imported: {error}") from error

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


@frozen
class ProviderSetup:
    """Providers in order of preference, each with its options, and entries of the session."""

    providers: tuple[tuple[str, dict[str, str]], ...] = ((CPU, {}),)
    config: dict[str, str] = field(default_factory=dict)

    @property
    def wanted(self) -> str:
        """The provider that must be in use."""
        return self.providers[0][0]

    @property
    def on_gpu(self) -> bool:
        """Inputs and outputs can stay in the GPU's memory."""
        return self.wanted != CPU


def open_on(setup: ProviderSetup, model: Path | bytes, options: Untyped) -> Untyped:
    """A session in which `setup.wanted` is in use.

    Raises MissingToolError with ONNX Runtime's reason where that provider was left out.
    """
    import onnxruntime as ort

    if setup.wanted not in ort.get_available_providers():
        raise _left_out(setup.wanted, "this onnxruntime was built without it")
    for key, value in setup.config.items():
        options.add_session_config_entry(key, value)
    source = model if isinstance(model, bytes) else str(model)
    if not setup.on_gpu:
        return ort.InferenceSession(source, options, providers=list(setup.providers))
    _load_libraries(setup.wanted)
    with _stderr_kept() as stderr:
        # without enable_fallback=0 it prints the TensorRT provider's error and takes the CPU
        try:
            session = ort.InferenceSession(
                source, options, providers=list(setup.providers), enable_fallback=0
            )
        except RuntimeError as error:
            # without a driver, but with CUDA's libraries: CUDA failure 35
            if "Please install TensorRT libraries" not in str(error) and find_gpu() is not None:
                raise
            raise _left_out(setup.wanted, reason_in(stderr()) or first_line(error)) from error
        if setup.wanted not in session.get_providers():
            raise _left_out(setup.wanted, reason_in(stderr()) or "it could not be loaded")
    return session


def nodes_by_provider(session: Untyped) -> dict[str, int] | None:
    """Nodes of the model that each provider runs; None before ONNX Runtime 1.24.

    Only for a session with the entry session.record_ep_graph_assignment_info of 1.
    """
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    counts: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] += len(part.get_nodes())
    return counts


def _left_out(provider: str, reason: str) -> MissingToolError:
    if find_gpu() is None:
        reason = f"no NVIDIA GPU with a driver was found ({reason})"
    return MissingToolError(
        f"ONNX Runtime cannot use {provider}: {reason}", hint=HINTS.get(provider)
    )


def reason_in(printed: str) -> str | None:
    """The missing library, else the first line, of what ONNX Runtime logged."""
    text = _COLOUR.sub("", printed).strip()
    library = _LIBRARY.search(text)
    if library is not None:
        return library[1].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _PREFIX.sub("", lines[0]) if lines else None


def _load_libraries(provider: str) -> None:
    """Load what the provider links to from pip's wheels, where they are installed."""
    import onnxruntime as ort

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
        if hasattr(ort, "preload_dlls"):  # from 1.21
            ort.preload_dlls()
        if provider == TENSORRT:
            # the package loads libnvinfer, which the provider then finds by its name
            importlib.import_module("tensorrt")


@contextlib.contextmanager
def _stderr_kept() -> Iterator[Callable[[], str]]:
    """Keep what is written to stderr meanwhile: why a provider is left out is only logged there."""
    import onnxruntime as ort

    with tempfile.TemporaryFile(buffering=0) as file:

        def read() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        sys.stderr.flush()
        kept = os.dup(_STDERR)
        os.dup2(file.fileno(), _STDERR)
        ort.set_default_logger_severity(_ERRORS)
        try:
            yield read
        finally:
            ort.set_default_logger_severity(NO_MESSAGES)
            os.dup2(kept, _STDERR)
            os.close(kept)

"""ONNX Runtime as an engine: its modes, what each asks of a session, and a model in one."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from twofour.engines.machine import find_gpu
from twofour.engines.onnxruntime.session import (
    CPU,
    CUDA,
    HINT,
    LEVELS,
    PROBE,
    QUIET_AFTER_RUN,
    TENSORRT,
    TIMING,
    OrtSession,
    ProviderSetup,
    errors_named,
    nodes_by_provider,
    open_on,
    open_session,
    session_options,
)
from twofour.engines.protocol import Mode, OpenRequest, Untyped
from twofour.engines.tensorrt.plan import DeviceMemory
from twofour.engines.trtexec import shapes_in_words
from twofour.errors import BadInputError, BuildFailedError, MissingToolError, first_line
from twofour.inputs.fits import Array, Arrays, fit_inputs
from twofour.records.export import EngineStatus, LayerTime
from twofour.records.latency import VariantSettings
from twofour.records.options import ShapeProfile

ENGINE = "onnxruntime"
MODES = (
    Mode(name="cpu", widens_half=True),
    Mode(name="cuda"),
    Mode(name="tensorrt", sparse_kernels=False),
    Mode(name="tensorrt-sparse", sparse_kernels=True, needs_sparse=True),
    Mode(name="int8", activations="int8"),
    Mode(name="uint8", activations="uint8"),
)
_ASSIGNMENT = {"session.record_ep_graph_assignment_info": "1"}
_PRECISION_FLAGS = {
    "float16": "trt_fp16_enable",
    "bfloat16": "trt_bf16_enable",
    "int8": "trt_int8_enable",
}
_KERNEL_TIME = "_kernel_time"
_PROBE_INPUT = {"x": np.ones(1, np.float32)}
BOUND = "one run with inputs and outputs bound on the GPU, synchronized, timed on the host"


def as_timed(loaded: OrtSession, *, weights: str, precision: str) -> OrtTimedModel:
    """A session that is open already, on the provider that it is on."""
    mode = mode_of(loaded.providers)
    setup = provider_setup(mode, precision, ())
    settings = _settings(loaded, setup, mode, weights, precision)
    return OrtTimedModel(loaded, setup, settings, DeviceMemory(None))


def mode_of(providers: Sequence[str]) -> str:
    """The mode that a session is in which nobody asked for one."""
    return "cuda" if CUDA in providers else "cpu"


class OrtTimedModel:
    """Meets TimedModel; made by `OnnxRuntimeEngine.open`."""

    def __init__(
        self,
        loaded: OrtSession,
        setup: ProviderSetup,
        settings: VariantSettings,
        memory: DeviceMemory,
    ) -> None:
        self._loaded = loaded
        self._setup = setup
        self._memory = memory
        self.settings = settings
        """`options` says how the session was opened."""
        self.inputs = loaded.inputs
        self._feed: dict[str, Array] = {}
        self._run: Callable[[], object] | None = None

    @property
    def size_bytes(self) -> int | None:
        """Size of the ONNX file and its external data; None where they cannot be read as ONNX."""
        from twofour.graph.opened import open_onnx

        model = self._loaded.model
        try:
            return sum(file.stat().st_size for file in (model, *open_onnx(model).data_files))
        except (BadInputError, OSError):
            return None

    def prepare(self, inputs: Arrays) -> None:
        """Keep the inputs, on the GPU bound to its memory, and run once."""
        self._feed = fit_inputs(inputs, self._loaded.inputs)
        with self._memory.counting():
            with errors_named(f"ONNX Runtime cannot take the inputs of {self._loaded.model}"):
                self._run = self._bound()
            self.run_ms()

    def _bound(self) -> Callable[[], object]:
        """A run with the inputs that are kept."""
        if not self._setup.on_gpu:
            return self._loaded.bound(self._feed)
        binding = bind_on(self._loaded, self._feed, "cuda")
        return partial(run_bound, self._loaded.session, binding)

    def run_ms(self) -> float:
        """Host clock around one run; `settings.timing` says what that spans."""
        run = self._run
        assert run is not None, "prepare comes first"
        with errors_named(f"ONNX Runtime failed while running {self._loaded.model}"):
            started = time.perf_counter()
            run()
            finished = time.perf_counter()
        return (finished - started) * 1e3

    def outputs(self, inputs: Arrays) -> dict[str, Array]:
        """Every output by name; the prepared inputs stay prepared."""
        with self._memory.counting():
            return self._loaded.outputs(inputs)

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:
        """Mean times of the nodes of ONNX Runtime's own, fused graph, from a second session.

        () on a GPU, where ONNX Runtime times the launch of a node and not its work.
        """
        if self._setup.on_gpu:
            return ()
        with (
            tempfile.TemporaryDirectory() as folder,
            OrtSession(
                self._loaded.model,
                threads=self._loaded.threads,
                level=self._loaded.level,
                profile_prefix=Path(folder, "ort"),
                providers=self._setup,
            ) as session,
        ):
            for _ in range(iterations + 1):
                session.outputs(self._feed)
            events = session.end_profiling().read_text(encoding="utf-8")
        return node_times(events, iterations)

    def peak_device_memory_bytes(self) -> int | None:
        """What `DeviceMemory` measures; None on a CPU and without a CUDA runtime library."""
        return self._memory.peak_bytes()

    def close(self) -> None:
        """Free the session and what is bound."""
        self._run = None
        self._loaded.close()


def node_times(events: str, iterations: int) -> tuple[LayerTime, ...]:
    """Mean ms per run of each node in ONNX Runtime's profiling JSON, in order of execution.

    What came before the end of the first run, its warm-up, is left out.
    """
    # {"cat": "Node", "name": "/conv_kernel_time", "dur": 41}, ..., {"name": "model_run"}, and again
    total_us: dict[str, float] = {}
    is_warm = False
    for event in json.loads(events):
        name = str(event.get("name", ""))
        if is_warm and event.get("cat") == "Node" and name.endswith(_KERNEL_TIME):
            node = name.removesuffix(_KERNEL_TIME)
            total_us[node] = total_us.get(node, 0.0) + float(event["dur"])
        is_warm = is_warm or name == "model_run"
    return tuple(
        LayerTime(name=name, mean_ms=us / 1e3 / iterations) for name, us in total_us.items()
    )


def bind_on(loaded: OrtSession, feed: Arrays, device: str) -> Untyped:
    """A binding with the inputs copied to `device`, and outputs that stay there.

    ONNX Runtime takes the outputs' buffers from the first run for the next ones. Raises
    BadInputError for bfloat16 and float8 inputs, which numpy cannot hand over.
    """
    import onnxruntime as ort

    binding = loaded.session.io_binding()
    for name, array in feed.items():
        if array.dtype.kind == "V":
            raise BadInputError(
                f"input {name!r} is {array.dtype.name}, which cannot be put on the GPU from numpy",
                hint="export with float32 inputs, as twofour does in every precision",
            )
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, device, 0))
    for tensor in loaded.output_shapes:
        binding.bind_output(tensor.name, device)
    binding.synchronize_inputs()
    return binding


def run_bound(session: Untyped, binding: Untyped) -> None:
    """One run that is over when this returns."""
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()


def _settings(
    loaded: OrtSession, setup: ProviderSetup, mode: str, weights: str, precision: str
) -> VariantSettings:
    import onnxruntime as ort

    gpu = find_gpu() if setup.on_gpu else None
    options = {**QUIET_AFTER_RUN, **setup.providers[0][1]}
    if loaded.level != LEVELS[0]:
        options["graph_optimization_level"] = loaded.level
    return VariantSettings(
        engine=ENGINE,
        mode=mode,
        version=str(ort.__version__),
        device=gpu.name if gpu else "CPU",
        model=str(loaded.model),
        weights=weights,
        precision=precision,
        sparse_kernels=next(m.sparse_kernels for m in MODES if m.name == mode),
        threads=None if setup.on_gpu else loaded.threads,
        timing=BOUND if setup.on_gpu else TIMING,
        options=tuple(f"{name}={value}" for name, value in options.items()),
    )


def nodes_left(loaded: OrtSession, setup: ProviderSetup) -> tuple[str, ...]:
    """Nodes that the wanted provider left to others; raises BuildFailedError where it took none."""
    counts = nodes_by_provider(loaded.session) if setup.on_gpu else None
    if not counts:
        return ()
    if not counts.pop(setup.wanted, 0):
        raise BuildFailedError(
            f"{setup.wanted} runs no node of {loaded.model}: all are left to "
            f"{', '.join(sorted(counts))}"
        )
    return tuple(f"nodes on {name}={count}" for name, count in sorted(counts.items()))


def provider_setup(mode: str, precision: str, shapes: tuple[ShapeProfile, ...]) -> ProviderSetup:
    """What a mode asks of ONNX Runtime.

    `precision` names the types of the file's graph, joined with "+": the TensorRT provider builds a
    weakly typed network, which needs a flag for each narrow one.
    """
    if mode in {"cpu", "int8", "uint8"}:
        return ProviderSetup()
    if mode == "cuda":
        return ProviderSetup(providers=((CUDA, {}), (CPU, {})), config=_ASSIGNMENT)
    flags = {"trt_sparsity_enable": "1" if mode == "tensorrt-sparse" else "0"}
    narrow = (_PRECISION_FLAGS.get(word) for word in precision.split("+"))
    flags |= dict.fromkeys(filter(None, narrow), "1")
    # trt_profile_min_shapes is "x:1x3x224x224,mask:1x128"
    flags |= {f"trt_profile_{end}_shapes": words for end, words in shapes_in_words(shapes)}
    return ProviderSetup(providers=((TENSORRT, flags), (CUDA, {}), (CPU, {})), config=_ASSIGNMENT)


class OnnxRuntimeEngine:
    """Meets the Engine Protocol; a run takes the session that checked the file."""

    modes = MODES
    open_levels = LEVELS

    def status(self, mode: str | None = None) -> EngineStatus:
        """Whether a session can be made here, in no mode on CUDA or the CPU, and the device."""
        status = EngineStatus(engine=ENGINE, version=None, can_run=False, why_not=None, hint=HINT)
        try:
            import onnxruntime as ort
        except (ImportError, OSError) as error:
            why = f"onnxruntime cannot be imported: {first_line(error)}"
            return replace(status, why_not=why)
        status = replace(status, version=ort.__version__)
        opened = open_session
        if mode is not None:
            opened = partial(open_on, provider_setup(mode, "float32", ()))
        try:
            session = opened(PROBE, session_options(threads=1))
            session.run(None, _PROBE_INPUT)
        except MissingToolError as error:
            return replace(status, why_not=error.message, hint=error.hint)
        except Exception as error:  # noqa: BLE001  # doctor reports whatever keeps it from running
            return replace(status, why_not=first_line(error))
        gpu = find_gpu() if CUDA in session.get_providers() else None
        return replace(status, can_run=True, hint=None, device=gpu.name if gpu else "CPU")

    def open(self, request: OpenRequest) -> OrtTimedModel:
        """Load an ONNX file; `int8` takes one that is quantized already.

        Raises what `Engine.open` raises; a provider that takes no node of the model cannot run it.
        """
        assert request.file is not None, "planned only where there is one"
        setup = provider_setup(request.mode, request.precision, request.shapes)
        memory = DeviceMemory.watch() if setup.on_gpu else DeviceMemory(None)
        with memory.counting():
            loaded = OrtSession(
                request.file,
                threads=request.threads,
                level=request.level or LEVELS[0],
                providers=setup,
            )
        left = nodes_left(loaded, setup)
        settings = _settings(loaded, setup, request.mode, request.weights, request.precision)
        settings = replace(settings, options=(*settings.options, *left))
        return OrtTimedModel(loaded, setup, settings, memory)

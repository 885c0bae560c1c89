"""ONNX Runtime as an engine: its modes, what each asks of a session, and a model in one."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twofour.engines.inputs import fit_inputs
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
    CannotRunError,
    OrtSession,
    ProviderSetup,
    SessionSetup,
    errors_named,
    nodes_by_provider,
    open_on,
    open_session,
    to_ort_value,
)
from twofour.engines.protocol import (
    Arrays,
    BuildRequest,
    Mode,
    ModeStatus,
    OpenOptions,
    OpenRequest,
    ProgressCallback,
    TimedModel,
    Untyped,
)
from twofour.engines.tensorrt.plan import DeviceMemory
from twofour.errors import BadInputError, BuildFailedError, MissingToolError, first_line
from twofour.records.build import EngineStatus, LayerTime, VariantBuild
from twofour.records.export import TensorShape
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
NAMES = tuple(mode.name for mode in MODES)
_ASSIGNMENT = {"session.record_ep_graph_assignment_info": "1"}
_PRECISION_FLAGS = {
    "float16": "trt_fp16_enable",
    "bfloat16": "trt_bf16_enable",
    "int8": "trt_int8_enable",
}
_KERNEL_TIME = "_kernel_time"
BOUND = "one run with inputs and outputs bound on the GPU, synchronized, timed on the host"


def open_onnxruntime(
    model: Path, mode: str, options: OpenOptions, *, precision: str
) -> OrtTimedModel:
    """Load the ONNX file in one of `MODES`; `int8` takes a file that is quantized already.

    Raises BadInputError for another mode or a missing file, MissingToolError with ONNX Runtime's
    reason where the mode's provider was left out, and BuildFailedError where it takes no node of
    the model or refuses it.
    """
    setup = provider_setup(mode, precision, options.shapes)
    memory = DeviceMemory.watch() if setup.on_gpu else None
    opener = functools.partial(open_on, setup)
    loaded = OrtSession(
        model, threads=options.threads, level=options.level or LEVELS[0], opener=opener
    )
    left = nodes_left(loaded, setup)
    settings = _settings(loaded, setup, mode, options.weights, precision)
    return OrtTimedModel(
        loaded, setup, replace(settings, options=(*settings.options, *left)), memory
    )


def as_timed(loaded: OrtSession, *, weights: str, precision: str) -> OrtTimedModel:
    """A session that is open already, on the provider that it is on."""
    mode = mode_of(loaded.providers)
    setup = provider_setup(mode, precision, ())
    return OrtTimedModel(loaded, setup, _settings(loaded, setup, mode, weights, precision), None)


def mode_of(providers: Sequence[str]) -> str:
    """The mode that a session is in which nobody asked for one."""
    return "cuda" if CUDA in providers else "cpu"


class OrtTimedModel:
    """Meets TimedModel; made by `open_onnxruntime`."""

    def __init__(
        self,
        loaded: OrtSession,
        setup: ProviderSetup,
        settings: VariantSettings,
        memory: DeviceMemory | None,
    ) -> None:
        self._loaded = loaded
        self._setup = setup
        self._memory = memory
        self._settings = settings
        self._feed: dict[str, npt.NDArray[Any]] = {}
        self._run: Callable[[], object] | None = None

    @property
    def settings(self) -> VariantSettings:
        """`options` says how the session was opened."""
        return self._settings

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """The model's inputs."""
        return self._loaded.inputs

    @property
    def size_bytes(self) -> int | None:
        """Of the ONNX file and its external data; None where they cannot be read as ONNX."""
        return _size_bytes(self._loaded.model)

    def prepare(self, inputs: Arrays) -> None:
        """Keep the inputs, on the GPU bound to its memory, and run once."""
        self._feed = fit_inputs(inputs, self._loaded.inputs)
        with errors_named(f"ONNX Runtime cannot take the inputs of {self._loaded.model}"):
            self._run = self._bound() if self._setup.on_gpu else self._plain()
        self.run_ms()

    def run_ms(self) -> float:
        """Host clock around one run; `settings.timing` says what that spans."""
        run = self._run
        assert run is not None, "prepare comes first"
        with errors_named(f"ONNX Runtime failed while running {self._loaded.model}"):
            started = time.perf_counter()
            run()
            finished = time.perf_counter()
        return (finished - started) * 1e3

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Every output by name; the prepared inputs stay prepared."""
        return self._loaded.outputs(inputs)

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:
        """Mean times of the nodes of ONNX Runtime's own, fused graph, from a second session.

        () on a GPU, where ONNX Runtime times the launch of a node and not its work.
        """
        if self._setup.on_gpu:
            return ()
        opener = functools.partial(open_on, self._setup)
        with (
            tempfile.TemporaryDirectory() as folder,
            OrtSession(
                self._loaded.model,
                threads=self._loaded.threads,
                level=self._loaded.level,
                profile_prefix=Path(folder, "ort"),
                opener=opener,
            ) as session,
        ):
            for _ in range(iterations + 1):
                session.outputs(self._feed)
            events = session.end_profiling().read_text(encoding="utf-8")
        return node_times(without_first_run(events), iterations)

    def peak_device_memory_bytes(self) -> int | None:
        """As `DeviceMemory` measures it; None on a CPU and without a CUDA runtime library."""
        return None if self._memory is None else self._memory.peak_bytes()

    def close(self) -> None:
        """Free the session and what is bound."""
        self._run = None
        self._loaded.close()

    def _bound(self) -> Callable[[], object]:
        binding = bind_on(self._loaded, self._feed, "cuda")
        return functools.partial(run_bound, self._loaded.session, binding)

    def _plain(self) -> Callable[[], object]:
        session, names = self._loaded.session, [t.name for t in self._loaded.output_shapes]
        if not self._loaded.needs_values:
            return functools.partial(session.run, names, self._feed)
        values = {name: to_ort_value(array) for name, array in self._feed.items()}
        return functools.partial(session.run_with_ort_values, names, values)


def without_first_run(events: str) -> str:
    """ONNX Runtime's profile without what came before the end of the first run, its warm-up."""
    rows = json.loads(events)
    ends = [place for place, event in enumerate(rows) if event.get("name") == "model_run"]
    return json.dumps(rows[ends[0] + 1 :] if ends else [])


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
        options=_option_words(setup, loaded.level),
    )


def _option_words(setup: ProviderSetup, level: str) -> tuple[str, ...]:
    options = {**QUIET_AFTER_RUN, **setup.providers[0][1]}
    if level != LEVELS[0]:
        options["graph_optimization_level"] = level
    return tuple(f"{name}={value}" for name, value in options.items())


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


def _size_bytes(model: Path) -> int | None:
    from twofour.graph.files import external_data, external_tensors, parse_model

    try:
        graph = parse_model(model)
        files = {external_data(tensor, model).file for tensor in external_tensors(graph)}
        return sum(file.stat().st_size for file in (model, *files))
    except (BadInputError, OSError):
        return None


def provider_setup(mode: str, precision: str, shapes: tuple[ShapeProfile, ...]) -> ProviderSetup:
    """What a mode asks of ONNX Runtime; raises BadInputError for a mode that is not in `NAMES`.

    `precision` names the types of the file's graph, joined with "+": the TensorRT provider builds a
    weakly typed network, which needs a flag for each narrow one.
    """
    if mode not in NAMES:
        raise BadInputError(
            f"onnxruntime has no mode {mode!r}", hint=f"choose one of {', '.join(NAMES)}"
        )
    if mode in {"cpu", "int8", "uint8"}:
        return ProviderSetup()
    if mode == "cuda":
        return ProviderSetup(providers=((CUDA, {}), (CPU, {})), config=_ASSIGNMENT)
    flags = {"trt_sparsity_enable": "1" if mode == "tensorrt-sparse" else "0"}
    narrow = (_PRECISION_FLAGS.get(word) for word in precision.split("+"))
    flags |= dict.fromkeys(filter(None, narrow), "1") | _profile_flags(shapes)
    return ProviderSetup(providers=((TENSORRT, flags), (CUDA, {}), (CPU, {})), config=_ASSIGNMENT)


def _profile_flags(shapes: tuple[ShapeProfile, ...]) -> dict[str, str]:
    def words(which: str) -> str:
        rows = [(shape.input, getattr(shape, which)) for shape in shapes]
        return ",".join(f"{name}:{'x'.join(map(str, dims))}" for name, dims in rows)

    return {f"trt_profile_{w}_shapes": words(w) for w in ("min", "opt", "max")} if shapes else {}


def _run_probe(session: Untyped) -> None:
    session.run(None, {"x": np.ones(1, np.float32)})


def _tried(mode: str) -> ModeStatus:
    try:
        _run_probe(open_on(provider_setup(mode, "float32", ()), PROBE, SessionSetup(threads=1)))
    except MissingToolError as error:
        return ModeStatus(engine=ENGINE, mode=mode, why_not=error.message, hint=error.hint)
    except ImportError as error:
        why = f"onnxruntime cannot be imported: {first_line(error)}"
        return ModeStatus(engine=ENGINE, mode=mode, why_not=why, hint=HINT)
    except Exception as error:  # noqa: BLE001  # a status says whatever keeps it from running
        return ModeStatus(engine=ENGINE, mode=mode, why_not=first_line(error), hint=HINT)
    return ModeStatus(engine=ENGINE, mode=mode, why_not=None)


class OnnxRuntimeEngine:
    """Meets the Engine Protocol; what it builds is a session, so no plan or log is left."""

    modes = MODES
    open_levels = LEVELS

    def status(self) -> EngineStatus:
        """Whether a session can be made here, and on which device."""
        try:
            import onnxruntime as ort
        except (ImportError, OSError) as error:
            why = f"onnxruntime cannot be imported: {first_line(error)}"
            return _status(None, why_not=why, hint=HINT)
        try:
            session = open_session(PROBE, SessionSetup(threads=1))
            _run_probe(session)
        except Exception as error:  # noqa: BLE001  # doctor reports whatever keeps it from running
            return _status(ort.__version__, why_not=first_line(error), hint=HINT)
        gpu = find_gpu() if CUDA in session.get_providers() else None
        return _status(ort.__version__, device=gpu.name if gpu else "CPU")

    def build(self, request: BuildRequest, report: ProgressCallback) -> VariantBuild:
        """Load the model and run it once; one that cannot be run here gets `error`."""
        report("loading the session", 0, 2)
        try:
            with OrtSession(request.onnx, threads=request.options.threads) as session:
                report("running", 1, 2)
                built = session_build(request, build_s=session.load_s, providers=session.providers)
                try:
                    session.outputs(request.inputs)
                except BuildFailedError as error:
                    built = replace(built, error=error.message)
                report("running", 2, 2)
        except CannotRunError as error:
            return session_build(request, error=error.message)
        return built

    def statuses(self, modes: Sequence[str]) -> tuple[ModeStatus, ...]:
        """Each tried with a session; never raises."""
        return tuple(map(_tried, modes))

    def attempts(self, request: BuildRequest) -> tuple[tuple[str, BuildRequest], ...]:
        """One: a run loads its sessions at lower levels itself."""
        return ((LEVELS[0], request),)

    def open(self, request: OpenRequest) -> TimedModel:
        """An ONNX file, as `open_onnxruntime` loads it."""
        assert request.file is not None, "planned only where there is one"
        return open_onnxruntime(
            request.file, request.mode, request.options, precision=request.precision
        )


def _status(
    version: str | None,
    *,
    why_not: str | None = None,
    hint: str | None = None,
    device: str | None = None,
) -> EngineStatus:
    return EngineStatus(
        engine=ENGINE,
        version=version,
        can_run=why_not is None,
        why_not=why_not,
        hint=hint,
        device=device,
    )


def session_build(
    request: BuildRequest,
    *,
    build_s: float = 0.0,
    providers: tuple[str, ...] = (),
    error: str | None = None,
) -> VariantBuild:
    """The record of a session, or why ONNX Runtime takes the model into none."""
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
        error=error,
    )

"""The TensorRT engine: builds plans with 8.6, 10.x and 11.x, and opens them."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from twofour.eligibility.build_facts import QUANTIZE_FIRST, never_weakly_typed
from twofour.engines.machine import find_gpu
from twofour.engines.protocol import (
    BuildRequest,
    OpenRequest,
    ProgressCallback,
    Untyped,
)
from twofour.engines.tensorrt.bindings import (
    ENGINE,
    ERRORS_SHOWN,
    MessageLog,
    Precisions,
    build_failed,
    build_log,
    failures_named,
    opset_advice,
    precisions_of,
    tensorrt_status,
    trt_logger,
)
from twofour.engines.tensorrt.plan import MODES, QUEUED, LoadedPlan, TensorRtTimedModel
from twofour.errors import BadInputError, BuildFailedError, MissingToolError
from twofour.inputs.examples import opt_shapes, profiles_for
from twofour.inputs.fits import Arrays, at_shapes, shapes_of
from twofour.records.export import ANONYMOUS, EngineStatus, TensorShape, VariantBuild
from twofour.records.latency import VariantSettings
from twofour.records.options import AllowedType, ShapeProfile
from twofour.store import atomic_file, write_text

PROFILED_RUNS = 10


class TensorRtEngine:
    """Builds with Polygraphy's loaders; its status is established once, because that loads CUDA."""

    modes = MODES
    open_levels: tuple[str, ...] = ()  # a plan has the level it was built at

    def __init__(self) -> None:
        self._status: EngineStatus | None = None

    def status(self, mode: str | None = None) -> EngineStatus:  # noqa: ARG002  # all need the same
        """Whether a builder can be created here, and if not why, in one line."""
        if self._status is None:
            self._status = tensorrt_status()
        return self._status

    def build(self, request: BuildRequest, report: ProgressCallback) -> VariantBuild:
        """Build the plan, load it back from its file, and keep its layers, profile and messages.

        Raises BuildFailedError when no plan comes out or it cannot be loaded. A plan that cannot
        run the example inputs is returned with `error`.
        """
        trt = self._module()
        with build_log(trt, request.file(".log"), _headlines(trt, request)) as log:
            started = time.perf_counter()
            profiles = build_plan(trt, request, report, log)
            build_s = time.perf_counter() - started
            report("profiling", 0, None)
            inputs = at_shapes(request.inputs, opt_shapes(profiles))
            error = _profile(trt, request, inputs, log)
        return replace(
            request.result(build_s, error), size_bytes=request.file(".plan").stat().st_size
        )

    def open(self, request: OpenRequest) -> TensorRtTimedModel:
        """Load a plan that `build` or trtexec made here; raises what `Engine.open` raises."""
        assert request.file is not None, "a plan is a file"
        self._module()
        status = self.status()
        settings = VariantSettings(
            engine=ENGINE,
            mode=request.mode,
            version=status.version,
            device=status.device or "GPU",
            model=request.model,
            weights=request.weights,
            precision=request.precision,
            sparse_kernels=request.sparse_kernels,
            threads=None,
            timing=QUEUED,
        )
        return TensorRtTimedModel(request.file, settings)

    def _module(self) -> ModuleType:
        status = self.status()
        if not status.can_run:
            raise MissingToolError(f"TensorRT cannot run here: {status.why_not}", hint=status.hint)
        return importlib.import_module("tensorrt")


def _headlines(trt: ModuleType, request: BuildRequest) -> tuple[str, ...]:
    """What trtexec prints too; TensorRT itself tells version and GPU of a process's first build."""
    lines = [f"TensorRT version: {trt.__version__}"]
    gpu = find_gpu()
    if gpu is not None:
        capability = ".".join(map(str, gpu.compute_capability))
        lines += [f"Selected Device: {gpu.name}", f"Compute Capability: {capability}"]
    # what trtexec prints of a weakly typed build; reports go by it: "Precision: FP32+FP16"
    types = _timed_types(trt, request)
    if types:
        lines.append(f"Precision: {'+'.join(types)}")
    lines.append(f"Sparsity: {'Enabled' if request.sparse_weights else 'Disabled'}")
    return tuple(lines)


def _timed_types(trt: ModuleType, request: BuildRequest) -> list[str]:
    """Types whose kernels a weakly typed build times: FP32, FP16; [] where the graph decides."""
    types = [name.upper() for name, on in weak_typing_flags(trt, request).items() if on]
    return ["FP32", *types] if types else []


def _building(trt: ModuleType, request: BuildRequest) -> str:
    """What progress shows until the builder reports phases; 8.6 has none."""
    types = _timed_types(trt, request)
    if not types:
        return "building"
    return f"building: kernels are timed in {' and '.join(types)}, so the first engine takes long"


def _profile(trt: ModuleType, request: BuildRequest, inputs: Arrays, log: MessageLog) -> str | None:
    """layers.json and profile.json, or why the plan cannot run; its other files are kept then."""
    loaded = LoadedPlan(trt, request.file(".plan"), log)
    try:
        with loaded as plan:
            plan.outputs(inputs)
            layers = plan.layer_information()
            if layers is not None:
                write_text(request.file(".layers.json"), layers)
            times = plan.layer_times(inputs, PROFILED_RUNS)
            write_text(request.file(".profile.json"), times.to_json())
    except BuildFailedError as error:
        log.headline(error.message)
        return error.message
    return None


def progress_monitor(trt: ModuleType, report: ProgressCallback, log: MessageLog) -> Untyped | None:
    """A trt.IProgressMonitor that reports each phase; None where TensorRT has none (before 10.0).

    The caller keeps the reference for the whole build. An exception of `report` does not cancel the
    build; Ctrl-C does, at the next step (a step that returns False is TensorRT's way to cancel).
    """
    if not hasattr(trt, "IProgressMonitor"):
        return None
    steps: dict[str, int] = {}
    """Steps of each active phase: phases nest, and a name is unique only while it is active."""
    lock = threading.Lock()

    def show(name: str, done: int) -> None:
        try:
            with lock:
                report(name, done, steps.get(name))
        except KeyboardInterrupt:
            log.interrupted = True
        except Exception as error:  # noqa: BLE001  # C++ calls this: an exception ends the build
            log.headline(f"progress could not be shown: {error!r}")

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]  # no types
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002  # TensorRT names them
            steps[phase_name] = max(num_steps, 1)
            show(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            show(phase_name, step + 1)
            return not log.interrupted

        def phase_finish(self, phase_name: str) -> None:
            steps.pop(phase_name, None)

    return Monitor()


def build_plan(
    trt: ModuleType, request: BuildRequest, report: ProgressCallback, log: MessageLog
) -> tuple[ShapeProfile, ...]:
    """Build `<variant>.plan`, written whole or not at all; gives the optimization profiles it has.

    Raises BuildFailedError with the parser's or the builder's own errors.
    """
    from polygraphy.backend.trt import EngineBytesFromNetwork

    with failures_named(f"TensorRT cannot build {request.onnx}", log):
        check_allowed(trt, request.options.allow, request.onnx)
        options = request.options
        builder, network = create_network(trt, log, weakly_typed=bool(options.allow))
        parser = parse(trt, network, request.onnx, log)
        examples = shapes_of(request.inputs)
        profiles = profiles_for(options.shapes, network_inputs(network), examples)
        monitor = progress_monitor(trt, report, log)  # must outlive the build
        report(_building(trt, request), 0, None)
        config = create_config(trt, (builder, network), request, profiles, monitor)
        _check_profiles(config, request, profiles, log)
        with tempfile.TemporaryFile() as cache:  # of timings
            plan = EngineBytesFromNetwork(
                (builder, network, parser), config=config, save_timing_cache=cache
            )()
            cache.seek(0)
            timings = cache.read()
    _write_built(request, plan, timings)
    return profiles


def _write_built(request: BuildRequest, plan: Untyped, timings: bytes) -> None:
    if request.timing_cache is not None and timings:
        with atomic_file(request.timing_cache) as temporary:
            temporary.write_bytes(timings)
    with atomic_file(request.file(".plan")) as temporary, temporary.open("wb") as file:
        file.write(plan)


def _check_profiles(
    config: Untyped, request: BuildRequest, profiles: tuple[ShapeProfile, ...], log: MessageLog
) -> None:
    """TensorRT drops a profile that it refuses, and says why in its log alone."""
    if config.num_optimization_profiles != 1:
        shapes = [f"{p.input} min {p.min} opt {p.opt} max {p.max}" for p in profiles]
        what = f"TensorRT refuses the shapes of {request.onnx}"
        raise build_failed(what, log, "; ".join(shapes) or "none")


def create_network(trt: ModuleType, log: MessageLog, *, weakly_typed: bool) -> tuple[Any, Any]:
    """A builder and an empty network, strongly typed where TensorRT knows that (10 and 11)."""
    from polygraphy.backend.trt import CreateNetwork

    strongly = is_strongly_typed(trt) and not weakly_typed
    builder, network = CreateNetwork(strongly_typed=strongly)()
    if not trt.init_libnvinfer_plugins(trt_logger(trt), ""):
        log.headline("TensorRT's plugin library could not be initialised")
    return builder, network


def is_strongly_typed(trt: ModuleType) -> bool:
    """Whether networks take their types from the graph alone, which 8.6 cannot."""
    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def parse(trt: ModuleType, network: Untyped, onnx: Path, log: MessageLog) -> Untyped:
    """Fill the network from the ONNX file (external data beside it); gives the parser to keep."""
    from twofour.graph.opened import parse_model

    parser = trt.OnnxParser(network, trt_logger(trt))
    if parser.parse_from_file(str(onnx)) and not parser.num_errors:
        return parser
    shown = range(min(parser.num_errors, ERRORS_SHOWN))
    errors = [_error_words(parser.get_error(index)) for index in shown]
    reason = "; ".join(errors) or log.why("the parser gives no reason")
    hint = None
    if not is_strongly_typed(trt):
        opsets = (o.version for o in parse_model(onnx).opset_import if not o.domain)
        hint = opset_advice(trt.__version__, max(opsets, default=0))
    raise BuildFailedError(f"TensorRT cannot parse {onnx}: {reason}", hint=hint)


def _error_words(error: Untyped) -> str:
    """What the parser says, behind the node it says it of."""
    text = str(error.desc()).strip()
    if not hasattr(error, "node_name"):  # 8.6 knows only the node's index
        return f"node {error.node()}: {text}"
    if not error.node_name():  # the file as a whole is at fault
        return text
    return f"node {error.node_name()!r} ({error.node_operator()}): {text}"


def network_inputs(network: Untyped) -> tuple[TensorShape, ...]:
    """The network's inputs; a dynamic dimension, -1 in TensorRT, is "?"."""
    inputs = []
    for tensor in map(network.get_input, range(network.num_inputs)):
        dtype = str(tensor.dtype).rsplit(".", maxsplit=1)[-1].lower()  # DataType.FLOAT
        shape = tuple(ANONYMOUS if dim < 0 else int(dim) for dim in tensor.shape)
        inputs.append(TensorShape(name=tensor.name, dtype=dtype, shape=shape))
    return tuple(inputs)


def create_config(
    trt: ModuleType,
    target: tuple[Any, Any],
    request: BuildRequest,
    profiles: tuple[ShapeProfile, ...],
    monitor: Untyped | None,
) -> Untyped:
    """The builder configuration for `target`, a builder and its network.

    TF32 is said outright because Polygraphy clears it
    by default, and verbosity is DETAILED because the kernel of a layer shows only there.
    """
    from polygraphy.backend.trt import CreateConfig, Profile

    profile = Profile()
    for shapes in profiles:
        profile.add(shapes.input, min=shapes.min, opt=shapes.opt, max=shapes.max)
    workspace = request.options.workspace_bytes
    known = request.timing_cache
    with contextlib.ExitStack() as stack:
        cache = None
        if known is not None and known.is_file():
            # open, because Polygraphy leaves a lock beside a cache that it gets as a path
            cache = stack.enter_context(known.open("rb"))
        create = CreateConfig(
            tf32=request.options.tf32,
            **weak_typing_flags(trt, request),
            profiles=[profile],
            sparse_weights=request.sparse_weights,
            profiling_verbosity=trt.ProfilingVerbosity.DETAILED,
            memory_pool_limits=workspace and {trt.MemoryPoolType.WORKSPACE: workspace},
            builder_optimization_level=request.options.optimization_level,
            load_timing_cache=cache,
            progress_monitor=monitor,
        )
        return create(*target)


def check_allowed(trt: ModuleType, allow: Sequence[AllowedType], onnx: Path) -> None:
    """Raise BadInputError for types that this TensorRT cannot be allowed, or not for this file."""
    for allowed in allow:
        if is_strongly_typed(trt) and not hasattr(trt.BuilderFlag, "FP16"):
            raise never_weakly_typed(trt.__version__, allowed)
        if not hasattr(trt.BuilderFlag, allowed.name):
            raise BadInputError(
                f"TensorRT {trt.__version__} has no {allowed.name}",
                hint="use --fp16, or TensorRT 10",
            )
    if AllowedType.INT8 in allow and not _precisions(onnx).int8:
        raise BadInputError(
            f"--int8: {onnx} has no Q/DQ nodes, and TensorRT needs the ranges of its tensors",
            hint=f"{QUANTIZE_FIRST}; or build with --fp16",
        )


def weak_typing_flags(trt: ModuleType, request: BuildRequest) -> dict[str, bool]:
    """Precision flags of CreateConfig: none for a strongly typed network, where they are errors.

    A weakly typed builder takes the graph's types for a suggestion and runs float32 without these.
    Raises BuildFailedError for bfloat16 on a TensorRT that has none.
    """
    allow = request.options.allow
    if is_strongly_typed(trt) and not allow:
        return {}
    types = _precisions(request.onnx)
    if types.bfloat16 and not hasattr(trt.BuilderFlag, "BF16"):
        raise BuildFailedError(
            f"TensorRT {trt.__version__} has no bfloat16, and {request.onnx} uses it",
            hint="export with --precision float16, or use TensorRT 10 or newer",
        )
    return {
        "fp16": types.float16 or AllowedType.FP16 in allow,
        "int8": types.int8 or AllowedType.INT8 in allow,
        "bf16": types.bfloat16 or AllowedType.BF16 in allow,
    }


def _precisions(onnx: Path) -> Precisions:
    from twofour.graph.opened import parse_model

    return precisions_of(parse_model(onnx))

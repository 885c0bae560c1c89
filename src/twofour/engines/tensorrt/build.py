"""Building a TensorRT engine: opset and types of its network, profiles and progress."""

from __future__ import annotations

import contextlib
import re
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from twofour.eligibility.build_facts import never_weakly_typed
from twofour.engines.protocol import BuildRequest, ProgressCallback, Untyped
from twofour.engines.tensorrt.bindings import MessageLog, build_failed, failures_named, trt_logger
from twofour.errors import BadInputError, BuildFailedError
from twofour.inputs.examples import profiles_for
from twofour.inputs.fits import shapes_of
from twofour.records.export import ANONYMOUS, TensorShape
from twofour.records.options import AllowedType, ShapeProfile
from twofour.store import atomic_file

if TYPE_CHECKING:
    import onnx


_QUANTIZERS = {"QuantizeLinear", "DequantizeLinear"}
_VERSION = re.compile(r"(\d+)\.?(\d+)?")
_NEWEST_BEFORE_8_4 = 13
_NEWEST_OF_8 = 17
"""operators.md of onnx-tensorrt: release/8.0-GA and 8.2-GA say 13, 8.5-GA and 8.6-GA say 17, 8.5
without LayerNormalization. 8.4 is taken for an 8.5: what it says was not found."""
_WRITTEN = 17
"""The oldest opset that torch models are exported in (export/opset17.py)."""
_ERRORS_SHOWN = 3


def opset_for(version: str | None) -> int | None:
    """The opset to export in for that version of TensorRT; None: any that torch writes will do."""
    return None if opset_advice(version, _WRITTEN + 1) is None else _WRITTEN


def opset_advice(version: str | None, opset: int) -> str | None:
    """What to do about an opset newer than that version of TensorRT reads; None: nothing.

    Its parser takes the file all the same and reads operators by their older definition: the axes
    that ReduceMean has as an input since 18 are ignored (NVIDIA/TensorRT issue 3467).
    """
    match = _VERSION.match(version or "")
    if match is None or int(match[1]) >= 10:
        return None
    old = int(match[1]) < 8 or (match[1] == "8" and match[2] is not None and int(match[2]) < 4)
    newest = _NEWEST_BEFORE_8_4 if old else _NEWEST_OF_8
    if opset <= newest:
        return None
    remedy = f"export the torch model with --opset {_WRITTEN}"
    return (
        f"TensorRT {version} reads opset {newest} and older and can be silently wrong about "
        f"later ones; this file has {opset}: {'a newer TensorRT reads it' if old else remedy}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Precisions:
    """Types in a file that a weakly typed TensorRT (8.x, 9.x) must be allowed; float32 need not."""

    float16: bool
    bfloat16: bool
    int8: bool
    """The graph has QuantizeLinear or DequantizeLinear nodes."""

    @property
    def in_words(self) -> str:
        """int8, float16 and bfloat16, joined with "+"; float32 where the graph has none of them."""
        used = (("int8", self.int8), ("float16", self.float16), ("bfloat16", self.bfloat16))
        return "+".join(word for word, is_used in used if is_used) or "float32"


def precisions_of(model: onnx.ModelProto) -> Precisions:
    """The types of its main graph's tensors; no value is looked at."""
    import onnx

    graph = model.graph
    types = set(_types(graph))
    return Precisions(
        float16=onnx.TensorProto.FLOAT16 in types,
        bfloat16=onnx.TensorProto.BFLOAT16 in types,
        int8=any(node.op_type in _QUANTIZERS for node in graph.node),
    )


def _types(graph: onnx.GraphProto) -> Iterable[int]:
    for initializer in graph.initializer:
        yield initializer.data_type
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.type.tensor_type.elem_type
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        if attribute.name == "to":  # of Cast
            yield attribute.i
        elif attribute.name == "value":  # of Constant
            yield attribute.t.data_type


def progress_monitor(trt: ModuleType, report: ProgressCallback, log: MessageLog) -> Untyped | None:
    """A trt.IProgressMonitor that reports each phase; None where TensorRT has none (before 10.0).

    The caller keeps the reference for the whole build. An exception of `report` does not cancel the
    build; Ctrl-C does, at the next step (a step that returns False is TensorRT's way to cancel).
    """
    if not hasattr(trt, "IProgressMonitor"):
        return None
    steps: dict[str, int] = {}
    """Of the phases that are active: they nest, and a name is unique only while it is active."""
    lock = threading.Lock()

    def tell(name: str, done: int) -> None:
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
            tell(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            tell(phase_name, step + 1)
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
        weakly = bool(request.options.allow)
        builder, network = create_network(trt, log, weakly_typed=weakly)
        parser = parse(trt, network, request.onnx, log)
        profiles = profiles_for(
            request.options.shapes, network_inputs(network), shapes_of(request.inputs)
        )
        monitor = progress_monitor(trt, report, log)  # must outlive the build
        report("building", 0, None)
        config = create_config(trt, (builder, network), request, profiles, monitor)
        if config.num_optimization_profiles != 1:
            shapes = (f"{p.input} min {p.min} opt {p.opt} max {p.max}" for p in profiles)
            what = f"TensorRT refuses the shapes of {request.onnx}"
            raise build_failed(what, log, "; ".join(shapes) or "none")
        with tempfile.TemporaryFile() as cache:
            plan = EngineBytesFromNetwork(
                (builder, network, parser), config=config, save_timing_cache=cache
            )()
            cache.seek(0)
            timings = cache.read()
    if request.timing_cache is not None and timings:
        with atomic_file(request.timing_cache) as temporary:
            temporary.write_bytes(timings)
    with atomic_file(request.file(".plan")) as temporary, temporary.open("wb") as file:
        file.write(plan)
    return profiles


def create_network(
    trt: ModuleType, log: MessageLog, *, weakly_typed: bool = False
) -> tuple[Any, Any]:
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
    from twofour.graph.files import parse_model

    parser = trt.OnnxParser(network, trt_logger(trt))
    if parser.parse_from_file(str(onnx)) and not parser.num_errors:
        return parser
    errors = [_parser_error(parser.get_error(index)) for index in range(parser.num_errors)]
    reason = "; ".join(errors[:_ERRORS_SHOWN]) or log.why("the parser gives no reason")
    hint = None
    if not is_strongly_typed(trt):
        opsets = (o.version for o in parse_model(onnx).opset_import if not o.domain)
        hint = opset_advice(trt.__version__, max(opsets, default=0))
    raise BuildFailedError(f"TensorRT cannot parse {onnx}: {reason}", hint=hint)


def _parser_error(error: Untyped) -> str:
    text = str(error.desc()).strip()
    if not hasattr(error, "node_name"):  # 8.6 knows only the node's index
        return f"node {error.node()}: {text}"
    name = error.node_name()  # empty where the file as a whole is at fault
    return f"node {name!r} ({error.node_operator()}): {text}" if name else text


def network_inputs(network: Untyped) -> tuple[TensorShape, ...]:
    """The network's inputs; a dynamic dimension, -1 in TensorRT, is "?"."""
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    return tuple(
        TensorShape(
            name=tensor.name,
            dtype=str(tensor.dtype).rsplit(".", maxsplit=1)[-1].lower(),
            shape=tuple(ANONYMOUS if dim < 0 else int(dim) for dim in tensor.shape),
        )
        for tensor in tensors
    )


def create_config(
    trt: ModuleType,
    target: tuple[Any, Any],
    request: BuildRequest,
    profiles: tuple[ShapeProfile, ...],
    monitor: Untyped | None,
) -> Untyped:
    """The builder configuration for `target`, a builder and its network.

    Both variants differ in SPARSE_WEIGHTS alone. TF32 is said outright because Polygraphy clears it
    by default, and verbosity is DETAILED because the kernel of a layer shows only there.
    """
    from polygraphy.backend.trt import CreateConfig, Profile

    profile = Profile()
    for shapes in profiles:
        profile.add(shapes.input, min=shapes.min, opt=shapes.opt, max=shapes.max)
    workspace, known = request.options.workspace_bytes, request.timing_cache
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
            hint="quantise the file first (onnxruntime.quantization, NVIDIA ModelOpt), or use "
            "--fp16",
        )


def weak_typing_flags(trt: ModuleType, request: BuildRequest) -> dict[str, bool]:
    """Precision flags of CreateConfig: none for a strongly typed network, where they are errors.

    A weakly typed builder takes the graph's types for a suggestion and runs float32 without these.
    Raises BuildFailedError for bfloat16 on a TensorRT that has none.
    """
    onnx, allow = request.onnx, request.options.allow
    if is_strongly_typed(trt) and not allow:
        return {}
    found = _precisions(onnx)
    if found.bfloat16 and not hasattr(trt.BuilderFlag, "BF16"):
        raise BuildFailedError(
            f"TensorRT {trt.__version__} has no bfloat16, and {onnx} uses it",
            hint="export with --precision float16, or use TensorRT 10 or newer",
        )
    return {
        "fp16": found.float16 or AllowedType.FP16 in allow,
        "int8": found.int8 or AllowedType.INT8 in allow,
        "bf16": found.bfloat16 or AllowedType.BF16 in allow,
    }


def _precisions(onnx: Path) -> Precisions:
    """The types of the file as this process, a worker of its own, finds it."""
    from twofour.graph.files import parse_model

    return precisions_of(parse_model(onnx))

"""torch as an engine: what each mode changes in a module, which modes run here, and their times."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from twofour.engines.protocol import Mode, OpenRequest, TimedModel, Untyped
from twofour.engines.tensorrt.plan import MODES as TENSORRT_MODES
from twofour.errors import BuildFailedError, MissingToolError, TwofourError, first_line
from twofour.inputs.fits import Array, Arrays, fit_inputs, float32_array
from twofour.pattern import check
from twofour.records import frozen
from twofour.records.export import EngineStatus, LayerTime, TensorShape
from twofour.records.latency import VariantSettings
from twofour.records.weights import HARDWARE_PATTERN

if TYPE_CHECKING:
    import torch
    from torch import nn

CPU = "cpu"
CUDA = "cuda"
_COMPILER_ERROR = re.compile(r"^.*\berror: .*$", re.MULTILINE)
_NO_SPARSE = "2:4 kernels of torch need a GPU with sparse tensor cores (NVIDIA, SM 8.0 and up)"
_NO_INT8 = "torch has deprecated torch.ao.quantization, which has no kernels for GPUs"
_INT8_ELSEWHERE = "time INT8 in another engine: --engines onnxruntime:int8,onnxruntime:uint8"
_MOST_SHAPES = 64
"""Sets of shapes that are compiled; torch's own default is 8, and then it runs uncompiled."""
_LEAST_COSINE = 0.99
"""Sparse against dense outputs, both in float16: below it a kernel computes something else."""


@frozen
class TorchDevice:
    """One device and how a run on it is timed."""

    kind: str
    """cpu or cuda (ROCm builds of torch say so too); Tensor.to takes it."""
    name: str
    """"CPU" or the name of the GPU."""
    timing: str
    """What one sample spans, in words."""
    time_ms: Callable[[Callable[[], object]], float]
    """Runs something once and returns when it is over, with its milliseconds."""


def best_device() -> TorchDevice:
    """The current GPU where torch has one, timed by CUDA events, else the CPU by its clock."""
    import torch

    if not torch.cuda.is_available():
        timing = "one call of forward from tensors to tensors, monotonic clock"
        return TorchDevice(kind=CPU, name="CPU", timing=timing, time_ms=_cpu_ms)
    return TorchDevice(
        kind=CUDA,
        name=str(torch.cuda.get_device_name()),
        timing="one call of forward from tensors to tensors on the GPU, CUDA events",
        time_ms=_gpu_ms,
    )


def _cpu_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    kept = run()
    ms = (time.perf_counter() - started) * 1e3
    del kept  # freeing it is no part of the run
    return ms


def _gpu_ms(run: Callable[[], object]) -> float:
    import torch

    event: Untyped = torch.cuda.Event
    start = event(enable_timing=True)
    end = event(enable_timing=True)
    end.record()  # an event is made when it is first recorded
    start.record()
    kept = run()
    end.record()
    end.synchronize()
    del kept
    return float(start.elapsed_time(end))


@frozen
class TorchProgram:
    """What a torch variant is made of. The variant changes the module in place.

    Its type, device and layout become those of the mode, so that the weights are held once: load a
    module anew for each variant.
    """

    module: nn.Module
    args: tuple[torch.Tensor, ...]
    """Example inputs by position."""
    kwargs: Mapping[str, torch.Tensor]
    """Example inputs by name, after those by position."""
    inputs: tuple[TensorShape, ...]
    """Inputs of the exported file: those of `args`, then of `kwargs`; floats are float32."""
    output_names: tuple[str, ...]
    """Names of the tensors in what forward returns, in the order of torch.utils._pytree."""
    source: str
    """The model as the user named it."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The example inputs, in the order of `inputs`."""
        return (*self.args, *self.kwargs.values())

    def arguments(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Tensors in the order of `inputs` as positional and keyword arguments."""
        count = len(self.args)
        return list(tensors[:count]), dict(zip(self.kwargs, tensors[count:], strict=True))

    def outputs(self, returned: object) -> tuple[torch.Tensor, ...]:
        """The tensors in what forward returned, one for each of `output_names`.

        Raises BuildFailedError where their number is another.
        """
        import torch
        from torch.utils import _pytree

        leaves = _pytree.tree_leaves(returned)  # of a tuple, dict or ModelOutput
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        if len(tensors) != len(self.output_names):
            raise BuildFailedError(
                f"{self.source} returns {len(tensors)} tensors here, "
                f"and {len(self.output_names)} when it was exported: {', '.join(self.output_names)}"
            )
        return tensors


@contextlib.contextmanager
def torch_errors(what: str) -> Iterator[None]:
    """Whatever torch or the user's forward raises, SystemExit included, becomes one of ours.

    Raises BuildFailedError: "WHAT: message".
    """
    try:
        yield
    except TwofourError:
        raise
    except (Exception, SystemExit) as error:
        hint = "use a smaller batch" if "OutOfMemory" in type(error).__name__ else None
        raise BuildFailedError(f"{what}: {in_one_line(error)}", hint=hint) from error


def in_one_line(error: BaseException) -> str:
    """Type and first line of the message; of a C++ compiler's error, the compiler's own line."""
    # "backend='inductor' raised:\nCppCompileError: C++ compile error\n...\na.cpp:1:10: error: x"
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    compilers = _COMPILER_ERROR.search(text)
    if compilers is not None and compilers[0].strip() != line:
        line = f"{line}: {compilers[0].strip()}"
    name = type(error).__name__
    return line if line.startswith(name) else f"{name}: {line}"


@frozen
class Ready:
    """A program in a mode: what runs, and what the settings say of it."""

    program: TorchProgram
    device: TorchDevice
    closing: contextlib.ExitStack
    """What is undone when the variant is closed."""
    forward: Callable[..., object]
    """Is called as the module is."""
    dtype: str
    """Type of the floating-point inputs."""
    precision: str
    channels_last: bool = False
    """4-dimensional inputs are given with the channels innermost."""
    options: tuple[str, ...] = ()
    sparse_kernels: bool | None = None

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input where the module is and as it takes it."""
        import torch

        if tensor.is_floating_point():
            tensor = tensor.to(getattr(torch, self.dtype))
        tensor = tensor.to(self.device.kind)
        if self.channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def run_example(self) -> tuple[torch.Tensor, ...]:
        """The tensors that forward gives for the example inputs; raises what forward raises."""
        import torch

        args, kwargs = self.program.arguments(list(map(self.put, self.program.tensors)))
        with torch.inference_mode():
            return self.program.outputs(self.forward(*args, **kwargs))


@frozen
class TorchMode:
    """How a mode puts a program on a device."""

    dtype: str = "float32"
    """Type of the weights and of floating-point inputs."""
    gpu_dtype: str | None = None
    """The same on a GPU, where it is another."""
    device: Callable[[], TorchDevice] = best_device
    """Gives the device, or raises for what is missing on this machine."""
    change: Callable[[Ready], Ready] = lambda ready: ready

    def make(self, program: TorchProgram, closing: contextlib.ExitStack) -> Ready:
        """Bring the module to the device, in evaluation mode and in place, and change it."""
        import torch

        device = self.device()
        dtype = (device.kind == CUDA and self.gpu_dtype) or self.dtype
        module = program.module.eval().requires_grad_(requires_grad=False).to(device.kind)
        # Module.to(dtype) would cast complex buffers too, and drop their imaginary part
        {"float32": module.float, "float16": module.half, "bfloat16": module.bfloat16}[dtype]()
        options: tuple[str, ...] = ()
        if dtype == "float32" and device.kind == CUDA:
            options = (f"float32_matmul_precision={torch.get_float32_matmul_precision()}",)
        ready = Ready(
            program=program,
            device=device,
            closing=closing,
            forward=module,
            dtype=dtype,
            precision=dtype,
            options=options,
        )
        return self.change(ready)


def _without_fast_path(ready: Ready) -> None:
    """Turn off the fused kernels of nn.TransformerEncoderLayer and nn.MultiheadAttention.

    They ask neither which attention is allowed nor whether weights are packed.
    """
    import torch

    before = torch.backends.mha.get_fastpath_enabled()
    ready.closing.callback(torch.backends.mha.set_fastpath_enabled, before)
    torch.backends.mha.set_fastpath_enabled(value=False)


def _channels_last(ready: Ready) -> Ready:
    import torch

    module = ready.program.module
    if not any(parameter.dim() == 4 for parameter in module.parameters()):
        raise BuildFailedError(
            f"{ready.program.source} has no 2-d convolution, so channels_last changes nothing"
        )
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    return replace(ready, channels_last=True, options=("inputs=channels_last", *ready.options))


def _autocast(ready: Ready, *, dtype: str) -> Ready:
    """float32 weights, cast in every run for the operators that torch.autocast lists."""
    import torch

    def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> object:
        with torch.autocast(ready.device.kind, dtype=getattr(torch, dtype)):
            return ready.forward(*args, **kwargs)

    return replace(ready, forward=forward, precision=dtype, options=("autocast from float32",))


def _attention(ready: Ready, *, backend: str) -> Ready:
    """Every attention in one back end of torch.nn.attention.SDPBackend, or torch's own error."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _without_fast_path(ready)
    ready.closing.enter_context(sdpa_kernel(getattr(SDPBackend, backend)))
    return replace(ready, options=("mha_fastpath=off", *ready.options))


def _compiled(ready: Ready) -> Ready:
    """torch.compile, once for each set of shapes: kernels for a dynamic batch would be slower."""
    import torch
    from torch import _dynamo as dynamo

    dynamo.reset()
    ready.closing.callback(dynamo.reset)
    ready.closing.enter_context(dynamo.config.patch({"recompile_limit": _MOST_SHAPES}))
    compiled = replace(ready, forward=torch.compile(ready.program.module, dynamic=False))
    counted = dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    compiled.run_example()
    graphs = counted["unique_graphs"] - before
    if graphs == 0:
        raise BuildFailedError(f"torch.compile compiled nothing of {ready.program.source}")
    return replace(compiled, options=("dynamic=False", f"graphs={graphs}", *ready.options))


def _semi_structured(ready: Ready, *, backend: str) -> Ready:
    """Linear layers whose weights are 2:4 and fit the back end, in its kernels."""
    from torch import nn

    _without_fast_path(ready)
    dense = ready.run_example()
    layers = [layer for layer in ready.program.module.modules() if isinstance(layer, nn.Linear)]
    left = Counter(filter(None, (pack(layer, backend) for layer in layers)))
    packed = len(layers) - left.total()
    why_left = "; ".join(f"{number} of {len(layers)}: {why}" for why, number in left.items())
    if not packed:
        raise BuildFailedError(
            f"no layer of {ready.program.source} can run in {backend} kernels: "
            f"{why_left or 'it has no Linear layer'}",
            hint="only Linear layers with 2:4 weights can: compare the sparse weights",
        )
    sparse = ready.run_example()
    cosine = min(map(cosine_of, dense, sparse))
    if not cosine >= _LEAST_COSINE:
        raise BuildFailedError(
            f"{backend} kernels give other outputs than dense ones with the same weights: "
            f"cosine {cosine:.4f}",
            hint="known of some releases of torch and cuSPARSELt on some GPUs: "
            "try the other back end, or newer ones",
        )
    options = [f"sparse_layers={packed} of {len(layers)} Linear"]
    if left:
        options.append(f"left dense: {why_left}")
    return replace(ready, options=(*options, "mha_fastpath=off"), sparse_kernels=True)


def pack(layer: nn.Linear, backend: str) -> str | None:
    """Pack a Linear's weight, or say why it stays dense.

    torch checks shape and type itself, and not the pattern: a weight that is not 2:4 would give
    wrong numbers (pytorch issue 109175).
    """
    import torch
    from torch import nn

    weight = layer.weight.detach()
    if not check(weight.float().cpu().numpy(), 1, HARDWARE_PATTERN).holds:
        return "the weight is not 2:4"
    # the class itself: the switch between the two, `_FORCE_CUTLASS`, is private
    kind: Untyped = getattr(torch.sparse, f"SparseSemiStructuredTensor{backend.upper()}")
    try:
        packed = kind.from_dense(weight.contiguous())
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return in_one_line(error)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    return None


def cosine_of(first: torch.Tensor, second: torch.Tensor) -> float:
    """Over the values that are finite in the first; 1.0 where those are equal, zeros included."""
    import torch

    kept = first.isfinite()
    a = first[kept].float()
    b = second[kept].float()
    if torch.equal(a, b):
        return 1.0
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def _gpu(why_not: str) -> TorchDevice:
    """The GPU; raises MissingToolError where torch has none."""
    device = best_device()
    return device if device.kind == CUDA else _missing(why_not)


def _missing(why_not: str, hint: str | None = None) -> TorchDevice:
    """The device of a mode that does not run here, or anywhere: always raises MissingToolError."""
    raise MissingToolError(why_not, hint=hint)


def _not_run(why_not: str, hint: str | None = None) -> TorchMode:
    """A row that says what is missing."""
    return TorchMode(device=partial(_missing, why_not, hint))


def _sparse_kernels(backend: str) -> TorchMode:
    change = partial(_semi_structured, backend=backend)
    return TorchMode(dtype="float16", device=partial(_gpu, _NO_SPARSE), change=change)


def _attention_in(backend: str, *, on_cpu: bool = True) -> TorchMode:
    """float16 on a GPU, where flash and cuDNN take nothing wider, so that they compare."""
    device = best_device if on_cpu else partial(_gpu, "torch has this attention on GPUs only")
    return TorchMode(
        gpu_dtype="float16", device=device, change=partial(_attention, backend=backend)
    )


MODES: Mapping[str, TorchMode] = {
    "eager": TorchMode(),
    "channels_last": TorchMode(change=_channels_last),
    "autocast-fp16": TorchMode(change=partial(_autocast, dtype="float16")),
    "autocast-bf16": TorchMode(change=partial(_autocast, dtype="bfloat16")),
    "fp16": TorchMode(dtype="float16"),
    "bf16": TorchMode(dtype="bfloat16"),
    "dynamic-int8": _not_run(_NO_INT8, _INT8_ELSEWHERE),
    "static-int8": _not_run(_NO_INT8, _INT8_ELSEWHERE),
    "compile": TorchMode(change=_compiled),
    "torchscript": _not_run("torch has deprecated TorchScript", "time torch:compile instead"),
    "semi-structured-cusparselt": _sparse_kernels("cusparselt"),
    "semi-structured-cutlass": _sparse_kernels("cutlass"),
    "sdpa-flash": _attention_in("FLASH_ATTENTION"),
    "sdpa-efficient": _attention_in("EFFICIENT_ATTENTION", on_cpu=False),
    "sdpa-math": _attention_in("MATH"),
    "sdpa-cudnn": _attention_in("CUDNN_ATTENTION", on_cpu=False),
    "xla": _not_run("twofour does not run torch_xla: there was no device to try it on"),
}
"""Every mode by the word behind `torch:`, the usual one first."""


# --- the engine -----------------------------------------------------------------------------------


class TorchEngine:
    """Opens torch modules; there is nothing that it could build from ONNX."""

    name = "torch"
    modes = tuple(
        Mode(name=name, needs_sparse=name.startswith("semi-structured")) for name in MODES
    )
    open_levels: tuple[str, ...] = ()

    def status(self, mode: str | None = None) -> EngineStatus:
        """Whether there is torch, and what a mode needs, a GPU or a compiler; `open` tries it."""
        try:
            import torch
        except (ImportError, OSError, RuntimeError) as error:
            why_not = f"torch cannot be imported: {first_line(error)}"
            return _cannot_run(self.name, why_not, "pip install torch")
        wanted = mode or "eager"
        try:
            with torch_errors(f"{self.name}:{wanted} does not run"):
                device = MODES[wanted].device()
        except TwofourError as error:
            return _cannot_run(self.name, error.message, error.hint)
        return EngineStatus(
            engine=self.name,
            version=str(torch.__version__),
            can_run=True,
            why_not=None,
            device=device.name,
        )

    def open(self, request: OpenRequest) -> TimedModel:
        """A module in a mode, run once on its example inputs; one at a time in a process.

        The module is changed in place, and settings of torch (threads, attention back ends) are
        those of the process until `close`. Raises what `Engine.open` raises.
        """
        import torch

        program = request.program
        with contextlib.ExitStack() as stack:
            with torch_errors(f"{self.name}:{request.mode} cannot run {program.source}"):
                torch.set_num_threads(request.threads)
                ready = MODES[request.mode].make(program, stack)
                ready.device.time_ms(ready.run_example)
            settings = _settings(ready, self.name, request)
            return TimedTorch(replace(ready, closing=stack.pop_all()), settings)


class TorchTensorRtEngine(TorchEngine):
    """A row that says what is missing: torch-tensorrt needs a GPU to be written for."""

    name = "torch-tensorrt"
    modes = TENSORRT_MODES

    def status(self, mode: str | None = None) -> EngineStatus:  # noqa: ARG002  # it has no mode yet
        """It cannot run."""
        why_not = "twofour does not run torch-tensorrt: there was no GPU to try it on"
        return _cannot_run(self.name, why_not, "export the model and build it with TensorRT")


def _cannot_run(engine: str, why_not: str, hint: str | None) -> EngineStatus:
    return EngineStatus(engine=engine, version=None, can_run=False, why_not=why_not, hint=hint)


class TimedTorch:
    """Meets TimedModel; made by `TorchEngine.open`."""

    size_bytes: int | None = None

    def __init__(self, ready: Ready, settings: VariantSettings) -> None:
        self.settings = settings
        self.inputs = ready.program.inputs
        self._opened = ready
        self._run: Callable[[], object] | None = None
        self._what = f"{settings.engine}:{settings.mode} failed while running {settings.model}"

    def prepare(self, inputs: Arrays) -> None:
        """Put the inputs on the device in the types and layout of the mode, and run once."""
        import torch

        device = self._opened.device
        if device.kind == CUDA:
            torch.cuda.reset_peak_memory_stats()
        with torch_errors(self._what):
            self._run = self._bound(inputs)
            device.time_ms(self._run)  # waits, so that a GPU's errors show up here

    def run_ms(self) -> float:
        """One call of forward; what it spans is in `settings.timing`."""
        assert self._run is not None, "prepare comes first"
        with torch_errors(self._what):
            return self._opened.device.time_ms(self._run)

    def outputs(self, inputs: Arrays) -> dict[str, Array]:
        """Every tensor that forward returns, floats as float32."""
        program = self._opened.program
        with torch_errors(self._what):
            tensors = program.outputs(self._bound(inputs)())
            arrays = map(float32_array, tensors)
            return dict(zip(program.output_names, arrays, strict=True))

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:  # noqa: ARG002  # the Protocol's
        """None: torch has no profile by layer that costs no time."""
        return ()

    def peak_device_memory_bytes(self) -> int | None:
        """Most memory in tensors since `prepare`, as torch's allocator counts it."""
        import torch

        if self._opened.device.kind != CUDA:
            return None
        return int(torch.cuda.max_memory_allocated())

    def close(self) -> None:
        """Let go of the module and put torch's settings back."""
        self._opened.closing.close()
        self._run = None

    def _bound(self, inputs: Arrays) -> Callable[[], object]:
        import torch

        ready = self._opened
        fitted = fit_inputs(inputs, self.inputs)
        tensors = [ready.put(torch.tensor(fitted[tensor.name])) for tensor in self.inputs]
        args, kwargs = ready.program.arguments(tensors)

        def run() -> object:
            with torch.inference_mode():
                return ready.forward(*args, **kwargs)

        return run


def _settings(ready: Ready, engine: str, request: OpenRequest) -> VariantSettings:
    import torch

    device = ready.device
    options = ready.options
    if device.kind == CUDA:
        hip = torch.version.hip  # None in builds for CUDA
        options += (f"cuda={torch.version.cuda}" if hip is None else f"hip={hip}",)
    return VariantSettings(
        engine=engine,
        mode=request.mode,
        version=str(torch.__version__),
        device=device.name,
        model=ready.program.source,
        weights=request.weights,
        precision=ready.precision,
        sparse_kernels=ready.sparse_kernels,
        threads=request.threads if device.kind == CPU else None,
        timing=device.timing,
        options=options,
    )

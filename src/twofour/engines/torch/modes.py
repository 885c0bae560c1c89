"""The modes of torch, a row each: types and device, and a function for what else is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from twofour.engines.protocol import Untyped
from twofour.engines.torch.program import (
    CUDA,
    Forward,
    TorchDevice,
    TorchProgram,
    best_device,
    in_one_line,
)
from twofour.errors import BuildFailedError, MissingToolError
from twofour.pattern import check
from twofour.records.weights import HARDWARE_PATTERN

if TYPE_CHECKING:
    import torch
    from torch import nn

_NO_SPARSE = "2:4 kernels of torch need a GPU with sparse tensor cores (NVIDIA, SM 8.0 and up)"
_NO_INT8 = "torch has deprecated torch.ao.quantization, which has no kernels for GPUs"
_INT8_ELSEWHERE = "time INT8 in another engine: --engines onnxruntime:int8,onnxruntime:uint8"
_MOST_SHAPES = 64
"""Sets of shapes that are compiled; torch's own default is 8, and then it runs uncompiled."""
_LEAST_COSINE = 0.99
"""Sparse against dense outputs, both in float16: below it a kernel computes something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A program in a mode: what runs, and what the settings say of it."""

    program: TorchProgram
    device: TorchDevice
    closing: ExitStack
    """What is undone when the variant is closed."""
    forward: Forward
    dtype: str
    """Type of the floating-point inputs."""
    precision: str
    channels_last: bool = False
    """4-dimensional inputs are given with the channels innermost."""
    options: tuple[str, ...] = ()
    sparse_kernels: bool | None = None

    def put(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Inputs where the module is and as it takes them."""
        import torch

        def put(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point():
                tensor = tensor.to(getattr(torch, self.dtype))
            moved: torch.Tensor = tensor.to(self.device.kind)
            if self.channels_last and moved.dim() == 4:
                moved = moved.contiguous(memory_format=torch.channels_last)
            return moved

        return tuple(map(put, tensors))

    def run_example(self) -> tuple[torch.Tensor, ...]:
        """The tensors that forward gives for the example inputs; raises what forward raises."""
        import torch

        args, kwargs = self.program.arguments(self.put(self.program.tensors))
        with torch.inference_mode():
            return self.program.outputs(self.forward(*args, **kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMode:
    """How a mode puts a program on a device."""

    dtype: str = "float32"
    """Type of the weights and of floating-point inputs."""
    gpu_dtype: str | None = None
    """The same on a GPU, where it is another."""
    device: Callable[[], TorchDevice] = best_device
    """Gives the device, or raises for what is missing on this machine."""
    change: Callable[[Ready], Ready] = lambda ready: ready

    def make(self, program: TorchProgram, closing: ExitStack) -> Ready:
        """Bring the module to the device, in evaluation mode and in place, and change it."""
        device = self.device()
        dtype = (device.kind == CUDA and self.gpu_dtype) or self.dtype
        module = program.module.eval().requires_grad_(requires_grad=False).to(device.kind)
        # Module.to(dtype) would cast complex buffers too, and drop their imaginary part
        {"float32": module.float, "float16": module.half, "bfloat16": module.bfloat16}[dtype]()
        ready = Ready(
            program=program,
            device=device,
            closing=closing,
            forward=module,
            dtype=dtype,
            precision=dtype,
        )
        if dtype == "float32" and device.kind == CUDA:
            import torch

            rounding = f"float32_matmul_precision={torch.get_float32_matmul_precision()}"
            ready = replace(ready, options=(rounding,))
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
    options = ("inputs=channels_last", *ready.options)
    return replace(ready, channels_last=True, options=options)


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
    renamed = hasattr(dynamo.config, "recompile_limit")  # in torch 2.7
    limit = {"recompile_limit" if renamed else "cache_size_limit": _MOST_SHAPES}
    ready.closing.enter_context(dynamo.config.patch(limit))
    made = replace(ready, forward=torch.compile(ready.program.module, dynamic=False))
    counted = dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    made.run_example()
    graphs = counted["unique_graphs"] - before
    if graphs == 0:
        raise BuildFailedError(f"torch.compile compiled nothing of {ready.program.source}")
    return replace(made, options=("dynamic=False", f"graphs={graphs}", *ready.options))


def _semi_structured(ready: Ready, *, backend: str) -> Ready:
    """Linear layers whose weights are 2:4 and fit the back end, in its kernels."""
    from torch import nn

    _without_fast_path(ready)
    dense = ready.run_example()
    layers = [layer for layer in ready.program.module.modules() if isinstance(layer, nn.Linear)]
    left = Counter(why for layer in layers if (why := pack(layer, backend)) is not None)
    why_left = "; ".join(f"{number} of {len(layers)}: {why}" for why, number in left.items())
    if left.total() == len(layers):
        raise BuildFailedError(
            f"no layer of {ready.program.source} can run in {backend} kernels: "
            f"{why_left or 'it has no Linear layer'}",
            hint="only Linear layers with 2:4 weights can: compare the sparse weights",
        )
    sparse = ready.run_example()
    cosine = min(cosine_of(one, other) for one, other in zip(dense, sparse, strict=True))
    if not cosine >= _LEAST_COSINE:
        raise BuildFailedError(
            f"{backend} kernels give other outputs than dense ones with the same weights: "
            f"cosine {cosine:.4f}",
            hint="known of some releases of torch and cuSPARSELt on some GPUs: "
            "try the other back end, or newer ones",
        )
    options = [f"sparse_layers={len(layers) - left.total()} of {len(layers)} Linear"]
    options += [f"left dense: {why_left}"] if left else []
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
    a, b = first[kept].float(), second[kept].float()
    if torch.equal(a, b):
        return 1.0
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def _gpu(why_not: str) -> TorchDevice:
    """The GPU; raises MissingToolError where torch has none."""
    device = best_device()
    if device.kind != CUDA:
        raise MissingToolError(why_not)
    return device


def _with_compiler() -> TorchDevice:
    """The device; raises MissingToolError without a compiler for it."""
    import torch

    if torch.cuda.is_available():
        from torch.utils import _triton

        if not _triton.has_triton():
            raise MissingToolError(
                "torch.compile finds no working Triton for this GPU", hint="pip install triton"
            )
        return best_device()
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise MissingToolError(
            "torch.compile finds no C++ compiler",
            hint="install g++ or clang, or name one in the environment variable CXX",
        ) from error
    return best_device()


def _not_run(why_not: str, hint: str | None = None) -> TorchMode:
    """A row that says what is missing."""

    def device() -> TorchDevice:
        raise MissingToolError(why_not, hint=hint)

    return TorchMode(device=device)


def _sparse_kernels(backend: str) -> TorchMode:
    device, change = partial(_gpu, _NO_SPARSE), partial(_semi_structured, backend=backend)
    return TorchMode(dtype="float16", device=device, change=change)


def _attention_in(backend: str, *, on_cpu: bool = True) -> TorchMode:
    """float16 on a GPU, where flash and cuDNN take nothing wider, so that they compare."""
    device = best_device if on_cpu else partial(_gpu, "torch has this attention on GPUs only")
    change = partial(_attention, backend=backend)
    return TorchMode(gpu_dtype="float16", device=device, change=change)


MODES: Mapping[str, TorchMode] = MappingProxyType(
    {
        "eager": TorchMode(),
        "channels_last": TorchMode(change=_channels_last),
        "autocast-fp16": TorchMode(change=partial(_autocast, dtype="float16")),
        "autocast-bf16": TorchMode(change=partial(_autocast, dtype="bfloat16")),
        "fp16": TorchMode(dtype="float16"),
        "bf16": TorchMode(dtype="bfloat16"),
        "dynamic-int8": _not_run(_NO_INT8, _INT8_ELSEWHERE),
        "static-int8": _not_run(_NO_INT8, _INT8_ELSEWHERE),
        "compile": TorchMode(device=_with_compiler, change=_compiled),
        "torchscript": _not_run("torch has deprecated TorchScript", "time torch:compile instead"),
        "semi-structured-cusparselt": _sparse_kernels("cusparselt"),
        "semi-structured-cutlass": _sparse_kernels("cutlass"),
        "sdpa-flash": _attention_in("FLASH_ATTENTION"),
        "sdpa-efficient": _attention_in("EFFICIENT_ATTENTION", on_cpu=False),
        "sdpa-math": _attention_in("MATH"),
        "sdpa-cudnn": _attention_in("CUDNN_ATTENTION", on_cpu=False),
        "xla": _not_run("twofour does not run torch_xla: there was no device to try it on"),
    }
)
"""Every mode by the word behind `torch:`, the usual one first."""

"""The modes of torch: what each makes of a module, and whether it can here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from twofour.engines.protocol import Untyped
from twofour.engines.torch.placed import (
    CUDA,
    Forward,
    PerShape,
    Placed,
    Ready,
    TorchDevice,
    TorchProgram,
    best_device,
    by_position,
    cpu_device,
    float32_options,
    in_one_line,
    place,
    torch_dtype,
    without_fast_path,
    xla_device,
)
from twofour.engines.torch.semi_structured import semi_structured
from twofour.errors import BuildFailedError, MissingToolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode


_NO_KERNEL = re.compile(r"No viable backend|No available kernel")
"""What torch says where no back end that is allowed takes a call (aten/native/transformers)."""
_OPERATOR = "scaled_dot_product"
"""Part of the name of the operator and of every fused one it may become."""
_MOST_SHAPES = 64
"""Sets of shapes that are compiled before it is an error; torch's own default is 8, and after
those it would go on uncompiled."""
ENGINE = "torch"
MakeReady = Callable[[TorchProgram, TorchDevice, ExitStack], Ready]
"""Puts a program into a mode; what must be undone when the variant closes goes on the stack."""
_ON_CPU_ONLY = frozenset({"dynamic-int8", "static-int8"})
"""torch.ao.quantization has no kernels for GPUs."""


def attention(
    program: TorchProgram, device: TorchDevice, stack: ExitStack, *, backend: str
) -> Ready:
    """Every attention in the back end of that name in torch.nn.attention.SDPBackend, or an error.

    float16 on a GPU, where flash and cuDNN take nothing wider, so that the back ends compare. The
    fused path of nn.TransformerEncoder is turned off: it does not ask which back end is allowed.
    Raises BuildFailedError where the module never calls scaled_dot_product_attention, and where the
    back end does not take a call.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    half = device.kind == CUDA
    placed = place(program, device, "float16" if half else "float32")
    without_fast_path(stack)
    stack.enter_context(sdpa_kernel(getattr(SDPBackend, backend)))
    try:
        calls = count_attention(placed)
    except RuntimeError as error:
        if not _NO_KERNEL.search(str(error)):
            raise
        raise BuildFailedError(
            f"{backend.lower()} has no kernel here ({device.name}, {placed.dtype}) for the "
            f"attention of {program.source}"
        ) from error
    if calls == 0:
        raise BuildFailedError(
            f"{program.source} never calls scaled_dot_product_attention, so its back end changes "
            "nothing",
            hint='Hugging Face models call it when loaded with attn_implementation="sdpa"',
        )
    options = (f"attention_calls={calls}", "mha_fastpath=off")
    return Ready(
        placed=placed,
        forward=placed.module,
        precision=placed.dtype,
        options=options if half else (*options, *float32_options(device)),
        layers=placed.module,
    )


def count_attention(placed: Placed) -> int:
    """Calls of scaled_dot_product_attention in one run on the example inputs."""
    counting: Untyped = _counting_mode()
    with counting:
        placed.run_example(placed.module)
    return int(counting.calls)


def _counting_mode() -> TorchDispatchMode:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch lacks the types
        # a TorchFunctionMode would miss the calls inside torch's own functions
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # likewise
            self.calls = 0

        def __torch_dispatch__(
            self,
            func: Any,  # noqa: ANN401  # an operator of torch
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> object:
            self.calls += _OPERATOR in str(func)
            return func(*args, **(kwargs or {}))

    return Counting()


def compiled(program: TorchProgram, device: TorchDevice, stack: ExitStack) -> Ready:
    """torch.compile with its default back end, once for each set of shapes (dynamic=False).

    Kernels for a dynamic batch would be slower than those that a sweep is to compare. Raises
    BuildFailedError where nothing at all was compiled.
    """
    import torch
    from torch import _dynamo as dynamo

    placed = place(program, device)
    dynamo.reset()
    stack.callback(dynamo.reset)
    stack.enter_context(dynamo.config.patch(_dynamo_limits(dynamo.config)))
    before = _graphs_compiled()
    forward = torch.compile(placed.module, dynamic=False)
    placed.run_example(forward)
    graphs = _graphs_compiled() - before
    if graphs == 0:
        raise BuildFailedError(f"torch.compile compiled nothing of {program.source}")
    options = ("dynamic=False", f"graphs={graphs}", *float32_options(device))
    return Ready(placed=placed, forward=forward, precision="float32", options=options)


def torchscript(
    program: TorchProgram,
    device: TorchDevice,
    stack: ExitStack,  # noqa: ARG001  # as the other modes
) -> Ready:
    """torch.jit.trace and freeze, once for each set of shapes: a trace may hold sizes as numbers.

    What depends on values of the inputs is fixed as the first inputs of these shapes had it.
    """
    placed = place(program, device)
    module = by_position(program)

    def make(tensors: tuple[torch.Tensor, ...]) -> Forward:
        import torch

        traced = torch.jit.trace(  # type: ignore[no-untyped-call]  # torch lacks the types
            module, tensors, check_trace=False, strict=False
        )
        frozen: Forward = torch.jit.freeze(traced)
        return frozen

    return Ready(
        placed=placed,
        forward=PerShape(make),
        precision="float32",
        options=("traced for each shape", "frozen", *float32_options(device)),
    )


def check_compiler(device: TorchDevice) -> None:
    """Raise MissingToolError where torch.compile lacks its compiler, found by starting it.

    Compiling something would take seconds: this is what a list of modes can afford.
    """
    if device.kind == "cuda":
        from torch.utils import _triton

        if not _triton.has_triton():
            raise MissingToolError(
                "torch.compile finds no working Triton for this GPU", hint="pip install triton"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    get_cpp_compiler()


def _dynamo_limits(config: Untyped) -> dict[str, Any]:
    """Settings of dynamo under which too many shapes are an error; renamed in torch 2.7."""
    renamed = hasattr(config, "recompile_limit")
    limit = "recompile_limit" if renamed else "cache_size_limit"
    fails = "fail_on_recompile_limit_hit" if renamed else "fail_on_cache_limit_hit"
    return {limit: _MOST_SHAPES, f"accumulated_{limit}": 4 * _MOST_SHAPES, fails: True}


def _graphs_compiled() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def dynamic_int8(program: TorchProgram, device: TorchDevice, stack: ExitStack) -> Ready:
    """INT8 weights in Linear and recurrent layers, activations quantised in every run; in place.

    Raises BuildFailedError where there is no such layer.
    """
    import torch
    from torch import nn

    quantization = _quantization()
    placed = place(program, device)
    kinds = {nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell}
    # layers are replaced in what holds them
    holder = nn.Sequential(placed.module) if type(placed.module) in kinds else placed.module
    module = quantization.quantize_dynamic(holder, kinds, dtype=torch.qint8, inplace=True)
    if int8_layers(module) == 0:
        raise BuildFailedError(
            f"{program.source} has no Linear, LSTM or GRU layer that dynamic INT8 could take",
            hint="convolutions take static INT8: torch:static-int8 or onnxruntime:int8",
        )
    return _ready_int8(placed, module, stack, "weights per tensor, activations in every run")


def static_int8(program: TorchProgram, device: TorchDevice, stack: ExitStack) -> Ready:
    """INT8 weights and activations, their ranges taken from the example inputs (FX graph mode).

    Raises BuildFailedError for a module that torch.fx cannot trace, or without such a layer.
    """
    import torch

    quantization = _quantization()
    placed = place(program, device)
    args, kwargs = program.arguments(placed.put(program.tensors))
    mapping = quantization.get_default_qconfig_mapping(torch.backends.quantized.engine)
    try:
        prepared = quantization.quantize_fx.prepare_fx(placed.module, mapping, args)
    except Exception as error:
        raise BuildFailedError(
            f"torch.fx cannot trace {type(placed.module).__name__}: {in_one_line(error)}",
            hint="static INT8 in torch needs a forward without branches on its inputs; "
            "onnxruntime:int8 quantises the exported graph",
        ) from error
    with torch.inference_mode():
        prepared(*args, **kwargs)
    module = quantization.quantize_fx.convert_fx(prepared)
    if int8_layers(module) == 0:
        raise BuildFailedError(f"{program.source} has no layer that static INT8 could take")
    return _ready_int8(placed, module, stack, f"calibrated with {_calibration_rows(program)} rows")


def int8_layers(module: nn.Module) -> int:
    """Layers of the module that have INT8 weights."""
    return sum(
        type(layer).__module__.startswith("torch.ao.nn.")
        and (hasattr(layer, "weight") or hasattr(layer, "_all_weight_values"))
        for layer in module.modules()
    )


def _ready_int8(placed: Placed, module: nn.Module, stack: ExitStack, how: str) -> Ready:
    import torch

    without_fast_path(stack)  # it looks for weights that quantised layers do not have
    options = (
        f"int8_layers={int8_layers(module)}",
        how,
        f"kernels={torch.backends.quantized.engine}",
    )
    program = replace(placed.program, module=module)
    return Ready(
        placed=replace(placed, program=program),
        forward=module,
        precision="int8",
        options=options,
        layers=module,
    )


def _calibration_rows(program: TorchProgram) -> int:
    return next((int(t.shape[0]) for t in program.tensors if t.dim()), 1)


def _quantization() -> Any:  # noqa: ANN401  # a package of torch without types
    """torch.ao.quantization, which is deprecated: later releases of torch may lack it."""
    try:
        import torch.ao.quantization.quantize_fx
        from torch.ao import quantization
    except ImportError as error:
        raise MissingToolError(
            "this torch has no torch.ao.quantization",
            hint="onnxruntime:int8 quantises without it",
        ) from error
    if torch.backends.quantized.engine == "none":
        raise MissingToolError("this torch was built without INT8 kernels for this CPU")
    return quantization


def eager(program: TorchProgram, device: TorchDevice, stack: ExitStack) -> Ready:  # noqa: ARG001  # as the other modes
    """The module as it is, in float32."""
    placed = place(program, device)
    return Ready(
        placed=placed,
        forward=placed.module,
        precision="float32",
        options=float32_options(device),
        layers=placed.module,
    )


def channels_last(program: TorchProgram, device: TorchDevice, stack: ExitStack) -> Ready:  # noqa: ARG001  # as the other modes
    """Channels innermost in 4-dimensional weights and inputs, float32.

    Raises BuildFailedError where there is no such weight.
    """
    if not any(parameter.dim() == 4 for parameter in program.module.parameters()):
        raise BuildFailedError(
            f"{program.source} has no 2-d convolution, so channels_last changes nothing"
        )
    placed = place(program, device, channels_last=True)
    return Ready(
        placed=placed,
        forward=placed.module,
        precision="float32",
        options=("inputs=channels_last", *float32_options(device)),
        layers=placed.module,
    )


def autocast(
    program: TorchProgram,
    device: TorchDevice,
    stack: ExitStack,  # noqa: ARG001  # as the other modes
    *,
    dtype: str,
) -> Ready:
    """float32 weights, which torch.autocast casts in every run for the operators that it lists."""
    import torch

    placed = place(program, device)
    kind, low = device.kind, torch_dtype(dtype)

    def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> object:
        with torch.autocast(kind, dtype=low):
            returned: object = placed.module(*args, **kwargs)
            return returned

    return Ready(
        placed=placed,
        forward=forward,
        precision=dtype,
        options=("autocast from float32",),
        layers=placed.module,
    )


def cast(
    program: TorchProgram,
    device: TorchDevice,
    stack: ExitStack,  # noqa: ARG001  # as the other modes
    *,
    dtype: str,
) -> Ready:
    """Weights, inputs and outputs in `dtype`: what the 2:4 kernels of torch compare with."""
    placed = place(program, device, dtype)
    return Ready(placed=placed, forward=placed.module, precision=dtype, layers=placed.module)


MODES: Mapping[str, MakeReady] = MappingProxyType(
    {
        "eager": eager,
        "channels_last": channels_last,
        "autocast-fp16": partial(autocast, dtype="float16"),
        "autocast-bf16": partial(autocast, dtype="bfloat16"),
        "fp16": partial(cast, dtype="float16"),
        "bf16": partial(cast, dtype="bfloat16"),
        "dynamic-int8": dynamic_int8,
        "static-int8": static_int8,
        "compile": compiled,
        "torchscript": torchscript,
        "semi-structured-cusparselt": partial(semi_structured, backend="cusparselt"),
        "semi-structured-cutlass": partial(semi_structured, backend="cutlass"),
        "sdpa-flash": partial(attention, backend="FLASH_ATTENTION"),
        "sdpa-efficient": partial(attention, backend="EFFICIENT_ATTENTION"),
        "sdpa-math": partial(attention, backend="MATH"),
        "sdpa-cudnn": partial(attention, backend="CUDNN_ATTENTION"),
        "xla": eager,
    }
)
"""Every mode by the word behind `torch:`, the usual one first."""


def device_for(mode: str) -> TorchDevice:
    """The GPU where there is one and the mode has kernels for it, else the CPU.

    Raises MissingToolError where the mode needs a device that is not there.
    """
    if mode == "xla":
        return xla_device()
    return cpu_device() if mode in _ON_CPU_ONLY else best_device()


def platform_options(device: TorchDevice) -> tuple[str, ...]:
    """Which platform of GPUs this torch runs on; on a CPU, how long its idle threads spin."""
    if device.kind != CUDA:
        spins = os.environ.get("GOMP_SPINCOUNT")
        return () if spins is None else (f"GOMP_SPINCOUNT={spins}",)
    import torch

    hip = torch.version.hip
    return (f"cuda={torch.version.cuda}",) if hip is None else (f"hip={hip}",)

"""The modes of torch: what each makes of a module, and whether it can here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType

from twofour.engines.torch.attention import attention
from twofour.engines.torch.compiled import compiled, torchscript
from twofour.engines.torch.device import (
    CUDA,
    TorchDevice,
    best_device,
    cpu_device,
    float32_options,
    xla_device,
)
from twofour.engines.torch.int8 import dynamic_int8, static_int8
from twofour.engines.torch.placed import Ready, TorchProgram, place, torch_dtype
from twofour.engines.torch.semi_structured import semi_structured
from twofour.errors import BuildFailedError

ENGINE = "torch"
MakeReady = Callable[[TorchProgram, TorchDevice, ExitStack], Ready]
"""Puts a program into a mode; what must be undone when the variant closes goes on the stack."""


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

_ON_CPU_ONLY = frozenset({"dynamic-int8", "static-int8"})
"""torch.ao.quantization has no kernels for GPUs."""


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

"""Rules about which eligible layers the builder will hardly give a sparse kernel: dense is faster.

The builder times sparse and dense kernels and keeps the faster (NVIDIA/TensorRT issue 2169).
"""

from __future__ import annotations

from math import prod

from twofour.records import ReasonCode, Weight
from twofour.reports.findings import GUIDE, Case, Finding, eligible, unknown
from twofour.reports.words import layer_size

LARGE_ENOUGH = 256
"""Channels from which maintainers saw sparse kernels win (NVIDIA/TensorRT 3849, 4065)."""
GPU_WITH_SPARSE_FLOAT8 = (9, 0)
"""H100; on RTX 4090 (8.9) no sparse kernel was chosen (NVIDIA/TensorRT-LLM issue 1913)."""


def math_type(case: Case) -> Finding | None:
    """float16 and int8 have documented sparse kernels; other types are listed all the same.

    The type is "unknown" where the weight itself is, which is another rule's business.

    float32 layers are listed (TensorRT 8.4.1, 10.14, 10.16) and never chosen: no sparse kernel for
    FP32 or TF32 was ever timed.
    """
    dtype = case.weight.math_dtype
    if dtype in ("float16", "int8", "unknown"):
        return None
    if dtype in ("float32", "float64"):
        message = f"{dtype}: the builder lists it, but no sparse kernel is known"
        return eligible(ReasonCode.DTYPE, message, f"{GUIDE}; logs of TensorRT 8.4.1 to 10.16")
    if dtype.startswith("float8"):
        return _float8(case)
    if dtype == "bfloat16":
        message = "bfloat16: the GPU can; TensorRT's guide promises only float16 and int8"
        return eligible(ReasonCode.DTYPE, message, GUIDE)
    message = f"{dtype}: nothing is published about sparse kernels for it in TensorRT"
    return unknown(ReasonCode.DTYPE, message)


def int8_output(case: Case) -> Finding | None:
    """A sparse int8 product wins only where its output stays int8 (Model-Optimizer dff1aa1a2)."""
    weight = case.weight
    if weight.math_dtype != "int8" or weight.output_quantized is not False:
        return None
    message = "int8 whose output is not quantised: the dense kernel wins"
    if weight.kernel:
        message += " (seen with matrix products)"
    source = "NVIDIA/Model-Optimizer commit dff1aa1a2, examples/sparse_quant_trt"
    return eligible(ReasonCode.INT8_OUTPUT_NOT_QUANTIZED, message, source)


def small_layer(case: Case) -> Finding | None:
    """Sparse kernels win from about 256 input and output channels; an RxS kernel counts C RxS-fold.

    A rule of thumb: 1x1 convolutions of 64 channels were chosen on Orin Nano (TensorRT 10.3).
    """
    weight = case.weight
    is_known = weight.in_channels > 0 and weight.out_channels > 0
    if weight.groups > 1 or not is_known or not too_small(weight):
        return None
    message = f"{layer_size(weight)}: below {LARGE_ENOUGH}, dense is usually faster"
    source = "NVIDIA/TensorRT issues 3849, 4065 (the maintainers' rule of thumb)"
    return eligible(ReasonCode.SMALL_CHANNELS, message, source)


def too_small(weight: Weight) -> tuple[str, ...]:
    """`narrow_widths` of a weight."""
    return narrow_widths(weight.in_channels, weight.out_channels, weight.kernel)


def narrow_widths(in_channels: int, out_channels: int, kernel: tuple[int, ...]) -> tuple[str, ...]:
    """Which widths are below the rule of thumb: "C", "K", both or none."""
    widths = (("C", in_channels * prod(kernel)), ("K", out_channels))
    return tuple(name for name, width in widths if width < LARGE_ENOUGH)


def _float8(case: Case) -> Finding | None:
    gpu, dtype = case.context.gpu, case.weight.math_dtype
    if gpu is not None and gpu.compute_capability >= GPU_WITH_SPARSE_FLOAT8:
        return None
    here = "" if gpu is None else f"; here: {gpu.name}"
    message = f"{dtype}: chosen on H100, dense was faster on RTX 4090{here}"
    return eligible(ReasonCode.DTYPE, message, "NVIDIA/TensorRT-LLM issue 1913")

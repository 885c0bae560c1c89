"""Rules about which eligible layers the builder will hardly give a sparse kernel: dense is faster.

The builder times sparse and dense kernels and keeps the faster (NVIDIA/TensorRT issue 2169).
"""

from __future__ import annotations

from math import prod

from twofour.records.weights import ReasonCode
from twofour.reports.findings import GUIDE, Case, Finding, eligible, unknown
from twofour.reports.words import layer_size

LARGE_ENOUGH = 256
"""Channels from which maintainers saw sparse kernels win (NVIDIA/TensorRT 3849, 4065).

In the only public logs with choices (TensorRT 10.3 on Orin Nano, two builds of one network) the
builder chose 22 of 50 layers below it and 9 of 28 above: a doubt, no forecast.
"""
WITHOUT_INT8 = (10, 3)
"""Compute capability that cuSPARSELt's table of int8 kernels leaves out between 10.0 and 11.0."""


def math_type(case: Case) -> Finding | None:
    """float16 and int8 have documented sparse kernels; other types are listed all the same.

    The type is "unknown" where the weight itself is, which is another rule's business.
    """
    dtype = case.weight.math_dtype
    if dtype in ("float16", "unknown"):
        return None
    if dtype == "int8":
        return _int8(case)
    if dtype in ("float32", "float64"):
        return _float32(case)
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
    """Maintainers doubt that sparse wins below 256 channels; an RxS kernel counts C RxS-fold.

    The logs at hand do not bear it out (see LARGE_ENOUGH), so it is told and nothing rests on it.
    """
    weight = case.weight
    is_known = weight.in_channels > 0 and weight.out_channels > 0
    narrow = narrow_widths(weight.in_channels, weight.out_channels, weight.kernel)
    if weight.groups > 1 or not is_known or not narrow:
        return None
    message = f"{layer_size(weight)}: below {LARGE_ENOUGH}, where dense may be faster; "
    message += "only the timing of a build tells"
    source = (
        "for: NVIDIA/TensorRT issues 3849, 4065 (the maintainers' rule of thumb); against: two "
        "logs of TensorRT 10.3, where 22 of 50 such layers were chosen and 9 of 28 wider ones"
    )
    return eligible(ReasonCode.SMALL_CHANNELS, message, source)


def narrow_widths(in_channels: int, out_channels: int, kernel: tuple[int, ...]) -> tuple[str, ...]:
    """Which widths are below the rule of thumb: "C", "K", both or none."""
    widths = (("C", in_channels * prod(kernel)), ("K", out_channels))
    return tuple(name for name, width in widths if width < LARGE_ENOUGH)


def _float32(case: Case) -> Finding | None:
    """A weakly typed build runs float32 layers of the file in the lower types that it is allowed.

    In FP32 and TF32 layers are listed (TensorRT 8.4.1, 10.14, 10.16) and never chosen: no sparse
    kernel for them was ever timed. A build of 10.3 with FP16 allowed chose 15 float32 layers.
    """
    dtype, build = case.weight.math_dtype, case.build
    lowered = build.lowers_float32
    if lowered:
        return None
    message = f"{dtype}: the builder lists it, but no sparse kernel is known"
    if lowered is None:
        message += ", unless FP16 or INT8 is allowed"
    elif not build.is_strongly_typed:
        message += ", and this build was allowed no FP16 or INT8"
    return eligible(ReasonCode.DTYPE, message, f"{GUIDE}; logs of TensorRT 8.4.1 to 10.16")


def _int8(case: Case) -> Finding | None:
    if case.build.compute_capability != WITHOUT_INT8:
        return None
    message = "int8: NVIDIA's sparse library has no int8 kernels for compute capability 10.3"
    return eligible(ReasonCode.DTYPE, message, "cuSPARSELt 0.9 and 0.10, supported data types")


def _float8(case: Case) -> Finding:
    dtype = case.weight.math_dtype
    message = f"{dtype}: TensorRT's guide promises only float16 and int8; on RTX 4090 layers were "
    message += "eligible and none was chosen, and no log from another GPU is known"
    return eligible(ReasonCode.DTYPE, message, f"{GUIDE}; NVIDIA/TensorRT-LLM issue 1913")

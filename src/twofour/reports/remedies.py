"""What to do about a reason, with the numbers of the layer."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from twofour.records.eligibility import VerdictName
from twofour.records.weights import HARDWARE_PATTERN, ReasonCode
from twofour.reports.findings import Case, Finding
from twofour.reports.obstacles import GROUP
from twofour.reports.rules import EXPLAIN_DENSE, verdict
from twofour.reports.steps import (
    ALLOW_FLOAT16,
    ALLOW_SPARSE,
    BUILD_AND_READ,
    BUILD_AND_TIME,
    EXPORT_FLOAT16,
    NEWER_GPU,
    NEWER_TENSORRT,
    Step,
    still_to_do,
)

GEMM_TILE = 64
"""Channels that fill a tile of a tensor-core kernel (the k of cuSPARSELt's own samples)."""
NO_PLUGIN = "build without the plugin that takes this layer"
PRUNE_ALONG = "prune it 2:4 along"
PRUNE_FUSED = "prune the layers fused with it too"
OWN_COPY = "give it its own copy of the weight"
_TOO_NARROW = "leave it dense: too few input channels to gain"


def remedy(case: Case, found: tuple[Finding, ...]) -> str | None:
    """Against the main obstacle; for an eligible layer against all that slows it, in order.

    None where nothing is known to be in the way, or all that could be done was done.
    """
    worst = verdict(found)
    judged = [f for f in found if f.reason.code in _REMEDIES and f.best is worst]
    if worst is VerdictName.ELIGIBLE:  # why it was left dense is of no interest where it was not
        judged = [f for f in judged if f.reason.code not in EXPLAIN_DENSE]
    if worst is not VerdictName.ELIGIBLE:
        judged = judged[:1]
    elif judged and case.weight.in_channels < GROUP:
        return _TOO_NARROW
    said = (_REMEDIES[f.reason.code](case) for f in judged)
    return "; ".join(dict.fromkeys(text for text in said if text)) or None


def leaves_dense(remedy: str) -> bool:
    """Whether the layer is to stay as it is: nothing that can be changed makes it run sparse."""
    return remedy.startswith(_LEAVES_DENSE)


def changes(remedy: str) -> tuple[str, ...]:
    """What a row's remedy asks to change, without the figures of the layer.

    () where it leaves the layer dense, or asks only to build, to time or to look.
    """
    found: dict[str, None] = {}
    for part in remedy.split("; "):
        if part.startswith((*_LEAVES_DENSE, BUILD_AND_READ.text)):
            break  # what follows is for those who want to do more all the same
        found |= {said: None for start, said in _CHANGES.items() if part.startswith(start)}
    return tuple(found)


def _prune(case: Case) -> str:
    if case.context.pattern != HARDWARE_PATTERN:
        return f"prune to 2:4 instead of {case.context.pattern}"
    axis = case.weight.axis
    return f"{PRUNE_ALONG} input channels (axis {axis})"


def _leave_grouped(case: Case) -> str:
    groups, dense = case.weight.groups, prod(case.weight.shape)
    return (
        f"leave it dense: groups={groups} -> 1 makes {dense:,} weights {dense * groups:,}, "
        "sparse math saves half at best"
    )


def _leave_depthwise(_: Case) -> str:
    return "leave it dense; prune the 1x1 convolutions around it"


def _widen_axis(case: Case) -> str:
    width = case.weight.in_channels
    if width < GROUP:
        return _TOO_NARROW
    tile = _up(width, GEMM_TILE)
    better = f" (better {tile})" if tile != _up(width, GROUP) else ""
    wider = f"{_up(width, GROUP)} input channels in place of {width}{better}"
    return f"leave it dense; if you can still train: {wider}"


def _change_type(case: Case) -> str:
    dtype = case.weight.math_dtype
    if dtype in ("float32", "float64"):
        return " or ".join(still_to_do(case.build, EXPORT_FLOAT16, ALLOW_FLOAT16))
    if dtype.startswith("float8"):
        return "if the builder takes dense kernels, use float16 or int8"
    if dtype == "int8":
        return "use float16"
    return "if the builder takes dense kernels, use float16"


def _document_op(case: Case) -> str:
    if any(reason.code is ReasonCode.UNSUPPORTED_OP for reason in case.weight.reasons):
        return "fold constants, so that the weight is stored as the layer uses it"
    is_product = not case.weight.kernel and case.weight.op != "Einsum"
    steps = [BUILD_AND_READ, NEWER_TENSORRT] if is_product else [BUILD_AND_READ]
    said = ", or ".join(still_to_do(case.build, *steps))
    if case.weight.op == "Einsum":
        documented = "the same product as a MatMul is on documented ground"
        return f"{said}; {documented}" if said else documented
    if case.weight.op.startswith("ConvTranspose"):
        documented = "resize + convolution is on documented ground"
        return f"{said}; {documented}" if said else documented
    return said


def _quantize_output(case: Case) -> str:
    return f"quantise the output of this {case.weight.op} too (Q/DQ pair behind it)"


def _build_step(step: Step) -> Callable[[Case], str]:
    return lambda case: "".join(still_to_do(case.build, step))


def _leave_picked(_: Case) -> str:
    return "leave it dense: sparse kernels take the weight when the engine is built"


def _constant(_: Case) -> str:
    return "make it a constant: fold it before export, or store it as a parameter"


def _zero_point(_: Case) -> str:
    return "quantise weights and activations symmetrically (int8, zero point 0)"


def _untie(case: Case) -> str:
    if case.at_odds:
        return f"{OWN_COPY}, pruned 2:4 along input channels (axis {case.weight.axis})"
    if not case.weight.looked_up_by:
        return OWN_COPY
    return f"{OWN_COPY}, or prune the embedding too: --include {case.weight.layer}"


def _include(_: Case) -> str:
    return "change --include/--exclude so that it is pruned"


def _prune_file(_: Case) -> str:
    return "prune the ONNX file itself: twofour prune dense.onnx"


def _check(_: Case) -> str:
    return "run twofour validate on the saved file"


def _no_plugin(_: Case) -> str:
    return NO_PLUGIN


def _up(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


_REMEDIES: dict[ReasonCode, Callable[[Case], str]] = {
    ReasonCode.PATTERN_BROKEN: _prune,
    ReasonCode.WRONG_AXIS: _prune,
    ReasonCode.GROUPED_CONV: _leave_grouped,
    ReasonCode.DEPTHWISE_CONV: _leave_depthwise,
    ReasonCode.AXIS_NOT_MULTIPLE: _widen_axis,
    ReasonCode.SMALL_CHANNELS: _build_step(BUILD_AND_TIME),
    ReasonCode.NOT_CONSTANT: _constant,
    ReasonCode.PICKED_AT_RUN_TIME: _leave_picked,
    ReasonCode.UNSUPPORTED_OP: _document_op,
    ReasonCode.DTYPE: _change_type,
    ReasonCode.INT8_OUTPUT_NOT_QUANTIZED: _quantize_output,
    ReasonCode.ZERO_POINT: _zero_point,
    ReasonCode.SHARED_WEIGHT: _untie,
    ReasonCode.EXCLUDED: _include,
    ReasonCode.NOT_A_LAYER: _prune_file,
    ReasonCode.GPU_HAS_NO_SPARSE: _build_step(NEWER_GPU),
    ReasonCode.NOT_CHECKED: _check,
    ReasonCode.IN_PLUGIN: _no_plugin,
    ReasonCode.SPARSITY_OFF: _build_step(ALLOW_SPARSE),
}
_LEAVES_DENSE = ("leave it dense", "accept dense", "try a larger batch")
"""How remedies begin that leave the layer dense, or take that for right."""
_PRUNE_INPUTS = "prune 2:4 along the input channels"
_USE_FLOAT16 = "use float16 (--precision float16)"
_FOLD = "fold these weights to constants before export"
_WORKSPACE = "build with a larger workspace (--memPoolSize=workspace:)"
_CHANGES: dict[str, str] = {
    NEWER_GPU.text: "use a GPU of compute capability 8.0 or later",
    ALLOW_SPARSE.text: "build with sparse weights allowed",
    NEWER_TENSORRT.text: NEWER_TENSORRT.text,
    EXPORT_FLOAT16.text: _USE_FLOAT16,
    ALLOW_FLOAT16.text: _USE_FLOAT16,
    "use float16": _USE_FLOAT16,
    "if the builder takes dense kernels, use float16": _USE_FLOAT16,
    PRUNE_ALONG: _PRUNE_INPUTS,
    PRUNE_FUSED: _PRUNE_INPUTS,
    "prune to 2:4": _PRUNE_INPUTS,
    "prune the ONNX file itself": "prune the ONNX file itself, which has every weight",
    "change --include/--exclude": "change --include/--exclude",
    OWN_COPY: "give layers that share a weight their own copies",
    "quantise the output of": "quantise the outputs of these layers",
    "quantise weights and activations": "quantise weights and activations symmetrically "
    "(zero point 0)",
    "make it a constant": _FOLD,
    "fold constants": _FOLD,
    "resize + convolution": "resize + convolution in place of transposed convolutions",
    "the same product as a MatMul": "MatMul in place of Einsum",
    "run twofour validate": "run twofour validate on the saved file",
    NO_PLUGIN: "build without the plugin",
    "build with a workspace of": _WORKSPACE,
    "build with more free GPU memory": _WORKSPACE,
}
"""How a part of a remedy begins that changes something, and what it says of many layers."""

"""What to do about a reason, with the numbers of the layer."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from twofour.records import ReasonCode, VerdictName
from twofour.reports.findings import Case, Finding
from twofour.reports.obstacles import GROUP, HARDWARE_PATTERN
from twofour.reports.rules import verdict
from twofour.reports.speed import LARGE_ENOUGH, too_small

GEMM_TILE = 64
"""Channels that fill a tile of a tensor-core kernel (the k of cuSPARSELt's own samples)."""
_TOO_NARROW = "leave it dense: too few input channels to gain"


def remedy(case: Case, found: tuple[Finding, ...]) -> str | None:
    """Against the main obstacle; for an eligible layer against all that slows it, in order.

    None where nothing is known to be in the way.
    """
    worst = verdict(found)
    judged = [f for f in found if f.reason.code in _REMEDIES and f.best is worst]
    if worst is not VerdictName.ELIGIBLE:
        judged = judged[:1]
    elif judged and case.weight.in_channels < GROUP:
        return _TOO_NARROW
    return "; ".join(dict.fromkeys(_REMEDIES[f.reason.code](case) for f in judged)) or None


def headline(code: ReasonCode) -> str | None:
    """The remedy for many layers at once; None where leaving the layers dense is the remedy."""
    return _HEADLINES.get(code)


def _prune(case: Case) -> str:
    if case.context.pattern != HARDWARE_PATTERN:
        return f"prune to 2:4 instead of {case.context.pattern}"
    axis = case.weight.axis
    return f"prune it 2:4 along input channels (axis {axis})"


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
    wider = f"make its {width} input channels {_up(width, GROUP)}"
    tile = _up(width, GEMM_TILE)
    return f"{wider} (better {tile})" if tile != _up(width, GROUP) else wider


def _widen_layer(case: Case) -> str:
    weight = case.weight
    now = {"C": weight.in_channels, "K": weight.out_channels}
    positions = prod(weight.kernel)
    need = {"C": -(-LARGE_ENOUGH // positions), "K": LARGE_ENOUGH}
    wishes = " and ".join(f"{w} from {now[w]} to {_up(need[w], GROUP)}" for w in too_small(weight))
    return f"widen {wishes}, or accept dense"


def _change_type(case: Case) -> str:
    dtype = case.weight.math_dtype
    if dtype.startswith("float8"):
        return "use int8 or float16 on a GPU before H100"
    if dtype == "bfloat16":
        return "if the builder takes dense kernels, export with --precision float16"
    return "export with --precision float16 (an ONNX file: convert it to float16)"


def _document_op(case: Case) -> str:
    if any(reason.code is ReasonCode.UNSUPPORTED_OP for reason in case.weight.reasons):
        return "fold constants, so that the weight is stored as the layer uses it"
    if not case.weight.kernel:
        return "build with TensorRT 10.3 or later, or in int8"
    if case.weight.op.startswith("ConvTranspose"):
        return "build it and read the log; resize + convolution is on documented ground"
    return "build it and read the log"


def _quantize_output(case: Case) -> str:
    return f"quantise the output of this {case.weight.op} too (Q/DQ pair behind it)"


def _newer_gpu(_: Case) -> str:
    return "run on a GPU of compute capability 8.0 or later (Ampere and newer)"


def _constant(_: Case) -> str:
    return "make it a constant: fold it before export, or store it as a parameter"


def _zero_point(_: Case) -> str:
    return "quantise the weight symmetrically (zero point 0)"


def _untie(case: Case) -> str:
    return f"give {case.weight.layer} a copy of the weight for itself"


def _include(_: Case) -> str:
    return "change --include/--exclude so that it is pruned"


def _prune_file(_: Case) -> str:
    return "prune the ONNX file itself: twofour prune dense.onnx"


def _check(_: Case) -> str:
    return "run twofour validate on the saved file"


def _no_plugin(_: Case) -> str:
    return "build without the plugin that takes this layer"


def _switch_on(_: Case) -> str:
    return "build with sparse weights allowed (BuilderFlag.SPARSE_WEIGHTS)"


def _up(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


_REMEDIES: dict[ReasonCode, Callable[[Case], str]] = {
    ReasonCode.PATTERN_BROKEN: _prune,
    ReasonCode.WRONG_AXIS: _prune,
    ReasonCode.GROUPED_CONV: _leave_grouped,
    ReasonCode.DEPTHWISE_CONV: _leave_depthwise,
    ReasonCode.AXIS_NOT_MULTIPLE: _widen_axis,
    ReasonCode.SMALL_CHANNELS: _widen_layer,
    ReasonCode.NOT_CONSTANT: _constant,
    ReasonCode.UNSUPPORTED_OP: _document_op,
    ReasonCode.DTYPE: _change_type,
    ReasonCode.INT8_OUTPUT_NOT_QUANTIZED: _quantize_output,
    ReasonCode.ZERO_POINT: _zero_point,
    ReasonCode.SHARED_WEIGHT: _untie,
    ReasonCode.EXCLUDED: _include,
    ReasonCode.NOT_A_LAYER: _prune_file,
    ReasonCode.GPU_HAS_NO_SPARSE: _newer_gpu,
    ReasonCode.NOT_CHECKED: _check,
    ReasonCode.IN_PLUGIN: _no_plugin,
    ReasonCode.SPARSITY_OFF: _switch_on,
}
_HEADLINES: dict[ReasonCode, str] = {
    ReasonCode.GPU_HAS_NO_SPARSE: "use a GPU of compute capability 8.0 or later",
    ReasonCode.DTYPE: "export with --precision float16",
    ReasonCode.PATTERN_BROKEN: "prune 2:4 along the input channels",
    ReasonCode.WRONG_AXIS: "prune along the input channels instead",
    ReasonCode.EXCLUDED: "change --include/--exclude",
    ReasonCode.NOT_A_LAYER: "prune the ONNX file itself, which has every weight",
    ReasonCode.SHARED_WEIGHT: "give tied layers weights of their own",
    ReasonCode.INT8_OUTPUT_NOT_QUANTIZED: "quantise the outputs of these layers",
    ReasonCode.ZERO_POINT: "quantise weights symmetrically (zero point 0)",
    ReasonCode.NOT_CONSTANT: "fold these weights to constants before export",
    ReasonCode.AXIS_NOT_MULTIPLE: "widen to a multiple of 4 input channels, better of 64",
    ReasonCode.SMALL_CHANNELS: f"widen towards {LARGE_ENOUGH} channels, or expect dense kernels",
    ReasonCode.NOT_CHECKED: "run twofour validate on the saved file",
    ReasonCode.IN_PLUGIN: "build without the plugin",
    ReasonCode.SPARSITY_OFF: "build with sparse weights allowed",
}

"""Rules about what TensorRT's builder lists as eligible: the GPU, the operation, the pattern."""

from __future__ import annotations

from twofour.records.weights import HARDWARE_PATTERN, ReasonCode
from twofour.reports.context import version_numbers
from twofour.reports.findings import GUIDE, Case, Finding, eligible, never, unknown
from twofour.reports.words import axis_name, listed

GROUP = HARDWARE_PATTERN.m
_PRODUCTS_IN_8 = (
    "listed: NVIDIA/TensorRT issues 4054, 4056 (MatMul, --fp16), 2169 (the last Gemm), and a log "
    "of 8.4.1 that runs MatMul + ReLU as a convolution; not listed: NVIDIA/TensorRT issue 2271, "
    "pytorch/TensorRT issue 1340 (BERT)"
)


def old_gpu(case: Case) -> Finding | None:
    """Sparse tensor cores exist from compute capability 8.0 (Ampere) on."""
    gpu = case.context.gpu
    if gpu is None or gpu.has_sparse_tensor_cores:
        return None
    major, minor = gpu.compute_capability
    message = f"{gpu.name} (compute capability {major}.{minor}) has no sparse tensor cores"
    return never(ReasonCode.GPU_HAS_NO_SPARSE, message, GUIDE)


def computed_weight(case: Case) -> Finding | None:
    """The builder compresses weights while it builds, so they must be constants of the graph.

    A weight that is computed from constants is another matter: the builder may fold it.
    """
    said = next((r for r in case.weight.reasons if r.code is ReasonCode.NOT_CONSTANT), None)
    if said is None and (case.weight.weight is not None or case.weight.reasons):
        return None
    message = said.message if said else "the weight is computed at run time"
    return never(ReasonCode.NOT_CONSTANT, message, (said and said.source) or GUIDE)


def depthwise(case: Case) -> Finding | None:
    """Depthwise: one input channel per group, so there is nothing to leave out along it."""
    if not case.weight.is_depthwise:
        return None
    message = f"depthwise: {case.weight.groups} groups of one input channel"
    return never(ReasonCode.DEPTHWISE_CONV, message, "NVIDIA/TensorRT issue 4054")


def grouped(case: Case) -> Finding | None:
    """TensorRT considers no sparse kernel for groups > 1 and does not list the layer."""
    weight = case.weight
    if weight.groups == 1 or weight.is_depthwise:
        return None
    width = weight.in_channels // weight.groups
    each = f" of {width} input channels" if width else ""
    message = f"{weight.groups} groups{each}: no sparse kernel for groups"
    return never(ReasonCode.GROUPED_CONV, message, "NVIDIA/TensorRT issue 4054")


def undocumented_op(case: Case) -> Finding | None:
    """ConvTranspose, 3-D kernels, Einsum: no document, maintainer or log says whether they can.

    An unknown stays unknown until a build log settles it.
    """
    weight = case.weight
    if weight.op.startswith("ConvTranspose"):
        what = "transposed convolutions"
    elif len(weight.kernel) == 3:
        what = "3-D convolutions"
    elif weight.op == "Einsum":
        what = "Einsum layers"
    else:
        return None
    message = f"no TensorRT document or known build log says whether {what} run sparse"
    return unknown(ReasonCode.UNSUPPORTED_OP, message)


def product_in_tensorrt_8(case: Case) -> Finding | None:
    """TensorRT 8 listed MatMul and Gemm from ONNX in int8; in float, builds differ.

    TensorRT 10.3 and later list them in float too, Myelin regions included.
    """
    version = case.build.tensorrt_version
    in_int8 = case.weight.math_dtype == "int8" or "INT8" in (case.build.types or ())
    is_matmul = not case.weight.kernel and case.weight.op != "Einsum"
    if not is_matmul or in_int8 or version_numbers(version)[:1] != (8,):
        return None
    message = f"TensorRT {version} listed {case.weight.op} in some float builds, none in others"
    return unknown(ReasonCode.UNSUPPORTED_OP, message, _PRODUCTS_IN_8)


def narrow_tail(case: Case) -> Finding | None:
    """The guide groups four channels; what becomes of a rest is known from logs alone.

    Convolutions of one input channel were listed as eligible by TensorRT 8.4.1, 10.14 and 10.16,
    as if padded with zeros. So a convolution whose rest obeys the pattern is taken as eligible, and
    a matrix product, for which there is no such log, is not.
    """
    weight, check = case.weight, case.check
    if weight.axis is None or weight.groups > 1 or weight.shape[weight.axis] % GROUP == 0:
        return None
    width = weight.shape[weight.axis]
    message = f"C={width} is no multiple of {GROUP}"
    if weight.kernel and check is not None and check.violations == 0:
        source = f"{GUIDE}; build logs of TensorRT 8.4.1, 10.14, 10.16 (1-channel convolutions)"
        return eligible(
            ReasonCode.AXIS_NOT_MULTIPLE, f"{message}, passes as if zero-padded", source
        )
    return never(ReasonCode.AXIS_NOT_MULTIPLE, message, GUIDE)


def axes_at_odds(case: Case) -> Finding | None:
    """One stored array that layers sum over along different axes obeys the pattern along one."""
    weight, check = case.weight, case.check
    if not case.at_odds or check is None or check.violations == 0:
        return None
    others = listed([other.layer for other in case.at_odds])
    message = f"its array {weight.weight} is shared with {others}, for which 2:4 must hold along "
    message += f"axis {case.at_odds[0].axis}, and for this layer along axis {weight.axis}"
    return never(ReasonCode.SHARED_WEIGHT, message, GUIDE)


def wrong_axis(case: Case) -> Finding | None:
    """A mask along another axis than the reduction axis is of no use to the tensor cores."""
    check = case.check
    if check is None or check.violations == 0 or check.holds_along is None:
        return None
    there, here = axis_name(case.weight, check.holds_along), axis_name(case.weight, check.axis)
    message = f"2:4 holds along {there} (axis {check.holds_along}), "
    message += f"but must along {here} (axis {check.axis})"
    return never(ReasonCode.WRONG_AXIS, message, GUIDE)


def broken_pattern(case: Case) -> Finding | None:
    """For every output channel and kernel position, of four input channels two must be zero."""
    check = case.check
    if check is None or check.violations == 0:
        return None
    message = f"{check.violations:,} of {check.groups_checked:,} groups have over 2 non-zeros"
    if check.first_violation is not None:
        message += f", first at {list(check.first_violation)}"
    if case.context.pattern != HARDWARE_PATTERN:
        message += f"; pruned {case.context.pattern}, tensor cores know 2:4"
    return never(ReasonCode.PATTERN_BROKEN, message, GUIDE)


def unchecked(case: Case) -> Finding | None:
    """Without a look at the saved array nothing can be said."""
    if case.check is not None:
        return None
    message = "the saved weight was not checked, so its pattern is not known"
    return unknown(ReasonCode.NOT_CHECKED, message)

"""The rules: what TensorRT's builder lists as eligible, and where its dense kernels win.

A rule answers for one layer; what it means and what to do about it is in its row of reasons.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from twofour.eligibility.build_facts import NOTHING_KNOWN, BuildFacts, version_numbers
from twofour.records.eligibility import VerdictName
from twofour.records.export import Gpu
from twofour.records.weights import (
    HARDWARE_PATTERN,
    NotCovered,
    Pattern,
    Reason,
    ReasonCode,
    Weight,
    WeightCheck,
)
from twofour.words import axis_name, layer_size, listed

GUIDE = "TensorRT developer guide, structured sparsity"
GROUP = HARDWARE_PATTERN.m
LARGE_ENOUGH = 256
"""Channels from which maintainers saw sparse kernels win (NVIDIA/TensorRT 3849, 4065).

In the only public logs with choices (TensorRT 10.3 on Orin Nano, two builds of one network) the
builder chose 22 of 50 layers below it and 9 of 28 above: a doubt, not a prediction.
"""
WITHOUT_INT8 = (10, 3)
"""Compute capability that cuSPARSELt's table of int8 kernels leaves out between 10.0 and 11.0."""
_PROMISED = "TensorRT's guide promises only float16 and int8"
_PRODUCTS_IN_8 = (
    "listed: NVIDIA/TensorRT issues 4054, 4056 (MatMul, --fp16), 2169 (the last Gemm), and a log "
    "of 8.4.1 that runs MatMul + ReLU as a convolution; not listed: NVIDIA/TensorRT issue 2271, "
    "pytorch/TensorRT issue 1340 (BERT)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContext:
    """Everything a report says besides the weights themselves."""

    model: str
    pattern: Pattern
    """What the model was pruned to; the verdicts are about 2:4, the pattern hardware has."""
    engine: str
    """Which engine ran, in words."""
    gpu: Gpu | None
    """None: not known, the rules of compute capability 8.0 and later are applied."""
    activation_products: int
    """MatMul nodes without a constant operand."""
    tensorrt_version: str | None = None
    """The builder the verdicts are about, such as "8.6.1"; None: 10.3 or later is assumed."""
    build: BuildFacts = NOTHING_KNOWN
    not_covered: tuple[NotCovered, ...] = ()
    """What the model stores besides the weights of the report."""

    def completed(self) -> ReportContext:
        """The context with version and GPU among the build's facts where no log states them."""
        known, here = self.build, None if self.gpu is None else self.gpu.compute_capability
        build = replace(
            known,
            tensorrt_version=known.tensorrt_version or self.tensorrt_version,
            compute_capability=known.compute_capability or here,
        )
        return replace(self, build=build)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer to be judged: its weight, the check of the saved array, and model and build."""

    weight: Weight
    check: WeightCheck | None
    context: ReportContext
    at_odds: tuple[Weight, ...] = ()
    """Layers that take the same array, and hold or are to hold the pattern along another axis."""

    @property
    def build(self) -> BuildFacts:
        """What is known of the build."""
        return self.context.build

    @property
    def is_broken(self) -> bool:
        """Whether the saved array is known to break the pattern along the layer's axis."""
        return self.check is not None and self.check.violations > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """What one rule says about one layer; the rest is in the row that names the rule."""

    message: str
    source: str | None = None
    """None: the source of the row."""
    best: VerdictName | None = None
    """The best verdict the layer can have while this holds; None: the best of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A reason and the best verdict that it leaves this layer."""

    reason: Reason
    best: VerdictName


Rule = Callable[[Case], "Remark | None"]


def holds_trivially(shape: tuple[int, ...], axis: int | None, pattern: Pattern) -> bool:
    """Whether the axis is too short to break the pattern: depthwise kernels, one-channel images."""
    return axis is not None and shape[axis] <= pattern.n


def groups_in_words(groups: int, in_channels: int) -> str:
    """What keeps sparse math from a convolution with groups; 0 channels: not known."""
    if groups == in_channels:
        return f"depthwise: {groups} groups of one input channel"
    width = in_channels // groups
    each = f" of {width} input channels" if width else ""
    return f"{groups} groups{each}: no sparse kernel for groups"


def tail_in_words(width: int, m: int, groups: int = 1) -> str:
    """What keeps the pattern's groups of m from covering the input channels of one output."""
    return f"{'C' if groups == 1 else 'C/groups'}={width} is not a multiple of {m}"


def gpu_in_words(name: str, capability: tuple[int, int]) -> str:
    """What keeps sparse math from a GPU before Ampere."""
    major, minor = capability
    return f"{name} (compute capability {major}.{minor}) has no sparse tensor cores"


# --- causes ---------------------------------------------------------------------------------------


def old_gpu(case: Case) -> Remark | None:
    """Sparse tensor cores exist from compute capability 8.0 (Ampere) on."""
    gpu = case.context.gpu
    if gpu is None or gpu.has_sparse_tensor_cores:
        return None
    return Remark(message=gpu_in_words(gpu.name, gpu.compute_capability))


def computed_weight(case: Case) -> Remark | None:
    """A weight computed at run time; one computed from constants may be folded by the builder."""
    weight = case.weight
    said = next((r for r in weight.reasons if r.code is ReasonCode.NOT_CONSTANT), None)
    if said is not None:
        return Remark(message=said.message, source=said.source)
    if weight.weight is not None or weight.reasons:
        return None
    return Remark(message="the weight is computed at run time")


def depthwise(case: Case) -> Remark | None:
    """One input channel per group, so there is nothing to leave out along it."""
    weight = case.weight
    words = groups_in_words(weight.groups, weight.in_channels)
    return Remark(message=words) if weight.is_depthwise else None


def grouped(case: Case) -> Remark | None:
    """Groups of more than one channel."""
    weight = case.weight
    words = groups_in_words(weight.groups, weight.in_channels)
    return None if weight.groups == 1 or weight.is_depthwise else Remark(message=words)


def undocumented_op(case: Case) -> Remark | None:
    """ConvTranspose, 3-D kernels, Einsum: no document, maintainer or log says whether they can."""
    weight = case.weight
    if weight.op.startswith("ConvTranspose"):
        what = "transposed convolutions"
    elif len(weight.kernel) == 3:
        what = "3-D convolutions"
    elif weight.op == "Einsum":
        what = "Einsum layers"
    else:
        return None
    return Remark(message=f"no TensorRT document or known build log says whether {what} run sparse")


def product_in_tensorrt_8(case: Case) -> Remark | None:
    """TensorRT 8 listed MatMul and Gemm from ONNX in int8; in float, builds differ.

    TensorRT 10.3 and later list them in float too, Myelin regions included.
    """
    version = case.build.tensorrt_version
    in_int8 = case.weight.math_dtype == "int8" or "INT8" in (case.build.types or ())
    is_matmul = not case.weight.kernel and case.weight.op != "Einsum"
    if not is_matmul or in_int8 or version_numbers(version)[:1] != (8,):
        return None
    message = f"TensorRT {version} listed {case.weight.op} in some float builds, none in others"
    return Remark(message=message, source=_PRODUCTS_IN_8)


def narrow_tail(case: Case) -> Remark | None:
    """A convolution whose rest obeys the pattern is taken as eligible, a matrix product is not."""
    weight, check = case.weight, case.check
    if weight.axis is None or weight.groups > 1 or weight.shape[weight.axis] % GROUP == 0:
        return None
    message = tail_in_words(weight.shape[weight.axis], GROUP)
    if not weight.kernel or check is None or check.violations:
        return Remark(message=message, best=VerdictName.NOT_ELIGIBLE)
    source = f"{GUIDE}; build logs of TensorRT 8.4.1, 10.14, 10.16 (1-channel convolutions)"
    message += ": padded with zeros"
    if weight.shape[weight.axis] == 1:
        message = "1 input channel: padded with zeros, nothing to skip"
    return Remark(message=message, source=source)


def axes_at_odds(case: Case) -> Remark | None:
    """One stored array that layers sum over along different axes obeys the pattern along one."""
    weight = case.weight
    if not case.at_odds or not case.is_broken:
        return None
    others = listed([other.layer for other in case.at_odds])
    message = f"its array {weight.weight} is shared with {others}, for which 2:4 must hold along "
    message += f"axis {case.at_odds[0].axis}, and for this layer along axis {weight.axis}"
    return Remark(message=message, source=GUIDE, best=VerdictName.NOT_ELIGIBLE)


# --- consequences ---------------------------------------------------------------------------------


def wrong_axis(case: Case) -> Remark | None:
    """A mask along another axis than the reduction axis."""
    check = case.check
    if check is None or check.violations == 0 or check.holds_along is None:
        return None
    there, here = axis_name(case.weight, check.holds_along), axis_name(case.weight, check.axis)
    message = f"2:4 holds along {there} (axis {check.holds_along}); "
    return Remark(message=f"{message}it must hold along {here} (axis {check.axis})")


def broken_pattern(case: Case) -> Remark | None:
    """Groups with more than two non-zeros, and where the first one is."""
    check = case.check
    if check is None or check.violations == 0:
        return None
    message = f"{check.violations:,} of {check.groups_checked:,} groups have more than 2 non-zeros"
    if check.first_violation is not None:
        message += f", the first at {list(check.first_violation)}"
    if case.context.pattern != HARDWARE_PATTERN:
        message += f"; pruned {case.context.pattern}, tensor cores run 2:4 only"
    return Remark(message=message)


def math_type(case: Case) -> Remark | None:
    """float16 and int8 have documented sparse kernels; other types are listed all the same.

    The type is "unknown" where the weight is, and another rule says so.
    """
    dtype = case.weight.math_dtype
    in_int8 = dtype == "int8" and case.build.compute_capability != WITHOUT_INT8
    if dtype in ("float16", "unknown") or in_int8:
        return None
    if dtype == "int8":
        message = "int8: NVIDIA's sparse library has no int8 kernels for compute capability 10.3"
        return Remark(message=message, source="cuSPARSELt 0.9 and 0.10, supported data types")
    if dtype in ("float32", "float64"):
        return _float32(case)
    if dtype == "bfloat16":
        return Remark(message=f"{dtype}: the GPU supports it, but {_PROMISED}")
    if dtype.startswith("float8"):
        message = f"{dtype}: {_PROMISED}; on RTX 4090 layers were eligible and none was chosen, "
        message += "and no log from another GPU is known"
        return Remark(message=message, source=f"{GUIDE}; NVIDIA/TensorRT-LLM issue 1913")
    message = f"{dtype}: nothing is published about sparse kernels for it in TensorRT"
    return Remark(message=message, best=VerdictName.UNKNOWN)


def _float32(case: Case) -> Remark | None:
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
    return Remark(message=message, source=f"{GUIDE}; logs of TensorRT 8.4.1 to 10.16")


def int8_output(case: Case) -> Remark | None:
    """A sparse int8 product whose output does not stay int8."""
    weight = case.weight
    if weight.math_dtype != "int8" or weight.output_quantized is not False:
        return None
    seen = " (seen with matrix products)" if weight.kernel else ""
    return Remark(message=f"int8 whose output is not quantised: the dense kernel wins{seen}")


def small_layer(case: Case) -> Remark | None:
    """Fewer channels than maintainers trust; no verdict depends on it (see LARGE_ENOUGH)."""
    weight = case.weight
    is_known = weight.in_channels > 0 and weight.out_channels > 0
    narrow = narrow_widths(weight.in_channels, weight.out_channels, weight.kernel)
    if weight.groups > 1 or not is_known or not narrow:
        return None
    message = f"{layer_size(weight)}: below {LARGE_ENOUGH}, where dense may be faster; "
    return Remark(message=f"{message}only TensorRT's own timing decides")


def narrow_widths(in_channels: int, out_channels: int, kernel: tuple[int, ...]) -> tuple[str, ...]:
    """The widths that are below the rule of thumb: "C", "K", both or none.

    An RxS kernel counts C RxS-fold.
    """
    widths = (("C", in_channels * prod(kernel)), ("K", out_channels))
    return tuple(name for name, width in widths if width < LARGE_ENOUGH)


# --- what is left ---------------------------------------------------------------------------------


def unchecked(case: Case) -> Remark | None:
    """A weight whose saved array nobody looked at."""
    if case.check is not None:
        return None
    return Remark(message="the saved weight was not checked, so its pattern is not known")


def qualifying(case: Case) -> Remark:
    """What is known of a layer that no rule excludes; the rules never predict `chosen`."""
    size, dtype = layer_size(case.weight), case.weight.math_dtype
    message = f"2:4 holds along input channels; {size}, {dtype}"
    return Remark(message=message, best=VerdictName.ELIGIBLE)

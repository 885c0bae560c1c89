"""The rules: what TensorRT's builder lists as eligible, and where its dense kernels win.

A rule answers for one layer; its row below says what that means and what to do about it. A new one
is a member of ReasonCode, and a function and a row here.
"""

from __future__ import annotations

import functools
from math import prod

from twofour.eligibility import remedies as do
from twofour.eligibility.build_facts import (
    NO_SPARSE_INT8,
    TYPES_OF_8,
    Case,
    version_numbers,
)
from twofour.eligibility.remedies import LeftDense, Origin, ReasonRow, Remark
from twofour.records.eligibility import VerdictName
from twofour.records.export import WITHOUT_SPARSE_INT8
from twofour.records.weights import HARDWARE_PATTERN, Pattern, ReasonCode, WeightedLayer
from twofour.words import axis_name, count, layer_size, listed

GUIDE = "TensorRT developer guide, structured sparsity"
GROUP = HARDWARE_PATTERN.m
LARGE_ENOUGH = 256
"""Channels from which maintainers saw sparse kernels win (NVIDIA/TensorRT 3849, 4065).

In the only public logs with choices (TensorRT 10.3 on Orin Nano, two builds of one network) the
builder chose 22 of 50 layers below it and 9 of 28 above: a doubt, not a prediction.
"""
DLA_RULE = "the DLA runs only INT8 convolutions of more than 64 input channels sparse"
DLA_CHANNELS = 64
FEWEST_OUTPUTS = 8
FEWEST_VALUES = 1024
"""Smaller weights are not pruned by default: no kernel gains there, and a mask can do harm."""
_PROMISED = "TensorRT's guide promises only float16 and int8"
_PRODUCTS_IN_8 = (
    "listed: NVIDIA/TensorRT issues 4054, 4056 (MatMul, --fp16), 2169 (the last Gemm), and a log "
    "of 8.4.1 that runs MatMul + ReLU as a convolution; not listed: NVIDIA/TensorRT issue 2271, "
    "pytorch/TensorRT issue 1340 (BERT)"
)


def holds_trivially(shape: tuple[int, ...], axis: int | None, pattern: Pattern) -> bool:
    """Whether the axis is too short to break the pattern: depthwise kernels, one-channel images."""
    return axis is not None and shape[axis] <= pattern.n


def groups_in_words(layer: WeightedLayer) -> str:
    """What keeps sparse math from a convolution with groups; 0 channels: not known."""
    # 32 groups of 256 channels: `32 groups of 8 input channels: no sparse kernel for groups`
    if layer.groups == layer.in_channels:
        return f"depthwise: {layer.groups} groups of one input channel"
    groups = f"{layer.groups} groups"
    width = layer.in_channels // layer.groups
    if width:
        groups += f" of {width} input channels"
    return f"{groups}: no sparse kernel for groups"


def tail_in_words(width: int, m: int, groups: int = 1) -> str:
    """What keeps the pattern's groups of m from covering the input channels of one output."""
    channels = "C" if groups == 1 else "C/groups"
    return f"{channels}={width} is not a multiple of {m}"


def too_small_in_words(weight: WeightedLayer, pattern: Pattern) -> str | None:
    """What keeps a small weight from gaining; None for others, and where no mask is needed."""
    # the box decoder of YOLO: `16 values, 1 output: too small to gain (below 1,024 values or ...)`
    values = prod(weight.shape)
    outputs = weight.out_channels
    if weight.axis is None or holds_trivially(weight.shape, weight.axis, pattern):
        return None
    if values >= FEWEST_VALUES and not 0 < outputs < FEWEST_OUTPUTS:
        return None
    size = f"{count(values, 'value')}, {count(outputs, 'output')}"
    return f"{size}: too small to gain (below {FEWEST_VALUES:,} values or {FEWEST_OUTPUTS} outputs)"


def gpu_in_words(name: str, capability: tuple[int, int]) -> str:
    """What keeps sparse math from a GPU before Ampere."""
    number = ".".join(map(str, capability))
    return f"{name} (compute capability {number}) has no sparse tensor cores"


# --- causes ---------------------------------------------------------------------------------------


def old_gpu(case: Case) -> Remark | None:
    """Sparse tensor cores exist from compute capability 8.0 (Ampere) on."""
    gpu = case.context.gpu
    if gpu is None or gpu.has_sparse_tensor_cores:
        return None
    return Remark(message=gpu_in_words(gpu.name, gpu.compute_capability))


def computed_weight(case: Case) -> Remark | None:
    """A weight computed at run time; one computed from constants may be folded by the builder."""
    for reason in case.weight.reasons:
        if reason.code is ReasonCode.NOT_CONSTANT:
            return Remark(message=reason.message, source=reason.source)
    if case.weight.weight is not None or case.weight.reasons:
        return None
    return Remark(message="the weight is computed at run time")


def depthwise(case: Case) -> Remark | None:
    """One input channel per group, so there is nothing to leave out along it."""
    if not case.weight.is_depthwise:
        return None
    return Remark(message=groups_in_words(case.weight))


def grouped(case: Case) -> Remark | None:
    """Groups of more than one channel."""
    if case.weight.groups == 1 or case.weight.is_depthwise:
        return None
    return Remark(message=groups_in_words(case.weight))


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
    return Remark(message=f"{message}; TensorRT pads it with zeros", source=source)


def axes_at_odds(case: Case) -> Remark | None:
    """One stored array that layers sum over along different axes obeys the pattern along one."""
    weight = case.weight
    if not case.at_odds or not case.is_broken:
        return None
    # an output layer needs 2:4 along axis 1 of `embed.weight`, its transposed product along axis 0
    others = listed([other.layer for other in case.at_odds])
    message = f"its array {weight.weight} is shared with {others}, for which 2:4 must hold along "
    message += f"axis {case.at_odds[0].axis}, and for this layer along axis {weight.axis}"
    return Remark(message=message, source=GUIDE, best=VerdictName.NOT_ELIGIBLE)


# --- consequences ---------------------------------------------------------------------------------


def too_small(case: Case) -> Remark | None:
    """Fewer outputs or values than pruning takes by default, in a weight that stayed dense."""
    words = too_small_in_words(case.weight, case.context.pattern)
    if words is None or not case.is_broken or case.check is None or case.check.required:
        return None
    return Remark(message=words, best=VerdictName.NOT_ELIGIBLE)


def wrong_axis(case: Case) -> Remark | None:
    """A mask along another axis than the reduction axis."""
    check = case.check
    if check is None or check.violations == 0 or check.holds_along is None:
        return None
    # a Linear of 512 x 256: `2:4 holds along output channels (axis 0); it must ...`
    message = f"2:4 holds along {axis_name(case.weight, check.holds_along)} "
    message += f"(axis {check.holds_along}); it must hold along "
    message += f"{axis_name(case.weight, check.axis)} (axis {check.axis})"
    return Remark(message=message)


def broken_pattern(case: Case) -> Remark | None:
    """Groups with more than two non-zeros, and where the first one is."""
    check = case.check
    if check is None or check.violations == 0 or too_small(case):
        return None  # where it is too small no pattern was tried
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
    in_int8 = dtype == "int8" and case.build.compute_capability != WITHOUT_SPARSE_INT8
    if dtype in ("float16", "unknown") or in_int8:
        return None
    if dtype == "int8":
        message = f"int8: {NO_SPARSE_INT8.what}"
        return Remark(message=message, source=NO_SPARSE_INT8.reference)
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
    lowered = case.build.lowers_float32
    if lowered:
        return None
    message = f"{case.weight.math_dtype}: the builder lists it, but no sparse kernel is known"
    if lowered is None:
        message += ", unless FP16 or INT8 is allowed"
    elif not case.build.is_strongly_typed:
        message += ", and this build was allowed no FP16 or INT8"
    source = f"{GUIDE}; logs of TensorRT 8.4.1 to 10.16; names of the kernels in 8.6.0"
    return Remark(message=message, source=source)


def int8_output(case: Case) -> Remark | None:
    """A sparse int8 product whose output does not stay int8."""
    weight = case.weight
    if weight.math_dtype != "int8" or weight.output_quantized is not False:
        return None
    message = "int8 whose output is not quantised: the dense kernel wins"
    if weight.kernel:
        message += " (seen with matrix products)"
    return Remark(message=message)


def unseen_form(case: Case) -> Remark | None:
    """A factor that is not one matrix on the right: no known list of a builder has any."""
    form = case.weight.form
    if form is None:
        return None
    return Remark(
        message=f"no TensorRT document or known build log says whether {form} runs sparse"
    )


def small_layer(case: Case) -> Remark | None:
    """Fewer channels than maintainers trust; no verdict depends on it (see LARGE_ENOUGH)."""
    weight = case.weight
    is_known = weight.in_channels >= GROUP and weight.out_channels > 0  # else narrow_tail says it
    narrow = narrow_widths(weight.in_channels, weight.out_channels, weight.kernel)
    if weight.groups > 1 or not is_known or not narrow:
        return None
    too_narrow = f"{' and '.join(narrow)} below {LARGE_ENOUGH}, where dense may be faster"
    return Remark(message=f"{layer_size(weight)}: {too_narrow}")


def narrow_widths(in_channels: int, out_channels: int, kernel: tuple[int, ...]) -> tuple[str, ...]:
    """The widths that are below the rule of thumb: "C", "K", both or none.

    An R x S kernel counts as R*S times the input channels.
    """
    # 64 channels and a 3x3 kernel count as 576: C is wide enough; 64 outputs are not
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
    message = f"2:4 holds along input channels; {layer_size(case.weight)}, {case.weight.math_dtype}"
    return Remark(message=message, best=VerdictName.ELIGIBLE)


_cause = functools.partial(ReasonRow, origin=Origin.CAUSE)
_consequence = functools.partial(ReasonRow, origin=Origin.CONSEQUENCE)
RULED = (
    # --- what the layer is, in the order in which causes explain it
    _cause(
        code=ReasonCode.GPU_HAS_NO_SPARSE,
        sentence="The GPU has no sparse tensor cores.",
        documentation="They exist from compute capability 8.0 (Ampere) on. The GPU is that of the "
        "build log, or that of this machine where no log is given. Pruning may be done anywhere.",
        best=VerdictName.NOT_ELIGIBLE,
        refutes_rules=False,
        source=GUIDE,
        found_by=(old_gpu,),
        remedies=(do.NEWER_GPU,),
    ),
    _cause(
        code=ReasonCode.NOT_CONSTANT,
        sentence="The weight is not a constant of the graph.",
        documentation="The builder compresses weights while it builds, so they must be known then. "
        "A weight that is computed from constants alone may still be folded.",
        best=VerdictName.NOT_ELIGIBLE,
        left_dense=LeftDense.ALWAYS,
        builder_obeys=True,
        source=GUIDE,
        found_by=(computed_weight,),
        remedies=(do.MAKE_CONSTANT,),
    ),
    _cause(
        code=ReasonCode.DEPTHWISE_CONV,
        sentence="It is a depthwise convolution.",
        documentation="Each output sums over one input channel of a kernel position, so there is "
        "nothing to leave out along the reduction axis.",
        best=VerdictName.NOT_ELIGIBLE,
        left_dense=LeftDense.UNLESS_ASKED,
        builder_obeys=True,
        source="NVIDIA/TensorRT issue 4054",
        found_by=(depthwise,),
        remedies=(do.LEAVE_DEPTHWISE,),
    ),
    _cause(
        code=ReasonCode.GROUPED_CONV,
        sentence="It is a convolution with groups.",
        documentation="TensorRT considers no sparse kernel for groups and does not list the layer. "
        "One group instead of many multiplies the weights by their number, while sparse math "
        "saves half at best.",
        best=VerdictName.NOT_ELIGIBLE,
        left_dense=LeftDense.UNLESS_ASKED,
        builder_obeys=True,
        source="NVIDIA/TensorRT issue 4054",
        found_by=(grouped,),
        remedies=(do.LEAVE_GROUPED,),
        remedy_for=do.leave_grouped,
    ),
    _cause(
        code=ReasonCode.UNSUPPORTED_OP,
        sentence="It is unknown whether such a layer can run sparse, or its weight cannot be read.",
        documentation="No document, maintainer or known log mentions transposed and 3-D "
        "convolutions or Einsum; TensorRT 8 listed float matrix products in some builds and not "
        "in others. Weights that reach their layer through ops that cannot be followed have it "
        "too. A build log settles it, and only for weights that keep the pattern; where accuracy "
        "counts more, leave such layers dense with --exclude.",
        best=VerdictName.UNKNOWN,
        left_dense=LeftDense.IF_STATED,
        found_by=(undocumented_op, product_in_tensorrt_8),
        remedies=(
            do.BUILD_AND_READ,
            do.NEWER_TENSORRT,
            do.FOLD_CONSTANTS,
            do.AS_MATMUL,
            do.RESIZE,
        ),
        remedy_for=do.settle_op,
    ),
    _cause(
        code=ReasonCode.AXIS_NOT_MULTIPLE,
        sentence="The reduction axis is not a multiple of four.",
        documentation="The guide groups four channels; what happens to the remainder we know "
        "only from logs. TensorRT 8.4.1, 10.14 and 10.16 listed convolutions of one input channel, "
        "as if padded with zeros. So a convolution whose rest obeys the pattern is predicted as "
        "eligible, and a matrix product, for which there is no such log, is not.",
        left_dense=LeftDense.UNLESS_ASKED,
        source=GUIDE,
        found_by=(narrow_tail,),
        remedies=(do.LEAVE_TAIL, do.LEAVE_NARROW),
        remedy_for=do.widen_axis,
    ),
    _cause(
        code=ReasonCode.SHARED_WEIGHT,
        sentence="Something else uses the same stored array.",
        documentation="An embedding that takes rows of the array, another node that reads it and "
        "an output of the graph would get pruned values too, so it is left dense unless asked for. "
        "Layers that sum over the array along different axes cannot both have the pattern.",
        left_dense=LeftDense.WHERE_SAID,
        explains_dense=True,
        found_by=(axes_at_odds,),
        remedies=(do.OWN_COPY,),
        remedy_for=do.untie,
    ),
    # --- what follows for its weights
    _consequence(
        code=ReasonCode.TOO_SMALL,
        sentence=f"It has fewer than {FEWEST_OUTPUTS} outputs or {FEWEST_VALUES:,} values.",
        documentation="A sparse kernel saves nothing in so small a layer, and a mask can do harm: "
        "the box decoder of YOLO (DFL) sums over its inputs with the fixed weights 0 to 15. "
        "Outputs are output channels, and values those of the stored array.",
        left_dense=LeftDense.UNLESS_ASKED,
        explains_dense=True,
        found_by=(too_small,),
        remedies=(do.LEAVE_UNLESS_ASKED,),
        remedy_for=do.ask_for_it,
    ),
    _consequence(
        code=ReasonCode.WRONG_AXIS,
        sentence="The pattern holds along another axis than the reduction axis.",
        documentation="A mask along another axis is of no use to the tensor cores. Looked for only "
        "where the pattern is broken along the reduction axis.",
        best=VerdictName.NOT_ELIGIBLE,
        builder_obeys=True,
        source=GUIDE,
        found_by=(wrong_axis,),
        remedies=(do.PRUNE_ALONG, do.PRUNE_OTHERWISE),
        remedy_for=do.prune_layer,
    ),
    _consequence(
        code=ReasonCode.PATTERN_BROKEN,
        sentence="Groups of four weights have more than two that are not zero.",
        documentation="For every output channel and kernel position, of four consecutive input "
        "channels two must be zero. Judged on the saved file, never on a mask.",
        best=VerdictName.NOT_ELIGIBLE,
        builder_obeys=True,
        source=GUIDE,
        found_by=(broken_pattern,),
        remedies=(do.PRUNE_ALONG, do.PRUNE_OTHERWISE),
        remedy_for=do.prune_layer,
    ),
    _consequence(
        code=ReasonCode.DTYPE,
        sentence="No sparse kernel is known for the type it computes in.",
        documentation="float16 and int8 have documented sparse kernels. Builders list layers of "
        "other types all the same: in FP32 they were listed and never chosen, unless the build was "
        "allowed FP16 or INT8. Weights in a type that cannot be read have it too. "
        f"{TYPES_OF_8.in_words}; {NO_SPARSE_INT8.in_words}.",
        source=GUIDE,
        found_by=(math_type,),
        remedies=(
            do.EXPORT_FLOAT16,
            do.ALLOW_FLOAT16,
            do.USE_FLOAT16,
            do.USE_IF_DENSE,
            do.USE_INT8,
            do.LEAVE_LARGE,
        ),
        remedy_for=do.change_type,
    ),
    _consequence(
        code=ReasonCode.INT8_OUTPUT_NOT_QUANTIZED,
        sentence="It computes in int8 and its output is not quantised, so the dense kernel wins.",
        documentation="Seen with matrix products: a sparse int8 product is faster only where its "
        "output stays int8.",
        source="NVIDIA/Model-Optimizer commit dff1aa1a2, examples/sparse_quant_trt",
        found_by=(int8_output,),
        remedies=(do.QUANTIZE_OUTPUT, do.LEAVE_FLOAT),
        remedy_for=do.quantize_output,
    ),
    _consequence(
        code=ReasonCode.OPERAND_FORM,
        sentence="The weight is not the one matrix on the right of its product.",
        documentation="Known logs list only products with one matrix on the right, and trtexec, "
        "when it forces sparsity, leaves other products as they are. A build log settles it.",
        source="trtexec, samples/common/sampleUtils.cpp",
        found_by=(unseen_form,),
        remedies=(do.BUILD_AND_READ,),
    ),
    _consequence(
        code=ReasonCode.SMALL_CHANNELS,
        sentence="It has fewer channels than sparse kernels need to win, as maintainers believe.",
        documentation="A doubt, not a prediction: the known logs do not confirm it. A 3x3 kernel "
        "counts as nine times the input channels.",
        is_doubt=True,
        source="for: NVIDIA/TensorRT issues 3849, 4065 (the maintainers' rule of thumb); against: "
        "two logs of TensorRT 10.3, where 22 of 50 such layers were chosen and 9 of 28 wider ones",
        found_by=(small_layer,),
        remedies=(do.BUILD_AND_TIME,),
    ),
    # --- what is left to say
    ReasonRow(
        code=ReasonCode.NOT_CHECKED,
        origin=Origin.REMAINDER,
        sentence="Its pattern is unknown.",
        documentation="The validation has no row for the weight, or there is only a log and no "
        "model.",
        best=VerdictName.UNKNOWN,
        found_by=(unchecked,),
        remedies=(do.VALIDATE,),
    ),
    ReasonRow(
        code=ReasonCode.QUALIFIES,
        origin=Origin.REMAINDER,
        sentence="The layer is eligible: no rule excludes it.",
        documentation="With evidence, the line or kernel that proves it eligible or chosen.",
        best=VerdictName.CHOSEN,
        in_favour=True,
        source=f"{GUIDE}; NVIDIA/TensorRT issue 3849",
        found_by=(qualifying,),
    ),
)
"""The rows of the reasons that a rule finds; causes explain a layer in this order."""

"""The table of reasons: each code once, with all that pruning, rules and reports use.

A new reason is a member of ReasonCode, a row here, and the function that finds it (a rule in
rules.py, or what reads a log); docs/reasons.md is made from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from twofour.eligibility import remedies as do
from twofour.eligibility import rules
from twofour.eligibility.remedies import LEAVES_DENSE, Remedy, still_to_do
from twofour.eligibility.rules import GUIDE, Case, Finding, Remark, Rule
from twofour.records.eligibility import VerdictName
from twofour.records.weights import Reason, ReasonCode


class Origin(str, Enum):
    """Who finds a reason; in the order in which reasons explain a layer."""

    CAUSE = "a rule, about what the layer is"
    STATED = "pruning, the module or the exported file"
    CONSEQUENCE = "a rule, about its weights and their type"
    REMAINDER = "a rule, where no other finds anything"
    EVIDENCE = "a build log, layer information or a profile"


class LeftDense(str, Enum):
    """Whether pruning leaves the layer dense."""

    NO = "no"
    IF_STATED = "where pruning cannot follow the weight; other such layers are pruned"
    BY_SHAPE = "yes, unless --include or --all-layers asks for it; gates do not count the layer"
    ALWAYS = "yes: there is no stored array that could be pruned"
    WHERE_SAID = "where the message says so"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonRow:
    """Everything about one reason that is the same for all layers."""

    code: ReasonCode
    origin: Origin
    sentence: str
    """What it means."""
    documentation: str
    """How it comes about and how far it can be relied on."""
    best: VerdictName = VerdictName.ELIGIBLE
    """The best verdict that it allows; a rule may leave one layer less."""
    left_dense: LeftDense = LeftDense.NO
    explains_dense: bool = False
    """It says why a weight was left dense, and counts only where the weight is."""
    builder_obeys: bool = False
    """No builder overrides it: where one seems to, the files are of two models."""
    refutes_rules: bool = True
    """False: the rules say nothing about it, so evidence of it never proves them wrong."""
    is_doubt: bool = False
    """It is reported and predicts nothing: a layer with no other reason is eligible."""
    in_favour: bool = False
    """It is neither an obstacle nor a doubt."""
    source: str | None = None
    """Where it is documented; None: it differs from case to case, or the message says it all."""
    found_by: tuple[Rule, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    """All that may be proposed; (): nothing needs to be done, or can be."""
    remedy_for: Callable[[Case], str] | None = None
    """The remedy with the figures of a layer; None: those of `remedies` that are left to do."""

    def reason(self, message: str, source: str | None = None) -> Reason:
        """The reason of one layer; its source is that of the row where none is given."""
        return Reason(code=self.code, message=message, source=source or self.source)

    def finding(self, remark: Remark) -> Finding:
        """What a rule says of one layer, with the rest from the row."""
        reason = self.reason(remark.message, remark.source)
        return Finding(reason=reason, best=remark.best or self.best)

    def remedy(self, case: Case) -> str:
        """What to do about it in one layer; "" where nothing is left to do."""
        if self.remedy_for is not None:
            return self.remedy_for(case)
        return " or ".join(still_to_do(case.build, *self.remedies))


_ROWS = (
    # --- what the layer is, in the order in which causes explain it
    ReasonRow(
        code=ReasonCode.GPU_HAS_NO_SPARSE,
        origin=Origin.CAUSE,
        sentence="The GPU has no sparse tensor cores.",
        documentation="They exist from compute capability 8.0 (Ampere) on. The GPU is that of the "
        "build log, or that of this machine where no log is given. Pruning may be done anywhere.",
        best=VerdictName.NOT_ELIGIBLE,
        refutes_rules=False,
        source=GUIDE,
        found_by=(rules.old_gpu,),
        remedies=(do.NEWER_GPU,),
    ),
    ReasonRow(
        code=ReasonCode.NOT_CONSTANT,
        origin=Origin.CAUSE,
        sentence="The weight is not a constant of the graph.",
        documentation="The builder compresses weights while it builds, so they must be known then. "
        "A weight that is computed from constants alone may still be folded.",
        best=VerdictName.NOT_ELIGIBLE,
        left_dense=LeftDense.ALWAYS,
        builder_obeys=True,
        source=GUIDE,
        found_by=(rules.computed_weight,),
        remedies=(do.MAKE_CONSTANT,),
    ),
    ReasonRow(
        code=ReasonCode.DEPTHWISE_CONV,
        origin=Origin.CAUSE,
        sentence="It is a depthwise convolution.",
        documentation="Each output sums over one input channel of a kernel position, so there is "
        "nothing to leave out along the reduction axis.",
        best=VerdictName.NOT_ELIGIBLE,
        left_dense=LeftDense.BY_SHAPE,
        builder_obeys=True,
        source="NVIDIA/TensorRT issue 4054",
        found_by=(rules.depthwise,),
        remedies=(do.LEAVE_DEPTHWISE,),
    ),
    ReasonRow(
        code=ReasonCode.GROUPED_CONV,
        origin=Origin.CAUSE,
        sentence="It is a convolution with groups.",
        documentation="TensorRT considers no sparse kernel for groups and does not list the layer. "
        "One group instead of many multiplies the weights by their number, while sparse math "
        "saves half at best.",
        best=VerdictName.NOT_ELIGIBLE,
        left_dense=LeftDense.BY_SHAPE,
        builder_obeys=True,
        source="NVIDIA/TensorRT issue 4054",
        found_by=(rules.grouped,),
        remedies=(do.LEAVE_GROUPED, do.LEAVE_GROUPED_ENGINE),
        remedy_for=do.leave_grouped,
    ),
    ReasonRow(
        code=ReasonCode.UNSUPPORTED_OP,
        origin=Origin.CAUSE,
        sentence="It is unknown whether such a layer can run sparse, or its weight cannot be read.",
        documentation="No document, maintainer or known log mentions transposed and 3-D "
        "convolutions or Einsum; TensorRT 8 listed float matrix products in some builds and not "
        "in others. Weights that reach their layer through ops that cannot be followed have it "
        "too. A build log settles it, and only for weights that keep the pattern; where accuracy "
        "counts more, leave such layers dense with --exclude.",
        best=VerdictName.UNKNOWN,
        left_dense=LeftDense.IF_STATED,
        found_by=(rules.undocumented_op, rules.product_in_tensorrt_8),
        remedies=(
            *(do.BUILD_AND_READ, do.NEWER_TENSORRT),
            *(do.FOLD_CONSTANTS, do.AS_MATMUL, do.RESIZE),
        ),
        remedy_for=do.settle_op,
    ),
    ReasonRow(
        code=ReasonCode.AXIS_NOT_MULTIPLE,
        origin=Origin.CAUSE,
        sentence="The reduction axis is not a multiple of four.",
        documentation="The guide groups four channels; what happens to the rest is known from logs "
        "alone. TensorRT 8.4.1, 10.14 and 10.16 listed convolutions of one input channel, as if "
        "padded with zeros. So a convolution whose rest obeys the pattern is predicted as "
        "eligible, and a matrix product, for which there is no such log, is not.",
        left_dense=LeftDense.BY_SHAPE,
        source=GUIDE,
        found_by=(rules.narrow_tail,),
        remedies=(do.LEAVE_TAIL, do.LEAVE_NARROW),
        remedy_for=do.widen_axis,
    ),
    ReasonRow(
        code=ReasonCode.SHARED_WEIGHT,
        origin=Origin.CAUSE,
        sentence="Something else uses the same stored array.",
        documentation="An embedding that takes rows of the array, another node that reads it and "
        "an output of the graph would get pruned values too, so it is left dense unless asked for. "
        "Layers that sum over the array along different axes cannot both have the pattern.",
        left_dense=LeftDense.WHERE_SAID,
        explains_dense=True,
        found_by=(rules.axes_at_odds,),
        remedies=(do.OWN_COPY,),
        remedy_for=do.untie,
    ),
    # --- what pruning, the module or the file say
    ReasonRow(
        code=ReasonCode.PICKED_AT_RUN_TIME,
        origin=Origin.STATED,
        sentence="Which part of a stored array is the weight differs from run to run.",
        documentation="Experts are an example, if their matrices are stored as one stack. The "
        "builder needs the weight when it builds.",
        best=VerdictName.NOT_ELIGIBLE,
        left_dense=LeftDense.ALWAYS,
        source=GUIDE,
        remedies=(do.LEAVE_PICKED,),
    ),
    ReasonRow(
        code=ReasonCode.ZERO_POINT,
        origin=Origin.STATED,
        sentence="A zero point that is not 0 keeps TensorRT from sparse int8 math.",
        documentation="TensorRT quantises symmetrically. Where a stored 0 stands for another "
        "number, a pruned weight is not zero.",
        best=VerdictName.NOT_ELIGIBLE,
        remedies=(do.QUANTIZE_EVENLY,),
    ),
    ReasonRow(
        code=ReasonCode.EXCLUDED,
        origin=Origin.STATED,
        sentence="An option left it dense.",
        documentation="--exclude names it, or a layer that shares its array.",
        left_dense=LeftDense.WHERE_SAID,
        explains_dense=True,
        remedies=(do.SELECT,),
    ),
    ReasonRow(
        code=ReasonCode.NOT_A_LAYER,
        origin=Origin.STATED,
        sentence="The model's own code multiplies by the weight, not a module that pruning knows.",
        documentation="The exported file has the product, so pruning that file reaches it.",
        left_dense=LeftDense.WHERE_SAID,
        explains_dense=True,
        remedies=(do.PRUNE_FILE,),
    ),
    ReasonRow(
        code=ReasonCode.NOT_EXPORTED,
        origin=Origin.STATED,
        sentence="Pruning knows the layer, and the exported graph has no node for it.",
        documentation="Its weights are stored and count in the totals; nothing multiplies by them.",
        best=VerdictName.NOT_IN_ENGINE,
    ),
    ReasonRow(
        code=ReasonCode.GUESSED,
        origin=Origin.STATED,
        sentence="Op and axis are guessed from the key and the shape of a bare weights file.",
        documentation="Matrices and kernels are grouped along axis 1, as torch stores Linear and "
        "Conv. The ONNX file or the run folder says what they are.",
        remedies=(do.NAME_RECORD,),
    ),
    # --- what follows for its weights
    ReasonRow(
        code=ReasonCode.WRONG_AXIS,
        origin=Origin.CONSEQUENCE,
        sentence="The pattern holds along another axis than the reduction axis.",
        documentation="A mask along another axis is of no use to the tensor cores. Looked for only "
        "where the pattern is broken along the reduction axis.",
        best=VerdictName.NOT_ELIGIBLE,
        builder_obeys=True,
        source=GUIDE,
        found_by=(rules.wrong_axis,),
        remedies=(do.PRUNE_ALONG, do.PRUNE_OTHERWISE),
        remedy_for=do.prune_layer,
    ),
    ReasonRow(
        code=ReasonCode.PATTERN_BROKEN,
        origin=Origin.CONSEQUENCE,
        sentence="Groups of four weights have more than two that are not zero.",
        documentation="For every output channel and kernel position, of four consecutive input "
        "channels two must be zero. Judged on the saved file, never on a mask.",
        best=VerdictName.NOT_ELIGIBLE,
        builder_obeys=True,
        source=GUIDE,
        found_by=(rules.broken_pattern,),
        remedies=(do.PRUNE_ALONG, do.PRUNE_OTHERWISE),
        remedy_for=do.prune_layer,
    ),
    ReasonRow(
        code=ReasonCode.DTYPE,
        origin=Origin.CONSEQUENCE,
        sentence="No sparse kernel is known for the type it computes in.",
        documentation="float16 and int8 have documented sparse kernels. Builders list layers of "
        "other types all the same: in FP32 they were listed and never chosen, unless the build was "
        "allowed FP16 or INT8. Weights in a type that cannot be read have it too.",
        source=GUIDE,
        found_by=(rules.math_type,),
        remedies=(do.EXPORT_FLOAT16, do.ALLOW_FLOAT16, do.USE_FLOAT16, do.USE_IF_DENSE),
        remedy_for=do.change_type,
    ),
    ReasonRow(
        code=ReasonCode.INT8_OUTPUT_NOT_QUANTIZED,
        origin=Origin.CONSEQUENCE,
        sentence="It computes in int8 and its output is not quantised, so the dense kernel wins.",
        documentation="Seen with matrix products: a sparse int8 product is faster only where its "
        "output stays int8.",
        source="NVIDIA/Model-Optimizer commit dff1aa1a2, examples/sparse_quant_trt",
        found_by=(rules.int8_output,),
        remedies=(do.QUANTIZE_OUTPUT,),
        remedy_for=do.quantize_output,
    ),
    ReasonRow(
        code=ReasonCode.SMALL_CHANNELS,
        origin=Origin.CONSEQUENCE,
        sentence="It has fewer channels than sparse kernels need to win, as maintainers believe.",
        documentation="A doubt, not a prediction: the known logs do not confirm it. An RxS kernel "
        "counts the input channels RxS-fold.",
        is_doubt=True,
        source="for: NVIDIA/TensorRT issues 3849, 4065 (the maintainers' rule of thumb); against: "
        "two logs of TensorRT 10.3, where 22 of 50 such layers were chosen and 9 of 28 wider ones",
        found_by=(rules.small_layer,),
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
        found_by=(rules.unchecked,),
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
        found_by=(rules.qualifying,),
    ),
    # --- what a build showed
    ReasonRow(
        code=ReasonCode.SPARSITY_OFF,
        origin=Origin.EVIDENCE,
        sentence="Sparse weights were not allowed in the build.",
        documentation="Without the builder flag SPARSE_WEIGHTS no layer is considered.",
        best=VerdictName.NOT_ELIGIBLE,
        refutes_rules=False,
        remedies=(do.ALLOW_SPARSE,),
    ),
    ReasonRow(
        code=ReasonCode.SPARSITY_FORCED,
        origin=Origin.EVIDENCE,
        sentence="trtexec overwrote the weights, so the log says nothing about those of the model.",
        documentation="--sparsity=force makes every weight 2:4 before it builds. Such a log is no "
        "evidence, and verdicts stay predicted.",
        source="trtexec, samples/common/sampleUtils.cpp",
        remedies=(do.NOT_FORCED,),
    ),
    ReasonRow(
        code=ReasonCode.NOT_LISTED,
        origin=Origin.EVIDENCE,
        sentence="The builder printed its list of eligible layers, and this one is not in it.",
        documentation="Counts only where the list is whole; or layer information marks other "
        "weights as sparse, and not these.",
        best=VerdictName.NOT_ELIGIBLE,
        remedies=(do.SAME_MODEL, do.GIVE_MODEL),
    ),
    ReasonRow(
        code=ReasonCode.DENSE_FASTER,
        origin=Origin.EVIDENCE,
        sentence="The builder timed both, and the dense kernel was faster.",
        documentation="Both times are in the log. The builder keeps the faster (NVIDIA/TensorRT "
        "issue 2169), which is normal.",
        remedies=(do.LARGER_BATCH, do.LOG_OF_TYPE),
    ),
    ReasonRow(
        code=ReasonCode.DENSE_TAKEN,
        origin=Origin.EVIDENCE,
        sentence="A dense kernel was taken for an eligible layer; no times of both are in the log.",
        documentation="A timing cache hides what was timed, or the log is not verbose enough.",
        source="NVIDIA/TensorRT issue 2169: the builder keeps the faster",
        remedies=(do.DELETE_CACHE, do.NO_CACHE, do.LARGER_BATCH, do.LOG_OF_TYPE),
    ),
    ReasonRow(
        code=ReasonCode.NO_SPARSE_TACTIC,
        origin=Origin.EVIDENCE,
        sentence="The builder timed kernels for an eligible layer, and none of them was sparse.",
        documentation="Said only where every timed kernel is named.",
        remedies=(do.EXPORT_FLOAT16, do.ALLOW_FLOAT16, do.ACCEPT_DENSE, do.LOG_OF_TYPE),
    ),
    ReasonRow(
        code=ReasonCode.TACTIC_SKIPPED,
        origin=Origin.EVIDENCE,
        sentence="Tactics were skipped for lack of memory, and no sparse one was timed.",
        documentation="The log says how many bytes a skipped tactic wanted.",
        remedies=(do.LARGER_WORKSPACE, do.MORE_MEMORY, do.LOG_OF_TYPE),
    ),
    ReasonRow(
        code=ReasonCode.IN_PLUGIN,
        origin=Origin.EVIDENCE,
        sentence="It runs in a plugin, whose kernels TensorRT does not choose.",
        documentation="Layer information or the runner of its tactics says so.",
        best=VerdictName.NOT_ELIGIBLE,
        refutes_rules=False,
        remedies=(do.NO_PLUGIN,),
    ),
    ReasonRow(
        code=ReasonCode.FUSED_SIBLINGS,
        origin=Origin.EVIDENCE,
        sentence="It runs as one engine layer with others that read the same input.",
        documentation="A horizontal fusion runs sparse only where all of its layers can.",
        best=VerdictName.CHOSEN,
        refutes_rules=False,
        remedies=(do.PRUNE_FUSED, do.MEND_FUSED, do.LEAVE_FUSED),
    ),
    ReasonRow(
        code=ReasonCode.FOLDED,
        origin=Origin.EVIDENCE,
        sentence="No layer of the engine holds the node.",
        documentation="It was folded into a constant, fused or left out.",
        best=VerdictName.NOT_IN_ENGINE,
        refutes_rules=False,
    ),
    ReasonRow(
        code=ReasonCode.LOG_SILENT,
        origin=Origin.EVIDENCE,
        sentence="The evidence does not say whether it is eligible, or whether it was chosen.",
        documentation="The log is not verbose, is cut or has no names, or it is of a loaded "
        "engine, a failed build or another model; the message says which. The verdict is "
        "predicted, or unknown.",
        remedies=(
            *(do.ALLOW_SPARSE, do.VERBOSE_LOG, do.NAME_KERNELS, do.FINISH_BUILD, do.MEND_BUILD),
            *(do.WHOLE_LOG, do.NAMES_IN_LOG, do.LOG_OF_BUILD, do.LOG_OF_MODEL),
            do.LAYERS_OF_MODEL,
        ),
    ),
    ReasonRow(
        code=ReasonCode.LOG_CONTRADICTS,
        origin=Origin.EVIDENCE,
        sentence="The evidence contradicts the rules, or itself.",
        documentation="A verdict other than the rules predicted, lines of a log that cannot both "
        "be true, or a log that calls chosen what the engine runs dense.",
        best=VerdictName.CHOSEN,
        remedies=(do.SAME_MODEL, do.SAME_BUILD),
    ),
)
REASONS = {row.code: row for row in _ROWS}
"""Every code with its row, in the order in which reasons explain a layer."""


def obstacles(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """The reasons that are an obstacle or a doubt."""
    return tuple(r for r in reasons if not REASONS[r.code].in_favour)


def leaves_dense(remedy: str) -> bool:
    """Whether the layer is to stay as it is, because no change makes it run sparse."""
    return remedy.startswith(LEAVES_DENSE)


def headlines() -> Mapping[str, str]:
    """What "change first" says of many layers, by the beginning of the remedy of one."""
    return {r.text: r.headline for row in REASONS.values() for r in row.remedies if r.headline}


def headline_changes(remedy: str, known: Mapping[str, str]) -> tuple[str, ...]:
    """The `headlines` that a row's remedy asks for, without the figures of the layer.

    () where it leaves the layer dense, or asks only to build, to time or to look.
    """
    found: dict[str, None] = {}
    for part in remedy.split("; "):
        if part.startswith((*LEAVES_DENSE, do.BUILD_AND_READ.text)):
            break  # what follows is for those who want to do more all the same
        found |= {headline: None for start, headline in known.items() if part.startswith(start)}
    return tuple(found)

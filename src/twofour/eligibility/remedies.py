"""The row of a reason, and its remedies: with the numbers of the layer, without what was done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from math import prod

from twofour.eligibility.build_facts import BuildFacts, Case, version_numbers
from twofour.records import frozen
from twofour.records.eligibility import VerdictName
from twofour.records.export import FIRST_WITH_SPARSE
from twofour.records.weights import HARDWARE_PATTERN, Reason, ReasonCode
from twofour.words import listed

GEMM_TILE = 64
"""Channels that fill a tile of a tensor-core kernel (the k of cuSPARSELt's own samples)."""
LISTS_PRODUCTS = (10, 3)
"""TensorRT from which logs list float products without exception (onnxsim's tests on Jetson)."""
LEAVES_DENSE = ("leave it dense", "accept dense", "try a larger batch", "leave it as it is")
"""How remedies begin that leave the layer dense, or accept that it is."""


@frozen
class Remedy:
    """One thing to do about a reason."""

    text: str
    """In the row of a layer, or how it begins there: figures and names of the layer may follow."""
    headline: str | None = None
    """What "change first" says of many layers; None: nothing is changed (build, time, look)."""
    taken: Callable[[BuildFacts], bool] | None = None
    """Whether a build shows that it was done, or could not have been; None: it never does."""


def still_to_do(build: BuildFacts, *remedies: Remedy) -> tuple[str, ...]:
    """Texts of the remedies that the build does not show as taken, in their order."""
    return tuple(r.text for r in remedies if r.taken is None or not r.taken(build))


def has_code(reasons: Iterable[Reason], *codes: ReasonCode) -> bool:
    """Whether one of the reasons has one of the codes."""
    return any(reason.code in codes for reason in reasons)


def in_turn(*steps: str | None) -> str | None:
    """One remedy of several, each once; None where there is none."""
    return "; ".join(dict.fromkeys(filter(None, steps))) or None


@frozen
class Remark:
    """What one rule says about one layer; the rest is in the row that names the rule."""

    message: str
    source: str | None = None
    """None: the source of the row."""
    best: VerdictName | None = None
    """The best verdict the layer can have while this holds; None: the best of the row."""


@frozen
class Finding:
    """A reason and the best verdict that it leaves this layer."""

    reason: Reason
    best: VerdictName


Rule = Callable[[Case], "Remark | None"]


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
    UNLESS_ASKED = "yes, unless --include or --all-layers asks for it; gates do not count the layer"
    ALWAYS = "yes: there is no stored array that could be pruned"
    WHERE_SAID = "where the message says so"


@frozen
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


_PRUNE_INPUTS = "prune 2:4 along the input channels"
_USE_FLOAT16 = "use float16 (--precision float16)"
_FOLD = "fold these weights to constants before export"
_WORKSPACE = "build with a larger workspace (--memPoolSize=workspace:)"

# --- of the build ---------------------------------------------------------------------------------

ALLOW_SPARSE = Remedy(
    text="build with sparse weights allowed (trtexec --sparsity=enable, SPARSE_WEIGHTS)",
    headline="build with sparse weights allowed",
    taken=lambda b: b.sparse_weights is True,
)
VERBOSE_LOG = Remedy(
    text="rebuild with a verbose log (trtexec --verbose, or a logger of severity VERBOSE)",
    taken=lambda b: b.verbose,
)
NAME_KERNELS = Remedy(
    text="give layer information of detailed profiling verbosity (--layers)",
    taken=lambda b: b.kernels_named,
)
EXPORT_FLOAT16 = Remedy(
    text="export with --precision float16",
    headline=_USE_FLOAT16,
    taken=lambda b: b.lowers_float32 is True,
)
ALLOW_FLOAT16 = Remedy(
    text="build with FP16 allowed (trtexec --fp16, TensorRT before 11)",
    headline=_USE_FLOAT16,
    taken=lambda b: b.is_strongly_typed or b.lowers_float32 is True,
)
NEWER_GPU = Remedy(
    text="run on a GPU of compute capability 8.0 or later (Ampere and newer)",
    headline="use a GPU of compute capability 8.0 or later",
    taken=lambda b: (b.compute_capability or (0, 0)) >= FIRST_WITH_SPARSE,
)
NEWER_TENSORRT = Remedy(
    text="build with TensorRT 10.3 or later",
    headline="build with TensorRT 10.3 or later",
    taken=lambda b: version_numbers(b.tensorrt_version) >= LISTS_PRODUCTS,
)
BUILD_AND_READ = Remedy(text="build it and read the log", taken=lambda b: b.built)
BUILD_AND_TIME = Remedy(
    text="build it: only TensorRT's own timing decides", taken=lambda b: b.built
)
DELETE_CACHE = Remedy(
    text="delete the timing cache and rebuild, to see the times",
    taken=lambda b: b.timing_cache in ("local", "none"),
)
NO_CACHE = Remedy(
    text="rebuild without a timing cache (trtexec --noBuilderCache), to see the times",
    taken=lambda b: b.timing_cache == "none",
)
LARGER_WORKSPACE = Remedy(text=_WORKSPACE, headline=_WORKSPACE)
MORE_MEMORY = Remedy(
    text="build with more free GPU memory and a larger workspace", headline=_WORKSPACE
)
NO_PLUGIN = Remedy(
    text="build without the plugin that takes this layer", headline="build without the plugin"
)
ON_GPU = Remedy(
    text="build it for the GPU (without --useDLACore), or a convolution of more than 64 input "
    "channels in int8 (--quantize int8)",
    headline="build for the GPU what the DLA cannot run sparse",
)
ASK_DLA = Remedy(text="read uses_structured_sparsity in the layer-wise statistics of cuDLA")
NOT_FORCED = Remedy(text="rebuild with --sparsity=enable, which keeps the weights as they are")
FINISH_BUILD = Remedy(text="let the build finish, and give its whole log")
MEND_BUILD = Remedy(text="fix the errors in the log and build again")

# --- of the evidence ------------------------------------------------------------------------------

WHOLE_LOG = Remedy(text="give the whole log: its list of layers is shortened")
NAMES_IN_LOG = Remedy(text="give the whole log with the names behind the counts")
LOG_OF_BUILD = Remedy(text="give the log of its build")
LOG_OF_MODEL = Remedy(text="give the log of a build of this ONNX file")
LAYERS_OF_MODEL = Remedy(text="give the layer information of a build of this ONNX file")
GIVE_MODEL = Remedy(text="give the ONNX file too (--onnx), to see what rules it out")
SAME_MODEL = Remedy(text="check that the engine was built from this ONNX file")
SAME_BUILD = Remedy(text="check that the log and the layer information are of one build")
VALIDATE = Remedy(
    text="run twofour validate on the saved file", headline="run twofour validate on the saved file"
)
NAME_RECORD = Remedy(text="validate the ONNX file or the run folder, which say op and axis")

# --- of the model ---------------------------------------------------------------------------------

PRUNE_ALONG = Remedy(text="prune it 2:4 along input channels", headline=_PRUNE_INPUTS)
PRUNE_OTHERWISE = Remedy(text="prune to 2:4", headline=_PRUNE_INPUTS)
PRUNE_FUSED = Remedy(text="prune the layers fused with it too", headline=_PRUNE_INPUTS)
PRUNE_FILE = Remedy(
    text="prune the ONNX file itself: twofour prune RUN_FOLDER/dense.onnx",
    headline="prune the ONNX file itself, which has every weight",
)
OWN_COPY = Remedy(
    text="give it its own copy of the weight",
    headline="give layers that share a weight their own copies",
)
USE_FLOAT16 = Remedy(text="use float16", headline=_USE_FLOAT16)
USE_IF_DENSE = Remedy(text="if the builder takes dense kernels, use float16", headline=_USE_FLOAT16)
USE_INT8 = Remedy(
    text="if the builder takes dense kernels, use int8 or float16",
    headline="no sparse FP8 kernel is documented: use int8 (--quantize int8)",
)
QUANTIZE_OUTPUT = Remedy(
    text="quantise its output too (Q/DQ pair behind it)",
    headline="quantise the outputs of these layers",
)
QUANTIZE_EVENLY = Remedy(
    text="quantise weights and activations symmetrically (int8, zero point 0)",
    headline="quantise weights and activations symmetrically (zero point 0)",
)
MAKE_CONSTANT = Remedy(
    text="make it a constant: fold it before export, or store it as a parameter", headline=_FOLD
)
FOLD_CONSTANTS = Remedy(
    text="fold constants, so that the weight is stored as the layer uses it", headline=_FOLD
)
RESIZE = Remedy(
    text="use resize + convolution, which the guide documents",
    headline="use resize + convolution instead of transposed convolutions",
)
AS_MATMUL = Remedy(
    text="write it as a MatMul, which the guide documents",
    headline="write Einsum as MatMul",
)

# --- to leave as it is ----------------------------------------------------------------------------

LEAVE_GROUPED = Remedy(text="leave it dense: sparse kernels need a convolution without groups")
LEAVE_UNLESS_ASKED = Remedy(text="leave it dense, or prune it all the same with --include")
LEAVE_EXCLUDED = Remedy(text="leave it dense, as your options do")
LEAVE_DEPTHWISE = Remedy(text="leave it dense; prune the 1x1 convolutions around it")
LEAVE_TAIL = Remedy(text="leave it dense")
LEAVE_NARROW = Remedy(text="leave it as it is: too few input channels to gain")
LEAVE_PICKED = Remedy(
    text="leave it dense: sparse kernels take the weight when the engine is built"
)
LEAVE_FLOAT = Remedy(
    text="leave it dense: --quantize keeps its output float, because rounding it costs accuracy"
)
LEAVE_LARGE = Remedy(text="leave it dense: its values do not fit float16")
ACCEPT_DENSE = Remedy(
    text="accept dense: this builder offers no sparse kernel for the layer as it is"
)
LARGER_BATCH = Remedy(
    text="try a larger batch, where sparse kernels gain most; otherwise dense is right here"
)


# --- with the figures of a layer ------------------------------------------------------------------


def prune_layer(case: Case) -> str:
    """Prune along the reduction axis; prune to 2:4 where another pattern was asked for."""
    if case.context.pattern != HARDWARE_PATTERN:
        return f"{PRUNE_OTHERWISE.text} instead of {case.context.pattern}"
    return f"{PRUNE_ALONG.text} (axis {case.weight.axis})"


def leave_grouped(case: Case) -> str:
    """Leave it dense: its weights with groups, and without them."""
    now = prod(case.weight.shape)
    return f"{LEAVE_GROUPED.text}, with {now * case.weight.groups:,} weights instead of {now:,}"


def ask_for_it(case: Case) -> str:
    """Leave it dense, or name it."""
    return f"{LEAVE_UNLESS_ASKED.text} {case.weight.layer}"


def widen_axis(case: Case) -> str:
    """Widen the layer to the next width that groups of four and tiles cover."""
    width = case.weight.in_channels
    if width < HARDWARE_PATTERN.m:
        return LEAVE_NARROW.text
    # 30 channels: 32 for whole groups of four, better 64 for a whole tile
    least = _up(width, HARDWARE_PATTERN.m)
    tile = _up(width, GEMM_TILE)
    text = f"{LEAVE_TAIL.text}; if you can still train: {least} input channels instead of {width}"
    if tile != least:
        text += f" (better {tile})"
    return text


def change_type(case: Case) -> str:
    """Use a type with sparse kernels, in a way that this build has not tried."""
    dtype = case.weight.math_dtype
    if case.weight.float_on_purpose:
        return LEAVE_LARGE.text
    if dtype in ("float32", "float64"):
        return " or ".join(still_to_do(case.build, EXPORT_FLOAT16, ALLOW_FLOAT16))
    if dtype.startswith("float8"):
        return USE_INT8.text
    if dtype == "int8":
        return USE_FLOAT16.text
    return USE_IF_DENSE.text


def settle_op(case: Case) -> str:
    """Build and look where no document says; some ops have a documented form."""
    weight = case.weight
    if has_code(weight.reasons, ReasonCode.UNSUPPORTED_OP):
        return FOLD_CONSTANTS.text
    if weight.op == "Einsum":
        return "; or ".join((AS_MATMUL.text, *still_to_do(case.build, BUILD_AND_READ)))
    if weight.kernel:
        steps = still_to_do(case.build, BUILD_AND_READ)
        if weight.op.startswith("ConvTranspose"):
            steps += (RESIZE.text,)
        return "; or ".join(steps)
    return ", or ".join(still_to_do(case.build, BUILD_AND_READ, NEWER_TENSORRT))


def quantize_output(case: Case) -> str:
    """Quantise the output, unless that was decided against."""
    if case.weight.float_on_purpose:
        return LEAVE_FLOAT.text
    return QUANTIZE_OUTPUT.text


def untie(case: Case) -> str:
    """Give the layer a copy, or prune the array for its other users too."""
    # lm_head shares embed.weight: "..., or prune the embedding too: --include lm_head"
    if case.at_odds:
        return f"{OWN_COPY.text}, pruned 2:4 along input channels (axis {case.weight.axis})"
    asked = f"--include {case.weight.layer}"
    if case.weight.looked_up_by:
        return f"{OWN_COPY.text}, or prune the embedding too: {asked}"
    if case.weight.read_by:
        return f"{OWN_COPY.text}, or prune it for {listed(case.weight.read_by)} too: {asked}"
    return OWN_COPY.text


def _up(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple

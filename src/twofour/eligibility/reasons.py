"""The table of reasons: each code once, with all that pruning, rules and reports use.

A new reason that no rule finds is a member of ReasonCode, a row here, and what states it or reads
it in a log; one with a rule has its row in rules.py. `make docs` makes a page for each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import chain

from twofour.eligibility import remedies as do
from twofour.eligibility.build_facts import FORCE_DEPRECATED
from twofour.eligibility.remedies import LEAVES_DENSE, LeftDense, Origin, ReasonRow
from twofour.eligibility.rules import GUIDE, RULED
from twofour.records.eligibility import VerdictName
from twofour.records.weights import Reason, ReasonCode

_stated = functools.partial(ReasonRow, origin=Origin.STATED)
_seen = functools.partial(ReasonRow, origin=Origin.EVIDENCE)
_ROWS = (
    *RULED,
    # --- what pruning, the module or the file say
    _stated(
        code=ReasonCode.PICKED_AT_RUN_TIME,
        sentence="Which part of a stored array is the weight differs from run to run.",
        documentation="Experts are an example, if their matrices are stored as one stack. The "
        "builder needs the weight when it builds.",
        best=VerdictName.NOT_ELIGIBLE,
        left_dense=LeftDense.ALWAYS,
        source=GUIDE,
        remedies=(do.LEAVE_PICKED,),
    ),
    _stated(
        code=ReasonCode.ZERO_POINT,
        sentence="A zero point that is not 0 keeps TensorRT from sparse int8 math.",
        documentation="TensorRT quantises symmetrically. Where a stored 0 stands for another "
        "number, a pruned weight is not zero.",
        best=VerdictName.NOT_ELIGIBLE,
        remedies=(do.QUANTIZE_EVENLY,),
    ),
    _stated(
        code=ReasonCode.EXCLUDED,
        sentence="An option left it dense.",
        documentation="--exclude, --layers, --max-drop or --budget names it, or a layer that "
        "shares its array.",
        left_dense=LeftDense.WHERE_SAID,
        explains_dense=True,
        remedies=(do.LEAVE_EXCLUDED,),
    ),
    _stated(
        code=ReasonCode.FROZEN,
        sentence="It is frozen in a module that is otherwise trained.",
        documentation="Where at least 99 % of a module's values are not frozen, a parameter with "
        "`requires_grad=False` has fixed values, which its user chose. The values of all "
        "parameters count, each parameter once. A frozen backbone and a model under an adapter are "
        "larger parts, and are pruned.",
        left_dense=LeftDense.UNLESS_ASKED,
        explains_dense=True,
        remedies=(do.LEAVE_UNLESS_ASKED,),
        remedy_for=do.ask_for_it,
    ),
    _stated(
        code=ReasonCode.NOT_A_LAYER,
        sentence="The model's own code multiplies by the weight, not a module that pruning knows.",
        documentation="The exported file has the product, so pruning that file reaches it.",
        left_dense=LeftDense.WHERE_SAID,
        explains_dense=True,
        remedies=(do.PRUNE_FILE,),
    ),
    _stated(
        code=ReasonCode.NOT_EXPORTED,
        sentence="Pruning knows the layer, and the exported graph has no node for it.",
        documentation="Its weights are stored and count in the totals; nothing multiplies by them.",
        best=VerdictName.NOT_IN_ENGINE,
    ),
    _stated(
        code=ReasonCode.GUESSED,
        sentence="Op and axis are guessed from the key and the shape of a bare weights file.",
        documentation="Matrices and kernels are grouped along axis 1, as torch stores Linear and "
        "Conv. The ONNX file or the run folder says what they are.",
        remedies=(do.NAME_RECORD,),
    ),
    # --- what a build showed
    _seen(
        code=ReasonCode.SPARSITY_OFF,
        sentence="Sparse weights were not allowed in the build.",
        documentation="Without the builder flag SPARSE_WEIGHTS no layer is considered.",
        best=VerdictName.NOT_ELIGIBLE,
        refutes_rules=False,
        remedies=(do.ALLOW_SPARSE,),
    ),
    _seen(
        code=ReasonCode.SPARSITY_FORCED,
        sentence="trtexec overwrote the weights, so the log says nothing about those of the model.",
        documentation="--sparsity=force makes every weight 2:4 before it builds. Such a log is no "
        f"evidence, and verdicts stay predicted. {FORCE_DEPRECATED.in_words}.",
        source="trtexec, samples/common/sampleUtils.cpp",
        remedies=(do.NOT_FORCED,),
    ),
    _seen(
        code=ReasonCode.NOT_LISTED,
        sentence="The builder printed its list of eligible layers, and this one is not in it.",
        documentation="Counts only where the list is whole; or layer information marks other "
        "weights as sparse, and not these.",
        best=VerdictName.NOT_ELIGIBLE,
        remedies=(do.SAME_MODEL, do.GIVE_MODEL),
    ),
    _seen(
        code=ReasonCode.DENSE_FASTER,
        sentence="The builder timed both, and the dense kernel was faster.",
        documentation="Both times are in the log. The builder keeps the faster (NVIDIA/TensorRT "
        "issue 2169), which is normal.",
        remedies=(do.LARGER_BATCH,),
    ),
    _seen(
        code=ReasonCode.DENSE_TAKEN,
        sentence="A dense kernel was taken for an eligible layer; no times of both are in the log.",
        documentation="A timing cache hides what was timed, or the log is not verbose enough.",
        source="NVIDIA/TensorRT issue 2169: the builder keeps the faster",
        remedies=(do.DELETE_CACHE, do.NO_CACHE, do.LARGER_BATCH),
    ),
    _seen(
        code=ReasonCode.NO_SPARSE_TACTIC,
        sentence="The builder timed kernels for an eligible layer, and none of them was sparse.",
        documentation="Said only where every timed kernel is named.",
        remedies=(do.EXPORT_FLOAT16, do.ALLOW_FLOAT16, do.ACCEPT_DENSE),
    ),
    _seen(
        code=ReasonCode.TACTIC_SKIPPED,
        sentence="Tactics were skipped for lack of memory, and no sparse one was timed.",
        documentation="The log says how many bytes a skipped tactic wanted.",
        remedies=(do.LARGER_WORKSPACE, do.MORE_MEMORY),
    ),
    _seen(
        code=ReasonCode.IN_PLUGIN,
        sentence="It runs in a plugin, whose kernels TensorRT does not choose.",
        documentation="Layer information or the runner of its tactics says so.",
        best=VerdictName.NOT_ELIGIBLE,
        refutes_rules=False,
        remedies=(do.NO_PLUGIN,),
    ),
    _seen(
        code=ReasonCode.ON_DLA,
        sentence="It runs on the deep learning accelerator (DLA), which cannot run it sparse.",
        documentation="Orin's DLA runs only INT8 convolutions of more than 64 input channels "
        "sparse. The guide also asks for at most 256 K weights, and a number of output channels "
        "whose remainder by 64 is 0, 1, 2, 4, 8, 16 or 32. No list of layers is about the DLA.",
        best=VerdictName.NOT_ELIGIBLE,
        refutes_rules=False,
        source="TensorRT 8.6 developer guide, DLA, structured sparsity",
        remedies=(do.ON_GPU,),
    ),
    _seen(
        code=ReasonCode.FUSED_SIBLINGS,
        sentence="It runs as one engine layer with others that read the same input.",
        documentation="A horizontal fusion runs sparse only where all of its layers can.",
        best=VerdictName.CHOSEN,
        refutes_rules=False,
        remedies=(do.PRUNE_FUSED,),
    ),
    _seen(
        code=ReasonCode.FOLDED,
        sentence="No layer of the engine holds the node.",
        documentation="It was folded into a constant, fused or left out.",
        best=VerdictName.NOT_IN_ENGINE,
        refutes_rules=False,
    ),
    _seen(
        code=ReasonCode.LOG_SILENT,
        sentence="The evidence does not say whether it is eligible, or whether it was chosen.",
        documentation="The log is not verbose, is cut or has no names, or it is of a loaded "
        "engine, a failed build or another model; the message says which. The verdict is "
        "predicted, or unknown.",
        remedies=(
            do.ALLOW_SPARSE,
            do.VERBOSE_LOG,
            do.NAME_KERNELS,
            do.FINISH_BUILD,
            do.MEND_BUILD,
            do.WHOLE_LOG,
            do.NAMES_IN_LOG,
            do.LOG_OF_BUILD,
            do.LOG_OF_MODEL,
            do.LAYERS_OF_MODEL,
            do.ASK_DLA,
        ),
    ),
    _seen(
        code=ReasonCode.LOG_CONTRADICTS,
        sentence="The evidence contradicts the rules, or itself.",
        documentation="A verdict other than the rules predicted, lines of a log that cannot both "
        "be true, or a log that calls chosen what the engine runs dense.",
        best=VerdictName.CHOSEN,
        remedies=(do.SAME_MODEL, do.SAME_BUILD),
    ),
)
REASONS = {row.code: row for row in sorted(_ROWS, key=lambda row: [*Origin].index(row.origin))}
"""Every code with its row, in the order in which reasons explain a layer."""


def reason_of(code: ReasonCode, message: str, source: str | None = None) -> Reason:
    """The reason of one layer; its source is that of the code's row where none is given."""
    return REASONS[code].reason(message, source)


def obstacles(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """The reasons that are an obstacle or a doubt."""
    return tuple(r for r in reasons if not REASONS[r.code].in_favour)


def leaves_dense(remedy: str) -> bool:
    """Whether the layer is to stay as it is, because no change makes it run sparse."""
    return remedy.startswith(LEAVES_DENSE)


def common_remedy(code: ReasonCode, remedies: Sequence[str]) -> str | None:
    """What to do about a code in all of its layers: `remedies` are theirs; None: nothing.

    Where they differ in more than figures, that is the first remedy of the code's row.
    """
    different = dict.fromkeys(remedies)
    if len(different) < 2:
        return next(iter(different), None)
    changes = dict.fromkeys(map(headline_changes, different))
    if len(changes) == 1 and (shared := "; ".join(next(iter(changes)))):
        return shared
    return next((remedy.text for remedy in REASONS[code].remedies), None)


def headline_changes(remedy: str) -> tuple[str, ...]:
    """What "change first" says of a row's remedy, without the figures of the layer.

    () where it leaves the layer dense, or asks only to build, to time or to look.
    """
    # "prune it 2:4 along input channels (axis 1); build it: only TensorRT's own timing decides"
    # asks for one change: "prune 2:4 along the input channels"
    headlines: dict[str, None] = {}
    for part in remedy.split("; "):
        if part.startswith((*LEAVES_DENSE, do.BUILD_AND_READ.text)):
            break  # what follows is for those who want to do more all the same
        for known in chain.from_iterable(row.remedies for row in REASONS.values()):
            if known.headline is not None and part.startswith(known.text):
                headlines[known.headline] = None
    return tuple(headlines)

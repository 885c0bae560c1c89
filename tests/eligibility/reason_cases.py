"""For each reason code, what brings it about: real records in, a row with the code out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper
from safetensors.numpy import save_file
from support import onnx_models as om
from support.join_cases import (
    DENSE,
    SPARSE,
    build,
    chosen,
    eligible,
    information,
    layer,
    node,
    tuned,
)
from support.report_cases import (
    check,
    context,
    conv,
    gpu,
    int8,
    matmul,
    prune_result,
    pruned_row,
    report,
    validation,
)

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.join import join_report
from twofour.eligibility.predict import predict, predicted_row, with_not_exported
from twofour.graph.weights import find_weights, frozen_metadata
from twofour.pipeline.evidence_files import with_module_names
from twofour.pruning.selection import choose
from twofour.pruning.verify import guess_weights
from twofour.records.eligibility import Verdict, VerdictName
from twofour.records.export import LayerMap, LayerName
from twofour.records.log import SkippedTactic, SkipReason
from twofour.records.weights import (
    HARDWARE_PATTERN,
    ReasonCode,
    Selection,
    Weight,
)

_LARGE = conv("a", 512, 512, node="a")
_OTHER = conv("b", 512, 512, node="b")
_NARROW = conv("a", 64, 64, node="a")


def _predicted(weight: Weight, *, violations: int = 0, **changes: Any) -> Verdict:
    along, required = changes.pop("along", None), changes.pop("required", True)
    checked = [] if weight.axis is None else [check(weight, violations, along)]
    checks = [replace(each, required=required) for each in checked]
    (found,) = predict([weight], validation(*checks), context(**changes)).verdicts
    return found


def _joined(*weights: Weight, violations: int = 0, **evidence: Any) -> Verdict:
    rows = [(w, check(w, violations)) for w in weights or (_LARGE,)]
    return join_report(report(*rows), BuildEvidence(**evidence)).verdicts[0]


def _pruned(weight: Weight, **selection: Any) -> Verdict:
    ((chosen_weight, _, reasons),) = choose([weight], HARDWARE_PATTERN, Selection(**selection))
    return _predicted(replace(chosen_weight, reasons=reasons), violations=3, required=False)


def _in_file(model: Any) -> Verdict:
    (weight,) = find_weights(model).weights
    return _predicted(weight)


def _frozen() -> Verdict:
    model = om.conv(om.weights(64, 64, 3, 3))
    helper.set_model_props(model, frozen_metadata(["w"]))
    (weight,) = find_weights(model).weights
    return _pruned(weight)


def _picked() -> Verdict:
    nodes = [
        helper.make_node("Gather", ["w", "i"], ["picked"], name="pick"),
        helper.make_node("MatMul", ["x", "picked"], ["y"], name="mm"),
    ]
    stack = {"w": om.weights(4, 32, 64)}
    return _in_file(om.model(nodes, stack, inputs={"x": [2, 1, 32], "i": [2]}))


def _zero_point() -> Verdict:
    values = om.weights(16, 32, 3, 3, dtype=np.int8)
    point = np.array(3, np.int8)
    return _in_file(om.quantized_conv(values, zero_point=point, quantize_output=True))


def _not_a_layer() -> Verdict:
    place = LayerName(layer="", parameter="table", node="a", initializer="a.weight", op="Conv")
    pruned = prune_result(pruned_row(matmul("fc", 512, 512)))
    (weight,) = with_module_names([_LARGE], LayerMap(layers=(place,)), pruned)
    return _predicted(weight, violations=3)


def _not_exported() -> Verdict:
    row = pruned_row(matmul("aux", 64, 32, node=None))
    return with_not_exported(report(_LARGE), (row,)).verdicts[-1]


def _guessed(tmp_path: Path) -> Verdict:
    save_file({"fc.weight": np.ones((8, 8), np.float32)}, tmp_path / "m.safetensors")
    (weight,) = guess_weights(tmp_path / "m.safetensors")
    return predicted_row(weight, VerdictName.UNKNOWN, weight.reasons)


def _skipped() -> Verdict:
    wanting = SkippedTactic(
        line=9,
        layer="a",
        id="0x04",
        reason=SkipReason.WORKSPACE,
        requested_bytes=7 << 30,
        available_bytes=1 << 30,
    )
    log = build(*tuned("a", (DENSE, 0.02)), eligible("a"), chosen())
    return _joined(build=replace(log, skipped_tactics=(wanting,)))


def _siblings() -> Verdict:
    nodes = tuple(node(n, "MatMul", "x", f"{n}.w", constants=(f"{n}.w",)) for n in "qk")
    weights = [matmul(n, 512, 512, node=n) for n in "qk"]
    log = build(eligible("q || k"), chosen("q || k"))
    return _joined(*weights, build=log, nodes=nodes)


_FOUND, _NONE = eligible("a"), chosen()
_BOTH = tuned("a", (DENSE, 0.02), (SPARSE, 0.03))
_C = ReasonCode
MAKERS: dict[ReasonCode, Callable[[Path], Verdict]] = {
    _C.GPU_HAS_NO_SPARSE: lambda _: _predicted(_LARGE, gpu=gpu("T4", 7, 5)),
    _C.NOT_CONSTANT: lambda _: _predicted(
        matmul("c", 0, 0, weight=None, axis=None, shape=(), math_dtype="unknown")
    ),
    _C.DEPTHWISE_CONV: lambda _: _predicted(conv("d", 128, 128, groups=128)),
    _C.GROUPED_CONV: lambda _: _predicted(conv("g", 128, 128, groups=4)),
    _C.UNSUPPORTED_OP: lambda _: _predicted(
        conv("up", 256, 256, op="ConvTranspose", shape=(256, 256, 3, 3), axis=0)
    ),
    _C.AXIS_NOT_MULTIPLE: lambda _: _predicted(matmul("rest", 510, 512)),
    _C.SHARED_WEIGHT: lambda _: _pruned(matmul("head", 512, 512, looked_up_by=("tokens",))),
    _C.FROZEN: lambda _: _frozen(),
    _C.TOO_SMALL: lambda _: _pruned(conv("dfl", 16, 1, (1, 1))),
    _C.PICKED_AT_RUN_TIME: lambda _: _picked(),
    _C.ZERO_POINT: lambda _: _zero_point(),
    _C.EXCLUDED: lambda _: _pruned(_LARGE, exclude=("a",)),
    _C.NOT_A_LAYER: lambda _: _not_a_layer(),
    _C.NOT_EXPORTED: lambda _: _not_exported(),
    _C.GUESSED: _guessed,
    _C.WRONG_AXIS: lambda _: _predicted(_LARGE, violations=3, along=0),
    _C.PATTERN_BROKEN: lambda _: _predicted(_LARGE, violations=3),
    _C.DTYPE: lambda _: _predicted(matmul("f", 512, 512, math_dtype="float32")),
    _C.INT8_OUTPUT_NOT_QUANTIZED: lambda _: _predicted(matmul("i", 512, 512, **int8(output=False))),
    _C.SMALL_CHANNELS: lambda _: _predicted(_NARROW),
    _C.OPERAND_FORM: lambda _: _predicted(matmul("p", 512, 512, form="a stack of matrices")),
    _C.NOT_CHECKED: lambda _: predict([_LARGE], validation(), context()).verdicts[0],
    _C.QUALIFIES: lambda _: _predicted(_LARGE),
    _C.SPARSITY_OFF: lambda _: _joined(build=build(flag="Disabled")),
    _C.SPARSITY_FORCED: lambda _: _joined(build=build(_FOUND, _NONE, flag="Forced")),
    _C.NOT_LISTED: lambda _: _joined(_LARGE, _OTHER, build=build(eligible("b"), _NONE)),
    _C.DENSE_FASTER: lambda _: _joined(build=build(*_BOTH, _FOUND, _NONE)),
    _C.DENSE_TAKEN: lambda _: _joined(build=build(_FOUND, _NONE)),
    _C.NO_SPARSE_TACTIC: lambda _: _joined(build=build(*tuned("a", (DENSE, 0.02)), _FOUND, _NONE)),
    _C.TACTIC_SKIPPED: lambda _: _skipped(),
    _C.IN_PLUGIN: lambda _: _joined(layers=information(layer("a", layer_type="PluginV2"))),
    _C.ON_DLA: lambda _: _joined(_NARROW, build=build("[DlaLayer] a", _NONE)),
    _C.FUSED_SIBLINGS: lambda _: _siblings(),
    _C.FOLDED: lambda _: _joined(_LARGE, _OTHER, layers=information(layer("b", DENSE))),
    _C.LOG_SILENT: lambda _: _joined(build=build()),
    _C.LOG_CONTRADICTS: lambda _: _joined(violations=3, layers=information(layer("a", SPARSE))),
}

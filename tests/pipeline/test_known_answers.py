"""Cases whose answer is known from the field, as small ONNX models with the log such a build gives.

The logs are written by hand in TensorRT 10.3's wording; which layers they list is what was reported
of those cases (NVIDIA/TensorRT issues 4054, 3849, 4065, 4694; the 10.3 build logs of a
network masked along the flattened axis).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.arrays import prune_in_place

from twofour.pattern import check
from twofour.pipeline.evidence_files import EvidenceFiles
from twofour.pipeline.reporting import report_files
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.weights import Pattern, ReasonCode

_BANNER = "&&&& RUNNING TensorRT.trtexec [TensorRT v100300] # trtexec --sparsity=enable --verbose"
_FLOAT16 = TensorProto.FLOAT16
Nodes = list[onnx.NodeProto]


def _random(*shape: int, dtype: type = np.float16) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def _pruned(array: np.ndarray, axis: int) -> np.ndarray:
    prune_in_place(array, axis, Pattern(2, 4))
    return array


def _save(
    path: Path, nodes: Nodes, weights: dict[str, np.ndarray], x: tuple[str, list[int], int]
) -> Path:
    name, shape, kind = x
    output = nodes[-1].output[0]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, shape)],
        [helper.make_tensor_value_info(output, kind, None)],
        [numpy_helper.from_array(array, key) for key, array in weights.items()],
    )
    opset = helper.make_opsetid("", 19)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), path)
    return path


def _conv(name: str, x: str, group: int = 1) -> onnx.NodeProto:
    inputs, outputs = [x, f"{name}.weight"], [f"{name}_out"]
    return helper.make_node("Conv", inputs, outputs, name=name, group=group)


def _report(
    model: Path, eligible: Sequence[str], chosen: Sequence[str] = ()
) -> tuple[EligibilityReport, dict[str, Verdict]]:
    log = model.with_suffix(".log")
    log.write_text(
        "\n".join(
            [
                _BANNER,
                "[11/20/2026-10:00:00] [I] Sparsity: Enabled",
                f"[11/20/2026-10:00:01] [I] [TRT] (Sparsity) Found {len(eligible)} layer(s) "
                f"eligible to use sparse tactics: {', '.join(eligible)}",
                f"[11/20/2026-10:00:02] [I] [TRT] (Sparsity) Chose {len(chosen)} layer(s) using "
                f"sparse tactics: {', '.join(chosen)}",
                "[11/20/2026-10:00:03] [I] Engine built in 2.0 sec.",
                f"&&&& PASSED{_BANNER.removeprefix('&&&& RUNNING')}",
            ]
        )
        + "\n"
    )
    report = report_files(EvidenceFiles(onnx=model, log=log)).report
    return report, {v.layer: v for v in report.verdicts}


def _codes(verdict: Verdict) -> set[ReasonCode]:
    return {reason.code for reason in verdict.reasons}


def _foretold(report: EligibilityReport) -> None:
    assert report.totals is not None
    assert report.totals.disagreements == ()


def test_a_grouped_convolution_is_never_listed(tmp_path: Path) -> None:
    weights = {
        "plain.weight": _pruned(_random(256, 256, 3, 3), 1),
        "grouped.weight": _pruned(_random(256, 64, 3, 3), 1),
    }
    nodes = [_conv("plain", "x"), _conv("grouped", "plain_out", group=4)]
    model = _save(tmp_path / "m.onnx", nodes, weights, ("x", [1, 256, 14, 14], _FLOAT16))
    report, found = _report(model, ["plain"], ["plain"])
    assert found["plain"].verdict is VerdictName.CHOSEN
    assert found["grouped"].verdict is VerdictName.NOT_ELIGIBLE
    assert ReasonCode.GROUPED_CONV in _codes(found["grouped"])
    assert found["grouped"].evidence is Evidence.MEASURED
    _foretold(report)


def test_a_mask_along_the_flattened_axis_leaves_only_1x1_convolutions(tmp_path: Path) -> None:
    flattened = _pruned(_random(256, 256 * 9), 1).reshape(256, 256, 3, 3)
    assert check(flattened.reshape(256, -1), 1, Pattern(2, 4)).holds
    weights = {"wide.weight": flattened, "point.weight": _pruned(_random(256, 256, 1, 1), 1)}
    nodes = [_conv("wide", "x"), _conv("point", "wide_out")]
    model = _save(tmp_path / "m.onnx", nodes, weights, ("x", [1, 256, 14, 14], _FLOAT16))
    report, found = _report(model, ["point"], ["point"])
    assert found["wide"].verdict is VerdictName.NOT_ELIGIBLE
    assert ReasonCode.PATTERN_BROKEN in _codes(found["wide"])
    assert found["point"].verdict is VerdictName.CHOSEN
    _foretold(report)


@pytest.mark.parametrize("quantized", [True, False])
def test_int8_wants_its_output_quantised(tmp_path: Path, *, quantized: bool) -> None:
    weight = _pruned(np.random.default_rng(0).integers(-127, 127, (512, 512)).astype(np.int8), 0)
    weights = {
        "fc.weight": weight,
        "scale": np.array(0.1, np.float32),
        "zero": np.array(0, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["xq"], name="q"),
        helper.make_node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"], name="dq"),
        helper.make_node("DequantizeLinear", ["fc.weight", "scale", "zero"], ["wd"], name="wdq"),
        helper.make_node("MatMul", ["xd", "wd"], ["y"], name="fc"),
    ]
    if quantized:
        nodes += [
            helper.make_node("QuantizeLinear", ["y", "scale", "zero"], ["yq"], name="yq"),
            helper.make_node("DequantizeLinear", ["yq", "scale", "zero"], ["yd"], name="ydq"),
        ]
    model = _save(tmp_path / "m.onnx", nodes, weights, ("x", [64, 512], TensorProto.FLOAT))
    report, found = _report(model, ["fc"], ["fc"] if quantized else [])
    expected = VerdictName.CHOSEN if quantized else VerdictName.ELIGIBLE
    assert found["fc"].verdict is expected
    assert (ReasonCode.INT8_OUTPUT_NOT_QUANTIZED in _codes(found["fc"])) is not quantized
    _foretold(report)

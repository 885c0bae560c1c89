"""Where --quantize puts Q/DQ nodes, and that a sparse weight stays sparse behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper
from support.onnx_models import load, model, save, weights
from support.ort import outputs, write_quantized

from twofour.errors import BadInputError
from twofour.export.ir_models import load_float32
from twofour.export.quantize import RangeCollector, plan_quantization, without_lossy
from twofour.graph.opened import open_onnx
from twofour.pruning.verify import validate_onnx
from twofour.records.weights import HARDWARE_PATTERN

SAMPLES = np.random.default_rng(0).standard_normal((4096, 8)).astype(np.float32)


def sparse(inputs: int, outputs: int) -> Any:
    """Weights of which every second input is zero, so 2:4."""
    values = np.asarray(weights(inputs, outputs))
    values[::2] = 0
    return values


def residual_net(opset: int = 20) -> ModelProto:
    """x -> up, bias, Relu -> down, added to x -> head, and a product of two activations."""
    nodes = [
        helper.make_node("MatMul", ["x", "up.weight"], ["u"], name="up"),
        helper.make_node("Add", ["u", "bias"], ["b"], name="bias"),
        helper.make_node("Relu", ["b"], ["r"], name="relu"),
        helper.make_node("Transpose", ["down.weight"], ["d.t"], name="turn", perm=[1, 0]),
        helper.make_node("MatMul", ["r", "d.t"], ["d"], name="down"),
        helper.make_node("Add", ["d", "x"], ["s"], name="residual"),
        helper.make_node("Tanh", ["s"], ["m"], name="tanh"),
        helper.make_node("Gemm", ["m", "head.weight"], ["y"], name="head", transB=1),
    ]
    constants = {
        "up.weight": sparse(8, 16),
        "bias": np.full(16, 0.5, np.float32),
        "down.weight": np.ascontiguousarray(sparse(16, 8).T),
        "head.weight": np.ascontiguousarray(sparse(8, 4).T),
    }
    return model(nodes, constants, inputs={"x": ["batch", 8]}, opset=opset)


def test_products_and_both_inputs_of_a_residual_addition_are_rounded(tmp_path: Path) -> None:
    path, target = save(residual_net(), tmp_path / "m.onnx"), tmp_path / "q.onnx"
    # behind bias and activation, and never what no product reads or makes
    words = write_quantized(path, target, {"x": SAMPLES})
    assert "4 activations rounded" in words
    nodes = {node.name: list(node.input) for node in load(target).graph.node}
    assert nodes["residual"] == ["d_DequantizeLinear", "x_DequantizeLinear"]
    assert nodes["up"] == ["x_DequantizeLinear", "up.weight_DequantizeLinear"]
    assert (nodes["bias"][0], nodes["relu"], nodes["tanh"]) == ("u", ["b"], ["s"])
    found = open_onnx(target).weights().weights
    assert [w.math_dtype for w in found] == ["int8"] * 3
    assert [w.output_quantized for w in found] == [True, True, False]  # the model's own output
    judged = validate_onnx(open_onnx(target), HARDWARE_PATTERN)
    assert [check.violations for check in judged.checks] == [0, 0, 0]
    assert load(target).graph.output[0].name == "y"
    before, after = (outputs(file, {"x": SAMPLES})["y"] for file in (path, target))
    assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.98


def test_scales_are_those_of_each_output_channel_and_zero_points_are_zero(tmp_path: Path) -> None:
    path, target = save(residual_net(), tmp_path / "m.onnx"), tmp_path / "q.onnx"
    write_quantized(path, target, {"x": SAMPLES})
    arrays = open_onnx(target)
    graph = load_float32(arrays).graph.initializers
    scale = {name: value.const_value.numpy() for name, value in graph.items() if value.const_value}
    largest = np.abs(scale["up.weight"]).max(axis=0) / 127
    np.testing.assert_allclose(scale["up.weight_scale"], largest, rtol=1e-6)
    assert scale["head.weight_scale"].shape == (4,)
    assert all(not values.any() for name, values in scale.items() if name.endswith("_zero_point"))
    assert scale["x_scale"].shape == ()


@pytest.mark.parametrize(
    ("opset", "twice", "said"),
    [(12, False, "needs opset 13, and m.onnx has 12"), (20, True, "is quantized already")],
)
def test_files_that_cannot_be_quantized_are_refused(
    opset: int, twice: bool, said: str, tmp_path: Path
) -> None:
    path = save(residual_net(opset), tmp_path / "m.onnx")
    if twice:
        write_quantized(path, tmp_path / "q.onnx", {"x": SAMPLES})
        path = tmp_path / "q.onnx"
    with pytest.raises(BadInputError, match=said):
        write_quantized(path, tmp_path / "again.onnx", {"x": SAMPLES})


@pytest.mark.parametrize("outliers", [0, 20])
def test_an_output_that_a_few_tokens_dominate_stays_float_with_its_addition(
    outliers: int, tmp_path: Path
) -> None:
    graph = load_float32(open_onnx(save(residual_net(), tmp_path / "m.onnx")))
    plan = plan_quantization(graph, "m.onnx")
    values = {name: np.tile(SAMPLES, 2) for name in plan.tensors}
    values["x"], values["d"] = SAMPLES, SAMPLES.copy()
    values["d"][:outliers, 0] *= 1000
    collector = RangeCollector(plan)
    for first in range(0, 4096, 1024):
        collector.add({name: rows[first : first + 1024] for name, rows in values.items()})
    ranges = collector.ranges()
    assert ranges["x"].limit > 0.6 * np.abs(SAMPLES[:1024]).max()
    assert ranges["x"].lost < 0.002
    kept = without_lossy(plan, ranges)
    left = outliers > 0
    assert (ranges["d"].lost > 0.01) == left
    assert [value.name for value in kept.made] == ["r"] if left else ["r", "d"]
    # the other input of the addition is read in float too, and in INT8 by the product
    read = [node.name for node, at in kept.reads if node.inputs[at].name == "x"]
    assert read == ["up"] if left else ["up", "residual"]

"""What no row of an ONNX file names: every constant above 1,024 elements is somewhere."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import helper
from support import onnx_models as om

from twofour.graph.weights import find_weights
from twofour.records.weights import NotCovered


def beside(model: onnx.ModelProto) -> dict[str, tuple[int, int, bool]]:
    """By op: nodes, weights and whether they multiply."""
    return {g.op: (g.uses, g.weights, g.multiplies) for g in find_weights(model).not_covered}


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, name=f"{op}-{outputs[0]}", **attributes)


def lstm(hidden: int = 32, width: int = 16) -> onnx.ModelProto:
    constants = {
        "w": om.weights(2, 4 * hidden, width),
        "r": om.weights(2, 4 * hidden, hidden),
        "b": om.weights(2, 8 * hidden * 4),
    }
    nodes = [node("LSTM", ["x", "w", "r", "b"], ["y"], hidden_size=hidden)]
    return om.model(nodes, constants, inputs={"x": [3, 1, width]})


def test_the_arrays_of_a_recurrent_node_are_its_own() -> None:
    (only,) = find_weights(lstm()).not_covered
    assert only == NotCovered(
        op="LSTM", uses=1, weights=14336, multiplies=True, users=("LSTM-y",), arrays=("w", "r", "b")
    )


@pytest.mark.parametrize(
    ("op", "inputs", "label"),
    [
        ("Gather", ["big", "i"], "Gather"),
        ("Add", ["x", "big"], "Add"),
        ("Mul", ["big", "x"], "Mul"),
        ("LayerNormalization", ["x", "big"], "LayerNormalization"),
        ("Concat", ["x", "big"], "Concat"),
    ],
)
def test_what_multiplies_nothing_is_listed_apart(op: str, inputs: list[str], label: str) -> None:
    constants = {"big": om.weights(64, 32), "small": om.weights(32, 32)}
    attributes = {"axis": 0} if op == "Concat" else {}
    model = om.model([node(op, inputs, ["y"], **attributes)], constants, inputs={"x": [64, 32]})
    assert beside(model) == {label: (1, 2048, False)}


def test_a_bias_is_no_factor_of_the_product_that_adds_it() -> None:
    constants = {"w": om.weights(32, 2048), "b": om.weights(2048)}
    model = om.model([node("Gemm", ["x", "w", "b"], ["y"])], constants, inputs={"x": [64, 32]})
    assert beside(model) == {"Gemm": (1, 2048, False)}


def test_an_operator_that_nobody_knows_may_multiply() -> None:
    nodes = [
        helper.make_node("MultiHeadAttention", ["x", "a"], ["y"], domain="com.microsoft"),
        helper.make_node("SkipLayerNormalization", ["y", "b"], ["z"], domain="com.microsoft"),
    ]
    constants = {"a": om.weights(64, 32), "b": om.weights(2000)}
    model = om.model(nodes, constants, inputs={"x": [1]}, outputs=["z"])
    assert beside(model) == {
        "com.microsoft::MultiHeadAttention": (1, 2048, True),
        "com.microsoft::SkipLayerNormalization": (1, 2000, False),
    }


def test_a_constant_that_nothing_uses_is_said_to_be_unused() -> None:
    model = om.matmul(om.weights(8, 8))
    model.graph.initializer.append(om.tensor("left", om.weights(64, 32)))
    assert beside(model) == {"no node": (1, 2048, False)}


def test_arrays_of_1024_elements_are_passed_over_and_of_1025_are_not() -> None:
    nodes = [node("Add", ["x", "a"], ["c"]), node("Mul", ["x", "b"], ["d"])]
    constants = {"a": om.weights(1024), "b": om.weights(1025)}
    model = om.model(nodes, constants, inputs={"x": [1]}, outputs=["c", "d"])
    assert beside(model) == {"Mul": (1, 1025, False)}


def test_constants_in_functions_of_the_model_and_given_to_them_are_there() -> None:
    model = om.model(
        [helper.make_node("linear", ["x", "w"], ["y"], domain="my.domain")],
        {"w": om.weights(64, 64)},
        inputs={"x": [1, 64]},
    )
    table = helper.make_node("Constant", [], ["t"], value=om.tensor("t", om.weights(64, 32)))
    body = [table, node("MatMul", ["a", "b"], ["m"]), node("MatMul", ["m", "t"], ["c"])]
    opset = [helper.make_opsetid("", 21)]
    model.functions.append(
        helper.make_function("my.domain", "linear", ["a", "b"], ["c"], body, opset)
    )
    assert beside(model) == {"MatMul": (1, 2048, True), "my.domain::linear": (1, 4096, False)}

"""What no row of an ONNX file names: every constant above 1,024 elements is somewhere."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support import onnx_models as om

from twofour.graph.weights import find_weights
from twofour.records.weights import NotCovered


def stored(model: onnx.ModelProto) -> int:
    """Elements of all constants above 1,024, told by onnx alone."""
    bodies = [model.graph, *model.functions]
    total: int = 0
    for body in bodies:
        tensors = list(body.initializer) if isinstance(body, onnx.GraphProto) else []
        for node in body.node:
            for attribute in node.attribute:
                tensors += [attribute.t] if attribute.HasField("t") else []
                bodies += [attribute.g] if attribute.HasField("g") else []
        total += sum(n for n in (int(prod(t.dims)) for t in tensors) if n > 1024)
    return total


def accounted(model: onnx.ModelProto) -> int:
    """Elements in rows, each array once, and in what is not covered."""
    found = find_weights(model)
    sizes = {id(t): int(prod(t.dims)) for t in found.tensors if t is not None}
    rows = sum(size for size in sizes.values() if size > 1024)
    return rows + sum(group.weights for group in found.not_covered)


def beside(model: onnx.ModelProto) -> dict[str, tuple[int, int, bool]]:
    """By op: nodes, weights and whether they multiply; all constants are accounted for."""
    assert accounted(model) == stored(model)
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


def test_weights_of_a_recurrent_node_are_factors_and_its_bias_is_none() -> None:
    assert beside(lstm()) == {
        "LSTM": (1, 2 * 128 * 16 + 2 * 128 * 32, True),
        "LSTM bias": (1, 2048, False),
    }


def test_the_names_of_arrays_and_nodes_are_kept() -> None:
    (first, _) = find_weights(lstm()).not_covered
    assert first == NotCovered(
        op="LSTM", uses=1, weights=12288, multiplies=True, users=("LSTM-y",), arrays=("w", "r")
    )


def test_weights_are_followed_through_slices_concat_and_unsqueeze_to_the_node() -> None:
    """As torch exports LSTM: gates are put into ONNX's order on the way."""
    cut = {"zero": np.array([0]), "half": np.array([32]), "end": np.array([64])}
    nodes = [
        node("Slice", ["w", "zero", "half", "zero"], ["a"]),
        node("Slice", ["w", "half", "end", "zero"], ["b"]),
        node("Concat", ["b", "a"], ["c"], axis=0),
        node("Unsqueeze", ["c", "zero"], ["d"]),
        node("RNN", ["x", "d", "r"], ["y"], hidden_size=64),
    ]
    constants = {"w": om.weights(64, 48), "r": om.weights(1, 64, 64), **cut}
    model = om.model(nodes, constants, inputs={"x": [3, 1, 48]})
    assert beside(model) == {"RNN": (1, 64 * 48 + 64 * 64, True)}


@pytest.mark.parametrize(
    ("op", "inputs", "label"),
    [
        ("Gather", ["big", "i"], "Gather"),
        ("Add", ["x", "big"], "Add"),
        ("Mul", ["big", "x"], "Mul"),
        ("LayerNormalization", ["x", "big"], "LayerNormalization"),
        ("Gemm", ["x", "small", "big"], "Gemm bias"),
        ("Concat", ["x", "big"], "Concat"),
        ("MatMul", ["big", "small"], "no node"),
    ],
)
def test_what_multiplies_nothing_is_listed_apart(op: str, inputs: list[str], label: str) -> None:
    constants = {"big": om.weights(64, 32), "small": om.weights(32, 32)}
    attributes = {"axis": 0} if op == "Concat" else {}
    model = om.model([node(op, inputs, ["y"], **attributes)], constants, inputs={"x": [64, 32]})
    if label == "no node":  # all constant: the product itself is one, and nothing uses it
        label = "output of the model"
    assert beside(model) == {label: (1, 2048, False)}


def test_the_other_input_of_a_product_with_a_weight_is_no_weight() -> None:
    nodes = [node("Expand", ["query", "shape"], ["q"]), node("MatMul", ["q", "w"], ["y"])]
    constants = {"query": om.weights(64, 32), "w": om.weights(32, 64)}
    model = om.model(nodes, constants, inputs={"shape": [2]})
    assert beside(model) == {"MatMul input": (1, 2048, False)}


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


def test_a_table_with_two_uses_counts_once_as_a_factor_if_one_use_is() -> None:
    nodes = [
        node("Gather", ["w", "i"], ["g"]),
        node("Softmax", ["w"], ["s"]),
        node("GRU", ["x", "w", "r"], ["y"], hidden_size=8),
    ]
    constants = {"w": om.weights(1, 24, 64), "r": om.weights(1, 24, 8)}
    model = om.model(nodes, constants, inputs={"x": [3, 1, 64], "i": [2]}, outputs=["y", "g"])
    assert beside(model) == {"GRU": (1, 1536, True)}


def test_a_constant_that_nothing_uses_is_said_to_be_unused() -> None:
    model = om.matmul(om.weights(8, 8))
    model.graph.initializer.append(om.tensor("left", om.weights(64, 32)))
    assert beside(model) == {"no node": (1, 2048, False)}


def test_arrays_of_1024_elements_are_passed_over_and_of_1025_are_not() -> None:
    nodes = [node("Add", ["x", "a"], ["c"]), node("Mul", ["x", "b"], ["d"])]
    constants = {"a": om.weights(1024), "b": om.weights(1025)}
    model = om.model(nodes, constants, inputs={"x": [1]}, outputs=["c", "d"])
    assert beside(model) == {"Mul": (1, 1025, False)}


def test_constants_of_branches_and_those_that_branches_use_are_there() -> None:
    then = om.graph(
        [node("RNN", ["x", "w", "r"], ["t"], hidden_size=64)],
        {"w": om.weights(1, 64, 32)},
        outputs=["t"],
    )
    other = om.graph(
        [node("Identity", ["table"], ["e"])], {"table": om.weights(64, 64)}, outputs=["e"]
    )
    branch = helper.make_node("If", ["c"], ["y"], name="if", then_branch=then, else_branch=other)
    nodes = [branch, node("LSTM", ["x", "y", "r"], ["z"], hidden_size=16)]
    model = om.model(nodes, {"r": om.weights(1, 64, 64)}, inputs={"x": [3, 1, 32]}, outputs=["z"])
    assert beside(model) == {"LSTM": (1, 8192, True), "RNN": (1, 2048, True)}


def test_a_weight_that_goes_round_a_loop_is_found_in_its_body() -> None:
    body = om.graph(
        [
            node("MatMul", ["x", "state"], ["p"]),
            node("Identity", ["state"], ["next"]),
            node("Identity", ["cond"], ["go"]),
        ],
        {},
        inputs={"i": [], "cond": [], "state": [64, 64]},
        outputs=["go", "next", "p"],
    )
    loop = helper.make_node("Loop", ["n", "", "w"], ["last", "y"], name="loop", body=body)
    model = om.model([loop], {"w": om.weights(64, 64)}, inputs={"x": [1, 64], "n": []})
    assert beside(model) == {"MatMul": (1, 4096, True)}


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
    assert beside(model) == {"my.domain::linear": (1, 4096, True), "MatMul": (1, 2048, True)}


def test_a_function_that_only_adds_multiplies_nothing_and_one_may_call_itself() -> None:
    model = om.model(
        [
            helper.make_node("shift", ["x", "w"], ["s"], domain="my"),
            helper.make_node("round", ["s", "w"], ["y"], domain="my"),
        ],
        {"w": om.weights(64, 64)},
        inputs={"x": [64, 64]},
    )
    opset = [helper.make_opsetid("", 21), helper.make_opsetid("my", 1)]
    bodies = {
        "shift": [node("Add", ["a", "b"], ["c"])],
        "round": [helper.make_node("round", ["a", "b"], ["c"], domain="my")],
    }
    for name, body in bodies.items():
        model.functions.append(helper.make_function("my", name, ["a", "b"], ["c"], body, opset))
    assert beside(model) == {"my::shift": (1, 4096, False)}


def test_lists_sparse_tensors_and_attributes_of_other_nodes_count_too() -> None:
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("s", TensorProto.FLOAT, [1], [1.0]),
        helper.make_tensor("i", TensorProto.INT64, [1], [0]),
        [64, 64],
    )
    nodes = [
        helper.make_node("Constant", [], ["f"], value_floats=[0.5] * 1500),
        helper.make_node("Constant", [], ["t"], sparse_value=sparse),
        node("Add", ["f", "x"], ["a"]),
        node("MatMul", ["y", "t"], ["b"]),
        helper.make_node(
            "plugin", ["x"], ["c"], domain="trt", weights=om.tensor("", om.weights(1100))
        ),
    ]
    model = om.model(nodes, {}, inputs={"x": [1500], "y": [1, 64]}, outputs=["a", "b", "c"])
    found = {g.op: (g.weights, g.multiplies, g.arrays) for g in find_weights(model).not_covered}
    assert found == {
        "MatMul": (4096, True, ("t",)),
        "trt::plugin": (1100, True, ("weights",)),
        "Add": (1500, False, ("f",)),
    }


def test_weights_that_are_computed_from_constants_are_listed_under_the_product() -> None:
    """As weight norm leaves them where the exporter does not fold."""
    nodes = [
        node("ReduceL2", ["v"], ["norm"]),
        node("Div", ["v", "norm"], ["unit"]),
        node("Mul", ["unit", "g"], ["w"]),
        node("MatMul", ["x", "w"], ["y"]),
    ]
    constants = {"v": om.weights(64, 64), "g": om.weights(64)}
    model = om.model(nodes, constants, inputs={"x": [1, 64]})
    assert beside(model) == {"MatMul": (1, 4096, True)}


def test_scales_of_a_quantized_weight_are_no_factors() -> None:
    quantized = np.ones((4, 1025), dtype=np.int8)
    constants = {"w": quantized, "s": om.weights(1025), "z": np.zeros(1025, dtype=np.int8)}
    nodes = [node("DequantizeLinear", ["w", "s", "z"], ["v"]), node("MatMul", ["x", "v"], ["y"])]
    model = om.model(nodes, constants, inputs={"x": [1, 4]})
    assert beside(model) == {"DequantizeLinear": (1, 2050, False)}


def test_a_chain_too_long_to_follow_may_end_in_a_product() -> None:
    nodes = [node("Identity", [f"t{i}"], [f"t{i + 1}"]) for i in range(2000)]
    model = om.model(nodes, {"t0": om.weights(64, 64)}, outputs=["t2000"])
    model.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]))
    assert beside(model) == {"Identity": (1, 4096, True)}

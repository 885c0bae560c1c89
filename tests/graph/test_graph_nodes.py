from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.onnx_models import model, weights

from twofour.graph.opened import graph_nodes
from twofour.graph.weights import find_weights


def test_nodes_come_in_graph_order_under_the_names_of_their_weights() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Gather", ["r", "i"], ["g"], name="own", domain="custom"),
        helper.make_node("Conv", ["g", "w"], ["y"]),
    ]
    built = model(
        nodes, {"w": weights(8, 8, 3, 3), "i": np.zeros(1, np.int64)}, inputs={"x": [1, 8, 9, 9]}
    )
    found = graph_nodes(built)
    assert [n.name for n in found] == ["conv", "Relu:1", "own", "Conv:3"]
    assert [n.unnamed for n in found] == [False, True, False, True]
    assert [n.domain for n in found] == ["", "", "custom", ""]
    assert found[0].inputs == ("x", "w")
    assert found[0].constants == ("w",)
    assert {w.node for w in find_weights(built).weights} == {"conv", "Conv:3"}


def test_shapes_are_those_that_the_file_declares() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="a"),
        helper.make_node("Conv", ["c", "w"], ["y"], name="b"),
        helper.make_node("Relu", ["y"], ["z"], name="c"),
    ]
    built = model(nodes, {"w": weights(8, 8, 1, 1)}, inputs={"x": [1, 8, 9, 9]}, outputs=["z"])
    built.graph.value_info.append(
        helper.make_tensor_value_info("c", TensorProto.FLOAT, ["batch", 8, 9, 9])
    )
    assert [n.output_shape for n in graph_nodes(built)] == [(None, 8, 9, 9), None, None]


def test_nodes_of_subgraphs_follow_under_their_way() -> None:
    body = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["b"], name="inner")],
        "body",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)],
    )
    branch = helper.make_node("If", ["cond"], ["y"], name="if", then_branch=body, else_branch=body)
    built = model([branch], {"w": weights(8, 8)}, inputs={"x": [1, 8]})
    found = graph_nodes(built)
    assert [n.label for n in found] == ["if", "if.else_branch/inner", "if.then_branch/inner"]
    assert found[1].constants == ("w",)


@pytest.mark.parametrize("shape", [[2**62, 4], [1 << 20] * 6, [3] * 2000, [-1, 8]])
def test_a_shape_that_no_tensor_can_have_is_unknown(shape: list[int]) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    built = model(nodes, {"w": weights(8, 8)}, inputs={"x": shape})
    built.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, shape))
    assert graph_nodes(built)[0].output_shape is None


def test_the_way_into_subgraphs_adds_little_to_each_label() -> None:
    branch = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["r"], f"n{i}") for i in range(3)],
        "b",
        [],
        [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)],
    )
    node = helper.make_node(
        "If", ["c"], ["y"], "n" * 50_000, then_branch=branch, else_branch=branch
    )
    labels = [n.label for n in graph_nodes(model([node], {}))]
    assert [label[-17:] for label in labels[1:4]] == [f"nn.else_branch/n{i}" for i in range(3)]
    assert all(len(label) < 1_100 for label in labels[1:])

"""Model-local functions that no library could expand are refused before one tries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from support import onnx_models as om

from twofour.errors import BadInputError
from twofour.graph.opened import open_onnx

_OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]


def call(name: str, source: str = "a", target: str = "b") -> onnx.NodeProto:
    return helper.make_node(name, [source], [target], domain="f")


def function(name: str, *nodes: onnx.NodeProto) -> onnx.FunctionProto:
    return helper.make_function("f", name, ["a"], ["b"], list(nodes), _OPSETS)


def relu(name: str) -> onnx.FunctionProto:
    return function(name, helper.make_node("Relu", ["a"], ["b"]))


def doubling(times: int) -> list[onnx.FunctionProto]:
    twice = [
        function(f"D{i}", call(f"D{i + 1}", "a", "c"), call(f"D{i + 1}", "c", "b"))
        for i in range(times)
    ]
    return [*twice, relu(f"D{times}")]


def chain(length: int) -> list[onnx.FunctionProto]:
    return [*(function(f"C{i}", call(f"C{i + 1}")) for i in range(length)), relu(f"C{length}")]


def save(path: Path, functions: Sequence[onnx.FunctionProto], used: str) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "dot"), call(used, "h", "y")]
    model = om.model(nodes, {"w": om.weights(64, 64)}, inputs={"x": [2, 64]})
    model.functions.extend(functions)
    return om.save(model, path / "m.onnx")


def branch(node: onnx.NodeProto) -> onnx.FunctionProto:
    output = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "branch", [], [output])
    return function("A", helper.make_node("If", ["a"], ["b"], then_branch=graph, else_branch=graph))


@pytest.mark.parametrize(
    ("functions", "used", "message"),
    [
        ([function("A", call("B")), function("B", call("A"))], "A", "function [AB] calls itself"),
        ([branch(call("A"))], "A", "function A calls itself"),
        (doubling(30), "D0", "100,000 nodes"),
        (chain(20_000), "C0", "deeper than 100"),
    ],
)
def test_functions_that_cannot_be_expanded_are_refused(
    tmp_path: Path, functions: list[onnx.FunctionProto], used: str, message: str
) -> None:
    path = save(tmp_path, functions, used)
    with pytest.raises(BadInputError, match=f"^{path}: .*{message}"):
        open_onnx(path)


def test_functions_within_the_limits_are_opened(tmp_path: Path) -> None:
    assert open_onnx(save(tmp_path, doubling(14), "D0")).proto.functions

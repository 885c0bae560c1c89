"""Model-local functions that no library could expand are refused before one tries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import onnx_models as om

from twofour.engines.onnxruntime.session import OrtSession
from twofour.errors import BadInputError
from twofour.graph import opened
from twofour.graph.opened import inlined, open_onnx
from twofour.jobs import run_prune
from twofour.records.options import CalibrationOptions, MethodOptions, Precision, RunOptions

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


# --- weights in functions are pruned like all others ----------------------------------------------


OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]


def with_functions() -> onnx.ModelProto:
    """A block that holds one matrix and is given another, called twice; then a head."""
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(om.weights(64, 64))),
        helper.make_node("MatMul", ["x", "c"], ["a"], name="inner"),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"], name="outer"),
    ]
    block = helper.make_function("local", "Block", ["x", "w"], ["y"], nodes, OPSETS)
    body = [
        helper.make_node("Block", ["x", "w1"], ["h"], domain="local", name="one"),
        helper.make_node("Block", ["h", "w2"], ["g"], domain="local", name="two"),
        helper.make_node("MatMul", ["g", "w3"], ["y"], name="head"),
    ]
    constants = {"w1": om.weights(64, 64), "w2": om.weights(64, 64), "w3": om.weights(64, 16)}
    model = om.model(body, constants, inputs={"x": ["n", 64]}, opset=18)
    model.opset_import.append(OPSETS[1])
    model.functions.append(block)
    return model


@pytest.mark.parametrize("precision", [None, Precision.FLOAT16])
def test_they_are_pruned_with_data_or_without_and_the_model_gives_what_it_gave(
    tmp_path: Path, precision: Precision | None
) -> None:
    source = om.save(with_functions(), tmp_path / "model.onnx")
    x = np.random.default_rng(0).normal(size=(100, 64)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    data = str(tmp_path / "x.npy") if precision is None else None
    options = RunOptions(
        calibration=CalibrationOptions(data=data),
        method=MethodOptions(name="wanda" if data else None),
        precision=precision,
    )
    folder, result, validation = run_prune(str(source), tmp_path / "run", options)
    assert [row.pruned for row in result.weights] == [True] * 5
    assert {row.output_error is not None for row in result.weights} == {precision is None}
    assert (result.not_covered, validation.broken) == ((), ())
    assert len(validation.checks) == 5
    taken = np.asarray(OrtSession(folder / "dense.onnx").outputs({"x": x})["y"], np.float32)
    before = OrtSession(source).outputs({"x": x})["y"]
    rounding = 1e-6 if precision is None else 5e-3
    np.testing.assert_allclose(taken, before, rtol=0, atol=rounding * np.abs(before).max())


def test_values_that_were_left_on_disk_are_found_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "_LARGE_FILE_BYTES", 0)
    monkeypatch.setattr(opened, "_LARGE_TENSOR_BYTES", 1000)
    source = om.save(with_functions(), tmp_path / "model.onnx")
    folder, result, _ = run_prune(str(source), tmp_path / "run", RunOptions())
    assert len(result.weights) == 5
    x = np.ones((2, 64), np.float32)
    before, taken = (
        OrtSession(path).outputs({"x": x})["y"] for path in (source, folder / "dense.onnx")
    )
    np.testing.assert_allclose(taken, before, rtol=1e-5)


def test_functions_without_a_weight_stay(tmp_path: Path) -> None:
    model = with_functions()
    (block,) = model.functions
    del block.node[:]
    block.node.append(helper.make_node("Add", ["x", "w"], ["y"]))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(om.weights(64), "w1"))
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(om.weights(64), "w2"))
    assert inlined(open_onnx(om.save(model, tmp_path / "model.onnx"))) is None

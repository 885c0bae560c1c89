"""What no row of an ONNX file names: every constant above 1,024 elements is somewhere."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import helper
from support import onnx_models as om

from twofour.graph.layers import EinsumWeight, einsum_weight
from twofour.graph.weights import find_weights
from twofour.records.weights import NotCovered, ReasonCode


def beside(model: onnx.ModelProto) -> dict[str, tuple[int, int, bool]]:
    """By op: nodes, weights and whether they multiply."""
    return {g.op: (g.uses, g.weights, g.multiplies) for g in find_weights(model).not_covered}


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, name=f"{op}-{outputs[0]}", **attributes)


def test_the_arrays_of_a_recurrent_node_are_its_own() -> None:
    constants = {
        "w": om.weights(2, 128, 16),
        "r": om.weights(2, 128, 32),
        "b": om.weights(2, 1024),
    }
    nodes = [node("LSTM", ["x", "w", "r", "b"], ["y"], hidden_size=32)]
    (only,) = find_weights(om.model(nodes, constants, inputs={"x": [3, 1, 16]})).not_covered
    assert only == NotCovered(
        op="LSTM", uses=1, weights=14336, multiplies=True, users=("LSTM-y",), arrays=("w", "r", "b")
    )


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("Gather", ["big", "i"]),
        ("Add", ["x", "big"]),
        ("Mul", ["big", "x"]),
        ("LayerNormalization", ["x", "big"]),
        ("Concat", ["x", "big"]),
    ],
)
def test_what_multiplies_nothing_is_listed_apart(op: str, inputs: list[str]) -> None:
    constants = {"big": om.weights(64, 32), "small": om.weights(32, 32)}
    attributes = {"axis": 0} if op == "Concat" else {}
    model = om.model([node(op, inputs, ["y"], **attributes)], constants, inputs={"x": [64, 32]})
    assert beside(model) == {op: (1, 2048, False)}


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


# --- equations of Einsum --------------------------------------------------------------------------


def used(axis: int, out: tuple[int, ...], batch: tuple[int, ...] = ()) -> EinsumWeight:
    return EinsumWeight(axis=axis, out_axes=out, batch_axes=batch)


@pytest.mark.parametrize(
    ("equation", "position", "expected"),
    [
        ("bsd,dh->bsh", 1, used(0, (1,))),
        ("bsd,hd->bsh", 1, used(1, (0,))),
        ("...d,hd->...h", 1, used(1, (0,))),
        ("dh,...d->...h", 0, used(0, (1,))),
        ("b s d , d h -> b s h", 1, used(0, (1,))),
        ("bd,dh", 1, used(0, (1,))),
        ("ebd,edh->ebh", 1, used(1, (2,), (0,))),
        ("bsd,edh->ebsh", 1, used(1, (0, 2))),
        ("becd,edh->bech", 1, used(1, (2,), (0,))),
        ("bsd,dnh->bsnh", 1, used(0, (1, 2))),
        ("bd,d->b", 1, used(0, ())),
    ],
)
def test_a_product_has_one_axis_that_both_operands_sum_over(
    equation: str, position: int, expected: EinsumWeight
) -> None:
    assert einsum_weight(equation, position) == expected


@pytest.mark.parametrize(
    ("equation", "position"),
    [
        ("bsd,dh->bsdh", 1),  # an outer product
        ("bsnh,nhd->bsd", 1),  # two axes are summed over
        ("bsd,dh->bs", 1),  # h is summed over in the weight alone
        ("bsd,dh->bh", 1),  # s in the activation alone
        ("bdd,dh->bh", 1),  # a diagonal
        ("bsd,ddh->bsh", 1),
        ("bd,dh,hk->bk", 1),
        ("ii->i", 0),
        ("bs...,...d->bsd", 1),
        ("b.d,dh->bh", 1),
        ("", 1),
        ("->", 0),
        ("bsd;dh->bsh", 1),
    ],
)
def test_what_is_no_product_with_one_weight_is_none(equation: str, position: int) -> None:
    assert einsum_weight(equation, position) is None


def einsum(equation: str, weight: om.Array, *, first: bool = False) -> onnx.ModelProto:
    inputs = ["w", "x"] if first else ["x", "w"]
    node = helper.make_node("Einsum", inputs, ["y"], name="e", equation=equation)
    return om.model([node], {"w": weight}, inputs={"x": [2, 3, 32]})


def test_a_weight_may_come_first_and_through_a_transpose() -> None:
    turn = helper.make_node("Transpose", ["v"], ["w"], perm=[1, 0])
    model = einsum("hd,bsd->bsh", om.weights(1, 1), first=True)
    del model.graph.initializer[:]
    model.graph.initializer.append(om.tensor("v", om.weights(32, 64)))
    model.graph.node.insert(0, turn)
    (weight,) = find_weights(model).weights
    assert (weight.axis, weight.in_channels, weight.out_channels) == (0, 32, 64)
    assert weight.trace == ("Transpose",)


def test_an_equation_that_does_not_fit_the_weight_leaves_no_axis() -> None:
    (weight,) = find_weights(einsum("bsd,dh->bsh", om.weights(4, 32, 64))).weights
    assert (weight.axis, [r.code for r in weight.reasons]) == (None, [ReasonCode.UNSUPPORTED_OP])


@pytest.mark.parametrize("equation", ["bsnh,nhd->bsd", "bsd,dh->bsdh", ""])
def test_other_equations_are_no_row_and_their_constants_not_covered(equation: str) -> None:
    found = find_weights(einsum(equation, om.weights(4, 32, 64)))
    assert found.weights == ()
    assert [(g.op, g.weights, g.multiplies) for g in found.not_covered] == [("Einsum", 8192, True)]


@pytest.mark.parametrize("op", ["Gather", "GatherND"])
def test_a_matrix_picked_from_a_stack_at_run_time_is_a_row_that_cannot_be_pruned(op: str) -> None:
    nodes = [
        helper.make_node(op, ["w", "i"], ["picked"], name="pick"),
        helper.make_node("MatMul", ["x", "picked"], ["y"], name="mm"),
    ]
    model = om.model(nodes, {"w": om.weights(4, 32, 64)}, inputs={"x": [2, 1, 32], "i": [2]})
    found = find_weights(model)
    (weight,) = found.weights
    assert (weight.weight, weight.shape, weight.axis) == ("w", (4, 32, 64), None)
    assert (weight.in_channels, weight.out_channels, weight.trace) == (32, 64, (op,))
    (reason,) = weight.reasons
    assert reason.code is ReasonCode.PICKED_AT_RUN_TIME
    assert f"picked from 'w' at run time by {op} node 'pick'" in reason.message
    assert found.not_covered == ()


def test_rows_of_an_embedding_are_an_activation() -> None:
    nodes = [
        helper.make_node("Gather", ["table", "i"], ["e"]),
        helper.make_node("Gather", ["table", "j"], ["f"]),
        helper.make_node("MatMul", ["e", "f"], ["z"]),
        helper.make_node("Einsum", ["z", "f"], ["y"], equation="ab,bc->ac"),
    ]
    model = om.model(nodes, {"table": om.weights(64, 64)}, inputs={"i": [64], "j": [64]})
    found = find_weights(model)
    assert (found.weights, found.activation_products) == ((), 2)
    assert [(g.op, g.uses, g.multiplies) for g in found.not_covered] == [("Gather", 1, False)]

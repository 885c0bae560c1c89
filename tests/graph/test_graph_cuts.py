"""Weights that are pieces of one stored array: Split, Slice and Gather with constant indices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support import onnx_models as om

from twofour.errors import BadInputError
from twofour.graph.opened import open_onnx
from twofour.graph.weights import find_weights
from twofour.pattern import check
from twofour.pruning.onnx import prune_onnx
from twofour.pruning.verify import validate_onnx
from twofour.records.weights import Pattern, ReasonCode

TWO_FOUR = Pattern(2, 4)


def numbers(*values: int) -> om.Array:
    return np.array(values, np.int64)


def cut(op: str, *constants: om.Array, **attributes: Any) -> onnx.ModelProto:
    """`x @ op(w, *constants)`, where w is 32 x 64."""
    names = [f"c{number}" for number in range(len(constants))]
    node = helper.make_node(op, ["w", *names], ["v"], name="cut", **attributes)
    given = dict(zip(names, constants, strict=True))
    return om.before_matmul([node], {"w": om.weights(32, 64), **given}, 32)


def test_the_array_is_pruned_once_and_holds_in_every_piece(tmp_path: Path) -> None:
    """As nn.MultiheadAttention leaves it: [3E, E] is split, and each piece transposed."""
    parts = ["p0", "p1", "p2"]
    nodes = [helper.make_node("Split", ["w", "sizes"], parts, name="split", axis=0)]
    for part in parts:
        nodes += [
            helper.make_node("Transpose", [part], [f"{part}t"], perm=[1, 0]),
            helper.make_node("MatMul", ["x", f"{part}t"], [f"{part}y"], name=f"{part}-mm"),
        ]
    constants = {"w": om.weights(96, 32), "sizes": numbers(32, 32, 32)}
    outputs = [f"{part}y" for part in parts]
    model = om.model(nodes, constants, inputs={"x": [2, 32]}, outputs=outputs)
    source = om.save(model, tmp_path / "dense.onnx")
    result = prune_onnx(open_onnx(source), tmp_path / "sparse.onnx", TWO_FOUR)
    assert [(row.pruned, row.zeros) for row in result.weights] == [(True, 96 * 16)] * 3
    values = onnx.numpy_helper.to_array(om.load(tmp_path / "sparse.onnx").graph.initializer[0])
    for piece in np.split(values, 3):
        assert check(piece, 1, TWO_FOUR).holds
    checked = validate_onnx(open_onnx(tmp_path / "sparse.onnx"), TWO_FOUR)
    assert [(c.layer, c.axis, c.violations) for c in checked.checks] == [
        ("p0-mm", 1, 0),
        ("p1-mm", 1, 0),
        ("p2-mm", 1, 0),
    ]


@pytest.mark.parametrize(
    ("model", "axis", "channels"),
    [
        (cut("Slice", numbers(0), numbers(16), numbers(1)), 0, (32, 16)),
        (cut("Slice", numbers(16), numbers(2**62), numbers(1), numbers(3)), 0, (32, 16)),
        (cut("Slice", numbers(-1), numbers(-(2**62)), numbers(1), numbers(-1)), 0, (32, 64)),
        (cut("Split", numbers(64), axis=-1), 0, (32, 64)),
        (cut("Gather", numbers(5, 2, 9), axis=1), 0, (32, 3)),
        (cut("Gather", numbers(5, 2, 9), axis=-1), 0, (32, 3)),
    ],
)
def test_a_cut_along_another_axis_leaves_the_groups_whole(
    model: onnx.ModelProto, axis: int, channels: tuple[int, int]
) -> None:
    (weight,) = find_weights(model).weights
    assert (weight.axis, weight.reasons) == (axis, ())
    assert (weight.in_channels, weight.out_channels) == channels


@pytest.mark.parametrize(("end", "whole"), [(32, True), (16, False)])
def test_a_cut_along_the_axis_takes_it_apart(end: int, whole: bool) -> None:
    node = helper.make_node("Slice", ["w", "s", "e", "a"], ["v"], name="cut")
    constants = {"w": om.weights(32, 64), "s": numbers(0), "e": numbers(end), "a": numbers(0)}
    (weight,) = find_weights(om.before_matmul([node], constants, end)).weights
    assert weight.in_channels == end
    assert (weight.axis == 0) is whole
    assert [r.code for r in weight.reasons] == ([] if whole else [ReasonCode.UNSUPPORTED_OP])


@pytest.mark.parametrize(
    "model",
    [
        cut("Gather", numbers(*range(32)), axis=0),
        cut("Slice", numbers(0), numbers(32), numbers(0), numbers(2)),
        cut("Split", numbers(3, 3), axis=0),
        cut("Slice", numbers(0), numbers(16), numbers(7)),
    ],
    ids=["picked rows", "every second", "sizes do not add up", "no axis"],
)
def test_what_takes_the_axis_apart_or_makes_no_sense_has_a_reason(model: onnx.ModelProto) -> None:
    (weight,) = find_weights(model).weights
    assert (weight.axis, weight.weight) == (None, "w")
    assert [r.code for r in weight.reasons] == [ReasonCode.UNSUPPORTED_OP]


def test_a_shape_that_the_file_does_not_hold_whole_is_refused_as_damaged() -> None:
    model = om.before_matmul(
        [helper.make_node("Reshape", ["w", "s"], ["v"])],
        {"w": om.weights(4, 16, 32), "s": numbers(64, 32)},
        64,
    )
    next(each for each in model.graph.initializer if each.name == "s").raw_data = b"abc"
    with pytest.raises(BadInputError, match=r"'s' of shape .* needs 16 bytes, the file contains 3"):
        find_weights(model)


def test_split_without_sizes_makes_equal_pieces_and_a_smaller_last() -> None:
    parts = ["a", "b", "v"]
    nodes = [helper.make_node("Split", ["w"], parts, axis=1, num_outputs=3)]
    model = om.before_matmul(nodes, {"w": om.weights(32, 64)}, 32)
    (weight,) = find_weights(model).weights
    assert (weight.in_channels, weight.out_channels) == (32, 64 - 2 * 22)


def test_an_array_of_which_a_part_is_no_weight_is_left_as_it_is(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Split", ["w", "sizes"], ["v", "shift"], axis=1, name="split"),
        helper.make_node("MatMul", ["x", "v"], ["m"], name="mm"),
        helper.make_node("Add", ["m", "shift"], ["y"], name="add"),
    ]
    constants = {"w": om.weights(32, 64), "sizes": numbers(32, 32)}
    source = om.save(om.model(nodes, constants, inputs={"x": [32, 32]}), tmp_path / "a.onnx")
    (row,) = prune_onnx(open_onnx(source), tmp_path / "b.onnx", TWO_FOUR).weights
    assert (row.pruned, row.zeros, row.weight.tied_to) == (False, 0, ("add",))
    (reason,) = row.reasons
    assert reason.code is ReasonCode.UNSUPPORTED_OP
    assert "part of the array 'w', which add uses too" in reason.message


def test_a_matrix_of_a_stack_stays_dense_where_another_one_is_no_weight(tmp_path: Path) -> None:
    """The other is no embedding: which part it is does not change from run to run."""
    nodes = [
        helper.make_node("Gather", ["w", "zero"], ["v"], name="first"),
        helper.make_node("Gather", ["w", "one"], ["shift"], name="second"),
        helper.make_node("MatMul", ["x", "v"], ["m"], name="mm"),
        helper.make_node("Add", ["m", "shift"], ["y"], name="add"),
    ]
    one = {"zero": np.array(0, np.int64), "one": np.array(1, np.int64)}
    model = om.model(nodes, {"w": om.weights(2, 32, 32), **one}, inputs={"x": [32, 32]})
    source = om.save(model, tmp_path / "a.onnx")
    (row,) = prune_onnx(open_onnx(source), tmp_path / "b.onnx", TWO_FOUR).weights
    assert (row.pruned, row.weight.looked_up_by) == (False, ())
    assert [r.code for r in row.reasons] == [ReasonCode.UNSUPPORTED_OP]
    assert "part of the array 'w', which second uses too" in row.reasons[0].message


def test_constants_of_one_name_in_two_branches_are_two_weights() -> None:
    def branch(seed: int, width: int) -> onnx.GraphProto:
        node = helper.make_node("MatMul", ["x", "w"], ["o"], name="mm")
        return om.graph([node], {"w": om.weights(32, width, seed=seed)}, outputs=["o"])

    node = helper.make_node(
        "If", ["c"], ["y"], name="if", then_branch=branch(0, 64), else_branch=branch(1, 64)
    )
    model = om.model([node], {}, inputs={"x": [2, 32], "c": []})
    found = find_weights(model)
    assert {w.weight for w in found.weights} == {"if.then_branch/w", "if.else_branch/w"}

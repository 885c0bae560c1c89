"""Milder patterns written as 2:4: same outputs, and 2:4 holds in what is written."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from support import onnx_models as om

from twofour.export.lifting import gaining, lift_onnx, liftable, window_inputs, windows
from twofour.graph.opened import open_onnx
from twofour.pattern import check
from twofour.pruning.onnx import prune_onnx
from twofour.pruning.verify import validate_onnx
from twofour.records.weights import HARDWARE_PATTERN, Pattern, Selection

MILDER = [Pattern(4, 6), Pattern(6, 8)]


@pytest.mark.parametrize("pattern", MILDER, ids=str)
def test_windows_take_every_group_that_holds_the_pattern(pattern: Pattern) -> None:
    every = np.array(list(itertools.product([0, 1], repeat=pattern.m)))
    every = every[every.sum(1) <= pattern.n]
    groups = np.where(every, np.arange(1.0, pattern.m + 1), -0.0)  # -0.0 is no weight that stays
    made = windows(groups, 1, pattern.m)
    assert made.shape == (len(groups), (pattern.m // 2 - 1) * 4)
    assert check(made, 1, HARDWARE_PATTERN).holds
    inputs = 100 ** np.arange(pattern.m)[window_inputs(pattern.m, pattern.m)]
    assert np.array_equal(made @ inputs, groups @ 100 ** np.arange(pattern.m))


@given(st.sampled_from(MILDER), st.integers(1, 40), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_windows_multiply_the_inputs_that_their_weights_did(
    pattern: Pattern, length: int, axis: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    lines = random.integers(-9, 10, (2, 3, length))
    for group in range(0, length, pattern.m):
        width = min(pattern.m, length - group)
        gone = random.permutation(width)[: max(0, width - pattern.n)]
        lines[..., group + gone] = 0
    made = windows(np.moveaxis(lines, -1, axis), axis, pattern.m)
    assert check(made, axis, HARDWARE_PATTERN).holds
    inputs = random.integers(-9, 10, length)
    lifted = np.moveaxis(made, axis, -1) @ inputs[window_inputs(length, pattern.m)]
    assert np.array_equal(lifted, lines @ inputs)


def node(op: str, inputs: str, **attributes: Any) -> onnx.NodeProto:
    name = "layer" if op in ("Conv", "Gemm", "MatMul", "ConvTranspose") else op.lower()
    return helper.make_node(op, inputs.split(), [inputs[0] + op[0].lower()], name, **attributes)


def made(
    nodes: Sequence[onnx.NodeProto],
    x: Sequence[int],
    w: Sequence[int],
    kind: Any = np.float32,
    **constants: Any,
) -> onnx.ModelProto:
    """x and w through the nodes; the last one's output is that of the model."""
    random = np.random.default_rng(0)
    signs = random.choice([-1, 1], w)
    constants["w"] = (random.integers(1, 9, w) * signs).astype(kind)
    if any("Linear" in n.op_type for n in nodes):
        constants |= {"one": np.float32(1), "none": np.int8(0), "nones": np.zeros(20, np.int8)}
        constants |= {"each": np.exp2(np.arange(20) % 3).astype(np.float32)}
    nodes[-1].output[0] = "y"
    model = om.model(nodes, constants, inputs={"x": x})
    if kind is np.float16:
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return model


def quantized(axis: int, weights: str = "w each nones") -> list[onnx.NodeProto]:
    """x in 8 bits as "xqd", and the weight dequantized as "wd"."""
    return [
        helper.make_node("QuantizeLinear", ["x", "one", "none"], ["xq"], "q"),
        helper.make_node("DequantizeLinear", ["xq", "one", "none"], ["xqd"], "dq"),
        helper.make_node("DequantizeLinear", weights.split(), ["wd"], "dqw", axis=axis),
    ]


CASES: Mapping[str, onnx.ModelProto] = {
    "Conv": made([node("Conv", "x w", strides=[2, 1], pads=[1] * 4)], [2, 24, 7, 7], [5, 24, 3, 3]),
    "Conv of one dimension": made([node("Conv", "x w")], [2, 24, 9], [5, 24, 3]),
    "Conv with a tail": made([node("Conv", "x w")], [1, 64, 5, 5], [5, 64, 1, 1]),
    "float16": made([node("MatMul", "x w")], [3, 24], [24, 5], np.float16),
    "Gemm": made([node("Gemm", "x w")], [3, 24], [24, 5]),
    "Gemm, both transposed": made([node("Gemm", "x w", transA=1, transB=1)], [24, 3], [5, 24]),
    "MatMul of three dimensions": made([node("MatMul", "x w")], [2, 3, 25], [25, 5]),
    "MatMul by a vector": made([node("MatMul", "x w")], [3, 24], [24]),
    "MatMul of a stack": made([node("MatMul", "x w")], [4, 3, 24], [4, 24, 5]),
    "transposed": made(
        [node("Transpose", "w", perm=[1, 0]), node("MatMul", "x wt")], [3, 24], [5, 24]
    ),
    "int8 Conv": made(
        [*quantized(0), node("Conv", "xqd wd")], [2, 24, 5, 5], [20, 24, 3, 3], np.int8
    ),
    "int8 MatMul": made(
        [*quantized(0), node("Transpose", "wd", perm=[1, 0]), node("MatMul", "xqd wt")],
        *([3, 24], [20, 24], np.int8),
    ),
    "int8, one scale": made(
        [*quantized(1, "w one"), node("MatMul", "xqd wd")], [3, 24], [24, 5], np.int8
    ),
}  # fmt: skip


def pruned(model: onnx.ModelProto, pattern: Pattern, folder: Path) -> Path:
    """The model's file, pruned; what is not stored by groups stays as it is."""
    source = om.save_external(model, folder / "dense.onnx")
    prune_onnx(open_onnx(source), folder / "mild.onnx", pattern, Selection(all_layers=True))
    return folder / "mild.onnx"


def outputs(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    x = session.get_inputs()[0]
    kind = np.float16 if x.type == "tensor(float16)" else np.float32
    values = np.random.default_rng(1).integers(-4, 5, x.shape)
    return session.run(None, {"x": values.astype(kind)})


@pytest.mark.parametrize("pattern", MILDER, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_lifted_layer_gives_the_same_outputs_from_2_4_weights(
    case: str, pattern: Pattern, tmp_path: Path
) -> None:
    mild, lifted = pruned(CASES[case], pattern, tmp_path), tmp_path / "lifted.onnx"
    opened = open_onnx(mild)
    rows = liftable(opened)
    assert rows == {0: pattern}
    lift_onnx(opened, lifted, rows)
    assert len(om.load(lifted).graph.node) == len(CASES[case].graph.node) + 1  # the Gather
    assert all(map(np.array_equal, outputs(mild), outputs(lifted)))
    (row,) = validate_onnx(open_onnx(lifted), HARDWARE_PATTERN, required=["w"]).checks
    assert (row.layer, row.weight, row.violations) == ("layer", "w", 0)
    before, axis = opened.weights().weights[0].shape, row.axis
    assert axis is not None
    assert row.shape[axis] == len(window_inputs(before[axis], pattern.m))


NOT_LIFTED: Mapping[str, onnx.ModelProto] = {
    "groups": made([node("Conv", "x w", group=2)], [1, 48, 5, 5], [4, 24, 3, 3]),
    "ConvTranspose": made([node("ConvTranspose", "x w")], [1, 24, 5, 5], [24, 5, 3, 3]),
    "weight first": made([node("MatMul", "w x")], [2, 24, 3], [5, 24]),
    "too few inputs to break it": made([node("Conv", "x w")], [1, 4, 5, 5], [5, 4, 3, 3]),
    "a view on the way": made(
        [helper.make_node("Reshape", ["w", "to"], ["v"], "view"), node("MatMul", "x v")],
        *([3, 24], [5, 24]),
        to=np.array([24, 5]),
    ),
    "one scale for each input": made(
        [*quantized(0, "w each"), node("MatMul", "xqd wd")], [3, 20], [20, 5], np.int8
    ),
    "of two layers": made(
        [node("MatMul", "x w"), helper.make_node("MatMul", ["xm", "w"], ["y"], "other")],
        *([3, 24], [24, 24]),
    ),
    "a table too": made(
        [node("MatMul", "x w"), helper.make_node("Gather", ["w", "to"], ["y"], "table")],
        *([3, 24], [24, 24]),
        to=np.array([0, 3]),
    ),
}


@pytest.mark.parametrize("case", NOT_LIFTED)
def test_what_cannot_be_lifted_or_needs_no_lifting_is_left(case: str, tmp_path: Path) -> None:
    opened = open_onnx(om.save(NOT_LIFTED[case], tmp_path / "m.onnx"))
    assert liftable(opened, Pattern(4, 6)) == {}


def test_a_weight_that_is_2_4_or_dense_stays_as_it_is(tmp_path: Path) -> None:
    path = pruned(CASES["Gemm"], HARDWARE_PATTERN, tmp_path)
    assert liftable(open_onnx(path)) == {}
    assert liftable(open_onnx(tmp_path / "dense.onnx")) == {}


def attention(rows: int = 3, width: int = 24) -> onnx.ModelProto:
    """Three products of x, and one of their sum."""
    nodes = [
        *(helper.make_node("MatMul", ["x", w], [y], y) for w, y in zip("wuv", "qkt", strict=True)),
        helper.make_node("Sum", ["q", "k", "t"], ["s"], "sum"),
        node("MatMul", "s o"),
    ]
    others = dict.fromkeys("uvo", np.ones([width] * 2, np.float32))
    return made(nodes, [rows, width], [width, width], **others)


def test_layers_that_read_one_tensor_share_a_gather_and_keep_their_names(tmp_path: Path) -> None:
    mild, lifted = pruned(attention(), MILDER[0], tmp_path), tmp_path / "lifted.onnx"
    lift_onnx(open_onnx(mild), lifted, liftable(open_onnx(mild)))
    graph = om.load(lifted).graph
    assert [n.input[0] for n in graph.node if n.op_type == "Gather"] == ["x", "s"]
    assert [n.name for n in graph.node if n.op_type == "MatMul"] == ["q", "k", "t", "layer"]
    assert {t.name: list(t.dims) for t in graph.initializer} == {
        **{name: [32, 24] for name in "uvwo"},
        "windows_24_6": [32],
    }
    assert all(map(np.array_equal, outputs(mild), outputs(lifted)))


@pytest.mark.parametrize(
    ("gpu", "width", "positions", "gain"),
    [
        ("A100", 768, 64, []),
        ("RTX4090", 768, 8192, [0, 1, 2]),  # they share a Gather; the fourth product has its own
        ("RTX4090", 1536, 65536, [0, 1, 2, 3]),
        ("GB10", 1536, 65536, []),
    ],
)
def test_only_layers_are_lifted_that_gain_more_than_their_gather_takes(
    gpu: str, width: int, positions: int, gain: list[int], tmp_path: Path
) -> None:
    opened = open_onnx(om.save(attention(width=width), tmp_path / "m.onnx"))
    rows = liftable(opened, MILDER[0])
    assert list(gaining(opened, rows, gpu, {"x": (positions, width)})) == gain

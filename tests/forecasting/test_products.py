"""The work of a graph at given sizes: values by hand for small ONNX nets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support import onnx_models as om
from support.onnx_models import Array, weights

from twofour.errors import BadInputError
from twofour.forecasting.products import Work, find_work, shapes_at
from twofour.graph.opened import graph_nodes, open_onnx

Shape = Sequence[int | str]


def work(path: Path, model: onnx.ModelProto, batch: int | None, **shapes: Sequence[int]) -> Work:
    """The work at this batch; inputs that are not named have the sizes of the file."""
    opened = open_onnx(om.save(model, path / "m.onnx"))
    sizes = {t.name: tuple(shapes.get(t.name, t.shape)) for t in opened.inputs}
    at = shapes_at(opened.inputs, sizes, batch)  # type: ignore[arg-type]
    return find_work(opened, opened.weights().weights, at)


def net(op: str, x: Shape, weight: Array, **attributes: Any) -> onnx.ModelProto:
    """One node: y = op(x, w)."""
    node = helper.make_node(op, ["x", "w"], ["y"], name="layer", **attributes)
    return om.model([node], {"w": weight}, inputs={"x": x})


EXPERTS = {"equation": "bek,ekn->ben"}


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (net("Gemm", ("batch", 48), weights(32, 48), transB=1), (8, 32, 48, 1)),
        (net("Gemm", ("batch", 48), weights(48, 32)), (8, 32, 48, 1)),
        (net("MatMul", ("batch", 16, 48), weights(48, 32)), (8 * 16, 32, 48, 1)),
        (net("MatMul", ("batch", 5, 16, 48), weights(5, 48, 32)), (8 * 16, 32, 48, 5)),
        (net("Einsum", ("batch", 5, 48), weights(5, 48, 32), **EXPERTS), (8, 32, 48, 5)),
        (
            net("Conv", ("batch", 16, 28, 30), weights(32, 16, 3, 3), pads=[1] * 4, strides=[2, 2]),
            (8 * 14 * 15, 32, 16 * 9, 1),
        ),
        (
            net("ConvTranspose", ("batch", 16, 7, 9), weights(16, 32, 2, 2), strides=[2, 2]),
            (8 * 7 * 9, 32 * 4, 16, 1),
        ),
        (net("MatMul", (3, 48), weights(48, 32)), (3, 32, 48, 1)),
    ],
    ids=lambda case: case.graph.node[0].op_type if isinstance(case, onnx.ModelProto) else "",
)
def test_a_layer_is_a_product_of_rows_outputs_and_reduction(
    tmp_path: Path, model: onnx.ModelProto, size: tuple[int, ...]
) -> None:
    is_free = model.graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_param")
    found = work(tmp_path, model, 8 if is_free else None)
    (product,) = found.products
    assert (product.rows, product.outputs, product.reduction, product.count) == size
    assert product.overlap == {32 * 9 * 16: 2}.get(product.reduction * product.outputs, 1)
    assert (product.layer.layer, found.rest, found.unsure) == ("layer", (), {})


def test_a_batch_that_the_file_fixes_cannot_be_another(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="--batch 8:"):
        work(tmp_path, net("MatMul", (3, 48), weights(48, 32)), 8)
    assert work(tmp_path, net("MatMul", (3, 48), weights(48, 32)), 3).products[0].rows == 3


def test_a_batch_without_a_name_is_the_first_size(tmp_path: Path) -> None:
    model = net("MatMul", ("batch", 48), weights(48, 32))
    model.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    for _ in range(2):  # sizes that the file leaves open, which are inferred
        model.graph.output[0].type.tensor_type.shape.dim.add()
    assert work(tmp_path, model, 8).products[0].rows == 8


def test_other_work_counts_the_least_that_it_moves_and_multiplies(tmp_path: Path) -> None:
    """Values read and written, multiply-adds; elementwise work, views and softmax are free."""
    nodes = [
        helper.make_node("Conv", ["x", "depth"], ["a"], group=16, pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Reshape", ["c", "to"], ["d"]),
        helper.make_node("Transpose", ["d"], ["e"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["e", "d"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["parts"]),
        helper.make_node("MatMul", ["parts", "e"], ["f"]),
        helper.make_node("LayerNormalization", ["f", "scale"], ["g"]),
        helper.make_node("Gather", ["table", "ids"], ["h"]),
        helper.make_node("Add", ["g", "h"], ["y"]),
    ]
    constants = {
        "depth": weights(16, 1, 3, 3),
        "to": np.array([0, 16, -1]),
        "scale": weights(16),
        "table": weights(100, 16),
        "ids": np.array([[3]]),
    }
    model = om.model(nodes, constants, inputs={"x": ("batch", 16, 8, 8)})
    model.graph.initializer.remove(model.graph.initializer[-1])
    model.graph.input.append(helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, [1, 1]))
    found = work(tmp_path, model, 2)
    image, pooled, score = 2 * 16 * 64, 2 * 16 * 16, 2 * 16 * 16
    assert list(found.rest) == [
        (2 * image + 16 * 9, image * 9),
        (image + pooled, 0),
        (pooled + pooled, score * 16),  # the scores stay on the chip
        (pooled + pooled, pooled * 16),
        (2 * pooled + 16, 0),
        (16, 0),
    ]
    assert (found.products, found.unsure) == ((), {})


def attention(
    positions: int, keys: int, mask: Sequence[onnx.NodeProto] = (), **inputs: Shape
) -> onnx.ModelProto:
    """Two heads of width 16: q @ k -> Softmax -> @ v; what `mask` makes is added to the scores."""
    scored = "masked" if mask else "scores"
    nodes = [
        helper.make_node("Transpose", ["k"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "turned"], ["scores"]),
        *mask,
        helper.make_node("Softmax", [scored], ["parts"]),
        helper.make_node("MatMul", ["parts", "v"], ["y"]),
    ]
    if mask:
        nodes.insert(-2, helper.make_node("Add", ["scores", mask[-1].output[0]], ["masked"]))
    width = {"q": (1, 2, positions, 16), "k": (1, 2, keys, 16), "v": (1, 2, keys, 16)}
    return om.model(nodes, {}, inputs=width | inputs)


def test_heads_that_share_keys_read_them_once(tmp_path: Path) -> None:
    """As in grouped queries: a head of keys is expanded to two of queries."""
    model = attention(1, 512, k=(1, 1, 512, 16))
    wide = helper.make_node("Expand", ["k", "heads"], ["both"])
    model.graph.node.insert(0, wide)
    model.graph.node[1].input[0] = "both"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2, 1, 1]), "heads"))
    scores, values = work(tmp_path, model, None).rest
    assert scores == (2 * 16 + 512 * 16, 512 * 2 * 16)
    assert values[0] == 2 * 512 * 16 + 2 * 16


def node(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attributes)


@pytest.mark.parametrize(
    ("positions", "mask", "part"),
    [
        (32, [node("Trilu", "square", "hidden", upper=0)], 2),
        (32, [node("LessOrEqual", "row column", "seen"),
              node("Cast", "seen", "hidden", to=onnx.TensorProto.FLOAT)], 2),
        # a padding mask, a window to both sides, and a window that one query sees
        (32, [node("Less", "row one", "seen"),
              node("Cast", "seen", "hidden", to=onnx.TensorProto.FLOAT)], 1),
        (32, [node("Sub", "row column", "apart"), node("Abs", "apart", "far"),
              node("Less", "far one", "seen"),
              node("Cast", "seen", "hidden", to=onnx.TensorProto.FLOAT)], 1),
        (1, [node("LessOrEqual", "row one", "seen"),
             node("Cast", "seen", "hidden", to=onnx.TensorProto.FLOAT)], 1),
    ],
)  # fmt: skip
def test_scores_are_halved_only_under_a_causal_mask(
    tmp_path: Path, positions: int, mask: Sequence[onnx.NodeProto], part: int
) -> None:
    places = {"square": (32, 32), "row": (1, 32), "column": (32, 1), "one": (1, 1)}
    read = {name for each in mask for name in each.input}
    inputs = {name: shape for name, shape in places.items() if name in read}
    found = work(tmp_path, attention(positions, 32, mask, **inputs), None)
    assert [number for _, number in found.rest] == [positions * 32 * 2 * 16 // part] * 2


def test_products_without_a_softmax_move_all_that_they_read_and_write(tmp_path: Path) -> None:
    made = om.model([helper.make_node("MatMul", ["a", "b"], ["y"])], {},
                    inputs={"a": (64, 4), "b": (4, 64)})  # fmt: skip
    assert work(tmp_path, made, None).rest == ((2 * 64 * 4 + 64 * 64, 64 * 64 * 4),)


def test_ops_whose_time_is_not_known_are_counted(tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["z"])],
        "body",
        [],
        [helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)],
    )
    nodes = [
        helper.make_node("Secret", ["x"], ["a"], domain="mine"),
        helper.make_node("NonZero", ["x"], ["b"]),
        helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body),
    ]
    model = om.model(nodes, {"c": np.array([True])}, inputs={"x": ("batch", 10)})
    model.opset_import.append(helper.make_opsetid("mine", 1))
    model.graph.initializer.remove(model.graph.initializer[0])
    model.graph.input.append(helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [1]))
    found = work(tmp_path, model, 4)
    assert found.unsure == {"NonZero": 1, "mine::Secret": 1}
    assert found.rest == ((40, 0), (40, 0))


def body(*widths: int) -> onnx.GraphProto:
    """A chain of MatMuls from `x`, which has 48 values."""
    nodes, constants, before, width = [], {}, "x", 48
    for name, out in zip("abc", widths, strict=False):
        constants[f"{name}.w"] = weights(width, out)
        nodes.append(helper.make_node("MatMul", [before, f"{name}.w"], [f"{name}.y"], name=name))
        before, width = f"{name}.y", out
    return om.graph(nodes, constants, outputs=[before])


def loop_body(width: int, goes_on: str) -> onnx.GraphProto:
    """One MatMul, and an op that makes the next condition of the last one."""
    made = body(width)
    flags = (("i", onnx.TensorProto.INT64), ("go", onnx.TensorProto.BOOL))
    made.input.extend(helper.make_tensor_value_info(name, kind, []) for name, kind in flags)
    made.node.append(helper.make_node(goes_on, ["go"], ["goes_on"]))
    out = made.output.pop()
    made.output.extend([helper.make_tensor_value_info("goes_on", onnx.TensorProto.BOOL, []), out])
    return made


def counted(path: Path, node: onnx.NodeProto, trips: int | None = None) -> tuple[Any, ...]:
    """Products with their count at a batch of 2, layers not counted, multiply-adds by label."""
    constants = {"c": np.array(True)} | ({} if trips is None else {"n": np.array(trips)})
    model = om.model([node], constants, inputs={"x": (2, 48)})
    if trips is None:
        model.graph.input.append(helper.make_tensor_value_info("n", onnx.TensorProto.INT64, []))
    found = work(path, model, None)
    products = [(p.layer.layer, p.count) for p in found.products]
    nodes = graph_nodes(onnx.shape_inference.infer_shapes(model))
    return products, found.uncounted, {n.label: n.multiply_adds for n in nodes if n.op == "MatMul"}


def test_of_an_if_the_heavier_branch_is_counted(tmp_path: Path) -> None:
    node = helper.make_node("If", ["c"], ["y"], "if", then_branch=body(16), else_branch=body(8, 96))
    products, uncounted, numbers = counted(tmp_path, node)
    assert products == [("if.else_branch/a", 1), ("if.else_branch/b", 1)]
    assert uncounted == ()
    assert numbers == {
        "if.then_branch/a": 0,
        "if.else_branch/a": 2 * 48 * 8,
        "if.else_branch/b": 2 * 8 * 96,
    }


@pytest.mark.parametrize(
    ("trips", "goes_on", "count"),
    [(5, "Identity", 5), (0, "Identity", 0), (None, "Identity", None), (5, "Not", None)],
)
def test_the_body_of_a_loop_counts_as_often_as_it_is_known_to_run(
    tmp_path: Path, trips: int | None, goes_on: str, count: int | None
) -> None:
    node = helper.make_node("Loop", ["n", "c"], ["y"], "loop", body=loop_body(16, goes_on))
    products, uncounted, numbers = counted(tmp_path, node, trips)
    assert products == ([("loop.body/a", count)] if count else [])
    assert uncounted == (("loop.body/a",) if count is None else ())
    assert numbers == {"loop.body/a": None if count is None else count * 2 * 48 * 16}


def test_a_layer_whose_sizes_onnx_cannot_infer_is_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Secret", ["x"], ["a"], domain="mine"),
        helper.make_node("MatMul", ["a", "w"], ["y"], name="layer"),
    ]
    model = om.model(nodes, {"w": weights(48, 32)}, inputs={"x": ("batch", 10)})
    model.opset_import.append(helper.make_opsetid("mine", 1))
    assert work(tmp_path, model, 4).uncounted == ("layer",)

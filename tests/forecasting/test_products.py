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
from twofour.graph.opened import open_onnx

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
    with pytest.raises(
        BadInputError, match=r"--batch 8: the file leaves no batch free \(x \(3 x 48"
    ):
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
        (pooled + pooled, score * 16 // 2),  # one of three equal tensors stays on the chip
        (score + pooled, pooled * 16 // 2),
        (2 * pooled + 16, 0),
        (16, 0),
    ]
    assert (found.products, found.unsure) == ((), {})


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
    assert found.unsure == {"If": 1, "NonZero": 1, "mine::Secret": 1}
    assert found.rest == ((40, 0), (40, 0))


def test_a_layer_whose_sizes_onnx_cannot_infer_is_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Secret", ["x"], ["a"], domain="mine"),
        helper.make_node("MatMul", ["a", "w"], ["y"], name="layer"),
    ]
    model = om.model(nodes, {"w": weights(48, 32)}, inputs={"x": ("batch", 10)})
    model.opset_import.append(helper.make_opsetid("mine", 1))
    assert work(tmp_path, model, 4).uncounted == ("layer",)

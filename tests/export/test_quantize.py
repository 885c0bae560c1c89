from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support import onnx_models as om
from torch import nn

from twofour.errors import BadInputError, BuildFailedError
from twofour.export.casts import narrow
from twofour.export.int8 import calibration_rows, quantize_int8
from twofour.export.torch_export import export_onnx
from twofour.graph.files import read_tensor
from twofour.graph.opened import open_onnx
from twofour.graph.weights import find_weights
from twofour.pruning.verify import validate_onnx
from twofour.records.options import ExportOptions, Precision
from twofour.records.weights import Pattern

TWO_FOUR = Pattern(2, 4)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Three kinds of 6x6 images, each brighter in another channel."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(48) % 3
    noise = torch.rand(48, 4, 6, 6, generator=generator)
    bright = nn.functional.one_hot(labels, 4)[:, :, None, None]
    return noise + bright, labels


def keep_two_of_four(module: nn.Module) -> None:
    """By magnitude along axis 1, as pattern.py counts it; in place."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            weight = layer.weight.data.movedim(1, -1)
            groups = weight.reshape(*weight.shape[:-1], -1, 4)
            smallest = groups.abs().argsort(dim=-1)[..., :2]
            kept = groups.scatter(-1, smallest, 0.0)
            layer.weight.data = kept.reshape(weight.shape).movedim(-1, 1).contiguous()


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    model = net()
    inputs, labels = images()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        keep_two_of_four(model)
    return model.eval()


@pytest.fixture(scope="module")
def sparse(trained: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse") / "sparse.onnx"
    # opset 22 is the first with bfloat16 convolutions
    export_onnx(trained, (images()[0][:2],), {}, path, ExportOptions(opset=22))
    return path


def examples() -> dict[str, npt.NDArray[Any]]:
    return {"input": images()[0].numpy()}


def run(path: Path) -> npt.NDArray[Any]:
    """Without fusions: int8 kernels saturate on processors that lack VNNI."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, examples())[0])


def cosine(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_sparse_net_stays_sparse_and_gives_the_same_answers(
    sparse: Path, tmp_path: Path, symmetric: bool
) -> None:
    target = tmp_path / "int8.onnx"
    quantize_int8(sparse, target, examples(), symmetric=symmetric)
    kinds = {tensor.name: tensor.data_type for tensor in om.load(target).graph.initializer}
    assert kinds["input_zero_point"] == (TensorProto.INT8 if symmetric else TensorProto.UINT8)
    convolutions = [node for node in om.load(target).graph.node if node.op_type == "Conv"]
    assert [kinds[node.input[2]] for node in convolutions] == [TensorProto.FLOAT] * 2
    before, after = run(sparse), run(target)
    assert cosine(before, after) > 0.99
    assert (before.argmax(1) == images()[1].numpy()).mean() > 0.9
    assert (before.argmax(1) == after.argmax(1)).mean() > 0.95
    validation = validate_onnx(open_onnx(target), TWO_FOUR)
    assert [check.violations for check in validation.checks] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["int8.onnx"]


def test_weights_are_int8_around_zero_and_outputs_are_quantized_again(
    sparse: Path, tmp_path: Path
) -> None:
    target = tmp_path / "int8.onnx"
    quantize_int8(sparse, target, examples())
    model = om.load(target)
    weights = find_weights(model).weights
    assert [(w.dtype, w.math_dtype, w.output_quantized) for w in weights] == [
        ("int8", "int8", True)
    ] * 3
    zero_points = [t for t in model.graph.initializer if t.name.endswith("zero_point")]
    assert zero_points
    assert not any(read_tensor(tensor, None).any() for tensor in zero_points)
    scales = {t.name: t.dims for t in model.graph.initializer if t.name.endswith("weight_scale")}
    assert sorted(dims[0] for dims in scales.values()) == [3, 16, 16]  # one for each channel


@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.BFLOAT16])
def test_half_precision_is_widened_and_quantized_like_float32(
    sparse: Path, tmp_path: Path, precision: Precision
) -> None:
    half = tmp_path / "half.onnx"
    narrowed = ir.load(sparse)
    narrow(narrowed, precision, "sparse.onnx")
    ir.save(narrowed, half)
    target = tmp_path / "int8.onnx"
    quantize_int8(half, target, examples())
    model = om.load(target)
    assert {w.dtype for w in find_weights(model).weights} == {"int8"}
    types = {t.data_type for t in model.graph.initializer}
    assert TensorProto.FLOAT16 not in types
    assert TensorProto.BFLOAT16 not in types
    assert cosine(run(sparse), run(target)) > 0.99


def test_a_file_that_is_quantized_already_is_bad_input(sparse: Path, tmp_path: Path) -> None:
    once = tmp_path / "once.onnx"
    quantize_int8(sparse, once, examples())
    with pytest.raises(BadInputError, match="found int8"):
        quantize_int8(once, tmp_path / "twice.onnx", examples())


def test_a_model_without_weights_is_bad_input(tmp_path: Path) -> None:
    path = save(tmp_path / "relu.onnx", [helper.make_node("Relu", ["x"], ["y"])], ["batch", 4])
    with pytest.raises(BadInputError, match="found none"):
        quantize_int8(path, tmp_path / "int8.onnx", {"x": np.ones((1, 4), np.float32)})


def test_a_model_that_cannot_run_fails_and_leaves_nothing(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    shape = numpy_helper.from_array(np.array([7, 4]), "shape")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="fc"),
        helper.make_node("Reshape", ["h", "shape"], ["y"]),
    ]
    path = save(tmp_path / "bad.onnx", nodes, ["batch", 4], [weight, shape])
    with pytest.raises(BuildFailedError, match=r"cannot quantize .*bad\.onnx"):
        quantize_int8(path, tmp_path / "int8.onnx", {"x": np.ones((2, 4), np.float32)})
    assert [file.name for file in tmp_path.iterdir()] == ["bad.onnx"]


def test_examples_go_in_row_by_row_where_the_batch_is_dynamic(tmp_path: Path) -> None:
    model = onnx.load(save(tmp_path / "m.onnx", [], ["batch", 4]))
    x = np.arange(12, dtype=np.float64).reshape(3, 4)
    rows = calibration_rows(model, {"x": x})
    assert [row["x"].tolist() for row in rows] == [[values] for values in x.tolist()]
    assert {row["x"].dtype for row in rows} == {np.dtype(np.float32)}


def test_a_fixed_batch_takes_as_many_rows_as_it_has(tmp_path: Path) -> None:
    model = onnx.load(save(tmp_path / "m.onnx", [], [2, 4]))
    rows = calibration_rows(model, {"x": np.zeros((5, 4), np.float32)})
    assert [row["x"].shape for row in rows] == [(2, 4), (2, 4)]


def save(
    path: Path,
    nodes: list[onnx.NodeProto],
    shape: list[int | str],
    constants: list[onnx.TensorProto] | None = None,
) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph(
        nodes or [helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y], constants or []
    )
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path

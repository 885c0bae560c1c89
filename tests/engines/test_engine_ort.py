from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from twofour.engines.onnxruntime.engine import OnnxRuntimeEngine
from twofour.engines.onnxruntime.session import CPU, CannotRunError, OrtSession
from twofour.errors import BuildFailedError
from twofour.records.export import TensorShape

WEIGHT = (np.arange(256).reshape(16, 16) % 7 - 3).astype(np.float32)
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)


def save(path: Path, weight: npt.NDArray[np.generic]) -> Path:
    kind = helper.np_dtype_to_tensor_dtype(weight.dtype)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["hidden"], name="fc"),
        helper.make_node("Softmax", ["hidden"], ["y"], name="act"),
    ]
    return write(path, nodes, kind, kind, [numpy_helper.from_array(weight, "w")])


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    input_type: int,
    output_type: int,
    constants: list[onnx.TensorProto] | None = None,
) -> Path:
    x = helper.make_tensor_value_info("x", input_type, ["batch", 16])
    y = helper.make_tensor_value_info("y", output_type, ["batch", 16])
    graph = helper.make_graph(nodes, "g", [x], [y], constants or [])
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


def softmax(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "model.onnx", WEIGHT)


def test_one_session_gives_outputs_shapes_and_providers(model: Path) -> None:
    with OrtSession(model, threads=1) as session:
        assert session.providers == (CPU,)
        assert session.inputs == (TensorShape(name="x", dtype="float32", shape=("batch", 16)),)
        assert session.load_s > 0
        np.testing.assert_allclose(session.outputs({"x": X})["y"], softmax(X @ WEIGHT), rtol=1e-5)


def test_float32_examples_feed_a_float16_model(tmp_path: Path) -> None:
    path = save(tmp_path / "half.onnx", WEIGHT.astype(np.float16))
    y = OrtSession(path).outputs({"x": X})["y"]
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, softmax(X @ WEIGHT), atol=2e-3)


def test_a_model_without_kernels_here_cannot_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "bf16.onnx", WEIGHT.astype(ml_dtypes.bfloat16))
    with pytest.raises(CannotRunError, match="an implementation for MatMul"):
        OrtSession(path)
    assert capfd.readouterr() == ("", "")


def test_bfloat16_goes_in_and_comes_out_where_kernels_are(tmp_path: Path) -> None:
    cast = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)]
    down = write(tmp_path / "down.onnx", cast, TensorProto.FLOAT, TensorProto.BFLOAT16)
    narrow = OrtSession(down).outputs({"x": X})["y"]
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow, X.astype(ml_dtypes.bfloat16))
    cast = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)]
    up = write(tmp_path / "up.onnx", cast, TensorProto.BFLOAT16, TensorProto.FLOAT)
    wide = OrtSession(up).outputs({"x": narrow})["y"]
    np.testing.assert_array_equal(wide, narrow.astype(np.float32))


def test_a_model_that_is_invalid_fails_the_build(tmp_path: Path) -> None:
    nodes = [helper.make_node("Nope", ["x"], ["y"], name="bad")]
    path = write(tmp_path / "bad.onnx", nodes, TensorProto.FLOAT, TensorProto.FLOAT)
    with pytest.raises(BuildFailedError, match=r"cannot load .*bad\.onnx.*Nope") as failure:
        OrtSession(path)
    assert not isinstance(failure.value, CannotRunError)


def test_the_status_is_established_by_a_run_and_is_quiet(
    capfd: pytest.CaptureFixture[str],
) -> None:
    status = OnnxRuntimeEngine().status()
    assert status.can_run
    assert status.version
    assert status.device
    assert capfd.readouterr() == ("", "")

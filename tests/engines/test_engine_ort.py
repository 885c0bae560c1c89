from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper
from support import onnx_models as om

from twofour.engines.onnxruntime.session import CPU, CannotRunError, OrtSession
from twofour.errors import BuildFailedError
from twofour.records.export import TensorShape

WEIGHT = (np.arange(256).reshape(16, 16) % 7 - 3).astype(np.float32)
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)


def save(path: Path, kind: npt.DTypeLike) -> Path:
    end = ("batch", 16)
    return om.one_layer(path, "MatMul", WEIGHT.astype(kind), (end, end))


def write(path: Path, node: onnx.NodeProto, input_type: int, output_type: int) -> Path:
    x = helper.make_tensor_value_info("x", input_type, ["batch", 16])
    y = helper.make_tensor_value_info("y", output_type, ["batch", 16])
    graph = helper.make_graph([node], "g", [x], [y])
    opset = helper.make_opsetid("", 17)
    return om.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)


def test_one_session_gives_outputs_shapes_and_providers(tmp_path: Path) -> None:
    with OrtSession(save(tmp_path / "model.onnx", np.float32), threads=1) as session:
        assert session.providers == (CPU,)
        assert session.inputs == (TensorShape(name="x", dtype="float32", shape=("batch", 16)),)
        assert session.load_s > 0
        np.testing.assert_allclose(session.outputs({"x": X})["y"], X @ WEIGHT, rtol=1e-5)


def test_float32_examples_feed_a_float16_model(tmp_path: Path) -> None:
    y = OrtSession(save(tmp_path / "half.onnx", np.float16)).outputs({"x": X})["y"]
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, X @ WEIGHT, atol=2e-2)


def test_a_model_without_kernels_here_cannot_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "bf16.onnx", ml_dtypes.bfloat16)
    with pytest.raises(CannotRunError, match="an implementation for MatMul"):
        OrtSession(path)
    assert capfd.readouterr() == ("", "")


def test_bfloat16_goes_in_and_comes_out_where_kernels_are(tmp_path: Path) -> None:
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)
    down = write(tmp_path / "down.onnx", cast, TensorProto.FLOAT, TensorProto.BFLOAT16)
    narrow = OrtSession(down).outputs({"x": X})["y"]
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow, X.astype(ml_dtypes.bfloat16))
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    up = write(tmp_path / "up.onnx", cast, TensorProto.BFLOAT16, TensorProto.FLOAT)
    wide = OrtSession(up).outputs({"x": narrow})["y"]
    np.testing.assert_array_equal(wide, narrow.astype(np.float32))


def test_a_model_that_is_invalid_fails_the_build(tmp_path: Path) -> None:
    node = helper.make_node("Nope", ["x"], ["y"], name="bad")
    path = write(tmp_path / "bad.onnx", node, TensorProto.FLOAT, TensorProto.FLOAT)
    with pytest.raises(BuildFailedError, match=r"cannot load .*bad\.onnx.*Nope") as failure:
        OrtSession(path)
    assert not isinstance(failure.value, CannotRunError)

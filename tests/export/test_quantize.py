from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto
from support import onnx_models as om
from support.exporting import export_onnx
from support.ort import cosine, outputs, write_quantized
from torch import nn

import twofour
from twofour.comparing.variant_process import Worker
from twofour.export.casts import Kept, narrow
from twofour.graph.opened import open_onnx
from twofour.graph.weights import find_weights
from twofour.inputs.fits import save_arrays
from twofour.pruning.verify import validate_onnx
from twofour.records.options import ExportOptions, Precision
from twofour.records.weights import Pattern

TWO_FOUR = Pattern(2, 4)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two convolutions, one of groups, and a head, all 2:4."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    twofour.prune(module, all_layers=True)
    path = tmp_path_factory.mktemp("sparse") / "sparse.onnx"
    # opset 22 is the first with bfloat16 convolutions
    export_onnx(module, (torch.rand(2, 4, 6, 6),), {}, path, ExportOptions(opset=22))
    return path


IMAGES = {"input": np.random.default_rng(0).random((48, 4, 6, 6)).astype(np.float32)}


def run(path: Path) -> npt.NDArray[Any]:
    (found,) = outputs(path, IMAGES).values()
    return found


def quantize(path: Path, target: Path, activations: str = "int8") -> None:
    save_arrays(target.with_suffix(".npz"), IMAGES)
    host = Worker(lambda *_: None)
    host.quantize(path, target, target.with_suffix(".npz"), activations)


@pytest.mark.parametrize("activations", ["int8", "uint8"])
def test_a_sparse_net_stays_sparse_and_gives_the_same_answers(
    sparse: Path, tmp_path: Path, activations: str
) -> None:
    target = tmp_path / "int8.onnx"
    quantize(sparse, target, activations)
    kinds = {tensor.name: tensor.data_type for tensor in om.load(target).graph.initializer}
    assert kinds["input_zero_point"] == TensorProto.DataType.Value(activations.upper())
    convolutions = [node for node in om.load(target).graph.node if node.op_type == "Conv"]
    assert [kinds[node.input[2]] for node in convolutions] == [TensorProto.FLOAT] * 2
    # in front of the activation, which ONNX Runtime does not fuse into an INT8 convolution
    outputs = {node.output[0] for node in convolutions}
    users = [node.op_type for node in om.load(target).graph.node if outputs & {*node.input}]
    assert users == ["QuantizeLinear"] * 2
    weights = find_weights(om.load(target)).weights
    assert [(w.dtype, w.math_dtype) for w in weights] == [("int8", "int8")] * 3
    # the model's own output stays as it is
    assert [weight.output_quantized for weight in weights] == [True, True, False]
    before, after = run(sparse), run(target)
    centred = before - before.mean(0), after - after.mean(0)
    assert cosine(before, after) > 0.99
    assert cosine(*centred) > 0.9
    validation = validate_onnx(open_onnx(target), TWO_FOUR)
    assert [check.violations for check in validation.checks] == [0, 0, 0]


def normed() -> onnx.ModelProto:
    """A 2:4 filter behind whose norm of both signs is another; names that Q/DQ nodes would take."""
    make, sparse = onnx.helper.make_node, om.weights(8, 8, 3, 3)
    sparse[:, ::2] = 0
    nodes = [
        make("Conv", ["x", "w"], ["c"], name="first", pads=[1] * 4),
        make("BatchNormalization", ["c", "gain", "shift", "mean", "variance"], ["n"], name="norm"),
        make("Relu", ["n"], ["r"], name="relu"),
        make("ConvTranspose", ["r", "v", "w_bias"], ["t"], name="second"),
        make("BatchNormalization", ["t", "gain", "shift", "mean", "variance"], ["z"], name="last"),
        make("Add", ["z", "w_scale"], ["y"], name="add"),
    ]
    norms = {name: om.weights(8, seed=n) for n, name in enumerate(("gain", "shift", "mean"))}
    constants = {"w": sparse, "v": om.weights(8, 8, 1, 1), "w_bias": om.weights(8), **norms}
    constants |= {"variance": np.abs(om.weights(8)) + 1, "w_scale": om.weights(8, 1, 1)}
    return om.model(nodes, constants, inputs={"x": [4, 8, 6, 6]}, outputs=["y", "r"])


def test_norms_are_folded_and_the_outputs_of_the_model_are_not_rounded(tmp_path: Path) -> None:
    path, target = om.save(normed(), tmp_path / "m.onnx"), tmp_path / "int8.onnx"
    inputs = {"x": om.weights(4, 8, 6, 6)}
    assert "2 activations rounded" in write_quantized(path, target, inputs)
    graph = om.load(target).graph
    assert "BatchNormalization" not in {node.op_type for node in graph.node}
    makers = {name: node for node in graph.node for name in node.output}
    assert [makers[name].op_type for name in ("y", "r")] == ["Add", "Relu"]
    before = {tensor.name: tensor for tensor in normed().graph.initializer}
    after = {tensor.name: tensor for tensor in graph.initializer}
    assert after["w_scale"] == before["w_scale"]
    checks = {row.layer: row for row in validate_onnx(open_onnx(target), TWO_FOUR).checks}
    assert (checks["first"].weight, checks["first"].violations) == ("w", 0)
    assert checks.keys() == {"first", "second"}
    found = outputs(target, inputs)
    for name, wanted in outputs(path, inputs).items():
        assert cosine(wanted, found[name]) > 0.999
    weights = {weight.layer: weight for weight in find_weights(om.load(target)).weights}
    assert [weights[name].float_on_purpose for name in ("first", "second")] == [True, True]


def with_outliers(norm: str) -> onnx.ModelProto:
    """A feed-forward block behind a norm: channel 0 of the second product is 200 in few tokens.

    The norm ends in one node or in three; its shift is the second product's bias, too.
    """
    make, up, down = onnx.helper.make_node, om.weights(32, 64) / 5, om.weights(64, 32, seed=1) / 5
    up[::2, 1:], down[1::2], up[1:, 0] = 0, 0, 0
    up[0, 0], down[0, 0] = 5, 10
    start = [make("LayerNormalization", ["x", "gain", "shift"], ["n"], name="norm")]
    if norm == "in three nodes":
        start = [
            make("LayerNormalization", ["x", "ones"], ["normed"], name="norm"),
            make("Mul", ["gain", "normed"], ["scaled"], name="scale"),
            make("Add", ["shift", "scaled"], ["n"], name="shifted"),
        ]
    nodes = [
        *start,
        make("Gemm", ["n", "up", "u_bias"], ["u"], name="first", transB=1),
        make("Gelu", ["u"], ["g"], name="gelu"),
        make("MatMul", ["g", "down"], ["d"], name="second"),
        make("Add", ["shift", "d"], ["b"], name="bias"),
        make("Add", ["b", "n"], ["s"], name="residual"),
        make("LayerNormalization", ["s", "ones"], ["y"], name="last"),
    ]
    constants = {"up": up.T.copy(), "down": down, "u_bias": om.weights(64) / 5}
    constants |= {
        "gain": np.logspace(1, -1, 32, dtype=np.float32),
        "shift": om.weights(32),
        "ones": np.ones(32, np.float32),
    }
    return om.model(nodes, constants, inputs={"x": [64, 32]}, outputs=["y"])


def tokens() -> npt.NDArray[Any]:
    x = om.weights(64, 32, seed=2)
    x[4:, 0], x[:4, 0] = 0, 20
    return x


@pytest.mark.parametrize(("norm", "muls"), [("in one node", 0), ("in three nodes", 1)])
def test_channels_with_outliers_get_scales_of_their_own(
    norm: str, muls: int, tmp_path: Path
) -> None:
    path, target = om.save(with_outliers(norm), tmp_path / "m.onnx"), tmp_path / "int8.onnx"
    words = write_quantized(path, target, {"x": tokens()})
    assert words.startswith("2 products computed in int8, 100.0 % of their weights")
    assert words.endswith("3 activations rounded")
    assert [node.op_type for node in om.load(target).graph.node].count("Mul") == muls + 2
    made = {weight.layer: weight for weight in find_weights(om.load(target)).weights}
    assert [made[name].output_quantized for name in ("first", "second")] == [True, True]
    checks = validate_onnx(open_onnx(target), TWO_FOUR).checks
    assert [(row.weight, row.violations) for row in checks] == [("up", 0), ("down", 0)]
    before, after = (outputs(file, {"x": tokens()})["y"] for file in (path, target))
    norms = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    assert ((before * after).sum(axis=1) / norms).mean() > 0.99


@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.BFLOAT16])
def test_half_precision_is_widened_and_quantized_like_float32(
    sparse: Path, tmp_path: Path, precision: Precision
) -> None:
    half = tmp_path / "half.onnx"
    narrowed = ir.load(sparse)
    narrow(narrowed, precision, "sparse.onnx", Kept())
    ir.save(narrowed, half)
    target = tmp_path / "int8.onnx"
    quantize(half, target)
    model = om.load(target)
    assert {w.dtype for w in find_weights(model).weights} == {"int8"}
    types = {t.data_type for t in model.graph.initializer}
    assert TensorProto.FLOAT16 not in types
    assert TensorProto.BFLOAT16 not in types
    assert cosine(run(sparse), run(target)) > 0.99

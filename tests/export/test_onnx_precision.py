"""Float32 ONNX files in half precision: what changes, what stays, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from support.float32_models import (
    MODELS,
    build,
    convnet,
    info,
    masked,
    node,
    rotary,
    shared,
    small,
    time_steps,
    without_names,
)
from support.onnx_models import matmul, quantized_conv, save, weights
from support.onnx_models import model as onnx_model
from support.ort import outputs

from twofour.errors import BadInputError
from twofour.export.casts import Kept, PrecisionChange, convert_onnx
from twofour.graph.layers import FLOAT_ON_PURPOSE
from twofour.graph.opened import open_onnx
from twofour.records.options import Precision

ROUNDING = 5e-3
"""Of the largest value: ten roundings to float16."""


def convert(
    folder: Path,
    model: onnx.ModelProto,
    precision: Precision = Precision.FLOAT16,
    keep: tuple[str, ...] = (),
) -> tuple[onnx.ModelProto, PrecisionChange]:
    onnx.save(model, folder / "m.onnx")
    kept = Kept(globs=keep)
    done = convert_onnx(open_onnx(folder / "m.onnx"), folder / "half.onnx", precision, kept)
    return onnx.load(folder / "half.onnx"), done


def types(model: onnx.ModelProto) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def declared(values: list[onnx.ValueInfoProto]) -> list[tuple[str, int]]:
    return [(value.name, value.type.tensor_type.elem_type) for value in values]


@pytest.mark.parametrize("name", list(MODELS))
def test_the_converted_file_gives_the_same_outputs_under_the_same_names(
    name: str, tmp_path: Path
) -> None:
    model, feed = MODELS[name]()
    half, _ = convert(tmp_path, model)
    constants = {tensor.name for tensor in model.graph.initializer}
    assert declared([v for v in model.graph.input if v.name not in constants]) == declared(
        list(half.graph.input)
    )
    assert declared(list(model.graph.output)) == declared(list(half.graph.output))
    assert constants <= {tensor.name for tensor in half.graph.initializer}
    kept = {n.name for n in model.graph.node if n.name and n.domain != "my"}
    assert kept <= {n.name for n in half.graph.node}
    before, after = outputs(tmp_path / "m.onnx", feed), outputs(tmp_path / "half.onnx", feed)
    for output, expected in before.items():
        scale = max(1e-3, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(after[output], expected, atol=ROUNDING * scale, rtol=0)


def test_weights_are_half_precision_and_scales_of_a_resize_are_not(tmp_path: Path) -> None:
    half, _ = convert(tmp_path, convnet(17)[0])
    found = types(half)
    assert {found.pop("roi"), found.pop("scales")} == {TensorProto.FLOAT}
    assert set(found.values()) == {TensorProto.FLOAT16}
    casts = [n.name for n in half.graph.node if n.op_type == "Cast"]
    assert casts == ["cast_x_float16", "cast_y"]


def test_nodes_without_a_name_keep_the_one_that_reports_give_them(tmp_path: Path) -> None:
    half, _ = convert(tmp_path, without_names()[0])
    assert {"Relu:0", "MatMul:1", "LayerNormalization:2"} <= {n.name for n in half.graph.node}


def test_a_small_number_that_float16_rounds_to_zero_keeps_float32(tmp_path: Path) -> None:
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["a"], name="mm"),
        onnx.helper.make_node("Add", ["a", "epsilon"], ["b"], name="add"),
        onnx.helper.make_node("Log", ["b"], ["z"], name="log"),
    ]
    epsilon = np.full((), 1e-10, np.float32)
    nodes.append(onnx.helper.make_node("MatMul", ["z", "w"], ["y"], name="last"))
    constants = {"w": weights(32, 32), "epsilon": epsilon}
    half, done = convert(tmp_path, onnx_model(nodes, constants, inputs={"x": [2, 32]}))
    kept = {t.name: numpy_helper.to_array(t) for t in half.graph.initializer}
    assert kept["epsilon"] == epsilon
    assert next(n for n in half.graph.node if n.name == "log").input == ["b"]
    assert kept["w"].dtype == np.float16
    assert "do not fit" in done.notes[0]


def test_masks_of_the_lowest_float32_become_the_lowest_float16(tmp_path: Path) -> None:
    half, done = convert(tmp_path, masked()[0])
    found = {t.name: numpy_helper.to_array(t) for t in half.graph.initializer}
    assert found["lowest"] == np.float32(-65504)
    assert found["lowest_float16"] == np.float16(-65504)
    assert done.notes == ()


def test_positions_stay_float32_until_they_meet_the_data(tmp_path: Path) -> None:
    half, _ = convert(tmp_path, rotary()[0])
    found = types(half)
    assert found["frequencies"] == TensorProto.FLOAT
    assert (found["table"], found["w"]) == (TensorProto.FLOAT16, TensorProto.FLOAT16)
    cast = next(n for n in half.graph.node if n.name == "cast_cos_float16")
    assert list(cast.input) == ["cos"]


def test_a_time_step_stays_float32_until_its_sine_meets_the_weights(tmp_path: Path) -> None:
    model, feed = time_steps()
    half, _ = convert(tmp_path, model)
    assert types(half)["frequencies"] == TensorProto.FLOAT
    cast = next(n for n in half.graph.node if n.name == "cast_sin_float16")
    assert list(cast.input) == ["sin"]
    exact, rounded = (outputs(tmp_path / name, feed)["y"] for name in ("m.onnx", "half.onnx"))
    assert np.abs(exact - rounded).max() < 2e-3


def test_a_weight_that_both_types_need_has_a_copy(tmp_path: Path) -> None:
    half, _ = convert(tmp_path, shared()[0], keep=("second",))
    assert types(half) == {"w": TensorProto.FLOAT, "w_float16": TensorProto.FLOAT16}
    second = next(n for n in half.graph.node if n.name == "second")
    assert list(second.input) == ["h", "w"]


def test_layers_between_quantizers_keep_their_scales(tmp_path: Path) -> None:
    weight = weights(8, 8, 3, 3, dtype=np.int8)
    model = quantized_conv(weight, zero_point=None, quantize_output=True)
    first = node("QuantizeLinear", ["x", "scale", "zero"], ["xq"])
    model.graph.node.insert(0, first)
    model.graph.node.insert(1, node("DequantizeLinear", ["xq", "scale", "zero"], ["xf"]))
    model.graph.node[3].input[0] = "xf"
    half, done = convert(tmp_path, model)
    assert types(half)["scale"] == TensorProto.FLOAT
    assert "Cast" not in {n.op_type for n in half.graph.node}
    assert not done.changed


def test_a_float_layer_behind_quantizers_is_converted(tmp_path: Path) -> None:
    model = quantized_conv(
        weights(8, 8, 3, 3, dtype=np.int8), zero_point=None, quantize_output=True
    )
    half, _ = convert(tmp_path, model)  # its input is not quantized: the math is float
    conv = next(n for n in half.graph.node if n.name == "conv")
    assert list(conv.input) == ["x_float16", "wf_float16"]


def large(value: float) -> onnx.ModelProto:
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="mm"),
        node("Add", ["h", "offset"], ["z"], name="plus"),
        node("Tanh", ["z"], ["y"], name="tanh"),
    ]
    constants = {"w": small(16, 16), "offset": np.array([1, value], np.float32).repeat(8)}
    return build(nodes, {"x": weights(3, 16)}, [info("y", [3, 16])], constants)[0]


def test_a_node_with_a_value_that_float16_cannot_hold_keeps_float32_and_is_named(
    tmp_path: Path,
) -> None:
    half, done = convert(tmp_path, large(-70000))
    assert types(half) == {"w": TensorProto.FLOAT16, "offset": TensorProto.FLOAT}
    assert done.notes == ("1 node kept in float32, because values do not fit float16: plus",)
    plus = next(each for each in half.graph.node if each.name == "plus")
    assert [entry.key for entry in plus.metadata_props] == [FLOAT_ON_PURPOSE]
    del plus.metadata_props[:]
    asked, told = convert(tmp_path, large(-70000), keep=("plus",))
    assert (asked, told.notes) == (half, ())


def test_large_weights_that_do_not_fit_keep_float32_bit_for_bit(tmp_path: Path) -> None:
    constants = {"w0": weights(64, 64), "w1": weights(64, 64), "w2": weights(64, 64)}
    constants["w0"][3, 3], constants["w2"][0, 0] = 1e6, -7e4
    reads = ["x", "h0", "h1", "y"]
    nodes = [node("MatMul", [reads[n], f"w{n}"], [reads[n + 1]], name=f"fc{n}") for n in range(3)]
    model, _ = build(nodes, {"x": weights(2, 64)}, [info("y", [2, 64])], constants)
    half, done = convert(tmp_path, model)
    assert done.notes == (
        "2 nodes kept in float32, because values do not fit float16: fc0 and fc2",
    )
    found = {t.name: numpy_helper.to_array(t) for t in half.graph.initializer}
    for name, kind in (("w0", np.float32), ("w1", np.float16), ("w2", np.float32)):
        assert np.array_equal(found[name], constants[name].astype(kind))


def test_a_bound_above_float16_limits_nothing_and_is_no_overflow(tmp_path: Path) -> None:
    model, _ = build(
        [node("MatMul", ["x", "w"], ["h"]), node("Clip", ["h", "low", "high"], ["y"])],
        {"x": weights(2, 16)},
        [info("y", [2, 16])],
        {"w": small(16, 16), "low": np.float32(-1e9), "high": np.float32(1e9)},
    )
    half, _ = convert(tmp_path, model)
    found = {t.name: numpy_helper.to_array(t) for t in half.graph.initializer}
    assert (found["low"], found["high"]) == (np.float16(-65504), np.float16(65504))


def test_infinity_stays_infinity(tmp_path: Path) -> None:
    model, _ = build(
        [node("Where", ["m", "x", "low"], ["s"]), node("Softmax", ["s"], ["y"])],
        {"x": weights(2, 16), "m": np.ones((2, 16), bool)},
        [info("y", [2, 16])],
        {"low": np.float32(-np.inf)},
    )
    half, _ = convert(tmp_path, model)
    assert numpy_helper.to_array(half.graph.initializer[0]) == -np.inf


def test_a_glob_that_names_no_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="--keep-float32 'nope") as told:
        convert(tmp_path, convnet(17)[0], keep=("bn", "nope*"))
    assert "c1, bn, relu6" in (told.value.hint or "")


def test_a_convolution_that_has_no_bfloat16_in_its_opset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="Conv of opset 11"):
        convert(tmp_path, convnet(17)[0], Precision.BFLOAT16)
    half, _ = convert(tmp_path, convnet(22)[0], Precision.BFLOAT16)
    assert types(half)["c1.w"] == TensorProto.BFLOAT16


def test_another_operator_without_bfloat16_stays_float32_and_is_told(tmp_path: Path) -> None:
    model, _ = MODELS["recurrent"]()
    half, done = convert(tmp_path, model, Precision.BFLOAT16)
    assert (types(half)["w"], types(half)["p"]) == (TensorProto.FLOAT, TensorProto.BFLOAT16)
    assert done.notes == ("LSTM of opset 14 (1) has no bfloat16 and stays float32",)


def test_external_data_is_written_into_the_target_and_the_source_is_never_overwritten(
    tmp_path: Path,
) -> None:
    model, feed = convnet(17)
    (tmp_path / "in").mkdir()
    source, half = tmp_path / "in" / "m.onnx", tmp_path / "half.onnx"
    onnx.save(model, source, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    before = source.read_bytes()
    with pytest.raises(BadInputError, match="would overwrite"):
        convert_onnx(open_onnx(source), source, Precision.FLOAT16, Kept())
    assert source.read_bytes() == before
    convert_onnx(open_onnx(source), half, Precision.FLOAT16, Kept())
    source.unlink()
    assert outputs(half, feed)["y"].shape == (2, 10)
    assert {f.name for f in tmp_path.iterdir()} == {"in", "half.onnx"}


def test_a_graph_that_no_library_reads_is_refused_by_name(tmp_path: Path) -> None:
    model = matmul(weights(16, 16))
    model.graph.node.add().CopyFrom(model.graph.node[0])
    path = save(model, tmp_path / "m.onnx")
    with pytest.raises(BadInputError, match=r"m\.onnx cannot be converted: "):
        convert_onnx(open_onnx(path), tmp_path / "half.onnx", Precision.FLOAT16, Kept())

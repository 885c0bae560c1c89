"""Weights found in ONNX graphs: names, axes, types, ties, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support import onnx_models as om

from twofour.errors import BadInputError
from twofour.graph.opened import graph_nodes, open_onnx
from twofour.graph.weights import find_weights
from twofour.records.weights import ReasonCode, Weight

BF16 = om.BFLOAT16


def only(model: onnx.ModelProto) -> Weight:
    (weight,) = find_weights(model).weights
    return weight


def codes(weight: Weight) -> list[ReasonCode]:
    return [reason.code for reason in weight.reasons]


# --- axes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "axis", "channels", "kernel", "groups"),
    [
        (om.conv(om.weights(16, 32, 3, 3)), 1, (32, 16), (3, 3), 1),
        (om.conv(om.weights(16, 32, 5)), 1, (32, 16), (5,), 1),
        (om.conv(om.weights(16, 32, 2, 3, 4)), 1, (32, 16), (2, 3, 4), 1),
        (om.conv(om.weights(16, 8, 3, 3), groups=4), 1, (32, 16), (3, 3), 4),
        (om.conv(om.weights(16, 6, 3, 3)), 1, (6, 16), (3, 3), 1),
        (om.conv(om.weights(16, 1, 3, 3), groups=16), 1, (16, 16), (3, 3), 16),
        (om.conv(om.weights(32, 16, 2, 2), op="ConvTranspose"), 0, (32, 16), (2, 2), 1),
        (om.conv(om.weights(32, 4, 2, 2), op="ConvTranspose", groups=4), 0, (32, 16), (2, 2), 4),
        (om.gemm(om.weights(32, 16), trans_b=0), 0, (32, 16), (), 1),
        (om.gemm(om.weights(16, 32), trans_b=1), 1, (32, 16), (), 1),
        (om.matmul(om.weights(32, 16)), 0, (32, 16), (), 1),
        (om.matmul(om.weights(32, 16), rank=3), 0, (32, 16), (), 1),
        (om.matmul(om.weights(4, 32, 16), rank=3), 1, (32, 16), (), 1),
        (om.matmul(om.weights(2, 3, 32, 16), rank=4), 2, (32, 16), (), 1),
        (om.matmul(om.weights(32)), 0, (32, 1), (), 1),
    ],
    ids=lambda value: value.graph.node[0].op_type if isinstance(value, onnx.ModelProto) else None,
)
def test_the_reduction_axis_and_channels_follow_the_op(
    model: onnx.ModelProto,
    axis: int,
    channels: tuple[int, int],
    kernel: tuple[int, ...],
    groups: int,
) -> None:
    weight = only(model)
    assert (weight.axis, weight.kernel, weight.groups) == (axis, kernel, groups)
    assert (weight.in_channels, weight.out_channels) == channels
    assert (weight.weight, weight.shape) == ("w", tuple(model.graph.initializer[0].dims))
    assert weight.reasons == ()
    assert weight.trace == ()


@pytest.mark.parametrize(
    ("shape", "axis", "out", "form"),
    [
        ((16, 32), 1, 16, "a weight on the left of its product"),
        ((3, 16, 32), 2, 16, "a stack of matrices"),
        ((32,), 0, 1, "a weight on the left of its product"),
    ],
)
def test_a_constant_left_of_matmul_is_grouped_along_its_last_axis(
    shape: tuple[int, ...], axis: int, out: int, form: str
) -> None:
    node = helper.make_node("MatMul", ["w", "x"], ["y"], name="left")
    weight = only(om.model([node], {"w": om.weights(*shape)}, inputs={"x": [32, 5]}))
    assert (weight.axis, weight.in_channels, weight.out_channels) == (axis, 32, out)
    assert weight.form == form


@pytest.mark.parametrize(
    ("shape", "form"), [((32, 16), None), ((1, 32, 16), None), ((3, 32, 16), "a stack of matrices")]
)
def test_a_stack_of_constants_is_no_usual_weight(shape: tuple[int, ...], form: str | None) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    assert only(om.model([node], {"w": om.weights(*shape)}, inputs={"x": [5, 32]})).form == form


@pytest.mark.parametrize(("trans_a", "axis"), [(0, 1), (1, 0)])
def test_a_constant_as_first_operand_of_gemm_follows_trans_a(trans_a: int, axis: int) -> None:
    node = helper.make_node("Gemm", ["w", "x"], ["y"], transA=trans_a)
    shape = (16, 32) if axis else (32, 16)
    weight = only(om.model([node], {"w": om.weights(*shape)}, inputs={"x": [32, 5]}))
    assert (weight.axis, weight.in_channels, weight.out_channels) == (axis, 32, 16)


# --- the way to the constant ----------------------------------------------------------------------


def step(op: str, inputs: list[str], output: str = "v", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=f"{op.lower()}_{output}", **attributes)


def ints(*values: int) -> om.Array:
    return np.array(values, np.int64)


FLOAT = om.weights(16, 32)
SCALE: dict[str, om.Array] = {"s": np.array(0.1, np.float32), "z": np.array(0, np.int8)}


@pytest.mark.parametrize(
    ("steps", "constants", "axis", "trace"),
    [
        ([step("Transpose", ["w"])], {"w": FLOAT}, 1, ("Transpose",)),
        (
            [step("Squeeze", ["w", "axes"])],
            {"w": om.weights(1, 32, 16), "axes": ints(0)},
            1,
            ("Squeeze",),
        ),
        ([step("Squeeze", ["w"])], {"w": om.weights(1, 32, 1, 16)}, 1, ("Squeeze",)),
        ([step("Flatten", ["w"], axis=1)], {"w": om.weights(32, 4, 4)}, 0, ("Flatten",)),
        (
            [step("DequantizeLinear", ["w", "s", "z"], "d"), step("Transpose", ["d"])],
            {"w": om.weights(16, 32, dtype=np.int8), **SCALE},
            1,
            ("Transpose", "DequantizeLinear"),
        ),
        (
            [helper.make_node("TRT_FP8DequantizeLinear", ["w", "s"], ["v"], domain="trt")],
            {"w": om.weights(32, 16, dtype=ml_dtypes.float8_e4m3fn), **SCALE},
            0,
            ("trt::TRT_FP8DequantizeLinear",),
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_the_axis_is_mapped_back_through_the_ops_before_the_weight(
    steps: list[onnx.NodeProto], constants: dict[str, om.Array], axis: int, trace: tuple[str, ...]
) -> None:
    weight = only(om.before_matmul(steps, constants, 32))
    assert (weight.weight, weight.shape) == ("w", constants["w"].shape)
    assert (weight.axis, weight.trace, weight.reasons) == (axis, trace, ())
    assert weight.shape[axis] == weight.in_channels


def test_a_constant_node_is_a_weight_named_after_its_output() -> None:
    constant = helper.make_node("Constant", [], ["v"], value=om.tensor("", om.weights(32, 16)))
    found = find_weights(om.before_matmul([constant], {}, 32))
    assert [(w.weight, w.axis, w.trace) for w in found.weights] == [("v", 0, ())]
    assert found.tensors[0] is not None


def test_a_reshape_by_a_constant_node_is_worked_out() -> None:
    nodes = [
        helper.make_node("Constant", [], ["shape"], value_ints=[32, 16]),
        step("Reshape", ["w", "shape"]),
    ]
    assert only(om.before_matmul(nodes, {"w": om.weights(32, 2, 8)}, 32)).axis == 0


@pytest.mark.parametrize(
    ("stored", "seen", "axis"),
    [
        ((512,), (32, 16), None),
        ((64, 8), (2, 32, 8), None),
        ((3, 4, 8), (12, 8), None),
        ((12, 2, 4), (12, 8), 0),
    ],
)
def test_an_axis_that_a_reshape_merged_or_split_is_taken_apart(
    stored: tuple[int, ...], seen: tuple[int, ...], axis: int | None
) -> None:
    nodes = [step("Reshape", ["w", "shape"])]
    model = om.before_matmul(nodes, {"w": om.weights(*stored), "shape": ints(*seen)}, seen[-2])
    weight = only(model)
    assert weight.axis == axis
    if axis is None:
        assert codes(weight) == [ReasonCode.UNSUPPORTED_OP]
        assert "'reshape_v'" in weight.reasons[0].message


# --- types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        (np.float16, "float16"),
        (BF16, "bfloat16"),
        (ml_dtypes.float8_e5m2, "float8_e5m2"),
        (np.float64, "float64"),
    ],
)
def test_the_stored_type_is_named_and_the_math_is_that_of_the_cast(stored: Any, name: str) -> None:
    cast = step("Cast", ["w"], to=TensorProto.FLOAT16)
    weight = only(om.before_matmul([cast], {"w": om.weights(32, 16, dtype=stored)}, 32))
    assert (weight.dtype, weight.math_dtype) == (name, "float16")
    assert weight.output_quantized is None


@pytest.mark.parametrize("zero_point", [None, np.array(0, np.int8), np.zeros(16, np.int8)])
@pytest.mark.parametrize("quantize_output", [True, False])
def test_int8_weights_compute_in_int8_and_know_whether_the_output_is_quantized(
    zero_point: om.Array | None, quantize_output: bool
) -> None:
    model = om.quantized_conv(
        om.weights(16, 32, 3, 3, dtype=np.int8),
        zero_point=zero_point,
        quantize_output=quantize_output,
    )
    weight = only(model)
    assert (weight.dtype, weight.math_dtype, weight.axis) == ("int8", "int8", 1)
    assert weight.output_quantized is quantize_output
    assert weight.reasons == ()


def test_float_weights_behind_a_quantize_pair_compute_in_int8() -> None:
    steps = [
        step("QuantizeLinear", ["w", "s", "z"], "q"),
        step("DequantizeLinear", ["q", "s", "z"]),
    ]
    weight = only(om.before_matmul(steps, {"w": om.weights(32, 16), **SCALE}, 32))
    assert (weight.dtype, weight.math_dtype, weight.output_quantized) == ("float32", "int8", False)
    assert (weight.axis, weight.trace) == (0, ("DequantizeLinear", "QuantizeLinear"))


def test_an_output_with_a_second_use_in_float_is_not_quantized() -> None:
    model = om.quantized_conv(
        om.weights(16, 32, 3, 3, dtype=np.int8), zero_point=None, quantize_output=True
    )
    model.graph.node.append(helper.make_node("Sigmoid", ["c"], ["other"]))
    model.graph.output.add(name="other")
    assert only(model).output_quantized is False


@pytest.mark.parametrize(
    ("zero_point", "said"),
    [(np.int8(3), "3"), (np.uint8(128), "128"), (np.uint8(0), None), (np.int8(0), None)],
)
@pytest.mark.parametrize("only_at", ["input", "output", "both"])
def test_a_zero_point_of_activations_keeps_the_whole_file_out_of_tensorrt(
    zero_point: np.generic, said: str | None, only_at: str
) -> None:
    """TensorRT 10 and 11 parse int8 and uint8 with 0, and refuse the file for any other."""
    zeros = {"xz": np.zeros((), zero_point.dtype), "rz": np.zeros((), zero_point.dtype)}
    for name in {"input": ("xz",), "output": ("rz",), "both": ("xz", "rz")}[only_at]:
        zeros[name] = np.array(zero_point)
    scale = np.array(0.05, np.float32)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "xz"], ["xq"], name="qx"),
        helper.make_node("DequantizeLinear", ["xq", "s", "xz"], ["xd"], name="dx"),
        helper.make_node("DequantizeLinear", ["w", "s"], ["wd"], name="dw"),
        helper.make_node("Conv", ["xd", "wd"], ["c"], name="conv"),
        helper.make_node("Conv", ["c", "float"], ["c2"], name="plain"),
        helper.make_node("QuantizeLinear", ["c2", "s", "rz"], ["rq"], name="qr"),
        helper.make_node("DequantizeLinear", ["rq", "s", "rz"], ["y"], name="dr"),
    ]
    arrays = {
        "w": om.weights(16, 32, 1, 1, dtype=np.int8),
        "float": om.weights(16, 16, 1, 1),
        "s": scale,
        **zeros,
    }
    model = om.model(nodes, arrays, inputs={"x": [1, 32, 4, 4]})
    for weight in find_weights(model).weights:
        assert weight.axis == 1
        codes = [r.code for r in weight.reasons]
        assert codes == ([] if said is None else [ReasonCode.ZERO_POINT])
        if said is not None:
            assert f"has the zero point {said}, and it accepts only 0" in weight.reasons[0].message


@pytest.mark.parametrize(
    ("weight", "zero_point", "said"),
    [
        (om.weights(16, 32, 3, 3, dtype=np.int8), np.array(3, np.int8), "3"),
        (np.full((16, 32, 3, 3), 128, np.uint8), np.array(128, np.uint8), "128"),
        (om.weights(16, 32, 3, 3, dtype=np.int8), np.array([0] * 15 + [-5], np.int8), "-5"),
    ],
)
def test_a_zero_point_other_than_zero_leaves_no_axis(
    weight: om.Array, zero_point: om.Array, said: str
) -> None:
    found = only(om.quantized_conv(weight, zero_point=zero_point, quantize_output=True))
    assert (found.axis, codes(found)) == (None, [ReasonCode.ZERO_POINT])
    assert f"zero point {said};" in found.reasons[0].message


def test_packed_types_are_refused_with_their_name() -> None:
    model = om.quantized_conv(om.weights(16, 32, 3, 3), zero_point=None, quantize_output=False)
    packed = model.graph.initializer[0]
    packed.CopyFrom(helper.make_tensor("w", TensorProto.INT4, [16, 32, 3, 3], [1] * 4608))
    weight = only(model)
    assert (weight.dtype, weight.axis, codes(weight)) == ("int4", None, [ReasonCode.DTYPE])


# --- no constant ----------------------------------------------------------------------------------


def test_a_product_of_activations_is_counted_and_no_row() -> None:
    node = helper.make_node("MatMul", ["x", "z"], ["y"])
    found = find_weights(om.model([node], {}, inputs={"x": [2, 4], "z": [4, 2]}))
    assert (found.weights, found.activation_products) == ((), 1)


@pytest.mark.parametrize(
    ("node", "channels"),
    [
        (helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3]), (8, 4)),
        (helper.make_node("Gemm", ["x", "w"], ["y"], transB=1), (0, 0)),
    ],
)
def test_a_weight_known_at_run_time_is_a_row_without_a_weight(
    node: onnx.NodeProto, channels: tuple[int, int]
) -> None:
    weight = only(om.model([node], {}, inputs={"x": [1, 8, 6, 6], "w": [4, 8, 3, 3]}))
    assert (weight.weight, weight.axis, weight.shape) == (None, None, ())
    assert codes(weight) == [ReasonCode.NOT_CONSTANT]
    assert "graph input 'w'" in weight.reasons[0].message
    assert (weight.in_channels, weight.out_channels) == channels


def test_a_weight_scaled_at_run_time_names_the_node_that_does_it() -> None:
    nodes = [
        step("Mul", ["w", "x"], "scaled"),
        step("Transpose", ["scaled"]),
        helper.make_node("Conv", ["x", "v"], ["y"], name="conv"),
    ]
    weight = only(om.model(nodes, {"w": om.weights(8, 8, 1, 1)}, inputs={"x": [8, 8, 1, 1]}))
    assert codes(weight) == [ReasonCode.NOT_CONSTANT]
    assert "run time by Mul node 'mul_scaled'" in weight.reasons[0].message


def test_ops_of_other_domains_are_not_taken_for_onnx_ops() -> None:
    ours = helper.make_node("Conv", ["x", "w"], ["y"], domain="ai.onnx")
    theirs = helper.make_node("Conv", ["x", "w"], ["z"], domain="com.example")
    dequantize = helper.make_node("DequantizeLinear", ["w"], ["v"], name="dq", domain="com.example")
    product = helper.make_node("Gemm", ["x", "v"], ["u"], name="fc")
    model = om.model(
        [ours, theirs, dequantize, product], {"w": om.weights(8, 8)}, inputs={"x": [1]}
    )
    conv, gemm = find_weights(model).weights
    assert (conv.op, conv.node) == ("Conv", "Conv:0")
    assert "com.example::DequantizeLinear node 'dq'" in gemm.reasons[0].message


# --- names, ties, subgraphs, functions ------------------------------------------------------------


def test_users_of_one_array_are_named_to_each_other_also_behind_a_transpose() -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], name="embed"),
        helper.make_node("Transpose", ["table"], ["t"], name="turn"),
        helper.make_node("MatMul", ["e", "t"], ["h"], name="head"),
        helper.make_node("Gemm", ["e", "table"], ["g"], name="other", transB=1),
        helper.make_node("MatMul", ["e", "own"], ["y"], name="alone"),
    ]
    constants = {"table": om.weights(40, 32), "own": om.weights(32, 8), "ids": ints(0, 1)}
    found = find_weights(om.model(nodes, constants))
    tied = {weight.node: weight.tied_to for weight in found.weights}
    assert tied == {"head": ("other", "embed"), "other": ("head", "embed"), "alone": ()}
    assert found.tensors[0] is found.tensors[1]


def test_two_names_for_one_place_in_a_data_file_are_tied() -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "a"], ["h"], name="one"),
        helper.make_node("Gemm", ["h", "b"], ["y"], name="two"),
    ]
    model = om.model(nodes, {"a": om.weights(8, 8), "b": om.weights(8, 8)}, inputs={"x": [1, 8]})
    for tensor in model.graph.initializer:
        om.make_external(tensor, "data.bin")
    assert [w.tied_to for w in find_weights(model).weights] == [("two",), ("one",)]


def test_weights_in_subgraphs_are_found_with_the_way_to_them() -> None:
    inner = om.graph(
        [
            helper.make_node("MatMul", ["x", "outer"], ["m"], name="fc1"),
            helper.make_node("MatMul", ["m", "inner"], ["t"], name="fc2"),
        ],
        {"inner": om.weights(16, 8)},
        outputs=["t"],
    )
    other = om.graph([helper.make_node("Identity", ["x"], ["e"])], {}, outputs=["e"])
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=inner, else_branch=other)
    model = om.model(
        [node], {"outer": om.weights(8, 16), "c": np.array(True)}, inputs={"x": [2, 8]}
    )
    found = find_weights(model)
    rows = [(w.layer, w.node, w.weight, w.axis) for w in found.weights]
    assert rows == [
        ("if.then_branch/fc1", "fc1", "outer", 0),
        ("if.then_branch/fc2", "fc2", "inner", 0),
    ]
    assert [(node.label, node.constants) for node in graph_nodes(model)] == [
        ("if", ("c",)),
        ("if.else_branch/Identity:0", ()),
        ("if.then_branch/fc1", ("outer",)),
        ("if.then_branch/fc2", ("inner",)),
    ]


# --- hostile and large graphs ---------------------------------------------------------------------


def test_a_very_long_chain_is_given_up_on_not_followed_for_ever() -> None:
    nodes = [helper.make_node("Identity", [f"t{k}"], [f"t{k + 1}"]) for k in range(5000)]
    nodes += [helper.make_node("Gemm", ["x", "t5000"], [f"y{k}"]) for k in range(2000)]
    found = find_weights(om.model(nodes, {"t0": om.weights(4, 4)}, inputs={"x": [1, 4]}))
    assert {tuple(codes(w)) for w in found.weights} == {(ReasonCode.UNSUPPORTED_OP,)}


def test_many_users_of_one_array_list_a_bounded_number_of_others() -> None:
    nodes = [helper.make_node("Gemm", ["x", "w"], [f"y{k}"]) for k in range(3000)]
    found = find_weights(om.model(nodes, {"w": om.weights(4, 4)}, inputs={"x": [1, 4]}))
    assert {len(w.tied_to) for w in found.weights} == {64}


# --- files ----------------------------------------------------------------------------------------


def test_a_zero_point_in_external_data_is_read(tmp_path: Path) -> None:
    model = om.quantized_conv(
        om.weights(16, 32, 3, 3, dtype=np.int8),
        zero_point=np.array(7, np.int8),
        quantize_output=False,
    )
    path = om.save_external(model, tmp_path / "m.onnx")
    (weight,) = open_onnx(path).weights().weights
    assert codes(weight) == [ReasonCode.ZERO_POINT]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\xff" * 100, "not an ONNX model"),
        (b"this is a text file, not a model\n" * 10, "not an ONNX model"),
        (b"\x08\x0a", "no graph"),
        (om.two_weights().SerializeToString()[:-200], "not an ONNX model"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=said):
        open_onnx(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="No such file"):
        open_onnx(tmp_path / "none.onnx")
    with pytest.raises(BadInputError, match="directory"):
        open_onnx(tmp_path)


def test_external_data_that_is_missing_or_truncated_is_refused(tmp_path: Path) -> None:
    path = om.save_external(om.two_weights(), tmp_path / "m.onnx")
    data = tmp_path / "weights.bin"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(BadInputError, match=r"'fc\.bias' ends at byte"):
        open_onnx(path)
    data.unlink()
    with pytest.raises(BadInputError, match=r"'conv\.weight' is missing"):
        open_onnx(path)


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("{outside}", "outside the model's folder"),
        ("../outside.bin", "outside the model's folder"),
        ("sub/../../outside.bin", "outside the model's folder"),
        ("C:\\outside.bin", "outside the model's folder"),
        ("link.bin", "outside the model's folder"),
        ("", "is missing"),
        ("sub", "is missing"),
        ("a\0b", "is missing"),
    ],
)
def test_external_data_outside_the_folder_is_refused(
    tmp_path: Path, location: str, said: str
) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    outside = tmp_path / "outside.bin"
    outside.write_bytes(bytes(32 * 16 * 4))
    (folder / "link.bin").symlink_to(outside)
    model = om.matmul(om.weights(32, 16))
    om.make_external(model.graph.initializer[0], location.format(outside=outside))
    with pytest.raises(BadInputError, match=said):
        open_onnx(om.save(model, folder / "m.onnx"))


def test_links_to_one_folder_as_in_a_download_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    om.save_external(om.two_weights(), blobs / "aaaa")
    (blobs / "weights.bin").rename(blobs / "bbbb")
    (snapshot / "model.onnx").symlink_to(blobs / "aaaa")
    (snapshot / "weights.bin").symlink_to(blobs / "bbbb")
    assert om.load(snapshot / "model.onnx").graph == om.two_weights().graph


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("offset", "-4", "a number is needed"),
        ("offset", "1e3", "a number is needed"),
        ("offset", "9" * 5000, "a number is needed"),
        ("offset", str(10**18), "ends at byte"),
        ("length", str(10**15), "shape"),
        ("length", "4", "shape"),
    ],
)
def test_offsets_and_lengths_are_not_trusted(
    tmp_path: Path, key: str, value: str, said: str
) -> None:
    model = om.matmul(om.weights(32, 16))
    om.make_external(model.graph.initializer[0], "w.bin")
    next(e for e in model.graph.initializer[0].external_data if e.key == key).value = value
    (tmp_path / "w.bin").write_bytes(bytes(32 * 16 * 4))
    with pytest.raises(BadInputError, match=said):
        open_onnx(om.save(model, tmp_path / "m.onnx"))


def test_a_data_folder_below_the_model_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = om.save_external(om.two_weights(), tmp_path / "m.onnx", location="data/w.bin")
    assert om.load(path).graph == om.two_weights().graph


@pytest.mark.parametrize("field", ["dim_param", "function input", "opset domain", "overload"])
def test_names_that_are_no_text_are_refused_wherever_they_stand(tmp_path: Path, field: str) -> None:
    model = om.two_weights()
    if field == "dim_param":
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "ABCD"
    elif field == "function input":
        opset = helper.make_opsetid("", 18)
        relu = helper.make_node("Relu", ["ABCD"], ["b"])
        model.functions.append(helper.make_function("f", "A", ["ABCD"], ["b"], [relu], [opset]))
    elif field == "opset domain":
        model.opset_import.append(helper.make_opsetid("ABCD", 1))
    else:
        model.graph.node[0].overload = "ABCD"
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString().replace(b"ABCD", b"\xed\xa0\x80A"))
    with pytest.raises(BadInputError, match="a name in the graph is not UTF-8 text"):
        open_onnx(path)

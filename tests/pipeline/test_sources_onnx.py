from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import onnx_models as om

from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel
from twofour.pipeline import onnx_stages
from twofour.pipeline.run import run_prune
from twofour.pipeline.sources.onnx import OnnxSource
from twofour.records.options import ExampleInputs, RunOptions
from twofour.records.run import RunManifest
from twofour.store import read_record


def _source(path: Path, options: ExampleInputs | None = None) -> OnnxSource:
    return OnnxSource(text=str(path), path=path, options=options or ExampleInputs())


def _external(name: str, location: str) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def _model(path: Path, *tensors: TensorProto, inner: TensorProto | None = None) -> None:
    """A graph with the tensors as initializers, and `inner` in a Constant of an If branch."""
    nodes = []
    if inner is not None:
        constant = helper.make_node("Constant", [], ["c"], value=inner)
        branch = helper.make_graph([constant], "branch", [], [])
        nodes.append(
            helper.make_node("If", ["flag"], ["out"], then_branch=branch, else_branch=branch)
        )
    graph = helper.make_graph(nodes, "g", [], [], initializer=list(tensors))
    path.write_bytes(helper.make_model(graph).SerializeToString())


def test_external_data_is_found_in_initializers_and_in_subgraphs(tmp_path: Path) -> None:
    for name in ("a.data", "b.data", "not_named.data"):
        (tmp_path / name).write_bytes(b"12345678")
    path = tmp_path / "m.onnx"
    _model(path, _external("w", "a.data"), inner=_external("v", "b.data"))
    assert [f.name for f in _source(path).data_files()] == ["a.data", "b.data"]


def test_external_data_outside_the_folder_is_never_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"12345678")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    path = folder / "m.onnx"
    outside = [_external(f"w{i}", at) for i, at in enumerate(("../secret", "/dev/zero", "link"))]
    _model(path, *outside, _external("w", "missing.data"))
    assert _source(path).data_files() == ()


def test_the_key_changes_with_the_graph_the_external_data_and_the_options(tmp_path: Path) -> None:
    path, data = tmp_path / "m.onnx", tmp_path / "a.data"
    data.write_bytes(b"12345678")
    _model(path, _external("w", "a.data"))
    keys = [_source(path).key(), _source(path, ExampleInputs(seed=1)).key()]
    data.write_bytes(b"12345679")
    keys.append(_source(path).key())
    _model(path, numpy_helper.from_array(np.zeros(2, np.float32), "w"))
    keys.append(_source(path).key())
    assert len(set(keys)) == 4
    assert _source(path).key() == keys[-1]


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"hello"])
def test_a_damaged_file_has_a_key_and_is_left_to_the_reader_of_the_graph(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    assert len(_source(path).key()) == 64
    assert _source(path).data_files() == ()


def test_the_key_of_a_real_model_saved_with_external_data_covers_its_weights(
    tmp_path: Path,
) -> None:
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    graph = helper.make_graph([], "g", [], [], initializer=[weight])
    path = tmp_path / "m.onnx"
    onnx.save(
        helper.make_model(graph),
        path,
        save_as_external_data=True,
        location="m.onnx.data",
        size_threshold=0,
    )
    assert [f.name for f in _source(path).data_files()] == ["m.onnx.data"]


@pytest.mark.parametrize("location", ["n" * 300, "n" * 20_000, "a/" * 5_000, "loop", "~nobody/x"])
def test_external_data_of_no_possible_name_is_refused_by_the_reader(
    tmp_path: Path, location: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    model = om.two_weights()
    om.make_external(model.graph.initializer[0], location)
    path = om.save(model, tmp_path / "m.onnx")
    assert _source(path).data_files() == ()
    with pytest.raises(BadInputError, match=r"m\.onnx: external data of .* is not there"):
        _source(path).opened()


def test_a_damaged_file_of_any_size_is_never_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = om.two_weights()
    om.make_external(model.graph.initializer[0], "w.data")
    path = om.save(model, tmp_path / "m.onnx")
    (tmp_path / "w.data").write_bytes(b"short")

    def read(path: Path) -> str:
        raise AssertionError(f"{path} is hashed")

    monkeypatch.setattr("twofour.pipeline.sources.onnx.sha256_file", read)
    assert len(_source(path).key()) == 64
    with pytest.raises(BadInputError, match="has only 5"):
        _source(path).opened()


@pytest.mark.parametrize("name", ["m.onnx", "w.data"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, name: str) -> None:
    model = om.two_weights()
    om.make_external(model.graph.initializer[0], "w.data")
    path = om.save(model, tmp_path / "m.onnx")
    (tmp_path / "w.data").write_bytes(bytes(6000))
    source = _source(path)
    opened = source.opened()
    source.refuse_changed(opened)
    with (tmp_path / name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(BadInputError, match=r"m\.onnx, or its data, was changed while it was read"):
        source.refuse_changed(opened)


def test_a_model_swapped_while_it_is_taken_over_leaves_no_stage_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = om.save(om.two_weights(), tmp_path / "m.onnx")
    write = onnx_stages.write_onnx

    def swapped(opened: OpenedModel, target: Path, options: RunOptions) -> None:
        write(opened, target, options)
        path.write_bytes(path.read_bytes() + b"")

    monkeypatch.setattr("twofour.pipeline.onnx_stages.write_onnx", swapped)
    with pytest.raises(BadInputError, match="was changed while it was read"):
        run_prune(str(path), tmp_path / "run", RunOptions())
    assert read_record(RunManifest, tmp_path / "run" / "run.json").stages == ()

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import onnx_models as om

from twofour.errors import BadInputError
from twofour.records.options import ExampleInputs
from twofour.sources.source import OnnxSource


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
    assert sorted(f.name for f in _source(path).opened().data_files) == ["a.data", "b.data"]


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


def test_a_damaged_file_of_any_size_is_never_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = om.two_weights()
    om.make_external(model.graph.initializer[0], "w.data")
    path = om.save(model, tmp_path / "m.onnx")
    (tmp_path / "w.data").write_bytes(b"short")

    def read(path: Path) -> str:
        raise AssertionError(f"{path} is hashed")

    monkeypatch.setattr("twofour.sources.source.sha256_file", read)
    with pytest.raises(BadInputError, match="has only 5"):
        _source(path).key()

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support import onnx_models as om

from twofour.errors import BadInputError
from twofour.records.options import ExampleInputs
from twofour.sources.callable import CallableSource, TimmSource
from twofour.sources.hf import HfSource
from twofour.sources.source import OnnxSource, open_source, safe_name

OPTIONS = ExampleInputs()


def test_each_form_is_told_by_its_text_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net one.onnx").write_bytes(b"")
    Path("ckpt").mkdir()
    Path("ckpt/config.json").write_text("{}")
    Path("zoo.py").write_text("")
    found = {
        text: (type(open_source(text, OPTIONS)), open_source(text, OPTIONS).name)
        for text in ("net one.onnx", "ckpt/", "zoo.py:make", "a.b:Net.make", "timm:resnet50")
    }
    assert found == {
        "net one.onnx": (OnnxSource, "net-one"),
        "ckpt/": (HfSource, "ckpt"),
        "zoo.py:make": (CallableSource, "zoo-make"),
        "a.b:Net.make": (CallableSource, "b-Net.make"),
        "timm:resnet50": (TimmSource, "resnet50"),
    }


def test_a_run_folder_name_has_safe_characters_only() -> None:
    names = {"a b/c": "a-b-c", "..": "model", "ünder": "nder", "x.y_z-1": "x.y_z-1"}
    assert {text: safe_name(text) for text in names} == names


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "weights.pt",
            "weights.pt is a file, but not an .onnx model",
            "weights alone have no architecture",
        ),
        ("zoo.py", "zoo.py is a file, but not an .onnx model", "zoo.py:make_model"),
        ("notes.txt", "notes.txt is a file, but not an .onnx model", "timm:NAME"),
        ("folder", "folder is a folder without config.json", "folder/a.onnx"),
        ("gone.onnx", "gone.onnx does not exist", "a model is file.onnx"),
        ("owner/model", "there is no model 'owner/model'", "hf download"),
        ("nothing", "there is no model 'nothing'", "file.py:callable"),
        ("gone.py:make", "gone.py is not a file", "Python file"),
        ("zoo.py:", "'zoo.py:' names no callable", "file.py:callable"),
        ("a-b:make", "'a-b:make' names no callable", "package.module:callable"),
        ("timm:", "'timm:' names no timm model", "timm:resnet50"),
        ("timm:vit?weights=no", "names no timm model", "pretrained=false"),
    ],
)
def test_what_is_no_source_is_refused_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("weights.pt", "zoo.py", "notes.txt"):
        Path(name).write_text("")
    Path("folder").mkdir()
    Path("folder/a.onnx").write_bytes(b"")
    with pytest.raises(BadInputError) as caught:
        open_source(text, OPTIONS)
    assert message in caught.value.message
    assert hint in str(caught.value.hint)


def test_missing_example_inputs_are_refused_at_once(tmp_path: Path) -> None:
    options = ExampleInputs(inputs=str(tmp_path / "gone.npz"))
    with pytest.raises(BadInputError, match=r"gone\.npz is not"):
        open_source("timm:resnet50", options)


CODE = """
import sys
from twofour.sources.source import ExampleInputs, open_source
from twofour.sources.user_code import call, import_attribute, parse_reference
print(len(open_source("drawn.py:draw", ExampleInputs()).key()))
for name, expected in (("plain.py:draw", False), ("drawn.py:draw", True)):
    reference = parse_reference(name)
    target = import_attribute(reference)
    assert ("torch" in sys.modules) is expected
    print(call(reference, target, 3, hint=""))
"""


def test_torch_is_imported_and_seeded_for_code_that_names_it_and_not_for_its_key(
    tmp_path: Path,
) -> None:
    (tmp_path / "plain.py").write_text("def draw():\n    return 1\n")
    (tmp_path / "drawn.py").write_text(
        "def draw():\n    import torch\n    return torch.rand(2).tolist()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        assert result.stdout.splitlines() == ["64", "1", str(torch.rand(2).tolist())]


# --- an ONNX file: its data and its key -----------------------------------------------------------


def _source(path: Path, options: ExampleInputs | None = None) -> OnnxSource:
    return OnnxSource(text=str(path), path=path, options=options or ExampleInputs())


def _external(name: str, location: str) -> TensorProto:
    tensor = numpy_helper.from_array(np.zeros(2, np.float32), name)
    om.make_external(tensor, location)
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

"""Files that name layers: maps, ours and the user's own, and lists of those that stay dense."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.onnx_models import save, two_weights
from typer.testing import CliRunner

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.pipeline.evidence_files import map_beside, read_layer_names
from twofour.pruning.selection import choose, glob_of, layer_list, read_layers
from twofour.records.export import LayerMap, LayerName
from twofour.records.weights import HARDWARE_PATTERN, Selection, Weight
from twofour.store import write_record

LOG = """\
&&&& RUNNING TensorRT.trtexec [TensorRT v101601] # trtexec --onnx=m.onnx --verbose
[07/07/2026-02:11:09] [I] Sparsity: Enabled
[07/07/2026-02:11:09] [V] [TRT] (Sparsity) Found 2 layer(s) eligible to use sparse tactics: p, q
[07/07/2026-02:11:09] [V] [TRT] (Sparsity) Chose 1 layer(s) using sparse tactics: q
[07/07/2026-02:11:09] [I] [TRT] Engine generation completed in 1 seconds.
&&&& PASSED TensorRT.trtexec [TensorRT v101601] # trtexec --onnx=m.onnx --verbose
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_map_of_the_users_own_has_a_layer_or_a_list_of_them(tmp_path: Path) -> None:
    text = '{"p": "conv", "q": ["fc", "other"]}'
    found = read_layer_names(written(tmp_path / "map.json", text))
    assert found.engine == (("p", ("conv",)), ("q", ("fc", "other")))
    assert found.modules is None


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", '{"p": 3}', "[" * 9999])
def test_any_other_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInputError, match=r"map\.txt"):
        read_layer_names(written(tmp_path / "map.txt", text))


def ours(folder: Path) -> Path:
    path = folder / "layers.json"
    rows = [
        LayerName(layer=layer, parameter="", node=node, initializer=f"{node}.weight", op="")
        for layer, node in (("body.0", "conv"), ("head", "fc"))
    ]
    write_record(path, LayerMap(layers=tuple(rows)))
    return path


def verdicts(*options: str) -> dict[str, tuple[str, str | None]]:
    result = CliRunner().invoke(application(), ["report", "--json", *options])
    assert result.exit_code == 0, result.output
    return {
        v["layer"]: (v["verdict"], v["evidence"]) for v in json.loads(result.stdout)["verdicts"]
    }


def test_report_takes_the_users_map_for_names_that_lead_nowhere(tmp_path: Path) -> None:
    model = str(save(two_weights(), tmp_path / "m.onnx"))
    log = str(written(tmp_path / "b.log", LOG))
    users = str(written(tmp_path / "map.json", '{"p": "conv", "q": "fc"}'))
    without = verdicts("--onnx", model, "--log", log)
    assert {evidence for _, evidence in without.values()} == {"predicted"}
    found = verdicts("--onnx", model, "--log", log, "--layer-map", users)
    # the weights are dense, so the rules speak against what the log shows
    assert found == {"conv": ("eligible", "measured"), "fc": ("chosen", "measured")}


def test_our_map_names_the_layers_from_beside_the_model_or_another_place(tmp_path: Path) -> None:
    model = save(two_weights(), tmp_path / "sparse.onnx")
    assert map_beside(model) is None
    # layer information of that name is no map
    written(tmp_path / "layers.json", '{"Layers": ["conv", "fc"], "Bindings": []}')
    assert map_beside(model) is None
    assert set(verdicts("--onnx", str(model))) == {"conv", "fc"}
    (tmp_path / "run").mkdir()
    elsewhere = str(ours(tmp_path / "run"))
    named = {"body.0", "head"}
    assert set(verdicts("--onnx", str(model), "--layer-map", elsewhere)) == named
    ours(tmp_path)
    assert set(verdicts("--onnx", str(model))) == named


def test_a_map_of_a_strange_layer_or_without_a_model_is_refused(tmp_path: Path) -> None:
    model = save(two_weights(), tmp_path / "m.onnx")
    log = written(tmp_path / "b.log", LOG)
    for layer, files, said in (
        ("stranger thing", ("--onnx", str(model)), "is no layer"),
        ("conv", ("--log", str(log)), "--onnx model.onnx"),
    ):
        users = str(written(tmp_path / "map.json", json.dumps({"p": layer})))
        result = CliRunner().invoke(application(), ["report", *files, "--layer-map", users])
        assert result.exit_code == 2
        assert said in result.stderr


# --- lists of layers that stay dense --------------------------------------------------------------


def _read(tmp_path: Path, text: str | bytes, selection: Selection | None = None) -> Selection:
    file = tmp_path / "layers.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_layers(file, selection or Selection())


def test_a_file_leaves_layers_dense_and_asks_for_others(tmp_path: Path) -> None:
    text = "# why\n\nstem.*   # too narrow\n+ grouped\nhead#1 # its name has a #\n"
    found = _read(tmp_path, text, Selection(exclude=("given",)))
    assert found.exclude == ("given", "stem.*", "head#1")
    assert found.include == ("grouped",)
    assert _read(tmp_path, "# all of them", found) == found
    assert found.said_by == {
        "stem.*": f"{tmp_path / 'layers.txt'} line 3",
        "grouped": f"{tmp_path / 'layers.txt'} line 4",
        "head#1": f"{tmp_path / 'layers.txt'} line 5",
    }


@given(name=st.text(min_size=1, max_size=12))
def test_any_name_is_found_again_by_the_line_that_is_written_for_it(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = name.encode("utf-8", "replace").decode()
    folder = tmp_path_factory.mktemp("list")
    found = _read(folder, layer_list(["head"], [(glob_of(name), "costs 0.1 # of it")]))
    assert len(found.exclude) == 1
    assert found.include == ()
    assert fnmatchcase(name, found.exclude[0])


def test_a_name_with_the_characters_of_a_glob_matches_itself_alone() -> None:
    assert glob_of("blocks[0].*") == "blocks[[]0].[*]"
    assert not fnmatchcase("blocks0.x", glob_of("blocks[0].*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("a\n+\n", "line 2: + without a name"),
        ("a\n+a\n", "line 2: a is both to be pruned and to stay dense"),
        (b"\xff\xfea", "is no UTF-8 text"),
    ],
)
def test_what_is_no_list_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(BadInputError, match=message.replace("+", r"\+")):
        _read(tmp_path, text)
    with pytest.raises(BadInputError, match="cannot read"):
        read_layers(tmp_path / "none.txt", Selection())


def test_a_line_that_matches_no_layer_is_named(tmp_path: Path) -> None:
    weight = Weight(
        layer="fc1", node=None, weight="fc1.weight", op="Linear", shape=(8, 8), axis=1, groups=1,
        in_channels=8, out_channels=8, kernel=(), dtype="float32", math_dtype="float32",
    )  # fmt: skip
    found = _read(tmp_path, "fc1\nfc2\n")
    with pytest.raises(BadInputError, match=r"layers\.txt line 2: fc2"):
        choose([weight], HARDWARE_PATTERN, found)
    ((_, pruned, reasons),) = choose([weight], HARDWARE_PATTERN, _read(tmp_path, "fc1\n"))
    assert not pruned
    assert reasons[0].message == f"left dense by {tmp_path / 'layers.txt'} line 1"

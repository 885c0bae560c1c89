"""Layer maps: ours, and the user's own in JSON, at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.onnx_models import save, two_weights
from typer.testing import CliRunner

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.pipeline.evidence_files import map_beside, read_layer_names
from twofour.records.export import LayerMap, LayerName
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
        LayerName(
            layer=layer, parameter=f"{layer}.weight", node=node, initializer=weight, op="Conv"
        )
        for layer, node, weight in (
            *(("body.0", "conv", "conv.weight"), ("head", "fc", "fc.weight")),
        )
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
    given = str(written(tmp_path / "map.json", '{"p": "conv", "q": "fc"}'))
    without = verdicts("--onnx", model, "--log", log)
    assert {evidence for _, evidence in without.values()} == {"predicted"}
    found = verdicts("--onnx", model, "--log", log, "--layer-map", given)
    # the weights are dense, so the rules speak against what the log shows
    assert found == {"conv": ("eligible", "measured"), "fc": ("chosen", "measured")}


def test_our_map_beside_the_model_names_its_layers(tmp_path: Path) -> None:
    model = save(two_weights(), tmp_path / "sparse.onnx")
    assert set(verdicts("--onnx", str(model))) == {"conv", "fc"}
    assert map_beside(model) is None
    ours(tmp_path)
    assert set(verdicts("--onnx", str(model))) == {"body.0", "head"}


def test_our_map_from_another_place_names_the_layers_too(tmp_path: Path) -> None:
    model = save(two_weights(), tmp_path / "m.onnx")
    (tmp_path / "run").mkdir()
    found = verdicts("--onnx", str(model), "--layer-map", str(ours(tmp_path / "run")))
    assert set(found) == {"body.0", "head"}


def test_layer_information_that_is_called_layers_json_is_no_map(tmp_path: Path) -> None:
    model = save(two_weights(), tmp_path / "m.onnx")
    written(tmp_path / "layers.json", '{"Layers": ["conv", "fc"], "Bindings": []}')
    assert map_beside(model) is None
    assert set(verdicts("--onnx", str(model))) == {"conv", "fc"}


def test_a_layer_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    model = str(save(two_weights(), tmp_path / "m.onnx"))
    given = str(written(tmp_path / "map.json", '{"p": "stranger thing"}'))
    result = CliRunner().invoke(application(), ["report", "--onnx", model, "--layer-map", given])
    assert result.exit_code == 2
    assert "is no layer" in result.stderr


def test_a_layer_map_needs_a_model(tmp_path: Path) -> None:
    log = str(written(tmp_path / "b.log", LOG))
    given = str(written(tmp_path / "map.json", '{"p": "conv"}'))
    result = CliRunner().invoke(application(), ["report", "--log", log, "--layer-map", given])
    assert result.exit_code == 2
    assert "--onnx model.onnx" in result.stderr

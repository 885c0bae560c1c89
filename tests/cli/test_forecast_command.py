"""`twofour forecast`: exit codes, formats, and what it leaves alone."""

from __future__ import annotations

import csv
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import helper
from support import onnx_models as om
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.records.forecast import Forecast, Worth
from twofour.store import from_json


@pytest.fixture
def model(tmp_path: Path) -> Path:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")
    made = om.model([node], {"w": om.weights(1024, 4096)}, inputs={"x": ("batch", "length", 1024)})
    return om.save(made, tmp_path / "net.onnx")


def forecast(model: Path, *arguments: str) -> Result:
    sizes = ("--shapes", "x=8x128x1024", "--gpu", "a100,rtx 4090")
    return CliRunner().invoke(application(), ["forecast", str(model), *sizes, *arguments])


def test_json_is_the_record_and_csv_a_line_for_each_cell(model: Path) -> None:
    found = from_json(Forecast, forecast(model, "--batch", "1,64", "--json").stdout)
    lines = forecast(model, "--batch", "1,64", "--format", "csv").stdout
    rows = list(csv.DictReader(io.StringIO(lines)))
    assert [(c.gpu, c.batch, c.layers[0].rows) for c in found.cells] == [
        ("A100 80GB PCIe", 1, 128),
        ("A100 80GB PCIe", 64, 64 * 128),
        ("GeForce RTX 4090", 1, 128),
        ("GeForce RTX 4090", 64, 64 * 128),
    ]
    for row, cell in zip(rows, found.cells, strict=True):
        assert (row["gpu"], row["batch"]) == (cell.gpu, str(cell.batch))
        assert float(row["forecast_model_at_most_gain"]) == cell.model.gain
        assert float(row["forecast_expected_low"]) == cell.expected.low
        assert row["verdict"] == cell.verdict.value


def test_a_gate_is_about_the_expected_gain_or_the_figure_that_is_named(model: Path) -> None:
    cells = from_json(Forecast, forecast(model, "--json").stdout).cells
    for figure, gains in {
        "expected": [cell.expected.gain for cell in cells],
        "low": [cell.expected.low for cell in cells],
        "at-most": [cell.model.gain for cell in cells],
    }.items():
        named = () if figure == "expected" else ("--min-gain-of", figure)
        least = round(min(gains), 2)  # as it is shown
        assert forecast(model, "--min-gain", f"{least}", *named).exit_code == 0
        above = forecast(model, "--min-gain", f"{least + 0.001}", *named)
        assert above.exit_code == 4
        assert "error: the forecast does not meet --min-gain\n  " in above.stderr
        assert cells[gains.index(min(gains))].gpu in above.stderr
        assert forecast(model, "--min-gain", "nan", *named).exit_code == 4
        assert f": {figure} {least:.2f}x, below" in above.stderr


def test_what_is_to_be_tried_first_names_the_command_that_tries_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is given as it was typed, at the sizes and in the type of the forecast."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")
    made = om.model([node], {"w": om.weights(512, 512)}, inputs={"x": ("batch", 512)})
    om.save(made, tmp_path / "my net.onnx")
    monkeypatch.chdir(tmp_path)
    arguments = ("--gpu", "A100", "--batch", "16,8192", "--precision", "float16,bfloat16")
    result = CliRunner().invoke(application(), ["forecast", "my net.onnx", *arguments, "--json"])
    small, large, _, bfloat16 = from_json(Forecast, result.stdout).cells
    assert (small.verdict, small.command) == (Worth.NO, "")
    assert large.verdict is Worth.TRY_FIRST
    command = shlex.split(large.command)
    assert command[1:] == ["prune-export-build", "my net.onnx", "--shapes", "x=8192x512"]
    assert large.command in large.sentence
    assert bfloat16.command == f"{large.command} --precision bfloat16"
    small_shape = command[-1].replace("8192", "16")
    tried = CliRunner().invoke(
        application(), [*command[1:-1], small_shape, "--engine", "onnxruntime"]
    )
    assert tried.exit_code == 0
    assert (tmp_path / "runs").is_dir()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "H1000"], "error: unknown GPU 'H1000'\nhint: the nearest names are H100"),
        (["--precision", "fp8", "--gpu", "A100"], "A100"),
        (["--precision", "fp7"], "error: --precision: 'fp7' names a type that no kernel was"),
        (["--batch", "0"], "error: --batch: '0' is not a list of sizes"),
        (["--profile", "missing.json"], "error: cannot read missing.json"),
        (["--json", "--format", "csv"], "error: --json and --format ask for two things"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(model: Path, arguments: list[str], said: str) -> None:
    result = forecast(model, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.count("\n") <= 2


def test_an_onnx_file_needs_no_torch_and_stays_alone_in_its_folder(model: Path) -> None:
    code = (
        "import sys; from twofour.cli import main; sys.argv[1:] = ['forecast', 'net.onnx', "
        "'--input-shape', '8x128x1024', '--json']\n"
        "try: main()\nfinally: print({'torch', 'onnxruntime'} & {*sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=model.parent, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "set()"
    assert json.loads(done.stdout)["cells"][0]["batch"] == 8
    assert [path.name for path in model.parent.iterdir()] == ["net.onnx"]

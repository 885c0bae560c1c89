"""How often a command parses each ONNX file: once, unless the file changed on disk in between.

What a worker process loads into an engine it parses for itself; only this process is counted.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from support import onnx_models as om
from typer.testing import CliRunner

from twofour.cli import application
from twofour.graph import opened

MODULE = f"{Path(__file__).parents[1] / 'support' / 'small_model.py'}:make"


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Names of the ONNX files, with how often each was parsed by us, by onnx or by onnx_ir."""
    counts: Counter[str] = Counter()

    def counted(parse: Callable[..., Any], argument: int) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            counts[Path(arguments[argument]).name] += 1
            return parse(*arguments, **options)

        return wrapper

    monkeypatch.setattr(opened, "_parse_into", counted(opened._parse_into, 1))
    for name in ("load", "load_model"):
        monkeypatch.setattr(onnx, name, counted(getattr(onnx, name), 0))
    return counts


def run(*arguments: str | Path) -> None:
    result = CliRunner().invoke(application(), [str(a) for a in arguments])
    assert result.exit_code == 0, result.output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Three layers, their weights in the file."""
    return om.save(three_layers(), tmp_path / "three.onnx")


def three_layers(seed: int = 0) -> onnx.ModelProto:
    names = ["x", "a", "b", "y"]
    nodes = [
        onnx.helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], name=f"fc{i}")
        for i in range(3)
    ]
    weights = {f"w{i}": om.weights(32, 32, seed=seed + i) for i in range(3)}
    return om.model(nodes, weights, inputs={"x": [2, 32]})


def test_the_main_job_reads_back_what_it_exported_from_a_torch_module_once(
    tmp_path: Path, parses: Counter[str]
) -> None:
    run("prune-export-build", MODULE, "--out", tmp_path / "run", "--quiet")
    assert parses == {"graph.onnx": 1, "dense.onnx": 2, "sparse.onnx": 2}


def test_the_main_job_parses_each_file_once_and_resumed_its_source_alone(
    model: Path, tmp_path: Path, parses: Counter[str]
) -> None:
    run("prune-export-build", model, "--out", tmp_path / "run", "--quiet")
    assert parses == {"three.onnx": 1, "dense.onnx": 2, "sparse.onnx": 1}
    parses.clear()
    run("prune-export-build", model, "--out", tmp_path / "run", "--quiet", "--resume")
    assert parses == {"three.onnx": 1}


def test_every_other_command_parses_each_file_once(
    model: Path, tmp_path: Path, parses: Counter[str]
) -> None:
    pruned, built, half = (("--out", tmp_path / name, "--quiet") for name in ("p", "b", "h"))
    source = {"three.onnx": 1}
    for command, expected in (
        (("report", "--onnx", model), source),
        (("explain", "fc0", "--onnx", model), source),
        (("prune", model, *pruned), source | {"dense.onnx": 1, "sparse.onnx": 1}),
        (("validate", tmp_path / "p" / "sparse.onnx"), {"sparse.onnx": 1}),
        (("build", model, *built, "--shapes", "x=2x32"), source | {"dense.onnx": 1}),
        (("export", model, *half, "--precision", "float16"), source | {"dense.onnx": 2}),
    ):
        run(*command)
        assert parses == expected, command
        parses.clear()


def test_compare_parses_each_of_its_files_once(tmp_path: Path, parses: Counter[str]) -> None:
    first = om.save(three_layers(), tmp_path / "first.onnx")
    second = om.save(three_layers(seed=5), tmp_path / "second.onnx")
    modes = ("--engines", "onnxruntime:cpu", "--rounds", "1", "--warmup", "0")
    run("compare", first, second, "--out", tmp_path / "out", "--shapes", "x=2x32", *modes)
    assert parses == {"first.onnx": 1, "second.onnx": 1}

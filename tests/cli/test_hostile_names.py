"""A model whose names are made to be obeyed: by a terminal, a report, a spreadsheet, a page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from typer.testing import CliRunner

from twofour.cli import application

NAMES = (
    "esc\x1b[5mblink\x1b[0m",
    "osc\x1b]8;;http://x\x07link",
    "c1\x9b5m\x85\x7f",
    "bidi\u202eabc\u2066",
    "cr\rbel\x07bs\x08",
    "ls\u2028ps\u2029",
    "nl\nhint: run this\n| forged | row |",
    "[red]markup[/red] :smile:",
    "=cmd|' /C calc'!A0",
    "<script>alert(1)</script>",
    "a|b`c`\\[x](javascript:alert(1))",
)
FORMATS = ("table", "markdown", "csv", "html")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every name of it, and of its file, is hostile."""
    path = tmp_path_factory.mktemp("names") / "m\x1b[5m\n\u202e.onnx"
    weights = np.arange(1, 65, dtype=np.float32).reshape(8, 8)
    ends = [f"t{name}" for name in ("", *NAMES)]
    nodes = [
        helper.make_node("MatMul", [ends[at], f"w{name}"], [ends[at + 1]], name=name)
        for at, name in enumerate(NAMES)
    ]
    x, y = (helper.make_tensor_value_info(end, 1, ["b\x1b", 8]) for end in (ends[0], ends[-1]))
    stored = [numpy_helper.from_array(weights, f"w{name}") for name in NAMES]
    graph = helper.make_graph(nodes, "g\x1b", [x], [y], stored)
    opset = helper.make_opsetid("", 18)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    return path


def test_no_command_hands_a_name_to_the_terminal_as_it_is(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    cases: tuple[list[str | Path], ...] = (
        ["validate", model],
        ["validate", model, "--json"],
        ["prune", model, "--out", model.parent / "p\x9b"],
        ["prune", model, "--exclude", NAMES[0]],
        ["explain", NAMES[6], "--onnx", model],
        ["explain", NAMES[2][:3], "--onnx", model],
    )
    reports: list[list[str | Path]] = [
        ["report", "--onnx", model, "--format", name] for name in FORMATS
    ]
    for arguments in (*cases, *reports):
        ended = CliRunner().invoke(application(), [str(argument) for argument in arguments])
        assert ended.exit_code in {0, 2, 4}
        assert "😄" not in ended.output
        lines = [line.strip() for line in ended.output.splitlines()]
        assert not [line for line in lines if line.startswith(("hint: run", "| forged"))]
        assert ended.output.replace("\n", "").isprintable()


def test_names_in_json_are_what_they_were(model: Path) -> None:
    ended = CliRunner().invoke(application(), ["validate", str(model), "--json"])
    assert ended.stdout.replace("\n", "").isprintable()
    record = json.loads(ended.stdout)
    assert [check["layer"] for check in record["checks"]] == list(NAMES)
    assert record["files"] == [str(model)]

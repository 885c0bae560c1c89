"""Arguments and names that nobody should give: a reason, an exit code, nothing obeyed."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import typer
from onnx import helper
from support import onnx_models as om
from typer.testing import CliRunner

from twofour.cli import application
from twofour.cli.console import guarded

ENDS = {0, 2, 3, 4, 5}
VALUES = ("", "nan", "-1", "1e400", "~nouser/x.onnx", "x" * 300, "\x1b[31m\n", "x=-1x1")
REQUIRED = {
    "log": ["missing.log"],
    "explain": ["layer", "missing"],
    "report": ["missing"],
    "doctor": [],
}
"""Of all other commands a model that is not there."""
GROUP: Any = typer.main.get_command(application())


def ends(*arguments: str) -> tuple[int, str]:
    """Exit code and what is said, of a command in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            GROUP.main([*arguments])
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()


@pytest.mark.parametrize("command", GROUP.commands)
def test_no_value_of_any_option_is_a_bug(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    required = REQUIRED.get(command, ["missing.onnx"])
    for parameter in GROUP.commands[command].params:
        is_argument = parameter.param_type_name == "argument"
        if not is_argument and (parameter.is_flag or parameter.name == "help"):
            continue
        for value in VALUES:
            given = [value] if is_argument else [*required, f"{parameter.opts[0]}={value}"]
            code, said = ends(command, *given)
            assert code in ENDS, (parameter.name, value[:60], said)
            assert bool(said) == bool(code)
            assert "Traceback" not in said
            assert said.replace("\n", "").isprintable()
    # --save-options writes its file before the model is looked for
    begun = [path for path in tmp_path.iterdir() if path.name not in VALUES]
    assert begun == []


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError("Unable to allocate 4.00 TiB for an array"), "error: memory ran out: Unable"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "error: memory ran out: "),
        (FileNotFoundError(2, "No usable temporary directory found"), "error: No usable"),
        (OSError(36, "File name too long", "n" * 300), "error: nnn"),
        (ModuleNotFoundError("", name="timm.models"), "error: this needs the Python package timm"),
    ],
)
def test_what_a_machine_lacks_or_refuses_is_no_bug(
    error: Exception, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @guarded
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == (3 if isinstance(error, ModuleNotFoundError) else 2)
    assert capsys.readouterr().err.startswith(told)


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
    ends = [f"t{name}" for name in ("", *NAMES)]
    nodes = [
        helper.make_node("MatMul", [ends[at], f"w{name}"], [ends[at + 1]], name=name)
        for at, name in enumerate(NAMES)
    ]
    weights = {f"w{name}": om.weights(8, 8) for name in NAMES}
    inputs: dict[str, list[int | str]] = {ends[0]: ["b\x1b", 8]}
    made = om.model(nodes, weights, inputs=inputs, outputs=[ends[-1]])
    made.graph.name = "g\x1b"
    return om.save(made, path)


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

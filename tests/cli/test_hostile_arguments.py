"""Arguments nobody should give: an exit code of the kind that they are, a reason, no traceback."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import typer

from twofour import RunOptions
from twofour.cli import application
from twofour.cli.console import guarded
from twofour.errors import BadInputError

ENDS = {0, 2, 3, 4, 5}
VALUES = (
    "",
    "nan",
    "-1",
    "1e400",
    "~nouser/x.onnx",
    "x" * 300,
    "\x1b[31m\n",
    "x=-1x1",
)
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
    assert not [*tmp_path.iterdir()], "nothing was begun"


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_some_library_would_not_take_is_refused(seed: int) -> None:
    with pytest.raises(BadInputError, match=r"--seed .* is no seed"):
        RunOptions(seed=seed)


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

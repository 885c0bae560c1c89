"""Arguments nobody should give: an exit code of the kind that they are, a reason, no traceback."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.forked_commands import Commands
from support.onnx_models import save, two_weights

from twofour import RunOptions
from twofour.cli.app import app
from twofour.errors import BadInputError
from twofour.logs.layer_info import read_profile
from twofour.pipeline.sensitivity.layer_times import read_times

ENDS = {0, 2, 3, 4, 5}
VALUES = (
    "",
    "nan",
    "-1",
    "1e400",
    "9" * 400,
    "9" * 5000,
    "\udcff",
    "~nouser/x.onnx",
    "x" * 300,
    "x/" * 3000,
    "\x1b[31m\n",
    f"x={'9' * 400}x1",
    "nan,-1,1e400",
)
REQUIRED = {
    "log": ["missing.log"],
    "explain": ["layer", "missing"],
    "report": ["missing"],
    "doctor": [],
}
"""Of all other commands a model that is not there."""
GROUP: Any = typer.main.get_command(app)


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


@pytest.mark.parametrize("seed", [-1, 2**63, 10**400])
def test_a_seed_that_some_library_would_not_take_is_refused(seed: int) -> None:
    with pytest.raises(BadInputError, match=r"--seed .* is no seed"):
        RunOptions(seed=seed)


def test_a_number_of_any_length_in_a_file_is_no_bug(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text('[{"count": 1}, {"name": "a", "timeMs": %s, "medianMs": 2}]' % ("9" * 400))
    (row,) = read_profile(path).layers
    assert (row.total_ms, row.median_ms) == (float("inf"), 2.0)
    path.write_text('{"a": %s}' % ("9" * 400))
    with pytest.raises(BadInputError, match="--profile: "):
        read_times(path)


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(two_weights(), tmp_path_factory.mktemp("arguments") / "m.onnx")


def test_a_current_folder_that_was_deleted_is_named_where_it_is_needed(
    commands: Commands, model: Path, tmp_path: Path
) -> None:
    for arguments, code in ((["validate", str(model)], 4), (["prune", "package:f"], 2)):
        folder = tmp_path / "gone"
        folder.mkdir()
        ended = commands.run(*arguments, cwd=folder, gone=True)
        assert ended.code == code
    assert ended.said == (
        "error: the current folder is no longer there\nhint: cd into another one\n"
    )


def test_a_name_that_is_no_text_is_refused_and_a_folder_of_such_a_name_is_not(
    commands: Commands, model: Path
) -> None:
    name = os.fsdecode(b"caf\xe9")
    for arguments in (["validate", f"{name}.onnx"], ["prune", "m.onnx", "--out", name]):
        ended = commands.run(*arguments, cwd=model.parent)
        assert ended.code == 2
        assert r"caf\udce9" in ended.said
        assert "is not text in UTF-8\nhint: rename it" in ended.said
    folder = model.parent / name
    folder.mkdir()
    for _ in range(2):  # a run folder is read back
        ended = commands.run("prune", "../m.onnx", "--json", cwd=folder)
        assert ended.code == 0
    assert commands.run("validate", "runs/m", cwd=folder).code == 0


def test_surroundings_that_lack_something_are_no_bug(commands: Commands, model: Path) -> None:
    for environment in ({"HOME": None}, {"TMPDIR": "/nonexistent"}, {"TMPDIR": str(model)}):
        ended = commands.run("prune", "~/x.onnx", cwd=model.parent, environment=environment)
        assert ended.code == 2
        assert "there is no file ~/x.onnx" in ended.said
    ended = commands.run("prune", "m.onnx", "--out", "n" * 300, cwd=model.parent)
    assert ended.code == 2
    assert "File name too long" in ended.said

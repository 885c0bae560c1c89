"""Streams that fail: the exit code is the command's own, and nobody sees a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.forked_commands import CLOSED, FULL, GONE, KEPT, Commands

from twofour.cli.streams import AsIs, Outlet, Stream

DENSE = "Ä/layer"
LOST = "error: cannot write to stdout: "


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of dense weights, one that holds the pattern, and a log."""
    made = tmp_path_factory.mktemp("streams")
    weights = np.ones((8, 8), np.float32)
    save_file({f"{DENSE}{i}.weight": weights for i in range(40)}, made / "dense.safetensors")
    save_file({"fc.weight": weights * ([1, 1, 0, 0] * 2)}, made / "sparse.safetensors")
    (made / "build.log").write_text("[I] TensorRT version: 10.3.0\n")
    return made


CASES = [
    (["validate", "dense.safetensors", "--json"], 4),
    (["validate", "dense.safetensors"], 4),
    (["validate", "sparse.safetensors"], 0),
    (["validate", "missing.onnx"], 2),
    (["log", "build.log", "--json"], 0),
    (["prune", "x.onnx", "--no-such-option"], 2),
    (["prune", "--help"], 0),
    (["--version"], 0),
]
"""Arguments, and the code where all is read."""


@pytest.mark.parametrize(("arguments", "code"), CASES, ids=str)
def test_no_stream_changes_the_code_of_a_command_or_its_words(
    arguments: list[str], code: int, commands: Commands, folder: Path
) -> None:
    plain = commands.run(*arguments, cwd=folder)
    assert plain.code == code
    for stdout, stderr in ((GONE, KEPT), (GONE, GONE), (KEPT, CLOSED), (KEPT, FULL)):
        ended = commands.run(*arguments, cwd=folder, stdout=stdout, stderr=stderr)
        assert ended.code == code, (stdout, stderr)
        assert ended.stdout == (plain.stdout if stdout == KEPT else b"")
        assert ended.stderr == (plain.stderr if stderr == KEPT else b"")


@pytest.mark.parametrize("stdout", [FULL, CLOSED])
def test_output_that_is_lost_is_said_and_never_ends_in_0(
    stdout: str, commands: Commands, folder: Path
) -> None:
    for arguments, code in CASES:
        ended = commands.run(*arguments, cwd=folder, stdout=stdout)
        assert ended.code == (code or 2), arguments
        assert (LOST in ended.said) == (code != 2), arguments
        assert "Traceback" not in ended.said


def test_a_command_that_says_nothing_loses_nothing(commands: Commands, folder: Path) -> None:
    ended = commands.run("validate", "sparse.safetensors", "--quiet", cwd=folder, stdout=CLOSED)
    assert (ended.code, ended.said) == (0, "")


def test_a_closed_descriptor_is_given_to_no_file(commands: Commands, folder: Path) -> None:
    before = (folder / "dense.safetensors").read_bytes()
    commands.run("validate", "dense.safetensors", cwd=folder, stdout=CLOSED, stderr=CLOSED)
    assert (folder / "dense.safetensors").read_bytes() == before


def test_a_locale_of_ascii_shows_escapes_and_json_stays_json(
    commands: Commands, folder: Path
) -> None:
    shown = commands.run("validate", "dense.safetensors", cwd=folder, encoding="ascii")
    assert shown.code == 4
    assert rb"\xc4/layer0" in shown.stdout
    record = commands.run("validate", "dense.safetensors", "--json", cwd=folder, encoding="ascii")
    assert record.code == 4
    assert json.loads(record.stdout)["checks"][0]["layer"] == f"{DENSE}0"
    log = commands.run("log", "build.log", cwd=folder, encoding="ascii")
    assert (log.code, log.shown.isascii()) == (0, True)
    refused = commands.run("validate", "Ä.onnx", cwd=folder, encoding="latin-1")
    assert refused.stderr.startswith("error: Ä.onnx does not exist\n".encode("latin-1"))


@pytest.mark.parametrize(
    "environment",
    [{"TERM": "dumb"}, {"TERM": None, "NO_COLOR": "1"}, {"COLUMNS": "0"}],
    ids=str,
)
def test_any_terminal_is_good_enough(
    environment: dict[str, str | None], commands: Commands, folder: Path
) -> None:
    for width in ("1", "20"):
        ended = commands.run(
            "validate",
            "dense.safetensors",
            cwd=folder,
            stdout=width,
            stderr=width,
            environment=environment,
        )
        assert ended.code == 4
        assert "error: 40 of 40 weights" in ended.said
        assert "weightsthathadtobe2:4" in "".join(ended.shown.split())
        assert "NO_COLOR" not in environment or "\x1b[3" not in ended.shown


@pytest.mark.slow
def test_the_shell_sees_the_same(folder: Path) -> None:
    """Real processes, closed descriptors and locales: what forks of a test stand for."""
    command = f"{sys.executable} -m twofour validate {folder / 'dense.safetensors'}"
    script = f"""
{command} --json 2>&- | head -1; echo "${{PIPESTATUS[0]}}"
    {command} >/dev/full 2>/dev/full; echo $?
    LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {command} --json | grep -cF '"\\u00c4/layer0"'
    """
    done = subprocess.run(["bash", "-c", script], check=False, capture_output=True, text=True)
    assert done.stdout.split() == ["{", "4", "4", "1"]
    assert "Traceback" not in done.stderr


@pytest.fixture
def piped(tmp_path: Path) -> Iterator[tuple[Stream, Path]]:
    """A stream into a file."""
    path = tmp_path / "written"
    with path.open("wb") as file:
        yield Stream(Outlet(file.fileno(), is_open=True), "utf-8", line_buffering=False), path


def test_what_libraries_print_is_shown_and_not_obeyed(
    piped: tuple[Stream, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, path = piped
    monkeypatch.setattr(sys, "stderr", stream)
    name = "layer \x1b]8;;http://x\x07a\x9b31mb\u202ec\rd\u2028e\tf"
    sys.stderr.write(warnings.formatwarning(name, UserWarning, "library.py", 1))
    print("\r 50 %|#####     |\x1b[31m red\x1b[0m", end="", file=stream)
    stream.flush()
    said = path.read_bytes().decode()
    assert r"layer \x1b]8;;http://x\x07a\x9b31mb\u202ec\rd\u2028e" + "\tf" in said
    assert said.endswith("\r 50 %|#####     | red")


def test_rich_may_move_the_cursor_where_others_may_not(
    piped: tuple[Stream, Path],
) -> None:
    stream, path = piped
    assert AsIs(stream).write("\x1b[1A") == 4
    assert AsIs(stream).encoding == "utf-8"
    stream.write("\x1b[1A")
    stream.flush()
    assert path.read_bytes() == b"\x1b[1A" + rb"\x1b[1A"


def test_a_pipe_that_takes_little_at_a_time_gets_all() -> None:
    """Its other end has set it to O_NONBLOCK, as some runners of jobs do."""
    import threading

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream = Stream(Outlet(writer, is_open=True), "utf-8", line_buffering=False)
    found: list[bytes] = []

    def read() -> None:
        while part := os.read(reader, 1 << 12):
            found.append(part)

    reading = threading.Thread(target=read)
    reading.start()
    stream.write("x" * 300_000)
    stream.flush()
    os.close(writer)
    reading.join()
    os.close(reader)
    assert b"".join(found) == b"x" * 300_000

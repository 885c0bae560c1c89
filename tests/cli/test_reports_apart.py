"""stdout holds the record and nothing else, whatever user code and C libraries print there."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_commands import CLOSED, Commands
from support.onnx_models import gemm, save, weights

from twofour.cli.console import reports_apart, show_text

WAYS = ("print", "__stdout__", "descriptor", "library", "child")
NOISY = """
import ctypes, os, subprocess, sys
import numpy as np
def say(where):
    print("{mark} by print", where)
    print("{mark} by __stdout__", where, file=sys.__stdout__, flush=True)
    os.write(1, b"{mark} by descriptor\\n")
    libc = ctypes.CDLL(None)
    libc.printf(b"{mark} by library\\n")
    libc.fflush(None)
    subprocess.run([sys.executable, "-S", "-c", "print('{mark} by child')"], check=True)
say("when it is imported")
def batches():
    say("when it is called")
    yield np.ones((4, 16), np.float32)
"""


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as made:
        yield made


def test_prints_of_user_code_go_to_stderr_however_they_are_made(
    commands: Commands, tmp_path: Path
) -> None:
    save(gemm(weights(8, 16), trans_b=1), tmp_path / "m.onnx")
    (tmp_path / "noisy.py").write_text(NOISY.format(mark="noise"))
    ended = commands.run(
        *("prune", "m.onnx", "--calibrate", "noisy.py:batches", "--json", "--out", "run"),
        cwd=tmp_path,
    )
    assert ended.code == 0, ended.said
    assert json.loads(ended.shown)["method"] == "admm"
    assert "noise" not in ended.shown
    for way in WAYS:
        assert f"noise by {way}" in ended.said


def test_where_stdout_is_closed_they_go_nowhere_else(commands: Commands, tmp_path: Path) -> None:
    save(gemm(weights(8, 16), trans_b=1), tmp_path / "m.onnx")
    ended = commands.run("validate", "m.onnx", "--json", cwd=tmp_path, stdout=CLOSED)
    assert (ended.code, ended.shown) == (4, "")


def test_reports_have_stdout_to_themselves_within_the_block_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with reports_apart():
        sys.stdout.write("talk")
        show_text("report\n")
    sys.stdout.write("later")
    assert out.getvalue().split() == ["report", "later"]
    assert err.getvalue() == "talk"

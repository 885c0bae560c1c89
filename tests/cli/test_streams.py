"""What stdout and stderr of a command hold, and what becomes of it where nobody reads."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support.onnx_models import gemm, save, weights

from twofour.cli.console import Stream

COMMAND = (sys.executable, "-m", "twofour")
WAYS = ("print", "__stdout__", "descriptor", "library", "child")
NOISY = """
import ctypes, os, subprocess, sys
import numpy as np
def say(where):
    print("noise by print", where)
    print("noise by __stdout__", where, file=sys.__stdout__, flush=True)
    os.write(1, b"noise by descriptor\\n")
    libc = ctypes.CDLL(None)
    libc.printf(b"noise by library\\n")
    libc.fflush(None)
    subprocess.run([sys.executable, "-S", "-c", "print('noise by child')"], check=True)
say("when it is imported")
def batches():
    say("when it is called")
    yield np.ones((4, 16), np.float32)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One dense Gemm."""
    return save(gemm(weights(64, 16), trans_b=1), tmp_path / "m.onnx")


def test_a_reader_that_goes_away_and_a_full_disk_end_in_their_codes(
    model: Path, tmp_path: Path
) -> None:
    validate = " ".join((*COMMAND, "validate", str(model), "--json"))
    prune = " ".join((*COMMAND, "prune", str(model), "--out", str(tmp_path / "run")))
    script = f"{validate} | true; echo ${{PIPESTATUS[0]}}"
    for command in (validate, prune):
        script += f"; {command} >/dev/full; echo $?"
    done = subprocess.run(["bash", "-c", script], check=False, capture_output=True, text=True)
    assert done.stdout.split() == ["4", "4", "2"]
    assert done.stderr.count("cannot write to stdout") == 2
    assert "Traceback" not in done.stderr


def test_prints_of_user_code_go_to_stderr_however_they_are_made(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    done = subprocess.run(
        [*COMMAND, "prune", model, "--calibrate", "noisy.py:batches", "--json", "--out", "run"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "admm"
    assert "noise" not in done.stdout
    for way in WAYS:
        assert f"noise by {way}" in done.stderr


def test_what_libraries_print_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    name = "layer \x1b]8;;http://x\x07a\x9b31mb\u202ec\rd\u2028e\tf"
    path = tmp_path / "written"
    with path.open("wb") as file:
        stream = Stream(file.fileno(), "utf-8")
        stream.write(warnings.formatwarning(name, UserWarning, "library.py", 1))
        print("\r 50 %|#####     |\x1b[31m red\x1b[0m", end="", file=stream)
        stream.flush()
    said = path.read_bytes().decode()
    assert r"layer \x1b]8;;http://x\x07a\x9b31mb\u202ec\rd\u2028e" + "\tf" in said
    assert said.endswith("\r 50 %|#####     | red")

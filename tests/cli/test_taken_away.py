"""What a machine takes away from a running command: a file that it has mapped, memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from twofour.cli.guard import guarded

_COMMAND = """
import os, sys
import numpy as np
from twofour.cli.guard import guarded

@guarded
def command() -> None:
    mapped = np.memmap(sys.argv[1], np.uint8, "r")
    assert mapped[-1] == 1
    os.truncate(sys.argv[1], 0)
    {read}

command()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    "read",
    [
        "mapped.sum()",
        "import threading; one = threading.Thread(target=mapped.sum); one.start(); one.join()",
    ],
)
def test_it_ends_in_a_message_and_the_code_of_bad_input(tmp_path: Path, read: str) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"\1" * 1_000_000)
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND.format(read=read), str(file)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: a file was cut short while it was read")
    assert done.stderr.splitlines()[1].startswith("hint: ")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 4.00 TiB for an array"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_a_lack_of_memory_is_no_bug(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    @guarded
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == 2
    told = capsys.readouterr().err
    assert told.startswith("error: memory ran out: ")
    assert "the same command goes on from here" in told.replace("\n", " ")

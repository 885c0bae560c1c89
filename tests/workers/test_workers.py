"""A worker process as its parent sees it: answers, errors, death, silence, and who ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.stand_in_worker import SERVICE

from twofour.engines.machine import family_s
from twofour.errors import BadInputError, BuildFailedError
from twofour.workers.process import (
    LIMIT_VARIABLE,
    IdleClock,
    WorkerDiedError,
    WorkerProcess,
    is_out_of_memory,
    may_be_temporary,
)

POSIX = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def living() -> Iterator[WorkerProcess]:
    """For tests that leave it alive."""
    with WorkerProcess(SERVICE, 1) as process:
        yield process


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    with WorkerProcess(SERVICE, 1) as process:
        yield process


def test_our_errors_come_back_with_their_kind_and_hint(living: WorkerProcess) -> None:
    with pytest.raises(BadInputError) as caught:
        living.call("refuse")
    assert (caught.value.message, caught.value.hint) == ("wrong shape", "use another")
    assert living.call("add", 1, 1) == 2


def test_other_errors_come_back_as_a_failed_build_in_one_line(living: WorkerProcess) -> None:
    with pytest.raises(BuildFailedError, match=r"^ZeroDivisionError: by zero$"):
        living.call("crash")
    with pytest.raises(BuildFailedError, match=r"^out of memory$") as caught:
        living.call("exhaust")
    assert not isinstance(caught.value, WorkerDiedError)


def test_arrays_beyond_what_a_pipe_holds_go_through(living: WorkerProcess) -> None:
    assert living.call("size", np.zeros((300, 1000))) == 300_000


def test_progress_comes_while_the_command_runs_and_before_its_value(living: WorkerProcess) -> None:
    told: list[tuple[str, int, int | None]] = []
    assert living.call("steps", 3, report=lambda *step: told.append(step)) == "built"
    assert told == [("building", 1, 3), ("building", 2, 3), ("building", 3, 3)]


def test_a_worker_that_dies_is_an_error_with_its_last_words(worker: WorkerProcess) -> None:
    with pytest.raises(BuildFailedError) as caught:
        worker.call("no_such_command")
    assert "with code 1" in caught.value.message
    assert "no_such_command" in caught.value.message


@POSIX
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_a_death_has_its_signal_and_is_no_result(worker: WorkerProcess, name: str) -> None:
    with pytest.raises(WorkerDiedError, match=f"its process was ended by {name}") as caught:
        worker.call("die", signal.Signals[name].value, "")
    assert caught.value.ending == name
    assert may_be_temporary(caught.value.message)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("std::bad_alloc", True),
        ("Failed to allocate memory for requested buffer of size 8589934592", True),
        ("[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)", True),
        ("OutOfMemory (Requested size was 4294967296 bytes.)", True),
        ("out of memory", True),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", True),
        ("BFCArena: Available memory of 0 is smaller than requested bytes of 4096", True),
        ("Requested amount of GPU memory (8 bytes) could not be allocated", True),
        ("Unable to allocate 4.00 GiB for an array with shape (1024,)", True),
        ("an illegal memory access was encountered", False),
        ("Could not find an implementation for LSTM(14)", False),
    ],
)
def test_messages_of_memory_are_known(text: str, expected: bool) -> None:
    assert is_out_of_memory(text) is expected
    assert may_be_temporary(text) is expected


def test_threads_are_in_the_environment_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for asked, expected in ((3, "3"), (None, None)):
        with WorkerProcess(SERVICE, asked) as process:
            assert process.call("threads") == expected


@LINUX
@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_stopped_worker_is_ended_after_its_time(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """With much to send, too: a stopped process empties no pipe."""
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    with WorkerProcess(SERVICE, 1) as process:
        assert process.call("add", 1, 1) == 2
        os.kill(process.number, signal.SIGSTOP)
        with pytest.raises(WorkerDiedError, match="sign of life"):
            process.call("size", np.zeros(size))
        assert not _alive(process.number)


@LINUX
def test_a_worker_that_works_is_left_to_it_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.6")
    with WorkerProcess(SERVICE, 1) as process:
        assert process.call("work", 2.0) == "done"


@LINUX
def test_a_death_is_noticed_while_a_child_holds_the_pipe_and_the_child_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    with WorkerProcess(SERVICE, 1) as process:
        with pytest.raises(WorkerDiedError, match="ended by SIGKILL"):
            process.call("fork_and_die", tmp_path / "child")
        _wait_until(lambda: not _alive(int((tmp_path / "child").read_text())))


@LINUX
def test_the_work_of_children_counts() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    parent = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        _wait_until(lambda: (family_s(parent.pid) or 0) > 0.2)
        before = family_s(parent.pid) or 0
        _wait_until(lambda: (family_s(parent.pid) or 0) > before + 0.1)
        assert (family_s(parent.pid) or 0) > 0.3
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def silence_after(*steps: tuple[float, float | None]) -> list[bool]:
    """What is said at each look: seconds since the last one, and processor time used until then."""
    now_s, used_s = 0.0, 0.0
    silence = IdleClock(1, used_s=lambda _: used_s, clock=lambda: now_s)
    silence.limit_s = 60.0
    said = []
    for passed_s, used in steps:
        now_s, used_s = now_s + passed_s, used  # type: ignore[assignment]
        said.append(silence.too_long())
    return said


def test_who_uses_next_to_nothing_is_silent_and_who_uses_little_is_not() -> None:
    looks = 200
    idle = [(5.0, 0.0003 * 5 * look) for look in range(looks)]
    assert silence_after(*idle).index(True) == 13  # 60 s after the first look
    slow = [(5.0, 0.002 * 5 * look) for look in range(looks)]
    assert not any(silence_after(*slow))
    assert not any(silence_after(*[(5.0, None)] * looks))  # the system does not tell


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """This process was stopped, or the machine asleep, and its worker with it."""
    assert silence_after((5.0, 1.0), (3600.0, 1.0), (5.0, 1.0)) == [False, False, False]


def test_the_time_without_a_sign_can_be_set_and_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert IdleClock(os.getpid()).limit_s == 300
    for text, expected in (("20", 20.0), ("0", float("inf")), ("soon", 300.0)):
        monkeypatch.setenv(LIMIT_VARIABLE, text)
        assert IdleClock(os.getpid()).limit_s == expected


@POSIX
def test_an_interrupted_call_ends_with_its_worker_at_once() -> None:
    started = time.monotonic()
    with WorkerProcess(SERVICE, 1) as process:
        process.call("add", 1, 1)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            process.call("sleep", 60)
    assert not _alive(process.number)
    assert time.monotonic() - started < 30


_PARENT = """
import sys
from twofour.workers.process import WorkerProcess
worker = WorkerProcess({service!r}, 1)
worker.call("add", 1, 1)
print(worker.number, flush=True)
worker.call("sleep", 60)
"""


@LINUX
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_worker_inside_a_long_call_ends_with_its_parent(how: signal.Signals) -> None:
    command = [sys.executable, "-c", _PARENT.format(service=SERVICE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.send_signal(how)
    parent.wait()
    _wait_until(lambda: not _alive(worker))


def test_what_the_parent_would_import_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_user.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, Path("no text"), b"bytes"])
    with WorkerProcess(SERVICE, 1) as process:
        assert process.call("file_of", "of_the_user") == str(tmp_path / "of_the_user.py")


def test_a_process_that_cannot_start_is_a_failed_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(BuildFailedError, match="no worker process"):
        WorkerProcess(SERVICE, 1)


def _wait_until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"

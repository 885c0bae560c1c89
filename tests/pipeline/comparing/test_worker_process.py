"""A worker process as its parent sees it: answers, errors, death, and who ends it."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twofour.errors import BadInputError, BuildFailedError
from twofour.pipeline.comparing.process import WorkerProcess
from twofour.pipeline.comparing.worker import serve, settle


class Adder:
    """Commands as a worker has them."""

    def add(self, a: int, b: int) -> int:
        return a + b

    def refuse(self) -> None:
        raise BadInputError("wrong shape", hint="use another")

    def crash(self) -> None:
        raise ZeroDivisionError("by zero\nsecond line")

    def exhaust(self) -> None:
        raise MemoryError


def served(*commands: tuple[str, tuple[object, ...]]) -> list[object]:
    asked = io.BytesIO(b"".join(pickle.dumps((i, *c)) for i, c in enumerate(commands)))
    answers = io.BytesIO()
    serve(Adder(), asked, answers)
    answers.seek(0)
    found = [pickle.load(answers) for _ in commands]
    assert [number for number, _ in found] == list(range(len(commands)))
    return [value for _, value in found]


def test_a_command_answers_with_its_value() -> None:
    assert served(("add", (2, 3)), ("add", (4, 5))) == [5, 9]


def test_our_errors_come_back_with_their_kind_and_hint() -> None:
    (error,) = served(("refuse", ()))
    assert isinstance(error, BadInputError)
    assert (error.message, error.hint) == ("wrong shape", "use another")


def test_other_errors_come_back_as_a_failed_build_in_one_line() -> None:
    crash, memory = served(("crash", ()), ("exhaust", ()))
    assert isinstance(crash, BuildFailedError)
    assert crash.message == "ZeroDivisionError: by zero"
    assert isinstance(memory, BuildFailedError)
    assert memory.message == "out of memory"


def test_a_worker_that_dies_is_an_error_with_its_last_words() -> None:
    with WorkerProcess(1) as process, pytest.raises(BuildFailedError) as caught:
        process.call("no_such_command")
    assert caught.value.message.startswith("its process ended with code 1: AttributeError")
    assert "no_such_command" in caught.value.message


def test_a_worker_that_was_killed_says_what_kills_like_that() -> None:
    with WorkerProcess(1) as process:
        os.kill(process.number, signal.SIGKILL)
        with pytest.raises(BuildFailedError) as caught:
            process.call("memory")
    assert caught.value.message == (
        "its process was ended by SIGKILL, as the system does where memory runs out"
    )


def test_every_call_after_the_death_is_an_error_too() -> None:
    with WorkerProcess(1) as process:
        for _ in range(3):
            with pytest.raises(BuildFailedError, match="its process ended"):
                process.call("no_such_command")


def test_a_worker_gets_the_number_of_threads_in_its_environment() -> None:
    with WorkerProcess(3) as process:
        environment = Path(f"/proc/{process.number}/environ")
        if not environment.is_file():
            pytest.skip("no /proc here")
        assert b"OMP_NUM_THREADS=3" in environment.read_bytes().split(b"\0")


def test_a_worker_ends_when_its_parent_is_killed() -> None:
    code = (
        "from twofour.pipeline.comparing.process import WorkerProcess\n"
        "import time\n"
        "print(WorkerProcess(1).number, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while _alive(worker):
        assert time.monotonic() < deadline, "the worker outlives its parent"
        time.sleep(0.05)


def _alive(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_settling_waits_for_a_busy_process_but_not_for_long() -> None:
    readings: list[float] = []

    def always_busy() -> float:
        readings.append(time.perf_counter())
        return readings[-1]

    settle(always_busy)
    rounds = len(readings) // 2
    assert readings[-1] - readings[0] > 0.015
    assert 1 <= rounds <= 20, "a round sleeps 1 ms or more, and 20 ms is the most"


def test_settling_ends_with_the_first_quiet_round() -> None:
    readings = iter([0.0, 1.0, 2.0, 2.0])  # busy, then quiet
    settle(lambda: next(readings))
    assert next(readings, None) is None, "two rounds, no more and no fewer"

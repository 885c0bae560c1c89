"""Jobs side by side: every one answered once, whatever becomes of the processes."""

from __future__ import annotations

from typing import Any

import pytest

from twofour.budget.pool import MOST_TRIES, LostError, Pool
from twofour.errors import BadInputError, TwofourError

NAME = "support.job_service:JobService"


def _run(command: str, arguments: dict[str, tuple[object, ...]], count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def done(key: str, value: object) -> None:
        assert key not in found
        found[key] = value

    with Pool(NAME, command, count) as pool:
        pool.run(arguments, done)
    return found


def test_every_job_is_answered_once_in_as_many_processes_as_were_asked_for() -> None:
    found = _run("square", {str(i): (i,) for i in range(20)}, 2)
    assert {key: value for key, (value, _) in found.items()} == {str(i): i * i for i in range(20)}
    assert 1 <= len({process for _, process in found.values()}) <= 2


def test_a_job_that_is_refused_ends_in_its_error_and_the_others_go_on() -> None:
    found = _run("refuse_odd", {str(i): (i,) for i in range(4)}, 1)
    assert {k: v for k, v in found.items() if not isinstance(v, TwofourError)} == {"0": 0, "2": 2}
    assert isinstance(found["1"], BadInputError)
    assert found["3"].message == "3 is odd"


def test_a_job_whose_process_ends_is_tried_again_and_told_how_often() -> None:
    found = _run("die_before", {"lives": (0,), "once": (1,), "always": (9,)}, 1)
    assert (found["lives"], found["once"]) == (0, 1)
    assert isinstance(found["always"], LostError)
    assert found["always"].message == f"its process ended in {MOST_TRIES} tries: SIGKILL"


def test_a_bug_in_a_service_is_an_error_of_its_job() -> None:
    found = _run("square", {"a": ("text",)}, 1)
    assert "TypeError" in found["a"].message


def test_an_interrupt_ends_the_processes() -> None:
    def stop(_key: str, _value: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Pool(NAME, "square", 1) as pool:
        pool.run({str(i): (i,) for i in range(3)}, stop)


def test_processes_are_kept_from_one_run_to_the_next() -> None:
    seen: dict[str, Any] = {}
    with Pool(NAME, "square", 1) as pool:
        for number in range(3):
            pool.run({str(number): (number,)}, seen.__setitem__)
    assert [seen[str(i)][0] for i in range(3)] == [0, 1, 4]
    assert len({process for _, process in seen.values()}) == 1

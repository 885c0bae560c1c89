"""Forwards side by side: who waits where, and what happens when one fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import pytest

from twofour.pruning.lock_step import LockStep

ORDER = {"a": 0, "b": 1, "c": 2}


def settled(ways: Sequence[str]) -> list[tuple[str, list[int]]]:
    """What each place saw, where forward i comes to the places of `ways[i]`."""
    seen: list[tuple[str, list[int]]] = []
    together = LockStep[int](lambda place, found: seen.append((place, [*found])), ORDER)

    def forward(number: int, way: str) -> None:
        for place in way:
            together.wait(place, number)

    together.run([partial(forward, number, way) for number, way in enumerate(ways)])
    return seen


def test_every_place_sees_all_forwards_at_once_and_in_their_order() -> None:
    assert settled(["abc", "abc", "abc"]) == [(p, [0, 1, 2]) for p in "abc"]


def test_forwards_that_skip_a_place_are_not_waited_for() -> None:
    assert settled(["abc", "ac", "c", ""]) == [("a", [0, 1]), ("b", [0]), ("c", [0, 1, 2])]


def test_a_place_is_settled_once_and_later_visits_pass() -> None:
    assert settled(["ab", "ba"]) == [("a", [0]), ("b", [0, 1])]


def test_no_forwards_settle_nothing() -> None:
    assert settled([]) == []


def test_what_a_forward_does_after_a_place_sees_the_decision_made_there() -> None:
    decided: dict[str, int] = {}
    results: list[int] = []
    together = LockStep[int](lambda place, found: decided.update({place: sum(found)}), ORDER)

    def forward(value: int) -> None:
        together.wait("a", value)
        together.wait("b", value * decided["a"])
        results.append(decided["b"])

    together.run([partial(forward, value) for value in (1, 2, 3)])
    assert decided == {"a": 6, "b": 36}
    assert results == [36, 36, 36]


def test_an_error_in_one_forward_is_raised_and_ends_the_others() -> None:
    before = threading.active_count()
    ended: list[str] = []
    together = LockStep[int](lambda _place, _found: None, ORDER)

    def waits() -> None:
        try:
            together.wait("a", 0)
        finally:
            ended.append("unwound")

    def fails() -> None:
        raise ValueError("in a forward")

    with pytest.raises(ValueError, match="in a forward"):
        together.run([waits, waits, fails, waits])
    assert ended == ["unwound", "unwound"]
    assert threading.active_count() == before


def test_an_error_where_a_place_is_settled_ends_all() -> None:
    def settle(_place: str, _found: Sequence[int]) -> None:
        raise ZeroDivisionError

    together = LockStep[int](settle, ORDER)
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        together.run([lambda: together.wait("a", 1)])
    assert threading.active_count() == before

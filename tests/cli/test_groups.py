"""Options that belong together are one parameter of a command."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from twofour.cli.groups import with_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Paint:
    """A group, one field of which is called as the parameter that it stands for."""

    colour: str
    paint: int = 2


@with_groups
def house(name: str, *, paint: Paint, rooms: int = 1) -> tuple[str, Paint, int]:
    return name, paint, rooms


def test_a_command_shows_the_options_of_a_group_in_its_place() -> None:
    shown = inspect.signature(house).parameters
    assert list(shown) == ["name", "colour", "paint", "rooms"]
    assert shown["colour"].default is inspect.Parameter.empty
    assert (shown["paint"].default, shown["paint"].annotation) == (2, int)


def test_a_command_gets_the_group_made_of_its_options() -> None:
    assert house(name="a", colour="red", paint=3, rooms=4) == ("a", Paint(colour="red", paint=3), 4)

"""Half a character in a JSON text, which no file can hold, is replaced; whole ones stay."""

from __future__ import annotations

import json

import pytest

from twofour.logs.prefix import loads


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"a\ud800b"', "a\ufffdb"),
        (r'"\udc00\ud83d\ude00\ud83d"', "\ufffd\U0001f600\ufffd"),
        (r'"\uD83D\uDE00"', "\U0001f600"),
        (r'{"\ud800": ["\u00e9"]}', {"\ufffd": ["\u00e9"]}),
        ('"plain"', "plain"),
    ],
)
def test_halves_are_replaced_and_whole_characters_stay(text: str, value: object) -> None:
    assert loads(text) == value
    json.dumps(loads(text), ensure_ascii=False).encode()


def test_damage_is_told_as_json_tells_it() -> None:
    with pytest.raises(json.JSONDecodeError):
        loads("{")

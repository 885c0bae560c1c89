"""Lines of structured loggers: a JSON object, or pairs `key=value` (logfmt), as fields."""

from __future__ import annotations

import re
from collections.abc import Iterator

from twofour.engines.buildlog.json_text import loads

_PAIR = re.compile(
    r"(?:^|(?<=[\s{,]))([A-Za-z_@][\w.@-]{0,40})="
    r"(?:\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'|([^\s\"']*))"
)
_LEVEL_KEYS = frozenset(("level", "levelname", "severity", "lvl", "loglevel", "log_level"))
_DEEPEST = 3


def fields_of(line: str) -> dict[str, str] | None:
    """Texts by their keys (`a.b` inside an object); None for a line of any other form."""
    text = line.strip()
    if text[:1] == "{" and text[-1:] == "}":
        return _of_json(text)
    if '="' not in text and "='" not in text:
        return None
    return {
        key: _unescaped(double) if double else single or bare
        for key, double, single, bare in _PAIR.findall(text)
    }


def level_in(fields: dict[str, str]) -> str:
    """The level that the fields state, in the logger's own word."""
    keys = (key for key in fields if _LEVEL_KEYS.intersection(key.lower().split(".")))
    return " ".join(fields[key] for key in keys)


def _of_json(text: str) -> dict[str, str] | None:
    try:
        value = loads(text)
    except (ValueError, RecursionError):
        return None
    return dict(_texts(value, "", 0)) if isinstance(value, dict) else None


def _texts(value: dict[str, object], before: str, depth: int) -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, str):
            yield before + key, item
        elif isinstance(item, dict) and depth < _DEEPEST:
            yield from _texts(item, f"{before}{key}.", depth + 1)


def _unescaped(text: str) -> str:
    try:
        value = loads(f'"{text}"')
    except ValueError:
        return text
    return value if isinstance(value, str) else text

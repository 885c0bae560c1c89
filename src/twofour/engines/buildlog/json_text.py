"""JSON as anyone writes it: the texts that come out can be written and printed again."""

from __future__ import annotations

import json
import re

_SURROGATES = re.compile(
    r"\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
"""A pair, which is how JSON spells one character of the higher planes, or half of one."""
_PAIR_LENGTH = 12


def loads(text: str) -> object:
    """json.loads, but half a character (a lone surrogate, which no file can hold) becomes U+FFFD.

    Raises what json.loads raises.
    """
    if "\\u" in text:
        text = _SURROGATES.sub(_whole, text)
    value: object = json.loads(text)
    return value


def _whole(found: re.Match[str]) -> str:
    return found[0] if len(found[0]) == _PAIR_LENGTH else "\\ufffd"

"""The ranges of a file's free sizes, kept in its metadata: ONNX dimensions have only names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from twofour.records.options import SizeRange

_KEY = "twofour.size."
_TEXT = re.compile(r"(\d{1,10})\.\.(\d{1,10})?")


def to_metadata(ranges: Iterable[SizeRange]) -> dict[str, str]:
    """Entries of a model's metadata_props, such as twofour.size.sequence: 1..512."""
    return {_KEY + size.name: _text(size) for size in ranges}


def from_metadata(entries: Mapping[str, str]) -> dict[str, SizeRange]:
    """Range by name of the size; what reads otherwise was written by another tool."""
    found = {}
    for key, text in entries.items():
        match = _TEXT.fullmatch(text) if key.startswith(_KEY) else None
        if match is not None:
            name = key.removeprefix(_KEY)
            largest = None if match[2] is None else int(match[2])
            found[name] = SizeRange(name=name, min=int(match[1]), max=largest)
    return found


def _text(size: SizeRange) -> str:
    largest = "" if size.max is None else size.max
    return f"{size.min}..{largest}"

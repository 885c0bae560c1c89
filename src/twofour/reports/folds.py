"""Rows of layers whose names differ in one number and that say the same: shown as one row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from twofour.reports.document import Fold
from twofour.reports.eligibility_words import name_cell

_NUMBERS = re.compile(r"(\d+)", re.ASCII)
_LONGEST_NUMBER = 9
_Key = tuple[str, str, Hashable]


def folds(rows: Iterable[tuple[str, Hashable]]) -> tuple[Fold, ...]:
    """Rows of one kind whose names differ in one number, in the order of the first.

    A row is its layer's name and what it must have in common with others. Each is in exactly one
    fold.
    """
    named = list(rows)
    keys = [_keys(name, kind) for name, kind in named]
    sizes = Counter(key for options in keys for key in options)
    members: dict[_Key | int, list[int]] = {}
    for index, options in enumerate(keys):
        best = max(options, key=lambda key: sizes[key], default=None)
        key = index if best is None or sizes[best] == 1 else best
        members.setdefault(key, []).append(index)
    return tuple(
        Fold(
            name=name_cell(
                named[at[0]][0]
                if len(at) == 1 or isinstance(key, int)
                else f"{key[0]}{{{_ranges([keys[i][key] for i in at])}}}{key[1]}"
            ),
            rows=tuple(at),
        )
        for key, at in members.items()
    )


def _keys(name: str, kind: Hashable) -> dict[_Key, str]:
    """For each number in the name: what a row along it has in common, and the number."""
    parts = _NUMBERS.split(name)
    return {
        ("".join(parts[:i]), "".join(parts[i + 1 :]), kind): parts[i]
        for i in range(1, len(parts), 2)
    }


def _ranges(numbers: Sequence[str]) -> str:
    """Write 0, 1, 2, 5 as "0-2,5"; numbers with leading zeros or very long ones as they are."""
    distinct = list(dict.fromkeys(numbers))
    if any(len(text) > _LONGEST_NUMBER or text != str(int(text)) for text in distinct):
        return ",".join(distinct)
    spans: list[tuple[int, int]] = []
    for value in sorted(map(int, distinct)):
        if spans and spans[-1][1] == value - 1:
            spans[-1] = (spans[-1][0], value)
        else:
            spans.append((value, value))
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)

"""Repeated layers put into one row: same size, same verdict, names that differ in one number."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from twofour.records.eligibility import Verdict

_NUMBERS = re.compile(r"(\d+)", re.ASCII)
_LONGEST_NUMBER = 9
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table: a layer, or several that differ in one number of their names."""

    name: str
    """"encoder.0.fc1", or "encoder.{0-11}.fc1" for twelve of them."""
    members: tuple[Verdict, ...]

    @property
    def first(self) -> Verdict:
        """The layer whose figures the row shows."""
        return self.members[0]

    @property
    def same_reasons(self) -> bool:
        """Whether the sentences are word for word those of every member."""
        return all(m.reasons == self.first.reasons for m in self.members)


def collapse(verdicts: Sequence[Verdict]) -> tuple[Row, ...]:
    """Rows in the order of their first layers; each verdict is in exactly one row."""
    keys = [_keys(v) for v in verdicts]
    sizes = Counter(key for options in keys for key in options)
    members: dict[_Key, list[Verdict]] = {}
    numbers: dict[_Key, list[str]] = {}
    for index, (verdict, options) in enumerate(zip(verdicts, keys, strict=True)):
        best = max(options, key=lambda key: sizes[key], default=None)
        key = best if best is not None and sizes[best] > 1 else ("alone", index)
        members.setdefault(key, []).append(verdict)
        numbers.setdefault(key, []).append("" if best is None else options[best])
    return tuple(_row(key, tuple(members[key]), numbers[key]) for key in members)


def _keys(verdict: Verdict) -> dict[_Key, str]:
    """For each number in the name: what a row along it has in common, and the number."""
    parts = _NUMBERS.split(verdict.layer)
    common = (
        *(verdict.op, verdict.in_channels, verdict.out_channels, verdict.kernel, verdict.groups),
        *(verdict.dtype, verdict.pattern_holds, verdict.verdict, verdict.predicted),
        *(verdict.evidence, verdict.remedy, tuple(r.code for r in verdict.reasons)),
    )
    return {
        ("".join(parts[:i]), "".join(parts[i + 1 :]), common): parts[i]
        for i in range(1, len(parts), 2)
    }


def _row(key: _Key, members: tuple[Verdict, ...], numbers: list[str]) -> Row:
    if len(members) == 1:
        return Row(name=members[0].layer, members=members)
    return Row(name=f"{key[0]}{{{_ranges(numbers)}}}{key[1]}", members=members)


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

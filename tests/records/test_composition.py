"""Records are composed: what two of them share is stated once."""

from __future__ import annotations

import dataclasses
import importlib
from itertools import combinations
from typing import Any

from twofour.records import SUBJECTS

RECORDS: list[type[Any]] = [
    kind
    for module in [importlib.import_module(f"twofour.records.{name}") for name in SUBJECTS]
    for kind in vars(module).values()
    if isinstance(kind, type)
    and dataclasses.is_dataclass(kind)
    and kind.__module__ == module.__name__
    and kind.__name__ != "VariantLatency"
]
ALIKE = 3
"""Fields of one name and type that two records may not state both."""


def _stated(kind: type[Any]) -> set[tuple[str, str]]:
    """Fields that the record adds to those it inherits, with their types."""
    return {(n, t) for n, t in vars(kind)["__annotations__"].items() if n != "schema_version"}


def test_no_two_records_state_the_same_fields() -> None:
    alike = {
        f"{one.__name__} and {other.__name__}": sorted(_stated(one) & _stated(other))
        for one, other in combinations(RECORDS, 2)
    }
    assert {pair: both for pair, both in alike.items() if len(both) >= ALIKE} == {}

"""Myelin's tables of sorted tactics (TensorRT 10): the only timings inside a ForeignNode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_TAG = "(foreignNode)"
REGION = "ForeignNode {"
METADATA = " metadata: "
"""`ForeignNode {ForeignNode[a...b]} metadata: [ONNX Layer: a][ONNX Layer: c]`."""
_OP = "Autotuning op "
_NAME_END = re.compile(r": (?=\[)|:?\s*$")


class ForeignRow(NamedTuple):
    """One tactic in a table."""

    kernel: str
    tactic: str
    ms: float
    message: str
    line: int


class ForeignTables:
    """Follows the tables line by line."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.metadata = ""
        """What the line that names the operation says of the nodes it is made of."""
        self._columns: dict[str, int] = {}

    def feed(self, message: str, line: int) -> ForeignRow | None:
        """The tactic where the message is a row of the operation `name`."""
        text = message.partition(_TAG)[2].strip()
        if text[:1].isdigit():
            return None if self.name is None else self._row(text, message, line)
        if text.startswith(_OP):
            self.name, self.metadata, *_ = (*_NAME_END.split(text[len(_OP) :], maxsplit=1), "")
            self.name = self.name.strip()
            self._columns = {}
        elif "kernel_name" in text and "cost" in text:
            names = [column.strip() for column in text.split(",")]
            self._columns = dict(_numbered(names))
        return None

    def _row(self, text: str, message: str, line: int) -> ForeignRow | None:
        cells = text.split(", ")
        columns = self._columns
        try:
            kernel = cells[columns["kernel_name"]]
            cost = float(cells[columns["cost"]])
            tactic = cells[columns.get("tactic_hash", columns["tactic_id"])]
        except (KeyError, IndexError, ValueError):
            return None
        return ForeignRow(kernel, tactic.strip(" ,"), cost, message, line)


def _numbered(names: list[str]) -> Iterator[tuple[str, int]]:
    for place, name in enumerate(names):
        yield ("cost" if name.startswith("cost(") else name), place

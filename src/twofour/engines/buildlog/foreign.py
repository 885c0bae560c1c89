"""Myelin's tables of sorted tactics (TensorRT 10): the only timings inside a ForeignNode."""

from __future__ import annotations

import re
from collections.abc import Iterator

_TAG = "(foreignNode)"
REGION = "ForeignNode {"
METADATA = " metadata: "
"""`ForeignNode {ForeignNode[a...b]} metadata: [ONNX Layer: a][ONNX Layer: c]`."""
_OP = "Autotuning op "
_NAME_END = re.compile(r": (?=\[)|:?\s*$")


class ForeignTables:
    """Follows the tables line by line."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.metadata = ""
        """What the line that names the operation says of the nodes it is made of."""
        self._columns: dict[str, int] = {}

    def feed(self, message: str, line: int) -> tuple[str, list[tuple[str, str, float, int]]] | None:
        """The operation and one row (kernel, number, ms, line) where the message is a row."""
        text = message.partition(_TAG)[2].strip()
        if text[:1].isdigit():
            row = self._row(text, line)
            return None if row is None or self.name is None else (self.name, [row])
        if text.startswith(_OP):
            self.name, self.metadata, *_ = (*_NAME_END.split(text[len(_OP) :], maxsplit=1), "")
            self.name = self.name.strip()
            self._columns = {}
        elif "kernel_name" in text and "cost" in text:
            names = [column.strip() for column in text.split(",")]
            self._columns = dict(_numbered(names))
        return None

    def _row(self, text: str, line: int) -> tuple[str, str, float, int] | None:
        cells = text.split(", ")
        columns = self._columns
        try:
            kernel = cells[columns["kernel_name"]]
            cost = float(cells[columns["cost"]])
            tactic = cells[columns.get("tactic_hash", columns["tactic_id"])]
        except (KeyError, IndexError, ValueError):
            return None
        return kernel, tactic.strip(" ,"), cost, line


def _numbered(names: list[str]) -> Iterator[tuple[str, int]]:
    for place, name in enumerate(names):
        yield ("cost" if name.startswith("cost(") else name), place

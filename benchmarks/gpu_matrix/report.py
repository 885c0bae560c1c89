"""The JSON while it grows, on stdout and in a file."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_matrix.figures import SAMPLES
from gpu_matrix.plan import KernelCase, Order, settled
from gpu_matrix.rows import Row, short


@dataclass
class ChildState:
    """What the child was at when last heard of."""

    case: int | None = None
    variant: str | None = None


@dataclass
class Report:
    """The JSON while it grows, and where it is kept."""

    data: Row
    path: Path | None
    order: Order
    saved: float = 0.0

    def take(self, message: tuple[Any, ...], state: ChildState) -> None:
        """One message of the child into the report."""
        kind, *rest = message
        if kind == "environment":
            self.data["environment"] = rest[0]
        elif kind == "clocks":
            self.data["clocks"].append(rest[0])
        elif kind == "begin":
            state.case, state.variant = rest[0], None
        elif kind == "try":
            state.variant = rest[0]
        elif kind == "uncapturable":
            self.order = replace(self.order, uncapturable=(*self.order.uncapturable, tuple(rest)))
        elif kind == "row":
            self.settle(rest[0], rest[1])
            state.case = None
        elif kind == "skip":
            case = self.order.plan[rest[0]]
            self.data["skipped"].append(case.row() | {"reason": rest[1]})
            self.order = settled(self.order, rest[0])

    def settle(self, index: int, row: Row) -> None:
        """A case is done, one way or another."""
        case = self.order.plan[index]
        self.data["kernels" if isinstance(case, KernelCase) else "models"].append(row)
        self.order = settled(self.order, index)
        print(headline(row), file=sys.stderr, flush=True)
        if time.monotonic() - self.saved > 10:
            self.save()

    def save(self) -> None:
        """To the file, whole or not at all."""
        self.saved = time.monotonic()
        if self.path is not None:
            temporary = self.path.with_name(f".{self.path.name}.part")
            temporary.write_text(self.line(samples=True) + "\n", encoding="utf-8")
            temporary.replace(self.path)

    def line(self, *, samples: bool) -> str:
        """The report as one line, with every sample or with the figures alone."""
        self.data["spent_s"] = short(time.monotonic() - self.order.started)
        data = self.data if samples else without_samples(self.data)
        return json.dumps(data, separators=(",", ":"), allow_nan=False, default=str)


def without_samples(value: Any) -> Any:
    """A copy of a part of the JSON that lacks the samples."""
    if isinstance(value, dict):
        return {key: without_samples(part) for key, part in value.items() if key != SAMPLES}
    return [without_samples(part) for part in value] if isinstance(value, list) else value


def headline(row: Row) -> str:
    """A case in a line: the device ratio of each variant."""
    names = ("dtype", "inputs", "outputs", "rows", "model", "shape", "batch")
    words = [f"{row[name]}" for name in names if name in row]
    for variant in row.get("variants", ()):
        figures = variant.get("device", {})
        value = figures.get("ratio", figures.get("median_ms"))
        said = variant.get("verdict") or (f"{value:.3f}" if value is not None else "error")
        words.append(f"{variant['variant']}={said}")
    return " ".join(words + ([row["error"]] if "error" in row else []))

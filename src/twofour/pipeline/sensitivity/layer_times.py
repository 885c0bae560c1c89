"""Times of layers with and without sparse kernels, as the user names them for --profile."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twofour.errors import BadInputError
from twofour.pipeline.reporting import report_folder
from twofour.records.eligibility import EligibilityReport

PROFILE_HINT = (
    'name a run folder with a build of TensorRT, or write {"layer": [dense_ms, sparse_ms], ...}, '
    "or lines of CSV: layer, dense_ms, sparse_ms"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """What one file or run folder says."""

    source: str
    of: Mapping[str, tuple[float, float]]
    """Layer, weight or node -> dense and sparse milliseconds."""


def read_times(path: Path) -> LayerTimes:
    """Those of a run folder, an eligibility.json, or JSON or CSV; raises BadInputError."""
    return LayerTimes(source=str(path), of=_read(path))


def _read(path: Path) -> dict[str, tuple[float, float]]:
    if path.is_dir():
        return _of_report(report_folder(path), path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"--profile: cannot read {path}: {error}", hint=PROFILE_HINT) from None
    if text.lstrip()[:1] == "{":
        return _of_json(text, path)
    return _of_rows(csv.reader(text.splitlines(), skipinitialspace=True), path)


def _of_report(report: EligibilityReport, path: Path) -> dict[str, tuple[float, float]]:
    """From the fastest tactics of both kinds, where the builder timed both."""
    found = {}
    for verdict in report.verdicts:
        if verdict.sparse_ms is not None and verdict.dense_ms is not None:
            for name in (verdict.layer, verdict.node):
                if name is not None:
                    found[name] = (verdict.dense_ms, verdict.sparse_ms)
    if not found:
        raise BadInputError(
            f"--profile {path}: no layer there has times of a dense and a sparse kernel",
            hint="they come from the verbose log of a TensorRT build with sparse weights allowed",
        )
    return found


def _of_json(text: str, path: Path) -> dict[str, tuple[float, float]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"--profile: {path} is no JSON: {error}", hint=PROFILE_HINT) from error
    if isinstance(value, dict) and isinstance(value.get("verdicts"), list):
        from twofour.store import from_json

        return _of_report(from_json(EligibilityReport, text), path)
    rows = (
        [name, *times] if isinstance(times, list) else [name, times]
        for name, times in value.items()
    )
    return _of_rows(rows, path)


def _of_rows(rows: Iterable[Sequence[object]], path: Path) -> dict[str, tuple[float, float]]:
    """Name, dense and sparse milliseconds; a first row of headings is left out."""
    found: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        if not row:
            continue
        times = tuple(map(_milliseconds, row[1:3]))
        if len(row) < 3 or None in times:
            if number == 0 and all(isinstance(cell, str) for cell in row):
                continue
            raise BadInputError(
                f"--profile: {path}: {', '.join(map(str, row))[:200]}", hint=PROFILE_HINT
            )
        dense, sparse = times
        assert dense is not None
        assert sparse is not None
        found[str(row[0])] = (dense, sparse)
    if not found:
        raise BadInputError(f"--profile: {path} has no times", hint=PROFILE_HINT)
    return found


def _milliseconds(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever a file holds
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number >= 0 else None

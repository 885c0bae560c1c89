"""Times of layers with and without sparse kernels, as the user names them for --profile."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from twofour.errors import BadInputError
from twofour.logs.layer_info import read_profile
from twofour.pipeline.emitting import is_emitted_folder
from twofour.pipeline.folder import is_run_folder
from twofour.pipeline.reporting import report_folder
from twofour.pipeline.stages import DENSE, SPARSE
from twofour.records.eligibility import EligibilityReport

PROFILE_HINT = (
    'name a folder with a build of TensorRT, or write {"layer": [dense_ms, sparse_ms], ...}, '
    "or lines of CSV: layer, dense_ms, sparse_ms"
)
_PROFILES = tuple(f"{variant}.profile.json" for variant in (DENSE, SPARSE))
_Pairs = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """What one file or folder says, in milliseconds by layer, weight, node or engine layer."""

    source: str
    dense: Mapping[str, float]
    sparse: Mapping[str, float]


def read_times(path: Path) -> LayerTimes:
    """Those of a folder with a build, an eligibility.json, JSON or CSV; raises BadInputError.

    Of a build the fastest tactics of both kinds count, else the profiles of both engines.
    """
    if path.is_dir():
        return _of_folder(path)
    return _of_pairs(_of_file(path), path)


def _of_pairs(pairs: _Pairs, path: Path) -> LayerTimes:
    dense, sparse = ({name: both[at] for name, both in pairs.items()} for at in (0, 1))
    return LayerTimes(source=str(path), dense=dense, sparse=sparse)


def _of_folder(path: Path) -> LayerTimes:
    has_profiles = all((path / name).is_file() for name in _PROFILES)
    if is_run_folder(path) or is_emitted_folder(path) or not has_profiles:
        pairs = _of_tactics(report_folder(path))
        if pairs or not has_profiles:
            return _of_pairs(pairs or _refused(path), path)
    dense, sparse = (_of_profile(path / name) for name in _PROFILES)
    return LayerTimes(source=str(path), dense=dense, sparse=sparse)


def _of_profile(path: Path) -> dict[str, float]:
    """Average milliseconds of one run by name; engine layers of one name together."""
    found: dict[str, float] = defaultdict(float)
    profile = read_profile(path)
    for row in profile.layers:
        average = row.average_ms
        if average is None and row.total_ms is not None and profile.iterations:
            average = row.total_ms / profile.iterations
        if average is not None:
            found[row.name] += average
    return dict(found)


def _of_file(path: Path) -> _Pairs:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"--profile: cannot read {path}: {error}", hint=PROFILE_HINT) from None
    if text.lstrip()[:1] == "{":
        return _of_json(text, path)
    if text.lstrip()[:1] == "[":
        raise BadInputError(
            f"--profile: {path} is a list, as the profile of one engine is: what is saved is the "
            "difference of two",
            hint=f"name a folder with {' and '.join(_PROFILES)}",
        )
    return _of_rows(csv.reader(text.splitlines(), skipinitialspace=True), path)


def _of_tactics(report: EligibilityReport) -> _Pairs:
    """Of the fastest of both kinds, where the builder timed both; by node where there is one.

    Layers that are one in the engine (q, k and v) were timed once: each has an equal part.
    """
    timed = [v for v in report.verdicts if v.sparse_ms is not None and v.dense_ms is not None]
    together = Counter((v.engine_layer, v.dense_ms, v.sparse_ms) for v in timed)
    found: _Pairs = {}
    for v in timed:
        assert v.dense_ms is not None
        assert v.sparse_ms is not None
        parts = 1 if v.engine_layer is None else together[v.engine_layer, v.dense_ms, v.sparse_ms]
        found[v.node or v.layer] = (v.dense_ms / parts, v.sparse_ms / parts)
    return found


def _refused(path: Path) -> NoReturn:
    raise BadInputError(
        f"--profile {path}: no layer there has times of a dense and a sparse kernel",
        hint="they come from the verbose log of a TensorRT build with sparse weights allowed, or "
        f"from {' and '.join(_PROFILES)} beside it",
    )


def _of_json(text: str, path: Path) -> _Pairs:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"--profile: {path} is no JSON: {error}", hint=PROFILE_HINT) from error
    if isinstance(value, dict) and isinstance(value.get("verdicts"), list):
        from twofour.store import from_json

        return _of_tactics(from_json(EligibilityReport, text)) or _refused(path)
    rows = (
        [name, *times] if isinstance(times, list) else [name, times]
        for name, times in value.items()
    )
    return _of_rows(rows, path)


def _of_rows(rows: Iterable[Sequence[object]], path: Path) -> _Pairs:
    """Name, dense and sparse milliseconds; a first row of headings is left out."""
    found: _Pairs = {}
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
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and number >= 0 else None

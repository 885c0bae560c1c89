"""The times of single runs as trtexec's --exportTimes writes them.

Source: exportJSONTrace in samples/common/sampleReporting.cpp of NVIDIA/TensorRT, in three forms
from before 8.0 to 10.x. Other keys came and went (inMs, h2dMs, endToEndMs); all have `computeMs`
and `startComputeMs`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from twofour.errors import BadInputError

WARMUP_MS = 200
"""trtexec's --warmUp where it is not given (defaultWarmUp in sampleOptions.h)."""


def read_times(path: Path, *, warmup_ms: float = WARMUP_MS) -> tuple[float, ...]:
    """Milliseconds that the GPU computed for each run behind the warm-up, in order.

    Older releases export the warm-up too; as in trtexec's own summary, the first run that starts
    behind it is the first to count. Raises BadInputError for a file that cannot be read or holds no
    time.
    """
    rows = _rows(path)
    first = next((n for n, row in enumerate(rows) if _started(row) >= warmup_ms), len(rows))
    times = tuple(ms for row in rows[first:] if (ms := _number(row, "computeMs")) is not None)
    if not times or min(times) <= 0:
        raise BadInputError(
            f"no times in {path}", hint="trtexec --exportTimes=FILE writes them; run it again"
        )
    return times


def _rows(path: Path) -> list[dict[str, object]]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is damaged: {error}", hint="copy or make it again") from error
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _started(row: dict[str, object]) -> float:
    """From the beginning of the warm-up; a row that does not say is counted as behind it."""
    started = _number(row, "startComputeMs")
    return math.inf if started is None else started


def _number(row: dict[str, object], key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)

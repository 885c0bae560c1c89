"""The rows of the JSON: how numbers, errors and unknown values stand in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def short(value: float) -> float | None:
    """Five significant digits; None for what JSON has no word for."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def attempt(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:  # noqa: BLE001  older versions lack it in many ways
        return None

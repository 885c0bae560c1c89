"""Top-1 agreement: how often two sets of class scores have their largest value in one place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_SCORES = ("logit", "score", "prob", "class")


def top1_agreement(name: str, reference: NDArray[Any], other: NDArray[Any]) -> float | None:
    """Share of rows with the same largest entry along the last axis.

    None where the output holds no class scores: they are floats over at least two classes, one row
    per example, or of any rank where the output's name says so (logits of a language model).
    """
    named = any(word in name.lower() for word in _SCORES)
    scores = reference.ndim == 2 or (named and reference.ndim > 2)
    if not scores or reference.dtype.kind in "iub" or reference.shape[-1] < 2:
        return None
    if not reference.size:
        return None
    same = reference.argmax(axis=-1) == other.argmax(axis=-1)
    return float(np.mean(same))

"""Arrays of every type, memory layout and pattern, for the rule and for what prunes by it."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from twofour.records.weights import Pattern

TWO_FOUR = Pattern(2, 4)
PRUNED_FLOAT8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
FLOAT8 = (
    *PRUNED_FLOAT8, ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz,
    ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz,
)  # fmt: skip
WIDE_FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
FLOATS = (*WIDE_FLOATS, *FLOAT8)
INTEGERS = (np.int8, np.uint8, np.int16, np.int32, np.int64)
TYPES = (*FLOATS, *INTEGERS)
PRUNED_FLOATS = (*WIDE_FLOATS, *PRUNED_FLOAT8)
PRUNED_TYPES = (*PRUNED_FLOATS, *INTEGERS)

patterns = st.integers(2, 32).flatmap(
    lambda m: st.builds(Pattern, st.integers(1, m - 1), st.just(m))
)


def any_layout(draw: st.DrawFn, array: NDArray[Any]) -> NDArray[Any]:
    """The same values in C or Fortran order, transposed, every second one, or backwards."""
    layout = draw(st.sampled_from(["C", "F", "transposed", "strided", "reversed"]))
    if layout == "F":
        return np.asfortranarray(array)
    if layout == "transposed":
        return np.transpose(array, draw(st.permutations(range(array.ndim))))
    if layout == "strided":
        array = np.repeat(array, 2, axis=-1)[..., ::2]
    if layout == "reversed":
        array = array[::-1]
    return array


def sorted_prune(array: NDArray[Any], axis: int, pattern: Pattern) -> NDArray[Any]:
    """Magnitude N:M by a stable sort of each group, one group after the other."""
    result: NDArray[Any] = array.copy()
    lines = np.moveaxis(result, axis, -1)
    for corner in itertools.product(*map(range, lines.shape[:-1])):
        for start in range(0, lines.shape[-1], pattern.m):
            group = lines[corner][start : start + pattern.m]
            whole = array.dtype.kind in "iu"
            exact = [abs(v) for v in (group if whole else group.astype(np.float64)).tolist()]
            order = sorted(range(len(exact)), key=lambda i: (-exact[i], i))
            for i in range(len(exact)):
                if i in order[pattern.n :] or exact[i] == 0:
                    group[i] = 0
    return result

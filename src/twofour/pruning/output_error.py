"""What a changed weight does to a layer's output, from the statistics of its inputs alone."""

from __future__ import annotations

from array_api_compat import array_namespace, device

from twofour.pruning.matrices import Layout
from twofour.pruning.methods.problem import Array
from twofour.pruning.statistics import Inputs, Statistics
from twofour.records.pruning import OutputError

_ROWS = 512
"""Worked on at a time: float64 copies stay small."""


def mean_change(before: Array, after: Array, inputs: Inputs, layout: Layout) -> Array:
    """(outputs,): how much the mean of each output falls from one stack to the other, in float64.

    Biases do not count.
    """
    return _outputs(_part_means(_Difference(before, after), inputs), layout)


def output_error(
    before: Array, after: Array, shift: Array | None, statistics: Statistics, layout: Layout
) -> OutputError:
    """Of two stacks; `shift` (outputs,) is added to the bias of the one after."""
    seen, held_out = statistics.seen, statistics.held_out
    return OutputError(
        calibration=_error(before, after, shift, seen, layout),
        held_out=None if held_out is None else _error(before, after, shift, held_out, layout),
    )


class _Difference:
    """A stack, or one less another, some rows at a time: there is never a copy of the whole."""

    def __init__(self, stack: Array, less: Array | None = None) -> None:
        self.shape = stack.shape
        self._stack, self._less = stack, less

    def rows(self, part: int, first: int) -> Array:
        """Some rows of a part, from `first` on."""
        some = slice(first, first + _ROWS)
        found = self._stack[part, some]
        return found if self._less is None else found - self._less[part, some]


def _error(
    before: Array, after: Array, shift: Array | None, inputs: Inputs, layout: Layout
) -> float:
    """||(W - W')X - shift||^2 / ||WX||^2; 0 where the layer gave nothing before."""
    whole = _output_power(_Difference(before), 0.0, inputs, layout)
    gone = _Difference(before, after)
    lost = _output_power(gone, 0.0 if shift is None else shift, inputs, layout)
    return max(0.0, lost) / whole if whole > 0 else 0.0


def _output_power(
    weight: _Difference, shift: Array | float, inputs: Inputs, layout: Layout
) -> float:
    """Mean square of the outputs less `shift`, summed over the outputs.

    Of a convolution cut into taps, the deviations of different taps count as independent.
    """
    xp = array_namespace(inputs.gram)
    parts, rows, _ = weight.shape
    power = 0.0
    for part in range(parts):
        gram = inputs.gram[part]  # float32 where it is wide: no copy of it in float64
        for row in range(0, rows, _ROWS):
            some = xp.astype(weight.rows(part, row), gram.dtype, copy=False)
            power = power + xp.sum(xp.matmul(some, gram) * some, dtype=xp.float64)
    mean = _part_means(weight, inputs)
    deviations = float(power) / max(1, inputs.rows) - float(xp.sum(mean * mean))
    return deviations + float(xp.sum((_outputs(mean, layout) - shift) ** 2))


def _part_means(weight: _Difference, inputs: Inputs) -> Array:
    """(parts, rows)."""
    xp = array_namespace(inputs.gram)
    mean = xp.astype(inputs.mean, xp.float64)
    parts, rows, _ = weight.shape
    found = xp.zeros((parts, rows), dtype=xp.float64, device=device(mean))
    for part in range(parts):
        for row in range(0, rows, _ROWS):
            some = xp.astype(weight.rows(part, row), xp.float64, copy=False)
            found[part, row : row + _ROWS] = xp.matmul(some, mean[part])
    return found


def _outputs(rows: Array, layout: Layout) -> Array:
    """(parts, rows) summed over the parts that make one output, as (outputs,)."""
    xp = array_namespace(rows)
    if layout.per_tap:
        rows = xp.sum(xp.reshape(rows, (-1, layout.taps, rows.shape[-1])), axis=1)
    return xp.reshape(rows, (-1,))

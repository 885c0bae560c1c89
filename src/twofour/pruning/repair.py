"""What repair computes of channels and of outputs: moments, the change that matches them, a score.

Repair brings the outputs of a pruned model back without training. Batch norms are estimated again
on what the pruned model computes (as after pruning in CrAM, Peste et al. 2023), or each output
channel y of a pruned layer becomes scale * y + shift with the mean and deviation that it had in the
dense model (OBC's statistics correction, Frantar et al. 2022): a factor of the weight's rows, which
leaves every zero where it is, and of the bias. What comes later sees what came earlier repaired.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from twofour.pruning.matrices import spread
from twofour.pruning.methods.problem import Array
from twofour.records.pruning import Repair, RepairKind, RepairTry

_STRONGEST = 4.0
"""A channel is made at most this much larger or smaller: beyond, its deviation says nothing."""
_FLOOR = 1e-3
"""Share of the typical deviation of a layer's channels that is added to each: what hardly varies
is not blown up."""
_FEW = 16
"""Values of a channel at which its change is taken by half."""
_MOST_VALUES = 1 << 20
_ROUNDING = 1e-8
"""An error of the outputs below this is that of their arithmetic; so is what varies less."""
_GAIN = 0.01
"""Share of the error that must go: less is taken for noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Of each channel: mean, and sum of squared distances to it, in float64."""

    count: int
    mean: Array
    squares: Array

    @property
    def variance(self) -> Array:
        """Of the values seen, not an estimate for others."""
        return self.squares / max(1, self.count)


def places(
    shape: tuple[int, ...], samples: NDArray[np.bool_], padding: NDArray[np.bool_] | None
) -> NDArray[np.bool_] | None:
    """Which places of a tensor belong to the samples that count, and to no padding.

    `samples` says of each sample of the call whether it counts, `padding` (samples, positions)
    where it ends. None where the first axis is no multiple of the samples: then nothing is known
    of whose places they are.
    """
    count = len(samples)
    if not shape or not count or shape[0] % count:
        return None
    if padding is not None and shape[:2] == padding.shape:
        found = samples[:, None] & ~padding
        shown: NDArray[np.bool_] = found.reshape(*found.shape, *(1 for _ in shape[2:]))
    else:
        if padding is not None and shape[0] == padding.size:
            first = (samples[:, None] & ~padding).reshape(-1)
        else:
            first = np.repeat(samples, shape[0] // count)
        shown = first.reshape(-1, *(1 for _ in shape[1:]))
    whole: NDArray[np.bool_] = np.broadcast_to(shown, shape).copy()
    return whole


def moments(values: Array, channel_axis: int, kept: NDArray[np.bool_] | None = None) -> Moments:
    """Moments over all axes but one.

    `kept` says of each place, in the order of the other axes, whether it counts.
    """
    xp = array_namespace(values)
    rows = xp.reshape(xp.moveaxis(values, channel_axis, -1), (-1, values.shape[channel_axis]))
    if kept is not None and not kept.all():
        rows = rows[xp.asarray(kept.reshape(-1), device=device(values))]
    rows = xp.astype(rows, xp.float64)
    if not rows.shape[0]:
        zeros = xp.sum(rows, axis=0)
        return Moments(count=0, mean=zeros, squares=zeros)
    mean = xp.mean(rows, axis=0)
    return Moments(count=rows.shape[0], mean=mean, squares=xp.sum((rows - mean) ** 2, axis=0))


def joined(parts: Iterable[Moments]) -> Moments | None:
    """Moments of all parts together, however they were cut.

    None where there is no value, or one that is not finite. Source: Chan et al. 1983, "Algorithms
    for Computing the Sample Variance".
    """
    whole: Moments | None = None
    for part in parts:
        if part.count:
            whole = part if whole is None else _joined(whole, part)
    if whole is None:
        return None
    xp = array_namespace(whole.squares)
    return whole if bool(xp.all(xp.isfinite(whole.squares))) else None


def _joined(one: Moments, other: Moments) -> Moments:
    count = one.count + other.count
    apart = other.mean - one.mean
    return Moments(
        count=count,
        mean=one.mean + apart * (other.count / count),
        squares=one.squares + other.squares + apart**2 * (one.count * other.count / count),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Of each channel: y becomes scale * y + shift, in float64."""

    scale: Array
    shift: Array


def matching(dense: Moments, now: Moments, *, has_bias: bool = True) -> Change:
    """What gives the channels the dense model's mean and deviation.

    Without a bias there is only a scale, which gives the mean square instead: by the deviation
    alone it would take a large mean along.
    """
    xp = array_namespace(now.mean)
    if has_bias:
        scale = _ratio(dense, now)
        return Change(scale=scale, shift=dense.mean - scale * now.mean)
    scale = _ratio(*(replace(m, squares=m.squares + m.count * m.mean**2) for m in (dense, now)))
    return Change(scale=scale, shift=xp.zeros_like(scale))


def _ratio(dense: Moments, now: Moments) -> Array:
    """Dense over present deviation, nearer to 1 the less there is to tell it from."""
    xp = array_namespace(now.mean)
    floor = _FLOOR**2 * xp.mean(dense.variance)
    floor = xp.where(floor > 0, floor, xp.ones_like(floor))
    ratio = xp.sqrt((dense.variance + floor) / (now.variance + floor))
    few = now.count / (now.count + _FEW)
    return xp.clip(ratio**few, 1 / _STRONGEST, _STRONGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalisation:
    """Running statistics of a batch norm, in float64."""

    mean: Array
    variance: Array


def estimated_again(now: Moments) -> Normalisation | None:
    """Mean and variance of all that reaches the batch norm; None for a single value.

    The variance is the unbiased one, as in training.
    """
    if now.count < 2:
        return None
    return Normalisation(mean=now.mean, variance=now.squares / (now.count - 1))


def renormalised(
    before: Normalisation, epsilon: float, dense: Moments, now: Moments
) -> Normalisation:
    """Statistics with which the batch norm gives out the mean and deviation of the dense model.

    What training knew of the data beyond the samples seen here stays in them.
    """
    xp = array_namespace(now.mean)
    floor = before.variance + epsilon
    variance = xp.maximum(floor / _ratio(dense, now) ** 2 - epsilon, xp.zeros_like(floor))
    scale = xp.sqrt(floor / (variance + epsilon))
    return Normalisation(mean=now.mean - (dense.mean - before.mean) / scale, variance=variance)


def compared_values(output: Array, kept: NDArray[np.bool_] | None) -> Array:
    """Of one output of one call what counts, as (rows, places, channels).

    A row is a sample, a place any index of the axes between the first and the last; where padding
    is left out each place is a row of its own. At most a million values, spread evenly.
    """
    xp = array_namespace(output)
    shape = tuple(output.shape)
    if kept is None or not kept.any():
        return xp.zeros((0, 1, 1), dtype=output.dtype, device=device(output))
    channels = shape[-1] if len(shape) > 1 else 1
    by_sample = kept.reshape(shape[0], -1)
    if (by_sample.all(axis=1) == by_sample.any(axis=1)).all():
        mask, inner = by_sample[:, 0], (-1, channels)
    else:
        by_place = kept.reshape(-1, channels)
        whole = bool((by_place.all(axis=1) == by_place.any(axis=1)).all())
        mask, inner = (by_place[:, 0], (1, channels)) if whole else (kept.reshape(-1), (1, 1))
    rows = xp.reshape(output, (mask.size, -1))[xp.asarray(mask, device=device(output))]
    rows = xp.reshape(rows, (rows.shape[0], *inner))
    rows = _some(rows, 1, _MOST_VALUES // (rows.shape[0] * channels))
    rows = _some(rows, 2, _MOST_VALUES // (rows.shape[0] * rows.shape[1]))
    return _some(rows, 0, _MOST_VALUES)


def _some(values: Array, axis: int, most: int) -> Array:
    """At most so many places of an axis, but one."""
    xp = array_namespace(values)
    places = spread(values.shape[axis], max(1, most))
    if places is None:
        return values
    return xp.take(values, xp.asarray(places, device=device(values)), axis=axis)


class OutputDistance:
    """How far the outputs of a model are from the dense ones, summed over calls.

    In units of what the dense outputs vary by around the mean of each column (a class, a place of
    an image): the same for all samples, differences between columns tell nothing of a sample, and
    would hide what it loses.
    """

    def __init__(self) -> None:
        self._apart: dict[int, float] = {}
        self._dense: dict[int, list[tuple[Moments, ...]]] = {}
        self._of_other_size: set[int] = set()

    def add(self, number: int, dense: Array, now: Array) -> None:
        """One output of one call as `compared_values` gives it, by its number among the outputs.

        One that has another size than the dense model's cannot be compared, and is left out.
        """
        if dense.shape != now.shape:
            self._of_other_size.add(number)
        elif dense.shape[0]:
            xp = array_namespace(dense)
            apart = xp.astype(now, xp.float64) - xp.astype(dense, xp.float64)
            self._apart[number] = self._apart.get(number, 0.0) + float(xp.sum(apart**2))
            rows, places, channels = dense.shape
            shapes = (rows, places * channels), (rows * places, channels), (-1, 1)
            columns = tuple(moments(xp.reshape(dense, shape), 1) for shape in shapes)
            self._dense.setdefault(number, []).append(columns)

    def error(self) -> float | None:
        """The mean over the outputs that vary; None where none does or a dense one is not finite.

        Infinite where an output of the pruned model alone is not finite.
        """
        errors = []
        for number in (n for n in self._dense if n not in self._of_other_size):
            varied = _varied(self._dense[number])
            if varied is None:
                return None
            if varied > 0:
                error = self._apart[number] / varied
                errors.append(error if isfinite(error) else inf)
        return sum(errors) / len(errors) if errors else None


def _varied(calls: Sequence[tuple[Moments, ...]]) -> float | None:
    """Sum of squared distances to the mean of each column; None where a value is not finite.

    Columns are single places; where there is one row alone, or calls of several sizes, channels;
    else all values are one column.
    """
    *columns, all_as_one = zip(*calls, strict=True)
    whole = joined(all_as_one)
    if whole is None:
        return None
    power = float(whole.squares[0] + whole.count * whole.mean[0] ** 2)
    for each in columns:
        if len({part.mean.shape for part in each}) == 1 and (found := joined(each)) is not None:
            squares = float(found.squares.sum())
            if squares > _ROUNDING * power:
                return squares
    return float(whole.squares[0])


def fitting(*, norms: bool, layers: bool) -> tuple[RepairKind, ...]:
    """The kinds that can be tried where there are batch norms, and layers without one."""
    if norms and layers:
        return tuple(RepairKind)
    if norms:
        return RepairKind.BATCH_NORM, RepairKind.MATCHING
    return (RepairKind.MATCHING,) if layers else ()


def chosen(tried: Iterable[RepairTry], before: float | None, *, always: bool) -> RepairTry | None:
    """The kind with the least error, where that is less than without any; the first of equals."""
    judged = [t for t in tried if t.error is not None and isfinite(t.error)]
    best = min(judged, key=lambda t: t.error or 0.0, default=None)
    if always:
        return best or next(iter(tried), None)
    if best is None or before is None or best.error is None or before < _ROUNDING:
        return None
    return best if best.error < before * (1 - _GAIN) else None


def concluded(
    tried: tuple[RepairTry, ...],
    taken: RepairTry | None,
    errors: tuple[float | None, float | None],
    judged_on: int,
) -> Repair:
    """The record; `errors` are those before and after."""
    before, after = errors
    return Repair(
        error_before=before,
        tried=tried,
        taken=None if taken is None else taken.kind,
        error_after=after,
        judged_on=judged_on,
        why=_why(tried, taken, before, judged_on),
    )


def _why(
    tried: tuple[RepairTry, ...],
    taken: RepairTry | None,
    before: float | None,
    judged_on: int,
) -> str:
    if not tried:
        return "no batch norm and no pruned layer whose output is seen could be changed"
    if taken is not None:
        better = before is not None and taken.error is not None and taken.error < before
        return "the outputs on held-out samples are nearest with it" if better else "asked for"
    if judged_on == 0:
        return "no sample was held out to judge it by"
    if before is None:
        return "no output of floats varies on the held-out samples: nothing to judge it by"
    return f"no kind brings the outputs on held-out samples nearer by {_GAIN:.0%}"

"""What each calibration sample counts for: once, less, or not at all; which are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from twofour.records.weights import Calibration

HELD_OUT = 10
"""Every tenth sample is held out: no weight is solved with it, settings and errors are from it."""
_LARGE = 10.0
"""A sample whose values are more times as large as the median sample's counts as one like it."""


def held_out_samples(first: int, count: int) -> NDArray[np.bool_]:
    """Which of the samples `first`, `first` + 1, ... are held out."""
    mask: NDArray[np.bool_] = np.arange(first, first + count) % HELD_OUT == HELD_OUT - 1
    return mask


def factors_of(held_out: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The factors of samples that all count once."""
    return np.where(held_out, -1.0, 1.0)


class SampleSplit:
    """Looks at all samples as they are read; then each has its factor in the sums."""

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}
        self._numbers: list[int] = []
        """Each sample's number among the different ones."""
        self._sizes: list[list[float]] = []
        """For each sample the mean square of each of its arrays of floats."""
        self._blank = True

    def add(self, arrays: Iterable[NDArray[np.generic]], samples: int) -> None:
        """Look at the samples of one batch, which lie along the first axis of its arrays."""
        own = [array for array in arrays if array.ndim and len(array) == samples]
        self._blank = self._blank and not any(array.any() for array in own)
        for sample in range(samples):
            parts = [array[sample] for array in own]
            digest = hashlib.blake2b(b"".join(part.tobytes() for part in parts)).digest()
            self._numbers.append(self._known.setdefault(digest, len(self._known)))
            floats = [part.astype(np.float64) for part in parts if part.dtype.kind not in "iub"]
            self._sizes.append([float(np.mean(part * part)) for part in floats if part.size])

    @property
    def factors(self) -> NDArray[np.float64]:
        """(samples,): what a sample's inputs are multiplied by in the sums.

        Negative: the sample is held out. 0: it does not count, because it is a copy of an earlier
        one, or because all samples are 0 and say nothing.
        """
        numbers = np.array(self._numbers, np.int64)
        once = np.unique(numbers, return_index=True)[1]
        factors, excess = np.zeros(len(numbers)), self._excess
        if not self._blank:
            factors[once] = 1 / np.where(excess > _LARGE, excess, 1)[once]
        return factors * factors_of(held_out_samples(0, len(once)))[numbers]

    @property
    def _excess(self) -> NDArray[np.float64]:
        """(samples,): how many times as large as the median one each is in its largest array."""
        sizes = np.sqrt(np.array(list(zip_longest(*self._sizes, fillvalue=0.0))))
        middle = np.median(sizes, axis=1, keepdims=True) if sizes.size else sizes
        ratios = (sizes / np.where(middle > 0, middle, np.inf)).reshape(-1, len(self._numbers))
        largest: NDArray[np.float64] = np.max(ratios, axis=0, initial=0.0)
        return largest

    def told(self, about: Calibration) -> Calibration:
        """The record of the data, with what was found."""
        samples, known, excess = len(self._numbers), len(self._known), self._excess
        notes = [*about.notes]
        if self._blank:
            notes.append("every value of the calibration samples is 0: pruned without them")
        elif known < samples:
            notes.append(
                f"copies of other calibration samples: {samples - known:,} of {samples:,}; "
                f"{known:,} count"
            )
        large = np.flatnonzero(excess > _LARGE)
        if large.size:
            first = int(large[np.argmax(excess[large])])
            others = f" ({large.size - 1:,} more like it)" if large.size > 1 else ""
            notes.append(
                f"calibration sample {first + 1} is {excess[first]:,.0f} times as large as the "
                f"median one{others}: it counts as if it were as large as that"
            )
        held_out = int((self.factors < 0).sum())
        return replace(about, held_out=held_out, notes=tuple(notes))

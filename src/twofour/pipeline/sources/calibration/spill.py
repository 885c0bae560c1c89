"""Batches that can be had only once, kept in a temporary folder and read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twofour.engines.inputs import numpy_dtype
from twofour.pipeline.sources.calibration.data import Batch
from twofour.pipeline.sources.calibration.request import TemporaryFolder
from twofour.pipeline.sources.inputs import save_arrays, stored_arrays
from twofour.store import sha256_bytes

_PADDING = "padding"
_INPUT = "input:"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """One batch on the disk."""

    file: Path
    samples: int
    dtypes: dict[str, str]
    """An .npz holds bfloat16 as float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spilled:
    """Batches in a folder that is there as long as this record is."""

    batches: tuple[_Kept, ...]
    folder: TemporaryFolder

    @property
    def samples(self) -> int:
        """Of all batches."""
        return sum(batch.samples for batch in self.batches)

    def read(self) -> Iterator[Batch]:
        """From the first, as they were."""
        for kept in self.batches:
            stored = stored_arrays(kept.file)
            arrays = {
                name: stored[_INPUT + name].astype(numpy_dtype(dtype), copy=False)
                for name, dtype in kept.dtypes.items()
            }
            yield Batch(arrays=arrays, samples=kept.samples, padding=stored.get(_PADDING))


def spill(batches: Iterable[Batch], folder: TemporaryFolder) -> Spilled:
    """Write them one by one; raises BadInputError where the disk is full."""
    kept = []
    for number, batch in enumerate(batches):
        file = folder.path() / f"{number}.npz"
        arrays: dict[str, Any] = {_INPUT + name: a for name, a in batch.arrays.items()}
        if batch.padding is not None:
            arrays[_PADDING] = batch.padding
        save_arrays(file, arrays)
        dtypes = {name: array.dtype.name for name, array in batch.arrays.items()}
        kept.append(_Kept(file=file, samples=batch.samples, dtypes=dtypes))
    return Spilled(batches=tuple(kept), folder=folder)


def content_key(batches: Iterable[Batch]) -> str:
    """sha256 over all values, with their names, types and shapes."""
    parts = []
    for batch in batches:
        for name, array in batch.arrays.items():
            described = f"{name} {array.dtype.name} {array.shape}"
            parts.append(sha256_bytes(described.encode(), np.ascontiguousarray(array).tobytes()))
    return sha256_bytes(*(part.encode() for part in parts))

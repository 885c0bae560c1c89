"""Data of any kind cut into batches of one size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.pipeline.sources.calibration.data import Arrays, Batch, ModelInputs
from twofour.pipeline.sources.calibration.fitting import fixed_batch, per_sample

BATCH_SAMPLES = 8
"""In one call of the model, whatever memory there is: sums are then the same on every machine."""
_PADDING = {"attention_mask": 0, "input_mask": 0, "key_padding_mask": 1, "src_key_padding_mask": 1}
"""Inputs that tell which positions are padding, and the value that says so."""
MASKS = frozenset(_PADDING)
"""Names of these inputs."""


def batch_samples(inputs: ModelInputs) -> int:
    """Samples of each batch but the last."""
    return fixed_batch(inputs) or BATCH_SAMPLES


def usable(inputs: ModelInputs, there: int, asked: int, source: str) -> tuple[int, tuple[str, ...]]:
    """How many samples will be given, and what is to be said about those that will not.

    A model with a fixed batch takes whole batches alone. Raises BadInputError where none is left.
    """
    if there == 0:
        raise BadInputError(f"{source} holds no samples", hint="give at least one")
    notes = []
    if there < asked:
        notes.append(
            f"{source} has {there} {'sample' if there == 1 else 'samples'}, fewer than the "
            f"{asked} that calibration may use"
        )
    fixed = fixed_batch(inputs)
    count = min(there, asked)
    if fixed is None:
        return count, tuple(notes)
    left = count % fixed
    if left == count:
        raise BadInputError(
            f"{inputs.model} takes batches of {fixed}, and calibration has {count} samples",
            hint="give more samples, or a model whose batch is free",
        )
    if left:
        notes.append(
            f"{inputs.model} takes batches of {fixed}: the last {left} of {count} samples are "
            "left out"
        )
    return count - left, tuple(notes)


def rows_of(inputs: ModelInputs, arrays: Arrays, where: str) -> int:
    """Samples in these arrays; raises BadInputError where they do not agree."""
    counts = {name: int(arrays[name].shape[0]) for name in per_sample(inputs, arrays)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} in {name}" for name, count in counts.items())
        raise BadInputError(f"{where}: the numbers of samples differ: {listed}")
    return next(iter(counts.values()), 1)


def padding_of(arrays: Arrays) -> NDArray[Any] | None:
    """Where the mask among the inputs says padding, samples x positions; None where nowhere."""
    for name, value in _PADDING.items():
        mask = arrays.get(name)
        if mask is not None and mask.ndim == 2 and mask.dtype.kind in "iub":
            padding: NDArray[Any] = np.asarray(mask != 0) if value else np.asarray(mask == 0)
            return padding if padding.any() else None
    return None


def cut(inputs: ModelInputs, batches: Iterable[Batch], samples: int) -> Iterator[Batch]:
    """The first `samples` samples in batches of at most `batch_samples`, in order.

    Batches are split and not joined, but for a model with a fixed batch.
    """
    size = batch_samples(inputs)
    pieces = _pieces(inputs, batches, samples, size)
    return pieces if fixed_batch(inputs) is None else _joined(inputs, pieces, size)


def _pieces(
    inputs: ModelInputs, batches: Iterable[Batch], samples: int, size: int
) -> Iterator[Batch]:
    left = samples
    for batch in batches:
        names = per_sample(inputs, batch.arrays)
        count = min(batch.samples, left)
        for start in range(0, count, size):
            yield _rows(batch, names, start, min(start + size, count))
        left -= count
        if left <= 0:
            return


def _rows(batch: Batch, names: tuple[str, ...], start: int, stop: int) -> Batch:
    arrays = {n: a[start:stop] if n in names else a for n, a in batch.arrays.items()}
    padding = None if batch.padding is None else batch.padding[start:stop]
    if padding is not None and not padding.any():
        padding = None
    return Batch(arrays=arrays, samples=stop - start, padding=padding)


def _joined(inputs: ModelInputs, pieces: Iterator[Batch], size: int) -> Iterator[Batch]:
    """Batches of exactly `size`; what does not fill one at the end is left out."""
    held: list[Batch] = []
    for piece in pieces:
        held.append(piece)
        while sum(batch.samples for batch in held) >= size:
            whole = _together(inputs, held)
            names = per_sample(inputs, whole.arrays)
            yield _rows(whole, names, 0, size)
            rest = _rows(whole, names, size, whole.samples)
            held = [rest] if rest.samples else []


def _together(inputs: ModelInputs, held: list[Batch]) -> Batch:
    if len(held) == 1:
        return held[0]
    names = per_sample(inputs, held[0].arrays)
    arrays = {
        name: np.concatenate([batch.arrays[name] for batch in held]) if name in names else array
        for name, array in held[0].arrays.items()
    }
    samples = sum(batch.samples for batch in held)
    return Batch(arrays=arrays, samples=samples, padding=_joined_padding(held))


def _joined_padding(held: list[Batch]) -> NDArray[Any] | None:
    positions = next((b.padding.shape[1] for b in held if b.padding is not None), None)
    if positions is None:
        return None
    none = [np.zeros((batch.samples, positions), np.bool_) for batch in held]
    parts = [n if b.padding is None else b.padding for b, n in zip(held, none, strict=True)]
    return np.concatenate(parts)

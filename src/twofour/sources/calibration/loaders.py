"""Calibration data in Python: batches of the caller, read into arrays and as calls of a module."""

from __future__ import annotations

import contextlib
import numbers
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twofour.errors import BadInputError, system_errors
from twofour.export.model_code import described
from twofour.inputs.fits import Array, Arrays, array_from_tensor, tensor_from_array
from twofour.inputs.samples import (
    MASKS,
    Batch,
    CalibrationData,
    ModelInputs,
    by_name,
    by_position,
    cut_batches,
    fit_batch,
    usable_samples,
)
from twofour.records import frozen
from twofour.sources.source import positional_parameters
from twofour.words import listed

if TYPE_CHECKING:
    import torch
    from torch import nn

Guard = Callable[[], contextlib.AbstractContextManager[None]]
"""Inside it the caller's code runs; what that raises becomes a BadInputError."""
_WHERE = "calibrate"
_BATCHES_HINT = (
    "give an iterable of batches, samples along the first axis: each a tensor, a tuple of tensors "
    "in the order of forward, or a dict of them by name"
)
_NO_ROOM = (
    "samples cannot be kept on the disk",
    "free some space, or set TMPDIR to a folder that has it",
)
_DATASET_HINT = "give its batches: torch.utils.data.DataLoader(dataset, batch_size=8)"


def calibration_from_value(
    value: object,
    inputs: ModelInputs,
    *,
    samples: int = 1024,
    where: str = _WHERE,
    guard: Guard | None = None,
    folder: Path | None = None,
) -> CalibrationData:
    """Batches of the caller as calibration data; at most `samples` samples are asked of them.

    Tensors and lists stay where they are. A generator can be had only once: it is read now, and
    kept in a temporary file in `folder`. Raises BadInputError, which `where` begins.
    """
    if samples < 1:
        raise BadInputError(f"samples={samples} leaves no sample", hint="give at least 1")
    given = _Given(
        value=value,
        inputs=inputs,
        where=where,
        guard=guard or partial(described, f"{where} raised"),
    )
    if _is_array(value) or isinstance(value, (Mapping, tuple, list)):
        there = sum(batch.samples for batch in given.batches(samples))
        count, notes = usable_samples(inputs, there, samples, where)

        def read() -> Iterator[Batch]:
            return cut_batches(inputs, given.batches(count), count)

    else:
        read = on_disk(cut_batches(inputs, given.batches(samples), samples), folder)
        count, notes = usable_samples(inputs, given.seen, samples, where)
    notes = (*notes, *given.notes())
    return CalibrationData(source=where, samples=count, notes=notes, batches=read)


@dataclass(slots=True, kw_only=True)
class _Given:
    """What the caller gave, and what was found in it on the way through."""

    value: object
    inputs: ModelInputs
    where: str
    guard: Guard
    seen: int = 0
    """Samples of the last way through."""
    left_out: set[str] = field(default_factory=set)
    """Names that no input has."""
    labelled: bool = False
    """Batches were pairs of inputs and labels."""

    def batches(self, samples: int) -> Iterator[Batch]:
        """One by one, until there are `samples`: the next one is not asked for then."""
        self.seen = 0
        is_one = _is_batch(self.value, self.inputs)
        items = (self.value,) if is_one else _items(self.value, self.where, self.guard)
        for number, item in enumerate(items):
            where = f"{self.where}: batch {number}"
            inputs = item if is_one else self._unlabelled(item, where)
            batch = fit_batch(self.inputs, self._named(inputs, where), where)
            self.seen += batch.samples
            yield batch
            if self.seen >= samples:
                return

    def _unlabelled(self, item: object, where: str) -> object:
        """The inputs of a pair of inputs and labels, as loaders give them, for a lone input."""
        # (8 x 3 x 32 x 32, 8) is images and labels; two of 8 x 3 x 32 x 32 are two inputs
        if not self.inputs.lone or not isinstance(item, (tuple, list)) or len(item) != 2:
            return item
        inputs, labels = item
        if not _is_array(inputs):
            return item
        if isinstance(labels, numbers.Number) or (_is_array(labels) and labels.ndim == 0):
            if inputs.shape[:1] != (1,):
                raise BadInputError(f"{where} is a single sample and its label", hint=_DATASET_HINT)
        elif _is_array(labels):
            is_alike = (inputs.shape, inputs.dtype) == (labels.shape, labels.dtype)
            if is_alike or inputs.shape[:1] != labels.shape[:1]:
                return item
        self.labelled = True
        return inputs

    def _named(self, item: object, where: str) -> dict[str, Array]:
        if isinstance(item, Mapping):
            taken = by_name(self.inputs, [str(name) for name in item], where)
            self.left_out |= {str(name) for name in item} - {*taken.values()}
            return {name: _array(item[key], f"{where}: {key!r}") for name, key in taken.items()}
        parts = item if isinstance(item, (tuple, list)) else (item,)
        if not parts or (isinstance(item, list) and not all(map(_is_array, parts))):
            raise _no_batch(item, where)
        arrays: dict[str, Array] = {}
        for name, part in zip(by_position(self.inputs, len(parts), where), parts, strict=True):
            arrays[name] = _array(part, f"{where}: array {len(arrays)}")
        _refuse_no_mask(arrays, where)
        return arrays

    def notes(self) -> Iterator[str]:
        """What the caller gave and no input takes, in sentences."""
        if self.left_out:
            yield f"{self.where}: {listed(sorted(self.left_out))} is not an input of the model"
        if self.labelled:
            yield (
                f"{self.where} gives pairs: the first of each is the model's input, the second is "
                "taken for labels and left out"
            )


def _items(value: object, where: str, guard: Guard) -> Iterator[object]:
    """The batches that come out of a value."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        is_dataset = hasattr(value, "__getitem__") and not isinstance(value, (str, bytes))
        raise _no_batch(value, where, _DATASET_HINT if is_dataset else _BATCHES_HINT)
    with guard():
        iterator = iter(value)
    end = object()  # a StopIteration would end this generator's own guard
    while True:
        with guard():
            item = next(iterator, end)
        if item is end:
            return
        yield item


def _refuse_no_mask(arrays: Arrays, where: str) -> None:
    """Arrays go by their place: labels behind the inputs may come to stand where a mask should."""
    for name in MASKS & arrays.keys():
        mask = arrays[name]
        if mask.ndim < 2 or (mask.dtype.kind in "iu" and not np.isin(mask, (0, 1)).all()):
            raise BadInputError(
                f"{where}: array {[*arrays].index(name)} stands in the place of {name}, and is no "
                "mask of zeros and ones",
                hint="name the arrays: {'input_ids': ids, 'attention_mask': mask}; labels are not "
                "needed",
            )


def _is_batch(value: object, inputs: ModelInputs) -> bool:
    """An array, arrays by name, or a tuple of arrays by position."""
    if not isinstance(value, tuple):
        return _is_array(value) or isinstance(value, Mapping)
    # torch.split gives a tuple of batches; two arrays may be inputs and labels
    most = max(2, len(inputs.positional))
    return 0 < len(value) <= most and all(map(_is_array, value))


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # whoever made a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _array(value: Any, where: str) -> Array:  # noqa: ANN401  # the caller's own
    if isinstance(value, np.ndarray):
        return value
    if not _is_tensor(value):
        raise _no_batch(value, where)
    try:
        return array_from_tensor(value)
    except (TypeError, RuntimeError) as error:  # sparse, quantised, on the meta device
        raise BadInputError(f"{where} is a tensor without plain values: {error}") from error


def _no_batch(value: object, where: str, hint: str = _BATCHES_HINT) -> BadInputError:
    kind = type(value).__name__
    if isinstance(value, (tuple, list)):
        kind = f"{kind} of {', '.join(type(part).__name__ for part in value[:3]) or 'nothing'}"
    return BadInputError(f"{where} is of type {kind}", hint=hint)


class DiskStore:
    """Values in a temporary file without a name, which is gone when nobody holds this any more."""

    def __init__(self, folder: Path | None) -> None:
        with system_errors(*_NO_ROOM):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # it lives as long as this

    def put(self, value: object) -> int:
        """Write a value behind the others; gives its place."""
        with system_errors(*_NO_ROOM):
            place = self._file.seek(0, os.SEEK_END)
            pickle.dump(value, self._file, pickle.HIGHEST_PROTOCOL)
            self._file.flush()
        return place

    def get(self, place: int) -> Any:  # noqa: ANN401  # what was put there
        """The value at a place."""
        self._file.seek(place)
        return pickle.load(self._file)  # noqa: S301  # nobody else can write to this file


def on_disk(batches: Iterable[Batch], folder: Path | None) -> Callable[[], Iterator[Batch]]:
    """What reads batches that can be had only once."""
    store = DiskStore(folder)
    places = list(map(store.put, batches))
    return lambda: map(store.get, places)


@frozen
class Call:
    """One forward: `module(*args, **kwargs)`."""

    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor]
    padding: torch.Tensor | None
    """Booleans, (samples, positions): True for padding, which does not count."""


def torch_call(module: nn.Module, batch: Batch) -> Call:
    """The batch in forward's order, on the module's device; no memory is shared with it."""
    devices = (tensor.device for tensor in module.parameters() if not tensor.is_meta)
    device = next(devices, None)
    left = {name: tensor_from_array(array).to(device) for name, array in batch.arrays.items()}
    args = []
    for parameter in positional_parameters(module):
        if parameter.name not in left:
            break
        args.append(left.pop(parameter.name))
    padding = None
    if batch.padding is not None:
        padding = tensor_from_array(batch.padding).to(device)
    return Call(args=tuple(args), kwargs=left, padding=padding)

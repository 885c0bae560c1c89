"""Calibration data in Python: tensors, dicts, lists, loaders and generators of the caller."""

from __future__ import annotations

import contextlib
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError, TwofourError
from twofour.export.model_code import described
from twofour.pipeline.sources.calibration.batching import MASKS, cut, padding_of, rows_of, usable
from twofour.pipeline.sources.calibration.data import Batch, CalibrationData, ModelInputs
from twofour.pipeline.sources.calibration.fitting import by_name, by_position, fitted
from twofour.pipeline.sources.calibration.request import TemporaryFolder
from twofour.pipeline.sources.calibration.spill import content_key, spill
from twofour.pipeline.sources.calibration.torch_calls import array_of
from twofour.words import listed

Guard = Callable[[], contextlib.AbstractContextManager[None]]
"""Inside it the caller's code runs; what that raises becomes a BadInputError."""
_WHERE = "calibrate"
_HINT = (
    "give an iterable of batches, samples along the first axis: each a tensor, a tuple of tensors "
    "in the order of forward, or a dict of them by name"
)
_DATASET_HINT = "give its batches: torch.utils.data.DataLoader(dataset, batch_size=8)"


def calibration_from_value(
    value: object,
    inputs: ModelInputs,
    *,
    samples: int = 256,
    where: str = _WHERE,
    guard: Guard | None = None,
) -> CalibrationData:
    """Batches of the caller as calibration data; at most `samples` samples are asked of them.

    Tensors and lists stay where they are. A loader may shuffle and a generator can be had only
    once: these are read now, and kept in a temporary folder. Raises BadInputError, which `where`
    begins, for what is no batch, does not fit the model or holds no samples.
    """
    if samples < 1:
        raise BadInputError(f"samples={samples} leaves no sample", hint="give at least 1")
    given = _Given(value=value, inputs=inputs, where=where, guard=guard or partial(_caller, where))
    if _is_in_memory(value):
        there = sum(batch.samples for batch in given.batches(samples))
        count, notes = usable(inputs, there, samples, where)

        def read() -> Iterator[Batch]:
            return cut(inputs, given.batches(count), count)

    else:
        kept = spill(cut(inputs, given.batches(samples), samples), TemporaryFolder())
        count, notes = usable(inputs, given.seen, samples, where)
        read = kept.read
    return CalibrationData(
        source=where,
        samples=count,
        notes=(*notes, *given.notes()),
        read=read,
        content_key=lambda: content_key(read()),
    )


@dataclass(slots=True, kw_only=True)
class _Given:
    """What the caller gave, and what was found in it on the way through."""

    value: object
    inputs: ModelInputs
    where: str
    guard: Guard
    seen: int = 0
    """Samples of the last way through."""
    left_out: dict[str, None] = field(default_factory=dict)
    labelled: bool = False
    """Batches were pairs of inputs and labels."""

    def batches(self, samples: int) -> Iterator[Batch]:
        """One by one, until there are `samples`: the next one is not asked for then."""
        self.seen = 0
        is_one = _is_batch(self.value)
        for number, item in enumerate(_items(self.value, self.where, self.guard)):
            where = f"{self.where}: batch {number}"
            batch = self._batch(item if is_one else self._unlabelled(item, where), where)
            self.seen += batch.samples
            yield batch
            if self.seen >= samples:
                return

    def _unlabelled(self, item: object, where: str) -> object:
        """The inputs of a pair of inputs and labels, as loaders give them, for a lone input."""
        if not (self.inputs.lone and _is_pair(item)):
            return item
        inputs, labels = item
        samples = inputs.shape[0] if inputs.ndim else 0
        if _is_number(labels) and samples != 1:
            raise BadInputError(f"{where} is a single sample and its label", hint=_DATASET_HINT)
        if _is_alike(inputs, labels) or not _goes_along(labels, samples):
            return item
        self.labelled = True
        return inputs

    def _batch(self, item: object, where: str) -> Batch:
        arrays = fitted(self.inputs, self._named(item, where), where)
        rows = rows_of(self.inputs, arrays, where)
        if rows == 0:
            raise BadInputError(f"{where} holds no samples", hint="leave empty batches out")
        return Batch(arrays=arrays, samples=rows, padding=padding_of(arrays))

    def _named(self, item: object, where: str) -> dict[str, NDArray[Any]]:
        if isinstance(item, Mapping):
            taken = by_name(self.inputs, [str(name) for name in item], where)
            self.left_out.update((str(name), None) for name in item if name not in taken.values())
            return {name: _array(item[key], f"{where}: {key!r}") for name, key in taken.items()}
        parts = item if isinstance(item, (tuple, list)) else (item,)
        if not parts or (isinstance(item, list) and not all(map(_is_array, parts))):
            raise _no_batch(item, where)
        names = by_position(self.inputs, len(parts), where)
        arrays = {
            name: _array(part, f"{where}: array {place}" if len(parts) > 1 else where)
            for place, (name, part) in enumerate(zip(names, parts, strict=True))
        }
        _refuse_no_mask(arrays, where)
        return arrays

    def notes(self) -> tuple[str, ...]:
        """Of what no input takes."""
        found = []
        if self.left_out:
            found.append(f"{self.where}: {listed([*self.left_out])} is no input of the model")
        if self.labelled:
            found.append(
                f"{self.where} gives pairs: the first of each is the model's input, the second is "
                "taken for labels and left out"
            )
        return tuple(found)


def _is_in_memory(value: object) -> bool:
    """The same on every way through."""
    return _is_array(value) or isinstance(value, (Mapping, tuple, list))


def _items(value: object, where: str, guard: Guard) -> Iterator[object]:
    """The batches in a value: itself where it is one, else what comes out of it."""
    if _is_batch(value):
        yield value
        return
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        is_dataset = hasattr(value, "__getitem__") and not isinstance(value, (str, bytes))
        raise _no_batch(value, where, hint=_DATASET_HINT if is_dataset else _HINT)
    with guard():
        iterator = iter(value)
    while True:
        with guard():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def _refuse_no_mask(arrays: Mapping[str, NDArray[Any]], where: str) -> None:
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


def _is_batch(value: object) -> bool:
    """An array, arrays by name, or arrays by position."""
    is_arguments = isinstance(value, tuple) and bool(value) and all(map(_is_array, value))
    return _is_array(value) or isinstance(value, Mapping) or is_arguments


def _is_pair(item: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(item, (tuple, list)) and len(item) == 2 and _is_array(item[0])


def _is_number(value: Any) -> bool:  # noqa: ANN401  # the caller's own
    return isinstance(value, numbers.Number) or (_is_array(value) and value.ndim == 0)


def _is_alike(one: Any, other: Any) -> bool:  # noqa: ANN401  # the caller's own
    """Two arrays that may be two of a kind: images of a list, batches."""
    return _is_array(other) and (one.shape, one.dtype) == (other.shape, other.dtype)


def _goes_along(labels: Any, samples: int) -> bool:  # noqa: ANN401  # the caller's own
    """Whether there is a label for each sample: in an array, a list, or each of several."""
    if _is_number(labels):
        return samples == 1
    if _is_array(labels):
        return len(labels) == samples
    if isinstance(labels, Mapping):
        labels = [*labels.values()]
    elif isinstance(labels, (tuple, list)) and len(labels) == samples:
        return True
    several = isinstance(labels, (tuple, list)) and bool(labels)
    return several and all(_goes_along(each, samples) for each in labels)


@contextlib.contextmanager
def _caller(where: str) -> Iterator[None]:
    try:
        yield
    except TwofourError:
        raise
    except Exception as error:
        raise BadInputError(f"{where} raised {described(error)}") from error


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # whoever made a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _array(value: Any, where: str) -> NDArray[Any]:  # noqa: ANN401  # the caller's own
    if isinstance(value, np.ndarray):
        return value
    if not _is_tensor(value):
        raise _no_batch(value, where)
    try:
        return array_of(value)
    except (TypeError, RuntimeError) as error:  # sparse, quantised, on the meta device
        raise BadInputError(f"{where} is a tensor without plain values: {error}") from error


def _no_batch(value: object, where: str, hint: str = _HINT) -> BadInputError:
    kind = type(value).__name__
    if isinstance(value, (tuple, list)):
        kind = f"{kind} of {', '.join(type(part).__name__ for part in value[:3]) or 'nothing'}"
    return BadInputError(f"{where} is of type {kind}", hint=hint)

"""Calibration samples: arrays named after a model's inputs, fitted, cut into batches, weighted."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.inputs.fits import (
    Array,
    Arrays,
    cast_array,
    check_fit,
    is_float,
    numpy_type,
    shapes_of,
    sizes_by_symbol,
)
from twofour.records import frozen
from twofour.records.export import ANONYMOUS
from twofour.records.options import CalibrationOptions
from twofour.records.weights import Calibration
from twofour.words import count as count_of

BATCH_SAMPLES = 8
"""Samples in one call of the model, whatever memory there is: sums are the same everywhere."""
TRAINING_SAMPLES = 1 << 16
"""Samples that training reads at most; that there are fewer is no news."""
_PADDING = {"attention_mask": 0, "input_mask": 0, "key_padding_mask": 1, "src_key_padding_mask": 1}
"""Inputs that say which positions are padding, and the value that says so."""
MASKS = frozenset(_PADDING)
_GENERATED = re.compile(r"unk__\d+|.*_dynamic_axes_\d+|s\d+")
"""How converters call free sizes, each by another name: of tf2onnx, and both exporters of torch."""
_NAMES_HINT = "name the arrays after the inputs of the model"


@frozen
class ModelInput:
    """One input of the model: of an ONNX file, or an argument of a module's forward."""

    name: str
    dtype: str | None = None
    """numpy's name of its type, or ml_dtypes'; None: not known, data keeps its own."""
    shape: tuple[int | str, ...] | None = None
    """Sizes, and names of those that are free ("?": without a name); None: not known."""
    example: tuple[int, ...] | None = None
    """Shape of the example input, where there is one."""
    required: bool = True

    @property
    def in_words(self) -> str:
        """Name, dimensions and type: x (batch x 3 x 32 x 32, float32)."""
        known = []
        if self.shape is not None:
            known.append(" x ".join(map(str, self.shape)) or "scalar")
        if self.dtype:
            known.append(self.dtype)
        return f"{self.name} ({', '.join(known)})" if known else self.name


@frozen
class ImageScaling:
    """How pixels become what a vision model reads; one mean and deviation is for all channels."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | None = None
    resized: float = 1.0
    """The shorter side, as a multiple of `size`, before the centre is cut out."""
    resample: str = "bilinear"


@frozen
class ModelInputs:
    """What a model takes, and where its preprocessing is described."""

    model: str
    inputs: tuple[ModelInput, ...]
    positional: tuple[str, ...]
    """Those that arrays without names are for, in order."""
    floats: str | None = None
    """Type of the weights where they have one: floats of inputs of no known type become it."""
    any_name: bool = False
    """Other names are taken too (`**kwargs`)."""
    lone: bool = False
    """It takes one array and no other: what comes with it in a pair are its labels."""
    folder: Path | None = None
    """Where its tokenizer and its image processor are described."""
    most_tokens: int | None = None
    images: ImageScaling | None = None
    """Where the module itself says it (timm)."""

    def known(self, name: str) -> ModelInput | None:
        """The input of that name."""
        return next((one for one in self.inputs if one.name == name), None)

    def missing(self, names: Collection[str]) -> list[str]:
        """Inputs that the model must be given and `names` has not, for messages."""
        return [one.in_words for one in self.inputs if one.required and one.name not in names]

    @property
    def in_words(self) -> str:
        """All of them, for messages."""
        return ", ".join(one.in_words for one in self.inputs) or "none"


@frozen
class Batch:
    """Inputs of one call of the model."""

    arrays: Arrays
    """Arrays by name of the model's input, in its order and types; every float is finite."""
    samples: int
    """Rows of the first axis of the inputs that have one for each sample."""
    padding: Array | None = None
    """Booleans, samples x positions: True where a position is padding; None: none is."""


@frozen
class CalibrationData:
    """Calibration data that was opened and found to fit the model."""

    source: str
    samples: int
    """How many `batches` gives in all."""
    notes: tuple[str, ...]
    batches: Callable[[], Iterator[Batch]]
    """From the first, the same ones in the same order on every call.

    Raises BadInputError for values that are not finite and files that changed or are damaged.
    """


@frozen
class DataRequest:
    """What one kind of data is opened with."""

    text: str
    path: Path
    """The same as an absolute path: user code may change the working directory."""
    options: CalibrationOptions
    inputs: ModelInputs
    seed: int = 0
    folder: Path | None = None

    @property
    def settings(self) -> str:
        """Options that change what is read, as text for a key."""
        asked = self.options
        return f"{asked.samples} {asked.image_mean} {asked.image_std} {asked.image_size}"


def by_name(inputs: ModelInputs, given: Sequence[str], where: str) -> dict[str, str]:
    """Name of the model's input -> name of its array; arr_0, arr_1, ... are taken by position."""
    by_number = {f"arr_{index}" for index in range(len(given))}
    if set(given) == by_number and not all(map(inputs.known, given)):
        names = by_position(inputs, len(given), where)
        return {name: f"arr_{index}" for index, name in enumerate(names)}
    taken = {one.name: one.name for one in inputs.inputs if one.name in given}
    if inputs.any_name:
        taken |= {name: name for name in given}
    if inputs.missing(taken) or not taken:
        raise BadInputError(
            f"{where} contains {', '.join(sorted(given)) or 'nothing'}; "
            f"the model takes {inputs.in_words}",
            hint=_NAMES_HINT,
        )
    return taken


def by_position(inputs: ModelInputs, count: int, where: str) -> tuple[str, ...]:
    """Names of the inputs that `count` arrays without names are for."""
    names = inputs.positional[:count]
    if len(names) < count:
        raise BadInputError(
            f"{where} is {count_of(count, 'array')}, and {inputs.model} takes {len(names)}: "
            f"{', '.join(names) or 'none'}",
            hint="a loader of (inputs, labels) pairs gives more than the model takes: leave the "
            "labels out, as in [inputs for inputs, _ in loader]; a dict names the input of each",
        )
    missing = inputs.missing(names)
    if missing or not count:
        raise BadInputError(
            f"{where} is {count_of(count, 'array')}; {inputs.model} needs "
            f"{', '.join(missing) or 'one'} too",
            hint=_NAMES_HINT,
        )
    return names


def fixed_batch(inputs: ModelInputs) -> int | None:
    """Samples that the model takes at once, where its inputs fix that; None: any number."""
    shapes = [one.shape for one in inputs.inputs if one.shape]
    if not shapes or any(not isinstance(shape[0], int) for shape in shapes):
        return None
    return int(shapes[0][0])


def per_sample(inputs: ModelInputs, arrays: Arrays) -> tuple[str, ...]:
    """Names of the arrays whose first axis counts samples; the others are given whole every time.

    () where first axes have several names in the file, as nodes and edges of a graph have.
    """
    # ids (batch, length) and a table (512, 64) that the file fixes: samples are rows of ids alone
    ranked = {name: array for name, array in arrays.items() if array.ndim}
    first_sizes = {one.name: one.shape[0] for one in inputs.inputs if one.shape}
    batch = fixed_batch(inputs)
    if batch is not None:
        return tuple(name for name in ranked if first_sizes.get(name, batch) == batch)
    free = {
        name: size for name, size in first_sizes.items() if name in arrays and isinstance(size, str)
    }
    if free:
        return tuple(free) if _counts_one_thing(free, arrays) else ()
    rows = next((array.shape[0] for array in ranked.values()), None)
    return tuple(name for name, array in ranked.items() if array.shape[0] == rows)


def _counts_one_thing(free: Mapping[str, str], arrays: Arrays) -> bool:
    """Whether first axes of these names (input -> name of its first size) all count samples.

    "batch" twice does; "nodes" and "edges" do not; "unk__6" and "unk__7" do where their arrays have
    one length, since a converter gave them.
    """
    symbols = set(free.values()) - {ANONYMOUS}
    if len(symbols) <= 1:
        return True
    lengths = {arrays[name].shape[:1] for name in free}
    return len(lengths) == 1 and all(map(_GENERATED.fullmatch, symbols))


def fit_arrays(inputs: ModelInputs, arrays: Arrays, where: str) -> dict[str, Array]:
    """The arrays in the model's types; raises BadInputError, which `where` begins, and for NaN."""
    check_shapes(inputs, arrays, where)
    fitting = {}
    for name, given in arrays.items():
        one = inputs.known(name) or ModelInput(name=name)
        array = _typed(one, given, where, inputs.floats)
        if is_float(array.dtype):
            _refuse_not_finite(array, name, where)
        fitting[name] = array
    return fitting


def _refuse_not_finite(array: Array, name: str, where: str) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        place = [int(index) for index in np.argwhere(~finite)[0]]
        raise BadInputError(
            f"{where}: the array for input {name} has {count_of((~finite).sum(), 'value')} "
            f"not finite as {array.dtype.name}, the first at {place}",
            hint="every value of the samples counts: leave such samples out",
        )


def fit_batch(inputs: ModelInputs, arrays: Arrays, where: str) -> Batch:
    """The arrays as one batch; raises BadInputError as `fit_arrays` does, and for no samples."""
    fitting = fit_arrays(inputs, arrays, where)
    samples = count_samples(inputs, fitting, where)
    if samples == 0:
        raise BadInputError(f"{where} contains no samples", hint="leave empty batches out")
    return Batch(arrays=fitting, samples=samples, padding=padding_of(fitting))


def check_shapes(inputs: ModelInputs, arrays: Arrays, where: str) -> None:
    """Raise BadInputError for another rank or fixed size, and two sizes of one name."""
    cut = per_sample(inputs, arrays)
    shapes = shapes_of(arrays)
    hint = "give arrays of the shape that the model takes, samples along the first axis"
    check_fit(inputs.inputs, shapes, where, hint, cut)
    sizes_by_symbol(inputs.inputs, shapes, where, cut=cut)


def _typed(one: ModelInput, array: Array, where: str, floats: str | None) -> Array:
    source = array.dtype
    if not is_float(source) and source.kind not in "iubc":
        raise BadInputError(
            f"{where}: the array for input {one.name} has type {source}, not a number"
        )
    wanted = one.dtype or source.name
    if one.dtype is None and floats and is_float(source):
        wanted = floats
    typed = cast_array(array, wanted)
    if typed is None:
        hint = f"write it with .astype('{wanted}')"
        if is_float(numpy_type(wanted)):
            hint = "pixels 0 to 255 must be scaled as the model expects them, and become floats"
        raise BadInputError(
            f"{where}: the array for input {one.in_words} has type {source.name}", hint=hint
        )
    return typed


def batch_samples(inputs: ModelInputs) -> int:
    """Samples of each batch but the last."""
    return fixed_batch(inputs) or BATCH_SAMPLES


def usable_samples(
    inputs: ModelInputs, there: int, asked: int, source: str
) -> tuple[int, tuple[str, ...]]:
    """How many samples will be given, and what is to be said about those that will not."""
    count = min(there, asked)
    if count < 1:
        raise BadInputError(f"{source} contains no samples", hint="give at least one")
    notes = []
    if there < asked != TRAINING_SAMPLES:
        notes.append(
            f"{source} has {count_of(there, 'sample')}; --calibrate-samples allows {asked}"
        )
    fixed = fixed_batch(inputs)
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


def count_samples(inputs: ModelInputs, arrays: Arrays, where: str) -> int:
    """Samples in these arrays; raises BadInputError where they do not agree."""
    counts = {name: int(arrays[name].shape[0]) for name in per_sample(inputs, arrays)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} in {name}" for name, count in counts.items())
        raise BadInputError(f"{where}: the numbers of samples differ: {listed}")
    return next(iter(counts.values()), 1)


def padding_of(arrays: Arrays) -> Array | None:
    """Where the mask among the inputs says padding, samples x positions; None where nowhere."""
    for name, value in _PADDING.items():
        mask = arrays.get(name)
        if mask is not None and mask.ndim == 2 and mask.dtype.kind in "iub":
            padding: Array = np.asarray(mask.astype(bool) == bool(value))
            return padding if padding.any() else None
    return None


def cut_batches(inputs: ModelInputs, batches: Iterable[Batch], samples: int) -> Iterator[Batch]:
    """The first `samples` samples in batches of `batch_samples`; a fixed batch is filled."""
    # a model of exactly 4, and batches of 5: 4, one is held; of 1 + 5: 4, two are held; of 2 + 5: 4
    size = batch_samples(inputs)
    is_fixed = fixed_batch(inputs) is not None
    left = samples
    held = None
    for batch in batches:
        names = per_sample(inputs, batch.arrays)
        whole = _rows(batch, names, 0, min(batch.samples, left))
        left -= whole.samples
        if held is not None:
            whole = _together(held, whole, names)
            held = None
        stop = whole.samples
        if is_fixed:
            stop -= stop % size
        for start in range(0, stop, size):
            yield _rows(whole, names, start, min(start + size, stop))
        if stop < whole.samples:
            held = _rows(whole, names, stop, whole.samples)
        if left <= 0:
            return


def _rows(batch: Batch, names: tuple[str, ...], start: int, stop: int) -> Batch:
    arrays = dict(batch.arrays)
    for name in names:
        arrays[name] = arrays[name][start:stop]
    padding = batch.padding
    if padding is not None:
        padding = padding[start:stop] if padding[start:stop].any() else None
    return Batch(arrays=arrays, samples=stop - start, padding=padding)


def _together(one: Batch, other: Batch, names: tuple[str, ...]) -> Batch:
    arrays = dict(one.arrays)
    for name in names:
        arrays[name] = np.concatenate([one.arrays[name], other.arrays[name]])
    samples = one.samples + other.samples
    positions = [p.shape[1] for p in (one.padding, other.padding) if p is not None]
    if not positions:
        return Batch(arrays=arrays, samples=samples)
    padding = np.zeros((samples, positions[0]), bool)
    if one.padding is not None:
        padding[: one.samples] = one.padding
    if other.padding is not None:
        padding[one.samples :] = other.padding
    return Batch(arrays=arrays, samples=samples, padding=padding)


_HELD_OUT_EVERY = 10
"""Every tenth sample is held out: no weight is solved with it, settings and errors are from it."""
_LARGE = 10.0
"""A sample whose values are more times as large as the median sample's counts as one like it."""


def held_out_samples(first: int, count: int) -> NDArray[np.bool_]:
    """Which of the samples `first`, `first` + 1, ... are held out."""
    mask: NDArray[np.bool_] = np.arange(first, first + count) % _HELD_OUT_EVERY == 9
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
        # samples a, b, a, c and c 30 times as large as the median: 1, 1, 0, 1/30
        numbers = np.array(self._numbers, np.int64)
        once = np.unique(numbers, return_index=True)[1]
        factors = np.zeros(len(numbers))
        if not self._blank:
            excess = self._excess
            factors[once] = 1 / np.where(excess > _LARGE, excess, 1)[once]
        return factors * factors_of(held_out_samples(0, len(once)))[numbers]

    @property
    def _excess(self) -> NDArray[np.float64]:
        """(samples,): how many times as large as the median one each is in its largest array."""
        if not any(self._sizes):
            return np.zeros(len(self._sizes))
        sizes = np.sqrt(np.array(list(zip_longest(*self._sizes, fillvalue=0.0))))
        median = np.median(sizes, axis=1, keepdims=True)
        ratios = sizes / np.where(median > 0, median, np.inf)
        largest: NDArray[np.float64] = ratios.max(axis=0)
        return largest

    def noted_in(self, record: Calibration) -> Calibration:
        """The record of the data, with how many samples are held out and what is unusual."""
        samples = len(self._numbers)
        known = len(self._known)
        excess = self._excess
        notes = [*record.notes]
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
            others = ""
            if large.size > 1:
                others = f" ({large.size - 1:,} more like it)"
            notes.append(
                f"calibration sample {first + 1} is {excess[first]:,.0f} times as large as the "
                f"median one{others}: it counts as if it were as large as that"
            )
        held_out = int((self.factors < 0).sum())
        return replace(record, held_out=held_out, notes=tuple(notes))

"""Inputs of an engine: shapes, profiles, and arrays that fit them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from twofour.engines.protocol import Arrays
from twofour.errors import BadInputError
from twofour.records.export import ANONYMOUS, TensorShape
from twofour.records.options import LARGEST_SIZE, ShapeProfile, SizeRange

LARGEST_BATCH = 8
"""Least max of a batch that nobody gave."""
LARGEST_LENGTH = 512
"""Max of a size that nobody gave and the model allows: memory is set aside for max."""

_SHAPE = re.compile(r"\d{1,10}(?:x\d{1,10})*")
_HINT = "write it like input=1x3x224x224:8x3x224x224:16x3x224x224 (min:opt:max), or one shape"


def parse_shapes(texts: Sequence[str]) -> tuple[ShapeProfile, ...]:
    """Read `name=min:opt:max` or `name=shape`, several of them separated by commas as in trtexec.

    Raises BadInputError for anything else, a name given twice, and min > opt or opt > max.
    """
    profiles: dict[str, ShapeProfile] = {}
    for item in (part for text in texts for part in text.split(",")):
        profile = _parse_one(item.strip())
        if profile.input in profiles:
            raise BadInputError(f"--shapes names input {profile.input!r} twice")
        profiles[profile.input] = profile
    return tuple(profiles.values())


def _parse_one(item: str) -> ShapeProfile:
    name, equals, text = item.rpartition("=")
    shapes = text.split(":")
    name = name.strip().strip("'\"")
    if not (equals and name and len(shapes) in {1, 3}) or not all(map(_SHAPE.fullmatch, shapes)):
        raise BadInputError(f"--shapes: cannot read {item!r}", hint=_HINT)
    parsed = [tuple(int(dim) for dim in shape.split("x")) for shape in shapes]
    if any(not 1 <= dim <= LARGEST_SIZE for shape in parsed for dim in shape):
        raise BadInputError(f"--shapes: a dimension of {item!r} is not in 1..{LARGEST_SIZE}")
    smallest, usual, largest = parsed * 3 if len(parsed) == 1 else parsed
    profile = ShapeProfile(input=name, min=smallest, opt=usual, max=largest)
    _check_order(profile)
    return profile


def _check_order(profile: ShapeProfile) -> None:
    ranks = {len(profile.min), len(profile.opt), len(profile.max)}
    if len(ranks) > 1:
        raise BadInputError(
            f"--shapes: min, opt and max of {profile.input!r} have different ranks", hint=_HINT
        )
    rows = zip(profile.min, profile.opt, profile.max, strict=True)
    for axis, (smallest, usual, largest) in enumerate(rows):
        if not smallest <= usual <= largest:
            raise BadInputError(
                f"--shapes: dimension {axis} of {profile.input!r} has min {smallest}, opt {usual}, "
                f"max {largest}",
                hint="min <= opt <= max must hold for every dimension",
            )


def check_shapes(profiles: Sequence[ShapeProfile], inputs: Sequence[TensorShape]) -> None:
    """Raises BadInputError for an unknown input, another rank or a changed fixed dimension."""
    known = {tensor.name: tensor for tensor in inputs}
    for profile in profiles:
        if profile.input not in known:
            raise BadInputError(
                f"--shapes: the model has no input {profile.input!r}",
                hint=f"its inputs are {', '.join(t.in_words for t in inputs) or 'none'}",
            )
        _check_fits(profile, known[profile.input])


def _check_fits(profile: ShapeProfile, tensor: TensorShape) -> None:
    if len(profile.opt) != len(tensor.shape):
        raise BadInputError(
            f"--shapes: {profile.input!r} is given {len(profile.opt)} dimensions, "
            f"the model has {tensor.in_words}"
        )
    for axis, fixed in enumerate(tensor.shape):
        asked = {profile.min[axis], profile.opt[axis], profile.max[axis]}
        if isinstance(fixed, int) and asked != {fixed}:
            raise BadInputError(
                f"--shapes: dimension {axis} of {profile.input!r} is fixed to {fixed}, "
                f"found {profile.min[axis]}:{profile.opt[axis]}:{profile.max[axis]}",
                hint=f"the model has {tensor.in_words}",
            )


def bind_shapes(
    asked: Sequence[ShapeProfile], inputs: Sequence[TensorShape]
) -> tuple[ShapeProfile, ...]:
    """`asked`, and a profile for each other input whose free sizes follow from those by name.

    Two dimensions that the model calls alike are of one size in every run: what is said of a
    token input holds for its mask. Raises BadInputError where `asked` does not fit the model, and
    where it gives one name two ranges, naming both.
    """
    check_shapes(asked, inputs)
    ranges = _ranges_by_symbol(asked, inputs)
    given = {profile.input for profile in asked}
    following = (
        _from_ranges(tensor, [_known(dim, ranges) for dim in tensor.shape])
        for tensor in inputs
        if tensor.name not in given and not is_fixed(tensor)
    )
    return (*asked, *(profile for profile in following if profile is not None))


def profiles_for(
    asked: Sequence[ShapeProfile],
    inputs: Sequence[TensorShape],
    examples: Mapping[str, tuple[int, ...]],
    known: Mapping[str, SizeRange] | None = None,
) -> tuple[ShapeProfile, ...]:
    """One profile for each input with a free dimension: as asked for, else by its example's shape.

    A free first dimension (the batch) goes from 1 to the example's, at least to LARGEST_BATCH. A
    dimension of which the file itself says the range (`known`, by name) goes over that range, to
    LARGEST_LENGTH or twice the example at most. Every other one stays as in the
    example: what else a model accepts is not known. The example is opt: tactics are chosen for it.
    Raises BadInputError where neither is there, and where `asked` does not fit the model.
    """
    bound = bind_shapes(asked, inputs)
    given = {profile.input: profile for profile in bound}
    ranges = _ranges_by_symbol(bound, inputs)
    made = {}
    for tensor in inputs:
        if tensor.name in given or is_fixed(tensor):
            continue
        made[tensor.name] = _from_example(tensor, examples, ranges, known or {})
    profiles = {**given, **made}
    return tuple(profiles[tensor.name] for tensor in inputs if tensor.name in profiles)


def beyond_ranges(
    profiles: Sequence[ShapeProfile],
    inputs: Sequence[TensorShape],
    known: Mapping[str, SizeRange],
) -> tuple[str, ...]:
    """A sentence for each free size that goes beyond the range which the file itself says."""
    return tuple(
        f"{symbol} goes from {low} to {high} in --shapes, and the file says {size.min} to "
        f"{size.max or 'no limit'}: what the model does beyond was not looked at"
        for symbol, (low, _, high) in _ranges_by_symbol(profiles, inputs).items()
        for size in [known.get(symbol)]
        if size is not None and (low < size.min or high > (size.max or high))
    )


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    """Shape of each array, by name."""
    return {name: tuple(map(int, array.shape)) for name, array in arrays.items()}


def is_fixed(tensor: TensorShape) -> bool:
    """Whether the model leaves no dimension of that input free."""
    return all(isinstance(dim, int) for dim in tensor.shape)


def _ranges_by_symbol(
    profiles: Sequence[ShapeProfile], inputs: Sequence[TensorShape]
) -> dict[str, tuple[int, int, int]]:
    """Name of a free dimension -> min, opt, max."""
    known = {tensor.name: tensor for tensor in inputs}
    ranges: dict[str, tuple[int, int, int]] = {}
    first: dict[str, str] = {}
    for profile in profiles:
        rows = zip(profile.min, profile.opt, profile.max, strict=True)
        for axis, (symbol, row) in enumerate(zip(known[profile.input].shape, rows, strict=True)):
            if isinstance(symbol, int) or symbol == ANONYMOUS:
                continue
            where = f"{':'.join(map(str, row))} in {profile.input!r} (dimension {axis})"
            if ranges.setdefault(symbol, row) != row:
                raise BadInputError(
                    f"--shapes: {symbol!r} is {first[symbol]} and {where}",
                    hint="the model has one size for both; give one of them and the other follows",
                )
            first.setdefault(symbol, where)
    return ranges


def _known(
    dim: int | str, ranges: Mapping[str, tuple[int, int, int]]
) -> tuple[int, int, int] | None:
    return (dim, dim, dim) if isinstance(dim, int) else ranges.get(dim)


def _from_ranges(
    tensor: TensorShape, rows: Sequence[tuple[int, int, int] | None]
) -> ShapeProfile | None:
    """None where the range of a dimension is not known."""
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        return None
    smallest, usual, largest = zip(*found, strict=True)
    return ShapeProfile(input=tensor.name, min=smallest, opt=usual, max=largest)


def _from_example(
    tensor: TensorShape,
    examples: Mapping[str, tuple[int, ...]],
    ranges: dict[str, tuple[int, int, int]],
    known: Mapping[str, SizeRange],
) -> ShapeProfile:
    """What it decides for a name is added to `ranges`, and holds for the inputs that follow."""
    if tensor.name not in examples:
        raise BadInputError(
            f"input {tensor.in_words} has a dynamic shape and no example",
            hint=f"give its shapes with --shapes {tensor.name}=min:opt:max",
        )
    rows = []
    for axis, (dim, size) in enumerate(zip(tensor.shape, examples[tensor.name], strict=False)):
        row = _known(dim, ranges) or _default(known.get(str(dim)), size, is_batch=axis == 0)
        if isinstance(dim, str) and dim != ANONYMOUS:
            ranges.setdefault(dim, row)
        rows.append(row)
    smallest, usual, largest = zip(*rows, strict=True) if rows else ((), (), ())
    profile = ShapeProfile(input=tensor.name, min=smallest, opt=usual, max=largest)
    _check_fits(profile, tensor)
    return profile


def _default(known: SizeRange | None, size: int, *, is_batch: bool) -> tuple[int, int, int]:
    if is_batch:
        smallest = 1 if known is None else known.min
        return (min(smallest, size), size, max(size, LARGEST_BATCH))
    if known is None:
        return (size, size, size)
    largest = max(LARGEST_LENGTH, 2 * size)
    largest = largest if known.max is None else min(known.max, largest)
    return (min(known.min, size), size, max(size, largest))


def opt_shapes(profiles: Sequence[ShapeProfile]) -> Mapping[str, tuple[int, ...]]:
    """Input name -> the shape its runs are timed at."""
    return {profile.input: profile.opt for profile in profiles}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of that name; bfloat16 and the float8 types come from ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        special: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return special


def fit_inputs(inputs: Arrays, wanted: Sequence[TensorShape]) -> dict[str, npt.NDArray[Any]]:
    """The inputs a model wants, contiguous, in its element types and this machine's byte order.

    Floats become the model's float type and integers its integer type where every value fits.
    Raises BadInputError for a missing or unknown name, another rank or fixed dimension, and a type
    that cannot be converted without loss of meaning.
    """
    names = {tensor.name for tensor in wanted}
    if set(inputs) != names:
        raise BadInputError(
            f"the model takes the inputs {sorted(names)}, found {sorted(inputs)}",
            hint="example inputs must have the names of the model's inputs",
        )
    return {tensor.name: _fit(np.asarray(inputs[tensor.name]), tensor) for tensor in wanted}


def _fit(array: npt.NDArray[Any], tensor: TensorShape) -> npt.NDArray[Any]:
    fits = array.ndim == len(tensor.shape) and all(
        not isinstance(dim, int) or dim == found
        for dim, found in zip(tensor.shape, array.shape, strict=True)
    )
    if not fits:
        raise BadInputError(
            f"input {tensor.name!r} has the shape {list(tensor.shape)} in the model, "
            f"found {list(array.shape)}"
        )
    if array.dtype.name == tensor.dtype and array.dtype.isnative:
        return np.ascontiguousarray(array)
    return np.ascontiguousarray(_convert(array, tensor))


def _convert(array: npt.NDArray[Any], tensor: TensorShape) -> npt.NDArray[Any]:
    target = numpy_dtype(tensor.dtype)
    if _is_float(array.dtype) and _is_float(target):
        return array.astype(target)
    if array.dtype.kind in "iu" and target.kind in "iu":
        converted = array.astype(target)
        if np.array_equal(converted, array):
            return converted
    raise BadInputError(
        f"input {tensor.name!r} has the type {tensor.dtype} in the model, found {array.dtype.name}"
    )


def _is_float(dtype: np.dtype[Any]) -> bool:
    # ml_dtypes' types have kind "V"; only their names tell that they are floats
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def at_shapes(inputs: Arrays, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, npt.NDArray[Any]]:
    """Inputs cut or repeated along each axis until they have the shapes asked for.

    Repeating keeps the values real; an input without a shape, or of another rank, stays as it is.
    """
    return {name: _at_shape(array, shapes.get(name)) for name, array in inputs.items()}


def _at_shape(array: npt.NDArray[Any], shape: tuple[int, ...] | None) -> npt.NDArray[Any]:
    if shape is None or len(shape) != array.ndim or 0 in array.shape:
        return array
    for axis, length in enumerate(shape):
        if length != array.shape[axis]:
            array = array.take(np.arange(length) % array.shape[axis], axis=axis)
    return array

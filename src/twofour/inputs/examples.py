"""Example inputs for an ONNX file: their shapes as asked for, and arrays, made up or given."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from twofour.errors import BadInputError
from twofour.inputs.fits import (
    Array,
    Arrays,
    check_fit,
    is_fixed,
    read_arrays,
    shapes_of,
    sizes_by_symbol,
)
from twofour.records.export import ANONYMOUS, TensorShape
from twofour.records.options import (
    LARGEST_SIZE,
    CompareOptions,
    RunOptions,
    ShapeProfile,
    SizeRange,
)

MADE_UP = "the inputs were made up: --inputs FILE.npz gives real ones"
GIVEN = "your example inputs"
RANDOM = "random inputs"
"""What example inputs are, where a figure is said that was measured on them."""
DEFAULT_BATCH = 8
"""Size of a free first dimension that nobody gave: 1 gives sparse kernels little to win."""
_MOST_VALUES = 1 << 28
"""In all inputs that are made up for one model: 1 GiB of float32."""
_TOKENS_BELOW = 2
_EXAMPLE_TYPES = ("float32", "float16", "float64", "int64", "int32", "bool")
_USUAL_TOKENS = 128
_USUAL_PIXELS = 224
"""In the option that an error suggests; never used unasked."""
_IMAGE_RANK = 4
_OPTION = "--input-shape"
_ONE_SIZE = "the model has one size for both; give one of them and the other follows"
_HINT = "write it like --input-shape x=1x3x224x224; without a name, one for each input in order"

Shape = tuple[int, ...]
Tensors = Sequence[TensorShape]
Asked = Mapping[str, Shape]
"""Name of an input -> the shape that the user gave it."""


def asked_shapes(
    inputs: Tensors, options: RunOptions | CompareOptions, profiles: Sequence[ShapeProfile]
) -> Asked:
    """What --input-shape says, by name or in the order of the inputs; else the opt of --shapes."""
    shapes = options.input_shapes
    if not shapes:
        asked = opt_shapes(profiles)
        _refuse_unknown(tuple(asked), inputs, _OPTION)
        return asked
    names = options.input_shape_names or tuple(tensor.name for tensor in inputs)
    if len(shapes) != len(names):
        raise BadInputError(
            f"{_OPTION}: {len(shapes)} shapes for the {len(inputs)} inputs "
            f"{', '.join(t.in_words for t in inputs)}",
            hint=_HINT,
        )
    _refuse_unknown(names, inputs, _OPTION)
    return dict(zip(names, shapes, strict=True))


def _refuse_unknown(names: Sequence[str], inputs: Tensors, option: str) -> None:
    known = {tensor.name for tensor in inputs}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BadInputError(
            f"{option}: the model has no input {unknown[0]!r}",
            hint=f"its inputs are {', '.join(t.in_words for t in inputs) or 'none'}",
        )


def example_shapes(inputs: Tensors, asked: Asked, model: str) -> dict[str, Shape]:
    """A shape for every input: as asked for, and as follows from that for dimensions of one name.

    A free first dimension that is left is the batch that was given, or DEFAULT_BATCH. Raises
    BadInputError, which `model` begins, for every other free size.
    """
    check_fit(inputs, asked, _OPTION, _HINT)
    sizes = sizes_by_symbol(inputs, asked, _OPTION, _ONE_SIZE)
    _refuse_free_sizes([tensor for tensor in inputs if tensor.name not in asked], sizes, model)
    batch = _asked_batch(inputs, asked)
    shapes = {}
    for tensor in inputs:
        shapes[tensor.name] = asked.get(tensor.name) or tuple(
            dim if isinstance(dim, int) else sizes.get(dim, batch) for dim in tensor.shape
        )
    return shapes


def _refuse_free_sizes(inputs: Tensors, sizes: Mapping[str, int], model: str) -> None:
    """Raise BadInputError unless no size is free but the batch, the first one under one name."""
    free = []
    names = set()
    for tensor in inputs:
        for axis, dim in enumerate(tensor.shape):
            if isinstance(dim, str) and dim not in sizes:
                free.append((tensor, axis, dim))
                names.add(dim)
    is_batch = all(axis == 0 for _, axis, _ in free)
    if is_batch and len(names - {ANONYMOUS}) <= 1:
        return
    listed = ", ".join(f"{tensor.name} dimension {axis} ({dim})" for tensor, axis, dim in free)
    raise BadInputError(
        f"{model} leaves sizes of its inputs free, and none is guessed: {listed}",
        hint=f"give the sizes you deploy, such as {' '.join(_suggestions(inputs, sizes))}, or "
        "real inputs with --inputs FILE.npz, or for an engine "
        f"--shapes {free[0][0].name}=min:opt:max",
    )


def _asked_batch(inputs: Tensors, asked: Asked) -> int:
    """The batch that all asked shapes of free batches agree in, else DEFAULT_BATCH."""
    # ids=4x128 and mask=4x128 agree in 4; image=2x3x224x224 beside ids=4x128 do not
    batches = set()
    for tensor in inputs:
        if asked.get(tensor.name) and isinstance(tensor.shape[0], str):
            batches.add(asked[tensor.name][0])
    return batches.pop() if len(batches) == 1 else DEFAULT_BATCH


def made_up_batch(inputs: Tensors, shapes: Asked, asked: Asked) -> str | None:
    """A sentence on the batch that was chosen where none was given; None where none was chosen."""
    names = [t.name for t in inputs if t.shape and not isinstance(t.shape[0], int)]
    if asked or not names:
        return None
    shape = shapes[names[0]]
    return (
        f"the batch of {', '.join(names)} is free in the file; {shape[0]} is taken "
        f"(choose another with --input-shape {names[0]}={'x'.join(map(str, shape))})"
    )


def _suggestions(left: Tensors, sizes: Mapping[str, int]) -> Iterator[str]:
    """Options that together fix every free dimension; each name appears once."""
    # x (batch, 3, height, width): --input-shape x=8x3x224x224; ids (batch, length) behind it: 8x128
    known = dict(sizes)
    for tensor in left:
        if all(isinstance(dim, int) or dim in known for dim in tensor.shape):
            continue
        usual = _USUAL_PIXELS if len(tensor.shape) == _IMAGE_RANK else _USUAL_TOKENS
        dims: list[int] = []
        for axis, dim in enumerate(tensor.shape):
            if isinstance(dim, int):
                dims.append(dim)
                continue
            size = known.get(dim, usual if axis else DEFAULT_BATCH)
            dims.append(size)
            if dim != ANONYMOUS:
                known[dim] = size
        yield f"{_OPTION} {tensor.name}={'x'.join(map(str, dims))}"


def random_inputs(
    tensors: Tensors, seed: int, asked: Asked | None = None, model: str = "the model"
) -> dict[str, Array]:
    """Example inputs for a model that came without any, of the shapes of `example_shapes`.

    Floats are standard normal, integers 0 or 1 (safe as token ids and masks), booleans true.
    """
    shapes = example_shapes(tensors, asked or {}, model)
    count = sum(map(prod, shapes.values()))
    if count > _MOST_VALUES:
        sizes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
        raise BadInputError(
            f"{model}: no example inputs are made up of {count:,} values ({sizes})",
            hint="give smaller shapes with --input-shape, or real inputs with --inputs FILE.npz",
        )
    random = np.random.default_rng(seed)
    return {tensor.name: _example(tensor, shapes[tensor.name], random) for tensor in tensors}


def _example(tensor: TensorShape, size: Shape, random: np.random.Generator) -> np.ndarray:
    if tensor.dtype not in _EXAMPLE_TYPES:
        raise BadInputError(
            f"no example can be made up for input {tensor.name!r} of type {tensor.dtype}",
            hint="give example inputs with --inputs FILE.npz",
        )
    if tensor.dtype == "bool":
        return np.ones(size, dtype=bool)
    if tensor.dtype.startswith("int"):
        return random.integers(0, _TOKENS_BELOW, size=size).astype(tensor.dtype)
    if tensor.dtype == "float64":
        return random.standard_normal(size)
    return random.standard_normal(size, dtype=np.float32).astype(tensor.dtype, copy=False)


def load_inputs(path: Path, tensors: Tensors) -> dict[str, Array]:
    """Example inputs from an .npz file, by input name, or by position (arr_0, arr_1, ...).

    Only a first dimension of 0 is refused: a cache of 0 past tokens is usual.
    """
    return _fitting(path, read_arrays(path), tensors)


def load_exact_inputs(path: Path, tensors: Tensors) -> dict[str, Array]:
    """`load_inputs`; raises BadInputError too for arrays that no input takes."""
    arrays = read_arrays(path)
    taken = _fitting(path, arrays, tensors)
    if len(arrays) > len(taken):
        raise BadInputError(
            f"{path} contains {sorted(set(arrays) - set(taken))}, which the model does not take",
            hint=f"its inputs are {', '.join(taken)}; leave the rest out",
        )
    return taken


def _fitting(path: Path, arrays: Arrays, tensors: Tensors) -> dict[str, Array]:
    names = [tensor.name for tensor in tensors]
    by_position = {f"arr_{index}" for index in range(len(names))}
    if set(arrays) == by_position and set(names) != by_position:
        arrays = {name: arrays[f"arr_{index}"] for index, name in enumerate(names)}
    if not set(names) <= set(arrays):
        raise BadInputError(
            f"{path} contains {sorted(arrays)}, the model takes {names}",
            hint="name the arrays after the inputs",
        )
    taken = {name: arrays[name] for name in names}
    known = [tensor for tensor in tensors if tensor.shape]  # () may be a rank that is not known
    check_fit(known, shapes_of(taken), str(path), "give an array of the shape that the model takes")
    for tensor in known:
        if taken[tensor.name].shape[0] == 0 and tensor.shape[0] != 0:
            raise BadInputError(
                f"{path}: the array for input {tensor.in_words} has 0 rows",
                hint="give an array with at least one row",
            )
    sizes_by_symbol(known, shapes_of(taken), str(path))
    return taken


LARGEST_BATCH = 8
"""Least max of a batch that nobody gave."""
LARGEST_LENGTH = 512
"""Max of a size that nobody gave and the model allows: memory is set aside for max."""

_SHAPES_OPTION = "--shapes"
_SHAPE = re.compile(r"\d{1,10}(?:x\d{1,10})*")
_SHAPES_HINT = (
    "write it like input=1x3x224x224:8x3x224x224:16x3x224x224 (min:opt:max), or one shape"
)


def parse_shapes(texts: Sequence[str]) -> tuple[ShapeProfile, ...]:
    """Read `name=min:opt:max` or `name=shape`, several of them separated by commas."""
    profiles: dict[str, ShapeProfile] = {}
    for text in texts:
        for item in text.split(","):
            profile = _parse_one(item.strip())
            if profile.input in profiles:
                raise BadInputError(f"--shapes names input {profile.input!r} twice")
            profiles[profile.input] = profile
    return tuple(profiles.values())


def _parse_one(item: str) -> ShapeProfile:
    # "x=1x3x224x224:8x3x224x224:16x3x224x224" has three shapes, "x=8x3x224x224" one for all three
    name, equals, text = item.rpartition("=")
    shapes = text.split(":")
    name = name.strip().strip("'\"")
    if not (equals and name and len(shapes) in {1, 3}) or not all(map(_SHAPE.fullmatch, shapes)):
        raise BadInputError(f"--shapes: cannot read {item!r}", hint=_SHAPES_HINT)
    parsed = [tuple(map(int, shape.split("x"))) for shape in shapes]
    if not all(min(shape) >= 1 and max(shape) <= LARGEST_SIZE for shape in parsed):
        raise BadInputError(f"--shapes: a dimension of {item!r} is not in 1..{LARGEST_SIZE}")
    if len(parsed) == 1:
        parsed *= 3
    smallest, usual, largest = parsed
    if len({len(smallest), len(usual), len(largest)}) > 1:
        raise BadInputError(
            f"--shapes: min, opt and max of {name!r} have different ranks", hint=_SHAPES_HINT
        )
    if any(sorted(sizes) != list(sizes) for sizes in zip(smallest, usual, largest, strict=True)):
        raise BadInputError(
            f"--shapes: {item!r} has a dimension without min <= opt <= max", hint=_SHAPES_HINT
        )
    return ShapeProfile(input=name, min=smallest, opt=usual, max=largest)


def bind_shapes(asked: Sequence[ShapeProfile], inputs: Tensors) -> tuple[ShapeProfile, ...]:
    """`asked`, and a profile for each other input whose free sizes follow from those by name.

    Dimensions of one name have one size: that of a token input is that of its mask. Raises
    BadInputError where `asked` does not fit the model.
    """
    _refuse_unknown([profile.input for profile in asked], inputs, _SHAPES_OPTION)
    for shapes in _ends(asked):
        check_fit(inputs, shapes, _SHAPES_OPTION, _SHAPES_HINT)
    ranges = _ranges_by_symbol(asked, inputs)
    bound = list(asked)
    given = {profile.input for profile in asked}
    for tensor in inputs:
        if tensor.name in given or is_fixed(tensor):
            continue
        if all(isinstance(dim, int) or dim in ranges for dim in tensor.shape):
            bound.append(_profile(tensor, None, ranges, {}))
    return tuple(bound)


def profiles_for(
    asked: Sequence[ShapeProfile],
    inputs: Tensors,
    examples: Asked,
    known: Mapping[str, SizeRange] | None = None,
) -> tuple[ShapeProfile, ...]:
    """One profile for each input with a free dimension: as asked for, else its example's shape.

    A free first dimension (the batch) goes from 1 to the example's, at least to LARGEST_BATCH.
    One whose range the file names (`known`) goes over it, to LARGEST_LENGTH or twice the example at
    most. Every other one stays as in the example, which is opt. Raises BadInputError without both.
    """
    bound = {profile.input: profile for profile in bind_shapes(asked, inputs)}
    ranges = _ranges_by_symbol(asked, inputs)
    for tensor in inputs:
        if tensor.name not in bound and not is_fixed(tensor):
            if tensor.name not in examples:
                raise BadInputError(
                    f"input {tensor.in_words} has a dynamic shape and no example",
                    hint=f"give its shapes with --shapes {tensor.name}=min:opt:max",
                )
            # sizes that the model fixes stand in the profile, whatever the example has
            rank = replace(tensor, shape=(ANONYMOUS,) * len(tensor.shape))
            check_fit((rank,), examples, "example inputs")
            bound[tensor.name] = _profile(tensor, examples[tensor.name], ranges, known or {})
    return tuple(bound[tensor.name] for tensor in inputs if tensor.name in bound)


def beyond_ranges(
    profiles: Sequence[ShapeProfile], inputs: Tensors, known: Mapping[str, SizeRange]
) -> tuple[str, ...]:
    """A sentence for each free size that goes beyond the range which the file itself says."""
    sentences = []
    for symbol, (low, _, high) in _ranges_by_symbol(profiles, inputs).items():
        size = known.get(symbol)
        if size is not None and (low < size.min or high > (size.max or high)):
            sentences.append(
                f"{symbol} goes from {low} to {high} in --shapes, and the file says {size.min} to "
                f"{size.max or 'no limit'}: the model was not tested beyond"
            )
    return tuple(sentences)


def _ends(profiles: Sequence[ShapeProfile]) -> Iterator[dict[str, Shape]]:
    """The min shapes by name, then opt and max."""
    yield {profile.input: profile.min for profile in profiles}
    yield opt_shapes(profiles)
    yield {profile.input: profile.max for profile in profiles}


def _ranges_by_symbol(
    profiles: Sequence[ShapeProfile], inputs: Tensors
) -> dict[str, tuple[int, int, int]]:
    """Name of a free dimension -> min, opt, max."""
    smallest, usual, largest = (
        sizes_by_symbol(inputs, shapes, _SHAPES_OPTION, _ONE_SIZE) for shapes in _ends(profiles)
    )
    return {symbol: (smallest[symbol], usual[symbol], largest[symbol]) for symbol in usual}


def _profile(
    tensor: TensorShape,
    example: Shape | None,
    ranges: dict[str, tuple[int, int, int]],
    known: Mapping[str, SizeRange],
) -> ShapeProfile:
    """The input's profile; what it decides for a name is added to `ranges`, for later inputs."""
    rows = []
    for axis, dim in enumerate(tensor.shape):
        if isinstance(dim, int):
            rows.append((dim, dim, dim))
            continue
        row = ranges.get(dim)
        if row is None:
            assert example is not None, "without an example every size is known"
            row = _default(known.get(dim), example[axis], is_batch=axis == 0)
        if dim != ANONYMOUS:
            ranges[dim] = row
        rows.append(row)
    smallest, usual, largest = zip(*rows, strict=True)
    return ShapeProfile(input=tensor.name, min=smallest, opt=usual, max=largest)


def _default(known: SizeRange | None, size: int, *, is_batch: bool) -> tuple[int, int, int]:
    """min, opt and max of a free size whose example is `size`.

    A length of 128 that the file allows from 2 to 2048 goes from 2 to 512; a batch of 4, to 8.
    """
    smallest = 1 if is_batch else size
    if known is not None:
        smallest = min(known.min, size)
    if is_batch:
        return (smallest, size, max(size, LARGEST_BATCH))
    if known is None:
        return (smallest, size, size)
    largest = max(LARGEST_LENGTH, 2 * size)
    if known.max is not None:
        largest = min(known.max, largest)
    return (smallest, size, max(size, largest))


def opt_shapes(profiles: Sequence[ShapeProfile]) -> dict[str, Shape]:
    """Input name -> the shape its runs are timed at."""
    return {profile.input: profile.opt for profile in profiles}

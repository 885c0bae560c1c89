"""Example inputs for an ONNX file: their shapes as asked for, and arrays, made up or given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from twofour.errors import BadInputError
from twofour.pipeline.sources.inputs import read_arrays, refuse_large_example
from twofour.records.export import ANONYMOUS, TensorShape
from twofour.records.options import CompareOptions, RunOptions, ShapeProfile

DEFAULT_BATCH = 8
"""Of a free first dimension that nobody gave: a batch of 1 gives sparse kernels little to win."""
_TOKENS_BELOW = 2
_EXAMPLE_TYPES = ("float32", "float16", "float64", "int64", "int32", "bool")
_USUAL_TOKENS, _USUAL_PIXELS = 128, 224
"""In the option that an error suggests; never used unasked."""
_IMAGE_RANK = 4
_OPTION = "--input-shape"
_ONE_SIZE = "the model has one size for both; give one of them and the other follows"
_HINT = "write it like --input-shape x=1x3x224x224; without a name, one for each input in order"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedShapes:
    """What --input-shape says: a shape for each input in order, or each with the input's name."""

    shapes: tuple[tuple[int, ...], ...] = ()
    names: tuple[str, ...] = ()
    """() where the shapes are given by position, else as long as `shapes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeDimension:
    """One dimension of an input that the file leaves open and nobody gave."""

    tensor: TensorShape
    axis: int

    @property
    def symbol(self) -> str:
        """The file's name for it; "?" where it has none."""
        return str(self.tensor.shape[self.axis])


def asked_or_opt(
    options: RunOptions | CompareOptions, profiles: Sequence[ShapeProfile]
) -> AskedShapes:
    """What --input-shape says; where it says nothing, the opt shapes of --shapes."""
    if options.input_shapes or not profiles:
        return AskedShapes(shapes=options.input_shapes, names=options.input_shape_names)
    return AskedShapes(
        shapes=tuple(p.opt for p in profiles), names=tuple(p.input for p in profiles)
    )


def example_shapes(
    inputs: Sequence[TensorShape], asked: AskedShapes, model: str
) -> dict[str, tuple[int, ...]]:
    """A shape for every input: as asked for, and as follows from that for dimensions of one name.

    A free first dimension that is left is a batch, as long as the one that was given, or
    DEFAULT_BATCH. No other size is made up: raises BadInputError with every free dimension and the
    option to add. The same for shapes that do not fit, or give one name two sizes. `model` begins
    the message.
    """
    given = _asked_by_name(inputs, asked)
    for tensor in inputs:
        if tensor.name in given:
            _check_fits(tensor, given[tensor.name])
    sizes = sizes_by_symbol(inputs, given)
    free = [
        FreeDimension(tensor=tensor, axis=axis)
        for tensor in inputs
        if tensor.name not in given
        for axis, dim in enumerate(tensor.shape)
        if not isinstance(dim, int) and dim not in sizes
    ]
    if not _is_batch_alone(free):
        raise _ask(inputs, free, sizes, model)
    batch = _given_batch(inputs, given)
    return {
        tensor.name: given.get(tensor.name)
        or tuple(d if isinstance(d, int) else sizes.get(d, batch) for d in tensor.shape)
        for tensor in inputs
    }


def made_up_batch(
    inputs: Sequence[TensorShape], shapes: Mapping[str, tuple[int, ...]], asked: AskedShapes
) -> str | None:
    """A sentence on the batch that was taken where none was given; None where nothing was."""
    free = [t for t in inputs if t.shape and not isinstance(t.shape[0], int)]
    if asked.shapes or not free:
        return None
    named = free[0]
    rest = "x".join(map(str, shapes[named.name]))
    return (
        f"the batch of {', '.join(t.name for t in free)} is free in the file; "
        f"{shapes[named.name][0]} is taken (--input-shape {named.name}={rest} is another)"
    )


def check_given_arrays(
    inputs: Sequence[TensorShape], given: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise BadInputError where arrays of these shapes are no inputs of the model.

    Only a first dimension of 0 is refused: a cache of 0 past tokens is usual. An input without
    dimensions may be one whose rank the file does not tell. `where` begins the message.
    """
    known = [tensor for tensor in inputs if tensor.shape]
    for tensor in known:
        shape = given[tensor.name]
        _check_fits(tensor, shape, where, "give an array of the shape that the model takes")
        if shape[0] == 0 and tensor.shape[0] != 0:
            raise BadInputError(
                f"{where}: the array for input {tensor.in_words} has 0 rows",
                hint="give an array with at least one row",
            )
    sizes_by_symbol(known, given, where, "the model has one size for both; give arrays that agree")


def sizes_by_symbol(
    inputs: Sequence[TensorShape],
    given: Mapping[str, tuple[int, ...]],
    where: str = _OPTION,
    hint: str = _ONE_SIZE,
) -> dict[str, int]:
    """Name of a dimension -> its size in the shapes that are given; those without a name left out.

    Raises BadInputError, which `where` begins, for one name of two sizes.
    """
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for tensor in inputs:
        for axis, size in enumerate(given.get(tensor.name, ())):
            symbol = tensor.shape[axis]
            if isinstance(symbol, int) or symbol == ANONYMOUS:
                continue
            if sizes.setdefault(symbol, size) != size:
                raise BadInputError(
                    f"{where}: {symbol!r} is {sizes[symbol]} in {first[symbol]} and {size} "
                    f"in {tensor.name} (dimension {axis})",
                    hint=hint,
                )
            first.setdefault(symbol, f"{tensor.name} (dimension {axis})")
    return sizes


def _asked_by_name(inputs: Sequence[TensorShape], asked: AskedShapes) -> dict[str, tuple[int, ...]]:
    if not asked.names:
        if asked.shapes and len(asked.shapes) != len(inputs):
            raise BadInputError(
                f"--input-shape: {len(asked.shapes)} shapes for the {len(inputs)} inputs "
                f"{', '.join(t.in_words for t in inputs)}",
                hint=_HINT,
            )
        return {t.name: shape for t, shape in zip(inputs, asked.shapes, strict=False)}
    known = {tensor.name for tensor in inputs}
    for name in asked.names:
        if name not in known:
            raise BadInputError(
                f"--input-shape: the model has no input {name!r}",
                hint=f"its inputs are {', '.join(t.in_words for t in inputs) or 'none'}",
            )
    return dict(zip(asked.names, asked.shapes, strict=True))


def _check_fits(
    tensor: TensorShape, shape: tuple[int, ...], where: str = _OPTION, hint: str = _HINT
) -> None:
    fits = len(shape) == len(tensor.shape) and all(
        not isinstance(dim, int) or dim == size
        for dim, size in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise BadInputError(
            f"{where}: input {tensor.in_words} cannot be {'x'.join(map(str, shape))}",
            hint=hint,
        )


def _is_batch_alone(free: Sequence[FreeDimension]) -> bool:
    """All are first dimensions, and no two of them have different names."""
    names = {dimension.symbol for dimension in free} - {ANONYMOUS}
    return all(dimension.axis == 0 for dimension in free) and len(names) <= 1


def _given_batch(inputs: Sequence[TensorShape], given: Mapping[str, tuple[int, ...]]) -> int:
    """Of the inputs that were given, where they agree."""
    free = {
        given[t.name][0] for t in inputs if given.get(t.name) and not isinstance(t.shape[0], int)
    }
    return free.pop() if len(free) == 1 else DEFAULT_BATCH


def _ask(
    inputs: Sequence[TensorShape],
    free: Sequence[FreeDimension],
    sizes: Mapping[str, int],
    model: str,
) -> BadInputError:
    listed = ", ".join(f"{d.tensor.name} dimension {d.axis} ({d.symbol})" for d in free)
    options = " ".join(_suggestions(inputs, free, sizes))
    first = free[0].tensor.name
    return BadInputError(
        f"{model} leaves sizes of its inputs free, and none is guessed: {listed}",
        hint=f"give the sizes you deploy, such as {options}, or real inputs with --inputs "
        f"FILE.npz, or for an engine --shapes {first}=min:opt:max",
    )


def _suggestions(
    inputs: Sequence[TensorShape], free: Sequence[FreeDimension], sizes: Mapping[str, int]
) -> Iterator[str]:
    """Options that together fix every free dimension; one name is asked for once."""
    known = dict(sizes)
    for tensor in inputs:
        own = [d for d in free if d.tensor.name == tensor.name]
        if all(d.symbol in known for d in own):
            continue
        dims = [
            dim if isinstance(dim, int) else known.get(dim) or _usual(tensor, axis)
            for axis, dim in enumerate(tensor.shape)
        ]
        known |= {d.symbol: dims[d.axis] for d in own if d.symbol != ANONYMOUS}
        yield f"--input-shape {tensor.name}={'x'.join(map(str, dims))}"


def _usual(tensor: TensorShape, axis: int) -> int:
    if axis == 0:
        return DEFAULT_BATCH
    return _USUAL_PIXELS if len(tensor.shape) == _IMAGE_RANK else _USUAL_TOKENS


def random_inputs(
    shapes: tuple[TensorShape, ...],
    seed: int,
    asked: AskedShapes | None = None,
    model: str = "the model",
) -> dict[str, np.ndarray]:
    """Example inputs for a model that came without any, of the shapes of `example_shapes`.

    Floats are standard normal, integers 0 or 1 (safe as token ids and masks), booleans true.
    Raises BadInputError for a type that cannot be made up, for shapes that do not fit or are
    missing, and for inputs that are too large.
    """
    sizes = example_shapes(shapes, asked or AskedShapes(), model)
    _check_size_bytes(shapes, sizes, model)
    random = np.random.default_rng(seed)
    return {s.name: _example(s, sizes[s.name], random) for s in shapes}


def load_inputs(path: Path, shapes: tuple[TensorShape, ...]) -> dict[str, np.ndarray]:
    """Example inputs from an .npz file, by input name, or by position (arr_0, arr_1, ...).

    Raises BadInputError when the file is no .npz, lacks an input of the model, or holds arrays
    whose sizes do not fit it or each other.
    """
    return _fitting(path, read_arrays(path), shapes)


def load_exact_inputs(path: Path, shapes: tuple[TensorShape, ...]) -> dict[str, np.ndarray]:
    """`load_inputs`; raises BadInputError too for arrays that no input takes.

    So does `forward` of a torch model.
    """
    arrays = read_arrays(path)
    taken = _fitting(path, arrays, shapes)
    if len(arrays) > len(taken):
        raise BadInputError(
            f"{path} holds {sorted(set(arrays) - set(taken))}, which the model does not take",
            hint=f"its inputs are {', '.join(taken)}; leave the rest out",
        )
    return taken


def _fitting(
    path: Path, arrays: Mapping[str, np.ndarray], shapes: tuple[TensorShape, ...]
) -> dict[str, np.ndarray]:
    taken = _by_name_or_position(path, arrays, [shape.name for shape in shapes])
    check_given_arrays(shapes, {name: a.shape for name, a in taken.items()}, str(path))
    return taken


def _by_name_or_position(
    path: Path, arrays: Mapping[str, np.ndarray], names: list[str]
) -> dict[str, np.ndarray]:
    if set(names) <= set(arrays):
        return {name: arrays[name] for name in names}
    if set(arrays) == {f"arr_{i}" for i in range(len(names))}:
        return {name: arrays[f"arr_{i}"] for i, name in enumerate(names)}
    raise BadInputError(
        f"{path} holds {sorted(arrays)}, the model takes {names}",
        hint="name the arrays after the inputs",
    )


def _check_size_bytes(
    shapes: tuple[TensorShape, ...], sizes: Mapping[str, tuple[int, ...]], model: str
) -> None:
    """One by one, so that the message names the input and what the file fixes."""
    total = 0
    for tensor in shapes:
        size = sizes[tensor.name]
        fixed = [str(d) for d in tensor.shape if isinstance(d, int) and d > 1]
        where = f" (the file fixes {', '.join(fixed)})" if fixed else ""
        total += prod(size) * _item_bytes(tensor.dtype)
        refuse_large_example(f"{model}: input {tensor.name!r}{where}", size, total)


def _item_bytes(dtype: str) -> int:
    return np.dtype(dtype).itemsize if dtype in _EXAMPLE_TYPES else 1


def _example(shape: TensorShape, size: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if shape.dtype not in _EXAMPLE_TYPES:
        raise BadInputError(
            f"no example can be made up for input {shape.name!r} of type {shape.dtype}",
            hint="give example inputs with --inputs FILE.npz",
        )
    if shape.dtype == "bool":
        return np.ones(size, dtype=bool)
    if shape.dtype.startswith("int"):
        return random.integers(0, _TOKENS_BELOW, size=size).astype(shape.dtype)
    if shape.dtype == "float64":
        return random.standard_normal(size)
    return random.standard_normal(size, dtype=np.float32).astype(shape.dtype, copy=False)

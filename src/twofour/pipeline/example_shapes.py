"""Shapes of the example inputs that are made up for an ONNX file: as asked for, else a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from twofour.errors import BadInputError
from twofour.records.export import ANONYMOUS, TensorShape
from twofour.records.options import CompareOptions, RunOptions, ShapeProfile

DEFAULT_BATCH = 8
"""Of a free first dimension that nobody gave: a batch of 1 gives sparse kernels little to win."""
LARGEST_EXAMPLE_BYTES = 1 << 30
"""Of all inputs that are made up for one model: more is refused before any memory is asked for."""

_USUAL_TOKENS, _USUAL_PIXELS = 128, 224
"""In the option that an error suggests; never used unasked."""
_IMAGE_RANK = 4
_MOST_DIMENSIONS = 32
"""Of a numpy array before 2.0; no engine takes more than a few."""
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
    given = _by_name(inputs, asked)
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


def refuse_large_example(what: str, shape: Sequence[int], total_bytes: int) -> None:
    """Raise BadInputError where the examples up to this one take more than is made up.

    `what` names the input. No memory is asked for before: a file may fix a size of 2^31 and more.
    """
    words = "x".join(map(str, shape))
    if len(shape) > _MOST_DIMENSIONS:
        raise BadInputError(
            f"{what} has {len(shape)} dimensions; no example with more than {_MOST_DIMENSIONS} "
            "is made up"
        )
    if total_bytes > LARGEST_EXAMPLE_BYTES:
        raise BadInputError(
            f"{what}: example inputs up to this one, {words}, would take {total_bytes:,} bytes; "
            f"at most {LARGEST_EXAMPLE_BYTES:,} bytes are made up",
            hint="give smaller shapes with --input-shape, or real inputs with --inputs FILE.npz",
        )


def _by_name(inputs: Sequence[TensorShape], asked: AskedShapes) -> dict[str, tuple[int, ...]]:
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

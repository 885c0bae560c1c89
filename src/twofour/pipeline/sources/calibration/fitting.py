"""Arrays from outside, as inputs of the model: named, in its types, of its shapes, finite."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.engines.inputs import numpy_dtype
from twofour.errors import BadInputError
from twofour.pipeline.sources.calibration.data import ModelInput, ModelInputs
from twofour.records.export import ANONYMOUS
from twofour.words import count as count_of

_POSITIONAL = re.compile(r"arr_(\d+)")
"""How numpy.savez calls arrays that were given without a name."""
_GENERATED = re.compile(r"unk__\d+|.*_dynamic_axes_\d+|s\d+")
"""How converters call free sizes, each by another name: of tf2onnx, and both exporters of torch."""
_NAMES_HINT = "name the arrays after the inputs of the model"


def by_name(inputs: ModelInputs, given: Sequence[str], where: str) -> dict[str, str]:
    """Name of the model's input -> name of the array for it, in the model's order.

    Arrays without names (arr_0, arr_1, ...) are taken by position; arrays that no input takes are
    left out. Raises BadInputError, which `where` begins, where an input has no array.
    """
    positions = sorted(int(match[1]) for n in given if (match := _POSITIONAL.fullmatch(n)))
    if positions == list(range(len(given))) and not _all_known(inputs, given):
        names = by_position(inputs, len(given), where)
        return {name: f"arr_{index}" for index, name in enumerate(names)}
    taken = {one.name: one.name for one in inputs.inputs if one.name in given}
    if inputs.any_name:
        taken.update((name, name) for name in given if name not in taken)
    missing = [one.in_words for one in inputs.inputs if one.required and one.name not in taken]
    if missing or not taken:
        raise BadInputError(
            f"{where} holds {', '.join(sorted(given)) or 'nothing'}; "
            f"the model takes {inputs.in_words}",
            hint=_NAMES_HINT,
        )
    return taken


def by_position(inputs: ModelInputs, count: int, where: str) -> tuple[str, ...]:
    """Names of the inputs that `count` arrays without names are for.

    Raises BadInputError where there are more than the model takes, or fewer than it needs.
    """
    names = list(inputs.positional[:count])
    if inputs.any_number:
        names += [f"arr_{index}" for index in range(len(names), count)]
    if len(names) < count:
        raise BadInputError(
            f"{where} is {count_of(count, 'array')}, and {inputs.model} takes {len(names)}: "
            f"{', '.join(names) or 'none'}",
            hint="a loader of (inputs, labels) pairs gives more than the model takes: leave the "
            "labels out, as in [inputs for inputs, _ in loader]; a dict names the input of each",
        )
    missing = [one.in_words for one in inputs.inputs if one.required and one.name not in names]
    if missing or not count:
        raise BadInputError(
            f"{where} is {count_of(count, 'array')}; {inputs.model} needs "
            f"{', '.join(missing) or 'one'} too",
            hint=_NAMES_HINT,
        )
    return tuple(names)


def _all_known(inputs: ModelInputs, given: Sequence[str]) -> bool:
    return all(inputs.known(name) is not None for name in given)


def fixed_batch(inputs: ModelInputs) -> int | None:
    """Samples that the model takes at once, where its inputs fix that; None: any number."""
    shapes = [one.shape for one in inputs.inputs if one.shape]
    if not shapes or any(not isinstance(shape[0], int) for shape in shapes):
        return None
    return int(shapes[0][0])


def per_sample(inputs: ModelInputs, arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the arrays whose first axis counts samples; the others are given whole every time.

    () where first axes have several names in the file, as nodes and edges of a graph have: then
    nothing can be cut. Names that a converter made up say nothing where the sizes agree.
    """
    batch = fixed_batch(inputs)
    known = {one.name: one.shape for one in inputs.inputs if one.shape}
    if batch is not None:
        return tuple(n for n in arrays if known.get(n, (batch,))[0] == batch and arrays[n].ndim)
    free = {n: s[0] for n, s in known.items() if n in arrays and not isinstance(s[0], int)}
    symbols = {str(symbol) for symbol in free.values()} - {ANONYMOUS}
    agree = len({arrays[name].shape[:1] for name in free}) == 1
    if len(symbols) > 1 and not (agree and all(map(_GENERATED.fullmatch, symbols))):
        return ()
    if free:
        return tuple(free)
    rows = next((array.shape[0] for array in arrays.values() if array.ndim), None)
    return tuple(n for n, array in arrays.items() if array.ndim and array.shape[0] == rows)


def fitted(
    inputs: ModelInputs, arrays: Mapping[str, NDArray[Any]], where: str
) -> dict[str, NDArray[Any]]:
    """The arrays, named after the model's inputs, in its types.

    Raises BadInputError, which `where` begins, for another rank or fixed size, two sizes of one
    name, a type that cannot be meant, and NaN or infinity.
    """
    check_shapes(inputs, arrays, where)
    found = {}
    for name, array in arrays.items():
        one = inputs.known(name) or ModelInput(name=name)
        found[name] = _finite(_typed(one, array, where, inputs.floats), one, where)
    return found


def check_shapes(inputs: ModelInputs, arrays: Mapping[str, NDArray[Any]], where: str) -> None:
    """Raise BadInputError for another rank or fixed size, and two sizes of one name.

    How many samples there are is not looked at: that is decided where data are cut.
    """
    cut = per_sample(inputs, arrays)
    sizes: dict[str, tuple[str, int]] = {}
    for name, array in arrays.items():
        one = inputs.known(name) or ModelInput(name=name)
        _check_shape(one, array, name in cut, where)
        _check_symbols(one, array, 1 if name in cut else 0, (sizes, where))


def _check_shape(one: ModelInput, array: NDArray[Any], is_cut: bool, where: str) -> None:
    if one.shape is None:
        return
    skipped = 1 if is_cut else 0
    fits = array.ndim == len(one.shape) and all(
        not isinstance(dim, int) or dim == size
        for dim, size in list(zip(one.shape, array.shape, strict=True))[skipped:]
    )
    if not fits:
        raise BadInputError(
            f"{where}: the array for input {one.in_words} is {_dims(array.shape)}",
            hint="give arrays of the shape that the model takes, samples along the first axis",
        )


def _check_symbols(
    one: ModelInput,
    array: NDArray[Any],
    skipped: int,
    known: tuple[dict[str, tuple[str, int]], str],
) -> None:
    """One name in the file is one size."""
    sizes, where = known
    for axis, symbol in enumerate(one.shape or ()):
        if axis < skipped or isinstance(symbol, int) or symbol == ANONYMOUS:
            continue
        first, size = sizes.setdefault(symbol, (one.name, array.shape[axis]))
        if size != array.shape[axis]:
            raise BadInputError(
                f"{where}: {symbol!r} is {size} in {first} and {array.shape[axis]} in {one.name} "
                f"(dimension {axis})",
                hint="the model has one size for both; give arrays that agree",
            )


def _typed(one: ModelInput, array: NDArray[Any], where: str, floats: str | None) -> NDArray[Any]:
    source = array.dtype
    if not _is_float(source) and source.kind not in "iubc":
        raise BadInputError(f"{where}: the array for input {one.name} has type {source}, no number")
    wanted = one.dtype or (floats if floats and _is_float(source) else source.name)
    if source.name == wanted:
        return array.astype(source.newbyteorder("="), copy=False)
    target = numpy_dtype(wanted)
    if _is_float(source) and _is_float(target):
        with np.errstate(over="ignore"):  # infinity is refused, with its place
            return array.astype(target)
    if source.kind in "iub" and target.kind in "iub":
        converted = array.astype(target)
        if np.array_equal(converted, array):
            return converted
    raise BadInputError(
        f"{where}: the array for input {one.in_words} has type {source.name}",
        hint="pixels 0 to 255 must be scaled as the model expects them, and become floats"
        if _is_float(target)
        else f"write it with .astype('{wanted}')",
    )


def _finite(array: NDArray[Any], one: ModelInput, where: str) -> NDArray[Any]:
    if not _is_float(array.dtype):
        return array
    finite = np.isfinite(array)
    if not finite.all():
        place = tuple(int(index) for index in np.argwhere(~finite)[0])
        raise BadInputError(
            f"{where}: the array for input {one.name} has {int((~finite).sum())} values that are "
            f"not finite as {array.dtype.name}, the first at {list(place)}",
            hint="calibration sums over all values: leave such samples out",
        )
    return array


def _is_float(dtype: np.dtype[Any]) -> bool:
    # ml_dtypes' types have kind "V"; only their names tell that they are floats
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a single number"

"""Example inputs for an ONNX file: made up, or given."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from twofour.errors import BadInputError
from twofour.pipeline.example_shapes import (
    AskedShapes,
    check_given_arrays,
    example_shapes,
    refuse_large_example,
)
from twofour.pipeline.sources.inputs import read_arrays, write_arrays
from twofour.records.export import TensorShape
from twofour.store import atomic_file

_TOKENS_BELOW = 2
_EXAMPLE_TYPES = ("float32", "float16", "float64", "int64", "int32", "bool")


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
    _check_size(shapes, sizes, model)
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
    taken = _by_input(path, arrays, [shape.name for shape in shapes])
    check_given_arrays(shapes, {name: a.shape for name, a in taken.items()}, str(path))
    return taken


def _by_input(
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


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz atomically."""
    with atomic_file(path) as temporary:
        write_arrays(temporary, arrays)


def _check_size(
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

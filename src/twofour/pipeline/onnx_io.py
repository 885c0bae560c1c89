"""What an ONNX file takes and gives, and example inputs for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from twofour.errors import BadInputError
from twofour.graph import load_model
from twofour.pipeline.sources.arrays import read_arrays
from twofour.records import TensorShape
from twofour.store import atomic_file

if TYPE_CHECKING:
    import onnx

_DYNAMIC_EXAMPLE = 2
_TOKENS_BELOW = 2
_EXAMPLE_TYPES = ("float32", "float16", "float64", "int64", "int32", "bool")


def describe(path: Path) -> tuple[tuple[TensorShape, ...], tuple[TensorShape, ...], int]:
    """Inputs, outputs and default-domain opset of an ONNX file; its weights are not read."""
    model = load_model(path, weights=False)
    initializers = {i.name for i in model.graph.initializer}
    inputs = tuple(_shape(v) for v in model.graph.input if v.name not in initializers)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    return inputs, tuple(_shape(v) for v in model.graph.output), opset


def random_inputs(
    shapes: tuple[TensorShape, ...], seed: int, sizes: Sequence[tuple[int, ...]] = ()
) -> dict[str, np.ndarray]:
    """Example inputs for a model that came without any.

    `sizes` gives shapes by position; without, named dimensions become 2. Floats are standard
    normal, integers 0 or 1 (safe as token ids and masks), booleans true. Raises BadInputError for
    a type that cannot be made up, or where `sizes` does not fit.
    """
    if sizes and [len(s) for s in sizes] != [len(s.shape) for s in shapes]:
        raise BadInputError(
            f"the model takes {[list(s.shape) for s in shapes]}, found {[list(s) for s in sizes]}",
            hint="give one --input-shape for each input, in order",
        )
    random = np.random.default_rng(seed)
    wanted = sizes or [_made_up(shape) for shape in shapes]
    return {s.name: _example(s, size, random) for s, size in zip(shapes, wanted, strict=True)}


def load_inputs(path: Path, shapes: tuple[TensorShape, ...]) -> dict[str, np.ndarray]:
    """Example inputs from an .npz file, by input name, or by position (arr_0, arr_1, ...).

    Raises BadInputError when the file is no .npz, or lacks an input of the model.
    """
    arrays = read_arrays(path)
    names = [shape.name for shape in shapes]
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
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # the stub takes names for allow_pickle


def _shape(value: onnx.ValueInfoProto) -> TensorShape:
    import onnx

    tensor = value.type.tensor_type
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    except (KeyError, ValueError):
        dtype = "unknown"
    dims = tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or "?") for d in tensor.shape.dim
    )
    return TensorShape(name=value.name, dtype=dtype, shape=dims)


def _made_up(shape: TensorShape) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) and d > 0 else _DYNAMIC_EXAMPLE for d in shape.shape)


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
    return random.standard_normal(size).astype(shape.dtype)

"""Arrays by name: kept in .npz files, and brought to the shapes and types that a model takes."""

from __future__ import annotations

import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.records.export import ANONYMOUS, TensorShape
from twofour.store import atomic_file

Array = NDArray[Any]
Arrays = Mapping[str, Array]
"""Inputs or outputs of one run, by tensor name."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of inputs, by tensor name."""


class Input(Protocol):
    """An input of a model, as far as its shape is known."""

    @property
    def name(self) -> str:
        """The model's name for it."""

    @property
    def shape(self) -> tuple[int | str, ...] | None:
        """Sizes, and names of those that are free ("?": without a name); None: not known."""

    @property
    def in_words(self) -> str:
        """Name and dimensions, for messages."""


def is_fixed(tensor: TensorShape) -> bool:
    """Whether the model leaves no dimension of that input free."""
    return all(isinstance(dim, int) for dim in tensor.shape)


def batch_names(tensors: Iterable[TensorShape]) -> frozenset[str]:
    """Names of the free sizes that count samples: first ones, and of these those called batch."""
    first_sizes = [tensor.shape[0] for tensor in tensors if tensor.shape]
    first = frozenset(size for size in first_sizes if isinstance(size, str))
    return frozenset(name for name in first if "batch" in name.lower()) or first


def check_fit(
    inputs: Iterable[Input],
    given: Shapes,
    where: str,
    hint: str | None = None,
    cut: Collection[str] = (),
) -> None:
    """Raise BadInputError, which `where` begins, for another rank or another fixed size.

    The first size of the inputs in `cut` counts samples, and is not compared.
    """
    for one in inputs:
        shape = given.get(one.name)
        if shape is None or one.shape is None:
            continue
        if not _fits(one.shape, shape, first=1 if one.name in cut else 0):
            sizes = "x".join(map(str, shape)) or "a single number"
            raise BadInputError(f"{where}: input {one.in_words} cannot be {sizes}", hint=hint)


def _fits(wanted: Sequence[int | str], shape: Sequence[int], first: int) -> bool:
    """Whether the ranks are equal, and the fixed sizes from axis `first` on."""
    if len(wanted) != len(shape):
        return False
    pairs = zip(wanted[first:], shape[first:], strict=True)
    return all(isinstance(dim, str) or dim == size for dim, size in pairs)


def sizes_by_symbol(
    inputs: Iterable[Input],
    given: Shapes,
    where: str,
    hint: str = "the model has one size for both; give arrays that agree",
    cut: Collection[str] = (),
) -> dict[str, int]:
    """Name of a free dimension -> its size; raises BadInputError where one name has two sizes.

    Dimensions without a name and the first one of the inputs in `cut` are left out.
    """
    # inputs ids (batch, sequence) and mask (batch, sequence), given as (2, 16) and (2, 8):
    # ids makes sizes {"batch": 2, "sequence": 16} and first {"sequence": "ids (dimension 1)", ...};
    # mask agrees in the batch, and its 8 is refused with both places named
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for one in inputs:
        pairs = zip(one.shape or (), given.get(one.name, ()), strict=False)
        for axis, (symbol, size) in enumerate(pairs):
            if isinstance(symbol, int) or symbol == ANONYMOUS or (axis == 0 and one.name in cut):
                continue
            place = f"{one.name} (dimension {axis})"
            known = sizes.setdefault(symbol, size)
            known_from = first.setdefault(symbol, place)
            if known != size:
                raise BadInputError(
                    f"{where}: {symbol!r} is {known} in {known_from} and {size} in {place}",
                    hint=hint,
                )
    return sizes


def numpy_type(name: str) -> np.dtype[Any]:
    """The numpy type of that name; bfloat16 and the float8 types come from ml_dtypes."""
    import ml_dtypes  # noqa: F401  # it adds its types to numpy's

    return np.dtype(name)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether the type is one of floats; those of ml_dtypes have kind "V" and such a name."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def cast_array(array: Array, dtype: str) -> Array | None:
    """The array in that type and this machine's byte order; None where values would be lost."""
    if array.dtype.name == dtype:
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    target = numpy_type(dtype)
    if is_float(array.dtype) and is_float(target):
        with np.errstate(over="ignore"):
            return array.astype(target)
    if array.dtype.kind in "iub" and target.kind in "iub":
        cast = array.astype(target)
        if np.array_equal(cast, array):
            return cast
    return None


def fit_inputs(inputs: Arrays, wanted: Sequence[TensorShape]) -> dict[str, Array]:
    """The inputs a model wants, contiguous and in its types; raises BadInputError."""
    names = {tensor.name for tensor in wanted}
    if set(inputs) != names:
        raise BadInputError(
            f"the model takes the inputs {sorted(names)}, found {sorted(inputs)}",
            hint="the inputs must have the names of the model's inputs",
        )
    check_fit(wanted, shapes_of(inputs), "the inputs do not fit the model")
    fitting = {}
    for tensor in wanted:
        given = np.asarray(inputs[tensor.name])
        array = cast_array(given, tensor.dtype)
        if array is None:
            raise BadInputError(
                f"input {tensor.name!r} has the type {tensor.dtype} in the model, "
                f"found {given.dtype.name}"
            )
        fitting[tensor.name] = np.require(array, requirements="C")
    return fitting


def float32_array(tensor: Any) -> Array:  # noqa: ANN401  # torch is not imported here
    """A torch tensor in numpy; floating point of any width as float32."""
    if tensor.is_floating_point():
        tensor = tensor.float()
    return np.require(array_from_tensor(tensor), requirements="C")


def array_from_tensor(tensor: Any) -> Array:  # noqa: ANN401  # torch is not imported here
    """A torch tensor in numpy, of its own type, bfloat16 too; on a CPU its own memory."""
    import torch

    plain = tensor.detach().cpu()
    if plain.dtype is torch.bfloat16:
        bits: Array = plain.view(torch.int16).numpy()
        return bits.view(numpy_type("bfloat16"))
    array: Array = plain.resolve_conj().resolve_neg().numpy()
    return array


def tensor_from_array(array: Array) -> Any:  # noqa: ANN401  # torch is not imported here
    """The array in torch, of its own type and in memory of its own."""
    import torch

    own = np.array(array)  # mapped files are read-only, which torch cannot say of a tensor
    if own.dtype.name == "bfloat16":
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)


def torch_type_name(tensor: Any) -> str:  # noqa: ANN401  # torch is not imported here
    """The name numpy or ml_dtypes has for the type of a torch tensor: "float32", "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    """Shape of each array, by name."""
    return {name: tuple(map(int, np.shape(array))) for name, array in arrays.items()}


def at_shapes(inputs: Arrays, shapes: Shapes) -> dict[str, Array]:
    """Inputs cut or repeated along each axis until they have the shapes asked for."""
    # (2, 5) asked to be (4, 3): rows 0 1 0 1, columns 0 1 2
    shaped = dict(inputs)
    for name, shape in shapes.items():
        array = shaped.get(name)
        if array is None or len(shape) != array.ndim or 0 in array.shape:
            continue
        for axis, length in enumerate(shape):
            if length != array.shape[axis]:
                array = array.take(np.arange(length) % array.shape[axis], axis=axis)
        shaped[name] = array
    return shaped


NPZ_HINT = "write it with numpy.savez('inputs.npz', input_ids=..., attention_mask=...)"


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file in its order; BadInputError for objects (pickles) and for none."""
    arrays = stored_arrays(path)
    if not arrays:
        raise BadInputError(f"{path} contains no array", hint=NPZ_HINT)
    return arrays


def stored_arrays(path: Path) -> dict[str, Array]:
    """`read_arrays` for files that a stage wrote: a model without inputs has none."""
    if path.is_file() and not zipfile.is_zipfile(path):
        raise BadInputError(
            f"{path} is not a readable .npz file: it is not a zip file", hint=NPZ_HINT
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # zipfile, zlib and numpy each have their own for damage
        raise BadInputError(
            f"{path} is not a readable .npz file: {error}", hint=NPZ_HINT
        ) from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy gives members that are no .npy as bytes
            raise BadInputError(f"{path}: {name!r} in it is not an array", hint=NPZ_HINT)
    return arrays


def run_batches(
    outputs: Callable[[dict[str, Array]], Arrays], inputs: Arrays, most_bytes: float = inf
) -> dict[str, Array]:
    """Outputs for inputs by `<number of the batch>:<name>`, named alike, until they are large."""
    batches: dict[str, dict[str, Array]] = defaultdict(dict)
    for key, array in inputs.items():
        number, _, name = key.partition(":")
        batches[number][name] = array
    every: dict[str, Array] = {}
    for number, batch in batches.items():
        for name, array in outputs(batch).items():
            every[f"{number}:{name}"] = array
        if sum(array.nbytes for array in every.values()) > most_bytes:
            break
    return every


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write an .npz atomically, narrow floats as float32; savez cannot name an array `file`."""
    with atomic_file(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            plain = np.asanyarray(array)
            if plain.dtype.kind == "O":  # texts, which are not pickled
                plain = plain.astype(str)
            elif plain.dtype.kind == "V" and plain.dtype.names is None:  # of ml_dtypes
                plain = plain.astype(np.int8 if "int" in plain.dtype.name else np.float32)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, plain, allow_pickle=False)

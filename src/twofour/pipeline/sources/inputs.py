"""Example inputs: given arrays, and what a module is called with."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.records.options import ExampleInputs
from twofour.store import atomic_file

if TYPE_CHECKING:
    import torch
    from torch import nn

LARGEST_EXAMPLE_BYTES = 1 << 30
"""Of all inputs that are made up for one model: more is refused before any memory is asked for."""
_MOST_DIMENSIONS = 32
"""Of a numpy array before 2.0; no engine takes more than a few."""
_ALWAYS_READ_BYTES = 256 << 20
_MOST_UNPACKED = 20
"""Times the size of the file: real arrays shrink to a half, token ids and masks to a tenth."""
_LONGEST_NAME = 65_000
NPZ_HINT = "write it with numpy.savez('inputs.npz', input_ids=..., attention_mask=...)"
_FLOAT_BYTES = 4
_POSITIONAL = re.compile(r"arr_(\d+)")
"""How numpy.savez calls arrays that were given without a name."""
_BUILT_IN_SENTENCES = Path(__file__).with_name("sentences.txt")


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file by name, in the order of the file.

    Object arrays are refused: numpy reads them with pickle, which runs code. Raises BadInputError,
    also for a file without an array.
    """
    arrays = stored_arrays(path)
    if not arrays:
        raise BadInputError(f"{path} holds no array", hint=NPZ_HINT)
    return arrays


def stored_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """`read_arrays` for files that a stage wrote: a model without inputs has none."""
    try:
        check_archive(path)
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except BadInputError:
        raise
    except Exception as error:  # zipfile, zlib and numpy each have their own for damage
        raise BadInputError(f"{path} is no readable .npz file: {error}", hint=NPZ_HINT) from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy gives members that are no .npy as bytes
            raise BadInputError(f"{path}: {name!r} in it is no array", hint=NPZ_HINT)
    return arrays


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an .npz atomically; raises BadInputError for a name that no .npz can hold.

    Not by numpy.savez, which takes names as arguments: an input may be called `file`.
    """
    with atomic_file(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            _check_name(name)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, _plain(np.asanyarray(array)), allow_pickle=False)


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Of a type that an .npz keeps: bfloat16 and float8 as float32, texts without pickle."""
    if array.dtype.kind == "O":
        return array.astype(str)
    if array.dtype.kind == "V" and array.dtype.names is None:
        return array.astype(np.int8 if "int" in array.dtype.name else np.float32)
    return array


def _check_name(name: str) -> None:
    """A zip file ends names at a NUL, and its header holds 65,535 bytes of UTF-8."""
    fits = "\0" not in name and not any("\ud800" <= letter <= "\udfff" for letter in name)
    if not fits or len(name.encode()) > _LONGEST_NAME:
        raise BadInputError(
            f"no .npz file can hold an array of the name {name[:80]!r}",
            hint="rename the input or output of the model",
        )


def check_archive(path: Path) -> None:
    """Refuse what is no zip file, and a small one of packed zeros that would fill the memory."""
    if path.is_file() and not zipfile.is_zipfile(path):
        raise BadInputError(f"{path} is no readable .npz file: it is no zip file", hint=NPZ_HINT)
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    packed = path.stat().st_size
    if size > max(_ALWAYS_READ_BYTES, _MOST_UNPACKED * packed):
        raise BadInputError(
            f"{path} has {packed} bytes and would unpack to {size}",
            hint="write it with numpy.savez, which does not compress",
        )


def read_sentences(path: Path | None) -> tuple[str, ...]:
    """The lines of a text file that are not blank; for None the 20 sentences that come along.

    Raises BadInputError when the file cannot be read, is not UTF-8 or has no such line.
    """
    path = path or _BUILT_IN_SENTENCES
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read sentences from {path}: {error}") from error
    sentences = tuple(line.strip() for line in lines if line.strip())
    if not sentences:
        raise BadInputError(f"{path} holds no sentence", hint="write one sentence on each line")
    return sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments for one call of forward."""

    args: tuple[torch.Tensor, ...] = ()
    kwargs: dict[str, torch.Tensor] = field(default_factory=dict)


def inputs_from_options(module: nn.Module, options: ExampleInputs) -> Arguments | None:
    """What --inputs or --input-shape say; None where the user gave neither.

    Raises BadInputError when both are given, or the file is no .npz with numbers.
    """
    if options.input_shapes:
        made = _random_tensors(options)
        if options.input_shape_names:
            return Arguments(kwargs=dict(zip(options.input_shape_names, made, strict=True)))
        return Arguments(args=made)
    if options.file is None:
        return None
    if options.file.suffix != ".npz":
        raise BadInputError(
            f"{options.inputs} cannot be used as inputs of {type(module).__name__}",
            hint="give an .npz file; sentences in a .txt file are for Hugging Face text models",
        )
    arrays = read_arrays(options.file)
    tensors = {name: _tensor(module, name, array) for name, array in arrays.items()}
    by_position = sorted(
        (int(match[1]), name) for name in tensors if (match := _POSITIONAL.fullmatch(name))
    )
    args = tuple(tensors.pop(name) for _, name in by_position)
    return Arguments(args=args, kwargs=tensors)


def inputs_from_value(value: object, where: str) -> Arguments:
    """Example inputs as user code gives them: a tensor, a tuple or list of them, or a dict.

    Raises BadInputError naming the type of whatever else is found; `where` begins its message.
    """
    import torch

    if isinstance(value, (torch.Tensor, np.ndarray)):
        return Arguments(args=(_as_tensor(value, where),))
    if isinstance(value, (tuple, list)) and value:
        return Arguments(
            args=tuple(_as_tensor(v, f"{where}: example input #{i}") for i, v in enumerate(value))
        )
    if isinstance(value, Mapping) and value:
        kwargs = {str(n): _as_tensor(v, f"{where}: example input {n!r}") for n, v in value.items()}
        return Arguments(kwargs=kwargs)
    raise BadInputError(
        f"{where}: the example inputs are {_kind(value)}",
        hint="give a tensor, a tuple of tensors, or a dict of tensors by name",
    )


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


def _random_tensors(options: ExampleInputs) -> tuple[torch.Tensor, ...]:
    import torch

    for shape in options.input_shapes:
        if any(size < 1 for size in shape):
            raise BadInputError(f"input shape {shape} has a dimension below 1")
    total = 0
    for shape in options.input_shapes:
        total += prod(shape) * _FLOAT_BYTES
        refuse_large_example("--input-shape", shape, total)
    generator = torch.Generator().manual_seed(options.seed)
    return tuple(torch.randn(shape, generator=generator) for shape in options.input_shapes)


def _tensor(module: nn.Module, name: str, array: NDArray[Any]) -> torch.Tensor:
    """float64 is numpy's default, not a choice: it becomes float32 unless the model has float64."""
    import torch

    is_double = any(p.dtype == torch.float64 for p in module.parameters())
    if array.dtype == np.float64 and not is_double:
        array = array.astype(np.float32)
    return _as_tensor(array, f"array {name!r}")


def _as_tensor(value: object, where: str) -> torch.Tensor:
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        except TypeError as error:
            raise BadInputError(f"{where} has numpy type {value.dtype}, not a number") from error
    if isinstance(value, (tuple, list, Mapping)):
        raise BadInputError(
            f"{where} is {_kind(value)}, not a tensor",
            hint="wrap the model in a module whose forward takes tensors and puts them together; "
            "keyword arguments of forward are given as a dict that stands in no tuple",
        )
    raise BadInputError(
        f"{where} is {_kind(value)}, not a tensor",
        hint="give what is not a tensor a default in forward, or set it in the callable",
    )


def _kind(value: object) -> str:
    if isinstance(value, (tuple, list, Mapping)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"

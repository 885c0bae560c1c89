"""Example inputs as the user keeps them in files: arrays in .npz, sentences in .txt."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError

_ALWAYS_READ_BYTES = 256 << 20
_MOST_UNPACKED = 20
"""Times the size of the file: real arrays shrink to a half, token ids and masks to a tenth."""
_LONGEST_NAME = 65_000
_BUILT_IN_SENTENCES = Path(__file__).with_name("sentences.txt")


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file by name, in the order of the file.

    Object arrays are refused: numpy reads them with pickle, which runs code. Raises BadInputError,
    also for a file without an array.
    """
    arrays = stored_arrays(path)
    if not arrays:
        raise BadInputError(f"{path} holds no array", hint=_NPZ_HINT)
    return arrays


def stored_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """`read_arrays` for files that a stage wrote: a model without inputs has none."""
    try:
        _check_archive(path)
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except BadInputError:
        raise
    except Exception as error:  # zipfile, zlib and numpy each have their own for damage
        raise BadInputError(f"{path} is no readable .npz file: {error}", hint=_NPZ_HINT) from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy gives members that are no .npy as bytes
            raise BadInputError(f"{path}: {name!r} in it is no array", hint=_NPZ_HINT)
    return arrays


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an .npz; raises BadInputError for a name that no .npz can hold.

    Not by numpy.savez, which takes names as arguments: an input may be called `file`.
    """
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
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


def _check_archive(path: Path) -> None:
    """Refuse what is no zip file, and a small one of packed zeros that would fill the memory."""
    if path.is_file() and not zipfile.is_zipfile(path):
        raise BadInputError(f"{path} is no readable .npz file: it is no zip file", hint=_NPZ_HINT)
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


_NPZ_HINT = "write it with numpy.savez('inputs.npz', input_ids=..., attention_mask=...)"

"""The header of a safetensors file, checked against the file, and its arrays mapped.

Source: the format's description in the README of huggingface/safetensors: 8 bytes of length, a JSON
header, the data. Read here because numpy's own loader knows neither bfloat16 nor float8.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from twofour.errors import BadInputError
from twofour.graph_files import map_region
from twofour.graph_tensors import Array, numpy_dtype

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_LARGEST_HEADER = 100_000_000
"""What the reference implementation accepts."""
_LARGEST_RANK = 32
_LARGEST_DIMENSION = 1 << 62
_HINT = "the file is damaged or no safetensors file: save or copy it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One entry of the header."""

    dtype: str | None
    """Numpy's name; None for a type that numpy cannot hold."""
    shape: tuple[int, ...]
    offset: int
    """Of the first byte, from the start of the file."""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All entries by key, aliases of tied weights too; raises BadInputError for a damaged file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise _damaged(path, f"a header of {length} bytes in a file of {size}")
            text = file.read(length)
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is not JSON") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is not a table")
    aliases = entries.pop("__metadata__", None)
    found = {key: _entry(path, key, entries[key], (8 + length, size)) for key in entries}
    return found | _aliases(aliases, found)


def _aliases(metadata: object, found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Further keys of a tied weight: safetensors stores it once and maps the others to it."""
    if not isinstance(metadata, Mapping):
        return {}
    return {
        str(alias): found[key]
        for alias, key in metadata.items()
        if isinstance(key, str) and key in found and alias not in found
    }


def map_stored(path: Path, stored: StoredTensor) -> Array:
    """The array, mapped and read-only; its type must be one that numpy holds."""
    assert stored.dtype is not None
    return map_region(path, stored.offset, numpy_dtype(stored.dtype), stored.shape)


def _entry(path: Path, key: str, entry: object, data: tuple[int, int]) -> StoredTensor:
    """One entry, where `data` is where the data begins and ends in the file."""
    if not isinstance(entry, Mapping):
        raise _damaged(path, f"entry {key!r} is not a table")
    shape = _numbers(entry.get("shape"))
    offsets = _numbers(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > _LARGEST_RANK:
        raise _damaged(path, f"entry {key!r} has no shape or no offsets")
    begin, end = data[0] + offsets[0], data[0] + offsets[1]
    if not data[0] <= begin <= end <= data[1]:
        raise _damaged(path, f"{key!r} ends at byte {end}, the file has {data[1]}: it is truncated")
    name = entry.get("dtype")
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is not None and prod(shape) * numpy_dtype(dtype).itemsize != end - begin:
        raise _damaged(path, f"{key!r} of shape {list(shape)} and {end - begin} bytes")
    return StoredTensor(dtype=dtype, shape=shape, offset=begin)


def _numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if not all(type(n) is int and 0 <= n < _LARGEST_DIMENSION for n in value):
        return None
    return tuple(value)


def _damaged(path: Path, what: str) -> BadInputError:
    return BadInputError(f"{path} is not a whole safetensors file: {what}", hint=_HINT)

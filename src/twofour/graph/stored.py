"""Arrays in .safetensors files: found by key, mapped, and written one at a time.

Format: docs of safetensors, "Format": 8 bytes of length, a header in JSON, the arrays behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

from twofour.errors import BadInputError, system_errors
from twofour.graph.files import Array, map_region, numpy_dtype
from twofour.records import frozen

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
    "C64": "complex64",
}
_CODES = {name: code for code, name in _DTYPES.items()}
_HINT = "the file is damaged or no safetensors file: save or copy it again"
_CHUNK_BYTES = 1 << 24


@frozen
class NewTensor:
    """An array that is to be written."""

    dtype: str
    shape: tuple[int, ...]
    write: Callable[[BinaryIO], None]
    """Appends its bytes to the file."""


@frozen
class StoredTensor:
    """One array of a file."""

    file: Path
    dtype: str | None
    """Numpy's name; None for a type that numpy cannot hold."""
    shape: tuple[int, ...]
    offset: int
    """Position of the first byte in the file."""

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * numpy_dtype(self._known_dtype()).itemsize

    def array(self) -> Array:
        """The values, mapped and read only; raises BadInputError for a type that numpy lacks."""
        return map_region(self.file, self.offset, numpy_dtype(self._known_dtype()), self.shape)

    def copy_to(self, stream: BinaryIO) -> None:
        """Append the array's bytes to another file, a piece at a time."""
        left = self.size_bytes
        with self.file.open("rb") as file:
            file.seek(self.offset)
            while left:
                piece = file.read(min(left, _CHUNK_BYTES))
                stream.write(piece)
                left -= len(piece)

    def as_new(self) -> NewTensor:
        """The same array, to be written into another file."""
        return NewTensor(dtype=self._known_dtype(), shape=self.shape, write=self.copy_to)

    def _known_dtype(self) -> str:
        if self.dtype is None:
            raise _damaged(self.file, "an array has a type that is not known")
        return self.dtype


Store = Mapping[str, StoredTensor]
"""The arrays of a model by name."""


def write_store(target: Path, tensors: Mapping[str, NewTensor], aliases: Mapping[str, str]) -> None:
    """Write arrays by key; `aliases` are further keys of arrays that are there.

    The largest types come first, so that every array is aligned. Raises BadInputError for a type
    that the format lacks.
    """
    # 40 00 00 00 00 00 00 00, then 64 bytes of header, padded with blanks to a multiple of 8:
    # {"w":{"dtype":"F32","shape":[2,4],"data_offsets":[0,32]}}, then the 32 bytes of w
    header: dict[str, object] = {}
    if aliases:
        header["__metadata__"] = dict(sorted(aliases.items()))
    widths = {key: _width(key, tensor) for key, tensor in tensors.items()}
    keys = sorted(tensors, key=lambda key: (-widths[key], key))
    start = 0
    for key in keys:
        shape = tensors[key].shape
        end = start + prod(shape) * widths[key]
        code = _CODES[tensors[key].dtype]
        header[key] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for key in keys:
            tensors[key].write(stream)


def _width(key: str, tensor: NewTensor) -> int:
    """Bytes of an element; raises BadInputError for a type that the format lacks."""
    if tensor.dtype not in _CODES:
        raise BadInputError(
            f"{key} is of type {tensor.dtype}, which safetensors files do not have",
            hint="convert it to another type, or leave it out of the state_dict",
        )
    return numpy_dtype(tensor.dtype).itemsize


def copy_store(store: Store, target: Path, first: Collection[str] = ()) -> None:
    """Write every array once; of keys of one array, one of `first` is written."""
    tensors: dict[str, NewTensor] = {}
    aliases: dict[str, str] = {}
    known: dict[tuple[Path, int, int], str] = {}
    for key in sorted(store, key=lambda key: (key not in first, key)):
        stored = store[key]
        same = known.setdefault((stored.file, stored.offset, stored.size_bytes), key)
        if same == key or not stored.size_bytes:
            tensors[key] = stored.as_new()
        else:
            aliases[key] = same
    write_store(target, tensors, aliases)


def read_stores(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The arrays of several files by key; raises BadInputError for a damaged one."""
    return {key: stored for file in files for key, stored in read_header(file).items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All entries by key, aliases of tied weights too; raises BadInputError for a damaged file."""
    from safetensors import SafetensorError, safe_open

    with system_errors(f"cannot read {path}"), path.open("rb") as file:
        try:
            with safe_open(path, framework="numpy"):  # it checks the whole header
                length = int.from_bytes(file.read(8), "little")
                entries = json.loads(file.read(length))
        except SafetensorError as error:
            raise _damaged(path, str(error)) from error
    metadata = entries.pop("__metadata__", None) or {}
    stored = {}
    for key, entry in entries.items():
        stored[key] = StoredTensor(
            file=path,
            dtype=_DTYPES.get(entry["dtype"]),
            shape=tuple(entry["shape"]),
            offset=8 + length + entry["data_offsets"][0],
        )
    # safetensors stores a tied weight once, and maps its other keys to the stored one
    for alias, key in metadata.items():
        if key in stored:
            stored.setdefault(alias, stored[key])
    return stored


def _damaged(path: Path, what: str) -> BadInputError:
    return BadInputError(f"{path} is not a whole safetensors file: {what}", hint=_HINT)

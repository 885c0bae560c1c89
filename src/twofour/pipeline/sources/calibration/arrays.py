"""Calibration data in files of arrays: .npz, .npy and .safetensors, read batch by batch."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from twofour.engines.inputs import numpy_dtype
from twofour.errors import BadInputError, TwofourError, first_line
from twofour.pipeline.sources.calibration.batching import (
    batch_samples,
    cut,
    padding_of,
    rows_of,
    usable,
)
from twofour.pipeline.sources.calibration.data import Batch, CalibrationData
from twofour.pipeline.sources.calibration.fitting import (
    by_name,
    by_position,
    check_shapes,
    fitted,
    per_sample,
)
from twofour.pipeline.sources.calibration.request import Request
from twofour.pipeline.sources.inputs import NPZ_HINT, check_archive
from twofour.pipeline.sources.source import import_extra, key_of
from twofour.store import sha256_file
from twofour.words import listed

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
"""Of a zip member, before its name and content (APPNOTE 4.3.7)."""
_LOCAL_SIGNATURE = b"PK\x03\x04"
_ENCRYPTED = 1
_SAFETENSORS_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip


Stored = NDArray[Any]
"""Mapped: only the rows that are asked for are read."""
Reader = Callable[[Request], Mapping[str, Stored]]


def open_npz(request: Request) -> CalibrationData:
    """Arrays by name of the model's input, or arr_0, arr_1, ... by position."""
    return _open(request, _stored_in_npz)


def open_npy(request: Request) -> CalibrationData:
    """One array, for a model that needs one input."""
    return _open(request, _stored_in_npy)


def open_safetensors(request: Request) -> CalibrationData:
    """Tensors by name of the model's input."""
    return _open(request, _stored_in_safetensors)


def file_key(request: Request) -> str:
    """Of the file's content and how it is read."""
    return key_of(request.path.suffix.lower(), sha256_file(request.path), request.settings)


def _open(request: Request, read: Reader) -> CalibrationData:
    inputs, source = request.inputs, request.text
    stored = read(request)
    if len(stored) == 1 and request.path.suffix.lower() == ".npy":
        taken = {by_position(inputs, 1, source)[0]: next(iter(stored))}
    else:
        taken = by_name(inputs, tuple(stored), source)
    arrays = {name: stored[key] for name, key in taken.items()}
    check_shapes(inputs, arrays, source)
    fitted(inputs, _slice(request, arrays, 0, 0), source)  # types; values are seen when read
    rows = rows_of(inputs, arrays, source)
    samples, notes = usable(inputs, rows, request.options.samples, source)
    unused = sorted(set(stored) - set(taken.values()))
    if unused:
        notes = (*notes, f"{source}: {listed(unused)} is no input of the model and is left out")
    return CalibrationData(
        source=source,
        samples=samples,
        notes=notes,
        read=lambda: cut(inputs, _batches(request, arrays, samples), samples),
        content_key=lambda: file_key(request),
    )


def _batches(request: Request, arrays: Mapping[str, Stored], samples: int) -> Iterator[Batch]:
    size = batch_samples(request.inputs)
    for start in range(0, samples, size):
        stop = min(start + size, samples)
        where = f"{request.text}, samples {start} to {stop - 1}"
        try:
            rows = _slice(request, arrays, start, stop)
        except TwofourError:
            raise
        except Exception as error:  # a file cut short under a map, a bad tensor
            raise BadInputError(f"{where} cannot be read: {first_line(error)}") from error
        found = fitted(request.inputs, rows, where)
        yield Batch(arrays=found, samples=stop - start, padding=padding_of(found))


def _slice(
    request: Request, arrays: Mapping[str, Stored], start: int, stop: int
) -> dict[str, NDArray[Any]]:
    """Rows of those that have one for each sample, the others whole."""
    cut_names = per_sample(request.inputs, arrays)
    return {
        name: np.asarray(array[start:stop] if name in cut_names else array)
        for name, array in arrays.items()
    }


def _stored_in_npy(request: Request) -> dict[str, Stored]:
    path = request.path
    try:
        with path.open("rb") as file:
            return {"arr_0": _mapped(path, file, path.stat().st_size)}
    except Exception as error:  # a damaged header ends in whatever numpy makes of it
        raise _unreadable(path, error, "write it with numpy.save('images.npy', array)") from error


def _stored_in_npz(request: Request) -> dict[str, Stored]:
    """Mapped where an array lies plain in the file; what is packed goes to a temporary file first.

    Raises BadInputError too for a file that would unpack to far more than it is.
    """
    path, found = request.path, {}
    try:
        check_archive(path)
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            for number, member in enumerate(archive.infolist()):
                name, dot, kind = member.filename.rpartition(".")
                if not dot or kind != "npy":
                    raise BadInputError(f"{member.filename!r} in it is no array")
                if member.compress_type == zipfile.ZIP_STORED:
                    end = _seek_content(file, member)
                    found[name] = _mapped(path, file, end)
                    continue
                plain = request.spill.path() / f"{path.stem}-{number}.npy"
                with archive.open(member) as packed, plain.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
                with plain.open("rb") as unpacked:
                    found[name] = _mapped(plain, unpacked, plain.stat().st_size)
    except Exception as error:  # zipfile, zlib and numpy each have their own for damage
        raise _unreadable(path, error, NPZ_HINT) from error
    if not found:
        raise BadInputError(f"{path} holds no array", hint=NPZ_HINT)
    return found


def _unreadable(path: Path, error: Exception, hint: str) -> BadInputError:
    if isinstance(error, BadInputError) and str(path) in error.message:
        return error
    kind = path.suffix.lower()
    return BadInputError(f"{path} is no readable {kind} file: {first_line(error)}", hint=hint)


def _seek_content(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Go to where the content of a member begins, and say where it ends."""
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or member.flag_bits & _ENCRYPTED:
        raise BadInputError(f"{member.filename!r} in it is cut short or encrypted")
    signature, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    if signature != _LOCAL_SIGNATURE:
        raise BadInputError(f"{member.filename!r} is not where the file says")
    return file.seek(name_bytes + extra_bytes, os.SEEK_CUR) + member.file_size


def _mapped(path: Path, file: BinaryIO, end: int) -> NDArray[Any]:
    """The array whose .npy header stands here, mapped; its bytes must end before `end`."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise BadInputError(f"its format is {version}; only plain arrays of numbers can be read")
    if dtype.hasobject or dtype.names is not None:
        raise BadInputError(f"it holds {dtype}: Python objects and records are not read")
    size = prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or file.tell() + size > end:
        raise BadInputError(f"an array of shape {shape} and type {dtype} is cut short in it")
    if size == 0:
        return np.zeros(shape, dtype)
    mapped: NDArray[Any] = np.memmap(
        path, dtype, "r", offset=file.tell(), shape=shape, order="F" if is_fortran else "C"
    )
    return mapped


def _stored_in_safetensors(request: Request) -> dict[str, Stored]:
    path = request.path
    safetensors = import_extra("safetensors", "hf", f"reading {path}")
    try:
        with safetensors.safe_open(path, framework="np"):  # its checks of the header
            pass
        found = _tensors(path)
    except Exception as error:  # SafetensorError, OSError
        raise _unreadable(path, error, "copy or write it again") from error
    if not found:
        raise BadInputError(f"{path} holds no tensors")
    return found


def _tensors(path: Path) -> dict[str, Stored]:
    """Mapped by the offsets in the header, so that bfloat16 needs no torch."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    found: dict[str, Stored] = {}
    for name, entry in header.items():
        if entry["dtype"] not in _SAFETENSORS_TYPES:
            raise BadInputError(f"{name!r} in it has type {entry['dtype']}")
        dtype, shape = numpy_dtype(_SAFETENSORS_TYPES[entry["dtype"]]), tuple(entry["shape"])
        if prod(shape) == 0:
            found[name] = np.zeros(shape, dtype)
            continue
        offset = 8 + header_bytes + entry["data_offsets"][0]
        found[name] = np.memmap(path, dtype, "r", offset=offset, shape=shape)
    return found

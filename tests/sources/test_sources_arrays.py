"""Files of arrays and weights from outside: an answer, or a refusal with file and reason."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twofour.errors import BadInputError
from twofour.inputs.fits import read_arrays, save_arrays, stored_arrays

_ONES = np.ones((2, 8), np.float32)


def npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


def header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text + b"\n"


def npz(path: Path, members: Mapping[str, bytes], *, packed: bool = False) -> Path:
    method = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"x.npy": b"hello"}, "'x' in it is not an array"),
        ({"x.npy": npy(_ONES), "readme.txt": b"hi"}, "'readme.txt' in it is not an array"),
        ({"x.npy": header("(10000000000000, 100000000)") + b"abc"}, "not a readable .npz file"),
        ({"x.npy": header("(-1, 4)") + b"abc"}, "negative dimensions"),
        ({"x.npy": npy(_ONES)[:-4]}, "not a readable .npz file"),
        ({}, "contains no array"),
    ],
)
def test_an_npz_with_members_that_are_no_arrays_is_refused(
    tmp_path: Path, members: dict[str, bytes], reason: str
) -> None:
    path = npz(tmp_path / "x.npz", members)
    with pytest.raises(BadInputError, match=f"^{path}.*{reason}"):
        read_arrays(path)


@pytest.mark.parametrize(
    "name", ["file", "allow_pickle", "self", "", "a/../b", "x.npy", "n" * 20_000]
)
def test_arrays_may_have_any_name(tmp_path: Path, name: str) -> None:
    save_arrays(tmp_path / "x.npz", {name: _ONES, "other": _ONES[0]})
    assert list(stored_arrays(tmp_path / "x.npz")) == [name, "other"]


def test_an_npz_is_written_as_numpy_writes_it(tmp_path: Path) -> None:
    save_arrays(tmp_path / "ours.npz", {"a": _ONES, "b": np.zeros((0, 3), np.int64)})
    np.savez(tmp_path / "numpy.npz", a=_ONES, b=np.zeros((0, 3), np.int64))
    assert (tmp_path / "ours.npz").read_bytes() == (tmp_path / "numpy.npz").read_bytes()

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
import torch

from twofour.errors import BadInputError
from twofour.pipeline.sources.inputs import read_arrays, save_arrays, stored_arrays
from twofour.pipeline.torch_model import read_checkpoint
from twofour.pipeline.validating import validate_path
from twofour.records.options import Selection

_ONES = np.ones((2, 8), np.float32)
_WEIGHT = torch.ones(8, 8)


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
        ({"x.npy": b"hello"}, "'x' in it is no array"),
        ({"x.npy": npy(_ONES), "readme.txt": b"hi"}, "'readme.txt' in it is no array"),
        ({"x.npy": header("(10000000000000, 100000000)") + b"abc"}, "no readable .npz file"),
        ({"x.npy": header("(-1, 4)") + b"abc"}, "negative dimensions"),
        ({"x.npy": npy(_ONES)[:-4]}, "no readable .npz file"),
        ({}, "holds no array"),
    ],
)
def test_an_npz_with_members_that_are_no_arrays_is_refused(
    tmp_path: Path, members: dict[str, bytes], reason: str
) -> None:
    path = npz(tmp_path / "x.npz", members)
    with pytest.raises(BadInputError, match=f"^{path}.*{reason}"):
        read_arrays(path)


def test_a_small_npz_that_would_fill_the_memory_is_refused_unread(tmp_path: Path) -> None:
    zeros = npy(np.zeros(80 << 20, np.float32))
    path = npz(tmp_path / "x.npz", {"x.npy": npy(_ONES), "unused.npy": zeros}, packed=True)
    with pytest.raises(BadInputError, match=r"x\.npz has \d+ bytes and would unpack to 335544"):
        read_arrays(path)


def test_a_packed_npz_of_usual_size_is_read(tmp_path: Path) -> None:
    path = npz(tmp_path / "x.npz", {"x.npy": npy(np.zeros(4 << 20, np.int64))}, packed=True)
    assert read_arrays(path)["x"].shape == (4 << 20,)


@pytest.mark.parametrize(
    "name", ["file", "allow_pickle", "self", "", "a/../b", "x.npy", "n" * 20_000]
)
def test_arrays_may_have_any_name(tmp_path: Path, name: str) -> None:
    save_arrays(tmp_path / "x.npz", {name: _ONES, "other": _ONES[0]})
    assert list(stored_arrays(tmp_path / "x.npz")) == [name, "other"]


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "n" * 70_000])
def test_a_name_that_no_npz_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInputError, match=r"no \.npz file can hold an array of the name"):
        save_arrays(tmp_path / "x.npz", {name: _ONES})


def test_an_npz_is_written_as_numpy_writes_it(tmp_path: Path) -> None:
    save_arrays(tmp_path / "ours.npz", {"a": _ONES, "b": np.zeros((0, 3), np.int64)})
    np.savez(tmp_path / "numpy.npz", a=_ONES, b=np.zeros((0, 3), np.int64))
    assert (tmp_path / "ours.npz").read_bytes() == (tmp_path / "numpy.npz").read_bytes()


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"a.weight": _WEIGHT.to("meta")}, "a.weight has no values .it is on the meta device"),
        ({"a": _WEIGHT, "b": _WEIGHT.to("meta")}, "b has no values"),
        ({"a.weight": torch.nested.nested_tensor([_WEIGHT, _WEIGHT[:3]])}, "is a nested tensor"),
        ({"a.weight": _WEIGHT.to_sparse()}, "a.weight is stored as sparse_coo"),
        ({"a.weight": _WEIGHT.to_sparse_csr()}, "a.weight is stored as sparse_csr"),
        ({"a.weight": torch.zeros(1).expand(40_000, 40_000)}, "would take 6400000000: they are"),
        ({"\ud800": _WEIGHT}, "of a tensor is no text"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch's, of nested and sparse tensors being new
def test_tensors_without_values_of_their_own_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    path = tmp_path / "m.pt"
    torch.save(tensors, path)
    with pytest.raises(BadInputError, match=f"^{path}.*{reason}"):
        read_checkpoint(path)


def test_a_tensor_whose_storage_was_let_go_is_refused(tmp_path: Path) -> None:
    tensor = torch.ones(8, 8)
    tensor.untyped_storage().resize_(0)
    torch.save({"a.weight": tensor}, tmp_path / "m.pt")
    with pytest.raises(BadInputError, match=r"m\.pt is no whole file of weights"):
        read_checkpoint(tmp_path / "m.pt")


def test_views_that_take_little_are_read(tmp_path: Path) -> None:
    base = torch.arange(64.0)
    torch.save(
        {"a": base.view(8, 8), "b": base.view(8, 8).t(), "c": base[:1].expand(9)}, tmp_path / "m.pt"
    )
    found = read_checkpoint(tmp_path / "m.pt")
    assert torch.equal(found["b"], base.view(8, 8).t())
    assert found["c"].tolist() == [0.0] * 9


def test_a_refusal_of_a_checkpoint_names_the_file_that_was_given(tmp_path: Path) -> None:
    torch.save({"step": torch.ones(3)}, tmp_path / "m.pt")
    with pytest.raises(BadInputError, match=f"^{tmp_path / 'm.pt'}: nothing to check"):
        validate_path(tmp_path / "m.pt", None, Selection())


def test_a_packed_checkpoint_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": _WEIGHT}, tmp_path / "m.pt")
    with (
        zipfile.ZipFile(tmp_path / "m.pt") as archive,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, bytes(80 << 20) if "/data/" in name else archive.read(name))
    with pytest.raises(BadInputError, match=r"packed\.pt has \d+ bytes and would unpack to 83"):
        read_checkpoint(tmp_path / "packed.pt")


@pytest.mark.filterwarnings("ignore")  # torch's, of this type being new
def test_a_type_that_safetensors_has_not_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(
        {"a": torch.ones(8, 8), "b": torch.ones(8, 8, dtype=torch.complex32)}, tmp_path / "m.pt"
    )
    with pytest.raises(
        BadInputError, match=f"^{tmp_path / 'm.pt'}: b holds values of type complex32"
    ):
        validate_path(tmp_path / "m.pt", None, Selection())

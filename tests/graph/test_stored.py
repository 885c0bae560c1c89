"""Arrays in .safetensors files: written, read back, and read by the library of the format."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from twofour.errors import BadInputError
from twofour.graph.files import Array, numpy_dtype
from twofour.graph.stored import (
    NewTensor,
    copy_store,
    read_header,
    read_stores,
    write_store,
)

TYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int8", "bool")
Arrays = dict[str, Array]


def new(array: Array) -> NewTensor:
    def write(stream: BinaryIO) -> None:
        stream.write(array.tobytes())

    return NewTensor(dtype=array.dtype.name, shape=array.shape, write=write)


def written(arrays: Arrays, target: Path, aliases: dict[str, str] | None = None) -> Path:
    write_store(target, {key: new(array) for key, array in arrays.items()}, aliases or {})
    return target


@st.composite
def arrays_and_aliases(draw: st.DrawFn) -> tuple[Arrays, dict[str, str]]:
    shapes = array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
    arrays = {}
    for key in draw(st.lists(st.text(max_size=8), max_size=5, unique=True)):
        if key == "__metadata__":
            continue
        dtype, shape = numpy_dtype(draw(st.sampled_from(TYPES))), draw(shapes)
        size = int(np.prod(shape)) * dtype.itemsize
        raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
        if dtype.name == "bool":
            raw = (raw % 2).astype(np.uint8)
        arrays[key] = raw.view(dtype).reshape(shape)
    further = draw(st.lists(st.text(max_size=8), max_size=2, unique=True)) if arrays else []
    names = st.sampled_from(sorted(arrays) or [""])
    return arrays, {key: draw(names) for key in further if key not in arrays}


def same(one: Array, other: Array) -> bool:
    kinds = (one.dtype, one.shape) == (other.dtype, other.shape)
    return kinds and one.tobytes() == other.tobytes()


@given(arrays_and_aliases())
def test_what_was_written_is_read_back_and_read_by_the_library_of_the_format(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[Arrays, dict[str, str]]
) -> None:
    arrays, aliases = made
    path = written(arrays, tmp_path_factory.mktemp("store") / "s.safetensors", aliases)
    found = read_header(path)
    assert found.keys() == {*arrays, *aliases}
    for key, stored in found.items():
        array = arrays[aliases.get(key, key)]
        assert (stored.dtype, stored.shape) == (array.dtype.name, array.shape)
        assert stored.offset % array.dtype.itemsize == 0, "else a mapped array is slow to read"
        assert same(stored.array(), array)
    with safe_open(str(path), framework="pt") as file:
        assert {*file.keys()} == {*arrays}
        assert (file.metadata() or {}) == aliases
        for key, array in arrays.items():
            raw = file.get_tensor(key).contiguous().reshape(-1).view(torch.uint8).numpy()
            assert raw.tobytes() == array.tobytes()


def test_what_the_library_wrote_is_read_without_a_copy(tmp_path: Path) -> None:
    tensors = {"half": torch.randn(3, 5).bfloat16(), "eight": torch.ones(4, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "s.safetensors")
    found = read_header(tmp_path / "s.safetensors")
    assert found["half"].dtype == "bfloat16"
    assert found["half"].size_bytes == 30
    values = found["half"].array()
    assert not values.flags.writeable
    assert torch.equal(torch.from_numpy(values.astype(np.float32)), tensors["half"].float())


def test_a_copy_has_every_array_once_under_the_keys_that_are_asked_for(tmp_path: Path) -> None:
    arrays = {"head": np.arange(6, dtype=np.float32), "empty": np.ones((0, 2), np.float32)}
    source = written(arrays, tmp_path / "source.safetensors", {"table": "head", "again": "head"})
    target = tmp_path / "copy.safetensors"
    copy_store(read_stores([source]), target, first=("table",))
    with safe_open(str(target), framework="pt") as file:
        assert {*file.keys()} == {"table", "empty"}
        assert file.metadata() == {"head": "table", "again": "table"}
    found = read_header(target)
    assert all(same(found[key].array(), arrays["head"]) for key in ("head", "table", "again"))
    assert found["empty"].shape == (0, 2)
    assert load_file(target)["table"].tolist() == [0, 1, 2, 3, 4, 5]


def test_arrays_of_several_files_are_copied_into_one(tmp_path: Path) -> None:
    files = [
        written({f"w{n}": np.full(4, n, np.float16)}, tmp_path / f"{n}.safetensors")
        for n in range(3)
    ]
    copy_store(read_stores(files), tmp_path / "copy.safetensors")
    found = read_header(tmp_path / "copy.safetensors")
    assert {key: stored.array().tolist() for key, stored in found.items()} == {
        f"w{n}": [n] * 4 for n in range(3)
    }


def test_a_type_that_numpy_lacks_is_listed_and_refused_when_it_is_read(tmp_path: Path) -> None:
    path = written({"w": np.ones(2, np.int8)}, tmp_path / "s.safetensors")
    path.write_bytes(path.read_bytes().replace(b'"I8","shape":[2]', b'"F4","shape":[4]'))
    (stored,) = read_header(path).values()
    assert stored.dtype is None
    with pytest.raises(BadInputError, match="a type that is not known"):
        stored.array()


HEADERS = (
    b"[]",
    b"{",
    b"[" * 200_000,
    b'{"w":3}',
    b'{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
    b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,true]}}',
    b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}',
    b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,2]}}',
    b'{"w":{"dtype":"F32","shape":[2305843009213693952],"data_offsets":[0,8]}}',
)


@pytest.mark.parametrize("header", HEADERS)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(BadInputError) as caught:
        read_header(path)
    assert caught.value.message.startswith(f"{path} is not a whole safetensors file: ")


def test_every_cut_of_a_file_is_refused_or_gives_what_was_written(tmp_path: Path) -> None:
    path = written({"w": np.ones(3, np.float32)}, tmp_path / "s.safetensors")
    whole = path.read_bytes()
    for length in itertools.chain(range(0, len(whole), 5), [len(whole) - 1]):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInputError):
            read_header(path)

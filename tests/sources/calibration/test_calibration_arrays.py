"""Files of arrays as calibration data: named, typed, cut into batches, read bit by bit."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from support.calibration_data import joined, onnx_model, opened
from support.unlucky import at_change, full_from

from twofour.errors import BadInputError
from twofour.inputs.fits import read_arrays, save_arrays, stored_arrays
from twofour.inputs.samples import BATCH_SAMPLES, ModelInputs
from twofour.records.options import CalibrationOptions
from twofour.sources.calibration.kinds import calibration_key, open_calibration

X = np.arange(20 * 3, dtype=np.float32).reshape(20, 3)


def npz(path: Path, **arrays: NDArray[Any]) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]  # no array is called allow_pickle
    return path


@pytest.fixture
def x_model() -> ModelInputs:
    return onnx_model(x=("float32", ("batch", 3)))


@pytest.mark.parametrize(("asked", "batches"), [(20, [8, 8, 4]), (10, [8, 2])])
def test_the_samples_asked_for_are_cut_into_batches_in_order(
    tmp_path: Path, x_model: ModelInputs, asked: int, batches: list[int]
) -> None:
    data = opened(npz(tmp_path / "x.npz", x=X), x_model, samples=asked)
    assert [batch.samples for batch in data.batches()] == batches
    assert np.array_equal(joined(data), X[:asked])
    assert (data.samples, data.notes) == (asked, ())


def test_plain_members_are_mapped_and_those_that_no_input_takes_are_named(
    tmp_path: Path, x_model: ModelInputs
) -> None:
    data = opened(npz(tmp_path / "x.npz", x=X, labels=np.zeros(20)), x_model, samples=20)
    array = next(data.batches()).arrays["x"]
    assert not array.flags.writeable
    assert not array.flags.owndata
    assert data.notes == (
        f"{tmp_path / 'x.npz'}: labels is not an input of the model and is left out",
    )


def test_arrays_without_names_go_by_position(tmp_path: Path) -> None:
    model = onnx_model(ids=("int64", ("b", "s")), attention_mask=("int64", ("b", "s")))
    np.savez(tmp_path / "x.npz", np.full((4, 5), 7), np.ones((4, 5), np.int64))
    batch = next(opened(tmp_path / "x.npz", model).batches())
    assert int(batch.arrays["ids"][0, 0]) == 7
    assert int(batch.arrays["attention_mask"][0, 0]) == 1
    assert batch.padding is None


def test_padding_is_where_the_mask_is_zero(tmp_path: Path) -> None:
    model = onnx_model(ids=("int64", ("b", "s")), attention_mask=("int64", ("b", "s")))
    mask = np.ones((9, 5), np.int64)
    mask[2, 3:] = 0
    path = npz(tmp_path / "x.npz", ids=np.full((9, 5), 7), attention_mask=mask)
    first, last = opened(path, model).batches()
    assert first.padding is not None
    assert np.argwhere(first.padding).tolist() == [[2, 3], [2, 4]]
    assert last.padding is None


def test_an_npy_for_two_inputs_is_refused(tmp_path: Path) -> None:
    model = onnx_model(x=("float32", ("b", 3)), y=("float32", ("b", 3)))
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(BadInputError, match=r"needs y \(b x"):
        opened(tmp_path / "x.npy", model)


def test_safetensors_are_read_without_torch_types_lost(tmp_path: Path) -> None:
    model = onnx_model(x=("bfloat16", ("b", 3)), ids=("int64", ("b",)))
    x = torch.from_numpy(X).to(torch.bfloat16)
    save_file({"ids": torch.arange(20, dtype=torch.int32), "x": x}, tmp_path / "x.safetensors")
    data = opened(tmp_path / "x.safetensors", model)
    assert next(data.batches()).arrays["x"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(joined(data), X.astype(ml_dtypes.bfloat16))
    assert joined(data, "ids").tolist() == list(range(20))
    assert joined(data, "ids").dtype == np.int64


@pytest.mark.parametrize("dtype", ["f8", ">f4", ">f8"])
def test_doubles_and_values_of_another_byte_order_become_the_type_of_the_model(
    tmp_path: Path, x_model: ModelInputs, dtype: str
) -> None:
    data = opened(npz(tmp_path / "x.npz", x=X.astype(dtype)), x_model)
    assert all(batch.arrays["x"].dtype.isnative for batch in data.batches())
    assert joined(data).dtype == np.float32
    assert np.array_equal(joined(data), X)


def test_an_input_without_samples_is_given_whole(tmp_path: Path) -> None:
    model = onnx_model(x=("float32", ("batch", 3)), table=("float32", (2, 4)), t=("float32", ()))
    table, t = np.ones((2, 4), np.float32), np.float32(0.5)
    data = opened(npz(tmp_path / "x.npz", x=X, table=table, t=np.asarray(t)), model)
    for batch in data.batches():
        assert np.array_equal(batch.arrays["table"], table)
        assert batch.arrays["t"] == t
    assert np.array_equal(joined(data), X)


def test_a_fixed_batch_is_kept_and_the_rest_is_said(tmp_path: Path) -> None:
    model = onnx_model(x=("float32", (6, 3)))
    data = opened(npz(tmp_path / "x.npz", x=X), model, samples=20)
    assert [batch.samples for batch in data.batches()] == [6, 6, 6]
    assert data.samples == 18
    assert "last 2 of 20" in data.notes[0]
    with pytest.raises(BadInputError, match="batches of 32"):
        opened(tmp_path / "x.npz", onnx_model(x=("float32", (32, 3))))


def test_nodes_and_edges_of_a_graph_are_not_cut(tmp_path: Path) -> None:
    model = onnx_model(x=("float32", ("nodes", 3)), edges=("int64", ("edges", 2)))
    data = opened(npz(tmp_path / "x.npz", x=X, edges=np.zeros((50, 2), np.int64)), model)
    (batch,) = data.batches()
    assert batch.arrays["x"].shape == (20, 3)
    assert batch.arrays["edges"].shape == (50, 2)


@pytest.mark.parametrize(
    "names",
    [("unk__12", "unk__14"), ("a_dynamic_axes_1", "b_dynamic_axes_1"), ("s77", "s53")],
    ids=["tf2onnx", "torch's older exporter", "torch's newer exporter"],
)
def test_names_that_a_converter_made_up_keep_no_samples_together(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    model = onnx_model(a=("float32", (names[0], 3)), b=("float32", (names[1], 3)))
    data = opened(npz(tmp_path / "x.npz", a=X, b=X), model)
    assert [batch.samples for batch in data.batches()] == [8, 8, 4]
    assert np.array_equal(joined(data, "b"), X)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"y": X}, r"contains y; the model takes x \(batch x 3, float32\)"),
        ({"x": X[:, :2]}, r"input x \(batch x 3, float32\) cannot be 20x2"),
        ({"x": X[0]}, r"input x \(batch x 3, float32\) cannot be 3\nhint"),
        ({"x": X.astype(np.uint8)}, "has type uint8\nhint: pixels 0 to 255 must be scaled"),
        ({"x": X > 3}, "has type bool"),
        ({"x": X.astype(str)}, "has type <U32, not a number"),
        ({"x": X[:0]}, "contains no samples"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, x_model: ModelInputs, arrays: Mapping[str, NDArray[Any]], reason: str
) -> None:
    path = npz(tmp_path / "x.npz", **arrays)
    with pytest.raises(BadInputError, match=rf"(?s)^{path}.*{reason}"):
        opened(path, x_model)


@pytest.mark.parametrize(
    ("shape", "y", "reason"),
    [
        (("?", 3), X[:7], "numbers of samples differ: 20 in x, 7 in y"),
        (("b", "s"), X[:, :2], r"'s' is 3 in x .dimension 1. and 2 in y"),
    ],
)
def test_two_arrays_that_do_not_agree_are_refused(
    tmp_path: Path, shape: tuple[str | int, ...], y: NDArray[Any], reason: str
) -> None:
    model = onnx_model(x=("float32", ("b", "s")), y=("float32", shape))
    with pytest.raises(BadInputError, match=reason):
        opened(npz(tmp_path / "x.npz", x=X, y=y), model)


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (1e5, "float16")])
def test_values_that_are_not_finite_are_found_with_their_place(
    tmp_path: Path, value: float, dtype: str
) -> None:
    bad = X.copy()
    bad[13, 1] = value
    data = opened(npz(tmp_path / "x.npz", x=bad), onnx_model(x=(dtype, ("b", 3))))
    with pytest.raises(BadInputError, match=rf"not finite as {dtype}, the first at \[5, 1\]"):
        list(data.batches())


def with_text(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: np.savez(path, x=np.asarray([{}, 1], dtype=object)), "Python objects"),
        (with_text, "'readme.txt' in it is not an array"),
        (lambda path: path.write_bytes(b"hello"), "is not a readable .npz file: BadZipFile"),
    ],
)
def test_damaged_and_unsafe_archives_are_refused(
    tmp_path: Path, x_model: ModelInputs, write: Any, reason: str
) -> None:
    path = tmp_path / "x.npz"
    write(path)
    with pytest.raises(BadInputError, match=rf"^{path}.*{reason}"):
        opened(path, x_model)


def test_a_full_disk_is_not_blamed_on_the_file(tmp_path: Path, x_model: ModelInputs) -> None:
    path = npz(tmp_path / "x.npz", x=X)
    with at_change(tmp_path, full_from(1)), pytest.raises(BadInputError) as caught:
        open_calibration(CalibrationOptions(data=str(path)), x_model, folder=tmp_path)
    assert f"{path}: No space left" in caught.value.message
    assert "make room" in (caught.value.hint or "")


def test_the_key_follows_content_and_settings(tmp_path: Path) -> None:
    path = npz(tmp_path / "x.npz", x=X)
    options = CalibrationOptions(data=str(path), samples=BATCH_SAMPLES)
    key = calibration_key(options, None)
    assert len(key) == 64
    assert key == calibration_key(options, None)
    assert key != calibration_key(replace(options, samples=7), None)
    npz(path, x=X + 1)
    assert key != calibration_key(options, None)


# --- archives of example inputs -------------------------------------------------------------------


def npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


def header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text + b"\n"


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"x.npy": b"hello"}, "'x' in it is not an array"),
        ({"x.npy": npy(X), "readme.txt": b"hi"}, "'readme.txt' in it is not an array"),
        ({"x.npy": header("(10000000000000, 100000000)") + b"abc"}, "not a readable .npz file"),
        ({"x.npy": header("(-1, 4)") + b"abc"}, "negative dimensions"),
        ({"x.npy": npy(X)[:-4]}, "not a readable .npz file"),
        ({}, "contains no array"),
    ],
)
def test_an_npz_with_members_that_are_no_arrays_is_refused(
    tmp_path: Path, members: dict[str, bytes], reason: str
) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(BadInputError, match=f"^{path}.*{reason}"):
        read_arrays(path)


@pytest.mark.parametrize(
    "name", ["file", "allow_pickle", "self", "", "a/../b", "x.npy", "n" * 20_000]
)
def test_arrays_may_have_any_name(tmp_path: Path, name: str) -> None:
    save_arrays(tmp_path / "x.npz", {name: X, "other": X[0]})
    assert list(stored_arrays(tmp_path / "x.npz")) == [name, "other"]


def test_an_npz_is_written_as_numpy_writes_it(tmp_path: Path) -> None:
    save_arrays(tmp_path / "ours.npz", {"a": X, "b": np.zeros((0, 3), np.int64)})
    np.savez(tmp_path / "numpy.npz", a=X, b=np.zeros((0, 3), np.int64))
    assert (tmp_path / "ours.npz").read_bytes() == (tmp_path / "numpy.npz").read_bytes()

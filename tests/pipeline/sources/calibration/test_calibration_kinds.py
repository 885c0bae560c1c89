"""The kinds of calibration data: told apart by what is written, added by a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calibration_data import onnx_model, opened

from twofour.errors import BadInputError
from twofour.pipeline.sources.calibration import open as kinds
from twofour.pipeline.sources.calibration.data import Batch, CalibrationData
from twofour.pipeline.sources.calibration.open import KINDS, Kind, calibration_key
from twofour.pipeline.sources.calibration.request import Request
from twofour.records.options import CalibrationOptions

MODEL = onnx_model(x=("float32", ("batch", 3)))


def zeros(request: Request) -> CalibrationData:
    def read() -> Iterator[Batch]:
        yield Batch(arrays={"x": np.zeros((2, 3), np.float32)}, samples=2)

    return CalibrationData(
        source=request.text, samples=2, notes=(), read=read, content_key=lambda: "zeros"
    )


def test_a_kind_of_data_is_added_by_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Kind(
        written="zeros", fits=lambda text, _: text == "zeros", open=zeros, key=lambda _: "zeros"
    )
    monkeypatch.setattr(kinds, "KINDS", (*KINDS, toy))
    data = opened("zeros", MODEL)
    assert [batch.samples for batch in data.batches()] == [2]
    assert data.key() == calibration_key(CalibrationOptions(data="zeros"), None) == "zeros"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("data.py", "name the function that yields batches: .*data.py:batches"),
        ("x.json", "write an object on each line, in a .jsonl file"),
        ("x.JPG", "name the folder that it is in"),
        ("x.pt", "calibration data are a folder of images, file.npz"),
        ("x.csv", "calibration data are"),
    ],
)
def test_what_comes_near_a_kind_says_how_to_get_there(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BadInputError, match=rf"(?s)no known kind of data.hint: {hint}"):
        opened(tmp_path / name, MODEL)


def test_a_suffix_in_capitals_is_the_same_kind(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 3)))
    upper = (tmp_path / "x.npy").rename(tmp_path / "X.NPY")
    assert opened(upper, MODEL).samples == 4


def test_a_home_folder_and_another_working_directory_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 3)))
    monkeypatch.setenv("HOME", str(tmp_path))
    data = opened("~/x.npy", MODEL)
    assert data.source == "~/x.npy"
    monkeypatch.chdir(tmp_path)
    data = opened("x.npy", MODEL)
    monkeypatch.chdir("/")
    assert next(data.batches()).samples == 4


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({"image_mean": (0.5,)}, "--mean"),
        ({"image_std": (0.5,)}, "--std"),
        ({"image_size": (8, 8)}, "--size"),
    ],
)
def test_scaling_of_images_is_refused_for_data_that_are_no_images(
    tmp_path: Path, changed: dict[str, Any], option: str
) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 3)))
    with pytest.raises(BadInputError, match=f"^{option} is for folders of images, and .*x.npy is"):
        opened(tmp_path / "x.npy", MODEL, **changed)


def test_a_single_sample_is_told_in_the_singular(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 3)))
    (note,) = opened(tmp_path / "x.npy", MODEL).notes
    assert note.endswith("x.npy has 1 sample, fewer than the 256 that calibration may use")

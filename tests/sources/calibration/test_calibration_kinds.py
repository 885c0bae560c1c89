"""The kinds of calibration data: told apart by what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calibration_data import onnx_model, opened

from twofour.errors import BadInputError

MODEL = onnx_model(x=("float32", ("batch", 3)))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("data.py", "name the function that yields batches: .*data.py:batches"),
        ("x.JPG", "name the folder that it is in"),
        ("x.pt", "it takes a folder of images, file.npz"),
        ("x.csv", "it takes"),
    ],
)
def test_what_comes_near_a_kind_says_how_to_get_there(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BadInputError, match=rf"(?s)no known kind of data.hint: {hint}"):
        opened(tmp_path / name, MODEL)


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
    "changed", [{"image_mean": (0.5,)}, {"image_std": (0.5,)}, {"image_size": (8, 8)}]
)
def test_scaling_of_images_is_refused_for_data_that_are_no_images(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 3)))
    with pytest.raises(BadInputError, match="are for folders of"):
        opened(tmp_path / "x.npy", MODEL, **changed)

"""The kinds of calibration data, told apart by what is written, and code of the user as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calibration_data import onnx_model, opened

from twofour.errors import BadInputError
from twofour.records.options import CalibrationOptions
from twofour.sources.calibration.kinds import calibration_key

MODEL = onnx_model(x=("float32", ("batch", 3)))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("data.py", "name the function that yields batches: .*data.py:batches"),
        ("x.JPG", "name the folder that it is in"),
        ("x.pt", "it takes a folder of images, file.npz"),
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


# --- code of the user -----------------------------------------------------------------------------


def code(folder: Path, body: str) -> str:
    file = folder / "data_of_mine.py"
    file.write_text(f"import numpy as np\n{body}")
    return f"{file}:batches"


@pytest.mark.parametrize(
    "body",
    [
        "def batches():\n    for i in range(3):\n        yield np.full((4, 3), i, np.float32)\n",
        "def batches():\n    return np.repeat(np.arange(3.0), 12).reshape(12, 3)\n",
        "batches = [(np.full((4, 3), i, np.float32),) for i in range(3)]\n",
        "import torch\ndef batches():\n    return torch.ones(12, 3).cumsum(0).div(4).ceil() - 1\n",
    ],
)
def test_what_a_function_may_give(tmp_path: Path, body: str) -> None:
    data = opened(code(tmp_path, body), MODEL)
    assert data.samples == 12
    values = np.concatenate([batch.arrays["x"] for batch in data.batches()])
    assert values[:, 0].tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_the_key_follows_the_code_and_runs_nothing(tmp_path: Path) -> None:
    text = code(tmp_path, "raise SystemExit\n")
    key = calibration_key(CalibrationOptions(data=text), None)
    assert key == calibration_key(CalibrationOptions(data=text), None)
    assert key != calibration_key(CalibrationOptions(data=text), None, seed=1)
    code(tmp_path, "batches = []\n")
    assert key != calibration_key(CalibrationOptions(data=text), None)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "def batches():\n    raise OSError('no disk')\n",
            r"raised OSError: no disk \(data_of_mine",
        ),
        (
            "def batches():\n    yield np.ones((4, 3))\n    raise OSError('no disk')\n",
            r"raised OSError: no disk \(data_of_mine.py, line 4",
        ),
        ("import sys\ndef batches():\n    sys.exit(3)\n", "raised SystemExit: 3"),
        ("def batches():\n    yield np.ones((4, 2))\n", "batch 0: input x .* cannot be 4x2"),
    ],
)
def test_code_that_fails_is_named_with_its_line(tmp_path: Path, body: str, reason: str) -> None:
    text = code(tmp_path, body)
    with pytest.raises(BadInputError, match=f"^{text}") as caught:
        opened(text, MODEL)
    assert caught.match(reason)

"""A folder of images as calibration data: decoded, scaled, laid out, with damaged ones named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from support.calibration_data import joined, onnx_model, opened
from torch import nn

from twofour.errors import BadInputError, MissingToolError
from twofour.inputs.samples import ModelInputs
from twofour.records.options import CalibrationOptions
from twofour.sources.calibration.kinds import calibration_key, loaded_inputs
from twofour.sources.source import ExampleCall, loaded_module

PLAIN: dict[str, Any] = {"image_mean": (0.0,), "image_std": (1.0,)}


def rgb_model(*dims: int | str, dtype: str = "float32", file: Path = Path("m.onnx")) -> ModelInputs:
    return onnx_model(file, x=(dtype, dims or ("batch", 3, 8, 8)))


def image(folder: Path, name: str, pixels: NDArray[Any]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def solid(value: int, height: int = 8, width: int = 8) -> NDArray[np.uint8]:
    return np.full((height, width, 3), value, np.uint8)


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """Ten images of one value each, in two folders."""
    for value in range(10):
        image(tmp_path / "data", f"{'ab'[value % 2]}/{value}.png", solid(value))
    return tmp_path / "data"


def test_images_below_the_folder_come_in_the_order_of_their_names(ten: Path) -> None:
    data = opened(ten, rgb_model(), samples=10, **PLAIN)
    values = joined(data)
    assert values.shape == (10, 3, 8, 8)
    assert np.allclose(values[:, 0, 0, 0] * 255, [0, 2, 4, 6, 8, 1, 3, 5, 7, 9])
    assert [batch.samples for batch in data.batches()] == [8, 2]
    assert data.notes == ()
    assert np.array_equal(values, joined(data))


def test_fewer_than_there_are_are_spread_over_the_names(ten: Path) -> None:
    data = opened(ten, rgb_model(), samples=5, **PLAIN)
    assert np.allclose(joined(data)[:, 0, 0, 0] * 255, [0, 4, 8, 3, 7])


def test_mean_and_deviation_are_of_each_channel(tmp_path: Path) -> None:
    pixels = solid(255)
    pixels[..., 1] = 51
    image(tmp_path / "d", "x.png", pixels)
    data = opened(
        tmp_path / "d", rgb_model(), image_mean=(0.5, 0.1, 0.0), image_std=(0.5, 0.2, 2.0)
    )
    assert np.allclose(joined(data)[0, :, 0, 0], [1.0, 0.5, 0.5])


def test_channels_last_and_grey_and_raw_pixels_are_as_the_model_takes_them(tmp_path: Path) -> None:
    image(tmp_path / "d", "x.png", solid(51))
    last = opened(tmp_path / "d", rgb_model("b", 8, 8, 3), **PLAIN)
    assert joined(last).shape == (1, 8, 8, 3)
    grey = joined(opened(tmp_path / "d", rgb_model("b", 1, 8, 8), **PLAIN))
    assert grey.shape == (1, 1, 8, 8)
    assert np.allclose(grey, 0.2)
    raw = joined(opened(tmp_path / "d", rgb_model("b", 8, 8, 3, dtype="uint8")))
    assert raw.dtype == np.uint8
    assert int(raw[0, 0, 0, 0]) == 51


def test_the_shorter_side_is_scaled_and_the_centre_cut_out(tmp_path: Path) -> None:
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = 255
    image(tmp_path / "d", "x.png", wide)
    same = joined(opened(tmp_path / "d", rgb_model(), **PLAIN))
    assert np.allclose(same, 1.0)
    double = joined(
        opened(tmp_path / "d", rgb_model("b", 3, "h", "w"), image_size=(16, 16), **PLAIN)
    )
    assert double.shape == (1, 3, 16, 16)
    assert np.allclose(double[..., 2:-2], 1.0)


def test_sixteen_bits_are_not_cut_off(tmp_path: Path) -> None:
    image(tmp_path / "d", "x.png", np.full((8, 8), 257 * 51, np.uint16))
    assert np.allclose(joined(opened(tmp_path / "d", rgb_model(), **PLAIN)), 0.2)


def test_a_broken_image_is_named_and_the_next_one_taken(ten: Path) -> None:
    (ten / "a" / "0.png").write_bytes(b"no image")
    whole = (ten / "a" / "4.png").read_bytes()
    (ten / "a" / "4.png").write_bytes(whole[: len(whole) // 2])
    data = opened(ten, rgb_model(), samples=5, **PLAIN)
    assert data.samples == 5
    assert len(data.notes) == 1
    assert "of 7 images 2" in data.notes[0]
    assert "a/4.png" in data.notes[0]


def test_pixels_of_no_known_range_are_named_and_hidden_files_passed_over(tmp_path: Path) -> None:
    image(tmp_path, "x.png", solid(255))
    (tmp_path / "._x.png").write_bytes(b"no image")
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "y.tiff")
    data = opened(tmp_path, rgb_model(), samples=1, **PLAIN)
    assert (data.samples, data.notes) == (1, ())
    (note,) = opened(tmp_path, rgb_model(), samples=2, **PLAIN).notes[1:]
    assert "of 2 images 1" in note


@pytest.mark.parametrize(
    ("name", "message"), [("x.png", "none of 1 images"), ("notes.txt", "have no images")]
)
def test_a_folder_without_a_readable_image_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / name).write_bytes(b"no image")
    with pytest.raises(BadInputError, match=message):
        opened(tmp_path, rgb_model(), **PLAIN)


def test_the_processor_of_a_checkpoint_is_used(tmp_path: Path) -> None:
    image(tmp_path / "d", "x.png", solid(255, 12, 20))
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 8, "width": 8},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    model = rgb_model(file=tmp_path / "m.onnx")
    assert np.allclose(joined(opened(tmp_path / "d", model)), 2.0)
    last = rgb_model("b", 8, 8, 3, file=tmp_path / "m.onnx")
    assert joined(opened(tmp_path / "d", last)).shape == (1, 8, 8, 3)
    with pytest.raises(BadInputError, match="--size without --mean and --std"):
        opened(tmp_path / "d", last, image_size=(4, 6))


class Timm(nn.Module):
    """A module that says what images it takes, as timm's do."""

    pretrained_cfg = {  # noqa: RUF012  # as timm has it
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
        "input_size": (3, 8, 8),
        "crop_pct": 0.5,
        "interpolation": "bicubic",
    }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_what_a_timm_model_says_of_its_images_is_used(tmp_path: Path) -> None:
    framed = solid(0, 16, 16)
    framed[3:13, 3:13] = 255
    image(tmp_path / "d", "x.png", framed)
    inputs = loaded_inputs(
        loaded_module(Timm(), ExampleCall(args=(torch.zeros(2, 3, 8, 8),))), "timm:net"
    )
    assert np.allclose(joined(opened(tmp_path / "d", inputs)), 1.0)


@pytest.mark.parametrize(
    ("options", "model", "reason"),
    [
        ({}, rgb_model(), r"nothing says how m.onnx wants the pixels .*--mean 0.485"),
        ({"image_mean": (0.5,)}, rgb_model(), "--mean and --std go together"),
        ({"image_mean": (0.5, 0.5), "image_std": (1.0,)}, rgb_model(), "--mean has 2 values"),
        ({"image_mean": (0.5,), "image_std": (0.0,)}, rgb_model(), "not finite"),
        (PLAIN, rgb_model("b", 3, "h", "w"), "is free\nhint: give it with --size"),
        (PLAIN, rgb_model("b", 5, 8, 8), "has 5 channels: no image"),
        (PLAIN, rgb_model("b", 7), "takes x .*a folder is for models of one input"),
        (PLAIN | {"image_size": (4, 4)}, rgb_model(), "cannot be 1x3x4x4"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, options: dict[str, Any], model: ModelInputs, reason: str
) -> None:
    image(tmp_path / "d", "x.png", solid(255))
    with pytest.raises(BadInputError, match=f"(?s){reason}"):
        opened(tmp_path / "d", model, **options)


def test_the_key_follows_images_and_scaling(ten: Path) -> None:
    options = CalibrationOptions(data=str(ten), samples=3, **PLAIN)
    key = calibration_key(options, None)
    image(ten, "a/0.png", solid(77))
    assert key != calibration_key(options, None)


def test_without_pillow_the_extra_is_named(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MissingToolError, match=r"twofour\[images\]"):
        opened(ten, rgb_model(), **PLAIN)

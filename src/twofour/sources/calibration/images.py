"""Calibration data of images: a folder, scaled as the model's preprocessing or the options say."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twofour.errors import BadInputError, first_line
from twofour.export.model_code import described
from twofour.inputs.fits import Array
from twofour.inputs.samples import (
    Batch,
    CalibrationData,
    DataRequest,
    ImageScaling,
    ModelInput,
    ModelInputs,
    batch_samples,
    cut_batches,
    fit_batch,
    usable_samples,
)
from twofour.packages import installed_version
from twofour.sources.calibration.loaders import on_disk
from twofour.sources.checkpoint import PREPROCESSOR
from twofour.sources.source import import_extra, key_of
from twofour.store import sha256_file
from twofour.words import listed

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = (
    ".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff",
    ".webp",
)  # fmt: skip
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Channels of a model -> how its images are decoded."""
_SCALING_HINT = (
    "give what it was trained with, on the scale 0 to 1: --mean 0.485,0.456,0.406 "
    "--std 0.229,0.224,0.225 is usual for ImageNet, --mean 0 --std 1 leaves pixels from 0 to 1"
)

Read = Callable[[Path], Array]
"""A file -> the image as the model takes it, without the axis of samples."""


def open_images(request: DataRequest) -> CalibrationData:
    """The images in a folder and below, as many as are asked for, spread over their sorted names.

    They are decoded once, now: a damaged one is left out and named. Raises BadInputError where
    none can be read or nothing says how the model wants its pixels.
    """
    import_extra("PIL", "a folder of images")
    inputs = request.inputs
    source = request.text
    asked = request.options.samples
    one = _image_input(inputs, source)
    read = _reader(request, one)
    tried: dict[Path, str] = {}
    files = evenly_spaced(_images(request.path, source), asked)
    arrays = islice(_decoded(files, read, tried), asked)
    batches = cut_batches(inputs, _batches(inputs, one, arrays, source), asked)
    kept = on_disk(batches, request.folder)
    broken = [f"{file.relative_to(request.path)} ({why})" for file, why in tried.items() if why]
    count = len(tried) - len(broken)
    if not count:
        raise BadInputError(f"{source}: none of {len(broken)} images can be read: {broken[0]}")
    samples, notes = usable_samples(inputs, count, asked, source)
    if broken:
        could_not = f"of {len(tried)} images {len(broken)} could not be read: {listed(broken)}"
        notes = (*notes, f"{source}: {could_not}")
    return CalibrationData(source=source, samples=samples, notes=notes, batches=kept)


def images_key(request: DataRequest) -> str:
    """sha256 over the images that are used, and how they are read."""
    asked = request.options.samples
    files = [*islice(evenly_spaced(_images(request.path, request.text), asked), asked)]
    if request.inputs.folder is not None:
        files += request.inputs.folder.glob(PREPROCESSOR)
    version = str(installed_version("pillow"))
    return key_of(*map(sha256_file, files), version, request.settings)


def evenly_spaced(files: Sequence[Path], count: int) -> Iterator[Path]:
    """`count` of the files at equal distances, then the others: folders are often classes."""
    # 2 of 5: numbers 0 and 2, then 1, 3, 4
    step = max(len(files) / count, 1.0)
    places = dict.fromkeys(int(place * step) for place in range(min(count, len(files))))
    yield from (files[place] for place in places)
    yield from (file for place, file in enumerate(files) if place not in places)


def _images(folder: Path, source: str) -> list[Path]:
    images = []
    for where, _, names in os.walk(folder):
        for name in names:
            # macOS leaves ._NAME.jpg beside NAME.jpg
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith("."):
                images.append(Path(where, name))
    if not images:
        raise BadInputError(
            f"{source} and the folders in it have no images",
            hint=f"images end in {', '.join(IMAGE_SUFFIXES)}",
        )
    return sorted(images, key=lambda file: file.relative_to(folder).parts)


def _decoded(files: Iterable[Path], read: Read, tried: dict[Path, str]) -> Iterator[Array]:
    """Images one by one; `tried` gets each file, and why it cannot be decoded."""
    for file in files:
        tried[file] = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of metadata that nobody asked for
                array = read(file)
        except Exception as error:  # noqa: BLE001  # pillow's decoders have no common error
            tried[file] = first_line(error)
            continue
        yield array


def _batches(
    inputs: ModelInputs, one: ModelInput, arrays: Iterator[Array], source: str
) -> Iterator[Batch]:
    while chunk := list(islice(arrays, batch_samples(inputs))):
        sizes = {"x".join(map(str, array.shape)) for array in chunk}
        if len(sizes) > 1:
            raise BadInputError(
                f"{source}: the model's own preprocessing gives images of several sizes: "
                f"{', '.join(sorted(sizes))}",
                hint="bring them to one with --size 224x224 --mean MEAN --std STD",
            )
        yield replace(fit_batch(inputs, {one.name: np.stack(chunk)}, source), samples=len(chunk))


def _image_input(inputs: ModelInputs, source: str) -> ModelInput:
    """The one input that a folder of images can fill; raises BadInputError."""
    needed = [one for one in inputs.inputs if one.required or one.example is not None]
    if len(needed) == 1 and (needed[0].shape is None or len(needed[0].shape) == 4):
        return needed[0]
    raise BadInputError(
        f"{source} is a folder of images, and {inputs.model} takes {inputs.in_words}",
        hint="a folder is for models of one input, samples x channels x height x width or with "
        "the channels last; give others by name in an .npz file or by file.py:callable",
    )


def _reader(request: DataRequest, one: ModelInput) -> Read:
    """What the options, the module itself, or the checkpoint's image processor ask for."""
    options = request.options
    inputs = request.inputs
    if bool(options.image_mean) != bool(options.image_std):
        raise BadInputError("--mean and --std go together", hint=_SCALING_HINT)
    if options.image_mean:
        scaling = ImageScaling(mean=options.image_mean, std=options.image_std)
        return _scaled(request, one, scaling)
    if one.dtype == "uint8":
        return _scaled(request, one, ImageScaling(mean=(0.0,), std=(1.0,)))
    if inputs.images is not None:
        return _scaled(request, one, inputs.images)
    if inputs.folder is None or not (inputs.folder / PREPROCESSOR).is_file():
        raise BadInputError(
            f"nothing says how {inputs.model} wants the pixels of {request.text}",
            hint=_SCALING_HINT,
        )
    if options.image_size is not None:
        raise BadInputError("--size without --mean and --std", hint=_SCALING_HINT)
    return partial(_processed, _processor(inputs.folder), _layout(one)[0])


def _layout(one: ModelInput) -> tuple[bool, int, tuple[int, int] | None]:
    """Whether channels come last, how many, and height and width where they are known."""
    # [8, 224, 224, 3] -> True, 3, (224, 224); ("batch", 1, "h", "w") -> False, 1, None
    dims = one.example or one.shape or ("?", 3, "?", "?")
    last = dims[1] not in _MODES and dims[3] in _MODES
    channels, height, width = dims[1:]
    if last:
        height, width, channels = dims[1:]
    if not isinstance(channels, int):
        channels = 3
    if channels not in _MODES:
        raise BadInputError(
            f"input {one.in_words} has {channels} channels: no image",
            hint="give arrays in an .npz file",
        )
    if isinstance(height, int) and isinstance(width, int):
        return last, channels, (height, width)
    return last, channels, None


def _scaled(request: DataRequest, one: ModelInput, scaling: ImageScaling) -> Read:
    last, channels, known = _layout(one)
    size = request.options.image_size or scaling.size or known
    if size is None:
        raise BadInputError(
            f"the size of input {one.in_words} is free", hint="give it with --size 224x224"
        )
    _check_scaling(scaling, channels)
    scaling = replace(scaling, size=size)
    mean = np.asarray(scaling.mean, np.float32)
    std = np.asarray(scaling.std, np.float32)

    def read(file: Path) -> Array:
        pixels = np.atleast_3d(np.asarray(_centre(scaling, _MODES[channels], file)))
        if one.dtype != "uint8":
            pixels = (pixels.astype(np.float32) / np.float32(255) - mean) / std
        return pixels if last else np.ascontiguousarray(pixels.transpose(2, 0, 1))

    return read


def _check_scaling(scaling: ImageScaling, channels: int) -> None:
    for name, values in (("--mean", scaling.mean), ("--std", scaling.std)):
        if len(values) not in {1, channels} or not np.isfinite(values).all():
            raise BadInputError(
                f"{name} has {len(values)} values, and the model reads images of "
                f"{channels} channels",
                hint="give one number, or one for each channel",
            )


def _centre(scaling: ImageScaling, mode: str, file: Path) -> Image:
    """The centre of the image, as large as the model takes it."""
    from PIL import Image, ImageOps

    assert scaling.size is not None
    height, width = scaling.size
    with Image.open(file) as opened:
        # a JPEG is decoded at a half, a quarter or an eighth where that is still large enough
        opened.draft(mode, (2 * width, 2 * height))
        image = _with_channels(opened, mode)
    # scaled to 256 of which 224 are kept: a sixteenth is cut off at each edge
    edge = (1 - 1 / scaling.resized) / 2
    method = Image.Resampling[scaling.resample.upper()]
    return ImageOps.fit(image, (width, height), method, bleed=edge)


def _with_channels(image: Image, mode: str) -> Image:
    """The image in these channels; pillow itself would cut 16 bits off at 255."""
    if image.mode == "F":
        raise ValueError("its pixels are floats, of which nothing says the range")
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
    return image.convert(mode)


def _processor(folder: Path) -> Any:  # noqa: ANN401  # transformers has a class for each model
    transformers = import_extra("transformers", "the image processor of a checkpoint")
    by_pillow: dict[str, Any] = {"use_fast": False}
    if int(transformers.__version__.partition(".")[0]) >= 5:
        by_pillow = {"backend": "pil"}  # the same with and without torchvision
    with described(f"the image processor in {folder} cannot be used:", hint=_SCALING_HINT):
        return transformers.AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **by_pillow
        )


def _processed(processor: Any, last: bool, file: Path) -> Array:  # noqa: ANN401  # as above
    from PIL import Image

    with Image.open(file) as opened:
        image = _with_channels(opened, "RGB")
    answer = processor(images=[image], return_tensors="np")
    pixels: Array = np.asarray(answer["pixel_values"][0])
    return pixels.transpose(1, 2, 0) if last else pixels

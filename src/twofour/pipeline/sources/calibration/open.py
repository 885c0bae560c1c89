"""The kinds of calibration data, told apart by what the user wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from twofour.errors import BadInputError
from twofour.pipeline.sources.calibration.arrays import (
    file_key,
    open_npy,
    open_npz,
    open_safetensors,
)
from twofour.pipeline.sources.calibration.code import code_key, open_code
from twofour.pipeline.sources.calibration.data import CalibrationData, ModelInputs
from twofour.pipeline.sources.calibration.images import (
    IMAGE_SUFFIXES,
    images_key,
    is_folder,
    open_images,
)
from twofour.pipeline.sources.calibration.jsonl import open_jsonl
from twofour.pipeline.sources.calibration.models import described_in
from twofour.pipeline.sources.calibration.request import Request, TemporaryFolder
from twofour.pipeline.sources.calibration.text import open_txt, text_key
from twofour.pipeline.sources.source import path_of
from twofour.pipeline.sources.user_code import names_code
from twofour.records.options import CalibrationOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of data: how it is written, which texts have it, and what opens it."""

    written: str
    """As help and errors show it."""
    fits: Callable[[str, Path], bool]
    """Of the text, and the same as a path."""
    open: Callable[[Request], CalibrationData]
    """Raises BadInputError where the data do not fit the model."""
    key: Callable[[Request], str]
    """sha256 over the data without opening them for the model."""
    scales_images: bool = False
    """It heeds --mean, --std and --size."""


def _suffix(*suffixes: str) -> Callable[[str, Path], bool]:
    return lambda _text, path: path.is_file() and path.suffix.lower() in suffixes


KINDS = (
    Kind(
        written="a folder of images",
        fits=is_folder,
        open=open_images,
        key=images_key,
        scales_images=True,
    ),
    Kind(written="file.npz", fits=_suffix(".npz"), open=open_npz, key=file_key),
    Kind(written="file.npy", fits=_suffix(".npy"), open=open_npy, key=file_key),
    Kind(
        written="file.safetensors",
        fits=_suffix(".safetensors"),
        open=open_safetensors,
        key=file_key,
    ),
    Kind(written="file.txt", fits=_suffix(".txt"), open=open_txt, key=text_key),
    Kind(written="file.jsonl", fits=_suffix(".jsonl"), open=open_jsonl, key=text_key),
    Kind(
        written="file.py:callable, package.module:callable",
        fits=names_code,
        open=open_code,
        key=code_key,
    ),
)
"""Every kind there is; the first that fits opens the text."""


def open_calibration(
    options: CalibrationOptions,
    inputs: ModelInputs,
    *,
    seed: int = 0,
    folder: Path | None = None,
) -> CalibrationData:
    """The data that `options.data` names, found to fit the model.

    What does not fit into memory goes to a temporary folder inside `folder`, which is gone with
    the data. Raises BadInputError for data that cannot be read or do not fit, and MissingToolError
    where an extra is not installed.
    """
    request = _request(options, inputs, seed)
    request = replace(request, spill=TemporaryFolder(folder))
    kind = _kind(request)
    if not kind.scales_images:
        _refuse_scaling(request)
    return kind.open(request)


def calibration_key(options: CalibrationOptions, folder: Path | None, *, seed: int = 0) -> str:
    """sha256 over the data and what reads them, before any model is loaded; "" without data.

    Of code, what it reads when it runs is not in it. `folder`: of the model, where its tokenizer
    and image processor are described.
    """
    if options.data is None:
        return ""
    told = None if folder is None else described_in(folder)
    no_model = ModelInputs(model="", inputs=(), positional=(), folder=told)
    request = _request(options, no_model, seed)
    return _kind(request).key(request)


def _request(options: CalibrationOptions, inputs: ModelInputs, seed: int) -> Request:
    if options.data is None:
        raise BadInputError("no calibration data", hint="name them with --calibrate")
    if options.samples < 1:
        raise BadInputError(
            f"--calibrate-samples {options.samples} leaves no sample", hint="give at least 1"
        )
    path = path_of(options.data).absolute()
    return Request(text=options.data, path=path, options=options, inputs=inputs, seed=seed)


def _kind(request: Request) -> Kind:
    kind = next((kind for kind in KINDS if kind.fits(request.text, request.path)), None)
    if kind is None:
        raise _no_data(request.text, request.path)
    return kind


def _refuse_scaling(request: Request) -> None:
    """Arrays come as the model takes them: what would scale them must not pass unheeded."""
    asked = request.options
    for given, option in (
        (bool(asked.image_mean), "--mean"),
        (bool(asked.image_std), "--std"),
        (asked.image_size is not None, "--size"),
    ):
        if given:
            raise BadInputError(
                f"{option} is for folders of images, and {request.text} is none",
                hint="give arrays scaled as the model expects them, and leave the option out",
            )


def _no_data(text: str, path: Path) -> BadInputError:
    """With what comes near, where something does."""
    forms = f"calibration data are {', '.join(kind.written for kind in KINDS)}"
    suffix = path.suffix.lower()
    if not path.is_file():
        return BadInputError(f"--calibrate {text}: there is no such file or folder", hint=forms)
    if suffix == ".py":
        forms = f"name the function that yields batches: {text}:batches"
    elif suffix in IMAGE_SUFFIXES:
        forms = f"name the folder that it is in: {path.parent}"
    elif suffix == ".json":
        forms = f"write an object on each line, in a .jsonl file; {forms}"
    return BadInputError(f"--calibrate {text}: no known kind of data", hint=forms)

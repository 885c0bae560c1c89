"""Calibration data of a model: what must fit it, and the kinds, known by what the user wrote."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.errors import BadInputError
from twofour.inputs.samples import (
    CalibrationData,
    DataRequest,
    ImageScaling,
    ModelInput,
    ModelInputs,
)
from twofour.records.export import ANONYMOUS, TensorShape
from twofour.records.options import CalibrationOptions
from twofour.records.weights import Calibration
from twofour.sources.calibration.arrays_and_text import file_key, open_arrays, open_text, text_key
from twofour.sources.calibration.images import IMAGE_SUFFIXES, images_key, open_images
from twofour.sources.calibration.loaders import calibration_from_value
from twofour.sources.checkpoint import described_in
from twofour.sources.source import key_of, names_code, path_of
from twofour.sources.user_code import (
    call,
    code_key,
    import_attribute,
    parse_reference,
    seed_everything,
    user_code,
)

if TYPE_CHECKING:
    from torch import nn

    from twofour.sources.source import LoadedModule

_BATCH = "batch"
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataKind:
    """One kind of data: how it is written, which texts have it, and what opens it."""

    written: str
    """The form that help and errors show."""
    fits: Callable[[str, Path], bool]
    """Takes the text, and the same as a path."""
    open: Callable[[DataRequest], CalibrationData]
    """Raises BadInputError where the data do not fit the model."""
    key: Callable[[DataRequest], str]
    """sha256 over the data without opening them for the model."""
    scales_images: bool = False
    """It uses --mean, --std and --size."""


def _suffix(*suffixes: str) -> Callable[[str, Path], bool]:
    return lambda _text, path: path.is_file() and path.suffix.lower() in suffixes


def _open_code(request: DataRequest) -> CalibrationData:
    """Call the function and keep what it yields, with all random numbers seeded."""
    reference = parse_reference(request.text)
    seed_everything(request.seed)
    target = import_attribute(reference)
    if callable(target):  # else a loader of that name
        hint = "name a function that takes none and yields batches"
        target = call(reference, target, request.seed, hint=hint)
    return calibration_from_value(
        target,
        request.inputs,
        samples=request.options.samples,
        where=request.text,
        guard=partial(user_code, reference, "raised"),
        folder=request.folder,
    )


KINDS = (
    DataKind(
        written="a folder of images",
        fits=lambda _text, path: path.is_dir(),
        open=open_images,
        key=images_key,
        scales_images=True,
    ),
    DataKind(
        written="file.npz, file.npy, file.safetensors",
        fits=_suffix(".npz", ".npy", ".safetensors"),
        open=open_arrays,
        key=file_key,
    ),
    DataKind(
        written="file.txt, file.jsonl",
        fits=_suffix(".txt", ".jsonl"),
        open=open_text,
        key=text_key,
    ),
    DataKind(
        written="file.py:callable, package.module:callable",
        fits=names_code,
        open=_open_code,
        key=lambda r: key_of(code_key(parse_reference(r.text)), r.settings, str(r.seed)),
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
    request = replace(_request(options, inputs, seed), folder=folder)
    kind = _kind(request)
    asked = options.image_mean or options.image_std or options.image_size is not None
    if asked and not kind.scales_images:  # arrays come as the model takes them
        raise BadInputError(
            f"--mean, --std and --size are for folders of images, and {request.text} is none",
            hint="give arrays scaled as the model expects them, and leave the option out",
        )
    return kind.open(request)


def calibration_key(options: CalibrationOptions, folder: Path | None, *, seed: int = 0) -> str:
    """sha256 over the data and what reads them, before any model is loaded; "" without data."""
    if options.data is None:
        return ""
    told = None if folder is None else described_in(folder)
    no_model = ModelInputs(model="", inputs=(), positional=(), folder=told)
    request = _request(options, no_model, seed)
    return _kind(request).key(request)


def _request(options: CalibrationOptions, inputs: ModelInputs, seed: int) -> DataRequest:
    assert options.data is not None, "only asked for where there are data"
    if options.samples < 1:
        raise BadInputError(
            f"--calibrate-samples {options.samples} leaves no sample", hint="give at least 1"
        )
    path = path_of(options.data).absolute()
    return DataRequest(text=options.data, path=path, options=options, inputs=inputs, seed=seed)


def _kind(request: DataRequest) -> DataKind:
    kind = next((kind for kind in KINDS if kind.fits(request.text, request.path)), None)
    if kind is None:
        raise _no_data(f"{request.options.option} {request.text}", request.path)
    return kind


def _no_data(given: str, path: Path) -> BadInputError:
    """The error for data of no kind; its hint names the nearest kind, if any."""
    forms = f"it takes {', '.join(kind.written for kind in KINDS)}"
    suffix = path.suffix.lower()
    if not path.is_file():
        return BadInputError(f"{given}: there is no such file or folder", hint=forms)
    if suffix == ".py":
        forms = f"name the function that yields batches: {given}:batches"
    elif suffix in IMAGE_SUFFIXES:
        forms = f"name the folder that it is in: {path.parent}"
    return BadInputError(f"{given}: no known kind of data", hint=forms)


def calibration_record(data: CalibrationData) -> Calibration:
    """The record of the data, before they are read and a part of them is held out."""
    return Calibration(
        source=data.source,
        samples=data.samples,
        held_out=0,
        notes=data.notes,
    )


def onnx_inputs(file: Path, tensors: Sequence[TensorShape]) -> ModelInputs:
    """The inputs of an ONNX file, with the folder beside it for its tokenizer."""
    return ModelInputs(
        model=file.name,
        inputs=tuple(ModelInput(name=t.name, dtype=t.dtype, shape=t.shape) for t in tensors),
        positional=tuple(t.name for t in tensors),
        lone=len(tensors) == 1,
        folder=described_in(file.parent),
    )


def loaded_inputs(loaded: LoadedModule, model: str, folder: Path | None = None) -> ModelInputs:
    """The inputs of a module, with types and ranks of its examples; `folder`: its checkpoint."""
    described = module_inputs(loaded.module)
    examples = (*loaded.args, *loaded.kwargs.values())
    by_position = (f"arr_{index}" for index in range(len(loaded.args)))
    names = loaded.input_names or (*by_position, *loaded.kwargs)
    rows = next((int(t.shape[0]) for t in examples if t.dim()), None)
    found = []
    for name, tensor in zip(names, examples, strict=True):
        shape, known = tuple(map(int, tensor.shape)), described.known(name)
        first = (_BATCH,) if shape and shape[0] == rows else shape[:1]
        one = ModelInput(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=(*first, *(ANONYMOUS,) * (len(shape) - 1)),
            example=shape,
            required=known is None or known.required,
        )
        found.append(one)
    more = [one for one in described.inputs if one.name not in names]
    return replace(
        described,
        model=model,
        inputs=(*found, *more),
        positional=names,
        folder=None if folder is None else described_in(folder),
        most_tokens=loaded.longest.get("sequence"),
        images=_image_scaling(loaded.module),
    )


def _image_scaling(module: nn.Module) -> ImageScaling | None:
    """What a timm model says of its images; None for any other module."""
    config = getattr(module, "pretrained_cfg", None)
    if not isinstance(config, dict) or not config.get("mean") or not config.get("std"):
        return None
    size, interpolation = config.get("input_size"), config.get("interpolation")
    return ImageScaling(
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        size=(int(size[1]), int(size[2])) if size else None,
        resized=1.0 / float(config.get("crop_pct") or 1.0),
        resample=interpolation if interpolation in _INTERPOLATIONS else "bilinear",
    )


def module_inputs(module: nn.Module) -> ModelInputs:
    """The inputs of a module alone: the names of forward's arguments, and which it needs."""
    parameters = tuple(inspect.signature(module.forward).parameters.values())
    # a switch with another default than None is no place for the labels of a loader's pair
    positional = tuple(
        p.name
        for p in parameters
        if p.kind in _BY_POSITION and (p.default is p.empty or p.default is None)
    )
    kinds = {str(p.dtype).removeprefix("torch.") for p in module.parameters()} & {*_FLOATS}
    return ModelInputs(
        model=type(module).__name__,
        inputs=tuple(
            ModelInput(name=p.name, required=p.default is p.empty)
            for p in parameters
            if p.kind not in _VARIADIC
        ),
        positional=positional,
        lone=len(positional) == 1,
        floats=kinds.pop() if len(kinds) == 1 else None,
        any_name=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )

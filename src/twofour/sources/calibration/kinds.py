"""Calibration data of a model: what must fit it, and the kinds, known by what the user wrote."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.errors import BadInputError
from twofour.inputs.fits import torch_type_name
from twofour.inputs.samples import (
    CalibrationData,
    DataRequest,
    ImageScaling,
    ModelInput,
    ModelInputs,
)
from twofour.records import frozen
from twofour.records.export import ANONYMOUS, TensorShape
from twofour.records.options import CalibrationOptions
from twofour.records.weights import Calibration
from twofour.sources.calibration.arrays_and_text import file_key, open_arrays, open_text
from twofour.sources.calibration.images import IMAGE_SUFFIXES, images_key, open_images
from twofour.sources.calibration.loaders import calibration_from_value
from twofour.sources.checkpoint import described_in
from twofour.sources.source import key_of, names_code, path_of, positional_parameters
from twofour.sources.user_code import (
    Held,
    call,
    code_key,
    import_attribute,
    parse_reference,
    seed_everything,
    user_code,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from twofour.sources.source import LoadedModule

_BATCH = "batch"
_FLOATS = ("float64", "float32", "float16", "bfloat16")


@frozen
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
    elif isinstance(target, Iterator):  # `tee` made it: a copy begins at the first batch
        target = copy(target)
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
        written="file.txt, file.jsonl", fits=_suffix(".txt", ".jsonl"), open=open_text, key=file_key
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
    options: CalibrationOptions, inputs: ModelInputs, *, seed: int = 0, folder: Path | None = None
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
    described = None if folder is None else described_in(folder)
    no_model = ModelInputs(model="", inputs=(), positional=(), folder=described)
    request = _request(options, no_model, seed)
    return _kind(request).key(request)


def _request(options: CalibrationOptions, inputs: ModelInputs, seed: int) -> DataRequest:
    assert options.data is not None, "only asked for where there are data"
    path = path_of(options.data).absolute()
    return DataRequest(text=options.data, path=path, options=options, inputs=inputs, seed=seed)


def _kind(request: DataRequest) -> DataKind:
    if isinstance(request.text, Held):
        return KINDS[-1]
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
    return Calibration(source=data.source, samples=data.samples, held_out=0, notes=data.notes)


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
    names = loaded.input_names
    if names is None:
        by_place = (f"arr_{place}" for place in range(len(loaded.args)))
        names = (*by_place, *loaded.kwargs)
    rows = next((tensor.shape[0] for tensor in examples if tensor.dim()), None)
    inputs = []  # those with an example, then what else forward could take
    for name, tensor in zip(names, examples, strict=True):
        one = described.known(name) or ModelInput(name=name)
        inputs.append(_like_example(one, tensor, rows))
    inputs += (one for one in described.inputs if one.name not in names)
    return replace(
        described,
        model=model,
        inputs=tuple(inputs),
        positional=names,
        folder=None if folder is None else described_in(folder),
        most_tokens=loaded.longest.get("sequence"),
        images=_image_scaling(loaded.module),
    )


def _like_example(one: ModelInput, tensor: torch.Tensor, rows: int | None) -> ModelInput:
    """The input with the type and the rank of its example."""
    # 2 x 3 x 224 x 224 -> ("batch", "?", "?", "?"), and for 5 rows in all (2, "?", "?", "?")
    shape = tuple(map(int, tensor.shape))
    sizes: list[int | str] = [ANONYMOUS] * len(shape)
    if shape:
        sizes[0] = _BATCH if shape[0] == rows else shape[0]
    return replace(one, dtype=torch_type_name(tensor), shape=tuple(sizes), example=shape)


def _image_scaling(module: nn.Module) -> ImageScaling | None:
    """What a timm model says of its images; None for any other module."""
    config = getattr(module, "pretrained_cfg", None)
    if not isinstance(config, dict) or not config.get("mean") or not config.get("std"):
        return None
    _, height, width = config["input_size"]
    return ImageScaling(
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        size=(height, width),
        resized=1.0 / float(config.get("crop_pct") or 1.0),
        resample=config.get("interpolation") or "bilinear",
    )


def module_inputs(module: nn.Module) -> ModelInputs:
    """The inputs of a module alone: the names of forward's arguments, and which it needs."""
    inputs = []
    any_name = False
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            any_name = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            required = parameter.default is parameter.empty
            inputs.append(ModelInput(name=parameter.name, required=required))
    positional = []
    for parameter in positional_parameters(module):
        # a switch with another default than None is no place for the labels of a loader's pair
        if parameter.default is parameter.empty or parameter.default is None:
            positional.append(parameter.name)
    types = {torch_type_name(parameter) for parameter in module.parameters()} & {*_FLOATS}
    return ModelInputs(
        model=type(module).__name__,
        inputs=tuple(inputs),
        positional=tuple(positional),
        lone=len(positional) == 1,
        floats=types.pop() if len(types) == 1 else None,
        any_name=any_name,
    )

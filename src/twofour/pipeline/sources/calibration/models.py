"""What calibration data must be for a model: read from an ONNX file, or from a torch module."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.errors import BadInputError
from twofour.pipeline.sources.calibration.data import ImageScaling, ModelInput, ModelInputs
from twofour.pipeline.sources.checkpoint import (
    MODULES,
    PREPROCESSOR,
    TOKENIZER_FILES,
    read_json,
    transformer_folder,
)
from twofour.records.export import ANONYMOUS, TensorShape

if TYPE_CHECKING:
    import torch
    from torch import nn

    from twofour.pipeline.sources.source import LoadedModule

_BATCH = "batch"
_TOLD_BY = (*TOKENIZER_FILES, PREPROCESSOR)
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def onnx_inputs(file: Path, tensors: Sequence[TensorShape]) -> ModelInputs:
    """Of an ONNX file, named as the user did: its tokenizer is looked for beside it."""
    return ModelInputs(
        model=file.name,
        inputs=tuple(ModelInput(name=t.name, dtype=t.dtype, shape=t.shape) for t in tensors),
        positional=tuple(t.name for t in tensors),
        lone=len(tensors) == 1,
        folder=described_in(file.parent),
    )


def described_in(folder: Path) -> Path:
    """Where the tokenizer and the image processor of a model in this folder are described.

    Optimum and others write onnx/model.onnx below them; older sentence encoders have the
    transformer one level down.
    """
    if (folder / MODULES).is_file():
        with contextlib.suppress(BadInputError):  # whoever reads the checkpoint will say so
            return transformer_folder(folder, read_json(folder / MODULES))
    above = folder.absolute().parent
    if folder.name == "onnx" and not _is_told(folder) and _is_told(above):
        return described_in(above)
    return folder


def _is_told(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*_TOLD_BY, MODULES))


def loaded_inputs(loaded: LoadedModule, model: str, folder: Path | None = None) -> ModelInputs:
    """Of a module with example inputs, which tell types and ranks; sizes but the batch are free.

    `folder`: the checkpoint, which has its tokenizer.
    """
    described = module_inputs(loaded.module)
    examples = (*loaded.args, *loaded.kwargs.values())
    by_position = (f"arr_{index}" for index in range(len(loaded.args)))
    names = loaded.input_names or (*by_position, *loaded.kwargs)
    rows = next((int(t.shape[0]) for t in examples if t.dim()), None)
    found = [_example(n, t, rows, described) for n, t in zip(names, examples, strict=True)]
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
    told = getattr(module, "pretrained_cfg", None)
    if not isinstance(told, dict) or not told.get("mean") or not told.get("std"):
        return None
    size = told.get("input_size")
    interpolation = told.get("interpolation")
    return ImageScaling(
        mean=tuple(told["mean"]),
        std=tuple(told["std"]),
        size=(int(size[1]), int(size[2])) if size else None,
        resized=1.0 / float(told.get("crop_pct") or 1.0),
        resample=interpolation if interpolation in _INTERPOLATIONS else "bilinear",
    )


def module_inputs(module: nn.Module) -> ModelInputs:
    """Of a module alone: the names of forward's arguments, and which of them it needs."""
    parameters = tuple(inspect.signature(module.forward).parameters.values())
    # a switch with another default than None is no place for the labels of a loader's pair
    positional = tuple(
        p.name
        for p in parameters
        if p.kind in _BY_POSITION and (p.default is p.empty or p.default is None)
    )
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return ModelInputs(
        model=type(module).__name__,
        inputs=tuple(
            ModelInput(name=p.name, required=p.default is p.empty)
            for p in parameters
            if p.kind not in _VARIADIC
        ),
        positional=positional,
        lone=len(positional) == 1 and not any_number,
        floats=_floats(module),
        any_name=any(p.kind is p.VAR_KEYWORD for p in parameters),
        any_number=any_number,
    )


def _floats(module: nn.Module) -> str | None:
    """Of all weights; None where there are several types, or none."""
    kinds = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    kinds = {kind for kind in kinds if kind in _FLOATS}
    return kinds.pop() if len(kinds) == 1 else None


def _example(
    name: str, tensor: torch.Tensor, rows: int | None, described: ModelInputs
) -> ModelInput:
    shape = tuple(int(size) for size in tensor.shape)
    is_cut = bool(shape) and shape[0] == rows
    known = described.known(name)
    return ModelInput(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=((_BATCH,) if is_cut else shape[:1]) + (ANONYMOUS,) * (len(shape) - 1),
        example=shape,
        required=known is None or known.required,
    )

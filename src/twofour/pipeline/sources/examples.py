"""Example inputs as tensors: from the user's options, or from what a callable returned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from twofour.errors import BadInputError
from twofour.pipeline.example_shapes import refuse_large_example
from twofour.pipeline.sources.arrays import read_arrays
from twofour.pipeline.sources.source import SourceOptions

_FLOAT_BYTES = 4
_POSITIONAL = re.compile(r"arr_(\d+)")
"""How numpy.savez calls arrays that were given without a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleInputs:
    """Arguments for one call of forward."""

    args: tuple[torch.Tensor, ...] = ()
    kwargs: dict[str, torch.Tensor] = field(default_factory=dict)


def inputs_from_options(module: nn.Module, options: SourceOptions) -> ExampleInputs | None:
    """What --inputs or --input-shape say; None where the user gave neither.

    Raises BadInputError when both are given, or the file is no .npz with numbers.
    """
    if options.inputs is not None and options.input_shapes:
        raise BadInputError("--inputs and --input-shape exclude each other", hint="give one")
    if options.input_shapes:
        made = _random_tensors(options)
        if options.input_shape_names:
            return ExampleInputs(kwargs=dict(zip(options.input_shape_names, made, strict=True)))
        return ExampleInputs(args=made)
    if options.inputs is None:
        return None
    if options.inputs.suffix != ".npz":
        raise BadInputError(
            f"{options.inputs} cannot be used as inputs of {type(module).__name__}",
            hint="give an .npz file; sentences in a .txt file are for Hugging Face text models",
        )
    arrays = read_arrays(options.inputs)
    tensors = {name: _tensor(module, name, array) for name, array in arrays.items()}
    by_position = sorted(
        (int(match[1]), name) for name in tensors if (match := _POSITIONAL.fullmatch(name))
    )
    args = tuple(tensors.pop(name) for _, name in by_position)
    return ExampleInputs(args=args, kwargs=tensors)


def inputs_from_value(value: object, where: str) -> ExampleInputs:
    """Example inputs as user code gives them: a tensor, a tuple or list of them, or a dict.

    Raises BadInputError naming the type of whatever else is found; `where` begins its message.
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return ExampleInputs(args=(_as_tensor(value, where),))
    if isinstance(value, (tuple, list)) and value:
        return ExampleInputs(
            args=tuple(_as_tensor(v, f"{where}: example input #{i}") for i, v in enumerate(value))
        )
    if isinstance(value, Mapping) and value:
        kwargs = {str(n): _as_tensor(v, f"{where}: example input {n!r}") for n, v in value.items()}
        return ExampleInputs(kwargs=kwargs)
    raise BadInputError(
        f"{where}: the example inputs are {_kind(value)}",
        hint="give a tensor, a tuple of tensors, or a dict of tensors by name",
    )


def _random_tensors(options: SourceOptions) -> tuple[torch.Tensor, ...]:
    for shape in options.input_shapes:
        if any(size < 1 for size in shape):
            raise BadInputError(f"input shape {shape} has a dimension below 1")
    total = 0
    for shape in options.input_shapes:
        total += prod(shape) * _FLOAT_BYTES
        refuse_large_example("--input-shape", shape, total)
    generator = torch.Generator().manual_seed(options.seed)
    return tuple(torch.randn(shape, generator=generator) for shape in options.input_shapes)


def _tensor(module: nn.Module, name: str, array: NDArray[Any]) -> torch.Tensor:
    """float64 is numpy's default, not a choice: it becomes float32 unless the model has float64."""
    is_double = any(p.dtype == torch.float64 for p in module.parameters())
    if array.dtype == np.float64 and not is_double:
        array = array.astype(np.float32)
    return _as_tensor(array, f"array {name!r}")


def _as_tensor(value: object, where: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        except TypeError as error:
            raise BadInputError(f"{where} has numpy type {value.dtype}, not a number") from error
    if isinstance(value, (tuple, list, Mapping)):
        raise BadInputError(
            f"{where} is {_kind(value)}, not a tensor",
            hint="wrap the model in a module whose forward takes tensors and puts them together; "
            "keyword arguments of forward are given as a dict that stands in no tuple",
        )
    raise BadInputError(
        f"{where} is {_kind(value)}, not a tensor",
        hint="give what is not a tensor a default in forward, or set it in the callable",
    )


def _kind(value: object) -> str:
    if isinstance(value, (tuple, list, Mapping)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"

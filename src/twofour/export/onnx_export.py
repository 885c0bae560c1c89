"""A torch module to an ONNX file whose weights are named after their modules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.export.clean import positive_zeros, strip_paths
from twofour.export.example_inputs import as_array, bind, converted, forward_error
from twofour.export.layer_names import layer_map
from twofour.export.onnx_file import save
from twofour.export.precision import (
    TORCH_DTYPES,
    float32_borders,
    in_precision,
    match_weight_types,
    release_copy,
)
from twofour.export.trace import in_eval_mode, trace
from twofour.records.export import LayerMap
from twofour.records.options import ExportOptions, Precision


def export_onnx(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Path,
    options: ExportOptions,
) -> LayerMap:
    """Write `target` and its weights, `<target name>.data` beside it; the module stays as it is.

    Inputs and outputs are float32 in every precision; outputs are named after the keys of the dict
    that the forward returns, where it does. Raises BadInputError when the forward fails on the
    example inputs, torch cannot export the module, the result is no valid ONNX, or the folder
    cannot be written.
    """
    call = bind(module, args, kwargs)
    ready = in_precision(module, options.precision)
    model = trace(ready, call, options)
    match_weight_types(model)
    float32_borders(model)
    positive_zeros(model)
    names = layer_map(model, ready)
    strip_paths(model)
    save(model, target)
    if ready is not module:
        release_copy(ready, module)
    return names


def reference_outputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[NDArray[Any], ...]:
    """What the module gives in float32 and evaluation mode, in the order of the ONNX outputs.

    Raises BadInputError when the forward fails on the example inputs.
    """
    call = converted(bind(module, args, kwargs), TORCH_DTYPES[Precision.FLOAT32])
    ready = in_precision(module, Precision.FLOAT32)
    # what the forward prints goes to stderr: stdout may carry our JSON
    with in_eval_mode(ready), contextlib.redirect_stdout(sys.stderr):
        try:
            outputs = ready(*call.args, **call.kwargs)
        except (Exception, SystemExit) as error:
            raise forward_error(module, error) from error
    leaves = pytree.tree_leaves(outputs)
    tensors = tuple(as_array(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    strange = next((leaf for leaf in leaves if isinstance(leaf, str | bytes)), None)
    if not tensors or strange is not None:
        given = "no tensor" if strange is None else f"a {type(strange).__name__}"
        raise BadInputError(
            f"{type(module).__name__}.forward gives {given}, which ONNX cannot hold",
            hint="let forward return tensors: one, a tuple, or a dict of them",
        )
    return tensors

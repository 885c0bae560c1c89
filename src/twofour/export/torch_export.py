"""A torch module exported to an ONNX file that TensorRT reads."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.export.example_inputs import as_array, bind, converted, forward_error
from twofour.export.layer_names import layer_map, weight_operands
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
from twofour.store import sync


def save(
    model: ir.Model, target: Path, on_invalid: Callable[[Path, str], None] | None = None
) -> None:
    """Write and check `<target name>.data` and `target`; the model appears last.

    `on_invalid` is given the target and what onnx.checker says of an invalid model, and raises;
    without it that is an error of torch's export. Raises BadInputError when the file system
    refuses.
    """
    data_name = f"{target.name}.data"
    try:
        with tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}.", suffix=".part"
        ) as folder:
            written = Path(folder, target.name)
            ir.save(model, written, external_data=data_name)
            data = Path(folder, data_name)
            data.touch()  # tensors of a few bytes stay in the model; the pair is there all the same
            invalid = what_is_invalid(written)
            if invalid is not None:
                (on_invalid or _refuse_export)(target, invalid)
            for part in (data, written):
                sync(part)
                part.replace(target.parent / part.name)
    except OSError as error:
        raise BadInputError(
            f"cannot write {target}: {error.strerror or error}",
            hint="free some space or choose another folder with --out; "
            "nothing half-written was left",
        ) from error


def what_is_invalid(path: Path) -> str | None:
    """What onnx.checker finds wrong with a file, types of all tensors included, in one line."""
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return str(error).strip().splitlines()[0]
    return None


def _refuse_export(target: Path, invalid: str) -> None:
    raise BadInputError(
        f"{target.name}: torch exported an invalid ONNX model: {invalid}",
        hint="try another --opset; in half precision try --precision float32: the forward must "
        "not make float32 tensors of its own then",
    )


_SOURCE_PATH = re.compile(r"""[\\/][^\s"']*\.py\b|\bFile "|<frozen """)
_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def strip_paths(model: ir.Model) -> None:
    """Remove every metadata entry and doc string that names a source file.

    torch keeps the Python stack of each node under `pkg.torch.onnx.stack_trace`.
    """
    graphs = [model.graph, *model.functions.values()]
    holders = [model, *graphs, *model.graph.initializers.values()]
    nodes = [node for graph in graphs for node in graph.all_nodes()]
    values = [value for node in nodes for value in node.outputs]
    for holder in (*holders, *nodes, *values):
        _strip(holder.metadata_props)
        if _names_source(getattr(holder, "doc_string", None)):
            holder.doc_string = None


def _strip(properties: MutableMapping[str, str]) -> None:
    for key in [key for key, value in properties.items() if _names_source(value)]:
        del properties[key]


def _names_source(text: str | None) -> bool:
    return text is not None and _SOURCE_PATH.search(text) is not None


def positive_zeros(model: ir.Model) -> None:
    """Write -0.0 as +0.0 in the weights of products (Conv to Einsum).

    Batch-norm folding multiplies pruned weights by negative scales; some sparse kernels take the
    -0.0 that this leaves for a non-zero (vLLM issue 13198). Weights without one are not copied.
    """
    weights = {
        id(constant): constant
        for node in model.graph.all_nodes()
        for constant in weight_operands(node)
        if constant.is_initializer()
    }
    for value in weights.values():
        array = value.const_value.numpy()
        if _has_negative_zero(array):
            changed = np.where(array == 0, array.dtype.type(0), array)
            value.const_value = ir.Tensor(changed, dtype=value.dtype, name=value.name)


def _has_negative_zero(array: NDArray[np.generic]) -> bool:
    bits = _BITS.get(array.dtype.itemsize)
    if bits is None or array.dtype.kind not in "fV":  # "V": ml_dtypes' bfloat16
        return False
    sign = bits(1 << (8 * array.dtype.itemsize - 1))
    return bool((array.view(bits) == sign).any())


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

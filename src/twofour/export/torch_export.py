"""A torch module traced, quietly, and written to an ONNX file that TensorRT reads."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import OutputFixPass
from torch import nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.export import opset17
from twofour.export.example_inputs import (
    Call,
    as_array,
    bind,
    converted,
    forward_error,
    name_outputs,
    tensor_names,
)
from twofour.export.layer_names import layer_map, weight_operands
from twofour.export.model_code import quiet
from twofour.export.precision import (
    TORCH_DTYPES,
    float32_borders,
    in_precision,
    match_weight_types,
    release_copy,
)
from twofour.export.sizes import (
    BATCH,
    checked_axes,
    dynamic_shapes,
    line_in,
    name_dimensions,
    suggested_sizes,
    why_frozen,
    with_batch,
    without_ones,
)
from twofour.graph.opened import range_metadata
from twofour.pattern import as_bits
from twofour.records.export import LayerMap
from twofour.records.options import DynamicAxis, ExportOptions, Precision
from twofour.store import sync, write_error

_BFLOAT16_OPSET = 22
"""The first opset whose Conv takes bfloat16."""
_SPECIALISED = re.compile(
    r"specializ|constraints? violated|marked .{1,40} as dynamic", re.IGNORECASE
)
_CONTEXT_LINE = re.compile(r"^(from user code|failed to|the following|summary|$)", re.IGNORECASE)
_SOURCE_PATH = re.compile(r"""[\\/][^\s"']*\.py\b|\bFile "|<frozen """)


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
    model = _trace(ready, call, options)
    match_weight_types(model)
    float32_borders(model)
    _positive_zeros(model)
    names = layer_map(model, ready)
    _strip_paths(model)
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
            raise forward_error(module, error, call) from error
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


@contextlib.contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; every training flag is put back after."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in flags:
            part.training = training


def _trace(module: nn.Module, call: Call, options: ExportOptions) -> ir.Model:
    """The module, already in its precision, as an ONNX model that shares its weights' memory.

    Raises BadInputError when the forward fails, the batch cannot be dynamic, or torch cannot
    export the module; torch's own account is the `__cause__`.
    """
    given = converted(call, TORCH_DTYPES[options.precision])
    axes = checked_axes(given, options.dynamic)
    if options.dynamic_batch:
        axes = with_batch(given, axes)
    call = without_ones(given, axes)
    with in_eval_mode(module), quiet():
        try:
            model = _export(module, call, options, axes)
        except Exception as error:
            raise _explained(module, (given, call), error, options) from error
    if options.opset == opset17.OPSET:
        opset17.to_opset_17(model)
    _check_opset(model, options)
    lost = name_dimensions(model, tensor_names(call), axes)
    if lost:
        _refuse_frozen(module, call, axes, lost)
    model.metadata_props.update(range_metadata(options.ranges))
    return model


def _export(
    module: nn.Module, call: Call, options: ExportOptions, axes: Sequence[DynamicAxis]
) -> ir.Model:
    largest = {size.name: size.max for size in options.ranges if size.max is not None}
    program = torch.onnx.export(
        module,
        call.args,
        kwargs=call.kwargs,
        dynamic_shapes=dynamic_shapes(call, axes, largest) if axes else None,
        input_names=options.input_names,
        output_names=options.output_names,
        opset_version=_opset(options),
        dynamo=True,
        optimize=True,
        verify=False,
        verbose=False,
    )
    assert program is not None, "torch.onnx.export gives no program only for dynamo=False"
    OutputFixPass()(program.model)  # an input may not be an output as it is
    if options.output_names is None and program.exported_program is not None:
        name_outputs(program.model, program.exported_program.call_spec.out_spec, module)
    return program.model


def _opset(options: ExportOptions) -> int | None:
    bfloat16 = options.precision is Precision.BFLOAT16
    if options.opset is None:
        return _BFLOAT16_OPSET if bfloat16 else None
    newest = onnx.defs.onnx_opset_version()
    if options.opset > newest:
        raise BadInputError(
            f"opset {options.opset} is newer than the onnx package knows",
            hint=f"use --opset {newest} or older, or update onnx",
        )
    if bfloat16 and options.opset < _BFLOAT16_OPSET:
        raise BadInputError(
            f"opset {options.opset} has no bfloat16 convolution",
            hint=f"bfloat16 needs opset {_BFLOAT16_OPSET} or later, or choose float16",
        )
    if options.opset < opset17.OPSET:
        raise BadInputError(
            f"opset {options.opset} is older than {opset17.OPSET}, the oldest that is written",
            hint=f"use --opset {opset17.OPSET}, which TensorRT 8.6 reads, or a later one",
        )
    return max(options.opset, opset17.FROM)


def _check_opset(model: ir.Model, options: ExportOptions) -> None:
    """Torch stays with its oldest opset, with a warning only, where it knows no way to another."""
    written = model.opset_imports.get("")
    if options.opset not in (None, written):
        raise BadInputError(
            f"torch cannot write this model in opset {options.opset}",
            hint="use an older one, or leave --opset out",
        )


def _refuse_frozen(
    module: nn.Module, call: Call, axes: Sequence[DynamicAxis], lost: Mapping[str, str]
) -> None:
    """Torch makes a size constant without a word where the forward compares it to a number."""
    if BATCH not in lost:
        with in_eval_mode(module):
            raise why_frozen(module, call, axes, lost)
    first = lost[BATCH]
    raise _static_batch_only(module, f"the forward depends on a batch of {first}")


def _static_batch_only(module: nn.Module, why: str) -> BadInputError:
    return BadInputError(
        f"{type(module).__name__} cannot be exported with a dynamic batch: {why}",
        hint="the forward works for one batch size only; export it with --static-batch",
    )


def _explained(
    module: nn.Module, calls: tuple[Call, Call], error: Exception, options: ExportOptions
) -> BadInputError:
    """What to tell the user; `calls` are the example call as given and as it was exported."""
    if isinstance(error, BadInputError):
        return error
    failure = _forward_failure(module, calls[0])
    if failure is not None:
        return forward_error(module, failure, calls[0], options.precision)
    doubled = _forward_failure(module, calls[1])
    name, cause = type(module).__name__, doubled or _root_cause(error)
    lost = suggested_sizes(str(error), options.dynamic)
    if lost and doubled is None:
        axes = checked_axes(calls[1], options.dynamic)
        return why_frozen(module, calls[1], axes, lost)
    if options.dynamic_batch and (doubled or _SPECIALISED.search(str(error))):
        return _static_batch_only(module, _first_line(cause))
    line = line_in(str(error)) or line_in(str(cause))
    place = f" ({line})" if line else ""
    return BadInputError(
        f"torch cannot export {name} to ONNX: {type(cause).__name__}: {_first_line(cause)}{place}",
        hint="rewrite what torch.export cannot trace, try --static-batch or another --precision, "
        "or export it yourself and give the .onnx",
    )


def _forward_failure(module: nn.Module, call: Call) -> Exception | None:
    try:
        module(*call.args, **call.kwargs)
    except Exception as error:  # noqa: BLE001 - the user's forward can raise anything
        return error
    return None


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if not _CONTEXT_LINE.match(line)), "no message")


def _strip_paths(model: ir.Model) -> None:
    """Remove every metadata entry and doc string that names a source file.

    torch keeps the Python stack of each node under `pkg.torch.onnx.stack_trace`.
    """
    graphs = [model.graph, *model.functions.values()]
    holders = [model, *graphs, *model.graph.initializers.values()]
    nodes = [node for graph in graphs for node in graph.all_nodes()]
    values = [value for node in nodes for value in node.outputs]
    for holder in (*holders, *nodes, *values):
        for key, value in list(holder.metadata_props.items()):
            if _names_source(value):
                del holder.metadata_props[key]
        if _names_source(getattr(holder, "doc_string", None)):
            holder.doc_string = None


def _names_source(text: str | None) -> bool:
    return text is not None and _SOURCE_PATH.search(text) is not None


def _positive_zeros(model: ir.Model) -> None:
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
    if array.dtype.kind not in "fV" or array.itemsize == 1:  # "V": ml_dtypes' bfloat16
        return False
    bits = as_bits(array)
    return bool((bits == bits.dtype.type(1 << (8 * array.itemsize - 1))).any())


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
        raise write_error(target, error) from error


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

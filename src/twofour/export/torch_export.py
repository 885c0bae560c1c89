"""A torch module traced, quietly, and written to an ONNX file that TensorRT reads."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import OutputFixPass
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.export.casts import narrow
from twofour.export.example_inputs import (
    BoundCall,
    bind,
    float32_call,
    float32_module,
    forward_error,
    in_eval_mode,
    name_outputs,
    tensor_names,
)
from twofour.export.ir_models import OLDEST_OPSET, TRACED_OPSET, lift_constants, save, to_opset_17
from twofour.export.layer_names import layer_map, weight_operands
from twofour.export.model_code import silenced
from twofour.export.sizes import (
    BATCH,
    checked_axes,
    dynamic_shapes,
    frozen_size_error,
    line_in,
    name_dimensions,
    suggested_sizes,
    with_batch,
    without_ones,
)
from twofour.graph.opened import range_metadata
from twofour.inputs.fits import float32_array
from twofour.records.export import LayerMap
from twofour.records.options import DynamicAxis, ExportOptions, Precision

_NEGATIVE_ZERO = np.float32(-0.0).view(np.uint32)
_BFLOAT16_OPSET = 22
"""The first opset whose Conv takes bfloat16."""
_SPECIALISED = re.compile(
    r"specializ|constraints? violated|marked .{1,40} as dynamic", re.IGNORECASE
)
_CONTEXT_LINE = re.compile(r"^(from user code|failed to|the following|summary|$)", re.IGNORECASE)
_SOURCE_PATH = re.compile(r"""[\\/][^\s"']*\.py\b|\bFile "|<frozen """)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModule:
    """A module's graph as torch traced it, without its weights: other values give another file."""

    model: ir.Model
    """Not optimised yet: folding and fusing depend on the weights."""
    outputs: pytree.TreeSpec
    tensors: tuple[tuple[str, torch.Size, torch.dtype], ...]
    """Parameters and buffers that the module had."""


TracedModules = dict[ExportOptions, TracedModule]


def export_onnx(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Path,
    options: ExportOptions,
    *,
    traces: TracedModules | None = None,
) -> LayerMap:
    """Write `target` and its weights, `<target name>.data` beside it; the module stays as it is.

    Inputs and outputs are float32 in every precision; outputs are named after the keys of the dict
    that the forward returns, where it does. `traces` keeps the graph for the next export of this
    module with these inputs: only its weights may change in between. Raises BadInputError when the
    forward fails on the example inputs, torch cannot export the module, the result is no valid
    ONNX, or the folder cannot be written.
    """
    call = bind(module, args, kwargs)
    ready = float32_module(module)
    model = _trace(ready, call, options, {} if traces is None else traces)
    _positive_zeros(model)
    if options.precision is not Precision.FLOAT32:
        lift_constants(model)
        narrow(model, options.precision, type(module).__name__, options.float32_nodes)
    names = layer_map(model, ready)
    _strip_paths(model)

    def refuse(target: Path, invalid: str) -> None:
        raise BadInputError(
            f"{target.name}: torch exported an invalid ONNX model: {invalid}",
            hint="try another --opset, or --precision float32",
        )

    save(model, target, refuse)
    for value in model.graph.initializers.values():
        value.const_value = None  # onnxscript's rewrite rules keep the last graph that they matched
    return names


def reference_outputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[NDArray[Any], ...]:
    """Outputs of the module in float32 and evaluation mode, in the order of the ONNX outputs.

    Raises BadInputError when the forward fails on the example inputs.
    """
    call = float32_call(bind(module, args, kwargs))
    ready = float32_module(module)
    # what the forward prints goes to stderr: stdout may carry our JSON
    with in_eval_mode(ready), contextlib.redirect_stdout(sys.stderr):
        try:
            outputs = ready(*call.args, **call.kwargs)
        except (Exception, SystemExit) as error:
            raise forward_error(module, error, call) from error
    return output_arrays(module, outputs)


def output_arrays(module: nn.Module, outputs: object) -> tuple[NDArray[Any], ...]:
    """What a forward returned as float32 arrays, in the order of the ONNX outputs.

    Raises BadInputError where it has no tensors, or texts among them.
    """
    leaves = pytree.tree_leaves(outputs)
    tensors = tuple(float32_array(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    strange = next((leaf for leaf in leaves if isinstance(leaf, str | bytes)), None)
    if not tensors or strange is not None:
        given = "no tensor" if strange is None else f"a {type(strange).__name__}"
        raise BadInputError(
            f"{type(module).__name__}.forward returns {given}, and ONNX has tensors only",
            hint="let forward return tensors: one, a tuple, or a dict of them",
        )
    return tensors


def _trace(
    module: nn.Module, call: BoundCall, options: ExportOptions, traces: TracedModules
) -> ir.Model:
    """The module, which is in float32, as an ONNX model that shares its weights' memory."""
    given = float32_call(call)
    axes = checked_axes(given, options.dynamic)
    if options.dynamic_batch:
        axes = with_batch(given, axes)
    call = without_ones(given, axes)
    with in_eval_mode(module), silenced():
        try:
            traced = replace(options, precision=Precision.FLOAT32, opset=_opset(options))
            trace = traces.get(traced)
            if trace is None or trace.tensors != _tensors(module):
                trace = traces[traced] = _export(module, call, traced, axes)
            model = _with_weights(trace, module, options)
        except Exception as error:
            raise _explained(module, (given, call), error, options) from error
    if options.opset == OLDEST_OPSET:
        to_opset_17(model)
    # torch stays with its oldest opset, with a warning only, where it knows no way to another
    if options.opset not in (None, model.opset_imports.get("")):
        raise BadInputError(
            f"torch cannot write this model in opset {options.opset}",
            hint="use an older one, or leave --opset out",
        )
    # torch makes a size constant without a word where the forward compares it to a number
    lost = name_dimensions(model, tensor_names(call), axes)
    if BATCH in lost:
        raise _static_batch_only(module, f"the forward depends on a batch of {lost[BATCH]}")
    if lost:
        raise frozen_size_error(module, axes, lost)
    model.metadata_props.update(range_metadata(options.ranges))
    return model


def _export(
    module: nn.Module, call: BoundCall, options: ExportOptions, axes: Sequence[DynamicAxis]
) -> TracedModule:
    largest = {size.name: size.max for size in options.ranges if size.max is not None}
    program = torch.onnx.export(
        module,
        call.args,
        kwargs=call.kwargs,
        dynamic_shapes=dynamic_shapes(call, axes, largest) if axes else None,
        input_names=options.input_names,
        output_names=options.output_names,
        opset_version=options.opset,
        dynamo=True,
        optimize=False,
        verify=False,
        verbose=False,
    )
    assert program is not None, "torch.onnx.export gives no program only for dynamo=False"
    assert program.exported_program is not None, "it was traced just now"
    tensors = _tensors(module)
    for name, _, _ in tensors:
        if name in program.model.graph.initializers:
            program.model.graph.initializers[name].const_value = None
    return TracedModule(
        model=program.model, outputs=program.exported_program.call_spec.out_spec, tensors=tensors
    )


def _tensors(module: nn.Module) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    return tuple((name, t.shape, t.dtype) for name, t in _named_tensors(module))


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each name of a tensor that has several, and buffers that are not saved."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _with_weights(trace: TracedModule, module: nn.Module, options: ExportOptions) -> ir.Model:
    """The optimised graph of the module as its weights are now; shares their memory."""
    model = trace.model.clone()
    for name, tensor in _named_tensors(module):
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = TorchTensor(tensor, name=name)
    program = torch.onnx.ONNXProgram(model, None)
    program.optimize()
    _saturate_in_quantizers(program.model)
    OutputFixPass()(program.model)  # an input may not be an output as it is
    if options.output_names is None:
        name_outputs(program.model, trace.outputs, module)
    return program.model


def _saturate_in_quantizers(model: ir.Model) -> None:
    """Remove each Clip that torch puts behind QuantizeLinear: TensorRT takes Q/DQ only in pairs."""
    for node in model.graph:
        read = node.inputs[0] if node.op_type == "Clip" else None
        maker = None if read is None else read.producer()
        if read is not None and maker is not None and maker.op_type == "QuantizeLinear":
            node.outputs[0].replace_all_uses_with(read)
            model.graph.remove(node, safe=True)


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
    if options.opset < OLDEST_OPSET:
        raise BadInputError(
            f"opset {options.opset} is older than {OLDEST_OPSET}, the oldest that is written",
            hint=f"use --opset {OLDEST_OPSET}, which TensorRT 8.6 reads, or a later one",
        )
    return max(options.opset, TRACED_OPSET)


def _static_batch_only(module: nn.Module, why: str) -> BadInputError:
    return BadInputError(
        f"{type(module).__name__} cannot be exported with a dynamic batch: {why}",
        hint="the forward works for one batch size only; export it with --static-batch",
    )


def _explained(
    module: nn.Module, calls: tuple[BoundCall, BoundCall], error: Exception, options: ExportOptions
) -> BadInputError:
    """The error for the user; `calls` are the example call as given and as it was exported."""
    if isinstance(error, BadInputError):
        return error
    before: BaseException | None = error
    while before is not None:  # after Ctrl-C while torch loads its exporter, it raises others
        if isinstance(before, KeyboardInterrupt):
            raise before
        before = before.__cause__ or before.__context__
    failure = _forward_failure(module, calls[0])
    if failure is not None:
        return forward_error(module, failure, calls[0])
    doubled = _forward_failure(module, calls[1])
    name = type(module).__name__
    cause: BaseException = doubled or error
    while cause.__cause__ is not None and doubled is None:
        cause = cause.__cause__
    lost = suggested_sizes(str(error), options.dynamic)
    if lost and doubled is None:
        axes = checked_axes(calls[1], options.dynamic)
        return frozen_size_error(module, axes, lost)
    if options.dynamic_batch and (doubled or _SPECIALISED.search(str(error))):
        return _static_batch_only(module, _first_line(cause))
    line = line_in(str(error)) or line_in(str(cause))
    place = f" ({line})" if line else ""
    return BadInputError(
        f"torch cannot export {name} to ONNX: {type(cause).__name__}: {_first_line(cause)}{place}",
        hint="rewrite what torch.export cannot trace, try --static-batch, or export it yourself "
        "and give the .onnx",
    )


def _forward_failure(module: nn.Module, call: BoundCall) -> Exception | None:
    try:
        module(*call.args, **call.kwargs)
    except Exception as error:  # noqa: BLE001 - the user's forward can raise anything
        return error
    return None


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
            if _SOURCE_PATH.search(value):
                del holder.metadata_props[key]
        if _SOURCE_PATH.search(getattr(holder, "doc_string", None) or ""):
            holder.doc_string = None


def _positive_zeros(model: ir.Model) -> None:
    """Write -0.0 as +0.0 in the weights of products (Conv to Einsum).

    Batch-norm folding multiplies pruned weights by negative scales; some sparse kernels take the
    -0.0 that this leaves for a non-zero (vLLM issue 13198). Weights without one are not copied.
    """
    weights = {
        id(constant): constant
        for node in model.graph.all_nodes()
        for constant in weight_operands(node)
        if constant.is_initializer() and constant.dtype == ir.DataType.FLOAT
    }
    for value in weights.values():
        array = value.const_value.numpy()
        if (array.view(np.uint32) == _NEGATIVE_ZERO).any():
            changed = np.where(array == 0, np.float32(0), array)
            value.const_value = ir.Tensor(changed, dtype=value.dtype, name=value.name)

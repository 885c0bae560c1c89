"""The precision of the graph: modules converted for tracing, and the types of the traced graph.

Inputs and outputs stay float32 in every precision, so that whoever feeds the float32 file can feed
the others: numpy has no bfloat16, and a metric should not depend on the precision.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain

import onnx_ir as ir
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from twofour.errors import BadInputError
from twofour.records.options import Precision

TORCH_DTYPES = {
    Precision.FLOAT32: torch.float32,
    Precision.FLOAT16: torch.float16,
    Precision.BFLOAT16: torch.bfloat16,
}
_HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_MIXED_TYPE_OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization"})


def in_precision(module: nn.Module, precision: Precision) -> nn.Module:
    """The module itself where it has that precision, else a copy that has.

    The copy shares every tensor that needs no conversion. Batch norms keep float32: the exporter
    folds them into the convolution before, and rounding the product once is closer than rounding
    each factor. Raises BadInputError for a module that cannot be copied, and for a parameter that
    is finite but too large for float16.
    """
    changes = {id(t): _parameter(t, dtype) for t, dtype in _conversions(module, precision)}
    if not changes:
        return module
    _check_range(module, precision)
    unchanged = {id(t): t for t in chain(module.parameters(), module.buffers())}
    try:
        return copy.deepcopy(module, {**unchanged, **changes})
    except Exception as error:
        raise BadInputError(
            f"{type(module).__name__} cannot be copied to {precision.value}: {error}",
            hint="a module must survive copy.deepcopy to be converted; "
            "remove weight_norm and the like before, or convert it yourself",
        ) from error


def release_copy(ready: nn.Module, module: nn.Module) -> None:
    """Give back the memory of what `in_precision` converted; the copy is of no use after.

    torch's exporter keeps the values it traced referenced (torch 2.13 with onnxscript 0.7: the
    whole copy, 200 MB for BERT-base in float16), so letting go of the copy is not enough.
    """
    kept = {t.untyped_storage().data_ptr() for t in chain(module.parameters(), module.buffers())}
    for tensor in chain(ready.parameters(), ready.buffers()):
        if tensor.untyped_storage().data_ptr() not in kept:
            tensor.data = torch.empty(0, dtype=tensor.dtype)


def _conversions(
    module: nn.Module, precision: Precision
) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
    for owner in module.modules():
        keeps = isinstance(owner, _BatchNorm)
        dtype = torch.float32 if keeps else TORCH_DTYPES[precision]
        for tensor in chain(owner.parameters(recurse=False), owner.buffers(recurse=False)):
            if tensor.is_floating_point() and tensor.dtype != dtype:
                yield tensor, dtype


def _parameter(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    changed = tensor.detach().to(dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(changed, requires_grad=False)
    return changed


def _check_range(module: nn.Module, precision: Precision) -> None:
    if precision is not Precision.FLOAT16:
        return
    limit = torch.finfo(torch.float16).max
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point() or parameter.numel() == 0:
            continue
        largest = max(-float(parameter.detach().min()), float(parameter.detach().max()))
        if limit < largest < float("inf"):
            raise BadInputError(
                f"{name}: {largest:g} does not fit float16, whose largest value is {limit:g}",
                hint="use --precision bfloat16 or float32",
            )


def match_weight_types(model: ir.Model) -> None:
    """Give float32 weights of layers that compute in half precision the type of the layer.

    onnxscript's batch-norm folding writes float32 weights beside a half-precision activation, which
    is invalid ONNX. Rounds to nearest even; zeros stay zeros.
    """
    for node in model.graph.all_nodes():
        if node.op_type not in _MIXED_TYPE_OPS or not node.inputs:
            continue
        dtype = next((v.dtype for v in node.inputs if v and v.dtype in _HALF_TYPES), None)
        if dtype is not None:
            _match_inputs(node, dtype)


def _match_inputs(node: ir.Node, dtype: ir.DataType) -> None:
    for index, value in enumerate(node.inputs):
        if value is None or not value.is_initializer() or value.dtype != ir.DataType.FLOAT:
            continue
        if len(value.uses()) == 1:
            value.const_value = _rounded(value, dtype, value.name)
            value.dtype = dtype
        else:
            node.replace_input_with(index, _retyped_copy(value, dtype))


def _retyped_copy(value: ir.Value, dtype: ir.DataType) -> ir.Value:
    name = f"{value.name}_{dtype.name.lower()}"
    if name in value.graph.initializers:
        return value.graph.initializers[name]
    changed = ir.Value(
        name=name,
        shape=value.shape,
        type=ir.TensorType(dtype),
        const_value=_rounded(value, dtype, name),
    )
    changed.metadata_props.update(value.metadata_props)
    value.graph.register_initializer(changed)
    return changed


def _rounded(value: ir.Value, dtype: ir.DataType, name: str | None) -> ir.Tensor:
    return ir.Tensor(value.const_value.numpy().astype(dtype.numpy()), dtype=dtype, name=name)


def float32_borders(model: ir.Model) -> None:
    """Make half-precision inputs and outputs of the graph float32, with a Cast just inside."""
    graph = model.graph
    for index, value in enumerate(graph.inputs):
        if value.dtype in _HALF_TYPES:
            graph.inputs[index] = _float32_input(graph, value)
    for index, value in enumerate(graph.outputs):
        if value.dtype in _HALF_TYPES:
            graph.outputs[index] = _float32_output(graph, value)


def _float32_input(graph: ir.Graph, value: ir.Value) -> ir.Value:
    outer = ir.Value(name=value.name, shape=value.shape, type=ir.TensorType(ir.DataType.FLOAT))
    cast = _cast(outer, value.dtype, f"{value.name}_{value.dtype.name.lower()}")
    users = list(value.uses())
    for user, index in users:
        user.replace_input_with(index, cast.outputs[0])
    if users:
        graph.insert_before(graph[0], cast)
    return outer


def _float32_output(graph: ir.Graph, value: ir.Value) -> ir.Value:
    name = value.name
    value.name = f"{name}_{value.dtype.name.lower()}"
    cast = _cast(value, ir.DataType.FLOAT, name)
    graph.append(cast)
    return cast.outputs[0]


def _cast(value: ir.Value, dtype: ir.DataType, name: str | None) -> ir.Node:
    output = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
    return ir.node("Cast", [value], {"to": int(dtype)}, outputs=[output], name=f"node_cast_{name}")

"""Which module and parameter every weight of an exported graph comes from.

The optimizer renames weights that it transposes or rounds, and puts a folded batch norm's scope on
the convolution; what it leaves is the trace's own record: `pkg.torch.onnx.fx_node` of the node
names the placeholder, and the graph's signature names the parameter behind it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from twofour.export.ir_models import module_scopes
from twofour.graph.trace import FOLLOWED, LOOKUPS, STACK
from twofour.graph.weights import FROZEN_KEY, frozen_metadata
from twofour.records.export import LayerMap, LayerName

_PRODUCTS = {
    **dict.fromkeys(("Conv", "ConvTranspose"), (1,)),
    **dict.fromkeys(("Gemm", "MatMul", "Einsum"), (0, 1)),
}
_FX_NODE = "pkg.torch.onnx.fx_node"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_PLACEHOLDER = re.compile(r"%(\w+)")
_SIGNATURE_LINE = re.compile(
    r"^(\w+): (?:PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']*)'", re.MULTILINE
)


def layer_map(model: ir.Model, module: nn.Module) -> LayerMap:
    """A row for every constant operand of a product (Conv to Einsum), in graph order.

    A weight that is computed from several parameters keeps its node's name as `layer` and has
    `parameter=""`.
    """
    names, rows = _ModuleNames(model, module), []
    for node in model.graph.all_nodes():
        for constant in weight_operands(node):
            parameter, name = _parameter(names, node, constant), node.name or ""
            layer, parameter = _layer(names, node, parameter) if parameter else (name, "")
            initializer = constant.name or ""
            row = LayerName(
                layer=layer,
                parameter=parameter,
                node=name,
                initializer=initializer,
                op=node.op_type,
            )
            rows.append(row)
    return LayerMap(layers=tuple(rows))


def exported_layers(model: ir.Model, traced: LayerMap) -> LayerMap:
    """The same for the file that a traced graph became, whose layers are `traced`.

    The model's metadata says of the weights under their new names which are frozen.
    """
    placeholders = _placeholders(model)
    by_name: dict[str, list[LayerName]] = defaultdict(list)
    for known in traced.layers:
        for name in {known.initializer, known.parameter} - {""}:
            by_name[name].append(known)
    rows = []
    for node in model.graph.all_nodes():
        for constant in weight_operands(node):
            origin = _origin(node, constant, by_name, placeholders)
            row = LayerName(
                layer=node.name or "" if origin is None else origin.layer,
                parameter="" if origin is None else origin.parameter,
                node=node.name or "",
                initializer=constant.name or "",
                op=node.op_type,
            )
            rows.append(row)
    known = model.metadata_props
    known.update(frozen_metadata(r.initializer for r in rows if FROZEN_KEY + r.parameter in known))
    return LayerMap(layers=tuple(rows))


def _origin(
    node: ir.Node,
    constant: ir.Value,
    by_name: Mapping[str, Sequence[LayerName]],
    placeholders: Mapping[str, str],
) -> LayerName | None:
    """The layer of the traced graph that a product was; None for a weight that is computed."""
    names = [constant.name or ""]
    for reader in (node, *(use.node for use in constant.uses())):
        found = _PLACEHOLDER.findall(reader.metadata_props.get(_FX_NODE, ""))
        names += [placeholders[name] for name in found if name in placeholders]
    rows = next((by_name[name] for name in names if name in by_name), ())
    scopes = module_scopes(node.metadata_props)
    return next((row for row in rows if row.layer in scopes), rows[0] if rows else None)


def _placeholders(model: ir.Model) -> dict[str, str]:
    """Names of torch's placeholders, and the parameters behind them."""
    signature = model.graph.metadata_props.get(_SIGNATURE, "")
    return dict(_SIGNATURE_LINE.findall(signature))


def weight_operands(node: ir.Node) -> Iterator[ir.Value]:
    """The constants of two axes or more that a product multiplies with; none for other ops."""
    for index in _PRODUCTS.get(node.op_type, ()) if node.domain == "" else ():
        if index < len(node.inputs):
            constant = _constant_behind(node.inputs[index])
            if constant is not None and constant.shape is not None and len(constant.shape) > 1:
                yield constant


def _constant_behind(value: ir.Value | None) -> ir.Value | None:
    least = 0
    while value is not None:
        producer = value.producer()
        if producer is None or producer.op_type == "Constant":
            is_constant = producer is not None or value.is_initializer()
            rank = 0 if value.shape is None else len(value.shape)
            return value if is_constant and rank >= least else None
        least = max(least, STACK if producer.op_type in LOOKUPS else 0)
        value = producer.inputs[0] if producer.op_type in (*LOOKUPS, *FOLLOWED) else None
    return None


class _ModuleNames:
    """What names are looked up in: the module tree, and the signature of its trace."""

    def __init__(self, model: ir.Model, module: nn.Module) -> None:
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.tensors: dict[str, torch.Tensor] = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        self.placeholders = _placeholders(model)


def _parameter(names: _ModuleNames, node: ir.Node, constant: ir.Value) -> str | None:
    name: str | None = constant.name
    if name in names.tensors:
        return name
    size = math.prod(int(length) for length in constant.shape)
    readers = (use.node for use in constant.uses())  # such as the look-up of an expert
    for reader in (node, *readers):
        for placeholder in _PLACEHOLDER.findall(reader.metadata_props.get(_FX_NODE, "")):
            name = names.placeholders.get(placeholder)
            if name in names.tensors and names.tensors[name].numel() == size:
                return name
    return None


def _layer(names: _ModuleNames, node: ir.Node, parameter: str) -> tuple[str, str]:
    """The module that runs, and the parameter under the name it has there.

    That is the owner of the parameter, unless another module runs with it: a tied head holds the
    same tensor under a name of its own, others borrow it. A folded batch norm does not count.
    """
    owner = parameter.rpartition(".")[0]
    scopes = module_scopes(node.metadata_props)
    scope = next((scope for scope in reversed(scopes) if scope in names.modules), owner)
    if scope == owner or isinstance(names.modules[scope], _BatchNorm):
        return owner, parameter
    for name, own in names.modules[scope].named_parameters(recurse=False):
        if own is names.tensors[parameter]:
            return scope, f"{scope}.{name}" if scope else name
    is_part = scope == "" or owner.startswith(f"{scope}.")
    return (owner if is_part else scope), parameter

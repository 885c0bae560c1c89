"""Which module and parameter every weight of an exported graph comes from.

The trace has its own record: `pkg.torch.onnx.fx_node` of the node names the placeholder, and the
graph's signature names the parameter behind it. The optimizer renames weights that it transposes or
rounds, and fuses nodes; it leaves what is in their metadata.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping

import onnx_ir as ir
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from twofour.graph.trace import FOLLOWED, LOOKUPS, STACK
from twofour.graph.weights import FROZEN_KEY, frozen_metadata
from twofour.records.export import LayerMap, LayerName

NODE_NAME = "twofour.node"
"""Key of the name that a node of a traced graph has in the exported file."""
AGAIN = "#"
"""Is between a layer's name and a number where the layer runs more than once."""
_LAYER = "twofour.layer"
"""Key of the layer and the parameter of a product, a line each, until the file is written."""
_PRODUCTS = {
    **dict.fromkeys(("Conv", "ConvTranspose"), (1,)),
    **dict.fromkeys(("Gemm", "MatMul", "Einsum"), (0, 1)),
}
"""The inputs of each product that may be its weight."""
_NAME_SCOPES = "pkg.torch.onnx.name_scopes"
_FX_NODE = "pkg.torch.onnx.fx_node"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
# %linear : call_function[target=torch.ops.aten.linear.default](args = (%x, %p_fc_weight), ...)
_PLACEHOLDER = re.compile(r"%(\w+)")
# p_fc_weight: PARAMETER target='fc.weight'
_SIGNATURE_LINE = re.compile(
    r"^(\w+): (?:PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']*)'", re.MULTILINE
)


def layer_map(model: ir.Model, module: nn.Module) -> LayerMap:
    """A row for every constant operand of a product (Conv to Einsum), in graph order.

    A weight that is computed from several parameters keeps its node's name as `layer` and has
    `parameter=""`. Nodes keep their layer in their metadata, which the optimizer takes along.
    """
    names = _ModuleNames(model, module)
    for node, constant in _weights(model):
        parameter = names.parameter(node, constant)
        if parameter is not None:
            node.metadata_props[_LAYER] = f"{names.layer(node, parameter)}\n{parameter}"
    return LayerMap(layers=tuple(_rows(model)))


def exported_layers(model: ir.Model) -> LayerMap:
    """The same for the file that such a graph became, whose nodes need their layers no more.

    The model's metadata says of the weights under their new names which are frozen.
    """
    rows = tuple(_rows(model))
    for node in model.graph.all_nodes():
        node.metadata_props.pop(_LAYER, None)
    properties = model.metadata_props
    frozen = [row.initializer for row in rows if FROZEN_KEY + row.parameter in properties]
    properties.update(frozen_metadata(frozen))
    return LayerMap(layers=rows)


def _rows(model: ir.Model) -> Iterator[LayerName]:
    for node, constant in _weights(model):
        name = node.name
        layer, _, parameter = node.metadata_props.get(_LAYER, name).partition("\n")
        yield LayerName(
            layer=layer,
            parameter=parameter,
            node=name,
            initializer=constant.name,
            op=node.op_type,
        )


def _weights(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value]]:
    for node in model.graph.all_nodes():
        for constant in weight_operands(node):
            yield node, constant


def module_scopes(properties: Mapping[str, str]) -> list[str]:
    """Module paths from the outside in; the last entry of torch's list is the call itself."""
    # "['', 'encoder', 'encoder.0', 'linear']" becomes ["", "encoder", "encoder.0"]
    try:
        scopes = ast.literal_eval(properties.get(_NAME_SCOPES, "[]"))
    except (SyntaxError, ValueError):
        return []
    return [str(scope) for scope in scopes][:-1]


def _read_placeholders(node: ir.Node, constant: ir.Value) -> Iterator[str]:
    """What torch's record says that the product reads, then what else reads its constant does."""
    readers = (use.node for use in constant.uses())  # such as the look-up of an expert
    for reader in (node, *readers):
        yield from _PLACEHOLDER.findall(reader.metadata_props.get(_FX_NODE, ""))


def weight_operands(node: ir.Node) -> Iterator[ir.Value]:
    """The constants of two axes or more that a product multiplies with; none for other ops."""
    if node.domain != "":
        return
    for index in _PRODUCTS.get(node.op_type, ()):
        if index < len(node.inputs):
            constant = _constant_behind(node.inputs[index])
            if constant is not None and constant.shape is not None and len(constant.shape) > 1:
                yield constant


def _constant_behind(value: ir.Value | None) -> ir.Value | None:
    """The constant that a value is, or that it is taken from by look-ups, transpositions, casts."""
    # what a look-up takes a matrix from is a stack of them: three axes at least
    least = 0
    while value is not None:
        producer = value.producer()
        if producer is None or producer.op_type == "Constant":
            is_constant = producer is not None or value.is_initializer()
            rank = 0 if value.shape is None else len(value.shape)
            return value if is_constant and rank >= least else None
        if producer.op_type in LOOKUPS:
            least = STACK
        elif producer.op_type not in FOLLOWED:
            return None
        value = producer.inputs[0]
    return None


class _ModuleNames:
    """What names are looked up in: the module tree, and the signature of its trace."""

    def __init__(self, model: ir.Model, module: nn.Module) -> None:
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self._tensors: dict[str, torch.Tensor] = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        signature = model.graph.metadata_props.get(_SIGNATURE, "")
        self._placeholders: dict[str, str] = dict(_SIGNATURE_LINE.findall(signature))

    def parameter(self, node: ir.Node, constant: ir.Value) -> str | None:
        """The parameter that a constant of a product is; None where it is computed."""
        if constant.name in self._tensors:
            return str(constant.name)
        size = math.prod(int(length) for length in constant.shape or ())
        for placeholder in _read_placeholders(node, constant):
            name = self._placeholders.get(placeholder)
            if name in self._tensors and self._tensors[name].numel() == size:
                return name
        return None

    def layer(self, node: ir.Node, parameter: str) -> str:
        """The module that runs with the parameter.

        That is its owner, unless another module runs with it: a tied head has the same tensor under
        a name of its own, others borrow it. A folded batch norm does not count.
        """
        owner = parameter.rpartition(".")[0]
        scopes = [s for s in module_scopes(node.metadata_props) if s in self._modules]
        scope = scopes[-1] if scopes else owner
        if scope == owner or isinstance(self._modules[scope], _BatchNorm):
            return owner
        borrowed = self._modules[scope].parameters(recurse=False)
        if any(own is self._tensors[parameter] for own in borrowed):
            return scope
        is_part = scope == "" or owner.startswith(f"{scope}.")
        return owner if is_part else scope

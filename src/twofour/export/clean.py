"""What a shipped graph must not carry: local paths in metadata, and negative zeros in weights."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from twofour.export.layer_names import weight_operands

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

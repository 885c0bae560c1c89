"""Names that users of the file meet: its outputs and its dynamic dimension."""

from __future__ import annotations

import re

import onnx_ir as ir
from torch.utils import _pytree as pytree

BATCH = "batch"


def name_batch(model: ir.Model) -> None:
    """Call the symbol on axis 0 of the inputs `batch`, wherever it occurs.

    torch does so itself unless an input is a constant or None; then its own `s77` stays.
    """
    leading = (v.shape[0] for v in model.graph.inputs if v.shape is not None and len(v.shape))
    symbol = next((d.value for d in leading if isinstance(d, ir.SymbolicDim) and d.value), None)
    if symbol is None or symbol == BATCH:
        return
    pattern = re.compile(rf"\b{re.escape(symbol)}\b")
    nodes = model.graph.all_nodes()
    for value in (*model.graph.inputs, *(out for node in nodes for out in node.outputs)):
        for axis, dimension in enumerate(value.shape or ()):
            if isinstance(dimension, ir.SymbolicDim) and dimension.value:
                value.shape[axis] = ir.SymbolicDim(pattern.sub(BATCH, dimension.value))


def name_outputs(model: ir.Model, structure: pytree.TreeSpec) -> None:
    """Name the outputs after the keys of the dict or ModelOutput that the forward returned.

    Outputs without a key keep torch's names, which are those of the last operation.
    """
    outputs = model.graph.outputs
    if structure.num_leaves != len(outputs):
        return
    taken = {v.name for v in (*model.graph.inputs, *model.graph.initializers.values())}
    taken |= {v.name for node in model.graph.all_nodes() for v in node.outputs}
    places = pytree.tree_flatten_with_path(structure.unflatten(range(structure.num_leaves)))[0]
    for value, (path, _) in zip(outputs, places, strict=True):
        name = _key_name(path)
        if name is not None and name not in taken and value.producer() is not None:
            taken.add(name)
            value.name = name


def _key_name(path: tuple[object, ...]) -> str | None:
    if not path or not isinstance(getattr(path[0], "key", None), str):
        return None
    parts = (getattr(part, "key", getattr(part, "idx", "")) for part in path)
    return re.sub(r"\W", "_", ".".join(str(part) for part in parts).replace(".", "_"))

"""Opsets older than torch writes: TensorRT 8.6 reads up to 17."""

from __future__ import annotations

import onnx
import onnx_ir as ir

OLDEST_OF_TORCH = 18
"""torch.onnx.export has implementations of no older one (torch 2.13); its own conversion comes
before constants are folded, and fails where the axes of a reduction are not constant yet."""
_OF_REDUCTIONS = "noop_with_empty_axes"
"""Since 18; ONNX's converter leaves it in the file."""
_OF_SPLIT = "num_outputs"
"""Since 18; ONNX's converter knows no way down for a Split that has it (onnx 1.23)."""
_UNTOUCHED = "twofour.untouched"


def to_older_opset(model: ir.Model, opset: int) -> None:
    """Rewrite the model for `opset` in place, weights shared, by ONNX's own version converter.

    The model stays in its opset where the converter knows no way to the older one.
    """
    from onnxscript.version_converter import convert_version

    if opset >= 13:  # the first Split that takes its parts as here
        _hide_even_splits(model)
    convert_version(model, opset, fallback=True)
    _show_splits(model)
    if model.opset_imports[""] != opset:
        return
    for node in model.graph.all_nodes():
        if node.op_type.startswith("Reduce"):
            node.attributes.pop(_OF_REDUCTIONS, None)
    model.ir_version = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])


def _hide_even_splits(model: ir.Model) -> None:
    """Take Splits into equal parts, which no opset writes down differently, out of its sight."""
    for node in model.graph.all_nodes():
        if node.op_type == "Split" and _OF_SPLIT in node.attributes and _is_even(node):
            node.domain = _UNTOUCHED
            model.opset_imports[_UNTOUCHED] = 1


def _is_even(node: ir.Node) -> bool:
    data, axis = node.inputs[0], node.attributes.get("axis")
    if data is None or data.shape is None:
        return False
    length = data.shape[axis.as_int() if axis else 0]
    return isinstance(length, int) and length % len(node.outputs) == 0


def _show_splits(model: ir.Model) -> None:
    converted = model.opset_imports[""] < OLDEST_OF_TORCH
    for node in model.graph.all_nodes():
        if node.domain == _UNTOUCHED:
            node.domain = ""
            if converted:
                del node.attributes[_OF_SPLIT]
    model.opset_imports.pop(_UNTOUCHED, None)

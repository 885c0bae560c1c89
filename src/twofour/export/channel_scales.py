"""Channels of a tensor are brought near each other in size, so that one range serves them all.

The constants that make a channel are divided by its scale. What reads the channel multiplies it
again: a product in its weight, anything else behind a Mul. Zeros of weights stay zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from twofour.export.float32 import FLOAT
from twofour.export.ir_models import lazy, new_constant, new_name, taken_names
from twofour.graph.files import Array

_SMALLEST = 1e-4
"""The smallest scale beside 1 for the largest channel, so that a channel without values on the
samples is not lifted without limit."""
_KEEP_SCALES = ("Add", "LeakyRelu", "Relu")
"""What gives scaled outputs for scaled inputs and constants."""
_Place = tuple[ir.Node, int]


def fold_channel_scales(model: ir.Model, largest: Mapping[str, Array]) -> dict[_Place, _Place]:
    """Divide channels by their largest magnitudes; gives the Mul that reads them for each node.

    Needs tensors that have `constants_before`. Promises the same outputs but for rounding, and
    that weights keep their names and their zeros.
    """
    taken = taken_names(model)
    values = {value.name: value for node in model.graph for value in node.outputs}
    moved: dict[_Place, _Place] = {}
    for name, channels in largest.items():
        # channels of at most 200, 0.4 and 0.001 get scales of 1, 0.002 and 0.0001
        scales = np.clip(channels / channels.max(), _SMALLEST, 1)
        for node, at in constants_before(values[name]):
            factors = 1 / scales
            if _is_product(node) and at == 1:
                factors = np.expand_dims(factors, 1 - _output_axis(node))
            _scale(taken, node, at, factors)
        moved.update(_multiply_again(taken, values[name], scales))
    return moved


def constants_before(value: ir.Value) -> list[_Place]:
    """The constants of the Linear or the norm that makes a tensor; none where others make it."""
    node = value.producer()
    if node is None or value.is_graph_output():
        return []
    constants = [(node, at) for at, read in enumerate(node.inputs) if _is_constant(read)]
    if node.op_type == "Mul":  # the end of a norm in several nodes
        return [place for place in constants if _is_vector(*place)]
    if len(constants) != len(node.inputs) - 1:
        return []
    if node.op_type in _KEEP_SCALES:
        (before,) = [read for read in node.inputs if not _is_constant(read)]
        before_that = constants_before(before) if len(before.uses()) == 1 else []
        return before_that and [*before_that, *constants]
    is_norm = node.op_type == "LayerNormalization" and node.attributes.get_int("axis", -1) == -1
    return constants if is_norm or _is_product(node) else []


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def _is_vector(node: ir.Node, at: int) -> bool:
    """Whether a constant is along the last axis: [384] or [1, 384], not [] nor [384, 1]."""
    tensor = node.inputs[at].const_value
    return bool(1 < tensor.size == tensor.shape[-1])


def _is_product(node: ir.Node) -> bool:
    """Whether it multiplies rows by a matrix that no other node reads."""
    if node.op_type not in ("Gemm", "MatMul") or node.attributes.get_int("transA", 0):
        return False
    weight = node.inputs[1]
    is_own = _is_constant(weight) and len(weight.uses()) == 1
    return is_own and len(weight.const_value.shape) == 2


def _output_axis(product: ir.Node) -> int:
    """Axis of the outputs in a product's matrix."""
    return int(not product.attributes.get_int("transB", 0))


def _scale(taken: set[str], node: ir.Node, at: int, factors: Array) -> None:
    """Multiply a constant that a node reads; what others read, too, stays as it is."""
    value = node.inputs[at]
    tensor = value.const_value

    def scaled() -> Array:
        values: Array = tensor.numpy() * factors.astype(np.float32)
        return values

    if len(value.uses()) > 1:
        constant = new_constant(node.graph, taken, f"{value.name}_scaled", scaled())
        node.replace_input_with(at, constant)
    else:
        shape = np.broadcast_shapes(tensor.shape.numpy(), factors.shape)
        value.const_value = lazy(scaled, FLOAT, ir.Shape(shape), value.name)


def _multiply_again(
    taken: set[str], value: ir.Value, scales: Array
) -> Iterator[tuple[_Place, _Place]]:
    """Let all that reads a tensor multiply it; gives each node behind a new Mul, and the Mul."""
    for node, at in list(value.uses()):
        if _is_product(node):
            _scale(taken, node, 1, np.expand_dims(scales, _output_axis(node)))
            continue
        factors = new_constant(node.graph, taken, f"{value.name}_channels", scales)
        name = new_name(taken, f"{value.name}_Mul")
        output = ir.Value(name=name, type=ir.TensorType(FLOAT), shape=value.shape)
        mul = ir.node("Mul", [value, factors], outputs=[output], name=name)
        node.graph.insert_before(node, mul)
        node.replace_input_with(at, output)
        yield (node, at), (mul, 0)

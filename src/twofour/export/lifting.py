"""Milder patterns written as 2:4: each group of weights in windows of four, its inputs repeated.

A group of 4:6 becomes two windows, one of 6:8 three, which overlap by two weights; a Gather repeats
the inputs of the layer to match. Source: SlideSparse, arXiv 2603.05232.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from twofour.errors import BadInputError
from twofour.export.ir_models import load_float32, save, what_is_invalid
from twofour.forecasting.gpus import find_gpu
from twofour.forecasting.model_forecast import GATHERED, times_of_layers
from twofour.forecasting.products import Product, find_work
from twofour.graph.files import Array, map_tensor
from twofour.graph.layers import Layer
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import integer, tensor_shape
from twofour.graph.trace import DEQUANTIZE, QUANTIZE, permutation
from twofour.pattern import check
from twofour.records.forecast import GpuKind
from twofour.records.options import MathPrecision
from twofour.records.weights import HARDWARE_PATTERN, LIFTED, Pattern, Weight

_OPS = ("Conv", "Gemm", "MatMul")
_Use = tuple[ir.Value, int, ir.Value]
"""A tensor, the axis along which it is gathered, and the places."""
Rows = dict[int, Pattern]
"""Row of the graph's weights -> the pattern that the layer is lifted from."""
Sizes = Mapping[str, tuple[int, ...]]


def windows(values: Array, axis: int, m: int) -> Array:
    """The weights with each group of `m` along `axis` as m/2 - 1 windows of four that are 2:4.

    Window w covers the places 2w to 2w + 3 of its group; a tail is filled up with zeros. Every
    non-zero of a group with at most m - 2 of them is in exactly one window.
    """
    # Window by window, left to right, takes the first two non-zeros that are left. 4:6, m = 6:
    #     a b 0 c 0 d   ->   a b 0 0 | 0 c 0 d      windows 0-3 and 2-5
    # The first two places of a window, where the next one does not reach, are always taken. Behind
    # a window that leaves nothing the next one has two new places, and leaves nothing either. If
    # each left something, each took two, and the group had more than m - 2 weights: the last window
    # leaves nothing.
    tail = [(0, -size % m if at == axis else 0) for at, size in enumerate(values.shape)]
    sizes = prod(values.shape[:axis]), -1, m, prod(values.shape[axis + 1 :])
    groups = np.pad(values, tail).reshape(sizes)
    made = np.zeros((*groups.shape[:2], m // 2 - 1, 4, groups.shape[3]), values.dtype)
    left = groups != 0
    for window in range(m // 2 - 1):
        count = np.zeros(left[:, :, 0].shape, np.int8)
        for place in range(4):
            at = 2 * window + place
            taken = left[:, :, at] & (count < HARDWARE_PATTERN.n)
            np.copyto(made[:, :, window, place], groups[:, :, at], where=taken)
            left[:, :, at] ^= taken
            count += taken
    return made.reshape(*values.shape[:axis], -1, *values.shape[axis + 1 :])


def window_inputs(length: int, m: int) -> Array:
    """For each weight of `windows` the input that it multiplies; behind a tail the last one."""
    starts = np.arange(-(-length // m))[:, None, None] * m + 2 * np.arange(m // 2 - 1)[:, None]
    places: Array = (starts + np.arange(4)).reshape(-1)
    return np.minimum(places, length - 1)


def liftable(opened: OpenedModel, pattern: Pattern | None = None) -> Rows:
    """The rows of the graph's weights that can be lifted, from `pattern`, or from what they hold.

    An array that anything else reads too stays as it is.
    """
    found = opened.weights()
    rows: Rows = {}
    for row, (weight, layer) in enumerate(zip(found.weights, found.layers, strict=True)):
        axis, tensor = weight.axis, layer.found.tensor
        if axis is None or tensor is None or not _can_be_longer(weight, layer, axis):
            continue
        values = map_tensor(tensor, opened.path)
        held = (each for each in (HARDWARE_PATTERN, *LIFTED) if check(values, axis, each).holds)
        lifted_from = pattern or next(held, None)
        if lifted_from in LIFTED and weight.in_channels > lifted_from.n:
            rows[row] = lifted_from
    return rows


def _can_be_longer(weight: Weight, layer: Layer, axis: int) -> bool:
    """Whether all between the constant and the layer's weight allows for a longer reduction axis.

    Scales of Q/DQ nodes must be of the whole tensor or of another axis.
    """
    if layer.position != 1 or weight.tied_to or weight.op not in _OPS or weight.groups > 1:
        return False
    rank = len(weight.shape)
    for step in reversed(layer.found.steps):
        proto = step.node.proto
        if proto.op_type == "Transpose":
            axis = permutation(step.node, rank).index(axis)
        elif proto.op_type in (*QUANTIZE, *DEQUANTIZE):
            scale = tensor_shape(step.scope, proto.input[1])
            along = integer(proto, "axis", 1) % rank
            if scale is None or (prod(scale) > 1 and (len(scale) > 1 or along == axis)):
                return False
        elif proto.op_type not in ("Cast", "CastLike", "Identity"):
            return False
    return True


def gaining(opened: OpenedModel, rows: Rows, gpu: str, shapes: Sizes) -> Rows:
    """The rows that gain on a GPU at these shapes of the inputs, as the forecast says.

    Layers that read one tensor gain together what its Gather takes. Those of unknown size are left
    out. Raises BadInputError for a GPU or a type that the forecast does not know.
    """
    found, kind = opened.weights(), find_gpu(gpu)
    work = find_work(opened, found.weights, shapes)
    products = {product.layer: product for product in work.products}
    saved: dict[str, dict[int, float]] = defaultdict(dict)
    gather_us: dict[str, float] = {}
    for row, pattern in rows.items():
        product, read = products.get(found.weights[row]), found.layers[row].node.proto.input[0]
        if product is not None:
            faster_us, gather_us[read] = _saved_us(product, pattern.m, kind)
            if faster_us > 0:
                saved[read][row] = faster_us
    gain = (us for read, us in saved.items() if sum(us.values()) > gather_us[read])
    return {row: rows[row] for us in gain for row in us}


def _saved_us(product: Product, m: int, gpu: GpuKind) -> tuple[float, float]:
    """The time that sparse kernels save in a layer that is lifted, and the time of its Gather.

    A Gather reads its input and writes it, longer, in 16 bits. float32 counts as FP16, because no
    float32 kernel is sparse.
    """
    weight = product.layer
    longer = len(window_inputs(weight.in_channels, m)) / weight.in_channels
    lifted = replace(product, reduction=round(product.reduction * longer))
    place = gpu, MathPrecision.of_dtype(weight.math_dtype) or MathPrecision.FLOAT16
    before, after = times_of_layers((product, lifted), place, HARDWARE_PATTERN)
    gather_us = 2 * product.inputs * (1 + longer) / (gpu.bandwidth_gb_s * 1000)
    return product.count * (before.dense_us - after.sparse_us), gather_us


def lift_onnx(opened: OpenedModel, target: Path, rows: Rows) -> None:
    """Write the model to `target` with these rows lifted.

    Nodes and weights keep their names; the weights are in `<target name>.data`. Raises
    BadInputError for a file that onnx_ir cannot keep.
    """
    found, model = opened.weights(), load_float32(opened)
    nodes = {out.name: node for node in model.graph.all_nodes() for out in node.outputs}
    gathered: dict[_Use, ir.Value] = {}
    for row, pattern in rows.items():
        layer, width, m = found.layers[row], found.weights[row].in_channels, pattern.m
        node, name = nodes[layer.node.proto.output[0]], f"{GATHERED}{width}_{m}"
        if name not in model.graph.initializers:
            values = ir.tensor(window_inputs(width, m), name=name)
            model.graph.register_initializer(ir.val(name, const_value=values))
        axis = -1 if node.op_type == "MatMul" else 1 - integer(layer.node.proto, "transA", 0)
        _lengthen(opened, layer, node, m)
        _gather(node, (axis, model.graph.initializers[name]), gathered)

    def refuse(target: Path, invalid: str) -> None:
        if what_is_invalid(opened.path) is None:  # else it is taken as it came
            raise BadInputError(f"{target.name}: {opened.path} cannot be lifted: {invalid}")

    RemoveUnusedNodesPass()(model)  # Q and DQ nodes whose layer reads gathered ones
    save(model, target, refuse)


def _lengthen(opened: OpenedModel, layer: Layer, node: ir.Node, m: int) -> None:
    """Replace the constant of the layer by its windows, made when the file is written."""
    value, tensor, axis = node.inputs[1], layer.found.tensor, layer.weight.axis
    assert tensor is not None
    assert axis is not None
    while value is not None and (maker := value.producer()) is not None:
        value.shape = None
        value = maker.inputs[0]
    assert value is not None
    assert value.const_value is not None
    dims = list(tensor.dims)
    dims[axis] = len(window_inputs(dims[axis], m))
    value.shape = ir.Shape(dims)
    value.const_value = ir.LazyTensor(
        lambda: ir.Tensor(windows(map_tensor(tensor, opened.path), axis, m)),
        value.const_value.dtype,
        ir.Shape(dims),
        name=value.name,
    )


def _gather(node: ir.Node, places: tuple[int, ir.Value], known: dict[_Use, ir.Value]) -> None:
    """Give the node the entries of each window, gathered once for all layers that read its input.

    They are gathered before a QuantizeLinear and DequantizeLinear by one scale, so that TensorRT
    finds Q, DQ and layer side by side.
    """
    given, (axis, indices) = node.inputs[0], places
    assert given is not None
    if (use := (given, *places)) not in known:
        maker, name = given.producer(), f"{given.name}_{indices.name}_{axis}"
        out = known[use] = ir.Value(name=name)
        if maker is not None and _by_one_scale(maker):
            kind = (maker.op_type, maker.inputs, maker.attributes)
            made = ir.node(*kind, domain=maker.domain, outputs=[out], name=name)
            maker.append(made)
            _gather(made, places, known)
        else:
            assert given.graph is not None
            made = ir.node("Gather", [given, indices], {"axis": axis}, outputs=[out], name=name)
            (given.graph[0].prepend if maker is None else maker.append)(made)
    node.replace_input_with(0, known[use])


def _by_one_scale(node: ir.Node) -> bool:
    """Whether it is a QuantizeLinear or DequantizeLinear with one scale for all."""
    scale = node.inputs[1] if node.op_type in (*QUANTIZE, *DEQUANTIZE) else None
    return scale is not None and scale.shape is not None and not {*scale.shape} - {1}

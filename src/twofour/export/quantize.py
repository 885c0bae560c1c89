"""Q/DQ nodes in a float32 ONNX model, where TensorRT wants them for sparse INT8 kernels.

They are around the weights, inputs and outputs of products, and on both inputs of residual
additions: TensorRT takes a sparse INT8 kernel only where the output stays INT8 (NVIDIA/TensorRT
4694, Model-Optimizer 1664). Everything is symmetric, so that a zero stays a zero.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from twofour.errors import BadInputError
from twofour.export.channel_scales import constants_before, fold_channel_scales
from twofour.export.float32 import FLOAT, LAYERS
from twofour.export.ir_models import (
    insert_behind,
    load_float32,
    new_constant,
    new_name,
    taken_names,
)
from twofour.graph.files import Array, load_external
from twofour.graph.layers import FLOAT_ON_PURPOSE
from twofour.graph.opened import OpenedModel, has_half, open_onnx, widen
from twofour.graph.trace import DEQUANTIZE
from twofour.records import frozen
from twofour.words import count, share

_TRIED = 2.0 ** (np.arange(6, -16, -1) / 3)
"""Ranges that are tried, as multiples of the largest value of the first batch: 4 to 1/32."""
_MOST_VALUES = 1 << 16
"""Values of a tensor that are rounded for each batch, more only where one vector has more."""
_LITTLE_LOST = 0.0005
"""Rounding error beyond which channels get scales. all-MiniLM-L6-v2: with 0.001 it loses an eighth
more, with 0 no less. Two nets of convolutions lose at most 0.0002, and gained nothing by scales."""
_MOST_LOST = 0.01
"""Rounding error beyond which what no product reads stays float. all-MiniLM-L6-v2 without scales:
0.013 to 0.036 for outputs of its second feed-forward products, at most 0.004 for other ones."""
_LARGEST = 127.0
_OPSET = 13
"""The first opset with Q/DQ nodes along an axis."""
_FUSED = ("BatchNormalization", "Clip", "Gelu", "LeakyRelu", "Relu")
"""What TensorRT fuses into the product before, besides the addition of a bias."""
_Use = tuple[ir.Node, int]
TensorsOf = Callable[[Path], Iterable[Mapping[str, Array]]]
"""Runs a file on samples: its inputs and outputs by name, batch by batch."""


@frozen
class QuantizationPlan:
    """What gets Q/DQ nodes: places in the model they were planned for."""

    stored: ir.DataType | None
    """Type of activations in a file that stores weights in INT8, as ONNX Runtime's CPU kernels
    want them. None: weights are float32, as every TensorRT reads them."""
    weights: tuple[_Use, ...]
    reads: tuple[_Use, ...]
    """Inputs of products and of residual additions."""
    made: tuple[ir.Value, ...]
    """Outputs of products behind bias and activation, which whoever reads them gets rounded."""

    @property
    def tensors(self) -> dict[str, ir.Value]:
        """Activations whose ranges are needed, by name."""
        read = (node.inputs[index] for node, index in self.reads)
        return {value.name: value for value in (*read, *self.made) if value is not None}


@contextmanager
def quantized(
    opened: OpenedModel, folder: Path, tensors_of: TensorsOf, stored: ir.DataType | None = None
) -> Iterator[tuple[ir.Model, str]]:
    """The model in float32 with Q/DQ nodes, and words for what is rounded and what is not.

    Its weights are on disk until the context ends. `folder` is where a copy of the model that
    gives its activations is written for `tensors_of`. Needs a model with products, opset 13 and
    no Q/DQ nodes, else it raises BadInputError, as for values that are not finite. Promises that
    weights keep their names and their zeros.
    """
    with tempfile.TemporaryDirectory(dir=folder) as own:
        model = load_float32(_in_float32(opened, Path(own)))
        _fold_norms(model)
        planned = plan_quantization(model, opened.path.name, stored)
        path = Path(own, f"{opened.path.stem}.tensors.onnx")
        ranges = _ranges(model, planned, path, tensors_of)
        scaled = with_channel_scales(model, planned, ranges)
        if scaled is not planned:
            planned = scaled
            ranges = _ranges(model, planned, path, tensors_of)
        plan = without_lossy(planned, ranges)
        words = _words(plan, left=len(planned.made) - len(plan.made))
        insert_quantization(model, plan, ranges)
        yield model, words


def _ranges(
    model: ir.Model, plan: QuantizationPlan, path: Path, tensors_of: TensorsOf
) -> dict[str, Range]:
    """The ranges of a plan's tensors, by a copy of the model that is written to `path`."""
    write_with_tensors(model, path, plan)
    collected = RangeCollector(plan)
    for tensors in tensors_of(path):
        collected.add(tensors)
    return collected.ranges()


def _words(plan: QuantizationPlan, left: int) -> str:
    """What is rounded, which share of it for sparse kernels, and how many outputs stay float."""
    sizes = Counter[bool]()
    for node, at in plan.weights:
        weight = _constant(node.inputs[at])
        assert weight is not None, "planned"
        sizes[_made(node, plan.stored) in plan.made] += weight.size
    words = f"{count(len(plan.weights), 'product')} computed in int8, "
    words += f"{share(sizes[True], sizes.total())} of their weights with rounded outputs, "
    words += f"{count(len(plan.tensors), 'activation')} rounded"
    if left:
        words += f"; {count(left, 'output')} would lose over 1 % in it and stay float, "
        words += "so TensorRT takes no sparse kernel for these products"
    return words


def _in_float32(opened: OpenedModel, folder: Path) -> OpenedModel:
    """The model, or where it is half precision a copy in float32 in the folder."""
    if not has_half(opened.proto):
        return opened
    model = opened.whole()
    path = folder / opened.path.name
    load_external(model, opened.path)
    widen(model)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    return open_onnx(path)


def _fold_norms(model: ir.Model) -> None:
    """Make batch norms part of the products before them, which keep their names."""
    from onnxscript.rewriter import RewriteRuleSet
    from onnxscript.rewriter.rules import common

    taken = taken_names(model)
    before = dict.fromkeys(model.graph)
    names = {}
    for norm in before:
        product = _normed_product(norm)
        if product is not None:
            names[product.inputs[1].name] = product.name
            _give_bias(model.graph, product, norm, taken)
    rules = (
        common.fuse_batchnorm_into_conv_rule,
        common.fuse_batchnorm_into_conv_transpose_rule,
        common.fuse_batchnorm_into_gemm_rule,
    )
    RewriteRuleSet(rules).apply_to_model(model)
    for node in model.graph:
        if node not in before and node.op_type in LAYERS:
            node.name = names[node.inputs[1].name]


def _normed_product(node: ir.Node) -> ir.Node | None:
    """The product in front of a batch norm; None for other nodes."""
    if node.op_type != "BatchNormalization" or node.inputs[0] is None or node.inputs[2] is None:
        return None
    product = node.inputs[0].producer()
    if product is None or product.op_type not in LAYERS:
        return None
    return product


def _give_bias(graph: ir.Graph, product: ir.Node, norm: ir.Node, taken: set[str]) -> None:
    """Give a product without a bias one of zeros; the rules take a name that may be another's."""
    shift = norm.inputs[2].const_value
    if len(product.inputs) == 2 and product.op_type != "MatMul" and shift is not None:
        bias = new_constant(graph, taken, f"{product.inputs[1].name}_bias", 0 * shift.numpy())
        product.resize_inputs(3)
        product.replace_input_with(2, bias)


def plan_quantization(
    model: ir.Model, source: str, stored: ir.DataType | None = None
) -> QuantizationPlan:
    """Find the products with a constant weight, and the additions of what they make."""
    _refuse_unfit(model, source)
    weights = []
    for node in model.graph:
        at = _weight_at(node)
        if at is not None:
            weights.append((node, at))
    if not weights:
        raise BadInputError(f"{source} has no product with a constant weight in float32")
    outputs = [_made(node, stored) for node, _ in weights]
    made = dict.fromkeys(value for value in outputs if not value.is_graph_output())
    reads = [(node, 1 - at) for node, at in weights]
    for node in model.graph:
        adds = node.op_type == "Add" and not _adds_constant(node)
        if adds and not made.keys().isdisjoint(node.inputs):
            reads += [(node, 0), (node, 1)]
    return QuantizationPlan(
        stored=stored, weights=tuple(weights), reads=tuple(reads), made=tuple(made)
    )


def _refuse_unfit(model: ir.Model, source: str) -> None:
    if any(node.op_type in DEQUANTIZE for node in model.graph.all_nodes()):
        hint = "it is built and compared as it is: leave out what quantizes it again"
        raise BadInputError(f"{source} is quantized already", hint=hint)
    opset = model.opset_imports.get("", 0)
    if opset < _OPSET:
        raise BadInputError(
            f"int8 with a scale for each channel needs opset {_OPSET}, and {source} has {opset}",
            hint="export a torch model with --opset 20; onnx.version_converter raises a file's",
        )


def _weight_at(node: ir.Node) -> int | None:
    """Which input of a product is its weight; None for no product with one in float32."""
    if node.op_type not in LAYERS or node.domain or len(node.inputs) < 2:
        return None
    constants = [at for at in (0, 1) if _constant(node.inputs[at]) is not None]
    if len(constants) != 1:
        return None
    weight = _constant(node.inputs[constants[0]])
    if weight is None or weight.dtype != FLOAT or len(weight.shape) < 2:
        return None
    return constants[0]


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The constant that a value is, transposed or not; None for what is computed."""
    while value is not None and value.const_value is None:
        maker = value.producer()
        if maker is None or maker.op_type != "Transpose":
            return None
        value = maker.inputs[0]
    return None if value is None else value.const_value


def _adds_constant(node: ir.Node) -> bool:
    return any(_constant(value) is not None for value in node.inputs)


def _values(value: ir.Value) -> Array:
    """A constant weight as the product reads it."""
    if value.const_value is not None:
        stored: Array = value.const_value.numpy()
        return stored
    maker = value.producer()
    turned: Array = np.transpose(_values(maker.inputs[0]), maker.attributes.get_ints("perm"))
    return turned


def _channels(node: ir.Node, at: int) -> int:
    """The axis of the output channels, along which a weight has its scales."""
    if node.op_type == "Gemm":
        # [outputs, inputs] with transB, as torch has a Linear; axis 1 without
        flipped = node.attributes.get_int("transB" if at else "transA", 0)
        return at ^ int(bool(flipped))
    if node.op_type == "MatMul":
        constant = _constant(node.inputs[at])
        assert constant is not None, "planned"
        return len(constant.shape) - (1 if at else 2)
    return int(node.op_type == "ConvTranspose")


def _made(node: ir.Node, stored: ir.DataType | None) -> ir.Value:
    """The tensor behind the bias and the activation of a product, where nothing else reads it.

    ONNX Runtime (`stored`) fuses neither into an INT8 product.
    """
    value = node.outputs[0]
    while stored is None and not value.is_graph_output() and len(value.uses()) == 1:
        user = value.uses()[0].node
        biased = user.op_type == "Add" and _adds_constant(user)
        if not (biased or user.op_type in _FUSED) or user.inputs[0] is None:
            break
        value = user.outputs[0]
    return value


def write_with_tensors(model: ir.Model, target: Path, plan: QuantizationPlan) -> None:
    """Write the model with every tensor of the plan that it computes as one more output."""
    outputs = model.graph.outputs
    own = list(outputs)
    for value in plan.tensors.values():
        if value.producer() is not None and not value.is_graph_output():
            value.type = value.type or ir.TensorType(FLOAT)
            outputs.append(value)
    ir.save(model, target, external_data=f"{target.name}.data")
    outputs[:] = own


@frozen
class Range:
    """The magnitude that becomes the largest value of a type, and what rounding then loses.

    `lost` is the squared error of a vector of channels over its squares, in the mean.
    """

    limit: float
    lost: float
    channels: Array | None = None
    """The largest magnitude of each channel; None where channels cannot have scales."""


class RangeCollector:
    """The range of each tensor that loses the least of its vectors, over batches.

    The error is that of each vector (a token; a whole sample where convolutions are), because a
    few tokens of a transformer have values a hundred times as large as all others: by the squared
    error of the tensor they alone count, and by percentile and entropy they are cut off.
    """

    def __init__(self, plan: QuantizationPlan) -> None:
        self._plan = plan
        self._images = _in_images(plan)
        self._tried: dict[str, Array] = {}
        self._channels: dict[str, Array] = {}
        self._lost: dict[str, Array] = {}
        self._vectors = Counter[str]()

    def add(self, tensors: Mapping[str, Array]) -> None:
        """Round the tensors of a batch; raises BadInputError where a value is not finite."""
        for name, value in self._plan.tensors.items():
            values = np.asarray(tensors[name], np.float32)
            if not np.isfinite(values).all():
                raise BadInputError(f"tensor {name!r} is not finite on the calibration samples")
            if constants_before(value):
                self._add_channels(name, values)
            # [8, 64, 56, 56] of a convolution are 8 vectors, [8, 128, 768] of tokens 1,024
            rows = values.size // values.shape[-1]
            if value in self._images:
                rows = len(values)
            vectors = _sample(values.reshape(rows, -1))
            if len(vectors):
                tried = self._tried.setdefault(name, np.abs(values).max() * _TRIED)
                squares = np.square(vectors).sum(axis=1)
                lost = [_error(vectors, squares, limit) for limit in tried]
                self._lost[name] = self._lost.get(name, 0.0) + np.asarray(lost)
                self._vectors[name] += len(vectors)

    def _add_channels(self, name: str, values: Array) -> None:
        largest = np.abs(values).reshape(-1, values.shape[-1]).max(axis=0)
        self._channels[name] = np.maximum(largest, self._channels.get(name, 0.0))

    def ranges(self) -> dict[str, Range]:
        """The best range of each tensor; one that was always zero gets 0."""
        best = dict.fromkeys(self._plan.tensors, Range(limit=0.0, lost=0.0))
        for name, lost in self._lost.items():
            at = int(lost.argmin())
            limit = float(self._tried[name][at])
            mean = float(lost[at] / self._vectors[name])
            best[name] = Range(limit=limit, lost=mean, channels=self._channels.get(name))
        return best


def _in_images(plan: QuantizationPlan) -> set[ir.Value | None]:
    """What convolutions read and make, with the additions of what they make."""
    products = {node for node, _ in plan.weights if "Conv" in node.op_type}
    images: set[ir.Value | None] = {_made(node, plan.stored) for node in products}
    near = [
        node.inputs[at]
        for node, at in plan.reads
        if node in products or not images.isdisjoint(node.inputs)
    ]
    return images.union(near)


def _sample(vectors: Array) -> Array:
    """The vectors that are rounded for each batch, without those of zeros alone."""
    most = max(1, _MOST_VALUES // vectors.shape[1])
    chosen = np.random.default_rng(0).permutation(vectors)[:most]
    not_zero: Array = chosen[np.square(chosen).sum(axis=1) > 0]
    return not_zero


def _error(vectors: Array, squares: Array, limit: float) -> float:
    """The sum over vectors of their squared rounding error over their squares."""
    # a limit of 12.7 has steps of 0.1: 3.14 becomes 3.1, and 20 becomes 12.7
    scaled = np.clip(vectors * np.float32(_LARGEST / limit), -_LARGEST, _LARGEST)
    error = np.rint(scaled) * np.float32(limit / _LARGEST) - vectors
    return float((np.square(error).sum(axis=1) / squares).sum())


def with_channel_scales(
    model: ir.Model, plan: QuantizationPlan, ranges: Mapping[str, Range]
) -> QuantizationPlan:
    """The plan with scales for the channels of what loses over 0.05 %, which are in the model."""
    largest = {}
    for name, each in ranges.items():
        if each.lost > _LITTLE_LOST and each.channels is not None:
            largest[name] = each.channels
    # ONNX Runtime rounds in front of the bias, and fuses no Mul there
    if plan.stored is not None or not largest:
        return plan
    moved = fold_channel_scales(model, largest)
    return replace(plan, reads=tuple(moved.get(read, read) for read in plan.reads))


def without_lossy(plan: QuantizationPlan, ranges: Mapping[str, Range]) -> QuantizationPlan:
    """The plan without what loses over 1 % and no product reads, and without additions of such.

    Their product reads INT8 and gives a float, so TensorRT takes no sparse INT8 kernel for it.
    """
    lossy = {value for name, value in plan.tensors.items() if ranges[name].lost > _MOST_LOST}
    lossy -= {node.inputs[at] for node, at in plan.reads if node.op_type != "Add"}
    reads = [
        (node, at)
        for node, at in plan.reads
        if node.op_type != "Add" or lossy.isdisjoint(node.inputs)
    ]
    made = tuple(value for value in plan.made if value not in lossy)
    return replace(plan, reads=tuple(reads), made=made)


def insert_quantization(
    model: ir.Model, plan: QuantizationPlan, ranges: Mapping[str, Range]
) -> None:
    """Add the Q/DQ nodes in place; weights in front of theirs keep their names.

    `ranges` has those of all activations of the plan, by name.
    """
    rounding = _Rounding(model, plan.stored)
    weights: dict[ir.Value, ir.Value] = {}
    for node, at in plan.weights:
        value = node.inputs[at]
        if value not in weights:
            weights[value] = rounding.weight(value, _channels(node, at))
        node.replace_input_with(at, weights[value])
        if _made(node, plan.stored) not in plan.made:
            node.metadata_props[FLOAT_ON_PURPOSE] = "true"
    for name, value in plan.tensors.items():
        users = list(value.uses())
        rounded = rounding.activation(value, ranges[name].limit)
        for user, index in users:
            if value in plan.made or (user, index) in plan.reads:
                user.replace_input_with(index, rounded)
    RemoveUnusedNodesPass()(model)


class _Rounding:
    """Writes Q/DQ nodes into a graph, and the constants that they read."""

    def __init__(self, model: ir.Model, stored: ir.DataType | None) -> None:
        self._graph = model.graph
        self._taken = taken_names(model)
        self._stored = stored

    def activation(self, value: ir.Value, limit: float) -> ir.Value:
        """The tensor behind its own Q/DQ nodes, where `limit` becomes the type's largest value."""
        zero = np.zeros((), np.int8)
        if self._stored is ir.DataType.UINT8:  # the same numbers, all of them 128 higher
            zero = np.full((), 128, np.uint8)
        return self._pair(value, _scale(np.asarray(limit)), zero, {})

    def weight(self, value: ir.Value, axis: int) -> ir.Value:
        """A weight behind its own Q/DQ nodes, or stored in INT8 behind a DequantizeLinear."""
        values = _values(value)
        others = tuple(other for other in range(values.ndim) if other != axis)
        scale = _scale(np.abs(values).max(axis=others))
        zeros = np.zeros(scale.shape, np.int8)
        if self._stored is None:
            return self._pair(value, scale, zeros, {"axis": axis})
        whole = np.rint(values / np.expand_dims(scale, others)).astype(np.int8)
        stored = new_constant(self._graph, self._taken, f"{value.name}_int8", whole)
        read = [stored, *self._constants(value, scale, zeros)]
        out = self._output(value, "DequantizeLinear", FLOAT)
        node = ir.node("DequantizeLinear", read, {"axis": axis}, outputs=[out], name=out.name)
        self._graph.insert_before(self._graph[0], node)
        return out

    def _pair(
        self, value: ir.Value, scale: Array, zero: Array, along: Mapping[str, int]
    ) -> ir.Value:
        given = self._constants(value, scale, zero)
        whole = self._output(value, "QuantizeLinear", ir.DataType.from_numpy(zero.dtype))
        out = self._output(value, "DequantizeLinear", FLOAT)
        nodes = [
            ir.node("QuantizeLinear", [value, *given], along, outputs=[whole], name=whole.name),
            ir.node("DequantizeLinear", [whole, *given], along, outputs=[out], name=out.name),
        ]
        insert_behind(value, nodes)
        return out

    def _constants(self, value: ir.Value, scale: Array, zero: Array) -> tuple[ir.Value, ir.Value]:
        return (
            new_constant(self._graph, self._taken, f"{value.name}_scale", scale),
            new_constant(self._graph, self._taken, f"{value.name}_zero_point", zero),
        )

    def _output(self, value: ir.Value, op: str, dtype: ir.DataType) -> ir.Value:
        """The output of an operator on the tensor; its node has the same name."""
        name = new_name(self._taken, f"{value.name}_{op}")
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)


def _scale(limit: Array) -> Array:
    """The step between two values of a type whose largest is `limit`; 1 where all are zero."""
    scale: Array = (np.where(limit > 0, limit, _LARGEST) / _LARGEST).astype(np.float32)
    smallest: Array = np.maximum(scale, np.finfo(np.float32).tiny)
    return smallest

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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from twofour.errors import BadInputError
from twofour.export.float32 import FLOAT, LAYERS
from twofour.export.ir_models import insert_behind, load_float32, new_name, taken_names
from twofour.graph.files import Array, load_external
from twofour.graph.layers import FLOAT_ON_PURPOSE
from twofour.graph.opened import OpenedModel, has_half, open_onnx, widen
from twofour.graph.trace import DEQUANTIZE
from twofour.words import count

_TRIED = 2.0 ** (np.arange(6, -16, -1) / 3)
"""Ranges that are tried, as multiples of the largest value of the first batch: 4 to 1/32."""
_MOST_VALUES = 1 << 16
"""Values of a tensor that are rounded for each batch, more only where one vector has more."""
_MOST_LOST = 0.01
"""Rounding error beyond which what no product reads stays float. all-MiniLM-L6-v2: 0.014 to 0.036
for the outputs of its second feed-forward products, at most 0.004 for all others of these."""
_LARGEST = 127.0
_OPSET = 13
"""The first opset with Q/DQ nodes along an axis."""
_FUSED = ("BatchNormalization", "Clip", "Gelu", "LeakyRelu", "Relu")
"""What TensorRT fuses into the product before, besides the addition of a bias."""
_Use = tuple[ir.Node, int]
TensorsOf = Callable[[Path], Iterable[Mapping[str, Array]]]
"""Runs a file on samples: its inputs and outputs by name, batch by batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationPlan:
    """What gets Q/DQ nodes: places in the model they were planned for."""

    stored: ir.DataType | None
    """Type of activations in a file that stores weights in INT8, as ONNX Runtime's CPU kernels
    want them. None: weights are float32, as every TensorRT reads them."""
    products: tuple[ir.Node, ...]
    """Products whose second input is their weight."""
    reads: tuple[_Use, ...]
    """Inputs of products and of residual additions."""
    made: tuple[ir.Value, ...]
    """Outputs of products behind bias and activation, which whoever reads them gets rounded."""

    @property
    def tensors(self) -> dict[str, ir.Value]:
        """Activations whose ranges are needed, by name."""
        read = (node.inputs[index] for node, index in self.reads)
        return {value.name or "": value for value in (*read, *self.made) if value is not None}


@contextmanager
def quantized(
    opened: OpenedModel,
    folder: Path,
    tensors_of: TensorsOf,
    stored: ir.DataType | None = None,
) -> Iterator[tuple[ir.Model, str]]:
    """The model in float32 with Q/DQ nodes, and words for what is rounded and what is not.

    Its weights are on disk until the context ends. `folder` is where a copy of the model that
    gives its activations is written for `tensors_of`. Needs a model with products, opset 13 and
    no Q/DQ nodes, else it raises BadInputError, as for values that are not finite. Promises that
    weights keep their names and their zeros.
    """
    with tempfile.TemporaryDirectory(dir=folder) as own:
        model = load_float32(_in_float32(opened, Path(own)))
        planned = plan_quantization(model, opened.path.name, stored)
        path = Path(own, f"{opened.path.stem}.tensors.onnx")
        write_with_tensors(model, path, planned)
        collected = RangeCollector(planned)
        for tensors in tensors_of(path):
            collected.add(tensors)
        ranges = collected.ranges()
        plan = without_lossy(planned, ranges)
        words = _words(plan, left=len(planned.made) - len(plan.made))
        insert_quantization(model, plan, ranges)
        yield model, words


def _words(plan: QuantizationPlan, left: int) -> str:
    """What is rounded, and how many outputs are left in float."""
    words = f"{count(len(plan.products), 'product')} computed in int8, "
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


def plan_quantization(
    model: ir.Model,
    source: str,
    stored: ir.DataType | None = None,
) -> QuantizationPlan:
    """Find the products with a constant weight, and the additions of what they make."""
    _refuse_unfit(model, source)
    products = [node for node in model.graph if _has_weight(node)]
    if not products:
        raise BadInputError(f"{source} has no product with a constant weight in float32")
    outputs = [_made(node, stored) for node in products]
    made = dict.fromkeys(value for value in outputs if not value.is_graph_output())
    reads = [(node, 0) for node in products]
    for node in model.graph:
        adds = node.op_type == "Add" and not _adds_constant(node)
        if adds and not made.keys().isdisjoint(node.inputs):
            reads += [(node, 0), (node, 1)]
    return QuantizationPlan(
        stored=stored,
        products=tuple(products),
        reads=tuple(reads),
        made=tuple(made),
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


def _has_weight(node: ir.Node) -> bool:
    """Whether it is a product of what is computed and a constant in float32."""
    if node.op_type not in LAYERS or node.domain or len(node.inputs) < 2:
        return False
    weight = _constant(node.inputs[1])
    if weight is None or _constant(node.inputs[0]) is not None:
        return False
    return weight.dtype == FLOAT and len(weight.shape) > 1


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    return None if value is None else value.const_value


def _adds_constant(node: ir.Node) -> bool:
    return any(_constant(value) is not None for value in node.inputs)


def _channels(node: ir.Node, rank: int) -> int:
    """The axis of the output channels, along which a weight has its scales."""
    if node.op_type == "Gemm":
        # [outputs, inputs] with transB, as torch has a Linear; axis 1 without
        return int(not node.attributes.get_int("transB", 0))
    if node.op_type == "MatMul":
        return rank - 1
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The magnitude that becomes the largest value of a type, and what rounding then loses.

    `lost` is the squared error of a vector of channels over its squares, in the mean.
    """

    limit: float
    lost: float


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
        self._lost: dict[str, Array] = {}
        self._vectors = Counter[str]()

    def add(self, tensors: Mapping[str, Array]) -> None:
        """Round the tensors of a batch; raises BadInputError where a value is not finite."""
        for name, value in self._plan.tensors.items():
            values = np.asarray(tensors[name], np.float32)
            if not np.isfinite(values).all():
                raise BadInputError(f"tensor {name!r} is not finite on the calibration samples")
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

    def ranges(self) -> dict[str, Range]:
        """The best range of each tensor; one that was always zero gets 0."""
        best = dict.fromkeys(self._plan.tensors, Range(limit=0.0, lost=0.0))
        for name, lost in self._lost.items():
            at = int(lost.argmin())
            limit = float(self._tried[name][at])
            best[name] = Range(limit=limit, lost=float(lost[at] / self._vectors[name]))
        return best


def _in_images(plan: QuantizationPlan) -> set[ir.Value | None]:
    """What convolutions read and make, with the additions of what they make."""
    products = {node for node in plan.products if "Conv" in node.op_type}
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
    model: ir.Model,
    plan: QuantizationPlan,
    ranges: Mapping[str, Range],
) -> None:
    """Add the Q/DQ nodes in place; weights in front of theirs keep their names.

    `ranges` has those of all activations of the plan, by name.
    """
    rounding = _Rounding(model, plan.stored)
    weights: dict[ir.Value, ir.Value] = {}
    for node in plan.products:
        value = node.inputs[1]
        assert value is not None, "planned"
        if value not in weights:
            weights[value] = rounding.weight(value, node)
        node.replace_input_with(1, weights[value])
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

    def weight(self, value: ir.Value, product: ir.Node) -> ir.Value:
        """A weight behind its own Q/DQ nodes, or stored in INT8 behind a DequantizeLinear."""
        tensor = value.const_value
        assert tensor is not None, "only asked of constants"
        values = tensor.numpy()
        axis = _channels(product, values.ndim)
        others = tuple(other for other in range(values.ndim) if other != axis)
        scale = _scale(np.abs(values).max(axis=others))
        zeros = np.zeros(scale.shape, np.int8)
        if self._stored is None:
            return self._pair(value, scale, zeros, {"axis": axis})
        whole = np.rint(values / np.expand_dims(scale, others)).astype(np.int8)
        stored = _new_constant(self._graph, self._taken, f"{value.name}_int8", whole)
        read = [stored, *self._constants(value, scale, zeros)]
        out = self._output(value, "DequantizeLinear", FLOAT)
        node = ir.node("DequantizeLinear", read, {"axis": axis}, outputs=[out], name=out.name)
        self._graph.insert_before(self._graph[0], node)
        return out

    def _pair(
        self,
        value: ir.Value,
        scale: Array,
        zero: Array,
        along: Mapping[str, int],
    ) -> ir.Value:
        given = self._constants(value, scale, zero)
        whole = self._output(value, "QuantizeLinear", ir.DataType.from_numpy(zero.dtype))
        out = self._output(value, "DequantizeLinear", FLOAT)
        nodes = [
            ir.node("QuantizeLinear", [value, *given], along, outputs=[whole], name=whole.name),
            ir.node("DequantizeLinear", [whole, *given], along, outputs=[out], name=out.name),
        ]
        insert_behind(value, self._graph, nodes)
        return out

    def _constants(self, value: ir.Value, scale: Array, zero: Array) -> tuple[ir.Value, ir.Value]:
        return (
            _new_constant(self._graph, self._taken, f"{value.name}_scale", scale),
            _new_constant(self._graph, self._taken, f"{value.name}_zero_point", zero),
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


def _new_constant(graph: ir.Graph, taken: set[str], wish: str, values: Array) -> ir.Value:
    """A new constant, under that name where it is free."""
    tensor = ir.tensor(values, name=new_name(taken, wish))
    constant = ir.Value(name=tensor.name, const_value=tensor)
    graph.register_initializer(constant)
    return constant

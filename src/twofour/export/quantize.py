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
from twofour.export.ir_models import load_float32, new_name, taken_names
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
    weights: tuple[_Use, ...]
    reads: tuple[_Use, ...]
    """Inputs of products and of residual additions."""
    names: set[str]
    """All that are taken in the model."""
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
    gives its activations is written for `tensors_of`.
    Raises BadInputError for a model without any product, one that is quantized, one of an old
    opset, and values that are not finite.
    """
    with tempfile.TemporaryDirectory(dir=folder) as own:
        model = load_float32(_in_float32(opened, Path(own)))
        _fold_norms(model)
        planned = plan_quantization(model, opened.path.name, stored)
        collected, path = RangeCollector(planned), Path(own, f"{opened.path.stem}.tensors.onnx")
        write_with_tensors(model, path, planned)
        for tensors in tensors_of(path):
            collected.add(tensors)
        plan = without_lossy(planned, collected.ranges())
        said = f"{count(len(plan.weights), 'product')} computed in int8, "
        said += f"{count(len(plan.tensors), 'activation')} rounded"
        if left := len(planned.made) - len(plan.made):
            said += f"; {count(left, 'output')} would lose over 1 % in it and stay float, "
            said += "so TensorRT takes no sparse kernel for these products"
        insert_quantization(model, plan, collected.ranges())
        yield model, said


def _in_float32(opened: OpenedModel, folder: Path) -> OpenedModel:
    """The model, or where it is half precision a copy in float32 in the folder."""
    if not has_half(opened.proto):
        return opened
    model, path = opened.whole(), folder / opened.path.name
    load_external(model, opened.path)
    widen(model)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    return open_onnx(path)


def _fold_norms(model: ir.Model) -> None:
    """Make batch norms part of the products before them, which keep their names."""
    from onnxscript.rewriter import RewriteRuleSet
    from onnxscript.rewriter.rules import common

    taken, before, names = taken_names(model), {*model.graph}, {}
    for norm in [node for node in model.graph if node.op_type == "BatchNormalization"]:
        read, shift = norm.inputs[0], norm.inputs[2]
        product = None if read is None else read.producer()
        if product is None or product.op_type not in LAYERS or shift is None:
            continue
        weight, values = product.inputs[1].name, shift.const_value
        names[weight] = product.name
        if len(product.inputs) == 2 and product.op_type != "MatMul" and values is not None:
            # the rules would take a name that another constant may have
            bias = _constant_of(model.graph, taken, f"{weight}_bias", 0 * values.numpy())
            product.resize_inputs(3)
            product.replace_input_with(2, bias)
    rules = (
        common.fuse_batchnorm_into_conv_rule,
        common.fuse_batchnorm_into_conv_transpose_rule,
        common.fuse_batchnorm_into_gemm_rule,
    )
    RewriteRuleSet(rules).apply_to_model(model)
    for node in model.graph:
        if node not in before and node.op_type in LAYERS:
            node.name = names[node.inputs[1].name]


def plan_quantization(
    model: ir.Model, source: str, stored: ir.DataType | None = None
) -> QuantizationPlan:
    """Find the products with a constant weight, and the additions of what they make."""
    if any(node.op_type in DEQUANTIZE for node in model.graph.all_nodes()):
        hint = "it is built and compared as it is: leave out what quantizes it again"
        raise BadInputError(f"{source} is quantized already", hint=hint)
    if model.opset_imports.get("", 0) < _OPSET:
        raise BadInputError(
            f"int8 with a scale for each channel needs opset {_OPSET}, and {source} has "
            f"{model.opset_imports.get('', 0)}",
            hint="export a torch model with --opset 20; onnx.version_converter raises a file's",
        )
    weights = [(node, at) for node in model.graph if (at := _weight_at(node)) is not None]
    if not weights:
        raise BadInputError(f"{source} has no product with a constant weight in float32")
    every = (_made(node, stored) for node, _ in weights)
    made = dict.fromkeys(value for value in every if not value.is_graph_output())
    reads = [(node, 1 - at) for node, at in weights]
    for node in model.graph:
        if node.op_type == "Add" and not _adds_constant(node):
            reads += [(node, at) for at in (0, 1)] if made.keys() & {*node.inputs} else []
    return QuantizationPlan(
        stored=stored,
        names=taken_names(model),
        weights=tuple(weights),
        reads=tuple(reads),
        made=tuple(made),
    )


def _weight_at(node: ir.Node) -> int | None:
    """Which input of a product is its weight; None for no product with one in float32."""
    if node.op_type not in LAYERS or node.domain or len(node.inputs) < 2:
        return None
    found = [at for at in (0, 1) if _constant(node.inputs[at]) is not None]
    if len(found) != 1 or _channels(node, found[0]) is None:
        return None
    tensor = _constant(node.inputs[found[0]])
    return found[0] if tensor is not None and tensor.dtype == FLOAT else None


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The constant that a value is, transposed or not; None for what is computed."""
    while value is not None and value.const_value is None:
        maker = value.producer()
        value = maker.inputs[0] if maker is not None and maker.op_type == "Transpose" else None
    return None if value is None else value.const_value


def _adds_constant(node: ir.Node) -> bool:
    return any(_constant(value) is not None for value in node.inputs)


def _values(value: ir.Value) -> Array:
    """A constant weight as the product reads it."""
    maker = value.producer()
    if value.const_value is not None or maker is None:
        assert value.const_value is not None, "only asked of constants"
        stored: Array = value.const_value.numpy()
        return stored
    before, perm = maker.inputs[0], maker.attributes.get("perm")
    assert before is not None
    turned: Array = np.transpose(_values(before), None if perm is None else perm.as_ints())
    return turned


def _channels(node: ir.Node, at: int) -> int | None:
    """The axis of the output channels, along which a weight has its scales; None: a vector."""
    constant = _constant(node.inputs[at])
    rank = 0 if constant is None else len(constant.shape)
    if rank < 2:
        return None
    if node.op_type == "Gemm":
        flipped = node.attributes.get_int("transB" if at else "transA", 0)
        return at ^ int(bool(flipped))
    if node.op_type == "MatMul":
        return rank - 1 if at else rank - 2
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
            rows = len(values) if value in self._images else values.size // values.shape[-1]
            vectors = values.reshape(rows, -1)
            most = max(1, _MOST_VALUES // vectors.shape[1])
            vectors = np.random.default_rng(0).permutation(vectors)[:most]
            squares = np.square(vectors).sum(axis=1)
            vectors, squares = vectors[squares > 0], squares[squares > 0]
            if not len(vectors):
                continue
            tried = self._tried.setdefault(name, np.abs(values).max() * _TRIED)
            lost = [_error(vectors, squares, limit) for limit in tried]
            self._lost[name] = self._lost.get(name, 0.0) + np.asarray(lost)
            self._vectors[name] += len(vectors)

    def ranges(self) -> dict[str, Range]:
        """The best range of each tensor; one that was always zero gets 0."""
        found = dict.fromkeys(self._plan.tensors, Range(limit=0.0, lost=0.0))
        for name, lost in self._lost.items():
            best = int(lost.argmin())
            limit, error = float(self._tried[name][best]), float(lost[best] / self._vectors[name])
            found[name] = Range(limit=limit, lost=error)
        return found


def _in_images(plan: QuantizationPlan) -> set[ir.Value | None]:
    """What convolutions read and make, with the additions of what they make."""
    products = [node for node, _ in plan.weights if "Conv" in node.op_type]
    made: set[ir.Value | None] = {_made(node, plan.stored) for node in products}
    near = (n.inputs[at] for n, at in plan.reads if n in products or made & {*n.inputs})
    return made | {*near}


def _error(vectors: Array, squares: Array, limit: float) -> float:
    """The sum over vectors of their squared rounding error over their squares."""
    scaled = np.clip(vectors * np.float32(_LARGEST / limit), -_LARGEST, _LARGEST)
    error = np.rint(scaled) * np.float32(limit / _LARGEST) - vectors
    return float((np.square(error).sum(axis=1) / squares).sum())


def without_lossy(plan: QuantizationPlan, ranges: Mapping[str, Range]) -> QuantizationPlan:
    """The plan without what loses over 1 % and no product reads, and without additions of such.

    Their product reads INT8 and gives a float, so TensorRT takes no sparse INT8 kernel for it.
    """
    read = {node.inputs[at] for node, at in plan.reads if node.op_type != "Add"}
    lossy = {value for name, value in plan.tensors.items() if ranges[name].lost > _MOST_LOST}
    lossy -= read
    return replace(
        plan,
        reads=tuple(
            (node, at)
            for node, at in plan.reads
            if node.op_type != "Add" or lossy.isdisjoint(node.inputs)
        ),
        made=tuple(value for value in plan.made if value not in lossy),
    )


def insert_quantization(
    model: ir.Model, plan: QuantizationPlan, ranges: Mapping[str, Range]
) -> None:
    """Add the Q/DQ nodes in place; weights in front of theirs keep their names.

    `ranges` has those of all activations of the plan, by name.
    """
    graph, weights = model.graph, dict[ir.Value, ir.Value]()
    for node, at in plan.weights:
        value, axis = node.inputs[at], _channels(node, at)
        assert value is not None, "planned"
        if value not in weights:
            magnitudes = np.abs(_values(value))
            others = tuple(other for other in range(magnitudes.ndim) if other != axis)
            weights[value] = _rounded(graph, value, magnitudes.max(axis=others), plan, axis)
        node.replace_input_with(at, weights[value])
        if _made(node, plan.stored) not in plan.made:
            node.metadata_props[FLOAT_ON_PURPOSE] = "true"
    for name, value in plan.tensors.items():
        users, made = list(value.uses()), value in plan.made
        rounded = _rounded(graph, value, np.asarray(ranges[name].limit), plan)
        for user, index in users:
            if made or (user, index) in plan.reads:
                user.replace_input_with(index, rounded)
    RemoveUnusedNodesPass()(model)


def _rounded(
    graph: ir.Graph,
    value: ir.Value,
    limit: Array,
    plan: QuantizationPlan,
    axis: int | None = None,
) -> ir.Value:
    """The tensor behind its own Q/DQ nodes, where `limit` becomes the type's largest value."""
    dtype = ir.DataType.INT8
    scale = (np.where(limit > 0, limit, _LARGEST) / _LARGEST).astype(np.float32)
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    zeros, read, maker = np.zeros(scale.shape, dtype.numpy()), value, value.producer()
    ops = [("QuantizeLinear", dtype), ("DequantizeLinear", FLOAT)]
    if axis is not None and plan.stored is not None:
        along_axis = [-1 if other == axis else 1 for other in range(_values(value).ndim)]
        whole = np.rint(_values(value) / scale.reshape(along_axis)).astype(np.int8)
        read, maker = _constant_of(graph, plan.names, f"{value.name}_int8", whole), None
        del ops[0]
    elif plan.stored is ir.DataType.UINT8:  # the same numbers, all of them 128 higher
        dtype, zeros = plan.stored, np.full(scale.shape, 128, np.uint8)
        ops[0] = ("QuantizeLinear", dtype)
    given = [
        _constant_of(graph, plan.names, f"{value.name}_scale", scale),
        _constant_of(graph, plan.names, f"{value.name}_zero_point", zeros),
    ]
    nodes: list[ir.Node] = []
    for op, kind in ops:
        name = new_name(plan.names, f"{value.name}_{op}")
        out = ir.Value(name=name, type=ir.TensorType(kind), shape=value.shape)
        along = {} if axis is None else {"axis": axis}
        nodes.append(ir.node(op, [read, *given], along, outputs=[out], name=name))
        read = out
    if maker is None:
        graph.insert_before(graph[0], nodes)
    else:
        graph.insert_after(maker, nodes)
    return read


def _constant_of(graph: ir.Graph, taken: set[str], wish: str, values: Array) -> ir.Value:
    """A new constant, under that name where it is free."""
    tensor = ir.tensor(values, name=new_name(taken, wish))
    made = ir.Value(name=tensor.name, const_value=tensor)
    graph.register_initializer(made)
    return made

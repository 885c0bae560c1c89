"""What a graph computes at given sizes: products with weights, and the least that the rest does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from twofour.errors import BadInputError
from twofour.graph.layers import graph_runs, multiply_adds, repeated
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import Node, Scope, attribute, is_standard, scopes, tensor_shape
from twofour.graph.shapes import with_shapes
from twofour.graph.trace import DEQUANTIZE, LOOKUPS, QUANTIZE
from twofour.inputs.fits import Shapes, batch_names
from twofour.records import frozen
from twofour.records.export import ANONYMOUS, TensorShape
from twofour.records.weights import Weight

if TYPE_CHECKING:
    import onnx

_READING = (
    *("ArgMax", "ArgMin", "AveragePool", "CumSum", "GlobalAveragePool", "GlobalMaxPool"),
    *("GroupNormalization", "InstanceNormalization", "LRN", "LayerNormalization"),
    *("LpNormalization", "LpPool", "MaxPool", "MeanVarianceNormalization", "RMSNormalization"),
    *("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Resize"),
)
"""Ops that read their whole input before they write: no kernel before them can do their work."""
_UNSURE = (
    *(
        "Attention",
        "DFT",
        "GRU",
        "GridSample",
        "LSTM",
        "MaxRoiPool",
        "NonMaxSuppression",
        "NonZero",
    ),
    *("RNN", "RoiAlign", "STFT", "ScatterElements", "ScatterND", "TopK", "Unique"),
)
"""ONNX's own ops whose time depends on more than the bytes that they read and write."""
_COMPARISONS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")
ProductSize = tuple[int, int, int]


@frozen
class Product:
    """A layer with one group as products of (rows x reduction) and (reduction x outputs)."""

    layer: Weight
    rows: int
    outputs: int
    reduction: int
    count: int
    inputs: int
    """Values of the tensor that the weight multiplies."""
    overlap: int = 1
    """How many rows share each input value: 9 in a 3x3 convolution of stride 1."""

    @property
    def multiply_adds(self) -> int:
        """Those of all its products."""
        return self.rows * self.outputs * self.reduction * self.count

    @property
    def sizes(self) -> tuple[ProductSize, ProductSize]:
        """Rows, outputs and reduction; and those of a product that reads shared values once.

        It multiplies and writes as much, with the rows that share values as outputs of one row.
        """
        # 3x3 convolution, 900 positions, 64 -> 128: (900, 128, 576), and (100, 1152, 576)
        rows = max(1, self.rows // self.overlap)
        shared = (rows, self.outputs * self.overlap, self.reduction)
        return (self.rows, self.outputs, self.reduction), shared


@frozen
class Work:
    """All that a model computes in one run."""

    products: tuple[Product, ...] = ()
    rest: tuple[tuple[int, int], ...]
    """What any other node does at least: the values that it moves, and its multiply-adds."""
    apart: tuple[int, ...]
    """Multiply-adds of the layers among them: those with groups, or without constant weights."""
    unsure: Mapping[str, int]
    """Nodes by op whose time depends on more than the bytes that they read and write."""
    uncounted: tuple[str, ...] = ()
    """Layers whose sizes onnx cannot infer."""


def shapes_at(
    inputs: Sequence[TensorShape], shapes: Shapes, batch: int | None
) -> dict[str, tuple[int, ...]]:
    """Shapes of all inputs with this batch; None keeps that of `shapes`.

    Raises BadInputError where the file fixes another one.
    """
    names = batch_names(inputs)
    if batch is None or (not names and all(t.shape[:1] == (batch,) for t in inputs)):
        return dict(shapes)
    if not names:
        fixed = ", ".join(t.in_words for t in inputs)
        raise BadInputError(
            f"--batch {batch}: the file leaves no batch free ({fixed})",
            hint="leave --batch out, or export the model with a free batch",
        )
    at_batch = {}
    for tensor in inputs:
        sizes = list(shapes[tensor.name])
        for axis, dim in enumerate(tensor.shape):
            if dim in names and (axis == 0 or dim != ANONYMOUS):
                sizes[axis] = batch
        at_batch[tensor.name] = tuple(sizes)
    return at_batch


def find_work(model: OpenedModel, weights: Sequence[Weight], shapes: Shapes) -> Work:
    """The work of a graph whose inputs have these shapes; `weights` has all of its weights.

    A convolution is its implicit product: a row for each position of the output (of the input in a
    transposed one). One with groups is part of the rest. Of an If the heavier branch counts, and a
    loop's body as often as it runs.
    """
    layers = _layers(model, weights)
    opened = list(scopes(_sized(model, shapes), model.path))
    runs = graph_runs(opened)
    products = []
    others = []
    uncounted = []
    for scope, node in _computed(opened, runs):
        weight, position = layers.get(node.label, (None, 0))
        if weight is None:
            others.append((scope, node))
        elif repeated(multiply_adds(scope, node), runs[scope]) is None:
            uncounted.append(weight.layer)
        elif weight.groups == 1 and weight.in_channels:
            times = runs[scope] or 1
            products.append(_product((scope, node), weight, position, times))
        else:
            others.append((scope, node))
    return replace(
        _rest(others, runs, layers), products=tuple(products), uncounted=tuple(uncounted)
    )


def _layers(model: OpenedModel, weights: Sequence[Weight]) -> dict[str, tuple[Weight, int]]:
    """The weight of each node with one, and which of its inputs it is."""
    pairs = zip(model.weights().layers, weights, strict=True)
    return {layer.node.label: (weight, layer.position) for layer, weight in pairs}


def _rest(
    nodes: Iterable[tuple[Scope, Node]],
    runs: Mapping[Scope, int | None],
    layers: Container[str],
) -> Work:
    """What nodes without a product do, if they do anything; `layers` are those with a weight."""
    rest = []
    apart = []
    unsure: Counter[str] = Counter()
    attention = {scope: _attention(scope) for scope in runs}
    for scope, node in nodes:
        times = runs[scope] or 1
        values, multiplied = _least(scope, node, attention[scope])
        if values or multiplied:
            rest.append((values * times, multiplied * times))
        if node.label in layers:
            apart.append(multiplied * times)
        bodies = scope.bodies.get(node, ())
        if _is_unsure(node) or None in map(runs.get, bodies):
            unsure[node.op] += 1
    return Work(rest=tuple(rest), apart=tuple(apart), unsure=unsure)


@frozen
class _Attention:
    """What products of two activations need not move and multiply in fused attention."""

    scores: set[str]
    """Tensors before and after each Softmax, up to a product: they stay on the chip."""
    masked: set[str]
    """Those of them under a mask that hides later positions."""
    stored: dict[str, int]
    """Values that each tensor is made of: heads that share their keys read them once."""


def _attention(scope: Scope) -> _Attention:
    # q @ k -> Mul -> Add(mask) -> Softmax -> Cast -> @ v: all but q, k, v and the result are scores
    scores: set[str] = set()
    masked: set[str] = set()
    free = [node for node in scope.nodes if _is_free(scope, node)]
    for node in free:
        if node.op == "Softmax" or not scores.isdisjoint(node.proto.input):
            scores.update(node.proto.output)
        if _hides_later(scope, node) or not masked.isdisjoint(node.proto.input):
            masked.update(node.proto.output)
    before: set[str] = set()
    for node in reversed(free):
        if node.op == "Softmax" or not before.isdisjoint(node.proto.output):
            before.update(node.proto.input)
            if not masked.isdisjoint(node.proto.output):
                masked.update(node.proto.input)
    return _Attention(scores=scores | before, masked=masked, stored=_stored(scope, free))


def _stored(scope: Scope, free: Iterable[Node]) -> dict[str, int]:
    """Values that are behind a tensor: an Expand of 8 heads of keys to 32 has those of 8."""
    stored: dict[str, int] = {}
    for node in free:
        read = [name for name in node.proto.input if not scope.is_fixed(name)]
        behind = sum(stored.get(name, _elements(scope, name)) for name in read)
        for name in node.proto.output:
            stored[name] = min(filter(None, (behind, _elements(scope, name))), default=0)
    return stored


def _hides_later(scope: Scope, node: Node) -> bool:
    """Whether a node makes a causal mask: a triangle, or positions compared with positions."""
    if node.op in _COMPARISONS:
        names = [*node.proto.input, *node.proto.output]
        square = [name for name in names if _is_square(scope, name)]
        return square == list(node.proto.output)
    return node.op == "Trilu"


def _is_square(scope: Scope, name: str) -> bool:
    """Whether a tensor has a value for each two of some positions."""
    shape = tensor_shape(scope, name) or ()
    return len(shape) > 1 and shape[-1] == shape[-2] > 1


def _computed(
    opened: Iterable[Scope], runs: Mapping[Scope, int | None]
) -> Iterator[tuple[Scope, Node]]:
    """The nodes that run, each with its graph; constants are folded."""
    for scope in opened:
        if runs[scope] == 0:
            continue
        for node in scope.nodes:
            outputs = [name for name in node.proto.output if name]
            if not node.proto.output or not all(map(scope.is_fixed, outputs)):
                yield scope, node


def _sized(model: OpenedModel, shapes: Shapes) -> onnx.ModelProto:
    """A copy of the graph with all shapes that follow from those of its inputs."""
    copied = model.copy()
    sizes: dict[str, int] = {}
    for value in copied.graph.input:
        dims = value.type.tensor_type.shape.dim
        for dim, size in zip(dims, shapes.get(value.name, ()), strict=False):
            if dim.dim_param:
                sizes[dim.dim_param] = size
            dim.dim_value = size
    return with_shapes(copied, sizes)


def _product(place: tuple[Scope, Node], weight: Weight, position: int, times: int) -> Product:
    # A Conv of 64 -> 128 channels with a 3x3 kernel makes 128 outputs of 64 x 9 inputs for each
    # position; a transposed one 128 x 9 outputs of 64. A stack of 8 experts (8, 512, 2048) is
    # eight products, and each weight multiplies once per row.
    scope, node = place
    taps = prod(weight.kernel)
    reduction = weight.in_channels
    outputs = weight.out_channels
    apart = taps
    if weight.op == "ConvTranspose":
        outputs *= taps
    else:
        reduction *= taps
        strides = attribute(node.proto, "strides")
        apart = 1 if strides is None else prod(strides.ints)
    elements = prod(tensor_shape(scope, node.proto.input[position]) or weight.shape)
    return Product(
        layer=weight,
        rows=(multiply_adds(scope, node) or 0) // elements,
        outputs=outputs,
        reduction=reduction,
        count=times * (elements // (outputs * reduction)),
        inputs=_elements(scope, node.proto.input[1 - position]),
        overlap=max(1, taps // apart),
    )


def _least(scope: Scope, node: Node, attention: _Attention) -> tuple[int, int]:
    """The least that a node does, if kernels are fused as far as they ever are.

    Views, elementwise ops and softmax cost nothing: the kernel before or behind them does them.
    Fused attention keeps its scores on the chip, and skips the half of them that a causal mask
    hides; where the graph shows no such mask, nothing is skipped.
    """
    names = [name for name in (*node.proto.input, *node.proto.output) if name]
    sizes = {name: attention.stored.get(name, _elements(scope, name)) for name in names}
    number = multiply_adds(scope, node)
    if node.op in LOOKUPS:
        return sizes[names[-1]], 0
    if _is_free(scope, node):
        return 0, 0
    if number and node.op in ("MatMul", "Einsum"):
        sizes |= dict.fromkeys(attention.scores.intersection(names), 0)
        hidden = attention.masked.intersection(names)
        if any(_is_square(scope, name) for name in hidden):
            number //= 2
    return sum(sizes.values()), number or 0


def _is_free(scope: Scope, node: Node) -> bool:
    """Whether the kernel before or behind a node does its work."""
    is_work = node.op in _READING or node.op in LOOKUPS or _is_unsure(node)
    return not is_work and multiply_adds(scope, node) is None


def _is_unsure(node: Node) -> bool:
    own = is_standard(node.proto) or node.proto.op_type in (*QUANTIZE, *DEQUANTIZE)
    return node.op in _UNSURE or not own


def _elements(scope: Scope, name: str) -> int:
    """Values of a tensor, 0 where its shape is not known."""
    shape = tensor_shape(scope, name)
    return 0 if shape is None else prod(shape)

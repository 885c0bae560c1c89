"""Places in an ONNX graph whose channels repair can change, and what to store for a change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from twofour.graph.files import Array, dtype_name, numpy_dtype, storage_key
from twofour.graph.scope import Node, integer, is_standard, number
from twofour.graph.trace import DEQUANTIZE, QUANTIZE
from twofour.pruning.matrices import Layout, from_stack, to_stack
from twofour.pruning.onnx_calibration import MainGraph, Piece, Target
from twofour.pruning.onnx_problems import store_piece
from twofour.pruning.onnx_storage import as_type
from twofour.pruning.repair import Change
from twofour.records.weights import Pattern

_CHANNELS_FIRST = ("Conv", "ConvTranspose", "Gemm")
_MEAN, _VARIANCE = 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """The running mean or variance of a batch norm."""

    position: int
    """Which input of the node."""
    name: str
    tensor: onnx.TensorProto
    own: bool
    """Nothing else uses it; else the node gets a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSite:
    """A batch norm with constant statistics."""

    node: int
    tensor: str
    """Whose channels are looked at: its input."""
    mean: Statistic
    variance: Statistic
    epsilon: float
    axis: int = 1

    @property
    def reads(self) -> tuple[str, ...]:
        """What has to be there before it is changed."""
        return (self.tensor,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSite:
    """A pruned layer whose weight and bias are its own."""

    node: int
    tensor: str
    """Whose channels are looked at: the layer's output with the bias in it."""
    axis: int
    piece: Piece
    target: Target
    beta: float
    """What the bias is multiplied by before it is added."""

    @property
    def reads(self) -> tuple[str, ...]:
        """What has to be there before it is changed."""
        return (self.target.tap,)


Site = NormSite | LayerSite


def find_sites(graph: MainGraph, pattern: Pattern, pieces: Sequence[Piece]) -> dict[str, Site]:
    """By name of the node: batch norms, and layers of `pieces` that no batch norm comes after.

    Left out are batch norms in training mode or whose statistics are computed, weights that
    several nodes use, quantised weights (their scales would not fit any more), stacks of matrices,
    layers with a bias that is no constant of their own, and subgraphs.
    """
    norms: dict[str, Site] = {
        node.label: site for node in graph.scope.nodes if (site := _norm(graph, node))
    }
    behind = {site.tensor for site in norms.values()}
    layers: dict[str, Site] = {}
    users = Counter(piece.key for piece in pieces)
    for piece in pieces:
        layer = _layer(graph, pattern, piece) if users[piece.key] == 1 else None
        if layer is not None and not _is_normed(graph, layer.tensor, behind):
            layers[piece.users[0].label] = layer
    return {**norms, **layers}


def scaled_weight(piece: Piece, stored: Array, change: Change) -> Array:
    """The stored array with every output channel scaled; zeros stay zeros."""
    seen = piece.view.seen(stored).astype(np.float64)
    stack = to_stack(seen, piece.layout)
    weight = from_stack(stack * _of_outputs(change.scale, piece.layout), piece.layout)
    changed: Array = stored.copy()
    store_piece(piece, weight, changed)
    return changed


def moved_bias(site: LayerSite, stored: Array, change: Change) -> Array:
    """The bias that goes with the change, as stored.

    One that is not its own is given and taken as the node sees it, for a copy.
    """
    bias = site.target.bias
    assert bias is not None
    seen = bias.view.seen(stored) if bias.own else stored
    scale, shift = (np.reshape(each, bias.shape) for each in (change.scale, change.shift))
    wanted = as_type(seen.astype(np.float64) * scale + shift / site.beta, seen.dtype)
    if not bias.own:
        return wanted
    changed: Array = stored.copy()
    bias.view.write(as_type(bias.view.kept(wanted), stored.dtype), changed)
    return changed


def _of_outputs(scale: Array, layout: Layout) -> Array:
    """A factor for each output, in a shape that the stack multiplies with."""
    parts, rows, _ = layout.stack_shape
    if not layout.per_tap:
        return scale.reshape(parts, rows, 1)
    return np.repeat(scale.reshape(-1, rows, 1), layout.taps, axis=0)


def _norm(graph: MainGraph, node: Node) -> NormSite | None:
    proto = node.proto
    if proto.op_type != "BatchNormalization" or not is_standard(proto) or len(proto.input) < 5:
        return None
    if integer(proto, "training_mode", 0) or not integer(proto, "spatial", 1):
        return None
    if any(proto.output[1:]) or graph.is_fixed(proto.input[0]):
        return None
    mean, variance = (_statistic(graph, node, at) for at in (_MEAN, _VARIANCE))
    if mean is None or variance is None:
        return None
    return NormSite(
        node=graph.index[node],
        tensor=proto.input[0],
        mean=mean,
        variance=variance,
        epsilon=number(node.proto, "epsilon", 1e-5),
    )


def _statistic(graph: MainGraph, node: Node, position: int) -> Statistic | None:
    name = node.proto.input[position]
    tensor = graph.scope.constants.get(name)
    if tensor is None or numpy_dtype(dtype_name(tensor)).kind not in "fV" or len(tensor.dims) != 1:
        return None
    key = storage_key(tensor)
    others = sum(storage_key(other) == key for other in graph.scope.constants.values())
    users = graph.scope.users.get(name, ())
    reads = sum(name == read for user in users for read in user.proto.input)
    own = others == 1 and reads == 1 and name not in graph.scope.outputs
    return Statistic(position=position, name=name, tensor=tensor, own=own)


def _layer(graph: MainGraph, pattern: Pattern, piece: Piece) -> LayerSite | None:
    target = piece.users[0]
    weight = graph.opened.weights(pattern).weights[target.row]
    layer = graph.opened.weights(pattern).layers[target.row]
    node, position = layer.node, layer.position
    quantized = any(op in (*QUANTIZE, *DEQUANTIZE) for op in weight.trace)
    stacked = not piece.layout.convolution and (len(piece.layout.shape) != 2)
    alone = len(piece.users) == 1 and not weight.tied_to and not weight.looked_up_by
    whole = piece.size == int(np.prod(piece.tensor.dims, dtype=np.int64))
    if quantized or stacked or not alone or not whole or piece.layout.blocks > 1:
        return None
    if not piece.size:
        return None
    if node.op not in (*_CHANNELS_FIRST, "MatMul"):
        return None
    has_bias = node.op != "MatMul" and len(node.proto.input) > 2 and bool(node.proto.input[2])
    if has_bias and target.bias is None:
        return None
    adds = node if target.bias is None else graph.scope.nodes[target.bias.node]
    axis = 1 if node.op in _CHANNELS_FIRST else -1
    if node.op in ("Gemm", "MatMul") and position == 0:
        axis = -2
    return LayerSite(
        node=graph.index[node],
        tensor=adds.proto.output[0],
        axis=axis,
        piece=piece,
        target=target,
        beta=number(node.proto, "beta", 1.0) if node.op == "Gemm" else 1.0,
    )


def _is_normed(graph: MainGraph, tensor: str, behind: set[str]) -> bool:
    """Whether batch norms alone read the tensor: they take over what would be changed."""
    users = graph.scope.users.get(tensor, ())
    norms = all(user.op == "BatchNormalization" for user in users)
    return tensor in behind and norms and tensor not in graph.scope.outputs

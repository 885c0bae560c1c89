"""A weight of an ONNX file as a problem for the methods, and what they give as stored numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from twofour.errors import BadInputError
from twofour.graph.files import DTYPES, Array, read_tensor
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import scopes
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.methods.magnitude import count_non_finite
from twofour.pruning.onnx_calibration import Bias, Piece
from twofour.pruning.onnx_storage import as_type
from twofour.pruning.statistics import Statistics
from twofour.records.weights import Pattern

_CODES = {name: code for code, name in DTYPES.items()}


def layer_problem(
    piece: Piece,
    pattern: Pattern,
    statistics: Statistics,
    path: Path,
    reference: OpenedModel | None = None,
) -> LayerProblem:
    """The weight as it flows into its nodes, with the rounding that storing it means.

    `path` is the model's file, `reference` the dense model where it is not that. Raises
    BadInputError for NaN and infinity in the weight, and a reference that has none like it.
    """
    stored = read_tensor(piece.tensor, path)
    if broken := count_non_finite(stored):
        raise BadInputError(
            f"{path}: weight {piece.name!r} of {piece.users[0].label!r} has {broken} values"
            " that are NaN or infinite",
            hint="repair the model, or leave the layer out with --exclude",
        )
    seen = piece.view.seen(stored)
    work = np.dtype(np.float64 if seen.dtype == np.float64 else np.float32)

    def rounded(values: Array) -> Array:
        return piece.view.flowing(_kept(piece, values, stored.dtype)).astype(work)

    return LayerProblem(
        stored=seen.astype(work),
        layout=piece.layout,
        pattern=pattern,
        statistics=statistics,
        reference=None
        if reference is None
        else piece.view.seen(_dense(reference, piece.tensor)).astype(work),
        has_bias=all(user.bias is not None for user in piece.users),
        rounded=None if stored.dtype == work and not piece.view.changes else rounded,
    )


def store_piece(piece: Piece, weight: Array, stored: Array) -> None:
    """Put a solved weight to its places in the stored array; every zero as +0.0."""
    kept = _kept(piece, weight, stored.dtype)
    piece.view.write(np.where(kept == 0, np.zeros_like(kept), kept), stored)


def _dense(reference: OpenedModel, tensor: onnx.TensorProto) -> Array:
    """The constant of the same name in the dense model."""
    found = next(scopes(reference.proto, reference.path)).constants.get(tensor.name)
    if found is None or (found.dims, found.data_type) != (tensor.dims, tensor.data_type):
        there = "there is none" if found is None else f"it is {list(found.dims)}"
        raise BadInputError(
            f"{tensor.name!r} is {list(tensor.dims)} in the model; in the dense reference {there}",
            hint="name the dense model that this one was made from",
        )
    return read_tensor(found, reference.path)


def corrected(bias: Bias, change: Array, path: Path, reference: OpenedModel | None = None) -> Array:
    """The bias with a change of its layer's outputs in it: as stored, or of a copy as seen.

    With a dense reference its bias, from whose outputs the change is reckoned.
    """
    stored = read_tensor(bias.tensor, path) if reference is None else _dense(reference, bias.tensor)
    seen = bias.view.seen(stored)
    wanted = seen.astype(np.float64) + bias.factor * np.reshape(change, bias.shape)
    if not bias.own:
        return as_type(wanted, seen.dtype)
    kept = bias.view.kept(as_type(wanted, seen.dtype))
    bias.view.write(as_type(kept, stored.dtype), stored)
    return stored


def constant(name: str, values: Array) -> onnx.TensorProto:
    """An initializer of these values."""
    return onnx.TensorProto(
        name=name,
        data_type=_CODES[values.dtype.name],
        dims=values.shape,
        raw_data=np.ascontiguousarray(values).tobytes(),
    )


def _kept(piece: Piece, values: Array, kind: np.dtype[Any]) -> Array:
    changes = piece.view.changes
    seen = changes[-1].after if changes else kind
    return as_type(piece.view.kept(as_type(values, seen)), kind)

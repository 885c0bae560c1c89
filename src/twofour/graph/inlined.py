"""Functions of a model whose weights nothing in the main graph names, taken apart into it."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import inliner

from twofour.graph.files import is_external, size_bytes, tensors
from twofour.graph.opened import OpenedModel
from twofour.graph.weights import find_weights
from twofour.records.weights import Weight

_MOST_BYTES = 1 << 31
"""Protobuf holds less; a constant in a function is there once for each call, once it is inlined."""


def inlined(opened: OpenedModel) -> onnx.ModelProto | None:
    """The model without functions, where that brings weights into reach of pruning; else None.

    Those are factors of products that stand in a function or are given to one, as TensorRT sees
    them too. Values that were left on disk still are.
    """
    if not _weights_in_functions(opened):
        return None
    try:
        model = inliner.inline_local_functions(opened.proto)
    except (RuntimeError, ValueError):  # operator versions that do not go together
        return None
    if _size_bytes(model) >= _MOST_BYTES:
        return None
    found = find_weights(model, path=opened.path)
    return model if _named(found.weights) > _named(opened.weights().weights) else None


def _size_bytes(model: onnx.ModelProto) -> int:
    """Of its file, with what was left on disk."""
    held = (t for t in tensors(model) if t.data_location == onnx.TensorProto.EXTERNAL)
    return int(model.ByteSize()) + sum(size_bytes(t) for t in held if not is_external(t))


def _weights_in_functions(opened: OpenedModel) -> bool:
    names = {f"{function.domain}::{function.name}" for function in opened.proto.functions}
    users = (
        user
        for group in opened.weights().not_covered
        if group.multiplies
        for user in (group.op, *group.users)
    )
    return bool(names) and any(
        user in names or user.startswith(tuple(f"{name}/" for name in names)) for user in users
    )


def _named(weights: Sequence[Weight]) -> int:
    return sum(weight.weight is not None for weight in weights)

"""Saved weights read back and judged by the pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from twofour.errors import BadInputError, naming
from twofour.graph.files import (
    Array,
    is_groupable,
    map_region,
    map_tensor,
    numpy_dtype,
    storage_key,
)
from twofour.graph.opened import OpenedModel
from twofour.graph.stored import StoredTensor, read_header
from twofour.pattern import check, count_zeros, holds_along
from twofour.pruning.selection import wanted_by_default
from twofour.records.weights import (
    LayerWeight,
    Pattern,
    PatternCheck,
    Reason,
    ReasonCode,
    Validation,
    Weight,
    WeightCheck,
    shared,
)

_NO_PRODUCT = re.compile(
    r"(^|[._])(emb|embed\w*|wte|wpe|\w*norm\d*|ln|ln_\w+|bn\d*)\.weight$", re.IGNORECASE
)
"""Keys of embeddings and normalisations in the usual checkpoints, told by the last module name."""

Place = tuple[object, Callable[[], Array]]
"""A key that is equal for one stored array, and a function that reads it."""


def validate_onnx(
    model: OpenedModel, pattern: Pattern, *, required: Collection[str] | None = None
) -> Validation:
    """Judge every weight of an ONNX file; a broken one of the `required` fails the validation.

    `required` are names of initializers (None: whatever sparse math could use). External data is
    mapped, not read. Raises BadInputError for a damaged file, for a required weight that is not
    there or cannot be judged, and where there is nothing to check.
    """
    return _not_empty(check_onnx(model, pattern, required=required), model.path)


def check_onnx(
    model: OpenedModel, pattern: Pattern, *, required: Collection[str] | None = None
) -> Validation:
    """What validate_onnx finds, also of a model without a weight that could be grouped."""
    found, path = model.weights(pattern), model.path
    places = [
        None if t is None else (storage_key(t), partial(map_tensor, t, path)) for t in found.tensors
    ]
    checked = judged(path, found.weights, places, pattern, required)
    return replace(checked, not_covered=found.not_covered)


def validate_safetensors(
    path: Path,
    weights: Sequence[Weight],
    pattern: Pattern,
    *,
    required: Collection[str] | None = None,
) -> Validation:
    """Judge the named weights of a safetensors file, as validate_onnx does.

    `weights` say which key and which axis, `required` are keys. Raises BadInputError also where a
    weight is not in the file or has another shape there.
    """
    header = read_header(path)
    places = [(w.weight, partial(_map_weight, path, header, w)) for w in weights]
    return _not_empty(judged(path, weights, places, pattern, required), path)


def guess_weights(path: Path) -> tuple[Weight, ...]:
    """What the weights of a bare safetensors file may be, from keys and shapes alone.

    Matrices and kernels whose key ends in "weight", grouped along axis 1 as torch stores Linear
    and Conv; embeddings and normalisations are left out by name. Each says that it is a guess.
    """
    return tuple(
        _guess(key, stored)
        for key, stored in read_header(path).items()
        if len(stored.shape) >= 2 and key.endswith("weight") and not _NO_PRODUCT.search(key)
    )


def _guess(key: str, stored: StoredTensor) -> Weight:
    layer = re.sub(r"[._]?(in_proj_)?weight$", "", key)
    groupable = stored.dtype is not None and is_groupable(stored.dtype)
    reasons = [
        Reason(
            code=ReasonCode.GUESSED,
            message="op and axis are guessed from the key and the shape: no record says more",
        )
    ]
    if not groupable:
        reasons.append(Reason(code=ReasonCode.DTYPE, message="stored in an unsupported type"))
    return Weight(
        layer=layer,
        node=None,
        weight=key,
        op="Linear?" if len(stored.shape) == 2 else f"Conv{len(stored.shape) - 2}d?",
        shape=stored.shape,
        axis=1 if groupable else None,
        groups=1,
        in_channels=stored.shape[1],
        out_channels=stored.shape[0],
        kernel=stored.shape[2:],
        dtype=stored.dtype or "unknown",
        math_dtype=stored.dtype or "unknown",
        reasons=tuple(reasons),
    )


def _needed(
    weights: Sequence[Weight], pattern: Pattern, required: Collection[str] | None, path: Path
) -> Set[str]:
    """Names of the weights that must hold; all of them must be there and have an axis."""
    if required is None:
        return wanted_by_default(weights, pattern)
    there = {weight.weight for weight in weights if weight.axis is not None}
    missing = sorted(set(required) - there)
    if missing:
        raise BadInputError(
            f"{path}: {len(missing)} of {len(set(required))} weights that were to be pruned cannot"
            f" be found or judged in it, the first is {missing[0]!r}",
            hint="the file belongs to another run, or an export step changed the weight",
        )
    return set(required)


def _map_weight(path: Path, header: Mapping[str, StoredTensor], weight: Weight) -> Array:
    """The array, mapped and read-only."""
    stored = header.get(weight.weight or "")
    if stored is None:
        raise BadInputError(f"{path} has no weight {weight.weight!r} (layer {weight.layer!r})")
    if stored.shape != weight.shape or stored.dtype is None:
        raise BadInputError(
            f"{path}: {weight.weight!r} has shape {list(stored.shape)} and type {stored.dtype},"
            f" expected {list(weight.shape)} and {weight.dtype}",
            hint="the file belongs to another model or run",
        )
    return map_region(path, stored.offset, numpy_dtype(stored.dtype), stored.shape)


def judged(
    path: Path,
    weights: Sequence[Weight],
    places: Sequence[Place | None],
    pattern: Pattern,
    required: Collection[str] | None,
) -> Validation:
    """Judge each stored array once for every way it is used; `places` are beside `weights`."""
    needed = _needed(weights, pattern, required, path)
    judged: dict[object, dict[str, Any]] = {}
    checks = []
    for weight, place in zip(weights, places, strict=True):
        if place is None or weight.weight is None or weight.axis is None:
            continue
        key = (place[0], weight.axis, weight.shape)
        if key not in judged:
            with naming(path):
                judged[key] = _judge(place[1](), weight.axis, pattern)
        is_required = weight.weight in needed
        row = WeightCheck(**shared(weight, LayerWeight), **judged[key], required=is_required)
        checks.append(row)
    skipped = tuple(weight for weight in weights if weight.weight is None or weight.axis is None)
    return Validation(files=(str(path),), pattern=pattern, checks=tuple(checks), skipped=skipped)


def _judge(array: Array, axis: int, pattern: Pattern) -> dict[str, Any]:
    result = check(array, axis, pattern)
    other = None if result.holds else holds_along(array, pattern, except_axis=axis)
    more = {"dtype": array.dtype.name, "zeros": count_zeros(array)}
    return {**shared(result, PatternCheck), **more, "holds_along": other}


def _not_empty(checked: Validation, path: Path) -> Validation:
    if not checked.checks:
        raise BadInputError(
            f"{path}: nothing to check: it has no weight of a convolution or matrix product"
            " that could be grouped",
            hint="twofour validate takes ONNX files, safetensors checkpoints and run folders",
        )
    return checked

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

_Place = tuple[object, Callable[[], Array]]
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
    graph = model.weights()
    places: list[_Place | None] = []
    for tensor in graph.tensors:
        if tensor is None:
            places.append(None)
        else:
            places.append((storage_key(tensor), partial(map_tensor, tensor, model.path)))
    checked = _judged(model.path, graph.weights, places, pattern, required)
    return replace(checked, not_covered=graph.not_covered)


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
    places: list[_Place | None] = []
    for weight in weights:
        places.append((weight.weight, partial(_map_weight, path, header, weight)))
    return _not_empty(_judged(path, weights, places, pattern, required), path)


def guess_weights(path: Path) -> tuple[Weight, ...]:
    """What the weights of a bare safetensors file may be, from keys and shapes alone.

    Matrices and kernels whose key ends in "weight", grouped along axis 1 as torch stores Linear
    and Conv; embeddings and normalisations are left out by name. Each says that it is a guess.
    """
    guesses = []
    for key, stored in read_header(path).items():
        if len(stored.shape) < 2 or not key.endswith("weight") or _NO_PRODUCT.search(key):
            continue
        guesses.append(_guess(key, stored))
    return tuple(guesses)


def _guess(key: str, stored: StoredTensor) -> Weight:
    dtype = stored.dtype or "unknown"
    axis: int | None = 1
    op = "Linear?"
    if len(stored.shape) > 2:
        op = f"Conv{len(stored.shape) - 2}d?"
    reasons = [
        Reason(
            code=ReasonCode.GUESSED,
            message="op and axis are guessed from the key and the shape: no record says more",
        )
    ]
    if stored.dtype is None or not is_groupable(dtype):
        axis = None
        reasons.append(Reason(code=ReasonCode.DTYPE, message="stored in an unsupported type"))
    return Weight(
        # "encoder.0.attn.in_proj_weight" of the layer "encoder.0.attn"
        layer=re.sub(r"[._]?(in_proj_)?weight$", "", key),
        node=None,
        weight=key,
        op=op,
        shape=stored.shape,
        axis=axis,
        groups=1,
        in_channels=stored.shape[1],
        out_channels=stored.shape[0],
        kernel=stored.shape[2:],
        dtype=dtype,
        math_dtype=dtype,
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


def _judged(
    path: Path,
    weights: Sequence[Weight],
    places: Sequence[_Place | None],
    pattern: Pattern,
    required: Collection[str] | None,
) -> Validation:
    """Judge each stored array once for every way it is used; `places` are beside `weights`."""
    needed = _needed(weights, pattern, required, path)
    facts: dict[object, dict[str, Any]] = {}
    checks = []
    skipped = []
    for weight, place in zip(weights, places, strict=True):
        if place is None or weight.weight is None or weight.axis is None:
            skipped.append(weight)
            continue
        stored, read = place
        key = (stored, weight.axis, weight.shape)
        if key not in facts:
            with naming(path):
                facts[key] = _judge(read(), weight.axis, pattern)
        is_required = weight.weight in needed
        row = WeightCheck(**shared(weight, LayerWeight), **facts[key], required=is_required)
        checks.append(row)
    return Validation(
        files=(str(path),), pattern=pattern, checks=tuple(checks), skipped=tuple(skipped)
    )


def _judge(array: Array, axis: int, pattern: Pattern) -> dict[str, Any]:
    checked = check(array, axis, pattern)
    facts = shared(checked, PatternCheck)
    facts["holds_along"] = None
    if not checked.holds:
        facts["holds_along"] = holds_along(array, pattern, except_axis=axis)
    return {**facts, "dtype": array.dtype.name, "zeros": count_zeros(array)}


def _not_empty(checked: Validation, path: Path) -> Validation:
    if not checked.checks:
        why = "it has no weight of a convolution or matrix product that could be grouped"
        for weight in checked.skipped:
            for reason in weight.reasons:
                why = f"{weight.layer}: {reason.message}"
        raise BadInputError(
            f"{path}: nothing to check: {why}",
            hint="twofour validate takes ONNX files, safetensors checkpoints and run folders",
        )
    return checked

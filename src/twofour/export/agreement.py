"""How far two programs that were given the same inputs agree. numpy only."""

from __future__ import annotations

import math

import numpy as np

from twofour.errors import BadInputError
from twofour.inputs.fits import Array, Arrays
from twofour.records.export import OutputAgreement
from twofour.records.options import Precision

BOUND_FACTORS = {Precision.FLOAT32: 1e-4, Precision.FLOAT16: 2e-2, Precision.BFLOAT16: 1.6e-1}
"""Largest error accepted, as a part of the largest value of the output.

Right exports measured against the module in float32 (ResNet-50, ConvNeXt-tiny, ViT-base, BERT-base,
GPT-2, a 4-layer Llama; random weights, ONNX Runtime 1.31 on a CPU): at most 1.5e-6 in float32 and
1.2e-3 in float16; a wrong one is off by the size of the output itself. The bounds lie between.
bfloat16 has three bits less than float16: eight times its bound, not measured.
"""
_SMALLEST_SCALE = 1e-3
"""Outputs below this are bounded as if they were this large."""
_COUNTED = "iubOSU"
"""Kinds of numpy's types that are whole numbers, booleans and texts."""


def agreement(
    reference: Arrays, other: Arrays, *, bounds: Precision | None
) -> tuple[OutputAgreement, ...]:
    """Compare output by output; without `bounds`, or for whole numbers, none is judged.

    NaN or infinity in one and not in the other is an infinite error. Raises BadInputError when the
    outputs or a shape differ.
    """
    if reference.keys() != other.keys():
        raise BadInputError(
            f"the outputs {', '.join(other)} are compared with {', '.join(reference)}"
        )
    rows = []
    for name, array in other.items():
        rows.append(_output(name, np.asarray(reference[name]), np.asarray(array), bounds))
    return tuple(rows)


def _output(name: str, reference: Array, other: Array, bounds: Precision | None) -> OutputAgreement:
    if reference.shape != other.shape:
        raise BadInputError(
            f"output {name}: shape {list(other.shape)} where {list(reference.shape)} is expected"
        )
    if reference.dtype.kind in _COUNTED or other.dtype.kind in _COUNTED:
        return _counted(name, reference, other)
    return _measured(name, reference.astype(np.float64), other.astype(np.float64), bounds)


def _measured(name: str, a: Array, b: Array, bounds: Precision | None) -> OutputAgreement:
    finite = np.isfinite(a)
    usable = finite & np.isfinite(b)
    largest = np.abs(a[finite]).max(initial=0.0)
    bound = None
    if bounds is not None:
        bound = BOUND_FACTORS[bounds] * max(_SMALLEST_SCALE, float(largest))
    # the cosine of a row without a usable value is NaN
    cosines = _row_cosines(a, b)
    known = cosines[np.isfinite(cosines)]
    return OutputAgreement(
        output=name,
        shape=a.shape,
        max_abs_error=_max_abs_error(a, b),
        cosine=float(_row_cosines(a.reshape(1, -1), b.reshape(1, -1))[0]),
        row_cosine_mean=float(known.mean()) if known.size else math.nan,
        row_cosine_min=float(known.min()) if known.size else math.nan,
        not_finite=int((~usable).sum()),
        dense_not_finite=int((~finite).sum()),
        bound=bound,
        relative_error=_relative_error(a[usable], b[usable]),
        dense_largest=float(largest),
    )


def _counted(name: str, reference: Array, other: Array) -> OutputAgreement:
    """Compare classes, places and texts: near is no better than far, so equal ones are counted."""
    same = reference == other
    error = 0.0 if same.all() else math.inf
    if reference.dtype.kind in "iub" and other.dtype.kind in "iub":
        error = _max_abs_error(reference.astype(np.float64), other.astype(np.float64))
    return OutputAgreement(
        output=name,
        shape=reference.shape,
        max_abs_error=error,
        cosine=math.nan,
        row_cosine_mean=math.nan,
        row_cosine_min=math.nan,
        equal=float(same.mean()) if same.size else 1.0,
    )


def _max_abs_error(a: Array, b: Array) -> float:
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(a - b))
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _relative_error(a: Array, b: Array) -> float:
    """|b - a| / |a|, both finite; NaN where there is nothing, or all is zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.divide(np.linalg.norm(b - a), np.linalg.norm(a)))


def _row_cosines(a: Array, b: Array) -> Array:
    """Cosine of each row over the first axis; 1 where both rows are zero.

    Entries that are not finite in both are left out; NaN where no entry of a row is left.
    """
    # [2, 5, 40] is compared as 2 rows of 200 values, a scalar as one row of one
    rows = a.shape[0] if a.ndim else 1
    width = a.size // max(rows, 1)
    a = a.reshape(rows, width)
    b = b.reshape(rows, width)
    usable = np.isfinite(a) & np.isfinite(b)
    a = np.where(usable, a, 0.0)
    b = np.where(usable, b, 0.0)
    products = (a * b).sum(axis=1)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines: Array = np.divide(products, norms, out=np.zeros(rows), where=norms > 0).clip(-1.0, 1.0)
    both_zero = ~a.any(axis=1) & ~b.any(axis=1)
    cosines[both_zero] = 1.0
    cosines[~usable.any(axis=1)] = np.nan
    return cosines

"""Times of dense and 2:4 kernels for a matrix product: measured, or predicted with an interval.

A prediction is the fitted roofline (roofline.py) times what measured products near it took more or
less than their rooflines: a Gaussian process over the logarithms of rows, outputs and reduction.
docs/kernel_model.md says how well that works.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from twofour.eligibility.build_facts import NO_SPARSE_INT8
from twofour.errors import BadInputError
from twofour.forecasting.gpus import gpu_named, table_rows
from twofour.forecasting.roofline import BYTES, KEPT, Array, Terms, fitted_terms, kernel_us
from twofour.records import frozen
from twofour.records.export import WITHOUT_SPARSE_INT8
from twofour.records.forecast import Basis, GpuKind, ProductTimes
from twofour.records.options import MathPrecision

_STANDS_FOR = {"FP16": "BF16", "BF16": "FP16"}
"""A precision without measured times -> one with the same data sheet rates and sizes."""
_FEWEST_ROWS = 64
"""Products with fewer rows were not measured."""
_REACH = 2.0
"""How many doublings of a size it takes until a measured product says little."""
_NOISE = 0.2
"""Variance of repeated measurements, as a share of the variance between products."""
_USUAL_VARIANCE = np.array([0.013, 0.018])
"""Variance of log dense time and log gain around the roofline at 1,024 rows: median of all GPUs."""
_USUAL_COUNT = 4
"""How many measured products the usual variance weighs as much as."""
_TIMING = 0.05
"""How far, in logarithms, two measured times of one product may differ."""
_STEPS = np.array([1, *2.0 ** np.arange(6, 64)])
"""Rows between which the times of other rows are."""
_STEPS_AHEAD = 9
"""How many of them a product is compared with."""
_BETWEEN = 0.5
"""Below this share of the usual variance that measured products leave open, they are near."""
_Z = 1.2816
"""Standard deviations on each side of the middle that have 80 % of a normal distribution."""
_DENSE_AND_GAIN = np.array([[1, 1], [0, -1]])
"""Turns logarithms of dense and sparse times into those of dense times and gains."""
_OTHER_GPU = np.array([0.05, 0.033])
"""Variance of log dense time and log gain that scaling from another GPU adds."""
_BASES = list(Basis)
_GAINS = np.log([0.5, 2.05])
"""Gains that hardware explains: sparse tensor cores are at most twice as fast, plus 2.5 % noise."""
ODD_GAIN = (
    "a gain below 0.5 or above 2.05 comes from one slow kernel: sparse tensor cores are at most "
    "twice as fast, and TensorRT has kernels of its own"
)
IN_CACHE = (
    "the 2:4 weights fit into the L2 cache and the dense ones do not; a kernel that is timed over "
    "and over finds them there, a model that reads other layers in between gains less"
)


def product_times(
    gpu: str | GpuKind,
    precision: str,
    rows: int,
    outputs: int,
    reduction: int,
) -> ProductTimes:
    """The times of one product on a GPU, dense and with weights pruned to 2:4.

    A precision is FP16, float16, half and so on. Raises BadInputError, with the nearest names, for
    a GPU that is not known, a precision that it lacks and a size below 1.
    """
    return times_of_products(gpu, precision, [(rows, outputs, reduction)])[0]


def times_of_products(
    gpu: str | GpuKind, precision: str, shapes: Sequence[tuple[int, int, int]]
) -> tuple[ProductTimes, ...]:
    """`product_times` of many products at once, each (rows, outputs, reduction)."""
    kind = gpu_named(gpu) if isinstance(gpu, str) else gpu
    with suppress(ValueError):  # another word stays for the error
        precision = MathPrecision(precision).kernels
    if any(min(shape) < 1 for shape in shapes):
        raise BadInputError(f"sizes of a product must be 1 or more, found {min(shapes, key=min)}")
    if not shapes:
        return ()
    sizes = np.array(shapes, float)
    with threadpool_limits(1, "blas"):  # more take longer for matrices this small
        times, note = _predicted(_curve(kind, precision), sizes)
    gains = times.middle[:, 1]
    is_cached = _caches_sparse_alone(kind, precision, sizes) & (gains > 0)
    notes = np.full(len(sizes), note, object)
    notes[gains != np.clip(gains, *_GAINS)] = note or ODD_GAIN
    notes[is_cached] = IN_CACHE
    name = gpu if isinstance(gpu, str) else gpu.name
    return tuple(_in_us((name, precision), shapes, times, notes.tolist()))


def _in_us(
    place: tuple[str, str],
    shapes: Sequence[tuple[int, int, int]],
    times: Times,
    notes: Sequence[str | None],
) -> Iterator[ProductTimes]:
    gpu, precision = place
    low, middle, high = (np.exp(times.middle + z * times.deviation).tolist() for z in (-_Z, 0, _Z))
    for at, (rows, outputs, reduction) in enumerate(shapes):
        dense_us, gain = middle[at]
        yield ProductTimes(
            gpu=gpu,
            precision=precision,
            rows=rows,
            outputs=outputs,
            reduction=reduction,
            dense_us=dense_us,
            dense_low_us=low[at][0],
            dense_high_us=high[at][0],
            sparse_us=dense_us / gain,
            gain=gain,
            low=low[at][1],
            high=high[at][1],
            basis=_BASES[times.basis[at]],
            note=notes[at],
        )


def _caches_sparse_alone(gpu: GpuKind, precision: str, sizes: Array) -> NDArray[np.bool_]:
    """Whether the 2:4 weights of each product fit into the L2 cache, and the dense ones do not."""
    weights_mb = sizes[:, 1] * sizes[:, 2] * BYTES[precision] / 2**20
    fits = (KEPT[precision] * weights_mb < gpu.l2_mb) & (weights_mb > gpu.l2_mb)
    return fits & (sizes[:, 0] <= 512)


@frozen
class Times:
    """Natural logarithms of dense microseconds and gain, a row for each product."""

    middle: Array
    deviation: Array
    """Standard deviation."""
    basis: NDArray[np.int_]
    """Places in `Basis`."""


@frozen
class Curve:
    """What predicts the times of one GPU and precision: a roofline, and what was measured there."""

    gpu: GpuKind
    precision: str
    terms: Terms
    measured: Array
    """Measured products: rows, outputs, reduction, dense and sparse microseconds of each.

    None where the terms are scaled from another GPU.
    """
    inverse: Array
    """Inverse of the correlations between the measured products, with noise."""
    solved: Array
    variance: Array
    """Variance of log dense time and log gain around the roofline at 1,024 rows."""


@lru_cache(maxsize=1)
def measured_products() -> dict[tuple[str, str], Array]:
    """The products that others measured, by GPU and precision.

    A row has rows, outputs and reduction, and the dense and sparse microseconds.
    """
    products: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for row in table_rows("kernel_times.csv"):
        gpu, precision, *numbers = row.values()
        products[gpu, precision].append([float(number) for number in numbers])
    return {place: np.array(rows) for place, rows in products.items()}


def curve_through(gpu: GpuKind, precision: str, terms: Terms, measured: Array) -> Curve:
    """Fit the Gaussian process to what measured times are above or below their rooflines."""
    # a product that took 1.1 times its roofline is log 1.1 above it; what is near it, in doublings
    # of rows, outputs and reduction, is expected to be above it too
    sizes = measured[:, :3]
    above = np.log(measured[:, 3:]) @ _DENSE_AND_GAIN - _roofline(gpu, precision, terms, sizes)
    above /= _spread(sizes)
    inverse = np.linalg.inv(_correlation(sizes, sizes) + _NOISE * np.eye(len(sizes)))
    solved = inverse @ above
    usual = _USUAL_VARIANCE if len(measured) else _USUAL_VARIANCE + _OTHER_GPU
    misfit = (above * solved).sum(axis=0) + _USUAL_COUNT * usual
    return Curve(
        gpu=gpu,
        precision=precision,
        terms=terms,
        measured=measured,
        inverse=inverse,
        solved=solved,
        variance=misfit / (len(above) + _USUAL_COUNT),
    )


def predict(curve: Curve, sizes: Array) -> Times:
    """Times of products on a GPU; those measured there keep their own times."""
    # `unknown` is the part of the variance that neighbours leave: 0 at a measured product, 1 far
    # from all
    near = _correlation(sizes, curve.measured[:, :3])
    unknown = np.maximum(1 - (near @ curve.inverse * near).sum(axis=1), 0)
    is_near = (unknown < _BETWEEN) & (sizes[:, 0] >= _FEWEST_ROWS)
    far = Basis.BEYOND if len(curve.measured) else Basis.SCALED
    basis = np.where(is_near, _BASES.index(Basis.BETWEEN), _BASES.index(far))
    there = [*_measured_there(curve, sizes)]
    unknown[there] = 0
    basis[there] = _BASES.index(Basis.MEASURED)
    deviation = np.sqrt((unknown[:, None] + _NOISE) * curve.variance) * _spread(sizes)
    return Times(middle=_middle(curve, sizes), deviation=deviation, basis=basis)


def _middle(curve: Curve, sizes: Array) -> Array:
    """Logarithms of dense time and gain: measured ones, or the roofline and what differs from it.

    `near @ solved` is the mean of what neighbours are above their rooflines.
    """
    middle = _roofline(curve.gpu, curve.precision, curve.terms, sizes)
    measured_like = np.maximum(sizes, [_FEWEST_ROWS, 1, 1])  # fewer rows differ as 64 do
    near = _correlation(measured_like, curve.measured[:, :3])
    middle += near @ curve.solved * _spread(sizes)
    for at, times_us in _measured_there(curve, sizes).items():
        middle[at] = np.log(times_us) @ _DENSE_AND_GAIN
    return middle


def _rising(curve: Curve, sizes: Array) -> Times:
    """`predict`, but more rows never take less time: a kernel can run fewer rows as part of more.

    So a product that was measured to take longer than more rows has their time; where that is more
    than noise, it is `BETWEEN`.
    """
    # 200 rows are between 128 and 256 of the same weights, 20 between 1 and 64, and none of these
    # takes longer than 512, 1024 ...
    times = predict(curve, sizes)
    at = np.searchsorted(_STEPS, sizes[:, 0], side="right") - 1
    rows = _STEPS[at + np.arange(_STEPS_AHEAD)[:, None]]
    least = np.minimum.accumulate(_steps_us(curve, sizes, rows)[::-1])[::-1]
    part = np.log(sizes[:, 0] / rows[0]) / np.log(rows[1] / rows[0])
    middle = (least[0] + part[:, None] * (least[1] - least[0])) @ _DENSE_AND_GAIN
    is_slower = (np.abs(middle - times.middle) > _TIMING).any(axis=1)
    basis = np.maximum(times.basis, is_slower * _BASES.index(Basis.BETWEEN))
    return Times(middle=middle, deviation=times.deviation, basis=basis)


def _steps_us(curve: Curve, sizes: Array, rows: Array) -> Array:
    """Logarithms of dense and sparse times with other rows: a table for each step of them."""
    more = np.repeat(sizes[None], len(rows), axis=0)
    more[:, :, 0] = rows
    us: Array = _middle(curve, more.reshape(-1, 3)) @ _DENSE_AND_GAIN
    return us.reshape(len(rows), -1, 2)


def _measured_there(curve: Curve, sizes: Array) -> dict[int, list[float]]:
    """Dense and sparse microseconds of products that were measured, by their row in `sizes`."""
    known = {tuple(row[:3]): row[3:] for row in curve.measured.tolist()}
    asked = enumerate(map(tuple, sizes.tolist()))
    return {at: known[size] for at, size in asked if size in known}


def _roofline(gpu: GpuKind, precision: str, terms: Terms, sizes: Array) -> Array:
    """Logarithms of dense time and gain, a row for each product."""
    kinds = zip(terms, (False, True), strict=True)
    us = [kernel_us(own, gpu, precision, sizes, sparse=sparse) for own, sparse in kinds]
    logarithms: Array = np.log(us).T @ _DENSE_AND_GAIN
    return logarithms


def _correlation(one: Array, other: Array) -> Array:
    """Matern's kernel 3/2 of the distance between products, in doublings of a size."""
    # 4096 and 2048 rows are one doubling apart, whatever the outputs
    here, there = np.log2(one), np.log2(other)
    squares = (here**2).sum(axis=1)[:, None] + (there**2).sum(axis=1) - 2 * here @ there.T
    distance = np.sqrt(3 * np.maximum(squares, 0)) / _REACH
    correlation: Array = (1 + distance) * np.exp(-distance)
    return correlation


def _spread(sizes: Array) -> Array:
    """How far times are from their roofline, relative to 1,024 rows and 4,096 x 4,096 weights.

    Few rows and small weights are less sure; the powers made 80 % intervals right at every size.
    """
    rows = np.clip(sizes[:, :1], _FEWEST_ROWS, 2**15) / 2**10
    weights = np.clip(sizes[:, 1:].prod(axis=1, keepdims=True), 2**18, 2**28) / 2**24
    spread: Array = rows**-0.2 * weights**-0.05
    return spread


def _predicted(known: tuple[Curve, str | None], sizes: Array) -> tuple[Times, str | None]:
    """Times of products with 2:4 weights, and what else is to be said."""
    curve, note = known
    precision = curve.precision
    times = _rising(curve, sizes)
    # one row alone gains no more than the bytes that it reads, 64 rows and more what they may
    most = -np.log(KEPT[precision])
    share = np.clip(np.log2(sizes[:, :1]) / np.log2(_FEWEST_ROWS), 0, 1)
    times.middle[:] -= (1 - share) * np.maximum(times.middle[:, 1:] - most, 0)
    if not len(curve.measured):  # another GPU need not have a slow kernel of the measured one
        times.middle[:, 1] = np.clip(times.middle[:, 1], *_GAINS)
    if precision == "INT8" and curve.gpu.compute_capability == WITHOUT_SPARSE_INT8:
        times.middle[:, 1] = 0
        times.deviation[:, 1] = 0
        note = f"int8: {NO_SPARSE_INT8.in_words}"
    return times, note


@lru_cache(maxsize=64)
def _curve(gpu: GpuKind, precision: str) -> tuple[Curve, str | None]:
    """What predicts times on a GPU, and a note where another precision was measured."""
    if precision not in dict(gpu.tflops):
        has = ", ".join(name for name, _ in gpu.tflops)
        raise BadInputError(f"{gpu.name} does not compute in {precision!r}", hint=f"it has {has}")
    there = str(gpu.measured_as)
    known = fitted_terms()
    # GPUs of an RTX 30 were measured in FP16 alone: BF16 has its times there
    measured = precision if (there, precision) in known else _STANDS_FOR.get(precision, "")
    if (there, measured) not in known:
        message = f"no kernel times were measured in {precision} on a GPU like {gpu.name}"
        raise BadInputError(message, hint="ask for FP16 or INT8")
    note = None
    if measured != precision:
        note = f"{there} was measured in {measured} only"
    if (there, precision) == ("B200", "INT8"):
        note = "dense kernels of B200 are slower in INT8 than in FP16: gains over them are large"
    products: Array = np.empty((0, 5))
    if gpu == gpu_named(there):
        products = measured_products().get((there, measured), products)
    return curve_through(gpu, precision, known[there, measured], products), note

"""The time of a matrix product as hardware bounds it: launch, tiles in waves over the SMs, memory.

A library picks the fastest of its kernels, so the time is the least over tile sizes and splits of
the reduction. Seven terms for each GPU, precision and kind of kernel (roofline.csv) are fitted to
measured times by benchmarks/kernel_model.py. They are shares of what a data sheet says, so they
carry over to a GPU with another data sheet.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.forecasting.gpus import table_rows
from twofour.records.forecast import GpuKind

Array = NDArray[np.floating[Any]]

BYTES = {"BF16": 2.0, "FP16": 2.0, "INT8": 1.0, "FP8": 1.0, "FP4": 0.5}
"""Bytes of one weight or input."""
KEPT = {"BF16": 9 / 16, "FP16": 9 / 16, "INT8": 5 / 8, "FP8": 5 / 8, "FP4": 5 / 8}
"""Share of the weights' bytes that a 2:4 kernel reads: half the values, and where they were.

Two indices of 2 bits for each group of four; in FP4 for each group of four pairs of weights.
"""
_OUTPUT_BYTES = 2.0
_TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (256, 128), (128, 256), (256, 64))
_KERNELS = np.array([(*tile, split) for tile in _TILES for split in (1, 2, 4, 8, 16)], float).T
"""Rows and outputs of a tile, and parts of the reduction that different SMs add up."""


@dataclass(frozen=True, slots=True)
class KernelTerms:
    """What is fitted, in the order of the columns of roofline.csv."""

    rate: float
    """Share of the dense peak rate that very large tiles would reach; sparse kernels exceed 1."""
    launch_us: float
    edge: float
    """How much longer a multiply-add takes in a tile of 128 x 128 than in a very large one."""
    tile_us: float
    """Time to begin and end a tile."""
    bandwidth: float
    """Share of the memory bandwidth that is reached."""
    cache: float
    """Bandwidth of the L2 cache divided by that of the memory."""
    reload: float
    """Share of the weights that each block of rows reads again if they exceed the L2 cache."""


Terms = tuple[KernelTerms, KernelTerms]
"""Those of the dense and of the sparse kernels."""


@lru_cache(maxsize=1)
def fitted_terms() -> dict[tuple[str, str], Terms]:
    """Measured GPU and precision -> the terms of the dense and of the sparse kernels."""
    terms: dict[tuple[str, str], list[KernelTerms]] = defaultdict(list)
    for row in table_rows("roofline.csv"):
        gpu, precision, _kind, *numbers = row.values()  # those of dense kernels come first
        terms[gpu, precision].append(KernelTerms(*map(float, numbers)))
    return {place: (dense, sparse) for place, (dense, sparse) in terms.items()}


def kernel_us(
    terms: KernelTerms, gpu: GpuKind, precision: str, shapes: Array, *, sparse: bool
) -> Array:
    """Microseconds of each product; `shapes` has a row of (rows, outputs, reduction) for each."""
    # 100 products and 35 kernels: `compute` starts as an array (100, 35), of which the least counts
    compute = _compute_us(terms, gpu, precision, shapes).min(axis=1)
    size = BYTES[precision]
    weights = shapes[:, 1:].prod(axis=1) * size * (KEPT[precision] if sparse else 1)
    memory = _moved_bytes(terms, gpu, shapes, weights, size) / _bytes_per_us(terms, gpu)
    times_us: Array = terms.launch_us + np.cbrt(compute**3 + memory**3)
    return times_us


def _compute_us(terms: KernelTerms, gpu: GpuKind, precision: str, shapes: Array) -> Array:
    """Microseconds of the multiply-adds of each product, with each of the kernels."""
    # 4096 x 4096 outputs in tiles of 128 x 128 are 1,024 tiles, 9.5 for each of A100's 108
    # multiprocessors: 10 waves where they run in step, 9.5 where none waits, 9.74 is taken
    rows, outputs, reduction = shapes.T[:, :, None]
    tile_rows, tile_outputs, splits = _KERNELS
    tiles_per_sm = np.ceil(rows / tile_rows) * np.ceil(outputs / tile_outputs) * splits / gpu.sms
    # between whole waves of tiles and perfect balance
    waves = (np.ceil(tiles_per_sm) + np.maximum(tiles_per_sm, 1)) / 2
    rate = dict(gpu.tflops)[precision] * 1e6 / gpu.sms * terms.rate
    slower = 1 + terms.edge * 64 * (1 / tile_rows + 1 / tile_outputs)
    operations = 2 * tile_rows * tile_outputs * np.maximum(reduction / splits, 32)
    partial_sums = np.where(splits > 1, (splits + 1) * 4 * rows * outputs, 0)
    tiles = waves * (operations * slower / rate + terms.tile_us)
    times_us: Array = tiles + partial_sums / (_bytes_per_us(terms, gpu) * terms.cache)
    return times_us


def _bytes_per_us(terms: KernelTerms, gpu: GpuKind) -> float:
    """The memory bandwidth that is reached."""
    return gpu.bandwidth_gb_s * 1e3 * terms.bandwidth


def _moved_bytes(
    terms: KernelTerms, gpu: GpuKind, shapes: Array, weights: Array, size: float
) -> Array:
    """All that is read and written once, and weights read again that leave the L2 cache.

    What the cache holds counts less. `weights` are their bytes, `size` those of an input. The steep
    powers are a smooth step: a loop over more than fits into a cache finds little in it. Blocks of
    128 rows that run at the same time share one pass over the weights.
    """
    # 512 rows, 4096 x 4096 in FP16: 33.5 MB of weights, 4.2 MB of inputs, 4.2 MB of outputs. A100's
    # 40 MB of L2 nearly hold them, so part of the bytes counts at the cache's speed
    rows, outputs, reduction = shapes.T
    total = weights + rows * reduction * size + rows * outputs * _OUTPUT_BYTES
    l2 = gpu.l2_mb * 2**20
    cached = 1 / (1 + (total / l2) ** 8)
    once = total * (1 - cached + cached / terms.cache)
    passes = np.maximum(rows / 128 - 1, 0) / np.maximum(1, 128 * gpu.sms / outputs)
    again = terms.reload * weights * passes / (1 + (l2 / weights) ** 10)
    moved: Array = once + again
    return moved

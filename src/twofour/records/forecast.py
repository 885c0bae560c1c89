"""The records of a forecast: GPUs from data sheets, and the predicted times of a product.

    GpuKind, (rows, outputs, reduction) -> ProductTimes

A gain is time over time: the dense kernel's divided by the sparse kernel's. Above 1 the sparse
kernel is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """What the data sheet of a GPU says; records/export.py has `Gpu`, the one in this machine."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names that users type or tools print."""
    compute_capability: tuple[int, int]
    sms: int
    """Streaming multiprocessors."""
    bandwidth_gb_s: float
    """Memory bandwidth in 10^9 bytes per second."""
    l2_mb: float
    """L2 cache in 2^20 bytes."""
    tflops: tuple[tuple[str, float], ...]
    """Peak dense rate, in 10^12 operations per second, for each precision the GPU has."""
    measured_as: str | None = None
    """The measured GPU whose kernel times are scaled to this one; None: no GPU is near enough."""
    source: str
    """Title of the document with these figures."""
    date: str
    """Date of the document."""


class Basis(str, Enum):
    """Where predicted kernel times come from, from the surest to the least sure."""

    MEASURED = "measured here"
    BETWEEN = "between measured shapes"
    BEYOND = "beyond them"
    SCALED = "scaled from another GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """Times of one product of inputs (rows x reduction) and weights (reduction x outputs).

    They are those of the fastest kernels of cuBLASLt (dense) and cuSPARSELt (sparse).
    """

    gpu: str
    precision: str
    """BF16, FP16, INT8, FP8 or FP4."""
    rows: int
    outputs: int
    reduction: int
    pattern: str
    dense_us: float
    dense_low_us: float
    dense_high_us: float
    """The dense time is between low and high in 80 % of cases."""
    sparse_us: float
    gain: float
    """Dense time divided by sparse time."""
    low: float
    high: float
    """The gain is between low and high in 80 % of cases."""
    basis: Basis
    note: str | None = None
    """Anything else a reader must know, such as why there are no sparse kernels."""

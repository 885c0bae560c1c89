"""The records of a forecast: GPUs from data sheets, and the predicted times of a product.

    GpuKind, (rows, outputs, reduction) -> ProductTimes

A gain is time over time: the dense kernel's divided by the sparse kernel's. Above 1 the sparse
kernel is faster.
"""

from __future__ import annotations

from enum import Enum

from twofour.records import frozen
from twofour.records.export import Gpu
from twofour.records.options import MathPrecision
from twofour.records.weights import SCHEMA_VERSION, Report


@frozen
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

    @property
    def as_gpu(self) -> Gpu:
        """One such GPU, for the rules."""
        capability = self.compute_capability
        return Gpu(name=self.name, compute_capability=capability, memory_bytes=0, driver=None)


WORTH = 1.05
"""Least gain that is worth pruning for."""
LIKELY = 1.2
"""Least bound of the gain at which most published engines gained more than 5 %."""


class Worth(str, Enum):
    """Whether pruning is worth it, by the bound of the gain (`ForecastCell.answer`)."""

    LIKELY = "likely"
    """At least 1.2."""
    TRY_FIRST = "try-first"
    """1.05 to 1.2: prune by magnitude, build and time before any training."""
    NO = "no"

    @property
    def in_words(self) -> str:
        """The verdict: "Likely worth it"."""
        return {"likely": "Likely worth it", "no": "Not worth it"}.get(
            self.value, "Try it before training"
        )


class Basis(str, Enum):
    """Where predicted kernel times come from, from the surest to the least sure."""

    MEASURED = "measured here"
    BETWEEN = "between measured shapes"
    BEYOND = "beyond them"
    SCALED = "scaled from another GPU"


@frozen
class ForecastGain:
    """Dense time divided by the time with sparse kernels where these are faster."""

    gain: float
    low: float
    high: float
    """The gain is between low and high in about 80 % of cases."""

    @property
    def in_words(self) -> str:
        """The gain and its interval: "1.52x (1.41 to 1.62)"."""
        return f"{self.gain:.2f}x ({self.low:.2f} to {self.high:.2f})"


@frozen
class EngineGain(ForecastGain):
    """The gain with measured times of a dense engine, and the forecast gain of each layer."""

    layers: int
    """Layers of the model that have a time."""
    products_us: float
    """Their measured times together."""
    rest_us: float
    """The measured times of everything else."""


@frozen
class ProductTimes(ForecastGain):
    """Inputs (rows x reduction) times weights (reduction x outputs), by the fastest kernels.

    These are of cuBLASLt (dense) and cuSPARSELt (sparse). The gain is dense time divided by sparse
    time, below 1 where the sparse kernel is slower.
    """

    gpu: str
    precision: str
    """BF16, FP16, INT8, FP8 or FP4."""
    rows: int
    outputs: int
    reduction: int
    dense_us: float
    sparse_us: float
    basis: Basis
    dense_low_us: float
    dense_high_us: float
    """The dense time is between low and high in 80 % of cases."""
    note: str | None = None
    """Anything else a reader must know, such as why there are no sparse kernels."""


@frozen
class LayerForecast(ProductTimes):
    """One layer of a cell; its times are those of all its products.

    `rows` is batch times positions, such as tokens or pixels of the output.
    """

    layer: str
    op: str
    count: int
    """Products of this size in the layer: matrices of a stack of weights, runs of a loop's body."""
    reason: str
    """The main reason of the rules against it once it is pruned; "": none."""
    can_run_sparse: bool | None
    """It is pruned, in a run or by default, and eligible by the rules; None: they do not know."""
    bound: str = ""
    """What its dense kernel waits for, such as "bound by memory"; "": the tensor cores."""

    @property
    def answer(self) -> str:
        """What it gains and why not more: "1.42x (1.30 to 1.55), bound by memory"."""
        if not self.can_run_sparse:
            return f"none is counted: {self.reason or 'it is not pruned'}"
        implicit = "counted as the product of its size, no convolution was measured"
        why = (self.bound, implicit if "Conv" in self.op else "", self.note or "")
        gain = self.in_words if self.gains else "TensorRT would keep the dense kernel: 1.00"
        return ", ".join((gain, *filter(None, why)))

    @property
    def gains(self) -> bool:
        """Whether its sparse kernel is forecast to be the faster one."""
        return self.can_run_sparse is True and self.gain > 1

    @property
    def saves_us(self) -> float:
        """What the sparse kernel saves where it is the faster one."""
        return self.dense_us - self.sparse_us if self.gains else 0.0

    @property
    def loses(self) -> bool:
        """Whether it can run sparse, and its dense kernel is forecast to be as fast or faster."""
        return self.can_run_sparse is True and self.gain <= 1


@frozen
class ForecastCell:
    """One GPU, precision and batch."""

    gpu: str
    precision: MathPrecision
    batch: int | None
    """None: the sizes of the file name no batch."""
    products: ForecastGain
    """Gain of the products and convolutions with weights alone."""
    model: ForecastGain
    """At most: everything else takes only the time that its bytes or multiply-adds need."""
    engine: EngineGain | None
    """None: no profile."""
    expected: ForecastGain
    """What published engines realised of the saving; with the engine's times where known."""
    verdict: Worth
    rest_us: float
    """Everything else, at least."""
    basis: Basis
    """The least sure basis of a layer that can run sparse."""
    layers: tuple[LayerForecast, ...]
    sentence: str
    """The answer in words."""
    why: str = ""
    """What the verdict rests on: published engines, or a cause; cells of one cause have one."""
    command: str = ""
    """What prunes, builds and times it, where that is to be tried first; "": it has no name."""

    @property
    def name(self) -> str:
        """GPU, precision and batch: "A100, float16, batch 8"."""
        batch = "" if self.batch is None else f", batch {self.batch}"
        return f"{self.gpu}, {self.precision.value}{batch}"

    @property
    def dense_us(self) -> float:
        """All products with weights, dense."""
        return sum(layer.dense_us for layer in self.layers)

    @property
    def answer(self) -> ForecastGain:
        """The gain of the whole: with the engine's times, else at most."""
        return self.engine or self.model

    @property
    def in_words(self) -> str:
        """The gain of the whole: "expected 1.10x (1.00 to 1.21), at most 1.22x"."""
        return f"expected {self.expected.in_words}, at most {self.answer.gain:.2f}x"

    @property
    def verdict_in_words(self) -> str:
        """The verdict, and how to try what is to be tried first."""
        if self.verdict is not Worth.TRY_FIRST:
            return self.verdict.in_words
        steps = "prune by magnitude, build and time it on that GPU"
        if self.command:
            steps += f": {self.command}"
        return f"{self.verdict.in_words} ({steps})"

    @property
    def is_worth(self) -> bool:
        """Whether the model may gain enough."""
        return self.verdict is not Worth.NO


@frozen(repr=False)
class Forecast(Report):
    """What pruning a model may gain: forecasts from kernels measured elsewhere, no measurement."""

    name: str
    """The model's."""
    cells: tuple[ForecastCell, ...]
    notes: tuple[str, ...]
    schema_version: int = SCHEMA_VERSION

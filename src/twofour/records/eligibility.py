"""Whether sparse math runs in each layer, why, and what could still be won."""

from __future__ import annotations

from collections import defaultdict
from enum import Enum

from twofour.records import frozen
from twofour.records.export import Gpu
from twofour.records.forecast import ForecastCell, LayerForecast
from twofour.records.weights import (
    SCHEMA_VERSION,
    NotCovered,
    OfFiles,
    Pattern,
    Reason,
    WeightedLayer,
)


class VerdictName(str, Enum):
    """What becomes of a layer's weight in the engine."""

    CHOSEN = "chosen"
    ELIGIBLE = "eligible"
    NOT_ELIGIBLE = "not-eligible"
    NOT_IN_ENGINE = "not-in-engine"
    UNKNOWN = "unknown"

    @property
    def is_usable(self) -> bool:
        """Whether the builder may take a sparse kernel: chosen, or eligible."""
        return self in (VerdictName.CHOSEN, VerdictName.ELIGIBLE)


class Evidence(str, Enum):
    """Whether a log or layer information shows the verdict, or the rules predict it."""

    MEASURED = "measured"
    PREDICTED = "predicted"


@frozen
class Verdict(WeightedLayer):
    """One layer: whether sparse math runs in it, why, and what to do."""

    engine_layer: str | None
    dtype: str
    """The type that the layer computes in."""
    pattern_holds: bool | None
    verdict: VerdictName
    evidence: Evidence | None
    """None only together with the verdict `unknown`."""
    predicted: VerdictName
    reasons: tuple[Reason, ...]
    remedy: str | None
    sparse_ms: float | None = None
    """Fastest sparse tactic that the builder timed."""
    dense_ms: float | None = None
    profile_ms: float | None = None
    """Mean time of its engine layer in the profile of the sparse engine."""
    required: bool | None = None
    """Whether the weight was to be pruned; False: left dense on purpose; None: nothing says."""
    refuted: Reason | None = None
    """Why the rules predicted `predicted`, where another verdict was measured."""


@frozen
class EligibilitySummary:
    """Totals over the layers of the report; weights are counted once each."""

    layers: int
    chosen: int
    eligible: int
    not_eligible: int
    not_in_engine: int
    unknown: int
    weights: int
    """The whole of every share: weights of the layers and those that no row names."""
    weights_eligible: int
    activation_products: int
    """MatMul and Einsum nodes without a constant operand: nothing to prune, not listed."""
    weights_not_covered: int = 0
    """Factors of matrix products that no row names (LSTM, ...): part of `weights`."""
    weights_elsewhere: int = 0
    """Embeddings, normalisation, biases: no factors of matrix products, no part of `weights`."""


@frozen
class ConfusionCell:
    """How many layers the rules judged one way and the evidence another (or the same)."""

    predicted: VerdictName
    measured: VerdictName
    layers: int


@frozen
class Disagreement:
    """One layer for which the rules predicted another verdict than the measured one."""

    layer: str
    predicted: VerdictName
    measured: VerdictName
    message: str


class ShareUnit(str, Enum):
    """What a share is a share of."""

    WEIGHTS = "weights"
    MULTIPLY_ADDS = "multiply-adds"
    MILLISECONDS = "milliseconds"
    FORECAST = "forecast milliseconds"


@frozen
class Share:
    """How much of the whole runs sparse, could, and never can; the parts add up to `total`."""

    unit: ShareUnit
    total: float
    runs_sparse: float
    eligible: float
    """Eligible and not known to run sparse."""
    never: float
    """Not eligible as the model is."""
    unknown: float
    """No verdict, or one engine layer made of layers with different verdicts."""
    other: float = 0.0
    """Milliseconds in engine layers without a weight that sparse math could use."""
    not_covered: float = 0.0
    """Factors of matrix products that no row names."""
    doubtful: float = 0.0
    """The part of `eligible` that runs dense or probably will."""


@frozen
class GainCeiling:
    """The most that sparse math could gain end to end (Amdahl's law), from one profile."""

    profile: str
    total_ms: float
    eligible_ms: float
    """Time in layers that are eligible and run dense."""
    weighted_ms: float
    """Time in all layers with a weight that run dense, whether eligible or not."""
    eligible_gain: float
    """total / (total - eligible / 2): 1.0 is no gain."""
    weighted_gain: float
    """The gain if every layer that has a weight were eligible."""
    assumption: str


@frozen
class EligibilityTotals:
    """What can still be gained, and how well the rules predicted what was measured."""

    confusion: tuple[ConfusionCell, ...]
    """Layers with measured evidence and a prediction; cells without a layer are left out."""
    disagreements: tuple[Disagreement, ...]
    shares: tuple[Share, ...]
    ceilings: tuple[GainCeiling, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be computed, and why."""


@frozen(repr=False)
class EligibilityReport(OfFiles):
    """eligibility.json."""

    model: str
    pattern: Pattern
    engine: str
    """The engine that ran, in words; each verdict says whether it is measured."""
    gpu: Gpu | None
    verdicts: tuple[Verdict, ...]
    summary: EligibilitySummary
    unmatched_engine_layers: tuple[str, ...] = ()
    not_covered: tuple[NotCovered, ...] = ()
    """What else the model stores, which no row names."""
    totals: EligibilityTotals | None = None
    """None in a report that is only predicted."""
    notes: tuple[str, ...] = ()
    """Facts about the whole report: contradictions in the log, a cache that hides timings."""
    not_evidence: str | None = None
    """Why the files about an engine prove nothing: a failed build, another model's log."""
    forecast: ForecastCell | None = None
    """What sparse kernels may gain on a GPU that is named; not measured."""
    schema_version: int = SCHEMA_VERSION

    @property
    def forecast_gains(self) -> dict[str, float]:
        """Name of a layer or engine layer -> forecast dense time / time with its faster kernels."""
        rows = {row.layer: row for row in self.forecast.layers} if self.forecast else {}
        there: dict[str, list[LayerForecast]] = defaultdict(list)
        for verdict in self.verdicts:
            if verdict.layer in rows:
                there[verdict.engine_layer or verdict.layer].append(rows[verdict.layer])
        there |= {name: [row] for name, row in rows.items()}
        gains = {}
        for name, layers in there.items():
            if any(layer.can_run_sparse for layer in layers):
                dense_us = sum(layer.dense_us for layer in layers)
                gains[name] = dense_us / (dense_us - sum(layer.saves_us for layer in layers))
        return gains

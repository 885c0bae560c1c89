"""Records of engine_evidence.py, in the order in which they are made: nets, layers, findings.

`None` is what nothing says, as in twofour.records.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from twofour.records.eligibility import EligibilityReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """One built net: what its folder's name and build say, and its eligibility report."""

    folder: str
    net: str
    precision: str | None
    batch: int | None
    """Batch, or rows of a matrix product; from the folder's name, as are net and precision."""
    gpu: str | None
    tensorrt: str | None
    input_shapes: str | None
    """Usual shapes of the optimization profile: "x=8x64x56x56"."""
    report: EligibilityReport
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A sub-folder that is no evidence, and why."""

    folder: str
    why: str


class Forecast(str, Enum):
    """What the rules said of a layer before the build."""

    ELIGIBLE = "eligible"
    NOT_ELIGIBLE = "not eligible"
    SILENT = "silent"
    """The rules leave it open."""


class Listing(str, Enum):
    """Whether the builder had the layer among those eligible for sparse math."""

    LISTED = "listed"
    NOT_LISTED = "not listed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer with a weight in one build: what was foretold and what was measured."""

    folder: str
    net: str
    precision: str | None
    batch: int | None
    gpu: str | None
    tensorrt: str | None
    input_shapes: str | None
    node: str
    op: str
    in_channels: int | None
    """C: the reduction length at one kernel position, all groups together."""
    out_channels: int | None
    """K."""
    kernel: tuple[int, ...]
    groups: int
    dtype: str
    forecast: Forecast
    listing: Listing
    why_unknown: str | None
    """Reason code of a layer whose listing is unknown."""
    chosen: bool | None
    """Whether a sparse kernel runs in it; None where it is not listed, and where nothing says."""
    best_dense_ms: float | None
    best_sparse_ms: float | None
    sparse_over_dense: float | None
    """Of these two times; None unless both were taken."""
    codes: tuple[str, ...]
    """Of the verdict's reasons."""
    source: str | None
    """The log line or layer information that the listing rests on."""
    rule: str | None
    """What the rules said, of a layer that they were wrong about."""

    @property
    def agrees(self) -> bool | None:
        """Whether forecast and listing are the same; None unless both are known."""
        if self.forecast is Forecast.SILENT or self.listing is Listing.UNKNOWN:
            return None
        return (self.forecast is Forecast.ELIGIBLE) == (self.listing is Listing.LISTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Layers with one forecast and one listing."""

    forecast: Forecast
    listing: Listing
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Confusion:
    """Layers by forecast and listing, all nine cells; of all layers, or of one kind of them."""

    precision: str | None
    dtype: str | None
    op: str | None
    cells: tuple[Cell, ...]
    agreeing: int
    comparable: int
    """Layers that have both a forecast and a known listing: what a share is a share of."""

    def layers(self, forecast: Forecast, listing: Listing) -> int:
        """Of one cell."""
        return next(c.layers for c in self.cells if (c.forecast, c.listing) == (forecast, listing))


class Answer(str, Enum):
    """What a fit comes to."""

    THRESHOLDS = "thresholds"
    ALWAYS = "always"
    NEVER = "never"
    ALL_CHOSEN = "all chosen"
    NONE_CHOSEN = "none chosen"
    TOO_FEW = "too few layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The thresholds that agree best with what was chosen, or why there are none."""

    answer: Answer
    least_in_channels: int | None
    """c0: chosen where C >= c0 and K >= k0; None unless the answer is thresholds."""
    least_out_channels: int | None
    """k0."""
    layers: int
    chosen: int
    sizes: int
    """Distinct pairs of C and K among the layers."""
    mixed_sizes: int
    """Pairs of C and K of which some layers were chosen and some not: no rule gets them right."""
    right: int | None = None
    """None where no rule was fitted."""
    wrong: int | None = None
    balanced_accuracy: float | None = None
    """Mean of the shares right among the chosen and among the others; 0.5 knows nothing."""
    equal_in_channels: tuple[int, int] | None = None
    """Smallest and largest c0 among all thresholds that agree as well."""
    equal_out_channels: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What layers have in common for which one rule is fitted."""

    op: str
    kernel: tuple[int, ...]
    dtype: str
    batch: int | None
    gpu: str | None
    tensorrt: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRange:
    """Smallest and largest sparse / dense time of the layers that have both."""

    low: float
    high: float
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFinding:
    """The evidence about one kind of listed layers."""

    kind: Kind
    listed: int
    chosen: int
    """Of the listed layers, those outside of the fit included."""
    not_known: int
    """Listed layers of which nothing says whether a sparse kernel was chosen."""
    skipped: int
    """Listed layers that run dense after tactics were skipped for memory: sizes are not why."""
    no_size: int
    """Listed layers without a known C and K."""
    no_sparse_tactic: int
    """Layers in the fit for which the builder timed kernels, none of them sparse."""
    fit: Fit
    in_use_right: int
    """Layers that the rule of thumb in use (SMALL_CHANNELS) has right."""
    ratios_chosen: RatioRange | None
    ratios_dense: RatioRange | None
    exceptions: tuple[Layer, ...]
    """Layers that the fitted rule has wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that the folder holds against the rules."""

    folder: str
    nets: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    unmatched_engine_layers: int
    """Names in engines or logs that lead to no layer here, over all nets."""
    layers: tuple[Layer, ...]
    confusion: Confusion
    by_kind: tuple[Confusion, ...]
    disagreements: tuple[Layer, ...]
    kinds: tuple[KindFinding, ...]
    notes: tuple[str, ...]

    @property
    def measured(self) -> int:
        """Layers whose listing is known."""
        return sum(layer.listing is not Listing.UNKNOWN for layer in self.layers)

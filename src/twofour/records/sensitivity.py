"""What each layer loses when it is pruned, what that saves, and which layers a budget leaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from twofour.records.eligibility import ShareUnit
from twofour.records.options import BudgetOptions, LossKind
from twofour.records.pruning import OutputError, PrunedModel
from twofour.records.weights import SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChange:
    """How far the outputs of the whole model move, over all its outputs of floats."""

    error: float
    """||y - y'||^2 / ||y||^2: 0 where nothing changes; the mean over the outputs."""
    cosine: float
    """Mean over the rows of the batch of the cosine to the dense row."""
    kl: float | None
    """Mean over the rows of KL(dense || pruned), softmax over the last axis, in nats; None where
    no output has a last axis of two or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found out about the model with some layers pruned."""

    outputs: OutputChange | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The user's own figures."""
    error: str | None = None
    """Why the rest is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """sensitivity/measured/<key>.json: kept, so that no measurement is made twice."""

    key: str
    measured: Measured
    watched: dict[str, str] = field(default_factory=dict)
    """Data file that the metric read -> its size and time of change."""
    seal: str = ""
    """sha256 over all of it: one that was changed since is measured again."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """A row of sensitivity.json: one layer, or those that are pruned together."""

    layer: str
    members: tuple[str, ...]
    """Every layer that is decided with it, itself among them."""
    globs: tuple[str, ...]
    """What leaves it dense: --exclude, or a line of a --layers file."""
    saves: float
    """By running sparse, in the unit of the result; 0 where TensorRT cannot."""
    alone: Measured | None
    """The model with this layer pruned and every other dense; None: not pruned at all."""
    output_error: OutputError | None = None
    """Of the layer itself, by what pruning found on the calibration data."""
    fisher: float | None = None
    """First-order estimate of `OutputChange.error` from one backward pass; torch models only."""
    loss: float | None = None
    """The figure that counts; below 0 where the model became better."""
    why_dense: str | None = None
    """Why no budget prunes it."""
    pruned: bool | None = None
    """What the budget decided; None: there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedSet:
    """Some layers pruned at once."""

    layers: int
    saves: float
    share: float
    """Of what everything pruned would save, 0 to 1."""
    predicted: float
    """Sum of what its layers lose alone."""
    loss: float | None
    """Measured on the whole set; None where the model could not be run."""
    measured: Measured
    dense: tuple[str, ...]
    """Layers that would save something and are left dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetResult:
    """The set that the budget allows."""

    asked: BudgetOptions
    chosen: PrunedSet
    trials: tuple[PrunedSet, ...]
    """What was measured on the way, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBack:
    """stages/taken-back.json: layers that were left dense once the whole model was measured."""

    chosen: str
    """sha256 of the sensitivity.json that they were taken from."""
    layers: int
    """So many, the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityResult(PrunedModel):
    """sensitivity.json."""

    loss: LossKind
    """What the losses are."""
    figure: str | None
    """Which of the user's figures, where it is that."""
    unit: ShareUnit
    """Of what is saved."""
    dense: Measured
    layers: tuple[LayerCost, ...]
    pareto: tuple[PrunedSet, ...]
    """From little to everything pruned; the last one is everything."""
    budget: BudgetResult | None = None
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

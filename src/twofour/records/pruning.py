"""What pruning did to each weight, and what was found in the files that were saved."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.records.options import Selection
from twofour.records.weights import (
    SCHEMA_VERSION,
    LayerWeight,
    NotCovered,
    OfFiles,
    Pattern,
    PatternCheck,
    Reason,
    Weight,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputError:
    """How far a layer's output moves: ||(W - W')X||^2 / ||WX||^2, 0 for what changes nothing.

    W is the weight that the method aims at, which makes up for what was pruned before.
    """

    calibration: float
    """On the inputs that the method saw."""
    held_out: float | None
    """On the tenth of the calibration data that it did not see; None: too little to hold out."""

    @property
    def judged(self) -> float:
        """What a layer is judged by: held out, where something was."""
        return self.calibration if self.held_out is None else self.held_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """How a weight was pruned with calibration data, or why without."""

    method: str | None = None
    """Which method pruned it; None: left dense."""
    output_error: OutputError | None = None
    """None without calibration data, and for a layer that no calibration input reached."""
    damping: float | None = None
    """Share of the mean diagonal added to the Gram matrix; None where none was used."""
    refit_steps: int = 0
    bias_corrected: bool = False
    note: str | None = None
    """What the user should know of how the method went in this layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedWeight(Solution):
    """A row of prune.json: one weight, what was done to it, and why not more."""

    weight: Weight
    pruned: bool
    zeros: int
    kept_magnitude: float | None
    """Sum of |w| after over sum of |w| before, 0 to 1; None where nothing was pruned."""
    reasons: tuple[Reason, ...]
    """Why it was left dense; for a pruned weight, what else the user should know."""
    held_before: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The data that the method saw."""

    source: str
    samples: int
    """Used, out of those that there were, as far as known."""
    held_out: int
    """Of these, kept from the method to judge it."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedModel:
    """Which model was pruned, to what and how."""

    source: str
    pattern: Pattern
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult(PrunedModel):
    """prune.json."""

    selection: Selection
    weights: tuple[PrunedWeight, ...]
    not_covered: tuple[NotCovered, ...] = ()
    """What else the model stores: neither pruned nor judged."""
    calibration: Calibration | None = None
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCheck(PatternCheck, LayerWeight):
    """A row of validate.json: one weight, read back from a saved file."""

    weight: str
    axis: int
    holds_along: int | None
    """Another axis along which the pattern does hold, looked for only where this one is broken."""
    required: bool
    """Whether this weight was to be pruned: a broken one fails the validation."""
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation(OfFiles):
    """validate.json: the rule applied to every weight of the files that were saved."""

    files: tuple[str, ...]
    pattern: Pattern
    checks: tuple[WeightCheck, ...]
    skipped: tuple[Weight, ...] = ()
    """Weights that cannot be checked (not constant, no axis), each with its reasons."""
    not_covered: tuple[NotCovered, ...] = ()
    """What else the files store; () for safetensors, which do not say what uses an array."""
    schema_version: int = SCHEMA_VERSION

    @property
    def broken(self) -> tuple[WeightCheck, ...]:
        """The rows that make the validation fail."""
        return tuple(c for c in self.checks if c.required and c.violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """What `twofour.load_weights` put into a module."""

    path: str
    keys: tuple[str, ...]
    """state_dict keys that were filled: all that the module has."""
    tied: dict[str, str]
    """Keys that share the tensor saved under another one."""
    made_permanent: tuple[str, ...]
    """Weights that the module computed (parametrizations, weight norm, masks), plain ones now."""

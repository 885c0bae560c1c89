"""What pruning did to each weight, and what was found in the files that were saved."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from twofour.records import Glance
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
    """How far a layer's output moves: ||(W - W')X||^2 / ||WX||^2, 0 for what changes nothing."""

    calibration: float
    """On the inputs that the method saw."""
    held_out: float | None
    """On the tenth of the calibration data that it did not see; None: too little to hold out."""

    @property
    def judged(self) -> float:
        """What a layer is judged by: held out, where something was."""
        return self.calibration if self.held_out is None else self.held_out


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedWeight:
    """A row of prune.json: one weight, what was done to it, and why not more."""

    weight: Weight
    pruned: bool
    zeros: int
    """Zeros in the saved array."""
    kept_magnitude: float | None
    """Sum of |w| after over sum of |w| before, 0 to 1; None where nothing was pruned."""
    reasons: tuple[Reason, ...]
    """Why it was left dense; for a pruned weight, what else the user should know."""
    held_before: bool = False
    """`pruned`, and the weight came in N:M: nothing was taken from it."""
    method: str | None = None
    """Which method pruned it; None: left dense."""
    output_error: OutputError | None = None
    """None without calibration data, and for a layer that no calibration input reached.

    As the method left it: repair, which is of the whole model, comes after."""
    damping: float | None = None
    """Share of the mean diagonal added to the Gram matrix; None where none was used."""
    refit_steps: int = 0
    bias_corrected: bool = False
    note: str | None = None
    """What the user should know of how the method went in this layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The data that the method saw."""

    source: str
    """As the user named it."""
    samples: int
    """Used, out of those that there were, as far as known."""
    held_out: int
    """Of these, kept from the method to judge it."""
    notes: tuple[str, ...] = ()


class RepairKind(str, Enum):
    """How the outputs of a pruned model are brought back; every zero stays a zero."""

    BATCH_NORM = "batch-norm"
    """Means and variances of the batch norms are estimated again on the pruned model."""
    MATCHING = "matching"
    """Each output channel gets the mean and deviation that it had in the dense model."""
    BOTH = "both"
    """Batch norms are estimated again, channels without one after them are matched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairTry:
    """One kind of repair, and how far the outputs were from the dense ones with it."""

    kind: RepairKind
    error: float | None
    """As `Repair.error_before`; None: not judged."""
    changed: int
    """Layers and batch norms that it changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What was tried after pruning to bring the model's outputs back, and what was taken."""

    error_before: float | None
    """Of the pruned model's float outputs on held-out samples: the squared distance to the dense
    ones over what these vary by around the mean of each column (class, place), the mean over the
    outputs; None: there was nothing to judge by."""
    tried: tuple[RepairTry, ...]
    taken: RepairKind | None
    error_after: float | None
    """Of the model as it was saved."""
    judged_on: int
    """Held-out samples."""
    why: str
    """Why this one was taken, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutedLayer:
    """What another order of its input channels does to one layer."""

    layer: str
    kept_before: float | None = None
    """Of the scores that N:M could keep of these channels, the share that it keeps, 0 to 1: |w|,
    with calibration data |w| times the size of the input. None: not judged."""
    kept_after: float | None = None
    error_before: float | None = None
    """Output error after the method; None without calibration data."""
    error_after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutedClass:
    """Channels any order of which gives the same model, and the order that was looked for."""

    channels: int
    layers: tuple[PermutedLayer, ...]
    """Pruned layers that sum over these channels."""
    efficacy: float
    """Of what magnitude loses and any order could save, the share that is saved (Pool and Yu
    2021)."""
    taken: bool
    reason: str
    """Why the order was taken, or not."""
    is_time_cut: bool
    """The search ended because its time was up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedChannels:
    """Input channels of a layer that cannot change places."""

    layer: str
    channels: int
    """How many; 0: not known."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """The order of channels in which the model was pruned; the unpruned model gives the same."""

    seconds: float
    """Allowed for the search."""
    classes: tuple[PermutedClass, ...]
    fixed: tuple[FixedChannels, ...]
    """Of the layers that were to be pruned."""
    refused: str | None = None
    """Why the channels stay in their order although a better one was found."""
    error_permuted: float | None = None
    """Of the outputs of the model pruned in this order, as `Repair.error_after`; None: not
    measured."""
    error_unpermuted: float | None = None
    """The same of the model pruned in the order that it came in."""

    @property
    def taken(self) -> int:
        """How many classes are in another order."""
        return sum(each.taken for each in self.classes)

    @property
    def is_time_cut(self) -> bool:
        """Whether more time might find better orders; another machine may find others."""
        return any(each.is_time_cut for each in self.classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutedModel:
    """stages/permute.json: the model that is pruned, where its channels were put in order."""

    about: Permutation
    orders: dict[str, tuple[int, ...]]
    """By key of its class: which channel comes to each slot; only what was taken."""
    file: str | None
    """The dense model in this order, in the run folder; None: nothing was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedModel:
    """Which model was pruned, to what and how."""

    source: str
    pattern: Pattern
    method: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PruneResult(Glance, PrunedModel):
    """prune.json."""

    selection: Selection
    weights: tuple[PrunedWeight, ...]
    not_covered: tuple[NotCovered, ...] = ()
    """What else the model stores: neither pruned nor judged."""
    calibration: Calibration | None = None
    """None: pruned without data."""
    repair: Repair | None = None
    """None: not asked for, or pruned without data."""
    permutation: Permutation | None = None
    """None: not asked for. Else the saved weights have the order that it says."""
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
    """Which of the validation's files it is from, where there are several."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
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

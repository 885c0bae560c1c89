"""A layer, the build it is for, and what a rule found about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from twofour.eligibility.network_types import Typing, typing_of
from twofour.records.build import Gpu
from twofour.records.eligibility import VerdictName
from twofour.records.pruning import WeightCheck
from twofour.records.weights import NotCovered, Pattern, Reason, Weight

LOWER_TYPES = frozenset({"FP16", "BF16", "INT8"})
"""Builder flags that let a weakly typed build run float32 layers in a type with sparse kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFacts:
    """What a log and layer information show of a build, so that no remedy asks for it again."""

    built: bool = False
    """An engine came out of it."""
    tensorrt_version: str | None = None
    compute_capability: tuple[int, int] | None = None
    types: frozenset[str] | None = None
    """Types allowed beside FP32, such as "FP16"; empty: FP32 alone; None: the log does not say."""
    strongly_typed: bool | None = None
    """The graph alone decides on types, whatever flags are given."""
    sparse_weights: bool | None = None
    """Whether sparse kernels were allowed and the weights left as they are."""
    verbose: bool = False
    """The log has messages that only a verbose logger gets."""
    kernels_named: bool = False
    """Layer information is at hand, with the names of kernels."""
    timing_cache: str | None = None
    """"global" (kept from earlier builds), "local" (this build's own), "none"; None: unsaid."""

    @property
    def is_strongly_typed(self) -> bool:
        """Whether flags for types are known to count for nothing."""
        typing = typing_of(version_numbers(self.tensorrt_version))
        return typing is Typing.STRONG or self.strongly_typed is True

    @property
    def lowers_float32(self) -> bool | None:
        """Whether float32 layers may run in a type that has sparse kernels; None: unsaid."""
        if self.is_strongly_typed:
            return False
        return None if self.types is None else bool(self.types & LOWER_TYPES)


NOTHING_KNOWN = BuildFacts()
"""Of a build that nobody has seen."""


def version_numbers(version: str | None) -> tuple[int, ...]:
    """`10.3.0` as numbers; () where it is not known or written otherwise."""
    parts = (version or "").split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContext:
    """Everything a report says beside the weights themselves."""

    model: str
    pattern: Pattern
    """What the model was pruned to; the verdicts are about 2:4, the pattern hardware has."""
    engine: str
    """Which engine ran, in words."""
    gpu: Gpu | None
    """None: not known, the rules of compute capability 8.0 and later are applied."""
    activation_products: int
    """MatMul nodes without a constant operand."""
    tensorrt_version: str | None = None
    """Of the builder the verdicts are about, like "8.6.1"; None: 10.3 or later is assumed."""
    build: BuildFacts = NOTHING_KNOWN
    not_covered: tuple[NotCovered, ...] = ()
    """What the model stores beside the weights of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer to be judged: its weight, the check of the saved array, and model and build."""

    weight: Weight
    check: WeightCheck | None
    context: ReportContext
    at_odds: tuple[Weight, ...] = ()
    """Layers that take the same array, and hold or are to hold the pattern along another axis."""

    @property
    def build(self) -> BuildFacts:
        """What is known of the build; version and GPU are the report's own where no log says."""
        context, known = self.context, self.context.build
        here = None if context.gpu is None else context.gpu.compute_capability
        return replace(
            known,
            tensorrt_version=known.tensorrt_version or context.tensorrt_version,
            compute_capability=known.compute_capability or here,
        )

    @property
    def is_broken(self) -> bool:
        """Whether the saved array is known to break the pattern along the layer's axis."""
        return self.check is not None and self.check.violations > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """What one rule says about one layer; the rest is in the row that names the rule."""

    message: str
    source: str | None = None
    """None: that of the row."""
    best: VerdictName | None = None
    """The best verdict the layer can have while this holds; None: that of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A reason and the best verdict that it leaves this layer."""

    reason: Reason
    best: VerdictName


Rule = Callable[[Case], "Remark | None"]

"""What a report is about: the model, the pattern it was pruned to, the engine and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.records import Gpu, NotCovered, Pattern


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
    not_covered: tuple[NotCovered, ...] = ()
    """What the model stores beside the weights of the report."""

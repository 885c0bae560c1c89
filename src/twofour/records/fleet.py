"""One model on every kind of accelerator of a cluster: what each built, measured and showed.

sparse.onnx, dense.onnx -> FleetKind (fleet/<kind>/kind.json) -> Fleet (fleet.json)
"""

from __future__ import annotations

from twofour.frozen import frozen
from twofour.records.eligibility import EligibilityReport
from twofour.records.forecast import ForecastGain
from twofour.records.latency import LatencyComparison
from twofour.records.run import BuildResult
from twofour.records.weights import SCHEMA_VERSION, Report


@frozen
class FleetKind:
    """fleet/<kind>/kind.json: one kind of accelerator; without `built`, `error` says why."""

    kind: str
    """Ray's accelerator type."""
    node: str | None = None
    built: BuildResult | None = None
    times: LatencyComparison | None = None
    """Times of all engines of the node where that was asked for, else those of the build."""
    report: EligibilityReport | None = None
    """A verdict per layer, in the same order on every kind."""
    forecast: ForecastGain | None = None
    """What the model gains at most on this GPU, by kernels measured elsewhere: no measurement."""
    expected: ForecastGain | None = None
    """The gain to expect, by the same kernels."""
    error: str | None = None
    hint: str | None = None


@frozen(repr=False)
class Fleet(Report):
    """fleet.json."""

    source: str
    """The model that the run folder was made from."""
    kinds: tuple[FleetKind, ...]
    schema_version: int = SCHEMA_VERSION

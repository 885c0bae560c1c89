"""Which engine a report is about, in words: builder, version and GPU, as far as the log says."""

from __future__ import annotations

from twofour.records.build import Gpu
from twofour.records.eligibility import EligibilityReport
from twofour.records.log import Build

NO_ENGINE = "no engine"
"""What a report says before anything about an engine is joined with it."""


def engine_words(predicted: EligibilityReport, build: Build | None) -> str:
    """The engine that log or layer information is of.

    A log that states no version leaves the report's own engine, where that is of TensorRT. The GPU
    is named unless the report has it apart.
    """
    known = predicted.engine.startswith("tensorrt")
    if build is None or (build.tensorrt_version is None and known):
        return predicted.engine if known else "tensorrt, version not stated"
    version = build.tensorrt_version
    words = "tensorrt, version not stated" if version is None else f"tensorrt {version}"
    where = "" if gpu_of(predicted, build) is not None else _where(build)
    return f"{words} ({build.producer.value}){where}"


def gpu_of(predicted: EligibilityReport, build: Build | None) -> Gpu | None:
    """The report's GPU, unless the log names another: it is not the engine's then."""
    gpu = predicted.gpu
    if gpu is None or build is None:
        return gpu
    other_name = build.gpu is not None and build.gpu != gpu.name
    capability = build.compute_capability
    other_kind = capability is not None and capability != gpu.compute_capability
    return None if other_name or other_kind else gpu


def _where(build: Build) -> str:
    capability = build.compute_capability
    if build.gpu is None and capability is None:
        return ""
    stated = "not stated" if capability is None else ".".join(map(str, capability))
    return f" on {build.gpu or 'a GPU'} (compute capability {stated})"

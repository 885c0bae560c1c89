"""Steps that a report may propose about a build, and how the build shows that a step was taken.

A remedy that concerns the build is made of these alone, so that it never asks for what was done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twofour.records.build import FIRST_WITH_SPARSE
from twofour.reports.context import BuildFacts, version_numbers

LISTS_PRODUCTS = (10, 3)
"""TensorRT from which logs list float products without exception (onnxsim's tests on Jetson)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to do about a build."""

    text: str
    taken: Callable[[BuildFacts], bool]
    """Whether the build shows that it was done, or that it could not have been."""


def still_to_do(build: BuildFacts, *steps: Step) -> tuple[str, ...]:
    """Texts of the steps that the build does not show as taken, in their order."""
    return tuple(step.text for step in steps if not step.taken(build))


ALLOW_SPARSE = Step(
    text="build with sparse weights allowed (trtexec --sparsity=enable, SPARSE_WEIGHTS)",
    taken=lambda b: b.sparse_weights is True,
)
VERBOSE_LOG = Step(
    text="rebuild with a verbose log (trtexec --verbose, or a logger of severity VERBOSE)",
    taken=lambda b: b.verbose,
)
NAME_KERNELS = Step(
    text="give layer information of detailed profiling verbosity (--layers)",
    taken=lambda b: b.kernels_named,
)
EXPORT_FLOAT16 = Step(
    text="export with --precision float16", taken=lambda b: b.lowers_float32 is True
)
ALLOW_FLOAT16 = Step(
    text="build with FP16 allowed (trtexec --fp16, TensorRT before 11)",
    taken=lambda b: b.is_strongly_typed or b.lowers_float32 is True,
)
NEWER_GPU = Step(
    text="run on a GPU of compute capability 8.0 or later (Ampere and newer)",
    taken=lambda b: (b.compute_capability or (0, 0)) >= FIRST_WITH_SPARSE,
)
NEWER_TENSORRT = Step(
    text="build with TensorRT 10.3 or later",
    taken=lambda b: version_numbers(b.tensorrt_version) >= LISTS_PRODUCTS,
)
BUILD_AND_READ = Step(text="build it and read the log", taken=lambda b: b.built)
BUILD_AND_TIME = Step(text="build it: only its timing tells", taken=lambda b: b.built)
DELETE_CACHE = Step(
    text="delete the timing cache and rebuild, to see the times",
    taken=lambda b: b.timing_cache in ("local", "none"),
)
NO_CACHE = Step(
    text="rebuild without a timing cache (trtexec --noBuilderCache), to see the times",
    taken=lambda b: b.timing_cache == "none",
)
STEPS = (
    *(ALLOW_SPARSE, VERBOSE_LOG, NAME_KERNELS, EXPORT_FLOAT16, ALLOW_FLOAT16),
    *(NEWER_GPU, NEWER_TENSORRT, BUILD_AND_READ, BUILD_AND_TIME, DELETE_CACHE, NO_CACHE),
)
"""All of them."""

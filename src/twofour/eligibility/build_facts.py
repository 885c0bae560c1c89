"""What a layer is judged by: the facts of its build, the context of the report, and its weight."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from twofour.errors import BadInputError
from twofour.records.export import Gpu
from twofour.records.log import Build, BuildOutcome, EngineLayer, SparsityFlag
from twofour.records.options import AllowedType
from twofour.records.weights import NotCovered, Pattern, Weight, WeightCheck


class Typing(str, Enum):
    """Where the builder takes the types of layers from."""

    WEAK = "weak"
    """Precision flags allow types; the graph's own are a suggestion."""
    STRONG_BY_FLAG = "strong by flag"
    STRONG = "strong"
    """There are no weakly typed networks any more (11.0 migration guide)."""


WEAK_IS_DEPRECATED = (10, 12)
DEPRECATED = (
    "weakly typed builds (--fp16, --int8, --bf16) are deprecated from TensorRT 10.12 on and gone "
    "in 11: --precision float16 or --quantize int8 writes the type into the file"
)


def typing_of(version: Sequence[int]) -> Typing | None:
    """Where a version in numbers takes types from; None for (), a version that is not known."""
    if not version:
        return None
    if version[0] < 10:
        return Typing.WEAK
    return Typing.STRONG_BY_FLAG if version[0] == 10 else Typing.STRONG


QUANTIZE_FIRST = (
    "write Q/DQ nodes into the file: twofour prune-export-build MODEL --quantize int8 "
    "--calibrate DATA (or onnxruntime.quantization, NVIDIA ModelOpt)"
)


def never_weakly_typed(version: str, allowed: AllowedType) -> BadInputError:
    """The error for a type that is to be allowed where types come from the graph alone."""
    return BadInputError(
        f"TensorRT {version} builds strongly typed networks only: --{allowed.value} ended with "
        "TensorRT 10",
        hint=QUANTIZE_FIRST
        if allowed is AllowedType.INT8
        else "write the type into the file: --precision float16",
    )


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
    """"global" (kept from earlier builds), "local" (this build's own), "none"; None: not said."""

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
"""The facts of a build that nobody has seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContext:
    """Everything a report says besides the weights themselves."""

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
    """The builder the verdicts are about, such as "8.6.1"; None: 10.3 or later is assumed."""
    build: BuildFacts = NOTHING_KNOWN
    not_covered: tuple[NotCovered, ...] = ()
    """What the model stores besides the weights of the report."""

    def completed(self) -> ReportContext:
        """The context with version and GPU among the build's facts where no log states them."""
        known, here = self.build, None if self.gpu is None else self.gpu.compute_capability
        build = replace(
            known,
            tensorrt_version=known.tensorrt_version or self.tensorrt_version,
            compute_capability=known.compute_capability or here,
        )
        return replace(self, build=build)


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
        """What is known of the build."""
        return self.context.build

    @property
    def is_broken(self) -> bool:
        """Whether the saved array is known to break the pattern along the layer's axis."""
        return self.check is not None and self.check.violations > 0


def version_numbers(version: str | None) -> tuple[int, ...]:
    """`10.3.0` as numbers; () where it is not known or written otherwise."""
    parts = (version or "").split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


# --- read from a log and layer information --------------------------------------------------------

_TYPE = re.compile(r"\b(FP16|BF16|INT8|FP8|INT4|FP4)\b")
_TYPE_OPTION = re.compile(r"(?<!\S)--(fp16|bf16|int8|fp8|int4|best)(?![\w-])")
_STRONG_OPTION = re.compile(r"(?<!\S)--(?:stronglyTyped|strongly-typed)(?![\w-])")
_WITHOUT_CACHE = re.compile(r"(?<!\S)--noBuilderCache(?![\w-])")
_CACHE_FILE = re.compile(r"(?<!\S)--(?:timingCacheFile|(?:load|save)-timing-cache)(?![\w-])")
_BEST = frozenset({"FP16", "INT8"})
"""What trtexec's --best allows at least (samples/common/sampleOptions.cpp)."""
_OF_KERNEL = (
    ("INT8", re.compile(r"(?:^|[_-])(?:i8|int8)|i8816|i16832|icudnn", re.IGNORECASE)),
    ("BF16", re.compile(r"bf16", re.IGNORECASE)),
    ("FP16", re.compile(r"(?:^|[_-])(?:f16|fp16|hgemm|h\d{3,5}|hmma)", re.IGNORECASE)),
)
"""Types by words of kernel names, such as `..._f16f16_f16f32_...` and `ampere_h16816cudnn_...`."""
_FLOAT32_KERNEL = re.compile(r"f32f32|[_-](?:scudnn|sgemm|s1688)|tf32", re.IGNORECASE)


def build_facts(build: Build | None, layers: Sequence[EngineLayer] | None) -> BuildFacts:
    """What is known of an engine's build from its log and its layers; either may be missing."""
    engine = layers or ()
    named = any(layer.kernel is not None for layer in engine)
    # only a build with sparse weights makes a sparse kernel; an engine without one proves nothing
    shown: bool | None = any(x.sparse or x.has_sparse_weights for x in engine) or None
    if build is None:
        types = _types_of_kernels(None, engine)
        return BuildFacts(
            built=layers is not None, types=types, sparse_weights=shown, kernels_named=named
        )
    # options and flags of a run that loads an engine are defaults that nothing was built with
    was_built = build.outcome is not BuildOutcome.LOADED and not build.engine_loaded
    if was_built and build.sparsity is not SparsityFlag.UNKNOWN:
        shown = build.sparsity is SparsityFlag.ENABLED
    elif was_built:
        shown = bool(build.sparsity_lines) or shown
    # the types that the log states or the command asked for; else those of the kernels' names
    stated = types_of_command(build).union(_TYPE.findall(build.precision or ""))
    types = _types_of_kernels(build if was_built else None, engine)
    if was_built and (stated or build.precision is not None):
        types = stated
    counts = build.counts
    is_verbose = counts.format_combinations or counts.timing_runners or build.fusions
    cache = build.timing_cache.mode
    if _WITHOUT_CACHE.search(build.command or ""):
        cache = "none"
    elif _CACHE_FILE.search(build.command or ""):
        cache = "global"
    return BuildFacts(
        built=build.outcome is not BuildOutcome.UNFINISHED and not build.made_no_engine,
        tensorrt_version=build.tensorrt_version,
        compute_capability=build.compute_capability,
        types=types,
        strongly_typed=_strongly_typed(build) if was_built else None,
        sparse_weights=shown,
        verbose=was_built and bool(is_verbose),
        kernels_named=named,
        timing_cache=cache,
    )


def types_of_command(build: Build) -> frozenset[str]:
    """The types beside FP32 that options of the command line allow."""
    asked = frozenset(option.upper() for option in _TYPE_OPTION.findall(build.command or ""))
    return (asked - {"BEST"}) | _BEST if "BEST" in asked else asked


def _types_of_kernels(build: Build | None, engine: Iterable[EngineLayer]) -> frozenset[str] | None:
    """Types of the arithmetic that kernels are named after; None where no name says one."""
    kernels = [layer.kernel for layer in engine]
    for tuned in build.layers if build is not None else ():
        kernels += (tactic.kernel for tactic in tuned.tactics)
    there = [kernel for kernel in kernels if kernel is not None]
    found = {name for name, words in _OF_KERNEL if any(map(words.search, there))}
    return frozenset(found) if found or any(map(_FLOAT32_KERNEL.search, there)) else None


def _strongly_typed(build: Build) -> bool | None:
    version = version_numbers(build.tensorrt_version)
    said = "strongly" in (build.precision or "").lower()
    if said or _STRONG_OPTION.search(build.command or ""):
        return True
    if (version and version < (9,)) or _TYPE.search(build.precision or ""):
        return False
    return None

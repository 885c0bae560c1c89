"""What a layer is judged by: its weight, the facts of its build, and what no longer runs sparse."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import replace
from enum import Enum

from twofour.errors import BadInputError
from twofour.records import frozen
from twofour.records.export import WITHOUT_SPARSE_INT8, Gpu
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
    "in 11: --precision float16 or --quantize int8 of `prune-export-build` writes the type into "
    "the file"
)


def typing_of(version: Sequence[int]) -> Typing | None:
    """Where a version in numbers takes types from; None for (), a version that is not known."""
    if not version:
        return None
    if version[0] < 10:
        return Typing.WEAK
    if version[0] == 10:
        return Typing.STRONG_BY_FLAG
    return Typing.STRONG


QUANTIZE_FIRST = (
    "write Q/DQ nodes into the file: twofour prune-export-build MODEL --quantize int8 "
    "--calibrate DATA (or onnxruntime.quantization, NVIDIA ModelOpt)"
)


def never_weakly_typed(version: str, allowed: AllowedType) -> BadInputError:
    """The error for a type that is to be allowed where types come from the graph alone."""
    hint = "write the type into the file: --precision float16"
    if allowed is AllowedType.INT8:
        hint = QUANTIZE_FIRST
    return BadInputError(
        f"TensorRT {version} builds strongly typed networks only: --{allowed.value} ended with "
        "TensorRT 10",
        hint=hint,
    )


LOWER_TYPES = frozenset({"FP16", "BF16", "INT8"})
"""Builder flags that let a weakly typed build run float32 layers in a type with sparse kernels."""


@frozen
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
    def is_float32_alone(self) -> bool:
        """Whether the build is known to have allowed no other type."""
        return not self.is_strongly_typed and self.types == frozenset()

    @property
    def lowers_float32(self) -> bool | None:
        """Whether float32 layers may run in a type that has sparse kernels; None: unsaid."""
        if self.is_strongly_typed:
            return False
        if self.types is None:
            return None
        return bool(self.types & LOWER_TYPES)


NOTHING_KNOWN = BuildFacts()
"""The facts of a build that nobody has seen."""


@frozen
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
    build: BuildFacts = NOTHING_KNOWN
    """A builder whose version is not known is taken for 10.3 or later."""
    not_covered: tuple[NotCovered, ...] = ()
    """What the model stores besides the weights of the report."""

    def completed(self) -> ReportContext:
        """The context with the GPU among the build's facts where no log states it."""
        if self.gpu is None or self.build.compute_capability is not None:
            return self
        build = replace(self.build, compute_capability=self.gpu.compute_capability)
        return replace(self, build=build)


@frozen
class Case:
    """One layer to be judged: its weight, the check of the saved array, and model and build."""

    weight: Weight
    check: WeightCheck | None
    context: ReportContext
    at_odds: tuple[Weight, ...]
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
    if not all(map(str.isdecimal, parts)):
        return ()
    return tuple(map(int, parts))


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
    kernels = [layer.kernel for layer in engine if layer.kernel is not None]
    # only a build with sparse weights makes a sparse kernel; an engine without one proves nothing
    has_sparse = any(layer.sparse or layer.has_sparse_weights for layer in engine)
    facts = BuildFacts(
        built=layers is not None,
        types=_types_of_kernels(kernels),
        sparse_weights=has_sparse or None,
        kernels_named=bool(kernels),
    )
    if build is None:
        return facts
    facts = replace(
        facts,
        built=build.outcome is not BuildOutcome.UNFINISHED and not build.made_no_engine,
        tensorrt_version=build.tensorrt_version,
        compute_capability=build.compute_capability,
        timing_cache=_cache_of(build),
    )
    if build.outcome is BuildOutcome.LOADED or build.engine_loaded:
        # its options and flags are defaults that nothing was built with
        return facts
    sparse_weights: bool | None = has_sparse or bool(build.sparsity_lines) or None
    if build.sparsity is not SparsityFlag.UNKNOWN:
        sparse_weights = build.sparsity is SparsityFlag.ENABLED
    counts = build.counts
    is_verbose = counts.format_combinations or counts.timing_runners or build.fusions
    return replace(
        facts,
        types=_types_of_build(build, kernels),
        strongly_typed=_strongly_typed(build),
        sparse_weights=sparse_weights,
        verbose=bool(is_verbose),
    )


def _cache_of(build: Build) -> str | None:
    if _WITHOUT_CACHE.search(build.command or ""):
        return "none"
    if _CACHE_FILE.search(build.command or ""):
        return "global"
    return build.timing_cache.mode


def types_of_command(build: Build) -> frozenset[str]:
    """The types beside FP32 that options of the command line allow."""
    asked = {option.upper() for option in _TYPE_OPTION.findall(build.command or "")}
    if "BEST" in asked:
        asked.remove("BEST")
        asked |= _BEST
    return frozenset(asked)


def _types_of_build(build: Build, kernels: Sequence[str]) -> frozenset[str] | None:
    """The types that the log states or the command asks for; else those of the kernels' names."""
    # `Precision: FP32+FP16`, or `trtexec --onnx=m.onnx --fp16` without such a line
    stated = types_of_command(build).union(_TYPE.findall(build.precision or ""))
    if stated or build.precision is not None:
        return stated
    timed = list(kernels)
    for layer in build.layers:
        timed += [tactic.kernel for tactic in layer.tactics if tactic.kernel is not None]
    return _types_of_kernels(timed)


def _types_of_kernels(kernels: Sequence[str]) -> frozenset[str] | None:
    """Types of the arithmetic that kernels are named after; None where no name says one."""
    types = frozenset(name for name, words in _OF_KERNEL if any(map(words.search, kernels)))
    if not types and not any(map(_FLOAT32_KERNEL.search, kernels)):
        return None
    return types


def _strongly_typed(build: Build) -> bool | None:
    precision = build.precision or ""
    if "strongly" in precision.lower() or _STRONG_OPTION.search(build.command or ""):
        return True
    if () < version_numbers(build.tensorrt_version) < (9,) or _TYPE.search(precision):
        return False
    return None


# --- where support for 2:4 is missing or ended ----------------------------------------------------


@frozen
class Support:
    """What a GPU, a version or a program does not run."""

    what: str
    since: str
    """Day or month of the release or the change that says it."""
    source: str

    @property
    def reference(self) -> str:
        """The date and the source."""
        return f"{self.since}, {self.source}"

    @property
    def in_words(self) -> str:
        """The fact with its date and its source."""
        return f"{self.what} ({self.reference})"


NO_SPARSE_INT8 = Support(
    what="NVIDIA's sparse library has no int8 kernels for compute capability 10.3",
    since="2026-09-30",
    source="cuSPARSELt 0.10.0, data types: https://pypi.org/project/nvidia-cusparselt-cu13/0.10.0/",
)
_OF_LIBRARY = "names of the kernels in libnvinfer: https://pypi.org/project/tensorrt/8.6.0/"
TYPES_OF_8 = Support(
    what="TensorRT 8.6 has sparse kernels for float16 and int8, and none for float32, TF32 and "
    "bfloat16",
    since="2023-03",
    source=_OF_LIBRARY,
)
AMPERE_PRODUCTS = Support(
    what="on compute capability 9.0, TensorRT 8.6 has sparse convolutions made for it and sparse "
    "matrix products made for Ampere: expect it to choose convolutions, and dense kernels for "
    "most products",
    since="2023-03",
    source=_OF_LIBRARY,
)
QDQ_ONLY = Support(
    what="TensorRT 11 quantises by Q/DQ pairs alone: --int8, --calib and calibrators ended with "
    "TensorRT 10",
    since="2026-06-02",
    source="migration guide: https://docs.nvidia.com/deeplearning/tensorrt/11.0.0/api/migration/"
    "tensorrt-10x-to-11x.html",
)
FORCE_DEPRECATED = Support(
    what="trtexec of TensorRT 10.0 and later calls --sparsity=force deprecated",
    since="2024-04",
    source="samples/common/sampleOptions.cpp of 10.0 and later: https://github.com/NVIDIA/TensorRT",
)
_DEPRECATES_FORCE = (10, 0)
"""The first TensorRT whose trtexec warns; that of 8.6 does not."""
NO_ENGINES_OF_LLM = Support(
    what="TensorRT-LLM builds no TensorRT engines any more: trtllm-build and its --weight_sparsity "
    "are gone",
    since="2026-07-02",
    source="https://nvidia.github.io/TensorRT-LLM/legacy/tensorrt-backend-removal.html",
)
NO_SPARSE_VLLM = Support(
    what="vLLM 0.19 and later refuse compressed 2:4 checkpoints (Sparse24) and have no sparse "
    "kernels for other ones",
    since="2026-03",
    source="https://github.com/vllm-project/vllm/pull/36799",
)
LLM_RUNTIMES = {"tensorrt-llm": NO_ENGINES_OF_LLM, "vllm": NO_SPARSE_VLLM}
"""What ended, for each package by its name on PyPI."""


def of_machine(gpu: Gpu | None, tensorrt: str | None, packages: Container[str]) -> tuple[str, ...]:
    """What concerns a machine with this GPU, TensorRT and these packages (names of PyPI)."""
    capability = None if gpu is None else gpu.compute_capability
    rows = []
    if _runs_amperes(tensorrt, capability):
        rows.append(AMPERE_PRODUCTS)
    if capability == WITHOUT_SPARSE_INT8:
        rows.append(NO_SPARSE_INT8)
    if typing_of(version_numbers(tensorrt)) is Typing.STRONG:
        rows.append(QDQ_ONLY)
    rows += [row for name, row in LLM_RUNTIMES.items() if name in packages]
    return tuple(row.in_words for row in rows)


def of_build(build: BuildFacts, *, forced: bool, has_int8: bool) -> tuple[str, ...]:
    """What concerns a build; `has_int8`: the file itself says which layers compute in int8."""
    rows = []
    if forced and version_numbers(build.tensorrt_version) >= _DEPRECATES_FORCE:
        rows.append(FORCE_DEPRECATED)
    by_calibration = "INT8" in (build.types or ()) and not has_int8
    if by_calibration and not build.is_strongly_typed:
        rows.append(QDQ_ONLY)
    if _runs_amperes(build.tensorrt_version, build.compute_capability):
        rows.append(AMPERE_PRODUCTS)
    return tuple(row.in_words for row in rows)


def _runs_amperes(tensorrt: str | None, capability: tuple[int, int] | None) -> bool:
    """Whether a TensorRT 8.6 runs on Hopper (H100, H200)."""
    return version_numbers(tensorrt)[:2] == (8, 6) and capability == (9, 0)

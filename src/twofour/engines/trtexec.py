"""trtexec: its releases and options, as files for another machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twofour.eligibility.network_types import Typing, never_weakly_typed, typing_of
from twofour.engines.tensorrt.network import Precisions
from twofour.errors import BadInputError
from twofour.records.build import TrtexecRounds, TrtexecVariant
from twofour.records.options import AllowedType, BuildOptions, ShapeProfile, Variant

ONNX = "sparse.onnx"
TIMING_CACHE = "timing.cache"
DENSE, SPARSE = Variant.DENSE, Variant.SPARSE
AGAIN = "-again"
"""Behind the name of a variant whose plan is timed a second time in the round."""
TIMES = "times"
ROUNDS = 12
"""Twice every order of three engines, and some rounds more than an interval needs."""
WARMUP_MS, DURATION_MS = 500, 1000
"""Of a timing pass. The GPU idles while the plan is loaded and its clocks fall, so the warm-up is
longer than trtexec's own 200 ms."""

_MIB = 1 << 20
_WORKSPACE_BYTES = 4096 * _MIB
_NOT_IN_SHAPES = ",'*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """TensorRT releases of one major version whose trtexec takes the same flags."""

    major: int
    first_minor: int
    last_minor: int | None
    """None: the newest of this major version."""
    typing: Typing
    layer_information: bool
    """--exportLayerInfo and --profilingVerbosity, from 8.2 on."""
    memory_pools: bool
    """--memPoolSize in place of --workspace, from 8.4 on."""
    optimization_level: bool
    """--builderOptimizationLevel, from 8.6 on."""
    steady_by_default: bool
    """CUDA graph, spin wait and no data transfers without being asked, from 11.0 on."""

    def __str__(self) -> str:
        if self.last_minor is None:
            newer = "" if self.first_minor == 0 else f" from {self.major}.{self.first_minor} on"
            return f"{self.major}.x{newer}"
        return f"{self.major}.{self.first_minor} or {self.major}.{self.last_minor}"

    def takes(self, minor: int) -> bool:
        """Whether a minor version of this major one is among them."""
        return self.first_minor <= minor and (self.last_minor is None or minor <= self.last_minor)


def _releases(major: int, first_minor: int, last_minor: int | None) -> Releases:
    version = (major, first_minor)
    typing = typing_of(version)
    assert typing is not None, "the version is known"
    return Releases(
        major=major,
        first_minor=first_minor,
        last_minor=last_minor,
        typing=typing,
        layer_information=version >= (8, 2),
        memory_pools=version >= (8, 4),
        optimization_level=version >= (8, 6),
        steady_by_default=version >= (11, 0),
    )


RELEASES = (
    _releases(8, 0, 1),
    _releases(8, 2, 3),
    _releases(8, 4, 5),
    _releases(8, 6, None),
    _releases(10, 0, None),
    _releases(11, 0, None),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtexecScript:
    """What a build script runs: one command for each engine, in order, then rounds of timing."""

    releases: Releases
    variants: tuple[TrtexecVariant, ...]
    rounds: TrtexecRounds


def releases_of(version: str) -> Releases:
    """The releases like "8.4", "10.3.0" or "11"; a major version alone stands for its newest.

    Raises BadInputError for anything else: sparsity starts with 8.0, and 9 never was for everyone.
    """
    match = re.fullmatch(r"\s*v?(\d{1,3})(?:\.(\d{1,4}))?(?:\.\d{1,6}){0,2}(?:\.x)?\s*", version)
    of_major = [r for r in RELEASES if match is not None and r.major == int(match[1])]
    if match is None or not of_major:
        raise BadInputError(
            f"--tensorrt-version: there is no build script for TensorRT {version!r}",
            hint="write it like 8.6, 10.3 or 11.0; trtexec says its version in its first line",
        )
    if match[2] is None:
        return of_major[-1]
    return next(r for r in of_major if r.takes(int(match[2])))


def trtexec_script(
    releases: Releases, options: BuildOptions, precisions: Precisions
) -> TrtexecScript:
    """Commands for a sparse and a dense engine from `sparse.onnx`, alike but for the sparsity.

    The sparse engine comes first and starts the timing cache: a builder does not log the times of
    tactics it finds there, and those of the sparse build are the evidence. Raises BadInputError
    for what these releases cannot do, and for input names that trtexec cannot be told.
    """
    same = (
        *_precision(releases, precisions, options.allow),
        *_shapes(options.shapes),
        *_limits(releases, options),
        f"--timingCacheFile={TIMING_CACHE}",
        "--verbose",
        *_measuring(releases, options),
    )
    return TrtexecScript(
        releases=releases,
        variants=tuple(_variant(releases, name, same) for name in (SPARSE, DENSE)),
        rounds=_rounds(releases, options),
    )


def _rounds(releases: Releases, options: BuildOptions) -> TrtexecRounds:
    """The engines one after the other, dense twice: what the two differ by is noise."""
    shapes = ",".join(f"{p.input}:{_dims(p.opt)}" for p in options.shapes)
    return TrtexecRounds(
        folder=TIMES,
        engines=(DENSE.value, SPARSE.value, DENSE + AGAIN),
        rounds=ROUNDS,
        arguments=(
            *((f"--shapes={shapes}",) if shapes else ()),
            f"--warmUp={WARMUP_MS}",
            f"--duration={DURATION_MS // 1000}",
            *_steady(releases),
        ),
        warmup_ms=WARMUP_MS,
        duration_ms=DURATION_MS,
    )


def _variant(releases: Releases, name: Variant, same: Sequence[str]) -> TrtexecVariant:
    layers = f"{name}.layers.json" if releases.layer_information else None
    plan, profile, times = f"{name}.plan", f"{name}.profile.json", f"{name}.times.json"
    arguments = (
        f"--onnx={ONNX}",
        f"--saveEngine={plan}",
        f"--sparsity={'enable' if name == SPARSE else 'disable'}",
        *same,
        *(("--profilingVerbosity=detailed", f"--exportLayerInfo={layers}") if layers else ()),
        "--dumpProfile",
        f"--exportProfile={profile}",
        f"--exportTimes={times}",
    )
    return TrtexecVariant(
        variant=name,
        sparse_weights=name == SPARSE,
        arguments=arguments,
        plan=plan,
        log=f"{name}.log",
        layers=layers,
        profile=profile,
        times=times,
    )


def _precision(
    releases: Releases, precisions: Precisions, allow: Sequence[AllowedType]
) -> Iterator[str]:
    """A weakly typed builder runs float32 unless it is allowed the types of the graph."""
    if allow and releases.typing is Typing.STRONG:
        raise never_weakly_typed(str(releases), allow[0])
    if releases.typing is Typing.STRONG_BY_FLAG and not allow:
        yield "--stronglyTyped"
    if releases.typing is not Typing.WEAK and not allow:
        return
    bfloat16 = precisions.bfloat16 or AllowedType.BF16 in allow
    if bfloat16 and releases.typing is Typing.WEAK:
        raise BadInputError(
            f"{'the model uses' if precisions.bfloat16 else '--bf16 allows'} bfloat16, which "
            f"TensorRT {releases} does not have",
            hint="export it with --precision float16, or build with TensorRT 10 or newer",
        )
    if precisions.float16 or AllowedType.FP16 in allow:
        yield "--fp16"
    if precisions.int8 or AllowedType.INT8 in allow:
        yield "--int8"
    if bfloat16:
        yield "--bf16"


def _shapes(profiles: Sequence[ShapeProfile]) -> Iterator[str]:
    """The optimization profile; trtexec times at its opt shapes."""
    for profile in profiles:
        if found := sorted(set(profile.input) & set(_NOT_IN_SHAPES)):
            raise BadInputError(
                f"trtexec cannot be told shapes of input {profile.input!r}: its name holds "
                f"{' and '.join(found)}",
                hint="rename the input, or export the model with fixed shapes",
            )
    if profiles:
        yield "--minShapes=" + ",".join(f"{p.input}:{_dims(p.min)}" for p in profiles)
        yield "--optShapes=" + ",".join(f"{p.input}:{_dims(p.opt)}" for p in profiles)
        yield "--maxShapes=" + ",".join(f"{p.input}:{_dims(p.max)}" for p in profiles)


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _limits(releases: Releases, options: BuildOptions) -> Iterator[str]:
    """Before 8.4 trtexec gives tactics 16 MiB of workspace unless told; since, all there is."""
    workspace = options.workspace_bytes
    if releases.memory_pools and workspace is not None:
        yield f"--memPoolSize=workspace:{max(1, workspace // _MIB)}"
    if not releases.memory_pools:
        yield f"--workspace={max(1, (workspace or _WORKSPACE_BYTES) // _MIB)}"
    if not options.tf32:
        yield "--noTF32"
    if options.optimization_level is None:
        return
    if not releases.optimization_level:
        raise BadInputError(
            f"trtexec of TensorRT {releases} has no builder optimization level",
            hint="leave --opt-level out, or name a --tensorrt-version from 8.6 on",
        )
    yield f"--builderOptimizationLevel={options.optimization_level}"


def _measuring(releases: Releases, options: BuildOptions) -> Iterator[str]:
    """The profile comes after the timed run: a profiler in it would slow it down."""
    yield f"--iterations={options.iterations}"
    yield from _steady(releases)
    if not releases.steady_by_default:
        yield "--separateProfileRun"


def _steady(releases: Releases) -> tuple[str, ...]:
    """Time the engine alone, on every release as trtexec 11 does unasked."""
    if releases.steady_by_default:
        return ()
    return ("--useCudaGraph", "--useSpinWait", "--noDataTransfers")

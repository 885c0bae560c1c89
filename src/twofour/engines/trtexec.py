"""trtexec on another machine: its releases and options, and the build.sh that runs it there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import permutations

from twofour.eligibility.build_facts import Typing, never_weakly_typed, typing_of
from twofour.engines.tensorrt.bindings import Precisions
from twofour.errors import BadInputError
from twofour.records import frozen
from twofour.records.export import TrtexecRounds, TrtexecVariant
from twofour.records.options import AllowedType, BuildOptions, ShapeProfile, Variant
from twofour.words import MIB

ONNX = "sparse.onnx"
TIMING_CACHE = "timing.cache"
DENSE, SPARSE = Variant.DENSE, Variant.SPARSE
AGAIN = "-again"
"""Behind the name of a variant whose plan is timed a second time in the round."""
TIMES = "times"
ROUNDS = 12
"""Twice every order of three engines, and some rounds more than an interval needs."""
WARMUP_MS, DURATION_MS = 500, 1000
"""Lengths in a timing pass. The GPU idles while the plan is loaded and its clocks fall, so the
warm-up is longer than trtexec's own 200 ms."""


@frozen
class Releases:
    """TensorRT releases of one major version whose trtexec takes the same flags."""

    first: tuple[int, int]
    last_minor: int | None = None
    """None: the newest of this major version."""

    def __str__(self) -> str:
        major, minor = self.first
        if self.last_minor is None:
            return f"{major}.x" + ("" if minor == 0 else f" from {major}.{minor} on")
        return f"{major}.{minor} or {major}.{self.last_minor}"

    @property
    def typing(self) -> Typing:
        """How these releases choose the types of layers."""
        typing = typing_of(self.first)
        assert typing is not None, "the version is known"
        return typing

    def takes(self, minor: int) -> bool:
        """Whether a minor version of this major one is among them."""
        return self.first[1] <= minor and (self.last_minor is None or minor <= self.last_minor)


RELEASES = (
    Releases(first=(8, 4), last_minor=5),
    Releases(first=(8, 6)),
    Releases(first=(10, 0)),
    Releases(first=(11, 0)),
)


def releases_of(version: str) -> Releases:
    """The releases like "8.4", "10.3.0" or "11" (the newest); raises BadInputError for others."""
    match = re.fullmatch(r"\s*v?(\d{1,3})(?:\.(\d{1,4}))?(?:\.\d{1,6}){0,2}(?:\.x)?\s*", version)
    alike: list[Releases] = []
    if match is not None:
        alike = [r for r in RELEASES if r.first[0] == int(match[1])]
        if match[2] is not None:
            alike = [r for r in alike if r.takes(int(match[2]))]
    if not alike:
        raise BadInputError(
            f"--tensorrt-version: there is no build script for TensorRT {version!r}",
            hint="write it like 8.6, 10.3 or 11.0; trtexec says its version in its first line",
        )
    return alike[-1]


def trtexec_commands(
    releases: Releases, options: BuildOptions, precisions: Precisions, dense: str = ONNX
) -> tuple[tuple[TrtexecVariant, ...], TrtexecRounds]:
    """Commands for a sparse engine of `sparse.onnx` and a dense one of the file `dense`.

    The sparse engine comes first and starts the timing cache: a builder does not log the times of
    tactics it finds there, and those of the sparse build are the evidence. Raises BadInputError
    for what these releases cannot do.
    """
    pool = options.workspace_bytes
    level = options.optimization_level
    if level is not None and releases.first < (8, 6):
        raise BadInputError(
            f"trtexec of TensorRT {releases} has no builder optimization level",
            hint="leave --opt-level out, or name a --tensorrt-version from 8.6 on",
        )
    same = (
        *_precision(releases, precisions, options.allow),
        # trtexec times at the opt shapes
        *(f"--{end}Shapes={shapes}" for end, shapes in shapes_in_words(options.shapes)),
        *((f"--memPoolSize=workspace:{max(1, pool // MIB)}",) if pool is not None else ()),
        *(() if options.tf32 else ("--noTF32",)),
        *(() if level is None else (f"--builderOptimizationLevel={level}",)),
        f"--timingCacheFile={TIMING_CACHE}",
        "--verbose",
        f"--iterations={options.iterations}",
        *_steady(releases),
        # the profile comes after the timed run: a profiler in it would slow it down
        *(("--separateProfileRun",) if _steady(releases) else ()),
    )
    variants = _variant(SPARSE, ONNX, same), _variant(DENSE, dense, same)
    return variants, _rounds(releases, options)


def _rounds(releases: Releases, options: BuildOptions) -> TrtexecRounds:
    """The engines one after the other, dense twice: what the two differ by is noise."""
    shapes = dict(shapes_in_words(options.shapes)).get("opt")
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


def _variant(name: Variant, onnx: str, same: Sequence[str]) -> TrtexecVariant:
    plan = f"{name}.plan"
    layers = f"{name}.layers.json"
    profile = f"{name}.profile.json"
    arguments = (
        f"--onnx={onnx}",
        f"--saveEngine={plan}",
        f"--sparsity={'enable' if name == SPARSE else 'disable'}",
        *same,
        "--profilingVerbosity=detailed",
        f"--exportLayerInfo={layers}",
        "--dumpProfile",
        f"--exportProfile={profile}",
    )
    return TrtexecVariant(
        variant=name,
        onnx=onnx,
        sparse_weights=name == SPARSE,
        arguments=arguments,
        plan=plan,
        log=f"{name}.log",
        layers=layers,
        profile=profile,
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


def shapes_in_words(profiles: Sequence[ShapeProfile]) -> Iterator[tuple[str, str]]:
    """min, opt and max with their shapes, such as ("min", "x:1x3x224x224,mask:1x128")."""
    for end in ("min", "opt", "max") if profiles else ():
        shapes = []
        for profile in profiles:
            dims = "x".join(map(str, getattr(profile, end)))
            shapes.append(f"{profile.input}:{dims}")
        yield end, ",".join(shapes)


def _steady(releases: Releases) -> tuple[str, ...]:
    """Time the engine alone, on every release as trtexec does unasked from 11.0 on."""
    if releases.first >= (11, 0):
        return ()
    return ("--useCudaGraph", "--useSpinWait", "--noDataTransfers")


_HEAD = r"""#!/bin/sh
# Builds, times and profiles a sparse and a dense TensorRT engine from {files}.
# For trtexec of TensorRT {releases}.
#
#   sh build.sh [more arguments for every trtexec]
#
# TRTEXEC names the program; without it: PATH, then /usr/src/tensorrt/bin/trtexec.
# ROUNDS is how often the engines are timed in turn once both are built: 0 to 999, else {rounds}.
# A timing pass that fails is said and left out; the engines are there, so the exit code is 0.
# Exit codes: 0 done, 2 another version of trtexec, no model, or ROUNDS is no such number,
# 3 no trtexec, 5 an engine failed (then nothing is timed in rounds).
set -eu

stop() {{
    status=$1
    shift
    printf 'build.sh: %s\n' "$@" >&2
    exit "$status"
}}

rounds=${{ROUNDS:-{rounds}}}
case $rounds in
    *[!0-9]* | 0?* | ????*) stop 2 "ROUNDS=$rounds is not a number from 0 to 999" ;;
esac

trtexec=${{TRTEXEC:-}}
if [ -z "$trtexec" ]; then
    trtexec=$(command -v trtexec) || trtexec=/usr/src/tensorrt/bin/trtexec
fi
case $trtexec in
    /*) ;;
    */*) trtexec=$PWD/$trtexec ;;
esac
command -v "$trtexec" >/dev/null 2>&1 ||
    stop 3 "there is no $trtexec" "name it with TRTEXEC=/path/to/trtexec"

CDPATH='' cd -- "$(dirname -- "$0")"
for onnx in {files}; do
    [ -f "$onnx" ] || stop 2 "$PWD holds no $onnx: copy the whole folder"
done

# every trtexec since 8.0 starts with [TensorRT v<number>]: 8510 is 8.5.10, 100300 is 10.3.0
help=$("$trtexec" --help 2>&1) || true
version=$(printf '%s\n' "$help" |
    LC_ALL=C sed -n 's/.*\[TensorRT v\([1-9][0-9]\{{3,\}}\)\].*/\1/p' | sed -n 1p)
[ -n "$version" ] ||
    stop 2 "$trtexec does not say its version" "$(printf '%s\n' "$help" | sed -n 1,3p)"
if [ "$version" -ge 100000 ]; then
    major=$((version / 10000)) minor=$((version / 100 % 100))
else
    major=$((version / 1000)) minor=$((version / 100 % 10))
fi
if {mismatch}; then
    stop 2 "$trtexec is of TensorRT $major.$minor, these commands are for {releases}" \
        "make the folder again: twofour build ... --tensorrt-version $major.$minor"
fi
printf 'TensorRT %s.%s, %s\n' "$major" "$minor" "$trtexec"

failed=
rm -f failed.txt
build() {{
    variant=$1
    shift
    printf '%s: running, its log is %s.log\n' "$variant" "$variant"
    rm -f "$variant.plan" "$variant.layers.json" "$variant.profile.json"
    if "$trtexec" "$@" >"$variant.log" 2>&1 </dev/null && [ -s "$variant.plan" ]; then
        printf '%s: done\n' "$variant"
        return
    fi
    failed="$failed $variant"
    printf '%s\n' "$variant" >>failed.txt
    printf '%s: failed\n' "$variant" >&2
    LC_ALL=C grep -F '[E]' "$variant.log" | sed -n '1,5s/^/    /p' >&2
}}

# a fresh cache: a builder does not log the times of tactics that it finds there
rm -f {cache}
# times of engines that are built anew
rm -f {times}/*.json {times}/*.log
"""

_FAILED = r"""
[ -z "$failed" ] || stop 5 "failed:$failed" "the logs say why; what was left can be reported"
"""

_TIMING_HEAD = r"""
# one pass: ENGINE ROUND; "{again}" names the plan a second time
missing=0
time_engine() {{
    engine=$1 file={times}/$1.$2
    shift 2
"""

_TIMING_TAIL = r"""
    then
        return
    fi
    missing=$((missing + 1))
    rm -f "$file.json"
    printf '%s: timing failed, %s.log says why\n' "$engine" "$file" >&2
}}

if [ "$rounds" -gt 0 ]; then
    mkdir -p {times}
    printf 'timing %s rounds of {passes} passes: at least %s s, and loading %s plans' \
        "$rounds" "$((rounds * {round_ms} / 1000))" "$((rounds * {passes}))"
    printf ' (ROUNDS=n is another number)\n'
fi
round=0
while [ "$round" -lt "$rounds" ]; do
    round=$((round + 1))
    printf 'round %s of %s\n' "$round" "$rounds"
    # in six rounds each engine runs in each place and behind each other one equally often
    case $((round % 6)) in
{orders}
    esac
    for engine in $order; do
        time_engine "$engine" "$round" "$@"
    done
done
[ "$missing" -eq 0 ] ||
    printf 'timing passes that failed: %s; their rounds cannot be compared\n' "$missing" >&2
"""

_END = r"""
printf 'copy this folder back, then: twofour report FOLDER\n'
printf 'and for the times: twofour compare FOLDER\n'
"""


def script_text(
    releases: Releases, variants: Sequence[TrtexecVariant], rounds: TrtexecRounds
) -> str:
    """build.sh; everything that comes from the model is quoted, and only in the arguments."""
    major, minor = releases.first
    last = releases.last_minor
    tests = [f'[ "$major" -ne {major} ]']
    if minor > 0:
        tests.append(f'[ "$minor" -lt {minor} ]')
    if last is not None:
        tests.append(f'[ "$minor" -gt {last} ]')
    head = _HEAD.format(
        files=" ".join(dict.fromkeys(variant.onnx for variant in variants)),
        releases=releases,
        mismatch=" || ".join(tests),
        cache=TIMING_CACHE,
        rounds=rounds.rounds,
        times=rounds.folder,
    )
    # one argument a line, for whoever reads or copies it; the script's own arguments come last
    parts = [head]
    for variant in variants:
        words = (f"build {variant.variant}", *map(shlex.quote, variant.arguments), '"$@"')
        parts.append("\n" + " \\\n    ".join(words) + "\n")
    return "".join((*parts, _FAILED, _timing(rounds), _END))


def _timing(rounds: TrtexecRounds) -> str:
    """The rounds; a pass that leaves no times has failed, whatever trtexec's exit code is."""
    words = (
        f'if "$trtexec" --loadEngine="${{engine%{AGAIN}}}.plan"',
        *map(shlex.quote, rounds.arguments),
        '--exportTimes="$file.json"',
        '"$@" >"$file.log" 2>&1 </dev/null && [ -s "$file.json" ]',
    )
    passes = len(rounds.engines)
    # a branch for every order of the engines; their names are ours, so none needs quotes:
    # 0) order="dense sparse dense-again" ;;
    orders = []
    for number, order in enumerate(permutations(rounds.engines)):
        orders.append(f'        {number}) order="{" ".join(order)}" ;;')  # longer
    tail = _TIMING_TAIL.format(
        times=rounds.folder,
        passes=passes,
        round_ms=passes * (rounds.warmup_ms + rounds.duration_ms),
        orders="\n".join(orders),
    )
    head = _TIMING_HEAD.format(times=rounds.folder, again=AGAIN)
    return head + "    " + " \\\n        ".join(words) + tail

"""The build.sh that runs trtexec elsewhere, and the times it brings back."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

from twofour.engines.trtexec import AGAIN, ONNX, TIMING_CACHE, Releases, TrtexecScript
from twofour.errors import BadInputError
from twofour.records.build import TrtexecRounds, TrtexecVariant

WARMUP_MS = 200
"""trtexec's --warmUp where it is not given (defaultWarmUp in sampleOptions.h)."""


def read_times(path: Path, *, warmup_ms: float = WARMUP_MS) -> tuple[float, ...]:
    """Milliseconds that the GPU computed for each run behind the warm-up, in order.

    Older releases export the warm-up too; as in trtexec's own summary, the first run that starts
    behind it is the first to count. Raises BadInputError for a file that cannot be read or holds no
    time.
    """
    rows = _rows(path)
    first = next((n for n, row in enumerate(rows) if _started(row) >= warmup_ms), len(rows))
    times = tuple(ms for row in rows[first:] if (ms := _number(row, "computeMs")) is not None)
    if not times or min(times) <= 0:
        raise BadInputError(
            f"no times in {path}", hint="trtexec --exportTimes=FILE writes them; run it again"
        )
    return times


def _rows(path: Path) -> list[dict[str, object]]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is damaged: {error}", hint="copy or make it again") from error
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _started(row: dict[str, object]) -> float:
    """From the beginning of the warm-up; a row that does not say is counted as behind it."""
    started = _number(row, "startComputeMs")
    return math.inf if started is None else started


def _number(row: dict[str, object], key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


_HEAD = r"""#!/bin/sh
# Builds, times and profiles a sparse and a dense TensorRT engine from {onnx}.
# For trtexec of TensorRT {releases}.
#
#   sh build.sh [more arguments for every trtexec]
#
# TRTEXEC names the program; without it: PATH, then /usr/src/tensorrt/bin/trtexec.
# ROUNDS is how often the engines are timed in turn once both are built: 0 to 999, else {rounds}.
# A timing pass that fails is said and left out; the engines are there, so the exit code is 0.
# Exit codes: 0 done, 2 another version of trtexec, no {onnx}, or ROUNDS is no such number,
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
[ -f {onnx} ] || stop 2 "$PWD holds no {onnx}: copy the whole folder"

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
    rm -f "$variant.plan" "$variant.layers.json" "$variant.profile.json" "$variant.times.json"
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


def script_text(script: TrtexecScript) -> str:
    """build.sh; everything that comes from the model is quoted, and only in the arguments."""
    head = _HEAD.format(
        onnx=ONNX,
        releases=script.releases,
        mismatch=_mismatch(script.releases),
        cache=TIMING_CACHE,
        rounds=script.rounds.rounds,
        times=script.rounds.folder,
    )
    builds = (f"\n{_call(variant)}\n" for variant in script.variants)
    return "".join((head, *builds, _FAILED, _timing(script.rounds), _END))


def _mismatch(releases: Releases) -> str:
    tests = [f'[ "$major" -ne {releases.major} ]']
    if releases.first_minor > 0:
        tests.append(f'[ "$minor" -lt {releases.first_minor} ]')
    if releases.last_minor is not None:
        tests.append(f'[ "$minor" -gt {releases.last_minor} ]')
    return " || ".join(tests)


def _call(variant: TrtexecVariant) -> str:
    """One argument a line, for whoever reads or copies it; the script's own arguments come last."""
    words = (f"build {variant.variant}", *map(shlex.quote, variant.arguments), '"$@"')
    return " \\\n    ".join(words)


def _timing(rounds: TrtexecRounds) -> str:
    """The rounds; a pass that leaves no times has failed, whatever trtexec's exit code is."""
    words = (
        f'if "$trtexec" --loadEngine="${{engine%{AGAIN}}}.plan"',
        *map(shlex.quote, rounds.arguments),
        '--exportTimes="$file.json"',
        '"$@" >"$file.log" 2>&1 </dev/null && [ -s "$file.json" ]',
    )
    passes = len(rounds.engines)
    tail = _TIMING_TAIL.format(
        times=rounds.folder,
        passes=passes,
        round_ms=passes * (rounds.warmup_ms + rounds.duration_ms),
        orders=_orders(rounds.engines),
    )
    head = _TIMING_HEAD.format(times=rounds.folder, again=AGAIN)
    return head + "    " + " \\\n        ".join(words) + tail


def _orders(engines: Sequence[str]) -> str:
    """A branch for every order of the engines; their names are ours, so none needs quotes."""
    orders = (" ".join(order) for order in permutations(engines))
    return "\n".join(f'        {n}) order="{order}" ;;' for n, order in enumerate(orders))

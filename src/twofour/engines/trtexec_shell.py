"""The text of build.sh: a POSIX shell script around the trtexec commands."""

from __future__ import annotations

import shlex

from twofour.engines.trtexec import ONNX, TIMING_CACHE, Releases, TrtexecScript
from twofour.records import TrtexecVariant

_HEAD = r"""#!/bin/sh
# Builds, times and profiles a sparse and a dense TensorRT engine from {onnx}.
# For trtexec of TensorRT {releases}.
#
#   sh build.sh [more arguments for every trtexec]
#
# TRTEXEC names the program; without it: PATH, then /usr/src/tensorrt/bin/trtexec.
# Exit codes: 0 done, 2 another version of trtexec, 3 no trtexec, 5 an engine failed.
set -eu

stop() {{
    status=$1
    shift
    printf 'build.sh: %s\n' "$@" >&2
    exit "$status"
}}

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
"""

_TAIL = r"""
[ -z "$failed" ] || stop 5 "failed:$failed" "the logs say why; what was left can be reported"
printf 'copy this folder back, then: twofour report FOLDER\n'
"""


def script_text(script: TrtexecScript) -> str:
    """build.sh; everything that comes from the model is quoted, and only in the arguments."""
    head = _HEAD.format(
        onnx=ONNX,
        releases=script.releases,
        mismatch=_mismatch(script.releases),
        cache=TIMING_CACHE,
    )
    return head + "".join(f"\n{_call(variant)}\n" for variant in script.variants) + _TAIL


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

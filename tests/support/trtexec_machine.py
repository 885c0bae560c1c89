"""A machine with a trtexec that takes notes: a shell script in the place of the real one.

It writes down its arguments, one a line, and leaves the files that it was asked for: of a build a
plan and a profile, of a loaded plan 5 times behind a warm-up. A dense run takes 2 ms, a
sparse one 1.5 ms, in round n each n/100 ms more; single runs differ by up to 0.4 ms.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from support import onnx_models
from twofour.pipeline.emitting import emit_trtexec
from twofour.records.export import TrtexecFolder
from twofour.records.options import BuildOptions, RunOptions

TRTEXEC = r"""#!/bin/sh
echo "&&&& RUNNING TensorRT.trtexec [TensorRT v$VERSION] [b11] # $0 $*"
[ "${1:-}" != --help ] || exit 0
variant= loaded= times=
for argument; do
    printf '%s\n' "$argument" >>"$NOTES"
    case $argument in
        --saveEngine=*) variant=${argument#--saveEngine=} variant=${variant%.plan} ;;
        --loadEngine=*) variant=${argument#--loadEngine=} variant=${variant%.plan} loaded=1 ;;
        --exportTimes=*) times=${argument#--exportTimes=} ;;
    esac
done
echo "[07/07/2026-02:11:08] [I] Selected Device: NVIDIA H100 PCIe"

ms=200
[ "$variant" = dense ] || ms=150
rows() {
    printf '[\n'
    separator='  '
    for row; do
        printf '%s{ "startComputeMs" : %s, "h2dMs" : 0, "computeMs" : %s, "latencyMs" : 9 }\n' \
            "$separator" "${row%=*}" "${row#*=}e-2"
        separator=', '
    done
    printf ']\n'
}

if [ -n "$loaded" ]; then
    pass=${times#times/} pass=${pass%.json}
    case " ${FAILING_PASSES:-} " in
        *" $pass "*)
            echo "[07/07/2026-02:11:09] [E] Error[1]: no memory for $pass" >&2
            echo '[' >"$times"
            exit 1
            ;;
    esac
    [ -s "$variant.plan" ] || exit 1
    ms=$((ms + ${pass##*.}))
    rows 0=$((ms * 9)) 499=$((ms * 9)) \
        500=$((ms + 20)) 600=$ms 700=$((ms - 20)) 800=$((ms + 1)) 900=$((ms - 1)) >"$times"
    exit 0
fi

[ ! -e timing.cache ] || echo "cache found by $variant" >>"$NOTES"
: >timing.cache
if [ "$variant" = "${FAILING:-}" ]; then
    echo "[07/07/2026-02:11:09] [E] Error[2]: out of $variant memory" >&2
    exit 1
fi
echo "[07/07/2026-02:11:09] [I] Engine built in 12.5 sec."
echo "engine of $variant" >"$variant.plan"
printf '[ { "count" : 10 }\n, { "name" : "fc", "timeMs" : %s, "averageMs" : %s }\n]\n' \
    "$((ms / 10))" "${ms}e-2" >"$variant.profile.json"
"""


def model(path: Path, *, shape: Sequence[int | str] = ("batch", 8), name: str = "x") -> Path:
    """A Gemm in float16 whose weight is in a data file of its own."""
    node = helper.make_node("Gemm", [name, "w"], ["y"], name="fc", transB=1)
    weights = {"w": onnx_models.weights(16, 8, dtype=np.float16)}
    proto = onnx_models.model([node], weights, inputs={name: shape}, opset=18, dtype=np.float16)
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return path


def emit(source: Path, folder: Path, version: str = "10.3", **build: object) -> TrtexecFolder:
    """The folder for a model, with options of the build by name."""
    options = RunOptions(build=BuildOptions(**build))  # type: ignore[arg-type]  # by name
    return emit_trtexec(source, folder, options, version)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How build.sh ended, and what its trtexec noted."""

    code: int
    stdout: str
    stderr: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine with a trtexec of one version in `bin`, and a working folder elsewhere."""

    root: Path
    version: str = "100300"
    failing: str = ""
    on_path: bool = True
    rounds: str | None = "0"
    """The variable ROUNDS; None: not set."""
    shell: str = "sh"
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, folder: Path, *arguments: str) -> Ran:
        """Run build.sh of a folder from another folder, as a user would."""
        (self.root / "bin").mkdir(exist_ok=True)
        trtexec = self.root / "bin" / "trtexec"
        trtexec.write_text(TRTEXEC, encoding="utf-8")
        trtexec.chmod(0o755)
        notes = self.root / "notes.txt"
        notes.unlink(missing_ok=True)
        path = os.environ["PATH"]
        done = subprocess.run(
            [self.shell, f"./{os.path.relpath(folder / 'build.sh', self.root)}", *arguments],
            cwd=self.root,
            env={
                "PATH": f"{self.root / 'bin'}{os.pathsep}{path}" if self.on_path else path,
                "NOTES": str(notes),
                "VERSION": self.version,
                "FAILING": self.failing,
                **({} if self.rounds is None else {"ROUNDS": self.rounds}),
                **self.environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return Ran(
            code=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            notes=tuple(notes.read_text(encoding="utf-8").splitlines()) if notes.exists() else (),
        )

"""Everything for a lease of a GPU machine, made here: one command, about 12 minutes on two cores.

    PYTHONPATH=src:benchmarks .venv/bin/python -m device.prepare

Makes what is missing: in .trt (ignored by git) the pack of TensorRT and the networks' skeletons, in
build/nets the networks. Then it unpacks the pack, starts twofour from it, and prints the calls of
the lease with their sizes. README.md beside this file has their minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from device.skeleton import strip

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TRT = ROOT / ".trt"
NETS = ROOT / "build/nets"
TRIED = ROOT / "build/device"
SKELETONS = "nets.tar.xz"
CALL_BYTES = 64 << 20
"""What one call may carry: the working tree and the carried ignored files."""
SPARE_BYTES = 2 << 20
WHEEL = ("zstandard", "--only-binary=:all:", "--python-version", "3.12")
"""For the machine's python3, where it has no zstd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the lease."""

    carry: tuple[str, ...]
    """Ignored files that go with the working tree."""
    command: str
    size_bytes: int
    """Of the working tree and what is carried."""
    limit_s: int


class TooLargeError(ValueError):
    """A call would carry more than it may."""


def calls(trt: Path, tree_bytes: int) -> list[Call]:
    """All calls in order: the last part of the pack, which is the smallest, goes with the networks.

    Raises TooLargeError.
    """
    *parts, last = sorted(trt.glob("part-*"))
    small = [trt / SKELETONS, *sorted(trt.glob("*.whl"))]
    first = _call("start", [last, *small], tree_bytes, limit_s=90)
    others = [_call("part", [part], tree_bytes, limit_s=60) for part in parts]
    work = [_call(name, [], tree_bytes, limit_s=600) for name in ("first", "engines")]
    return [first, *others, *work]


def _call(name: str, files: Sequence[Path], tree_bytes: int, limit_s: int) -> Call:
    size_bytes = tree_bytes + sum(file.stat().st_size for file in files)
    if size_bytes > CALL_BYTES - SPARE_BYTES:
        raise TooLargeError(f"`{name}` would carry {size_bytes} of {CALL_BYTES} bytes")
    return Call(
        carry=tuple(f".trt/{file.name}" for file in files),
        command=f"PYTHONPATH=benchmarks python3 -m device.lease {name}",
        size_bytes=size_bytes,
        limit_s=limit_s,
    )


def tree_bytes(root: Path) -> int:
    """Size of the files that git knows or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    files = [root / name for name in listed.split("\0") if name]
    return sum(file.stat().st_size for file in files if file.is_file())


def main() -> int:
    """Exit code 1 where the pack cannot start twofour here."""
    TRT.mkdir(exist_ok=True)
    if not list(TRT.glob("part-*")):
        _run("bash", str(HERE / "pack.sh"), str(TRT))
    if not list(TRT.glob("*.whl")):
        download = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(TRT))
        _run(*download, *WHEEL, "--implementation", "cp", "--platform", "manylinux2014_x86_64")
    _run(sys.executable, str(ROOT / "benchmarks/engines.py"), "make", "--out", str(NETS))
    if not (TRT / SKELETONS).is_file():
        unfinished = TRT / f".{SKELETONS}"
        strip(NETS, unfinished)
        unfinished.rename(TRT / SKELETONS)
    _run("bash", str(HERE / "unpack.sh"), str(TRT), str(TRIED))
    _run(str(TRIED / "trt86/run"), "-m", "twofour", "doctor")
    for number, call in enumerate(calls(TRT, tree_bytes(ROOT)), start=1):
        carry = f"carry {', '.join(call.carry)}" if call.carry else "carry nothing"
        print(f"{number}. {carry} ({call.size_bytes / 2**20:.0f} MiB), limit {call.limit_s} s")
        print(f"   {call.command}")
    return 0


def _run(*command: str) -> None:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT / "benchmarks")))
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=True)


if __name__ == "__main__":
    sys.exit(main())

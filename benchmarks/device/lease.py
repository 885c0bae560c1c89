"""The calls of a lease: each does its steps in turn, keeps what they print, passes over failures.

    PYTHONPATH=benchmarks python3 -m device.lease start|part|first|engines [--seconds S]

`start`: what the machine is; the torch benchmark and the networks in the background. `part`: keeps
what was carried in .trt. `first`: unpack, doctor, the GPU tests, four small chains, the timing
cache. `engines`: real networks, most telling first. What is worth keeping goes to $OUT; README.md
has the order and the minutes. Needs the standard library alone, from the machine's own Python.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from device.archives import archive, kept

ROOT = Path(__file__).parents[2]
CALL_S = 540
"""Of a call's 600: the rest packs what goes home."""
LEASE_S = 900
STARTING_S = 150
"""What the machine may take before the first call begins, which nobody here can see."""
WAY_HOME_S = 30
ARCHIVE_BYTES = 15 << 20
ARCHIVES = 4
"""At most 8 files of 16 MiB come home, 64 MiB in all."""
LAST_LINES = 25
LEFT = "SECONDS_LEFT"
"""In a command: its budget."""
ENGINE_BUILDS = (
    ("float16", "resnet50"),
    ("int8", "resnet50"),
    ("float16", "bert_base"),
    ("int8", "bert_base"),
    ("float16", "sweep_conv1x1", "sweep_gemm", "sweep_matmul", "sweep_conv3x3"),
)
PROBED = ("resnet50-float16", "resnet50-int8", "bert_base-float16")
FACTS = """date; nvidia-smi; nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,ECC | head -80; uname -r
nproc; free -g | head -2; df -h /tmp | tail -1; python3 -V; command -v zstd xz gcc nvcc
ldconfig -p | grep -E "libcuda.so|libcudart"; echo "LD_LIBRARY_PATH=$LD_LIBRARY_PATH"
python3 -m pip list 2>/dev/null | grep -i -E "torch|onnx|numpy|pydantic|zstandard"; true"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command; what it prints is kept as said/<name>.txt."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    goes_on: bool = False
    """It is run again by a later call, even where it ended well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Where everything is kept on the machine, which no call's copy of the repository touches."""

    home: Path

    @property
    def began(self) -> Path:
        """When `start` ran, in seconds of the epoch."""
        return self.home / "began"

    @property
    def parts(self) -> Path:
        """What was carried: parts of the pack, networks, a wheel."""
        return self.home / "parts"

    @property
    def python(self) -> str:
        """The pack's, which has TensorRT."""
        return str(self.home / "trt86" / "run")

    @property
    def results(self) -> Path:
        """What steps leave in JSON."""
        return self.home / "results"

    @property
    def engines(self) -> Path:
        """Run folders."""
        return self.home / "engines"

    def seconds_left(self, lease_s: float) -> float:
        """For the steps of this call, by the clock since `start`."""
        passed_s = time.time() - float(self.began.read_text())
        return min(CALL_S, lease_s - STARTING_S - WAY_HOME_S - passed_s)


def start(lease: Lease, carried: Path, kernels_s: int) -> None:
    """Folders, and two jobs that go on during the transfers."""
    for folder in (lease.parts, lease.results, lease.home / "said"):
        folder.mkdir(parents=True)
    lease.began.write_text(str(time.time()))
    # a call replaces the copy of the repository while they run
    shutil.copytree(ROOT / "benchmarks", lease.home / "benchmarks")
    keep_parts(lease, carried)
    kernels = [str(lease.home / "benchmarks" / "gpu.py"), "--budget", str(kernels_s)]
    _background(lease, "kernels", [*kernels, "--out", str(lease.results / "gpu.json")])
    source, nets = str(lease.parts / "nets.tar.xz"), str(lease.home / "nets")
    _background(lease, "nets", ["-m", "device.skeleton", "fill", source, nets])


def keep_parts(lease: Lease, carried: Path) -> None:
    """Move what this call carried to where the next one finds it."""
    for path in sorted(carried.glob("*")):
        if path.is_file():
            shutil.move(path, lease.parts / path.name)
            print("kept", path.name, (lease.parts / path.name).stat().st_size, "bytes")


def first_steps(lease: Lease) -> Iterator[Step]:
    """Does it work at the first try?"""
    unpack = ("bash", str(ROOT / "benchmarks/device/unpack.sh"), str(lease.parts), str(lease.home))
    yield Step(name="unpack", command=unpack, limit_s=120)
    end_background(lease, "kernels")  # whoever takes the next step has the GPU alone
    yield Step(name="doctor", command=(lease.python, "-m", "twofour", "doctor"), limit_s=60)
    yield _gpu_tests(lease, "float16", "doctor or float16 or whole")
    chains = (lease.python, "-m", "device.chains", str(lease.home / "nets"), str(lease.engines))
    yield Step(name="chains", command=(*chains, "--budget", LEFT), limit_s=150)
    run, result = lease.engines / "sweep_small_conv3x3-float16-b64", lease.results / "cache.json"
    cache = (lease.python, "-m", "device.cache", str(run), str(result))
    yield Step(name="cache", command=cache, limit_s=90)
    yield _enqueue(lease, "sweep_small_conv1x1-float16-b64")


def engine_steps(lease: Lease) -> Iterator[Step]:
    """Engines of real networks; a later call goes on where this one ends."""
    source, nets = str(lease.parts / "nets.tar.xz"), str(lease.home / "nets")
    fill = (lease.python, "-m", "device.skeleton", "fill", source, nets)
    yield Step(name="nets", command=fill, limit_s=90)
    for precision, *names in ENGINE_BUILDS:
        only = ("--only", *names, "--precision", precision, "--batch", "8")
        yield _build(lease, f"{names[0]}-{precision}", only)
        if f"{names[0]}-{precision}" in PROBED:
            yield _enqueue(lease, f"{names[0]}-{precision}-b8")
    yield _gpu_tests(lease, "int8", "int8")
    yield _build(lease, "everything", ())


def _build(lease: Lease, name: str, only: Sequence[str]) -> Step:
    command = [lease.python, str(ROOT / "benchmarks/engines.py"), "build", str(lease.home / "nets")]
    command += ["--out", str(lease.engines), "--budget", LEFT, *only]
    return Step(name=f"build-{name}", command=tuple(command), limit_s=CALL_S, goes_on=True)


def _enqueue(lease: Lease, run: str) -> Step:
    plans = [str(lease.engines / run / f"{variant}.plan") for variant in ("dense", "sparse")]
    result = str(lease.results / f"enqueue-{run}.json")
    command = (lease.python, "-m", "device.enqueue", result, *plans)
    return Step(name=f"enqueue-{run}", command=command, limit_s=40)


def _gpu_tests(lease: Lease, name: str, chosen: str) -> Step:
    options = ("-p", "no:cacheprovider", "-m", "gpu", "--maxfail=5", "-q")
    command = (lease.python, "-m", "pytest", "tests/gpu", *options, "-k", chosen)
    kept_at = ("--basetemp", str(lease.home / f"gpu-tests-{name}"))
    return Step(name=f"tests-{name}", command=(*command, *kept_at), limit_s=240)


def run_steps(lease: Lease, steps: Iterator[Step], seconds: float, limit_s: float = CALL_S) -> None:
    """Each step within its limits and what is left; its end is a row of steps.jsonl."""
    deadline = time.monotonic() + seconds
    done = {row["step"] for row in _rows(lease) if row["exit_code"] == 0}
    for step in steps:
        left_s = int(min(step.limit_s, limit_s, deadline - time.monotonic()))
        if step.name in done and not step.goes_on:
            continue
        started = time.monotonic()
        exit_code = _run(lease, step, left_s) if left_s > 0 else None
        spent_s = round(time.monotonic() - started, 1)
        row = {"step": step.name, "exit_code": exit_code, "seconds": spent_s, "limit_s": left_s}
        with (lease.home / "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"== {step.name}: exit {exit_code}, {spent_s} s of {left_s}", flush=True)


def _rows(lease: Lease) -> list[dict[str, object]]:
    path = lease.home / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _run(lease: Lease, step: Step, limit_s: float) -> int | None:
    """The exit code; None where the time was up, and everything it started is ended."""
    path = lease.home / "said" / f"{step.name}.txt"
    command = [word.replace(LEFT, str(limit_s)) for word in step.command]
    try:
        with path.open("ab") as said:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=_environment(ROOT),
                start_new_session=True,
            )
    except OSError as error:
        path.write_text(f"{error}\n")
        print(error)
        return 127
    try:
        exit_code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        exit_code = None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    print(*path.read_text(errors="replace").splitlines()[-LAST_LINES:], sep="\n")
    return exit_code


def _environment(root: Path) -> dict[str, str]:
    path = os.pathsep.join((str(root / "benchmarks"), str(ROOT / "src")))
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    # the pack comes without compiled modules, and they are written at the first start
    return os.environ | own | {"PYTHONDONTWRITEBYTECODE": ""}


def _background(lease: Lease, name: str, command: Sequence[str]) -> None:
    """A job in a session of its own, so that it outlives the call."""
    with (lease.home / "said" / f"{name}.txt").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=lease.home,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=_environment(lease.home),
            start_new_session=True,
        )
    (lease.home / f"{name}.pid").write_text(str(process.pid))


def end_background(lease: Lease, name: str, wait_s: float = 15) -> None:
    """Ask the job to end, which writes its results; after the wait it is killed."""
    path = lease.home / f"{name}.pid"
    if not path.is_file():
        return
    pid = int(path.read_text())
    deadline = time.monotonic() + wait_s
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while _is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(pid, signal.SIGKILL)
    path.unlink()


def _is_running(pid: int) -> bool:
    """Not where it ended and nobody has asked for its exit code yet (a zombie)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # "42 (a name) Z ...", and the name may have blanks and brackets
    return status.rpartition(")")[2].split()[0] != "Z"


def bring_home(lease: Lease, out: Path) -> None:
    """Own results first, then run folders, the newest first; what is beyond the limits stays."""
    runs = [(f"engines/{name}", path) for name, path in kept(lease.engines)]
    archives = archive([*_own(lease), *runs], lease.home / "home/kept", ARCHIVE_BYTES)
    for number, path in enumerate(archives):
        fits = number < ARCHIVES
        if fits:
            shutil.copy(path, out)
        print(path.name, path.stat().st_size, "bytes", "" if fits else "LEFT BEHIND")


def _own(lease: Lease) -> Iterator[tuple[str, Path]]:
    patterns = ["steps.jsonl", "said/*", "results/*", "engines/*/cache-*.log"]
    patterns += [f"gpu-tests-*/*/**/*.{suffix}" for suffix in ("json", "log", "md")]
    for pattern in patterns:
        for path in sorted(lease.home.glob(pattern)):
            if path.is_file() and not any(parent.is_symlink() for parent in path.parents):
                yield str(path.relative_to(lease.home)), path


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 where this machine is not the one that `start` ran on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("call", choices=("start", "part", "first", "engines"))
    parser.add_argument("--home", type=Path, default=Path("/tmp/lease"))
    parser.add_argument("--carried", type=Path, default=ROOT / ".trt")
    parser.add_argument("--lease", type=float, default=LEASE_S, help="seconds of the whole lease")
    parser.add_argument("--seconds", type=float, help="for this call, instead of what is left")
    parser.add_argument("--limit", type=float, default=CALL_S, help="seconds of a step at most")
    parser.add_argument("--kernels", type=int, default=75, help="seconds of the torch benchmark")
    arguments = parser.parse_args(argv)
    lease = Lease(home=arguments.home)
    if arguments.call == "start" and not lease.began.is_file():
        start(lease, arguments.carried, arguments.kernels)
        facts = Step(name="machine", command=("bash", "-c", FACTS), limit_s=60)
        run_steps(lease, iter([facts]), facts.limit_s)
        return 0
    if not lease.began.is_file():
        print("error: this is a new machine: begin again with `start`", file=sys.stderr)
        return 2
    if arguments.call in {"start", "part"}:
        keep_parts(lease, arguments.carried)
        return 0
    seconds = arguments.seconds or lease.seconds_left(arguments.lease)
    steps = {"first": first_steps, "engines": engine_steps}[arguments.call]
    run_steps(lease, steps(lease), seconds, arguments.limit)
    bring_home(lease, Path(os.environ["OUT"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

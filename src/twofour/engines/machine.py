"""The machine a comparison runs on: what it is, its clocks, memory and load at a moment."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from twofour.engines.gpu import GpuClocks, find_bus_id, find_gpu, read_gpu_clocks
from twofour.engines.registry import ENGINES
from twofour.records.latency import Clocks, Machine, RoundLoad

ROOT = Path("/")
_CPUFREQ = "sys/devices/system/cpu"
_STATUS, _CLEAR = ROOT / "proc/self/status", ROOT / "proc/self/clear_refs"
_RESET_PEAK = "5"  # proc(5): resets VmHWM to the memory that is resident now
_KIB = 1024
_SPARE = 1.2
_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""Times of a core in psutil's words; those of guests are in user."""


def describe_machine(root: Path = ROOT) -> Machine:
    """Hardware, system and package versions, with the clocks of this moment as `start`.

    Never raises: what cannot be had is None, the CPU's name then the architecture's. `root` holds
    Linux's proc and sys.
    """
    return Machine(
        platform=platform.platform(),
        python_version=platform.python_version(),
        cpu=_cpu_model(root),
        cores=usable_cores(),
        memory_bytes=_memory_bytes(root),
        gpu=find_gpu(),
        packages=_packages(),
        start=read_clocks(root),
        end=None,
    )


def read_clocks(root: Path = ROOT) -> Clocks:
    """Of the CPU, and of the first GPU CUDA shows to this process; takes a few ms, never raises."""
    bus_id = find_bus_id()
    gpu = GpuClocks() if bus_id is None else read_gpu_clocks(bus_id)
    return Clocks(
        cpu_mhz=_cpu_mhz(root),
        cpu_governor=_cpu_governor(root),
        gpu_sm_mhz=gpu.sm_mhz,
        gpu_memory_mhz=gpu.memory_mhz,
        gpu_temperature_c=gpu.temperature_c,
        gpu_throttled=gpu.throttled,
        load_average=_load_average(),
    )


def _cpu_model(root: Path) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    # Linux on ARM has no model name; macOS and Windows have no /proc
    return found[1].strip() if found else platform.processor() or platform.machine()


def _memory_bytes(root: Path) -> int:
    """Of the machine, or of the container's limit (cgroup v2) where that is less."""
    total = psutil.virtual_memory().total
    limit = _text(root / "sys/fs/cgroup/memory.max").strip()  # "max" where there is none
    return min(total, int(limit)) if limit.isdecimal() else total


def _cpu_mhz(root: Path) -> float | None:
    khz = [
        float(text)
        for file in (root / _CPUFREQ).glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
        if (text := _text(file).strip()).isdecimal()
    ]
    if khz:
        return statistics.fmean(khz) / 1e3
    text = _text(root / "proc/cpuinfo")  # virtual machines often show the clock only here
    mhz = [float(value) for value in re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", text, re.MULTILINE)]
    return statistics.fmean(mhz) if mhz else None


def _cpu_governor(root: Path) -> str | None:
    files = (root / _CPUFREQ).glob("cpu[0-9]*/cpufreq/scaling_governor")
    return ", ".join(sorted({text for file in files if (text := _text(file).strip())})) or None


def _load_average() -> float | None:
    if not hasattr(os, "getloadavg"):  # Windows
        return None
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return None


def _packages() -> tuple[str, ...]:
    """What can change a time: those of every engine, and what models are read with."""
    found = []
    for name in (*(p for row in ENGINES.values() for p in row.packages), "numpy", "onnx"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name}=={metadata.version(name)}")
    return tuple(found)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def usable_cores() -> int:
    """Cores this process may use, containers and affinity regarded where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def reset_peak() -> None:
    """Let the peak start from what is resident now, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")


def peak_resident_bytes() -> int | None:
    """Most resident memory since the last reset; since the start where there is none.

    psutil has no peak on Linux and macOS, and none that can be reset.
    """
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", _text(_STATUS), re.MULTILINE)
    if peak is not None:
        return int(peak[1]) * _KIB
    try:
        import resource
    except ImportError:  # Windows
        return getattr(psutil.Process().memory_info(), "peak_wset", None)
    unit = 1 if sys.platform == "darwin" else _KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    return psutil.virtual_memory().available


def has_room_for(size_bytes: int) -> bool:
    """Whether so much memory, and a fifth more, can be had without swapping."""
    return available_bytes() >= _SPARE * size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """Counters at one moment; only differences mean something."""

    at_s: float
    machine_s: float
    """Seconds that the cores of this process were busy, with whatever it was."""
    own_s: float
    """Seconds of processor time that this process and those named with it took."""


def cpu_use(processes: Sequence[int]) -> CpuUse | None:
    """Now, for this process and `processes`; None where the system does not tell."""
    try:
        machine_s = busy_s()
        own_s = sum(_own_s(process) for process in (os.getpid(), *processes))
    except (psutil.Error, OSError, IndexError):
        return None
    return CpuUse(at_s=time.perf_counter(), machine_s=machine_s, own_s=own_s)


def load_between(
    before: CpuUse | None, after: CpuUse | None, batch: int | None
) -> RoundLoad | None:
    """What others took of the cores between two moments; None where that is not known."""
    if before is None or after is None or after.at_s <= before.at_s:
        return None
    others_s = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    cores = usable_cores()
    busy = others_s / (after.at_s - before.at_s)
    return RoundLoad(other_cores=min(max(busy, 0.0), float(cores)), cores=cores, batch=batch)


def busy_s() -> float:
    """Seconds that the cores which this process may use were busy since the system started.

    Raises IndexError where psutil does not list one of them.
    """
    cores = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity") and len(mine := os.sched_getaffinity(0)) < len(cores):
        # by place: where a core below is switched off, its neighbour is taken for it
        cores = [cores[number] for number in mine]
    return sum(getattr(core, kind, 0.0) for core in cores for kind in _BUSY)


def _own_s(process: int) -> float:
    """0 for one that has ended: its time is in nobody's counter then."""
    try:
        times = psutil.Process(process).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def family_s(process: int) -> float | None:
    """Seconds of processor time of a process and all below it, ended ones included.

    None where the system does not tell.
    """
    try:
        parent = psutil.Process(process)
        times = [member.cpu_times() for member in (parent, *parent.children(recursive=True))]
    except psutil.Error:
        return None
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)

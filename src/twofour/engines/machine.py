"""The machine a comparison runs on, and what its clocks are at a moment."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import statistics
from importlib import metadata
from pathlib import Path

from twofour.engines.gpu import find_bus_id, find_gpu
from twofour.engines.nvml import GpuClocks, read_gpu_clocks
from twofour.engines.ort_session import usable_cores
from twofour.records.latency import Clocks, Machine

PACKAGES = (
    "torch",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-cu12",
    "tensorrt-cu13",
    "torch-tensorrt",
    "triton",
    "numpy",
    "onnx",
    "polygraphy",
)
"""What can change a time, as the packages are named on PyPI."""
ROOT = Path("/")
_CPUFREQ = "sys/devices/system/cpu"


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


def _memory_bytes(root: Path) -> int | None:
    """Of the machine, or of the container's limit (cgroup v2) where that is less."""
    total = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    limit = _text(root / "sys/fs/cgroup/memory.max").strip()  # "max" where there is none
    sizes = [int(total[1]) * 1024] if total else []
    sizes += [int(limit)] if limit.isdecimal() else []
    return min(sizes, default=None)


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
    found = []
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name}=={metadata.version(name)}")
    return tuple(found)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

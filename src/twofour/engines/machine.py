"""The machine that engines run on: its NVIDIA GPU, clocks, memory and load at a moment.

Which GPU a process gets, CUDA's driver alone knows (CUDA_VISIBLE_DEVICES, its own order); its
clocks, NVML, which knows a GPU by its PCI bus. Neither torch nor a CUDA toolkit is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil

from twofour.engines.protocol import ENGINES, Untyped
from twofour.packages import installed_version
from twofour.records import frozen
from twofour.records.export import Gpu
from twofour.records.latency import Clocks, Machine, RoundLoad

Answer = TypeVar("Answer")
# CUdevice_attribute of cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_TEXT_BYTES = 256
# nvmlClocksEventReason* of nvml.h; 0x1, an idle GPU, holds nothing down
_REASONS = {
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}
ROOT = Path("/")
_CPUFREQ = "sys/devices/system/cpu"
_CGROUP_LIMIT = "sys/fs/cgroup/memory.max"  # of version 2
_CGROUP_USE = "sys/fs/cgroup/memory.current"
_STATUS, _CLEAR = ROOT / "proc/self/status", ROOT / "proc/self/clear_refs"
_RESET_PEAK = "5"  # proc(5): resets VmHWM to the memory that is resident now
_KIB = 1024
_SPARE = 1.2
_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""Times of a core in psutil's words; those of guests are in user."""


def find_gpu(*, driver: str | None = None) -> Gpu | None:
    """The first GPU that CUDA shows to this process (`driver` instead of libcuda); never raises."""
    try:
        return _describe(_driver(driver))
    except (OSError, AttributeError):  # no such library, or a function of CUDA's is missing
        return None


def find_bus_id(*, driver: str | None = None) -> str | None:
    """PCI bus id ("0000:65:00.0") of the GPU that `find_gpu` describes. Never raises."""
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    try:
        cuda = _driver(driver)
        device = _first_device(cuda)
        if device is None or cuda.cuDeviceGetPCIBusId(text, _TEXT_BYTES, device) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return text.value.decode(errors="replace")


def _driver(name: str | None) -> ctypes.CDLL:
    return ctypes.CDLL(name or ("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"))


def _first_device(cuda: ctypes.CDLL) -> ctypes.c_int | None:
    device = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    return device


def _describe(cuda: ctypes.CDLL) -> Gpu | None:
    device = _first_device(cuda)
    if device is None:
        return None
    name = ctypes.create_string_buffer(_TEXT_BYTES)
    major = ctypes.c_int()
    minor = ctypes.c_int()
    memory = ctypes.c_size_t()
    errors = (
        cuda.cuDeviceGetName(name, _TEXT_BYTES, device),
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device),
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device),
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device),
    )
    if any(errors):
        return None
    return Gpu(
        name=name.value.decode(errors="replace"),
        compute_capability=(major.value, minor.value),
        memory_bytes=memory.value,
        driver=_driver_version(cuda),
    )


def _driver_version(cuda: ctypes.CDLL) -> str | None:
    """Such as "550.54.15 (CUDA 12.4)"; either part alone where the other cannot be had."""
    number = ctypes.c_int()
    newest_cuda = None
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        # cuDriverGetVersion: 1000 * major + 10 * minor
        newest_cuda = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    release = _ask_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))
    if release and newest_cuda:
        return f"{release} ({newest_cuda})"
    return release or newest_cuda


def read_gpu_clocks(bus_id: str) -> Clocks:
    """Clocks of the GPU with that PCI bus id (NVML's numbers are not CUDA's); never raises."""
    return _ask_nvml(lambda nvml: _clocks(nvml, bus_id)) or Clocks()


def _ask_nvml(question: Callable[[Untyped], Answer]) -> Answer | None:
    """The answer through NVIDIA's own binding; None where NVML is not there or refuses."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _clocks(nvml: Untyped, bus_id: str) -> Clocks:
    device = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)

    def answer(call: str, *arguments: int) -> int | None:
        """None where this driver does not know the call or has no answer."""
        with contextlib.suppress(nvml.NVMLError):
            return int(getattr(nvml, call)(device, *arguments))
        return None

    mask = answer("nvmlDeviceGetCurrentClocksEventReasons")
    if mask is None:  # the name before driver 535
        mask = answer("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    return Clocks(
        gpu_sm_mhz=answer("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        gpu_memory_mhz=answer("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        gpu_temperature_c=answer("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        gpu_throttled=", ".join(words for bit, words in _REASONS.items() if mask & bit) or None,
    )


def describe_machine(root: Path = ROOT) -> Machine:
    """Hardware, system and package versions, with the clocks of this moment as `start`.

    Never raises: what is not known is None. `root` is the folder of Linux's proc and sys.
    """
    # Linux on ARM has no model name; macOS and Windows have no /proc
    cpu = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    memory_bytes = psutil.virtual_memory().total
    limit = _text(root / _CGROUP_LIMIT).strip()  # "max" where there is none
    if limit.isdecimal():
        memory_bytes = min(memory_bytes, int(limit))
    names = [name for row in ENGINES.values() for name in row.packages]
    packages = []
    for name in (*names, "numpy", "onnx"):
        version = installed_version(name)
        if version is not None:
            packages.append(f"{name}=={version}")
    return Machine(
        platform=platform.platform(),
        python_version=platform.python_version(),
        cpu=cpu[1].strip() if cpu else platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_bytes=memory_bytes,
        gpu=find_gpu(),
        packages=tuple(packages),
        start=read_clocks(root),
        end=None,
    )


def read_clocks(root: Path = ROOT) -> Clocks:
    """Clocks of the CPU and of the first GPU CUDA shows to this process; never raises."""
    bus_id = find_bus_id()
    files = (root / _CPUFREQ).glob("cpu[0-9]*/cpufreq/scaling_governor")
    governors = {_text(file).strip() for file in files} - {""}
    return replace(
        Clocks() if bus_id is None else read_gpu_clocks(bus_id),
        cpu_mhz=_cpu_mhz(),
        cpu_governor=", ".join(sorted(governors)) or None,
        load_average=psutil.getloadavg()[0],
    )


def _cpu_mhz() -> float | None:
    """Mean over the cores; psutil takes it from /proc where there is no cpufreq."""
    with contextlib.suppress(Exception):  # on systems and machines that do not say it
        return psutil.cpu_freq().current
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def usable_cores() -> int:
    """Cores that this process may use, by its affinity where the system has that."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def reset_peak() -> None:
    """Start the peak again from what is resident now, where the system can (Linux)."""
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
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak_rss if sys.platform == "darwin" else peak_rss * _KIB


def available_bytes() -> int:
    """Memory that can be had without swapping, within the limit of a container."""
    free = psutil.virtual_memory().available
    limit = _text(ROOT / _CGROUP_LIMIT).strip()
    used = _text(ROOT / _CGROUP_USE).strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used))
    return max(0, free)


def has_room_for(size_bytes: int) -> bool:
    """Whether so much memory, and a fifth more, can be had without swapping."""
    return available_bytes() >= _SPARE * size_bytes


@frozen
class CpuUse:
    """Counters at one moment; only differences mean something."""

    at_s: float
    machine_s: float
    """Seconds that the cores of this process were busy, with whatever it was."""
    own_s: float
    """Seconds of processor time that this process and those named with it took."""


def cpu_use(processes: Sequence[int]) -> CpuUse | None:
    """The counters now, for this process and `processes`; None where the system has none."""
    own_s = 0.0
    try:
        machine_s = busy_s()
        for process in (os.getpid(), *processes):
            with contextlib.suppress(psutil.NoSuchProcess):  # then its time is in no counter
                times = psutil.Process(process).cpu_times()
                own_s += times.user + times.system
    except (psutil.Error, OSError, IndexError):
        return None
    return CpuUse(at_s=time.perf_counter(), machine_s=machine_s, own_s=own_s)


def load_between(
    before: CpuUse | None, after: CpuUse | None, batch: int | None
) -> RoundLoad | None:
    """What others took of the cores between two moments; None where that is not known."""
    if before is None or after is None or after.at_s <= before.at_s:
        return None
    # 8 s busy in all, 6 s of them ours, in 10 s: others kept 0.2 cores busy
    others_s = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    cores = usable_cores()
    busy = others_s / (after.at_s - before.at_s)
    return RoundLoad(other_cores=min(max(busy, 0.0), float(cores)), cores=cores, batch=batch)


def busy_s() -> float:
    """Seconds that the cores which this process may use were busy since the system started.

    Raises IndexError where psutil does not list one of them.
    """
    cores = psutil.cpu_times(percpu=True)
    if usable_cores() < len(cores):
        # by place: where a core below is switched off, its neighbour is taken for it
        cores = [cores[number] for number in os.sched_getaffinity(0)]
    return sum(getattr(core, kind, 0.0) for core in cores for kind in _BUSY)


def family_s(process: int) -> float | None:
    """Processor time of a process and all below it, ended ones included; None: not known."""
    try:
        parent = psutil.Process(process)
        times = [member.cpu_times() for member in (parent, *parent.children(recursive=True))]
    except psutil.Error:
        return None
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)

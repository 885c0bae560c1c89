"""The NVIDIA GPU of this machine, as its driver describes it: no torch, no CUDA toolkit needed.

Which GPU a process gets, CUDA's driver alone knows (CUDA_VISIBLE_DEVICES, its own order); its
clocks, NVML, which knows a GPU by its PCI bus.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from twofour.engines.protocol import Untyped
from twofour.records.build import Gpu

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClocks:
    """What the driver says of one GPU at one moment; None: it does not say."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    throttled: str | None = None
    """Reasons in words; None also where nothing holds the clocks down."""


def find_gpu(*, driver: str | None = None) -> Gpu | None:
    """The first GPU the CUDA driver shows to this process, else None. Never raises.

    `driver` names the library to load instead of libcuda.
    """
    try:
        return _describe(_driver(driver))
    except (OSError, AttributeError):  # no such library, or one that lacks a function of CUDA's
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
    device, name = _first_device(cuda), ctypes.create_string_buffer(_TEXT_BYTES)
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if device is None:
        return None
    details = (
        (cuda.cuDeviceGetName, (name, _TEXT_BYTES, device)),
        (cuda.cuDeviceGetAttribute, (ctypes.byref(major), _CAPABILITY_MAJOR, device)),
        (cuda.cuDeviceGetAttribute, (ctypes.byref(minor), _CAPABILITY_MINOR, device)),
        (cuda.cuDeviceTotalMem_v2, (ctypes.byref(memory), device)),
    )
    if any(function(*arguments) != 0 for function, arguments in details):
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
    release = _driver_release()
    if release is None or newest_cuda is None:
        return release or newest_cuda
    return f"{release} ({newest_cuda})"


def _driver_release() -> str | None:
    return _ask_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))


def read_gpu_clocks(bus_id: str) -> GpuClocks:
    """Of the GPU with that PCI bus id (NVML's numbers are not CUDA's); never raises."""
    return _ask_nvml(lambda nvml: _clocks(nvml, bus_id)) or GpuClocks()


def _ask_nvml(question: Callable[[Untyped], Answer]) -> Answer | None:
    """The answer through NVIDIA's own binding; None where NVML is not there or refuses."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _clocks(nvml: Untyped, bus_id: str) -> GpuClocks:
    device = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)

    def answer(call: str, *arguments: int) -> int | None:
        """None where this driver does not know the call or has no answer."""
        with contextlib.suppress(nvml.NVMLError):
            return int(getattr(nvml, call)(device, *arguments))
        return None

    mask = answer("nvmlDeviceGetCurrentClocksEventReasons")
    if mask is None:  # the name before driver 535
        mask = answer("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    return GpuClocks(
        sm_mhz=answer("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        memory_mhz=answer("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        temperature_c=answer("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        throttled=", ".join(words for bit, words in _REASONS.items() if mask & bit) or None,
    )

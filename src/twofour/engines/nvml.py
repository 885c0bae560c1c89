"""NVML, the NVIDIA driver's management library: clocks, temperature and what holds them down."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass

_SUCCESS = 0
# nvmlClockType_t and nvmlTemperatureSensors_t of nvml.h
_SM, _MEMORY = 1, 2
_GPU_SENSOR = 0
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
_REASON_CALLS = (
    "nvmlDeviceGetCurrentClocksEventReasons",  # the name since driver 535
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClocks:
    """What the driver says of one GPU at one moment; None: it does not say."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    throttled: str | None = None
    """Reasons in words; None also where nothing holds the clocks down."""


def read_gpu_clocks(bus_id: str, *, management: str | None = None) -> GpuClocks:
    """Of the GPU with that PCI bus id (NVML's numbers are not CUDA's); never raises.

    `management` names the library to load instead of NVML.
    """
    try:
        nvml = ctypes.CDLL(
            management or ("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        )
        if nvml.nvmlInit_v2() != _SUCCESS:
            return GpuClocks()
        try:
            return _read(nvml, bus_id)
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return GpuClocks()


def _read(nvml: ctypes.CDLL, bus_id: str) -> GpuClocks:
    device = ctypes.c_void_p()
    found = nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(device))
    if found != _SUCCESS:
        return GpuClocks()
    return GpuClocks(
        sm_mhz=_number(nvml, "nvmlDeviceGetClockInfo", device, _SM),
        memory_mhz=_number(nvml, "nvmlDeviceGetClockInfo", device, _MEMORY),
        temperature_c=_number(nvml, "nvmlDeviceGetTemperature", device, _GPU_SENSOR),
        throttled=_throttled(nvml, device),
    )


def _number(nvml: ctypes.CDLL, call: str, device: ctypes.c_void_p, which: int) -> int | None:
    value = ctypes.c_uint()
    function: Callable[..., int] | None = getattr(nvml, call, None)
    if function is None or function(device, which, ctypes.byref(value)) != _SUCCESS:
        return None
    return value.value


def _throttled(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> str | None:
    mask = ctypes.c_ulonglong()
    for call in _REASON_CALLS:
        function: Callable[..., int] | None = getattr(nvml, call, None)
        if function is not None and function(device, ctypes.byref(mask)) == _SUCCESS:
            return ", ".join(words for bit, words in _REASONS.items() if mask.value & bit) or None
    return None

"""The NVIDIA GPU of this machine, as its driver describes it: no torch, no CUDA toolkit needed."""

from __future__ import annotations

import ctypes
import sys

from twofour.records.build import Gpu

# CUdevice_attribute of cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_TEXT_BYTES = 256


def find_gpu(*, driver: str | None = None, management: str | None = None) -> Gpu | None:
    """The first GPU the CUDA driver shows to this process, else None. Never raises.

    `driver` and `management` name the libraries to load instead of libcuda and NVML.
    """
    windows = sys.platform == "win32"
    try:
        cuda = _driver(driver)
        return _describe(cuda, management or ("nvml.dll" if windows else "libnvidia-ml.so.1"))
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


def _describe(cuda: ctypes.CDLL, management: str) -> Gpu | None:
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
        driver=_driver_version(cuda, management),
    )


def _driver_version(cuda: ctypes.CDLL, management: str) -> str | None:
    """Such as "550.54.15 (CUDA 12.4)"; either part alone where the other cannot be had."""
    number = ctypes.c_int()
    newest_cuda = None
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        # cuDriverGetVersion: 1000 * major + 10 * minor
        newest_cuda = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    release = _driver_release(management)
    if release is None or newest_cuda is None:
        return release or newest_cuda
    return f"{release} ({newest_cuda})"


def _driver_release(management: str) -> str | None:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    try:
        nvml = ctypes.CDLL(management)
        if nvml.nvmlInit_v2() != 0:
            return None
        failed = nvml.nvmlSystemGetDriverVersion(text, _TEXT_BYTES)
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if failed else text.value.decode(errors="replace")

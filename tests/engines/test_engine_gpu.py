"""find_gpu against a driver of our own, compiled here: the C interface is what can go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twofour.engines.machine import find_gpu
from twofour.records.build import Gpu

DRIVER = r"""
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, device == 40 ? "NVIDIA Test 9000" : "another", size);
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 8 : attribute == 76 ? 9 : -1;
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 24ull << 30; return 0; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
"""
MANAGEMENT = r"""
#include <string.h>
int nvmlInitWithFlags(unsigned flags) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    strncpy(text, "550.54", size);
    return 0;
}
"""


def library(folder: Path, name: str, source: str, *, init: int) -> str:
    (folder / f"{name}.c").write_text(source)
    target = str(folder / f"{name}.so")
    flags = ["-shared", "-fPIC", "-w", f"-DINIT={init}"]
    subprocess.run(["gcc", *flags, "-o", target, str(folder / f"{name}.c")], check=True)
    return target


def found_beside(folder: Path, driver: str) -> str:
    """What is found with NVML in the folder: its binding loads it by name, once in a process."""
    code = f"from twofour.engines.machine import find_gpu; print(find_gpu(driver={driver!r}))"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip()


def test_a_gpu_is_described_by_its_driver(tmp_path: Path) -> None:
    library(tmp_path, "libnvidia-ml", MANAGEMENT, init=0)
    (tmp_path / "libnvidia-ml.so").rename(tmp_path / "libnvidia-ml.so.1")
    gpu = Gpu(
        name="NVIDIA Test 9000",
        compute_capability=(8, 9),
        memory_bytes=24 << 30,
        driver="550.54 (CUDA 12.4)",
    )
    assert found_beside(tmp_path, library(tmp_path, "cuda", DRIVER, init=0)) == repr(gpu)
    assert gpu.has_sparse_tensor_cores


@pytest.mark.parametrize("management", ["absent", "refusing"])
def test_without_management_library_the_cuda_version_names_the_driver(
    tmp_path: Path, management: str
) -> None:
    if management == "refusing":
        library(tmp_path, "libnvidia-ml", MANAGEMENT, init=1)
        (tmp_path / "libnvidia-ml.so").rename(tmp_path / "libnvidia-ml.so.1")
    found = found_beside(tmp_path, library(tmp_path, "cuda", DRIVER, init=0))
    assert "driver='CUDA 12.4'" in found


def test_a_driver_that_shows_no_device_means_no_gpu(tmp_path: Path) -> None:
    assert find_gpu(driver=library(tmp_path, "cuda", DRIVER, init=100)) is None


def test_a_library_that_is_no_driver_means_no_gpu(tmp_path: Path) -> None:
    assert find_gpu(driver=library(tmp_path, "other", "int INIT_(void) {}", init=0)) is None


def test_no_driver_means_no_gpu(tmp_path: Path) -> None:
    assert find_gpu(driver=str(tmp_path / "none.so")) is None

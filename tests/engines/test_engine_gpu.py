"""find_gpu against a driver of our own, compiled here: the C interface is what can go wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from twofour.engines.gpu import find_gpu
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
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    strncpy(text, "550.54", size);
    return 0;
}
"""


def library(folder: Path, name: str, source: str, *, init: int) -> str:
    (folder / f"{name}.c").write_text(source)
    target = str(folder / f"{name}_{init}.so")
    flags = ["-shared", "-fPIC", "-w", f"-DINIT={init}"]
    subprocess.run(["gcc", *flags, "-o", target, str(folder / f"{name}.c")], check=True)
    return target


def test_a_gpu_is_described_by_its_driver(tmp_path: Path) -> None:
    gpu = find_gpu(
        driver=library(tmp_path, "cuda", DRIVER, init=0),
        management=library(tmp_path, "nvml", MANAGEMENT, init=0),
    )
    assert gpu == Gpu(
        name="NVIDIA Test 9000",
        compute_capability=(8, 9),
        memory_bytes=24 << 30,
        driver="550.54 (CUDA 12.4)",
    )
    assert gpu.has_sparse_tensor_cores


@pytest.mark.parametrize("management", ["absent", "refusing"])
def test_without_management_library_the_cuda_version_names_the_driver(
    tmp_path: Path, management: str
) -> None:
    nvml = str(tmp_path / "none.so")
    if management == "refusing":
        nvml = library(tmp_path, "nvml", MANAGEMENT, init=1)
    gpu = find_gpu(driver=library(tmp_path, "cuda", DRIVER, init=0), management=nvml)
    assert gpu is not None
    assert gpu.driver == "CUDA 12.4"


def test_a_driver_that_shows_no_device_means_no_gpu(tmp_path: Path) -> None:
    assert find_gpu(driver=library(tmp_path, "cuda", DRIVER, init=100)) is None


def test_a_library_that_is_no_driver_means_no_gpu(tmp_path: Path) -> None:
    assert find_gpu(driver=library(tmp_path, "other", "int INIT_(void) {}", init=0)) is None


def test_no_driver_means_no_gpu(tmp_path: Path) -> None:
    assert find_gpu(driver=str(tmp_path / "none.so")) is None

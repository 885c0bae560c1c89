from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from twofour.engines.gpu import find_bus_id
from twofour.engines.machine import describe_machine, read_clocks
from twofour.engines.nvml import GpuClocks, read_gpu_clocks
from twofour.engines.ort_session import usable_cores

CPUINFO = """processor\t: 0
model name\t: AMD EPYC 9654 96-Core Processor
cpu MHz\t\t: 2400.000

processor\t: 1
model name\t: AMD EPYC 9654 96-Core Processor
cpu MHz\t\t: 3600.500
"""
DRIVER = r"""
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDeviceGetPCIBusId(char *text, int size, int device) {
    strncpy(text, "0000:65:00.0", size);
    return device == 40 ? 0 : 101;
}
"""
MANAGEMENT = r"""
#include <string.h>
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    *device = (void *)7;
    return strcmp(id, "0000:65:00.0") == 0 ? 0 : 6;
}
int nvmlDeviceGetClockInfo(void *device, int type, unsigned *mhz) {
    *mhz = type == 1 ? 1755 : type == 2 ? 2619 : 1;
    return device == (void *)7 ? 0 : 2;
}
#ifndef OLD
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    *celsius = sensor == 0 ? 61 : 0;
    return 0;
}
#endif
int REASONS(void *device, unsigned long long *mask) { *mask = MASK; return 0; }
"""


def library(folder: Path, name: str, source: str, **defined: object) -> str:
    code, target = folder / f"{name}.c", str(folder / f"{name}.so")
    code.write_text(source)
    flags = ["-shared", "-fPIC", "-w", *(f"-D{key}={value}" for key, value in defined.items())]
    subprocess.run(["gcc", *flags, "-o", target, str(code)], check=True)
    return target


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_cpu_and_its_clock_are_read_from_proc(tmp_path: Path) -> None:
    put(tmp_path, "proc/cpuinfo", CPUINFO)
    machine = describe_machine(tmp_path)
    assert machine.cpu == "AMD EPYC 9654 96-Core Processor"
    assert machine.start.cpu_mhz == pytest.approx(3000.25)
    assert machine.start.cpu_governor is None
    assert machine.end is None


def test_the_clock_of_cpufreq_goes_before_that_of_proc(tmp_path: Path) -> None:
    put(tmp_path, "proc/cpuinfo", CPUINFO)
    for core, khz, governor in ((0, 1_500_000, "powersave"), (1, 2_500_000, "performance")):
        folder = f"sys/devices/system/cpu/cpu{core}/cpufreq"
        put(tmp_path, f"{folder}/scaling_cur_freq", f"{khz}\n")
        put(tmp_path, f"{folder}/scaling_governor", f"{governor}\n")
    clocks = read_clocks(tmp_path)
    assert clocks.cpu_mhz == pytest.approx(2000.0)
    assert clocks.cpu_governor == "performance, powersave"


@pytest.mark.parametrize(
    ("limit", "memory"), [("max\n", 8_000_000 * 1024), ("2147483648\n", 2**31), (None, 8192000000)]
)
def test_memory_is_the_machines_or_the_containers_limit(
    tmp_path: Path, limit: str | None, memory: int
) -> None:
    put(tmp_path, "proc/meminfo", "MemTotal:        8000000 kB\nMemFree:  1 kB\n")
    if limit is not None:
        put(tmp_path, "sys/fs/cgroup/memory.max", limit)
    assert describe_machine(tmp_path).memory_bytes == memory


def test_without_proc_the_rest_is_unknown_and_the_cpu_an_architecture(tmp_path: Path) -> None:
    machine = describe_machine(tmp_path)
    assert machine.cpu in {platform.processor(), platform.machine()}
    assert (machine.memory_bytes, machine.start.cpu_mhz) == (None, None)


def test_this_machine_has_cores_a_load_and_the_packages_that_are_installed() -> None:
    machine = describe_machine()
    assert machine.cores == usable_cores()
    assert f"numpy=={metadata.version('numpy')}" in machine.packages
    assert machine.python_version == platform.python_version()
    if hasattr(os, "getloadavg"):
        assert machine.start.load_average is not None


@pytest.mark.parametrize(
    "call",
    ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"],
)
def test_the_driver_tells_clocks_temperature_and_reasons(tmp_path: Path, call: str) -> None:
    nvml = library(tmp_path, "nvml", MANAGEMENT, INIT=0, REASONS=call, MASK="0x45")
    assert read_gpu_clocks("0000:65:00.0", management=nvml) == GpuClocks(
        sm_mhz=1755,
        memory_mhz=2619,
        temperature_c=61,
        throttled="software power cap, hardware thermal slowdown",
    )


@pytest.mark.parametrize("mask", ["0x0", "0x1"])
def test_a_gpu_that_is_free_or_idle_is_not_throttled(tmp_path: Path, mask: str) -> None:
    call = "nvmlDeviceGetCurrentClocksThrottleReasons"
    nvml = library(tmp_path, "nvml", MANAGEMENT, INIT=0, REASONS=call, MASK=mask)
    assert read_gpu_clocks("0000:65:00.0", management=nvml).throttled is None


def test_what_a_driver_lacks_is_unknown_and_the_rest_is_told(tmp_path: Path) -> None:
    nvml = library(tmp_path, "nvml", MANAGEMENT, INIT=0, REASONS="other", MASK="0x4", OLD=1)
    found = read_gpu_clocks("0000:65:00.0", management=nvml)
    assert found == GpuClocks(sm_mhz=1755, memory_mhz=2619)


@pytest.mark.parametrize("why", ["absent", "refusing", "another gpu", "no nvml"])
def test_without_an_answer_nothing_is_known(tmp_path: Path, why: str) -> None:
    source = "int something(void) { return 0; }" if why == "no nvml" else MANAGEMENT
    init = 1 if why == "refusing" else 0
    nvml = library(tmp_path, "nvml", source, INIT=init, REASONS="other", MASK=0)
    bus_id = "0000:01:00.0" if why == "another gpu" else "0000:65:00.0"
    management = str(tmp_path / "none.so") if why == "absent" else nvml
    assert read_gpu_clocks(bus_id, management=management) == GpuClocks()


def test_the_bus_id_is_that_of_the_first_gpu_cuda_shows(tmp_path: Path) -> None:
    assert find_bus_id(driver=library(tmp_path, "cuda", DRIVER, INIT=0)) == "0000:65:00.0"
    assert find_bus_id(driver=library(tmp_path, "refusing", DRIVER, INIT=100)) is None
    assert find_bus_id(driver=library(tmp_path, "other", "int x(void) {return 0;}")) is None
    assert find_bus_id(driver=str(tmp_path / "none.so")) is None

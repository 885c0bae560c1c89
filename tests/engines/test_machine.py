from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from twofour.engines.machine import (
    available_bytes,
    describe_machine,
    find_bus_id,
    peak_resident_bytes,
    read_clocks,
    read_gpu_clocks,
    reset_peak,
    usable_cores,
)
from twofour.records.latency import Clocks

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")

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
int nvmlInitWithFlags(unsigned flags) { return INIT; }
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


def clocks(folder: Path, bus_id: str, source: str = MANAGEMENT, **defined: object) -> str:
    """What is read where this is NVML: its binding loads it by name, once in a process."""
    Path(library(folder, "nvml", source, **defined)).rename(folder / "libnvidia-ml.so.1")
    code = (
        f"from twofour.engines.machine import read_gpu_clocks; print(read_gpu_clocks({bus_id!r}))"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip()


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


@LINUX
@pytest.mark.parametrize(
    ("limit", "memory"), [("max\n", 8_000_000 * 1024), ("2147483648\n", 2**31), (None, 8192000000)]
)
def test_memory_is_the_machines_or_the_containers_limit(
    tmp_path: Path, limit: str | None, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "proc/meminfo", "MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable: 3000 kB\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    if limit is not None:
        put(tmp_path, "sys/fs/cgroup/memory.max", limit)
    assert describe_machine(tmp_path).memory_bytes == memory
    assert available_bytes() == 3000 * 1024


@LINUX
def test_the_peak_of_memory_starts_anew_where_it_is_reset() -> None:
    reset_peak()
    before = peak_resident_bytes()
    block = b"x" * (64 << 20)
    high = peak_resident_bytes()
    del block
    assert before is not None
    assert high is not None
    assert (63 << 20) < high - before < (80 << 20)
    reset_peak()
    after = peak_resident_bytes()
    assert after is not None
    assert after < high - (32 << 20)


def test_without_proc_the_rest_is_unknown_and_the_cpu_an_architecture(tmp_path: Path) -> None:
    machine = describe_machine(tmp_path)
    assert machine.cpu in {platform.processor(), platform.machine()}
    assert machine.start.cpu_mhz is None


def test_this_machine_has_cores_a_load_and_the_packages_that_are_installed() -> None:
    machine = describe_machine()
    assert machine.cores == usable_cores()
    for package in ("numpy", "torch", "polygraphy"):
        assert f"{package}=={metadata.version(package)}" in machine.packages
    assert machine.python_version == platform.python_version()
    if hasattr(os, "getloadavg"):
        assert machine.start.load_average is not None


@pytest.mark.parametrize(
    "call",
    ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"],
)
def test_the_driver_tells_clocks_temperature_and_reasons(tmp_path: Path, call: str) -> None:
    found = clocks(tmp_path, "0000:65:00.0", INIT=0, REASONS=call, MASK="0x45")
    assert found == repr(
        Clocks(
            gpu_sm_mhz=1755,
            gpu_memory_mhz=2619,
            gpu_temperature_c=61,
            gpu_throttled="software power cap, hardware thermal slowdown",
        )
    )


@pytest.mark.parametrize("mask", ["0x0", "0x1"])
def test_a_gpu_that_is_free_or_idle_is_not_throttled(tmp_path: Path, mask: str) -> None:
    call = "nvmlDeviceGetCurrentClocksThrottleReasons"
    found = clocks(tmp_path, "0000:65:00.0", INIT=0, REASONS=call, MASK=mask)
    assert "gpu_temperature_c=61, gpu_throttled=None" in found


def test_what_a_driver_lacks_is_unknown_and_the_rest_is_told(tmp_path: Path) -> None:
    found = clocks(tmp_path, "0000:65:00.0", INIT=0, REASONS="other", MASK="0x4", OLD=1)
    assert found == repr(Clocks(gpu_sm_mhz=1755, gpu_memory_mhz=2619))


@pytest.mark.parametrize("why", ["refusing", "another gpu", "no nvml"])
def test_without_an_answer_nothing_is_known(tmp_path: Path, why: str) -> None:
    source = "int something(void) { return 0; }" if why == "no nvml" else MANAGEMENT
    init = 1 if why == "refusing" else 0
    bus_id = "0000:01:00.0" if why == "another gpu" else "0000:65:00.0"
    found = clocks(tmp_path, bus_id, source, INIT=init, REASONS="other", MASK=0)
    assert found == repr(Clocks())


def test_without_nvml_nothing_is_known() -> None:
    if find_bus_id() is None:
        assert read_gpu_clocks("0000:65:00.0") == Clocks()


def test_the_bus_id_is_that_of_the_first_gpu_cuda_shows(tmp_path: Path) -> None:
    assert find_bus_id(driver=library(tmp_path, "cuda", DRIVER, INIT=0)) == "0000:65:00.0"
    assert find_bus_id(driver=library(tmp_path, "refusing", DRIVER, INIT=100)) is None
    assert find_bus_id(driver=library(tmp_path, "other", "int x(void) {return 0;}")) is None
    assert find_bus_id(driver=str(tmp_path / "none.so")) is None

"""The machine; its GPU by a driver compiled here: the C interface is what can go wrong."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from twofour.engines.machine import (
    CpuUse,
    available_bytes,
    busy_s,
    cpu_use,
    describe_machine,
    find_bus_id,
    load_between,
    read_clocks,
    usable_cores,
)
from twofour.records.export import Gpu
from twofour.records.latency import Clocks

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")

CPUINFO = "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\ncpu MHz\t\t: 2400.000\n"
DRIVER = r"""
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDeviceGetPCIBusId(char *text, int size, int device) {
    strncpy(text, "0000:65:00.0", size);
    return device == 40 ? 0 : 101;
}
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
    return asked_beside(folder, f"read_gpu_clocks({bus_id!r})", source, **defined)


def asked_beside(folder: Path, question: str, source: str, **defined: object) -> str:
    """What is found where this is NVML: its binding loads it by name, once in a process."""
    Path(library(folder, "nvml", source, **defined)).rename(folder / "libnvidia-ml.so.1")
    code = f"from twofour.engines.machine import find_gpu, read_gpu_clocks; print({question})"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip()


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_cpu_is_read_from_proc_and_the_governors_of_its_cores_from_cpufreq(
    tmp_path: Path,
) -> None:
    put(tmp_path, "proc/cpuinfo", CPUINFO)
    machine = describe_machine(tmp_path)
    assert machine.cpu == "AMD EPYC 9654 96-Core Processor"
    assert machine.start.cpu_governor is None
    assert machine.end is None
    for core, governor in enumerate(("powersave", "performance")):
        put(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor", f"{governor}\n")
    assert read_clocks(tmp_path).cpu_governor == "performance, powersave"


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


_PEAKS = """
from twofour.engines.machine import peak_resident_bytes, reset_peak
reset_peak()
before = peak_resident_bytes()
block = b"x" * (64 << 20)
high = peak_resident_bytes()
del block
reset_peak()
print(high - before, high - peak_resident_bytes())
"""


@LINUX
def test_the_peak_of_memory_starts_anew_where_it_is_reset() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PEAKS], capture_output=True, text=True, check=True
    )
    rise, fall = map(int, done.stdout.split())
    assert (63 << 20) < rise < (80 << 20)
    assert fall > 32 << 20


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


@pytest.mark.parametrize("why", ["refusing", "another gpu", "no nvml"])
def test_without_an_answer_nothing_is_known(tmp_path: Path, why: str) -> None:
    source = "int something(void) { return 0; }" if why == "no nvml" else MANAGEMENT
    init = 1 if why == "refusing" else 0
    bus_id = "0000:01:00.0" if why == "another gpu" else "0000:65:00.0"
    found = clocks(tmp_path, bus_id, source, INIT=init, REASONS="other", MASK=0)
    assert found == repr(Clocks())


def test_the_bus_id_is_that_of_the_first_gpu_cuda_shows(tmp_path: Path) -> None:
    assert find_bus_id(driver=library(tmp_path, "cuda", DRIVER, INIT=0)) == "0000:65:00.0"
    assert find_bus_id(driver=library(tmp_path, "refusing", DRIVER, INIT=100)) is None
    assert find_bus_id(driver=library(tmp_path, "other", "int x(void) {return 0;}")) is None
    assert find_bus_id(driver=str(tmp_path / "none.so")) is None


def test_a_gpu_is_described_by_its_driver(tmp_path: Path) -> None:
    gpu = Gpu(
        name="NVIDIA Test 9000",
        compute_capability=(8, 9),
        memory_bytes=24 << 30,
        driver="550.54 (CUDA 12.4)",
    )
    question = f"find_gpu(driver={library(tmp_path, 'cuda', DRIVER, INIT=0)!r})"
    found = asked_beside(tmp_path, question, MANAGEMENT, INIT=0, REASONS="other", MASK=0)
    assert found == repr(gpu)
    assert gpu.has_sparse_tensor_cores


_SPIN = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"


def use(at_s: float, machine_s: float, own_s: float) -> CpuUse:
    return CpuUse(at_s=at_s, machine_s=machine_s, own_s=own_s)


def test_the_load_is_what_neither_this_process_nor_its_workers_took() -> None:
    load = load_between(use(0, 100, 10), use(10, 112, 15), 8)
    assert load is not None
    assert (load.other_cores, load.batch) == (0.7, 8)
    assert load.part == pytest.approx(0.7 / load.cores)


@LINUX
def test_a_system_that_does_not_tell_gives_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(psutil, "PROCFS_PATH", str(tmp_path))
        assert cpu_use(()) is None
    assert load_between(None, use(1, 1, 1), None) is None
    assert load_between(use(1, 1, 1), None, None) is None


@LINUX
def test_only_cores_that_may_be_used_count_each_with_all_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = sorted(os.sched_getaffinity(0))
    cores = [
        f"cpu{number} 100 10 20 5000 7 1 2 300 50 0"
        if number in mine
        else f"cpu{number} 1000000 0 0 0 0 0 0 0 0 0"
        for number in range(max(mine) + 2)
    ]
    (tmp_path / "stat").write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *cores, "intr 1\n"]))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    ticks = os.sysconf("SC_CLK_TCK")
    assert busy_s() == pytest.approx(len(mine) * (100 + 10 + 20 + 1 + 2 + 300) / ticks)


@LINUX
def test_work_of_a_process_named_as_ours_is_no_load_and_that_of_another_is() -> None:
    with subprocess.Popen([sys.executable, "-c", _SPIN.format(seconds=0.8)]) as spinning:
        time.sleep(0.1)
        ours, others = cpu_use((spinning.pid,)), cpu_use(())
        time.sleep(0.5)
        load_ours = load_between(ours, cpu_use((spinning.pid,)), None)
        load_others = load_between(others, cpu_use(()), None)
        spinning.kill()
    assert load_ours is not None
    assert load_others is not None
    assert load_others.other_cores > 0.1
    assert load_others.other_cores > load_ours.other_cores

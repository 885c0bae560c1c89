from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from twofour.engines.machine import CpuUse, busy_s, cpu_use, load_between

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
_SPIN = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"


def use(at_s: float, machine_s: float, own_s: float) -> CpuUse:
    return CpuUse(at_s=at_s, machine_s=machine_s, own_s=own_s)


def test_the_load_is_what_neither_this_process_nor_its_workers_took() -> None:
    load = load_between(use(0, 100, 10), use(10, 112, 15), 8)
    assert load is not None
    assert (load.other_cores, load.batch) == (0.7, 8)
    assert load.part == pytest.approx(0.7 / load.cores)


def test_counters_that_lag_behind_give_no_load_below_zero() -> None:
    load = load_between(use(0, 100, 10), use(1, 101, 11.5), None)
    assert load is not None
    assert load.other_cores == 0.0


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
def test_a_process_counts_with_its_own_time_and_one_that_ended_with_none() -> None:
    with subprocess.Popen([sys.executable, "-c", _SPIN.format(seconds=0.5)]) as spinning:
        before = cpu_use(())
        spinning.wait()
    after = cpu_use((spinning.pid,))
    assert before is not None
    assert after is not None
    assert after.own_s - before.own_s < 0.2


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

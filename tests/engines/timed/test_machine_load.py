from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twofour.engines.timed.load import CpuUse, cpu_use, load_between

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


def test_a_system_that_does_not_tell_gives_no_load(tmp_path: Path) -> None:
    assert cpu_use((), tmp_path) is None
    assert load_between(None, use(1, 1, 1), None) is None
    assert load_between(use(1, 1, 1), None, None) is None


@LINUX
def test_only_cores_that_may_be_used_count_and_names_may_hold_anything(tmp_path: Path) -> None:
    mine = min(os.sched_getaffinity(0))
    (tmp_path / "stat").write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        f"cpu{mine} 100 10 20 5000 7 1 2 300 50 0\n"
        "cpu9999 1000000 0 0 0 0 0 0 0 0 0\nintr 1\n"
    )
    for process, name, own in ((os.getpid(), "(py) thon) R 1", 30), (4711, "a b", 12)):
        (tmp_path / str(process)).mkdir()
        rest = " ".join(["S", *(str(i) for i in range(10)), str(own), "5", "0"])
        (tmp_path / str(process) / "stat").write_text(f"{process} ({name}) {rest}\n")
    found = cpu_use((4711, 4712), tmp_path)
    ticks = os.sysconf("SC_CLK_TCK")
    assert found is not None
    assert found.machine_s == (100 + 10 + 20 + 1 + 2 + 300) / ticks
    assert found.own_s == (30 + 5 + 12 + 5) / ticks


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

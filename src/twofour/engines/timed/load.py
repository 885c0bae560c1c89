"""How busy others keep the cores of this process, from Linux's /proc.

psutil would tell the same on more systems, but boxes that have TensorRT and little else lack it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twofour.engines.ort_session import usable_cores
from twofour.records.latency import RoundLoad

PROC = Path("/proc")
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq, steal of a cpu line (proc_stat(5)); guests are in user."""
_OWN_FIELDS = (11, 12)
"""utime and stime, counted behind the name of the program (proc_pid_stat(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """Counters at one moment; only differences mean something."""

    at_s: float
    machine_s: float
    """Seconds that the cores of this process were busy, with whatever it was."""
    own_s: float
    """Seconds of processor time that this process and those named with it took."""


def cpu_use(processes: Sequence[int], proc: Path = PROC) -> CpuUse | None:
    """Now, for this process and `processes`; None where the system does not tell."""
    try:
        machine = sum(map(_core_ticks, _core_lines(proc)))
        own = sum(_process_ticks(proc, process) for process in (os.getpid(), *processes))
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return CpuUse(at_s=time.perf_counter(), machine_s=machine / ticks, own_s=own / ticks)


def load_between(
    before: CpuUse | None, after: CpuUse | None, batch: int | None
) -> RoundLoad | None:
    """What others took of the cores between two moments; None where that is not known."""
    if before is None or after is None or after.at_s <= before.at_s:
        return None
    others_s = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    cores = usable_cores()
    busy = others_s / (after.at_s - before.at_s)
    return RoundLoad(other_cores=min(max(busy, 0.0), float(cores)), cores=cores, batch=batch)


def _core_lines(proc: Path) -> list[list[str]]:
    """Of the cores that this process may use."""
    may_use = os.sched_getaffinity(0)
    lines = (line.split() for line in (proc / "stat").read_text(encoding="ascii").splitlines())
    found = [
        line[1:]
        for line in lines
        if line and line[0][:3] == "cpu" and line[0] != "cpu" and int(line[0][3:]) in may_use
    ]
    if not found:
        raise ValueError("no core")
    return found


def _core_ticks(fields: Sequence[str]) -> int:
    return sum(int(fields[i]) for i in _BUSY_FIELDS if i < len(fields))


def _process_ticks(proc: Path, process: int) -> int:
    """0 for one that has ended: its time is in nobody's counter then."""
    try:
        text = (proc / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    behind_name = text.rpartition(")")[2].split()
    return sum(int(behind_name[i]) for i in _OWN_FIELDS)

"""Resident memory of this process, and what the machine has left."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
_RESET_PEAK = "5"  # proc(5): resets VmHWM to the memory that is resident now
_KIB = 1024


def reset_peak() -> None:
    """Let the peak start from what is resident now, where the system can (Linux)."""
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return


def peak_resident_bytes() -> int | None:
    """Most resident memory since the last reset; since the start where there is none."""
    peak = _kib(_STATUS, "VmHWM")
    if peak is not None:
        return peak
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else _KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int | None:
    """Memory that can be had without swapping (MemAvailable); None where it is not known."""
    return _kib(_MEMINFO, "MemAvailable")


def _kib(path: Path, key: str) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * _KIB if found else None

"""The machine: versions, the GPU, its clocks and temperature."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import numpy as np
import torch

from gpu_matrix.clocks import CudaClock
from gpu_matrix.lab import Lab
from gpu_matrix.rows import Row, attempt, short


def environment(lab: Lab) -> Row:
    """What the numbers depend on; a field that cannot be had is null."""
    backends: Any = torch.backends
    facts: Row = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "cusparselt": attempt(lambda: int(backends.cusparselt.version())),
        "cusparselt_available": attempt(lambda: bool(backends.cusparselt.is_available())),
        "cudnn": attempt(backends.cudnn.version),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "device": lab.device,
    }
    if not isinstance(lab.clock, CudaClock):
        return facts
    gpu: Any = torch.cuda.get_device_properties(0)
    return facts | {
        "gpu": gpu.name,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "memory_bytes": gpu.total_memory,
        "l2_bytes": getattr(gpu, "L2_cache_size", None),
        "driver": nvidia_smi("driver_version"),
        "event_tick_us": short(1e3 * lab.clock.tick_ms),
        "event_empty_us": short(1e3 * lab.clock.empty_ms),
    }


def nvidia_smi(field_name: str) -> str | None:
    """One value about the first GPU; None where the program or the field is missing."""
    command = ["nvidia-smi", f"--query-gpu={field_name}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def clocks(when: str) -> Row:
    """Clocks, temperature and power now; right after work they are those of the work."""
    names = "clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"
    values = nvidia_smi(names)
    if values is None:
        state: Row = {"when": when}
        if torch.cuda.is_available():
            state["clocks.sm"] = attempt(torch.cuda.clock_rate)
            state["temperature.gpu"] = attempt(torch.cuda.temperature)
        return state
    reasons = nvidia_smi("clocks_event_reasons.active")  # renamed with driver 535
    return (
        {"when": when}
        | dict(zip(names.split(","), values.split(", "), strict=False))
        | {"throttle_reasons": reasons or nvidia_smi("clocks_throttle_reasons.active")}
    )

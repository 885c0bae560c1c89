"""What every case is measured with, and how a lost device is noticed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu_matrix.clocks import Call, Clock
from gpu_matrix.families import Family
from gpu_matrix.rows import first_line


@dataclass(frozen=True)
class Limits:
    """When the rounds of a case end."""

    rounds: int
    least: int
    seconds: float


KERNEL_LIMITS = Limits(40, 12, 0.35)
MODEL_LIMITS = Limits(30, 12, 1.5)
SMOKE_LIMITS = Limits(12, 10, 0.2)


@dataclass(frozen=True)
class Variant:
    """One way to do a case."""

    run: Call
    output: Callable[[Any], Tensor]
    """From what `run` returns to what is compared, (rows, ...)."""
    note: str | None = None


Send = Callable[[tuple[Any, ...]], None]
Builders = Mapping[str, Callable[[], Variant]]


@dataclass
class Lab:
    """What every case is measured with."""

    clock: Clock
    device: str
    smoke: bool
    seed: int
    send: Send
    """Hears what is tried next, in case it takes the process with it."""
    banned: frozenset[str] = frozenset()
    """Variants that did so twice."""
    uncapturable: dict[str, str] = field(default_factory=dict)
    """Variants that no graph could hold, and why: a failed capture is not tried twice."""
    family: tuple[tuple[str, str], Family] | None = None
    """The models of the last model case; the next one often needs the same."""


class DeviceLostError(Exception):
    """The CUDA context is beyond use; only a new process helps."""


def require_device(lab: Lab) -> None:
    """Raises DeviceLostError where not everything runs on the device any more."""
    try:
        lab.clock.settle()
        # random numbers fail for good where a broken capture left their generator behind
        torch.rand(8, device=lab.device).sum().item()
    except RuntimeError as error:
        raise DeviceLostError(first_line(error)) from error


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing before CUDA is initialised

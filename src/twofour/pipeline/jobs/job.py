"""A job, what becomes of it, and how often one is tried whose worker was lost."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from twofour.engines.protocol import no_progress
from twofour.errors import BuildFailedError
from twofour.pipeline.workers import outcome

MOST_TRIES = 3
"""Of a job whose worker ends before it answers: by then it is the job that ends them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One call of a service; two jobs of one key are the same job."""

    key: str
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What does the jobs, made once in each worker: `module:Class` and the name of its method.

    The class is made with a callback for its progress. The method is called with the number of the
    try, from 0, and the arguments of the job.
    """

    name: str
    command: str


Done = Callable[[str, Any], None]
"""Told the key of a job and its value, or the TwofourError that it ended in: once for each."""


class LostError(BuildFailedError):
    """A job took its worker with it every time it was tried."""

    def __init__(self, key: str, endings: tuple[str, ...]) -> None:
        tries = f"{len(endings)} tries" if len(endings) > 1 else "its try"
        super().__init__(f"its process ended in {tries}: {', '.join(dict.fromkeys(endings))}")
        self.key = key


def packed(service: Service, job: Job, number: int) -> bytes:
    """A try of a job, for `unpacked` in a process that may not have found twofour yet."""
    return pickle.dumps((service, number, job.arguments))


def unpacked(work: bytes) -> object:
    """Do what `packed` holds, in this process: a value, or the TwofourError it ended in."""
    service, number, arguments = pickle.loads(work)  # noqa: S301  # our own
    return outcome(getattr(_made(service.name), service.command), (number, *arguments))


@cache
def _made(name: str) -> object:
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)(no_progress)

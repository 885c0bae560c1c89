"""Work side by side in threads, with the same bits for any number of them.

A BLAS that splits one product over its threads adds in an order that depends on how many there
are. So every product of the methods runs in one thread, and pieces of a size that depends on the
problem alone run side by side.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

import numpy as np  # noqa: F401  its BLAS must be loaded before it is looked for
from threadpoolctl import ThreadpoolController

T = TypeVar("T")
R = TypeVar("R")


@functools.cache
def _libraries() -> ThreadpoolController:
    """Those loaded when first asked, numpy's BLAS among them: to look for them takes 1 ms."""
    return ThreadpoolController()


class _Limit:
    """Who has limited BLAS to one thread: it belongs to the process, so the last one lifts it."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.users = 0
        self.limiter: Any = None


_limit = _Limit()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within it numpy's BLAS uses the calling thread alone; may be nested, and entered at once."""
    with _limit.lock:
        if not _limit.users:
            _limit.limiter = _libraries().limit(limits=1, user_api="blas")
            _limit.limiter.__enter__()
        _limit.users += 1
    try:
        yield
    finally:
        with _limit.lock:
            _limit.users -= 1
            if not _limit.users:
                _limit.limiter.__exit__(None, None, None)


def side_by_side(
    work: Callable[[T], R], pieces: Sequence[T], *, threads: int | None = None
) -> list[R]:
    """What `work` makes of each piece, in their order; the first error in that order is raised."""
    threads = min(available_threads() if threads is None else threads, len(pieces))
    if threads <= 1:
        return [work(piece) for piece in pieces]
    with one_blas_thread(), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, pieces))


def available_threads() -> int:
    """The cores this process may use, or fewer where OMP_NUM_THREADS says so."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    told = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores, int(told))) if told.isdecimal() else cores

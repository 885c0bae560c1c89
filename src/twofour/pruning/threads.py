"""Work side by side in threads, with the same bits for any number of them.

A BLAS that splits one product over its threads adds in an order that depends on how many there
are. So every product of the methods runs in one thread, and pieces of a size that depends on the
problem alone run side by side.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import numpy as np  # noqa: F401  its BLAS must be loaded before it is looked for
from threadpoolctl import ThreadpoolController

T = TypeVar("T")
R = TypeVar("R")


@functools.cache
def _libraries() -> ThreadpoolController:
    """Those loaded when first asked, numpy's BLAS among them: to look for them takes 1 ms."""
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[object]:
    """Within it numpy's BLAS uses the calling thread alone, in the whole process; may be nested."""
    limit: AbstractContextManager[object] = _libraries().limit(limits=1, user_api="blas")
    return limit


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

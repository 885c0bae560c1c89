"""Threads and memory of the methods: the same bits for any number of threads, arrays that go to
files when memory is full.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np  # its BLAS must be loaded before it is looked for
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from twofour.errors import system_errors

T = TypeVar("T")
R = TypeVar("R")


@functools.cache
def _libraries() -> ThreadpoolController:
    """The libraries loaded at the first call, numpy's BLAS among them; finding them takes 1 ms."""
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[object]:
    """Within it numpy's BLAS uses the calling thread alone, in the whole process; may be nested."""
    limit: AbstractContextManager[object] = _libraries().limit(limits=1, user_api="blas")
    return limit


def side_by_side(
    work: Callable[[T], R], pieces: Sequence[T], *, threads: int | None = None
) -> list[R]:
    """The result of `work` for each piece, in their order; the first error in that order is raised.

    None: as many threads as `available_threads`.
    """
    if threads is None:
        threads = available_threads()
    threads = min(threads, len(pieces))
    if threads <= 1:
        return list(map(work, pieces))
    with one_blas_thread(), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, pieces))


def available_threads() -> int:
    """The cores this process may use, or fewer where OMP_NUM_THREADS says so."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal():
        cores = max(1, min(cores, int(wanted)))
    return cores


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a store: its values, or the file that contains them."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    values: NDArray[Any] | Path


class ArrayStore:
    """Arrays kept for later: in memory up to a limit, then in files of a folder."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._free_bytes = memory_bytes
        self._files = 0

    def put(self, array: NDArray[Any]) -> StoredArray:
        """Keep an array, which nobody may change any more.

        Raises BadInputError where the file system refuses.
        """
        values: NDArray[Any] | Path = array
        if 0 < array.nbytes > self._free_bytes:
            self._files += 1
            values = self._folder / f"kept-{self._files}.bin"
            what = f"cannot write intermediate results of calibration to {self._folder}"
            with system_errors(what, "free some space, or take fewer samples"):
                np.ascontiguousarray(array).tofile(values)
        else:
            self._free_bytes -= array.nbytes
        return StoredArray(array.shape, array.dtype, values)

    @staticmethod
    def get(stored: StoredArray) -> NDArray[Any]:
        """The values, not to be changed."""
        if isinstance(stored.values, Path):
            return np.fromfile(stored.values, np.uint8).view(stored.dtype).reshape(stored.shape)
        return stored.values

    def drop(self, stored: StoredArray) -> None:
        """Forget an array, once."""
        if isinstance(stored.values, Path):
            stored.values.unlink(missing_ok=True)
        else:
            self._free_bytes += stored.values.nbytes

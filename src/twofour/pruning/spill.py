"""Arrays kept for later, in memory up to a limit, then in files; and freed memory given back."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twofour.errors import BadInputError
from twofour.pruning.methods.problem import Array

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """An array that was put away; its values, or the file that they are in."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    values: Array | Path


class Room:
    """Memory of a limited size, and a folder for what does not fit into it."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder, self._free_bytes, self._files = folder, memory_bytes, 0

    def put(self, array: Array) -> Kept:
        """Keep an array, which nobody may change any more.

        Raises BadInputError where the file system refuses.
        """
        values: Array | Path = array
        if 0 < array.nbytes > self._free_bytes:
            self._files += 1
            values = self._folder / f"kept-{self._files}.bin"
            try:
                np.ascontiguousarray(array).tofile(values)
            except OSError as error:
                raise BadInputError(
                    f"cannot keep what calibration gives in {self._folder}: "
                    f"{error.strerror or error}",
                    hint="free some space, or take fewer samples",
                ) from error
        else:
            self._free_bytes -= array.nbytes
        return Kept(array.shape, array.dtype, values)

    @staticmethod
    def get(kept: Kept) -> Array:
        """The values, not to be changed."""
        if isinstance(kept.values, Path):
            return np.fromfile(kept.values, np.uint8).view(kept.dtype).reshape(kept.shape)
        return kept.values

    def drop(self, kept: Kept) -> None:
        """Forget an array, once."""
        if isinstance(kept.values, Path):
            kept.values.unlink(missing_ok=True)
        else:
            self._free_bytes += kept.values.nbytes


def give_back_memory() -> None:
    """Let the operating system have what was freed, where the C library keeps it (glibc).

    Tensors of some megabytes lie in its heaps, one of each thread: what one thread freed another
    cannot use, and holes between what is kept add up.
    """
    trim = _of_c_library("malloc_trim")
    if trim is not None:
        trim(0)


def give_back_large_arrays() -> None:
    """From now on what is freed of some size goes back to the operating system at once (glibc).

    Else glibc takes ever larger arrays, to 32 MB, from its heaps, where holes add up from block to
    block of a model.
    """
    set_option = _of_c_library("mallopt")
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _LARGE_BYTES)


@functools.cache
def _of_c_library(name: str) -> Callable[..., object] | None:
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # no C library to be had under no name: Windows
        return None

"""The CUDA runtime library for Polygraphy, which does not look where CUDA 13's wheels put it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_SEARCHED = "LD_LIBRARY_PATH"


def cuda_runtime_folders(search: list[str] | None = None) -> tuple[Path, ...]:
    """Folders of CUDA runtime wheels (nvidia/cu13/lib and its kin) on Python's path."""
    roots = [Path(entry, "nvidia") for entry in (sys.path if search is None else search) if entry]
    found = (library.parent for root in roots for library in root.glob("cu*/lib/libcudart.so*"))
    return tuple(sorted(set(found)))


def load_cuda_runtime() -> None:
    """Load libcudart through Polygraphy, with the wheels' folders searched last.

    Polygraphy reads the variable once, when it loads the library; it is put back after. Raises
    what Polygraphy raises (OSError where there is no such library).
    """
    from polygraphy import cuda

    before = os.environ.get(_SEARCHED)
    parts = [*filter(None, [before]), *map(str, cuda_runtime_folders())]
    os.environ[_SEARCHED] = os.pathsep.join(parts)
    try:
        cuda.wrapper()
    finally:
        if before is None:
            del os.environ[_SEARCHED]
        else:
            os.environ[_SEARCHED] = before

"""A module `tensorrt` with what 8.6 has and lacks, over the 10.16 bindings; put first on the path.

The 8.6 bindings come only in a wheel of 1 GB for CPython 3.10, so this is an approximation: the
differences that the engine and Polygraphy look at are written down by hand, after the Python API
reference of 8.6; everything else is 10.16's.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import tensorrt_bindings as newer  # type: ignore[import-not-found]  # only on the path of a test

GONE = {"IProgressMonitor", "IStreamReader", "IStreamReaderV2"}
BUILDER_FLAGS = [
    *("FP16", "INT8", "FP8", "TF32", "SPARSE_WEIGHTS", "DEBUG", "GPU_FALLBACK", "REFIT"),
    *("DISABLE_TIMING_CACHE", "SAFETY_SCOPE", "OBEY_PRECISION_CONSTRAINTS", "DIRECT_IO"),
    *("PREFER_PRECISION_CONSTRAINTS", "REJECT_EMPTY_ALGORITHMS", "VERSION_COMPATIBLE"),
    "EXCLUDE_LEAN_RUNTIME",
]


def fewer(enum: Any, names: list[str]) -> type:
    """An enum of the bindings with only these members."""
    members = {name: enum.__members__[name] for name in names}
    return type(enum.__name__, (), {**members, "__members__": members})


shim = types.ModuleType("tensorrt")
vars(shim).update({name: value for name, value in vars(newer).items() if name not in GONE})
shim.__dict__["__name__"] = "tensorrt"
shim.__dict__["__version__"] = "8.6.1"
shim.__dict__["BuilderFlag"] = fewer(newer.BuilderFlag, BUILDER_FLAGS)
shim.__dict__["NetworkDefinitionCreationFlag"] = fewer(
    newer.NetworkDefinitionCreationFlag, ["EXPLICIT_BATCH"]
)
sys.modules["tensorrt"] = shim

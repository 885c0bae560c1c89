"""Whether this Python can run twofour's main job on an ONNX file; the standard library alone."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

NEEDED = (
    *("numpy", "onnx", "onnx_ir", "safetensors", "array_api_compat", "threadpoolctl", "psutil"),
    *("pydantic", "jinja2", "typer", "rich", "twofour"),
)
"""Modules that it imports, whatever the engine is."""


def missing_words(modules: Sequence[str] = NEEDED) -> str | None:
    """What this Python lacks and which one has it; None where nothing is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return (
        f"{sys.executable} has no {', '.join(missing)}\n"
        "hint: PYTHONPATH=src trt86/run benchmarks/engines.py, with the Python of the pack that "
        "benchmarks/device/README.md describes"
    )

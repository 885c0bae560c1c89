"""Which opsets the ONNX parser of TensorRT before 10 reads."""

from __future__ import annotations

import re

_VERSION = re.compile(r"(\d+)\.?(\d+)?")
_NEWEST_BEFORE_8_4 = 13
_NEWEST_OF_8 = 17
"""operators.md of onnx-tensorrt: release/8.0-GA and 8.2-GA say 13, 8.5-GA and 8.6-GA say 17, 8.5
without LayerNormalization. 8.4 is taken for an 8.5: what it says was not found."""
_WRITTEN = 17
"""The oldest opset that torch models are exported in (export/opset17.py)."""


def opset_for(version: str | None) -> int | None:
    """The opset to export in for that version of TensorRT; None: any that torch writes will do."""
    return None if opset_advice(version, _WRITTEN + 1) is None else _WRITTEN


def opset_advice(version: str | None, opset: int) -> str | None:
    """What to do about an opset newer than that version of TensorRT reads; None: nothing.

    Its parser takes the file all the same and reads operators by their older definition: the axes
    that ReduceMean has as an input since 18 are ignored (NVIDIA/TensorRT issue 3467).
    """
    match = _VERSION.match(version or "")
    if match is None or int(match[1]) >= 10:
        return None
    old = int(match[1]) < 8 or (match[1] == "8" and match[2] is not None and int(match[2]) < 4)
    newest = _NEWEST_BEFORE_8_4 if old else _NEWEST_OF_8
    if opset <= newest:
        return None
    remedy = f"export the torch model with --opset {_WRITTEN}"
    return (
        f"TensorRT {version} reads opset {newest} and older and can be silently wrong about "
        f"later ones; this file has {opset}: {'a newer TensorRT reads it' if old else remedy}"
    )

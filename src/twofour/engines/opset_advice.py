"""Which opsets the ONNX parser of TensorRT before 10 reads."""

from __future__ import annotations

NEWEST_OF_8 = 17
"""operators.md of onnx-tensorrt, release/8.5-GA and release/8.6-GA."""


def opset_advice(version: str | None, opset: int) -> str | None:
    """What to do about an opset newer than that version of TensorRT reads; None: nothing.

    Its parser takes the file all the same and reads operators by their older definition: the axes
    that ReduceMean has as an input since 18 are ignored (NVIDIA/TensorRT issue 3467).
    """
    major = (version or "").split(".")[0]
    if not major.isdigit() or int(major) >= 10 or opset <= NEWEST_OF_8:
        return None
    return (
        f"TensorRT {version} reads opset {NEWEST_OF_8} and older and can be silently wrong about "
        f"later ones; this file has {opset}: export with --opset {NEWEST_OF_8}"
    )

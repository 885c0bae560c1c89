"""Which opsets the ONNX parser of TensorRT 8.x reads."""

from __future__ import annotations

NEWEST_OF_8 = 17
"""Of the ONNX parser in TensorRT 8.5 and 8.6 (operators.md of onnx-tensorrt, release/8.6-GA)."""


def opset_advice(major: int, opset: int) -> str | None:
    """What to do about an opset newer than TensorRT of that major version reads; None: nothing.

    The parser does not refuse such a file for its opset: operators that changed since, as
    ReduceMean did in 18, fail or are read by their older definition.
    """
    if major > 8 or opset <= NEWEST_OF_8:
        return None
    return (
        f"TensorRT 8 reads opset {NEWEST_OF_8} and older, this file has {opset}: "
        f"export with --opset {NEWEST_OF_8}"
    )

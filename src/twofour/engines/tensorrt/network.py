"""What a TensorRT network takes from its ONNX file: operators of an opset, and types."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

_QUANTIZERS = {"QuantizeLinear", "DequantizeLinear"}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Precisions:
    """Types in a file that a weakly typed TensorRT (8.x, 9.x) must be allowed; float32 need not."""

    float16: bool
    bfloat16: bool
    int8: bool
    """The graph has QuantizeLinear or DequantizeLinear nodes."""

    @property
    def in_words(self) -> str:
        """int8, float16 and bfloat16, joined with "+"; float32 where the graph has none of them."""
        used = (("int8", self.int8), ("float16", self.float16), ("bfloat16", self.bfloat16))
        return "+".join(word for word, is_used in used if is_used) or "float32"


def precisions_of(model: onnx.ModelProto) -> Precisions:
    """The types of its main graph's tensors; no value is looked at."""
    import onnx

    graph = model.graph
    types = set(_types(graph))
    return Precisions(
        float16=onnx.TensorProto.FLOAT16 in types,
        bfloat16=onnx.TensorProto.BFLOAT16 in types,
        int8=any(node.op_type in _QUANTIZERS for node in graph.node),
    )


def _types(graph: onnx.GraphProto) -> Iterable[int]:
    for initializer in graph.initializer:
        yield initializer.data_type
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.type.tensor_type.elem_type
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        if attribute.name == "to":  # of Cast
            yield attribute.i
        elif attribute.name == "value":  # of Constant
            yield attribute.t.data_type

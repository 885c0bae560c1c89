"""Which precisions an ONNX file uses: what a weakly typed TensorRT (8.x, 9.x) must be allowed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

_QUANTIZERS = {"QuantizeLinear", "DequantizeLinear"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precisions:
    """Types a builder flag stands for; float32 needs none."""

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

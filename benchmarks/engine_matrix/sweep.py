"""Chains of layers that have every pair of channel counts once, as ONNX files; numpy and onnx only.

A chain visits the counts so that each ordered pair (C, K), equal ones too, is one layer: no two
layers read the same tensor, so a builder cannot merge them, and there is one layer for each pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CHANNELS = (16, 32, 64, 128, 256, 512, 1024, 2048)
GROUPED_CHANNELS = (64, 256, 1024)
OPSET = 17
IMAGE = 14
"""Height and width of the images."""
TOKENS = 128
"""Rows of a matrix product for each example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Layers of one kind, in a row."""

    op: str
    """Conv, Gemm or MatMul."""
    channels: tuple[int, ...] = CHANNELS
    kernel: int = 1
    groups: int = 1


CHAINS = {
    "conv3x3": Chain(op="Conv", kernel=3),
    "conv1x1": Chain(op="Conv"),
    "matmul": Chain(op="MatMul"),
    "gemm": Chain(op="Gemm"),
    "conv3x3g2": Chain(op="Conv", kernel=3, groups=2, channels=GROUPED_CHANNELS),
    "conv3x3g32": Chain(op="Conv", kernel=3, groups=32, channels=GROUPED_CHANNELS),
}


def write_sweep(chain: Chain, target: Path, seed: int = 0) -> None:
    """The chain as a dense float16 network with float32 input and output and a dynamic batch."""
    rng = np.random.default_rng(seed)
    visits = list(circuit(chain.channels))
    nodes = [helper.make_node("Cast", ["x"], ["v0"], name="cast_x", to=TensorProto.FLOAT16)]
    constants: list[onnx.TensorProto] = []
    for index, (channels, outputs) in enumerate(itertools.pairwise(visits)):
        add = _LAYERS[chain.op]
        layer, weights = add(chain, (channels, outputs), index, rng)
        nodes += layer
        constants += weights
    last = f"v{len(visits) - 1}"
    nodes.append(helper.make_node("Cast", [last], ["y"], name="cast_y", to=TensorProto.FLOAT))
    tail = {"Conv": [IMAGE, IMAGE], "Gemm": [], "MatMul": []}[chain.op]
    middle = [TOKENS] if chain.op == "MatMul" else []
    ends = [
        helper.make_tensor_value_info(
            name, TensorProto.FLOAT, ["batch", *middle, visits[at], *tail]
        )
        for name, at in (("x", 0), ("y", -1))
    ]
    graph = helper.make_graph(nodes, target.stem, ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.save(model, target)


def circuit(counts: Sequence[int]) -> Iterator[int]:
    """Every ordered pair of counts as neighbours exactly once, beginning and ending with the first.

    An Eulerian circuit of the complete directed graph with loops, by Hierholzer's algorithm.
    """
    unused = {count: list(reversed(counts)) for count in counts}
    stack, found = [counts[0]], []
    while stack:
        following = unused[stack[-1]]
        if following:
            stack.append(following.pop())
        else:
            found.append(stack.pop())
    return reversed(found)


_Layer = tuple[list[onnx.NodeProto], list[onnx.TensorProto]]
_Sizes = tuple[int, int]


def _conv(chain: Chain, sizes: _Sizes, index: int, rng: np.random.Generator) -> _Layer:
    channels, outputs = sizes
    fan_in = channels // chain.groups
    name = f"conv_{index}_{channels}_{outputs}"
    shape = (outputs, fan_in, chain.kernel, chain.kernel)
    padding = chain.kernel // 2
    conv = helper.make_node(
        "Conv",
        [f"v{index}", f"{name}.weight"],
        [f"{name}_out"],
        name=name,
        group=chain.groups,
        kernel_shape=[chain.kernel] * 2,
        pads=[padding] * 4,
    )
    return [conv, _relu(name, index)], [_weight(f"{name}.weight", shape, np.prod(shape[1:]), rng)]


def _gemm(_chain: Chain, sizes: _Sizes, index: int, rng: np.random.Generator) -> _Layer:
    channels, outputs = sizes
    name = f"gemm_{index}_{channels}_{outputs}"
    inputs = [f"v{index}", f"{name}.weight", f"{name}.bias"]
    gemm = helper.make_node("Gemm", inputs, [f"{name}_out"], name=name, transB=1)
    bias = numpy_helper.from_array(np.zeros(outputs, np.float16), f"{name}.bias")
    weight = _weight(f"{name}.weight", (outputs, channels), channels, rng)
    return [gemm, _relu(name, index)], [weight, bias]


def _matmul(_chain: Chain, sizes: _Sizes, index: int, rng: np.random.Generator) -> _Layer:
    channels, outputs = sizes
    name = f"matmul_{index}_{channels}_{outputs}"
    inputs = [f"v{index}", f"{name}.weight"]
    matmul = helper.make_node("MatMul", inputs, [f"{name}_out"], name=name)
    weight = _weight(f"{name}.weight", (channels, outputs), channels, rng)
    return [matmul, _relu(name, index)], [weight]


_LAYERS: dict[str, Callable[[Chain, _Sizes, int, np.random.Generator], _Layer]] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": _matmul,
}


def _relu(name: str, index: int) -> onnx.NodeProto:
    return helper.make_node("Relu", [f"{name}_out"], [f"v{index + 1}"], name=f"{name}_relu")


def _weight(
    name: str, shape: tuple[int, ...], fan_in: int, rng: np.random.Generator
) -> onnx.TensorProto:
    """Variance 2.3 / fan-in; the larger halves of the weights have 2 / fan-in (He et al. 2015)."""
    array = rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(2.3 / fan_in))
    return numpy_helper.from_array(array.astype(np.float16), name)

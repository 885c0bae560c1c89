"""A perceptron as an ONNX file whose layers differ in what pruning them loses, and its metric."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import helper

from support import onnx_models as om
from support.onnx_models import Array

WIDTHS = (16, 32, 32, 32, 8)
NAMES = ("first", "robust", "middle", "head")


def save_mlp(path: Path, *, half: bool = True) -> Path:
    """Gemm layers with ReLU between; half precision, as TensorRT has no sparse float32 kernels."""
    dtype = np.float16 if half else np.float32
    constants, nodes, name = {}, [], "x"
    for layer, (weight, bias) in _arrays().items():
        constants[f"{layer}.weight"] = weight.astype(dtype)
        constants[f"{layer}.bias"] = bias.astype(dtype)
        last = layer == NAMES[-1]
        out = "y" if last else f"{layer}.out"
        read = [name, f"{layer}.weight", f"{layer}.bias"]
        nodes.append(helper.make_node("Gemm", read, [out], name=layer, transB=1))
        if not last:
            name = f"{layer}.relu"
            nodes.append(helper.make_node("Relu", [out], [name]))
    made = om.model(nodes, constants, inputs={"x": ["batch", WIDTHS[0]]}, opset=18, dtype=dtype)
    return om.save(made, path)


def evaluate(predict: Callable[..., tuple[Array, ...]]) -> dict[str, float]:
    """How often, in per cent, the largest output is that of the dense model; how far all are off.

    The first is better when it is higher, the second when it is lower.
    """
    x = np.random.default_rng(5).normal(size=(200, WIDTHS[0])).astype(np.float16)
    found, expected = np.asarray(predict(x)[0], np.float64), _dense(x)
    same = float((found.argmax(1) == expected.argmax(1)).mean())
    return {"agreement": 100 * same, "error": float(np.abs(found - expected).mean())}


def agreement(predict: Callable[..., tuple[Array, ...]]) -> float:
    """The first of these figures."""
    return evaluate(predict)["agreement"]


def broken(_predict: Callable[..., tuple[Array, ...]]) -> float:
    """Raises."""
    raise ValueError("no such data")


def _arrays() -> dict[str, tuple[Array, Array]]:
    """Weight and bias of each layer; `robust` is 2:4 but for noise, so pruning it costs little."""
    found = {}
    for i, layer in enumerate(NAMES):
        weight = om.weights(WIDTHS[i + 1], WIDTHS[i], seed=i) / np.sqrt(WIDTHS[i])
        if layer == "robust":
            weight[:, 2::4] *= 1e-2
            weight[:, 3::4] *= 1e-2
        found[layer] = (weight, 0.1 * om.weights(WIDTHS[i + 1], seed=10 + i))
    return found


def _dense(x: Array) -> Array:
    """The dense model in numpy."""
    value = x.astype(np.float64)
    for layer, (weight, bias) in _arrays().items():
        value = value @ weight.astype(np.float16).T.astype(np.float64) + bias.astype(np.float16)
        value = value if layer == NAMES[-1] else np.maximum(value, 0)
    return np.asarray(value)

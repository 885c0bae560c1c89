"""Float32 ONNX models, one for each way in which a change of precision can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from support.onnx_models import CODES, Array, weights

Feed = Mapping[str, Array]
LOWEST = np.float32(np.finfo(np.float32).min)
node = helper.make_node


def info(name: str, shape: Sequence[int | str], kind: str = "float32") -> onnx.ValueInfoProto:
    """A tensor's declaration."""
    return helper.make_tensor_value_info(name, CODES[kind], list(shape))


def small(*shape: int, seed: int = 0) -> Array:
    """Weights that keep activations near 1."""
    return (weights(*shape, seed=seed) / 4).astype(np.float32)


def build(
    nodes: Sequence[onnx.NodeProto],
    feed: Feed,
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Mapping[str, Any],
    *,
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
) -> tuple[onnx.ModelProto, Feed]:
    """A model that takes arrays like those of `feed`."""
    inputs = [info(name, array.shape, array.dtype.name) for name, array in feed.items()]
    tensors = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    body = helper.make_graph(list(nodes), "g", inputs, list(outputs), tensors)
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(d, 1) for d in {n.domain for n in nodes} - {""}]
    return helper.make_model(
        body, opset_imports=imports, ir_version=8, functions=list(functions)
    ), feed


def convnet(opset: int) -> tuple[onnx.ModelProto, Feed]:
    """Conv, batch norm, ReLU6 without a lower bound, Resize by scales, pooling, Gemm, Softmax."""
    nodes = [
        node("Conv", ["x", "c1.w", "c1.b"], ["c1"], name="c1", pads=[1] * 4),
        node("BatchNormalization", ["c1", "s", "b", "m", "v"], ["n"], name="bn"),
        node("Clip", ["n", "lowest", "six"], ["r"], name="relu6"),
        node("Resize", ["r", "roi", "scales"], ["up"], name="up", mode="nearest"),
        node("MaxPool", ["up"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", ["p"], ["gap"]),
        node("Flatten", ["gap"], ["f"]),
        node("Gemm", ["f", "fc.w", "fc.b"], ["g"], name="fc", transB=1),
        node("Softmax", ["g"], ["y"], axis=1),
    ]
    constants = {
        "c1.w": small(16, 3, 3, 3),
        "c1.b": small(16),
        "s": np.abs(small(16)),
        "b": small(16, seed=1),
        "m": small(16, seed=2),
        "v": np.abs(small(16, seed=3)) + np.float32(0.1),
        "lowest": LOWEST,
        "six": np.float32(6),
        "roi": np.zeros(0, np.float32),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "fc.w": small(10, 16),
        "fc.b": small(10),
    }
    return build(nodes, {"x": weights(2, 3, 8, 8)}, [info("y", [2, 10])], constants, opset=opset)


def old_convnet() -> tuple[onnx.ModelProto, Feed]:
    """As files of IR version 3 are: every initializer is a graph input, too."""
    model, feed = convnet(11)
    model.ir_version = 3
    model.graph.input.extend(info(t.name, t.dims) for t in model.graph.initializer)
    return model, feed


def recurrent() -> tuple[onnx.ModelProto, Feed]:
    """A bidirectional LSTM of opset 14, its state an output too."""
    nodes = [
        node("LSTM", ["x", "w", "r", "b"], ["o", "h"], hidden_size=32, direction="bidirectional"),
        node("Transpose", ["o"], ["t"], perm=[0, 2, 1, 3]),
        node("Reshape", ["t", "shape"], ["f"]),
        node("MatMul", ["f", "p"], ["y"], name="proj"),
    ]
    constants = {
        "w": small(2, 128, 16),
        "r": small(2, 128, 32),
        "b": small(2, 256),
        "shape": np.array([5, 2, 64]),
        "p": small(64, 8),
    }
    outputs = [info("y", [5, 2, 8]), info("h", [2, 2, 32])]
    return build(nodes, {"x": weights(5, 2, 16)}, outputs, constants, opset=14)


def branches() -> tuple[onnx.ModelProto, Feed]:
    """An If whose branches read a tensor and a weight from around them."""
    steps = [node("MatMul", ["h", "w1"], ["t"], name="inside"), node("Relu", ["t"], ["to"])]
    then = helper.make_graph(steps, "then", [], [info("to", [3, 16])])
    other = helper.make_graph([node("Identity", ["h"], ["eo"])], "else", [], [info("eo", [3, 16])])
    nodes = [
        node("MatMul", ["x", "w0"], ["h"], name="before"),
        node("ReduceSum", ["h"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["c"]),
        node("If", ["c"], ["i"], name="if", then_branch=then, else_branch=other),
        node("MatMul", ["i", "w1"], ["y"], name="after"),
    ]
    constants = {"w0": small(16, 16), "w1": small(16, 16, seed=1), "zero": np.float32(0)}
    return build(nodes, {"x": weights(3, 16)}, [info("y", [3, 16])], constants)


def loop() -> tuple[onnx.ModelProto, Feed]:
    """A Loop that carries a tensor and collects another."""
    body = helper.make_graph(
        [
            node("MatMul", ["state", "w"], ["m"], name="inside"),
            node("Tanh", ["m"], ["next"]),
            node("Identity", ["go"], ["on"]),
            node("Add", ["next", "bias"], ["kept"]),
        ],
        "body",
        [info("i", [], "int64"), info("go", [], "bool"), info("state", [3, 16])],
        [info("on", [], "bool"), info("next", [3, 16]), info("kept", [3, 16])],
    )
    nodes = [
        node("Loop", ["trips", "", "x"], ["last", "all"], name="loop", body=body),
        node("ReduceMean", ["all"], ["mean"], axes=[0], keepdims=0),
        node("Add", ["last", "mean"], ["y"]),
    ]
    constants = {"w": small(16, 16), "bias": small(16), "trips": np.array(4)}
    return build(nodes, {"x": weights(3, 16)}, [info("y", [3, 16])], constants)


def scan() -> tuple[onnx.ModelProto, Feed]:
    """A Scan over the rows of its input."""
    body = helper.make_graph(
        [
            node("Add", ["state", "row"], ["a"]),
            node("MatMul", ["a", "w"], ["next"], name="inside"),
            node("Relu", ["next"], ["o"]),
        ],
        "body",
        [info("state", [16]), info("row", [16])],
        [info("next", [16]), info("o", [16])],
    )
    nodes = [node("Scan", ["zeros", "x"], ["last", "y"], body=body, num_scan_inputs=1)]
    outputs = [info("y", [6, 16]), info("last", [16])]
    constants = {"w": small(16, 16), "zeros": np.zeros(16, np.float32)}
    return build(nodes, {"x": weights(6, 16)}, outputs, constants)


def functions() -> tuple[onnx.ModelProto, Feed]:
    """A function with a weight as argument that calls another one, called twice."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    steps = [
        node("Constant", [], ["two"], value_float=2.0),
        node("Pow", ["a", "two"], ["p"]),
        node("ReduceMean", ["p"], ["v"], axes=[-1]),
        node("Sqrt", ["v"], ["sd"]),
        node("Div", ["a", "sd"], ["o"]),
    ]
    norm = helper.make_function("my", "Norm", ["a"], ["o"], steps, opsets[:1])
    steps = [node("MatMul", ["a", "w"], ["m"]), node("Norm", ["m"], ["o"], domain="my")]
    block = helper.make_function("my", "Block", ["a", "w"], ["o"], steps, opsets)
    nodes = [
        node("Block", ["x", "w1"], ["h"], domain="my", name="b1"),
        node("Block", ["h", "w2"], ["h2"], domain="my", name="b2"),
        node("MatMul", ["h2", "w3"], ["y"], name="out"),
    ]
    constants = {f"w{i}": small(16, 16, seed=i) for i in (1, 2, 3)}
    outputs = [info("y", [3, 16])]
    return build(nodes, {"x": weights(3, 16)}, outputs, constants, functions=[norm, block])


def made_of_shapes() -> tuple[onnx.ModelProto, Feed]:
    """ConstantOfShape, EyeLike, Range, CumSum, CastLike, and a size above what float16 counts."""
    fill = numpy_helper.from_array(np.array([2.5], np.float32))
    nodes = [
        node("Shape", ["x"], ["sh"]),
        node("ConstantOfShape", ["sh"], ["full"], value=fill),
        node("Mul", ["x", "full"], ["m"]),
        node("EyeLike", ["m"], ["eye"]),
        node("Add", ["m", "eye"], ["e"]),
        node("Cast", ["sh"], ["shf"], to=TensorProto.FLOAT),
        node("ReduceProd", ["shf"], ["count"], keepdims=0),
        node("Mul", ["count", "thousand"], ["many"]),
        node("Cast", ["many"], ["n"], to=TensorProto.INT64),
        node("Range", ["r0", "r1", "r2"], ["rows"]),
        node("Add", ["e", "rows"], ["er"]),
        node("CumSum", ["er", "axis"], ["cs"]),
        node("Gemm", ["cs", "w"], ["y"], name="fc"),
        node("CastLike", ["sh", "x"], ["like"]),
        node("Identity", ["x"], ["same"]),
    ]
    outputs = [info("y", [16, 8]), info("n", [], "int64"), info("like", [2])]
    outputs.append(info("same", [16, 16]))
    constants = {
        "thousand": np.float32(1001),
        "r0": np.float32(0),
        "r1": np.float32(16),
        "r2": np.float32(1),
        "axis": np.array(1),
        "w": small(16, 8),
    }
    return build(nodes, {"x": weights(16, 16)}, outputs, constants)


def masked() -> tuple[onnx.ModelProto, Feed]:
    """Attention scores masked by float32's lowest number, added and chosen."""
    nodes = [
        node("Cast", ["mask"], ["kept"], to=TensorProto.FLOAT),
        node("Sub", ["one", "kept"], ["hidden"]),
        node("Mul", ["hidden", "lowest"], ["bias"]),
        node("MatMul", ["x", "q.w"], ["q"], name="q"),
        node("Transpose", ["x"], ["k"], perm=[0, 2, 1]),
        node("MatMul", ["q", "k"], ["s"]),
        node("Add", ["s", "bias"], ["sb"]),
        node("Softmax", ["sb"], ["a"], axis=-1),
        node("MatMul", ["a", "x"], ["y"]),
        node("Where", ["causal", "s", "lowest"], ["sc"]),
        node("Softmax", ["sc"], ["z"], axis=-1),
    ]
    constants = {
        "one": np.float32(1),
        "lowest": LOWEST,
        "q.w": small(16, 16),
        "causal": np.tril(np.ones((6, 6), bool)),
    }
    feed = {"x": weights(2, 6, 16) / 4, "mask": np.array([[[1, 1, 1, 0, 0, 0]], [[1] * 6]])}
    return build(nodes, feed, [info("y", [2, 6, 16]), info("z", [2, 6, 6])], constants)


def rms_norm() -> tuple[onnx.ModelProto, Feed]:
    """Squares above 65504, and an epsilon below what float16 holds."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="mm"),
        node("Pow", ["h", "two"], ["p"]),
        node("ReduceMean", ["p"], ["v"], axes=[-1]),
        node("Add", ["v", "eps"], ["ve"]),
        node("Sqrt", ["ve"], ["sd"]),
        node("Div", ["h", "sd"], ["y"]),
    ]
    constants = {"w": small(16, 16) * 400, "two": np.float32(2), "eps": np.float32(1e-12)}
    return build(nodes, {"x": weights(3, 16)}, [info("y", [3, 16])], constants)


def rotary() -> tuple[onnx.ModelProto, Feed]:
    """Angles of 3000 positions, which float16 cannot tell apart."""
    nodes = [
        node("Shape", ["ids"], ["sh"]),
        node("Gather", ["sh", "first"], ["length"]),
        node("Range", ["zero", "length", "one"], ["places"]),
        node("Unsqueeze", ["places", "last"], ["column"]),
        node("Cast", ["column"], ["pf"], to=TensorProto.FLOAT),
        node("Expand", ["frequencies", "shape"], ["row"]),
        node("MatMul", ["pf", "row"], ["angle"]),
        node("Cos", ["angle"], ["cos"]),
        node("Gather", ["table", "ids"], ["e"]),
        node("Mul", ["e", "cos"], ["r"]),
        node("MatMul", ["r", "w"], ["y"], name="mm"),
    ]
    constants = {
        "first": np.array(1),
        "zero": np.array(0),
        "one": np.array(1),
        "last": np.array([1]),
        "frequencies": (1 / 10000 ** (np.arange(16) / 16)).astype(np.float32)[None],
        "shape": np.array([1, 16]),
        "table": small(100, 16),
        "w": small(16, 16),
    }
    feed = {"ids": np.arange(3000)[None] % 100}
    return build(nodes, feed, [info("y", [1, 3000, 16])], constants)


def time_steps() -> tuple[onnx.ModelProto, Feed]:
    """Angles of time steps, as a diffusion model makes them of an input."""
    nodes = [
        node("Unsqueeze", ["steps", "last"], ["column"]),
        node("Mul", ["column", "frequencies"], ["angle"]),
        node("Sin", ["angle"], ["sin"]),
        node("MatMul", ["sin", "w"], ["y"], name="mm"),
    ]
    constants = {
        "last": np.array([1]),
        "frequencies": (1 / 10000 ** (np.arange(16) / 16)).astype(np.float32)[None],
        "w": small(16, 128),
    }
    feed = {"steps": np.array([999, 517.25], np.float32)}
    return build(nodes, feed, [info("y", [2, 128])], constants)


def shared() -> tuple[onnx.ModelProto, Feed]:
    """A weight that is an output too, and an inner tensor that is an output."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="first"),
        node("MatMul", ["h", "w"], ["k"], name="second"),
        node("Add", ["k", "h"], ["y"]),
        node("Identity", ["w"], ["wo"]),
    ]
    outputs = [info("y", [3, 16]), info("h", [3, 16]), info("wo", [16, 16])]
    return build(nodes, {"x": weights(3, 16)}, outputs, {"w": small(16, 16)})


def sequences() -> tuple[onnx.ModelProto, Feed]:
    """Tensors that go through a sequence."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="mm"),
        node("SplitToSequence", ["h", "sizes"], ["s"], axis=1),
        node("SequenceAt", ["s", "i"], ["a"]),
        node("ConcatFromSequence", ["s"], ["c"], axis=1),
        node("Concat", ["a", "c"], ["y"], axis=1),
    ]
    constants = {"w": small(16, 16), "sizes": np.array([8, 8]), "i": np.array(0)}
    return build(nodes, {"x": weights(3, 16)}, [info("y", [3, 24])], constants)


def boxes() -> tuple[onnx.ModelProto, Feed]:
    """NonMaxSuppression, which knows float32 alone, and TopK."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="mm"),
        node("Reshape", ["h", "shape"], ["boxes"]),
        node("ReduceMean", ["boxes"], ["score"], axes=[2], keepdims=0),
        node("Unsqueeze", ["score", "axis"], ["scores"]),
        node("NonMaxSuppression", ["boxes", "scores", "most", "overlap"], ["y"]),
        node("TopK", ["score", "k"], ["top", "where"], axis=1),
    ]
    constants = {
        "w": small(16, 16),
        "shape": np.array([1, 4, 4]),
        "axis": np.array([1]),
        "most": np.array([3]),
        "overlap": np.array([0.5], np.float32),
        "k": np.array([2]),
    }
    outputs = [info("y", ["n", 3], "int64"), info("top", [1, 2]), info("where", [1, 2], "int64")]
    return build(nodes, {"x": weights(1, 16)}, outputs, constants)


def other_domain() -> tuple[onnx.ModelProto, Feed]:
    """An operator of ONNX Runtime's own between two matrix products."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="mm"),
        node("Gelu", ["h"], ["g"], domain="com.microsoft", name="gelu"),
        node("MatMul", ["g", "w"], ["y"], name="mm2"),
    ]
    return build(nodes, {"x": weights(3, 16)}, [info("y", [3, 16])], {"w": small(16, 16)})


def without_names() -> tuple[onnx.ModelProto, Feed]:
    """Unnamed nodes, a layer norm with its float32 statistics, a way through float64."""
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("MatMul", ["a", "w"], ["b"]),
        node("LayerNormalization", ["b", "g", "bias"], ["c", "mean", "isd"], axis=-1),
        node("Add", ["c", "mean"], ["y"]),
        node("Cast", ["x"], ["d"], to=TensorProto.DOUBLE),
        node("Cast", ["d"], ["df"], to=TensorProto.FLOAT),
        node("Add", ["df", "y"], ["z"]),
    ]
    constants = {"w": small(16, 16), "g": small(16), "bias": small(16, seed=1)}
    outputs = [info("y", [3, 16]), info("z", [3, 16])]
    return build(nodes, {"x": weights(3, 16)}, outputs, constants)


def image_of_bytes() -> tuple[onnx.ModelProto, Feed]:
    """Pixels made float and scaled before the first convolution."""
    nodes = [
        node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        node("Div", ["f", "most"], ["n"]),
        node("Conv", ["n", "w"], ["y"], name="c"),
    ]
    feed = {"x": np.arange(192, dtype=np.uint8).reshape(1, 3, 8, 8)}
    constants = {"most": np.float32(255), "w": small(8, 3, 3, 3)}
    return build(nodes, feed, [info("y", [1, 8, 6, 6])], constants)


MODELS: dict[str, Callable[[], tuple[onnx.ModelProto, Feed]]] = {
    **{f"convnet{opset}": partial(convnet, opset) for opset in (11, 13, 17, 20)},
    **{
        make.__name__: make
        for make in (
            old_convnet,
            recurrent,
            branches,
            loop,
            scan,
            functions,
            made_of_shapes,
            masked,
            rms_norm,
            rotary,
            shared,
            sequences,
            boxes,
            other_domain,
            without_names,
            image_of_bytes,
        )
    },
}

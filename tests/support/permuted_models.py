"""Graphs run before and after their channels were put in a random order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from support.onnx_models import model, save
from twofour.graph.opened import open_onnx
from twofour.pruning.permutation.apply import permute_onnx, same_outputs
from twofour.pruning.permutation.classes import Classes, find_classes
from twofour.records.weights import Pattern

Array = NDArray[Any]
TWO_FOUR = Pattern(2, 4)


@dataclass
class Net:
    """Nodes and constants added one by one; every method gives the name of what it makes."""

    seed: int = 0
    opset: int = 21
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)

    def constant(self, *shape: int, name: str = "", values: Array | None = None) -> str:
        name = name or f"c{len(self.constants)}"
        if values is None:
            random = np.random.default_rng([self.seed, len(self.constants)])
            values = (random.uniform(0.5, 1.5, shape) * random.choice([-1, 1], shape)).astype(
                np.float32
            )
        self.constants[name] = values
        return name

    def scaled(self, into: int, *shape: int) -> str:
        """A weight that keeps the size of sums over `into` values: others blow rounding up."""
        name = self.constant(*shape)
        self.constants[name] /= np.float32(into**0.5)
        return name

    def numbers(self, *values: int) -> str:
        return self.constant(values=np.array(values, np.int64))

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        made = [f"t{len(self.nodes)}_{at}" for at in range(outputs)]
        node = helper.make_node(
            op, list(inputs), made, name=f"{op}_{len(self.nodes)}", **attributes
        )
        self.nodes.append(node)
        return made if outputs > 1 else made[0]

    def conv(self, x: str, into: int, out: int, *, groups: int = 1, bias: bool = True) -> str:
        """A 1x1 convolution."""
        weight = self.scaled(into // groups, out, into // groups, 1, 1)
        names = [weight] + ([self.constant(out)] if bias else [])
        made: str = self.add("Conv", x, *names, group=groups)
        return made

    def linear(self, x: str, into: int, out: int) -> str:
        """MatMul and Add."""
        made: str = self.add("MatMul", x, self.scaled(into, into, out))
        added: str = self.add("Add", made, self.constant(out))
        return added

    def model(
        self, outputs: Sequence[str], inputs: Mapping[str, Sequence[int | str]]
    ) -> onnx.ModelProto:
        return model(self.nodes, self.constants, inputs=inputs, outputs=outputs, opset=self.opset)


def run(path: Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs in ONNX Runtime on the CPU, as the graph stands."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(inputs)), strict=True))


def random_inputs(proto: onnx.ModelProto, *, highest: int = 8) -> dict[str, Array]:
    """Normal floats, and whole numbers below `highest`; free sizes are 2."""
    random, found = np.random.default_rng(0), {}
    for value in proto.graph.input:
        tensor = value.type.tensor_type
        shape = [d.dim_value or 2 for d in tensor.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        integers = random.integers(0, highest, shape)
        values = integers if kind.kind == "i" else random.normal(size=shape)
        found[value.name] = values.astype(kind)
    return found


def permuted_at_random(
    path: Path, target: Path, *, seed: int = 0, dtype: str = "float32"
) -> tuple[Classes, tuple[str, ...]]:
    """Classes of the file and constants changed; fails unless outputs and nodes are the same."""
    opened = open_onnx(path)
    classes = find_classes(opened, TWO_FOUR)
    random = np.random.default_rng(seed)
    orders = {each.key: random.permutation(each.size).tolist() for each in classes.classes}
    changed = permute_onnx(opened, target, classes, orders)
    inputs = random_inputs(opened.proto)
    outputs = run(path, inputs)
    assert same_outputs(outputs, run(target, inputs), dtype=dtype) is None
    again = open_onnx(target)
    assert [n.SerializeToString() for n in again.proto.graph.node if n.op_type != "Constant"] == [
        n.SerializeToString() for n in opened.proto.graph.node if n.op_type != "Constant"
    ]
    return classes, changed


def permuted_net(
    net: Net,
    outputs: Sequence[str] | str,
    folder: Path,
    inputs: Mapping[str, Sequence[int | str]] | None = None,
) -> Classes:
    """As `permuted_at_random`, of a net on an image [2, 8, 4, 4]."""
    names = [outputs] if isinstance(outputs, str) else outputs
    proto = net.model(names, inputs or {"x": [2, 8, 4, 4]})
    return permuted_at_random(save(proto, folder / "m.onnx"), folder / "p.onnx")[0]


def sizes(classes: Classes) -> list[int]:
    """Of all classes, the largest first."""
    return sorted((each.size for each in classes.classes), reverse=True)


def why_fixed(classes: Classes, layer: str) -> str:
    """The reason why the layer's input channels stay."""
    return next(row.reason for row in classes.fixed if row.layer == layer)

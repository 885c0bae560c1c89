"""Opset 17, for TensorRT 8.6: the same function, with nothing in it that came later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from support.exporting import export_onnx
from torch import Tensor, nn

from twofour.errors import BadInputError
from twofour.export.calls import bind, input_arrays, reference_outputs
from twofour.export.passes import to_opset_17
from twofour.records.options import ExportOptions


class Changed(nn.Module):
    """Operators that opset 18 or 20 defines anew: ReduceMean, Split, Pad, Resize, GELU, Mish.

    Linear on rows of rows is a MatMul; the input is an output too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 8, bias=False)
        self.pad = nn.ReflectionPad2d(1)
        self.conv = nn.Conv2d(4, 24, 3, padding=1, padding_mode="replicate")
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.pad(self.conv(self.rows(x)))
        small, large = y.split([3, 7], dim=2)
        larger = nn.functional.interpolate(
            nn.functional.mish(small), scale_factor=2.0, mode="bilinear"
        )
        pooled = nn.functional.gelu(large.mean(dim=(2, 3)))
        first, second, third = self.norm(pooled).chunk(3, dim=-1)
        return x, larger.amax(dim=2), self.head(first * second + third)


class Branches(nn.Module):
    """A reduction and a Linear in a subgraph, where ONNX's own converter does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.cond(
            x.sum() > 0,
            lambda y: self.left(y).mean(dim=1),
            lambda y: self.right(y).mean(dim=1),
            (x,),
        )
        return result


@pytest.mark.parametrize("net", [Changed(), Branches()])
def test_the_file_computes_what_the_module_computes_with_nothing_of_a_later_opset(
    net: nn.Module, tmp_path: Path
) -> None:
    net, dynamic = net.eval(), isinstance(net, Changed)
    options = ExportOptions(opset=17, dynamic_batch=dynamic)
    path = tmp_path / "net.onnx"
    rows = export_onnx(net, (torch.randn(2, 4, 8, 8),), {}, path, options).layers
    names = {n for n, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    assert {row.layer for row in rows} == names
    call = (torch.randn(3 if dynamic else 2, 4, 8, 8),)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: input_arrays(bind(net, call, {}))[0]})
    for value, expected in zip(found, reference_outputs(net, bind(net, call, {})), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    model = onnx.load(path)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 17)]
    assert model.ir_version == 8
    for node in nodes_of(model.graph):
        schema = onnx.defs.get_schema(node.op_type, 17)
        assert {a.name for a in node.attribute} <= set(schema.attributes), node
        assert schema.min_input <= len(node.input) <= schema.max_input, node


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        ("(int32[4] x) => (int32[4] y) { y = BitwiseAnd(x, x) }", "BitwiseAnd came later"),
        ("(bool[4] x) => (bool[1] y) { y = ReduceMax(x) }", "ReduceMax of bool came later"),
        (
            '(float[4] x, int64[2] p) => (float[6] y) { y = Pad <mode = "wrap"> (x, p) }',
            "Pad with mode wrap came later",
        ),
        (
            "(float[4] x, int64[1] s) => (float[2] y) "
            '{ y = Resize <antialias = 1, mode = "linear"> (x, , , s) }',
            "Resize with antialias came later",
        ),
        (
            "(float[4] x, int64[4] i) => (float[4] y) "
            '{ y = ScatterElements <reduction = "max"> (x, i, x) }',
            "ScatterElements with reduction max came later",
        ),
    ],
    ids=["operator", "type", "mode", "attribute", "reduction"],
)
def test_what_opset_17_has_no_words_for_is_refused_by_name(graph: str, why: str) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 18]> g {graph}'
    model = ir.from_onnx_text(text)
    with pytest.raises(BadInputError, match=f"in opset 17: {why} \\(node .*\\)") as failure:
        to_opset_17(model)
    assert "use --opset 20" in (failure.value.hint or "")


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes_of(attribute.g)

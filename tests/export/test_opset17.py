"""Opset 17, for TensorRT 8.6: the same function, with nothing in it that came later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from twofour.errors import BadInputError
from twofour.export.example_inputs import input_arrays
from twofour.export.torch_export import export_onnx, reference_outputs
from twofour.records.options import ExportOptions, Precision


class Blocks(nn.Module):
    """Operators whose definition changed with opset 18: ReduceMean, Split; and GELU, of 20."""

    def __init__(self, parts: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 24, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.norm = nn.LayerNorm(24)
        self.parts = parts
        self.head = nn.Linear(24 // 3, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.pool(self.conv(x)).flatten(1))
        first, second, *rest = self.norm(y).chunk(self.parts, dim=-1)
        head: Tensor = self.head(first * second + rest[0])
        return head


def exported(folder: Path, net: nn.Module, options: ExportOptions) -> onnx.ModelProto:
    export_onnx(net, (torch.randn(2, 4, 8, 8),), {}, folder / "net.onnx", options)
    return onnx.load(folder / "net.onnx")


class Padded(nn.Module):
    """Linear on rows of rows (MatMul), padding, unequal parts, bilinear resizing, Mish."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 8, bias=False)
        self.pad = nn.ReflectionPad2d(1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate")

    def forward(self, x: Tensor) -> Tensor:
        y = self.pad(self.conv(self.rows(x)))
        small, large = y.split([3, 7], dim=2)
        small = nn.functional.mish(small)
        larger = nn.functional.interpolate(small, scale_factor=2.0, mode="bilinear")
        return torch.cat([larger.amax(dim=2), large.mean(dim=2)[:, :, :1]], dim=2)


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


class Unchanged(nn.Module):
    """Its input is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.fc(x)


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("net", [Blocks(), Padded(), Branches(), Unchanged()])
def test_the_file_computes_what_the_module_computes(
    opset: int, net: nn.Module, tmp_path: Path
) -> None:
    net = net.eval()
    dynamic = not isinstance(net, Branches)
    exported(tmp_path, net, ExportOptions(opset=opset, dynamic_batch=dynamic))
    session = onnxruntime.InferenceSession(
        tmp_path / "net.onnx", providers=["CPUExecutionProvider"]
    )
    call = (torch.randn(3 if dynamic else 2, 4, 8, 8),)
    (image,) = input_arrays(net, call, {})
    found = session.run(None, {session.get_inputs()[0].name: image})
    for value, expected in zip(found, reference_outputs(net, call, {}), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("net", [Blocks(), Padded(), Branches(), Unchanged()])
def test_nothing_of_a_later_opset_is_left(net: nn.Module, tmp_path: Path) -> None:
    options = ExportOptions(opset=17, precision=Precision.FLOAT16, dynamic_batch=False)
    model = exported(tmp_path, net.eval(), options)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 17)]
    assert model.ir_version == 8
    for node in nodes_of(model.graph):
        schema = onnx.defs.get_schema(node.op_type, 17)
        assert {a.name for a in node.attribute} <= set(schema.attributes), node
        assert schema.min_input <= len(node.input) <= schema.max_input, node


@pytest.mark.parametrize("net", [Blocks(), Padded(), Branches()])
def test_weights_and_layers_have_the_names_of_the_newer_file(
    net: nn.Module, tmp_path: Path
) -> None:
    call = (torch.randn(2, 4, 8, 8),)
    maps = [
        export_onnx(
            net.eval(),
            call,
            {},
            tmp_path / f"{opset}.onnx",
            ExportOptions(opset=opset, dynamic_batch=False),
        )
        for opset in (17, 20)
    ]
    rows = [[(row.layer, row.parameter, row.op) for row in found.layers] for found in maps]
    assert rows[0] == rows[1]
    names = {layer for layer, _, _ in rows[0]}
    assert names == {n for n, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda x: x.to(torch.int32) & 3, "BitwiseAnd came later"),
        (lambda x: (x > 0).amax(dim=1), "ReduceMax of bool came later"),
        (
            lambda x: nn.functional.pad(x, (1, 1, 1, 1), mode="circular"),
            "Pad with mode wrap came later",
        ),
        (
            lambda x: nn.functional.interpolate(x, size=4, mode="bilinear", antialias=True),
            "Resize with antialias came later",
        ),
        (
            lambda x: torch.zeros_like(x).scatter_reduce(
                1, torch.zeros_like(x, dtype=torch.int64), x, "amax"
            ),
            "ScatterElements with reduction max came later",
        ),
    ],
    ids=["operator", "type", "mode", "attribute", "reduction"],
)
def test_what_opset_17_has_no_words_for_is_refused_by_name(
    forward: Callable[[Tensor], Tensor], why: str, tmp_path: Path
) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    with pytest.raises(BadInputError, match=f"in opset 17: {why} \\(node .+\\)") as failure:
        exported(tmp_path, Net(), ExportOptions(opset=17))
    assert "use --opset 20" in (failure.value.hint or "")
    assert not list(tmp_path.iterdir())


def test_a_refused_node_is_named_with_its_module(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))
    with pytest.raises(BadInputError, match=r"came later \(node node_\w+, module 1\)"):
        exported(tmp_path, net, ExportOptions(opset=17))


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes_of(attribute.g)

"""Opset 17, for TensorRT 8.6: the same function, with nothing in it that came later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from twofour.errors import BadInputError
from twofour.export.example_inputs import input_arrays
from twofour.export.onnx_export import export_onnx, reference_outputs
from twofour.records import ExportOptions, Precision


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


@pytest.mark.parametrize("opset", [15, 17])
def test_the_file_of_an_older_opset_computes_what_the_module_computes(
    opset: int, tmp_path: Path
) -> None:
    net = Blocks().eval()
    if opset < 17:
        net.norm = nn.Identity()  # type: ignore[assignment]  # LayerNormalization came with 17
    exported(tmp_path, net, ExportOptions(opset=opset))
    session = onnxruntime.InferenceSession(
        tmp_path / "net.onnx", providers=["CPUExecutionProvider"]
    )
    call = (torch.randn(3, 4, 8, 8),)
    (image,) = input_arrays(net, call, {})
    (found,) = session.run(None, {"x": image})
    np.testing.assert_allclose(found, reference_outputs(net, call, {})[0], rtol=1e-4, atol=1e-5)


def test_nothing_of_a_later_opset_is_left(tmp_path: Path) -> None:
    options = ExportOptions(opset=17, precision=Precision.FLOAT16)
    model = exported(tmp_path, Blocks().eval(), options)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 17)]
    assert model.ir_version == 8
    (reduce,) = (node for node in model.graph.node if node.op_type == "ReduceMean")
    assert {a.name for a in reduce.attribute} == {"axes", "keepdims"}
    assert len(reduce.input) == 1
    (split,) = (node for node in model.graph.node if node.op_type == "Split")
    assert {a.name for a in split.attribute} == {"axis"}
    assert "Gelu" not in {node.op_type for node in model.graph.node}


def test_names_of_weights_and_layers_are_those_of_the_newer_file(tmp_path: Path) -> None:
    net = Blocks().eval()
    call = (torch.randn(2, 4, 8, 8),)
    older, newer = (
        export_onnx(net, call, {}, tmp_path / f"{opset}.onnx", ExportOptions(opset=opset))
        for opset in (17, 20)
    )
    assert older.layers == newer.layers
    assert len(older.layers) == 2


def test_parts_that_differ_in_size_stay_in_the_newer_opset(tmp_path: Path) -> None:
    class Uneven(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            parts = self.pool(self.conv(x)).flatten(1).chunk(5, dim=-1)  # 5, 5, 5, 5, 4
            head: Tensor = self.head(torch.cat([parts[0], parts[1][:, :3]], dim=-1))
            return head

    with pytest.raises(BadInputError, match="torch cannot write this model in opset 17") as failure:
        exported(tmp_path, Uneven().eval(), ExportOptions(opset=17))
    assert failure.value.hint == "use --opset 18 or later"

"""Names of inputs and outputs: from the signature, and from what the forward returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from support.exporting import export_onnx
from torch import Tensor, nn

from twofour.export.calls import bind, tensor_names
from twofour.records.options import ExportOptions


class Pair(NamedTuple):
    logits: Tensor
    boxes: Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)


class Fields(Net):
    def forward(self, x: Tensor) -> Pair:
        y = self.fc(x)
        return Pair(y, y * 2)


class Keys(Net):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"states": [self.fc(x), x * 3], "x": x * 2}


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (Fields(), ["logits", "boxes"]),
        (Keys(), ["states_0", "states_1", "output_2"]),  # the last key is its input's name
        (nn.Linear(8, 8), ["output_0"]),
    ],
)
def test_outputs_are_called_as_the_forward_returns_them(
    net: nn.Module, names: list[str], tmp_path: Path
) -> None:
    export_onnx(net, (torch.randn(2, 8),), {}, tmp_path / "net.onnx", ExportOptions())
    model = onnx.load(tmp_path / "net.onnx")
    assert [output.name for output in model.graph.output] == names


class Arguments(Net):
    def forward(self, states: list[Tensor], *more: Tensor, options: dict[str, Tensor]) -> Tensor:
        first: Tensor = self.fc(states[0])
        return first + states[1] + more[0] + options["k"]


class Keywords(Net):
    def forward(self, x: Tensor, **named: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y + named["bias"]


def test_inputs_are_called_as_the_arguments_and_their_places(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    found = tensor_names(bind(Arguments(), ([x, x], x), {"options": {"k": x}}))
    assert list(found)[:3] == ["states_0", "states_1", "more_0"]
    # torch 2.13 takes no dynamic_shapes for **kwargs
    options = ExportOptions(dynamic_batch=False)
    export_onnx(Keywords(), (x,), {"bias": x}, tmp_path / "net.onnx", options)
    assert [i.name for i in onnx.load(tmp_path / "net.onnx").graph.input] == ["x", "bias"]

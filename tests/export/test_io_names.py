"""Names of inputs and outputs: from the signature, and from what the forward returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from torch import Tensor, nn

from twofour.export.example_inputs import bind, returned_variables, tensor_names
from twofour.export.torch_export import export_onnx
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


class Variables(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        score = self.fc(x)
        extra = score * 2
        return score, extra


class OneVariable(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.fc(x)
        return hidden


class Overwrites(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return x  # noqa: RET504 - the variable is what is tested


class Expression(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x), x * 2


class Nested(Net):
    def forward(self, x: Tensor) -> Any:
        states = [self.fc(x), x * 3]
        score = x * 2
        return score, states


class TwoReturns(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            first: Tensor = self.fc(x)
            return first
        second: Tensor = self.fc(x)
        return second


class InnerReturn(Net):
    def forward(self, x: Tensor) -> Tensor:
        def twice(value: Tensor) -> Tensor:
            doubled = value * 2
            return doubled  # noqa: RET504 - as above

        result: Tensor = twice(self.fc(x))
        return result


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (Fields(), ["logits", "boxes"]),
        (Variables(), ["score", "extra"]),
        (OneVariable(), ["hidden"]),
        (Overwrites(), ["output_0"]),
        (Expression(), ["output_0", "output_1"]),
        (Nested(), ["score", "states_0", "states_1"]),
        (TwoReturns(), ["output_0"]),
        (InnerReturn(), ["result"]),
        (nn.Sequential(nn.Linear(8, 8)), ["input"]),
    ],
)
def test_outputs_are_called_as_the_forward_returns_them(
    net: nn.Module, names: list[str], tmp_path: Path
) -> None:
    if isinstance(net, nn.Sequential):
        names = ["output_0"]  # its variable is its input's name
    export_onnx(net, (torch.randn(2, 8),), {}, tmp_path / "net.onnx", ExportOptions())
    model = onnx.load(tmp_path / "net.onnx")
    assert [output.name for output in model.graph.output] == names
    onnx.checker.check_model(model, full_check=True)


def test_names_that_the_user_gives_are_kept(tmp_path: Path) -> None:
    options = ExportOptions(output_names=("a", "b"))
    export_onnx(Variables(), (torch.randn(2, 8),), {}, tmp_path / "net.onnx", options)
    model = onnx.load(tmp_path / "net.onnx")
    assert [output.name for output in model.graph.output] == ["a", "b"]


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
    for net, args, kwargs, names in (
        (Arguments(), ([x, x], x), {"options": {"k": x}}, ["states_0", "states_1", "more_0"]),
        (Keywords(), (x,), {"bias": x}, ["x", "bias"]),
    ):
        found = tensor_names(bind(net, args, kwargs))
        assert list(found)[: len(names)] == names
        path = tmp_path / f"{type(net).__name__}.onnx"
        # torch 2.13 takes no dynamic_shapes for **kwargs
        options = ExportOptions(dynamic_batch=isinstance(net, Arguments))
        export_onnx(net, args, kwargs, path, options)
        assert [i.name for i in onnx.load(path).graph.input] == list(found)


def test_a_forward_without_source_names_nothing() -> None:
    scope: dict[str, Any] = {"Net": Net}
    exec("class Made(Net):\n    def forward(self, x):\n        y = x\n        return y", scope)
    assert returned_variables(scope["Made"]()) == ()

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exporting import export_onnx
from torch import Tensor, nn

from twofour.errors import BadInputError
from twofour.export.calls import bind, reference_outputs
from twofour.records.options import ExportOptions, Precision


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)


class OneRow(Net):
    def forward(self, x: Tensor) -> Any:
        return self.fc(x.reshape(1, 8))


class FourRows(Net):
    def forward(self, x: Tensor) -> Any:
        return self.fc(x) if x.shape[0] == 4 else x


class DataDependent(Net):
    def forward(self, x: Tensor) -> Any:
        return self.fc(x) if x.sum() > 0 else x


@torch.library.custom_op("twofour_tests::unknown_to_onnx", mutates_args=())
def unknown_to_onnx(x: Tensor) -> Tensor:
    return x.clone()


@unknown_to_onnx.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class OwnKernel(Net):
    def forward(self, x: Tensor) -> Any:
        return unknown_to_onnx(self.fc(x))


class Interrupted(Net):
    def forward(self, x: Tensor) -> Any:
        if torch.compiler.is_exporting():
            try:
                raise KeyboardInterrupt
            finally:  # as torch does
                raise AttributeError("partially initialized module 'torch._dynamo'")
        return self.fc(x)


def failure(
    net: nn.Module, x: Tensor, folder: Path, options: ExportOptions | None = None
) -> BadInputError:
    with pytest.raises(BadInputError) as caught:
        export_onnx(net, (x,), {}, folder / "net.onnx", options or ExportOptions())
    assert list(folder.iterdir()) == []
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("layer", [DataDependent(), OwnKernel()])
def test_a_layer_that_torch_cannot_export_is_named(layer: nn.Module, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), layer))
    of_values = failure(net, torch.randn(4, 8), tmp_path)
    of_fake_tensors = failure(net.half(), torch.randn(4, 8).half(), tmp_path)
    for error in (of_values, of_fake_tensors):
        assert error.message.startswith("torch cannot export layer 1.1 of Sequential to ONNX: ")


def test_a_forward_that_fails_is_quoted_with_the_layer(tmp_path: Path) -> None:
    error = failure(nn.Sequential(nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 7), tmp_path)
    assert ") in layer 1:" in error.message
    error = failure(nn.Linear(8, 8), torch.randn(2, 7), tmp_path)
    assert error.message.startswith(
        "Linear.forward fails on the example inputs (input 2x7 float32)"
    )
    assert "mat1 and mat2" in error.message
    with pytest.raises(BadInputError, match=r"Linear\.forward fails"):
        reference_outputs(nn.Linear(8, 8), bind(nn.Linear(8, 8), (torch.randn(2, 7),), {}))


def test_arguments_that_the_forward_does_not_take_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="unexpected keyword argument 'y'"):
        export_onnx(
            OneRow(), (torch.randn(1, 8),), {"y": 1}, tmp_path / "net.onnx", ExportOptions()
        )
    with pytest.raises(BadInputError, match="required argument: 'x'"):
        reference_outputs(OneRow(), bind(OneRow(), (), {}))


def test_ctrl_c_behind_an_error_of_torch_is_no_failed_export(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        export_onnx(Interrupted(), (torch.randn(2, 8),), {}, tmp_path / "net.onnx", ExportOptions())


@pytest.mark.parametrize(("net", "rows"), [(OneRow(), 1), (FourRows(), 4)])
def test_a_batch_that_cannot_be_dynamic_is_said(net: nn.Module, rows: int, tmp_path: Path) -> None:
    error = failure(net, torch.randn(rows, 8), tmp_path)
    assert type(net).__name__ in error.message
    assert "--static-batch" in str(error)


@pytest.mark.parametrize(
    ("takes_other_branch", "condition"),
    [
        (lambda rows: rows % 2, "Eq(Mod(batch, 2), 0)"),
        (lambda rows: rows > 4, "batch <= 4"),
        (lambda rows: rows <= 3, "batch >= 4"),
    ],
)
def test_a_forward_that_compares_the_batch_is_not_written_for_every_batch(
    takes_other_branch: Callable[[int], bool], condition: str, tmp_path: Path
) -> None:
    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return 2 * y if takes_other_branch(x.shape[0]) else y

    error = failure(Branching(8, 8), torch.randn(4, 8), tmp_path)
    assert condition in error.message
    assert "--static-batch" in str(error)


def test_what_torch_cannot_export_is_one_line_with_the_whole_account_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error = failure(DataDependent(), torch.randn(2, 8), tmp_path)
    assert "DataDependent to ONNX: GuardOnData" in error.message
    assert "\n" not in error.message
    assert len(str(error.__cause__).splitlines()) > 5
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("opset", "precision", "message"),
    [
        (1000, Precision.FLOAT32, "opset 1000"),
        (20, Precision.BFLOAT16, "opset 20 has no bfloat16 convolution"),
        (16, Precision.FLOAT32, "opset 16 is older than 17, the oldest that is written"),
    ],
)
def test_an_opset_that_cannot_be_written_is_refused(
    opset: int, precision: Precision, message: str, tmp_path: Path
) -> None:
    options = ExportOptions(opset=opset, precision=precision)
    assert message in failure(nn.Linear(8, 8), torch.randn(2, 8), tmp_path, options).message


def test_a_half_precision_module_that_cannot_be_copied_has_no_outputs_but_a_graph(
    tmp_path: Path,
) -> None:
    net = nn.Linear(8, 4).half()
    net.generator = (step for step in range(3))  # type: ignore[assignment]  # no copy of a generator
    with pytest.raises(BadInputError, match="Linear cannot be copied"):
        reference_outputs(net, bind(net, (torch.randn(1, 8),), {}))
    export_onnx(net, (torch.randn(1, 8),), {}, tmp_path / "net.onnx", ExportOptions())
    assert (tmp_path / "net.onnx").is_file(), "a trace needs no copy"

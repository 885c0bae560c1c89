from __future__ import annotations

import numpy as np
import pytest
import torch
from support.torch_small_modules import arrays_of, conv_net, mlp, open_torch, program
from torch import nn

from twofour.engines.torch.engine import TorchProgram
from twofour.errors import BadInputError, BuildFailedError


def scaled(factor: float) -> nn.Module:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 7:
                raise ValueError("seven rows\nof all numbers")
            return x * factor

    return Scaled()


def one_input(module: nn.Module, outputs: tuple[str, ...] = ("y",)) -> TorchProgram:
    return program(module, (torch.ones(2, 3),), inputs=("x",), outputs=outputs)


def test_another_number_of_outputs_than_names_is_an_error() -> None:
    made = one_input(nn.Identity(), outputs=("y", "z"))
    with pytest.raises(
        BuildFailedError, match="returns 1 tensors here, and 2 when it was exported"
    ):
        open_torch(made, "eager")


def test_outputs_leave_the_prepared_inputs_alone() -> None:
    runs: list[int] = []
    module = scaled(2.0)
    module.register_forward_pre_hook(lambda _, args: runs.append(len(args[0])))
    model = open_torch(one_input(module), "eager")
    model.prepare({"x": np.ones((4, 3), np.float32)})
    found = model.outputs({"x": np.full((1, 3), 3, np.float64)})["y"]
    np.testing.assert_array_equal(found, np.full((1, 3), 6, np.float32))
    del runs[:]
    assert model.run_ms() > 0
    assert runs == [4]
    model.close()


def test_integer_outputs_stay_integers() -> None:
    class Largest(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.argmax(-1)

    model = open_torch(one_input(Largest()), "fp16")
    found = model.outputs({"x": np.eye(3, dtype=np.float32)})["y"]
    np.testing.assert_array_equal(found, np.array([0, 1, 2], np.int64))
    assert found.dtype == np.int64
    model.close()


def test_a_failure_at_another_batch_is_an_error_in_one_line() -> None:
    model = open_torch(one_input(scaled(1.0)), "eager")
    with pytest.raises(BuildFailedError) as info:
        model.prepare({"x": np.ones((7, 3), np.float32)})
    assert info.value.message == (
        "torch:eager failed while running model.py:make: ValueError: seven rows"
    )
    model.close()


def test_a_forward_that_exits_does_not_end_the_process() -> None:
    class Exits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise SystemExit(x.dim())

    with pytest.raises(BuildFailedError, match="SystemExit: 2"):
        open_torch(one_input(Exits()), "eager")


def test_inputs_that_do_not_fit_are_bad_input() -> None:
    model = open_torch(conv_net(), "eager")
    with pytest.raises(BadInputError, match=r"takes the inputs \['image'\], found \['x'\]"):
        model.outputs({"x": np.ones((1, 3, 8, 8), np.float32)})
    with pytest.raises(BadInputError, match=r"image .* cannot be 1x3x9x8"):
        model.prepare({"image": np.ones((1, 3, 9, 8), np.float32)})
    model.close()


def test_threads_are_those_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        model = open_torch(mlp(), "eager", threads=2)
        assert torch.get_num_threads() == 2
        model.close()
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.gpu
def test_a_gpu_is_timed_with_events_and_its_memory_counted() -> None:
    model = open_torch(mlp(), "eager")
    model.prepare(arrays_of(mlp()))
    assert model.run_ms() > 0
    assert "CUDA events" in model.settings.timing
    assert model.settings.device == torch.cuda.get_device_name()
    assert (model.peak_device_memory_bytes() or 0) > 0
    model.close()

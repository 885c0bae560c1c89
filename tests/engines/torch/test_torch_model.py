from __future__ import annotations

import numpy as np
import pytest
import torch
from support.torch_small_modules import arrays_of, conv_net, mlp, open_torch, program
from torch import nn

from twofour.engines.torch.program import TorchProgram
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


def test_a_failure_at_another_batch_names_the_shape_that_runs() -> None:
    model = open_torch(one_input(scaled(1.0)), "eager")
    with pytest.raises(BadInputError) as info:
        model.prepare({"x": np.ones((7, 3), np.float32)})
    assert info.value.message == (
        "torch:eager failed while running model.py:make: ValueError: seven rows"
    )
    assert info.value.hint == "it runs with inputs of 2x3"
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


def test_layer_times_are_those_of_the_submodules_and_add_up_to_the_run() -> None:
    model = open_torch(mlp(512), "eager")
    model.prepare(arrays_of(mlp()))
    times = {layer.name: layer.mean_ms for layer in model.layer_times(20)}
    assert list(times) == ["inner", "outer", "(model)"]
    assert all(ms > 0 for ms in times.values())
    # each run is also timed from outside: hooks cost, so the sum lies above the fastest
    fastest = min(model.run_ms() for _ in range(20))
    assert sum(times.values()) > 0.5 * fastest
    model.close()


def test_a_submodule_that_is_used_twice_is_one_row_with_both() -> None:
    calls: list[int] = []

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            returned: torch.Tensor = self.layer(self.layer(x))
            return returned

    made = one_input(Twice())
    model = open_torch(made, "eager")
    model.prepare({"x": np.ones((2, 3), np.float32)})
    made.module.get_submodule("layer").register_forward_hook(lambda *_: calls.append(1))
    assert [layer.name for layer in model.layer_times(3)] == ["layer", "(model)"]
    assert len(calls) == 6
    model.close()


def test_a_traced_module_has_no_layer_times() -> None:
    model = open_torch(mlp(), "torchscript")
    model.prepare(arrays_of(mlp()))
    assert model.layer_times(2) == ()
    model.close()


def test_the_hooks_are_gone_after_the_profile() -> None:
    made = mlp()
    model = open_torch(made, "eager")
    model.prepare(arrays_of(mlp()))
    model.layer_times(1)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.module.modules())
    model.close()


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

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.torch_small_modules import (
    Arrays,
    arrays_of,
    attention,
    conv_net,
    expected,
    mlp,
    open_torch,
    program,
    transformer,
)
from torch import nn

from twofour.engines.protocol import TimedModel
from twofour.engines.torch.engine import TorchProgram
from twofour.errors import BuildFailedError, MissingToolError

ON_GPU = torch.cuda.is_available()
cpu_only = pytest.mark.skipif(ON_GPU, reason="float32 attention and CPU kernels only")

math_allowed: Callable[[], bool] = torch.backends.cuda.math_sdp_enabled

Open = Callable[[TorchProgram, str], TimedModel]

# mode -> largest error, as a part of the largest output: a few roundings of the type it runs in
BOUNDS = {
    "eager": 1e-6,
    "channels_last": 1e-5,
    "autocast-fp16": 5e-3,
    "autocast-bf16": 4e-2,
    "fp16": 5e-3,
    "bf16": 4e-2,
}


@pytest.fixture
def opened() -> Iterator[Open]:
    """open_torch; what it gives is closed after the test."""
    models: list[TimedModel] = []

    def open_(made: TorchProgram, mode: str) -> TimedModel:
        models.append(open_torch(made, mode))
        return models[-1]

    yield open_
    for model in reversed(models):
        model.close()


def error_of(found: npt.NDArray[np.generic], wanted: npt.NDArray[np.generic]) -> float:
    a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def rolled(inputs: Arrays, times: int) -> Arrays:
    return {
        name: np.concatenate([np.roll(array, n, axis=0) for n in range(times)])
        for name, array in inputs.items()
    }


@pytest.mark.parametrize("mode", BOUNDS)
def test_every_mode_computes_what_the_module_computes(mode: str, opened: Open) -> None:
    inputs = arrays_of(conv_net())
    wanted = expected(conv_net(), inputs)
    found = opened(conv_net(), mode).outputs(inputs)
    assert list(found) == ["logits", "pooled"]
    for name in wanted:
        assert found[name].dtype == np.float32
        assert error_of(found[name], wanted[name]) < BOUNDS[mode]


@pytest.mark.parametrize("mode", [mode for mode in BOUNDS if mode != "channels_last"])
def test_inputs_by_name_reach_forward_at_another_batch_and_settings_say_what_runs(
    mode: str, opened: Open
) -> None:
    inputs = rolled(arrays_of(mlp()), 3)
    model = opened(mlp(), mode)
    model.prepare(inputs)
    assert model.run_ms() > 0
    found = model.outputs(inputs)["y"]
    assert found.shape == (12, 16)
    assert error_of(found, expected(mlp(), inputs)["y"]) < BOUNDS[mode]
    settings = model.settings
    assert (settings.engine, settings.mode, settings.weights) == ("torch", mode, "dense")
    assert (settings.model, settings.version) == ("model.py:make", torch.__version__)
    kinds = {"eager": "float32", "autocast-fp16": "float16", "fp16": "float16"}
    assert settings.precision == kinds.get(mode, "bfloat16")
    assert settings.sparse_kernels is None
    if not ON_GPU:
        assert (settings.device, settings.threads) == ("CPU", 1)
        assert "monotonic clock" in settings.timing


@cpu_only
@pytest.mark.parametrize("mode", ["sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("make", [attention, transformer])
def test_attention_back_ends_agree(
    mode: str, make: Callable[[], TorchProgram], opened: Open
) -> None:
    inputs = arrays_of(make())
    model = opened(make(), mode)
    assert error_of(model.outputs(inputs)["y"], expected(make(), inputs)["y"]) < 1e-5


@cpu_only
@pytest.mark.parametrize("mode", ["sdpa-efficient", "sdpa-cudnn"])
def test_a_back_end_without_a_kernel_here_is_an_error_not_another_back_end(mode: str) -> None:
    with pytest.raises(MissingToolError, match="torch has this attention on GPUs only"):
        open_torch(attention(), mode)


def test_settings_of_torch_are_put_back_after_a_failure_and_after_close() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(x)

    math = math_allowed()
    with pytest.raises(BuildFailedError):
        open_torch(program(Failing(), (torch.ones(2),), inputs=("x",)), "sdpa-flash")
    assert torch.backends.mha.get_fastpath_enabled()
    assert math_allowed() is math
    model = open_torch(attention(), "sdpa-flash")
    assert not torch.backends.mha.get_fastpath_enabled()
    assert not math_allowed()
    model.close()
    assert torch.backends.mha.get_fastpath_enabled()
    assert math_allowed() is math


@pytest.mark.parametrize("mode", ["eager", "bf16"])
def test_complex_buffers_keep_their_imaginary_part(mode: str, opened: Open) -> None:
    class Turned(nn.Module):
        turn: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turn", torch.tensor([1j, -1.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.float() * self.turn).imag

    made = program(Turned(), (torch.ones(3, 2),), inputs=("x",))
    found = opened(made, mode).outputs({"x": np.full((1, 2), 2, np.float32)})["y"]
    np.testing.assert_array_equal(found, np.array([[2, 0]], np.float32))


def test_channels_last_without_a_2d_convolution_is_an_error() -> None:
    with pytest.raises(BuildFailedError, match="no 2-d convolution"):
        open_torch(mlp(), "channels_last")


def test_channels_last_reaches_weights_and_inputs(opened: Open) -> None:
    seen: list[bool] = []
    made = conv_net()
    module = made.module.get_submodule("first")
    last = torch.channels_last

    def look(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        weight = layer.get_parameter("weight")
        seen.append(
            args[0].is_contiguous(memory_format=last) and weight.is_contiguous(memory_format=last)
        )

    module.register_forward_pre_hook(look)
    opened(made, "channels_last").prepare(arrays_of(conv_net()))
    assert seen
    assert all(seen)


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
@pytest.mark.parametrize("backend", ["cusparselt", "cutlass"])
def test_sparse_kernels_without_a_gpu_are_a_missing_tool(backend: str) -> None:
    with pytest.raises(MissingToolError, match="need a GPU with sparse tensor cores"):
        open_torch(mlp(), f"semi-structured-{backend}")

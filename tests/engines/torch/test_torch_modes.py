from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.torch_small_modules import (
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
from torch._inductor import config as inductor

from twofour.engines.protocol import TimedModel
from twofour.engines.tensorrt.plan import GPU
from twofour.engines.torch.engine import (
    MODES,
    TorchEngine,
    TorchProgram,
    TorchTensorRtEngine,
    cosine_of,
    in_one_line,
    pack,
    torch_errors,
)
from twofour.errors import BadInputError, BuildFailedError, MissingToolError
from twofour.records.latency import SPARSITY_OFF

ON_GPU = torch.cuda.is_available()
no_gpu = pytest.mark.skipif(ON_GPU, reason="there is a GPU")

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
    inputs = {
        name: np.concatenate([np.roll(array, n, axis=0) for n in range(3)])
        for name, array in arrays_of(mlp()).items()
    }
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


@no_gpu
@pytest.mark.parametrize("mode", ["sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("make", [attention, transformer])
def test_attention_back_ends_agree(
    mode: str, make: Callable[[], TorchProgram], opened: Open
) -> None:
    inputs = arrays_of(make())
    model = opened(make(), mode)
    assert error_of(model.outputs(inputs)["y"], expected(make(), inputs)["y"]) < 1e-5


@no_gpu
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


@no_gpu
@pytest.mark.parametrize("backend", ["cusparselt", "cutlass"])
def test_sparse_kernels_without_a_gpu_are_a_missing_tool(backend: str) -> None:
    with pytest.raises(MissingToolError, match="need a GPU with sparse tensor cores"):
        open_torch(mlp(), f"semi-structured-{backend}")


@no_gpu
def test_every_mode_says_what_is_missing() -> None:
    statuses = {f"torch:{mode}": TorchEngine().status(mode) for mode in MODES}
    for mode in (GPU, SPARSITY_OFF):
        statuses[f"torch-tensorrt:{mode}"] = TorchTensorRtEngine().status(mode)
    missing = {name: status.why_not for name, status in statuses.items() if status.why_not}
    assert set(missing) == {
        "torch:semi-structured-cusparselt",
        "torch:semi-structured-cutlass",
        "torch:sdpa-efficient",
        "torch:sdpa-cudnn",
        "torch:dynamic-int8",
        "torch:static-int8",
        "torch:torchscript",
        "torch:xla",
        f"torch-tensorrt:{GPU}",
        f"torch-tensorrt:{SPARSITY_OFF}",
    }
    assert set(missing) == {name for name, status in statuses.items() if not status.can_run}
    assert "onnxruntime:int8" in str(statuses["torch:static-int8"].hint)
    assert missing["torch:xla"].startswith("twofour does not run torch_xla")
    assert "need a GPU with sparse tensor cores" in missing["torch:semi-structured-cutlass"]
    assert "torch has this attention on GPUs only" in missing["torch:sdpa-cudnn"]


# --- torch.compile --------------------------------------------------------------------------------


needs_compiler = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="needs a C++ compiler"
)


@needs_compiler
@pytest.mark.parametrize("batches", [1, pytest.param(2, marks=pytest.mark.full)])
def test_compiled_kernels_follow_the_batch(batches: int) -> None:
    inputs = arrays_of(mlp())
    larger = {name: np.concatenate([array, array]) for name, array in inputs.items()}
    model = open_torch(mlp(), "compile")
    assert model.settings.options[:2] == ("dynamic=False", "graphs=1")
    for given in (inputs, larger)[:batches]:
        model.prepare(given)
        assert model.run_ms() > 0
        found = model.outputs(given)["y"]
        wanted = np.asarray(expected(mlp(), given)["y"], np.float32)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    model.close()


def test_a_module_of_which_nothing_is_compiled_is_no_compiled_row() -> None:
    class Opaque(nn.Module):
        @torch._dynamo.disable  # type: ignore[untyped-decorator]  # torch lacks the types
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    made = program(Opaque(), (torch.ones(2, 3),), inputs=("x",))
    with pytest.raises(BuildFailedError, match="compiled nothing of"):
        open_torch(made, "compile")


@no_gpu
def test_without_a_compiler_the_row_of_torch_compile_says_so() -> None:
    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(BuildFailedError, match=r"C\+\+ compiler"),
    ):
        open_torch(mlp(), "compile")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "RuntimeError: no message"),
        ("one\ntwo", "RuntimeError: one"),
        (
            "backend='inductor' raised:\nIndexError: x",
            "RuntimeError: backend='inductor' raised: IndexError: x",
        ),
        (
            "C++ compile error\n\nCommand:\ng++ a.cpp\n\nOutput:\n"
            "a.cpp:1:10: fatal error: Python.h: missing\n",
            "RuntimeError: C++ compile error: a.cpp:1:10: fatal error: Python.h: missing",
        ),
    ],
)
def test_an_error_of_torch_becomes_one_line(message: str, line: str) -> None:
    assert in_one_line(RuntimeError(message)) == line


def test_memory_that_ran_out_hints_at_the_batch() -> None:
    with (
        pytest.raises(BuildFailedError, match="OutOfMemoryError: no room") as info,
        torch_errors("torch:eager failed"),
    ):
        raise torch.OutOfMemoryError("no room")
    assert info.value.hint == "use a smaller batch"


# --- semi-structured weights ----------------------------------------------------------------------


needs_sparse_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs a GPU with sparse tensor cores",
)


def sparse_weight(rows: int, columns: int) -> torch.Tensor:
    kept = torch.tensor([0, 1, 1, 0]).repeat(columns // 4 + 1)[:columns]
    return kept.repeat(rows, 1).to(torch.float16)


def make_sparse(*layers: nn.Linear) -> None:
    with torch.no_grad():
        for layer in layers:
            layer.weight *= sparse_weight(layer.out_features, layer.in_features)


def test_layers_that_cannot_be_packed_keep_their_weights_and_say_why() -> None:
    layers = [nn.Linear(64, 32).half() for _ in range(3)]
    make_sparse(*layers[:2])
    # 2:4 along the outputs is not 2:4 for the kernel, though torch would take it
    layers[2].weight.data = sparse_weight(64, 32).T.contiguous()
    before = [layer.weight for layer in layers]
    why = [pack(layer, "cutlass") for layer in layers]
    # on a CPU torch itself refuses those that fit
    assert all("Only CUDA tensors are currently supported" in str(text) for text in why[:2])
    assert why[2] == "the weight is not 2:4"
    assert [layer.weight for layer in layers] == before


def test_the_cosine_tells_other_outputs_from_rounded_ones() -> None:
    a = torch.linspace(-1, 1, 200)
    assert cosine_of(a, a.half()) == pytest.approx(1.0, abs=1e-6)
    assert cosine_of(a, -a) == pytest.approx(-1.0)
    assert cosine_of(torch.zeros(3), torch.zeros(3)) == 1.0
    assert cosine_of(torch.zeros(3), torch.ones(3)) == 0.0
    assert cosine_of(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])) == pytest.approx(0.96)
    assert not cosine_of(a, torch.full_like(a, torch.nan)) >= 0.99
    # what overflowed in dense kernels too is no fault of the sparse ones
    assert cosine_of(torch.tensor([1.0, torch.inf]), torch.tensor([2.0, 5.0])) == 1.0


def sparse_net() -> TorchProgram:
    torch.manual_seed(0)
    layers = nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 10)
    make_sparse(*layers)
    module = nn.Sequential(layers[0], nn.ReLU(), *layers[1:])
    return program(module, (torch.randn(16, 128),), inputs=("x",))


@needs_sparse_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cusparselt", "cutlass"])
def test_sparse_kernels_compute_what_dense_ones_do(backend: str) -> None:
    inputs = arrays_of(sparse_net())
    dense = open_torch(sparse_net(), "fp16")
    wanted = torch.from_numpy(dense.outputs(inputs)["y"])
    dense.close()
    model = open_torch(sparse_net(), f"semi-structured-{backend}")
    assert model.settings.sparse_kernels is True
    assert "sparse_layers=2 of 3 Linear" in model.settings.options
    assert cosine_of(wanted, torch.from_numpy(model.outputs(inputs)["y"])) > 0.9999
    model.close()


@needs_sparse_gpu
@pytest.mark.gpu
def test_dense_weights_have_no_layer_for_sparse_kernels() -> None:
    made = program(nn.Linear(128, 256), (torch.randn(16, 128),), inputs=("x",))
    with pytest.raises(BuildFailedError, match="its weight is not 2:4"):
        open_torch(made, "semi-structured-cutlass")


# --- one model ------------------------------------------------------------------------------------


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

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from support.torch_small_modules import arrays_of, expected, mlp, open_torch, program
from torch import nn
from torch._inductor import config as inductor

from twofour.engines.torch.engine import in_one_line, torch_errors
from twofour.errors import BuildFailedError

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs Triton instead")
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

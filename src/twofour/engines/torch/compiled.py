"""torch.compile and TorchScript: a module compiled for the shapes it is given."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from twofour.engines.protocol import Untyped
from twofour.engines.torch.device import TorchDevice, float32_options
from twofour.engines.torch.placed import Forward, PerShape, Ready, TorchProgram, by_position, place
from twofour.errors import BuildFailedError, MissingToolError

if TYPE_CHECKING:
    import torch

_MOST_SHAPES = 64
"""Sets of shapes that are compiled before it is an error; torch's own default is 8, and after
those it would go on uncompiled."""


def compiled(program: TorchProgram, device: TorchDevice, stack: ExitStack) -> Ready:
    """torch.compile with its default back end, once for each set of shapes (dynamic=False).

    Kernels for a dynamic batch would be slower than those that a sweep is to compare. Raises
    BuildFailedError where nothing at all was compiled.
    """
    import torch
    from torch import _dynamo as dynamo

    placed = place(program, device)
    dynamo.reset()
    stack.callback(dynamo.reset)
    stack.enter_context(dynamo.config.patch(_limits(dynamo.config)))
    before = _graphs()
    forward = torch.compile(placed.module, dynamic=False)
    placed.run_example(forward)
    graphs = _graphs() - before
    if graphs == 0:
        raise BuildFailedError(f"torch.compile compiled nothing of {program.source}")
    options = ("dynamic=False", f"graphs={graphs}", *float32_options(device))
    return Ready(placed=placed, forward=forward, precision="float32", options=options)


def torchscript(
    program: TorchProgram,
    device: TorchDevice,
    stack: ExitStack,  # noqa: ARG001  # as the other modes
) -> Ready:
    """torch.jit.trace and freeze, once for each set of shapes: a trace may hold sizes as numbers.

    What depends on values of the inputs is fixed as the first inputs of these shapes had it.
    """
    placed = place(program, device)
    module = by_position(program)

    def make(tensors: tuple[torch.Tensor, ...]) -> Forward:
        import torch

        traced = torch.jit.trace(  # type: ignore[no-untyped-call]  # torch lacks the types
            module, tensors, check_trace=False, strict=False
        )
        frozen: Forward = torch.jit.freeze(traced)
        return frozen

    return Ready(
        placed=placed,
        forward=PerShape(make),
        precision="float32",
        options=("traced for each shape", "frozen", *float32_options(device)),
    )


def check_compiler(device: TorchDevice) -> None:
    """Raise MissingToolError where torch.compile lacks its compiler, found by starting it.

    Compiling something would take seconds: this is what a list of modes can afford.
    """
    if device.kind == "cuda":
        from torch.utils import _triton

        if not _triton.has_triton():
            raise MissingToolError(
                "torch.compile finds no working Triton for this GPU", hint="pip install triton"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    get_cpp_compiler()


def _limits(config: Untyped) -> dict[str, Any]:
    """Settings of dynamo under which too many shapes are an error; renamed in torch 2.7."""
    renamed = hasattr(config, "recompile_limit")
    limit = "recompile_limit" if renamed else "cache_size_limit"
    fails = "fail_on_recompile_limit_hit" if renamed else "fail_on_cache_limit_hit"
    return {limit: _MOST_SHAPES, f"accumulated_{limit}": 4 * _MOST_SHAPES, fails: True}


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])

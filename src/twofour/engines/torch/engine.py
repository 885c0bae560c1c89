"""torch as an engine: its modes, and which can run here, each tried with one small module."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from twofour.engines.protocol import (
    BuildRequest,
    Mode,
    ModeStatus,
    OpenOptions,
    OpenRequest,
    ProgressCallback,
    TimedModel,
    mode_statuses,
)
from twofour.engines.torch.compiled import check_compiler
from twofour.engines.torch.device import TorchDevice, best_device, quiet, torch_errors
from twofour.engines.torch.modes import ENGINE, MODES, device_for
from twofour.engines.torch.placed import TorchProgram
from twofour.engines.torch.timed import check_torch, open_torch
from twofour.errors import BadInputError, TwofourError
from twofour.records.build import EngineStatus, VariantBuild

if TYPE_CHECKING:
    from torch import nn

_WIDTH = 64
"""The least that every 2:4 kernel in float16 takes, and a width of heads that flash takes."""


class TorchEngine:
    """Opens torch modules; there is nothing that it could build from ONNX."""

    name = ENGINE
    modes = tuple(
        Mode(name=name, needs_sparse=name.startswith("semi-structured")) for name in MODES
    )
    open_levels: tuple[str, ...] = ()

    def status(self) -> EngineStatus:
        """Whether torch can be imported."""
        try:
            version, device = self._found()
        except TwofourError as error:
            return EngineStatus(
                engine=self.name,
                version=None,
                can_run=False,
                why_not=error.message,
                hint=error.hint,
            )
        return EngineStatus(
            engine=self.name, version=version, can_run=True, why_not=None, device=device.name
        )

    def statuses(self, modes: Sequence[str]) -> tuple[ModeStatus, ...]:
        """Each tried, torch.compile only as far as its compiler, which would take seconds."""
        found = self.status()
        if not found.can_run:
            return mode_statuses(found, modes)
        import torch

        threads = torch.get_num_threads()
        try:
            return tuple(_tried(mode, threads) for mode in modes)
        finally:
            torch.set_num_threads(threads)

    def attempts(self, request: BuildRequest) -> tuple[tuple[str, BuildRequest], ...]:
        """Of no use: it does not build."""
        return (("", request),)

    def build(self, request: BuildRequest, report: ProgressCallback) -> VariantBuild:  # noqa: ARG002  # as every engine
        """Raises BadInputError."""
        raise BadInputError(f"{self.name} runs torch modules, and {request.onnx} is ONNX")

    def open(self, request: OpenRequest) -> TimedModel:
        """A module, as `open_torch` puts it into a mode."""
        return open_torch(request.program, request.mode, request.options)

    def _found(self) -> tuple[str, TorchDevice]:
        """Version and device; raises MissingToolError where it lacks what it needs."""
        check_torch()
        import torch

        return str(torch.__version__), best_device()


def _tried(mode: str, threads: int) -> ModeStatus:
    try:
        with ExitStack() as stack, torch_errors(f"torch:{mode} does not run"):
            stack.enter_context(quiet())
            if mode == "compile":
                check_compiler(device_for(mode))
            else:
                options = OpenOptions(weights="probe", threads=threads)
                stack.callback(open_torch(probe_program(), mode, options).close)
    except TwofourError as error:
        return ModeStatus(engine=ENGINE, mode=mode, why_not=error.message, hint=error.hint)
    return ModeStatus(engine=ENGINE, mode=mode, why_not=None)


def probe_program() -> TorchProgram:
    """A convolution, a 2:4 Linear layer and an attention, with two rows of zeros."""
    import torch

    return TorchProgram(
        module=_probe(),
        args=(torch.zeros(2, 8, 8, 8),),
        kwargs={},
        input_names=("x",),
        output_names=("y",),
        source="a small module",
    )


def _probe() -> nn.Module:
    import torch
    from torch import nn
    from torch.nn import functional

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(8, 8, 3, padding=1)
            self.linear = nn.Linear(_WIDTH, _WIDTH)
            self.linear.weight.data *= torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(_WIDTH // 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.linear(self.convolution(x).flatten(2)).unsqueeze(1)
            return functional.scaled_dot_product_attention(rows, rows, rows)

    return Probe()

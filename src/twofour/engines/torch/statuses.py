"""Which modes of torch can run here, each tried with a small module that fits them all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from twofour.engines.timed_protocol import ModeStatus, OpenOptions
from twofour.engines.torch.compiled import check_compiler
from twofour.engines.torch.failures import quiet, torch_errors
from twofour.engines.torch.modes import ENGINE, device_for
from twofour.engines.torch.placed import TorchProgram
from twofour.engines.torch.timed import check_torch, open_torch
from twofour.errors import TwofourError

if TYPE_CHECKING:
    from torch import nn

_WIDTH = 64
"""The least that every 2:4 kernel in float16 takes, and a width of heads that flash takes."""


def try_modes(modes: Sequence[str]) -> tuple[ModeStatus, ...]:
    """The status of each of these modes of torch; never raises."""
    try:
        check_torch()
    except TwofourError as error:
        return tuple(_status(mode, error) for mode in modes)
    import torch

    threads = torch.get_num_threads()
    try:
        return tuple(_tried(mode, threads) for mode in modes)
    finally:
        torch.set_num_threads(threads)


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
        return _status(mode, error)
    return ModeStatus(engine=ENGINE, mode=mode, why_not=None)


def _status(mode: str, error: TwofourError) -> ModeStatus:
    return ModeStatus(engine=ENGINE, mode=mode, why_not=error.message, hint=error.hint)


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

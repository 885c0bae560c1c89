"""torch and torch-tensorrt as engines, and which of their modes can run here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from twofour.engines.protocol import (
    BuildRequest,
    Mode,
    ModeStatus,
    OpenOptions,
    OpenRequest,
    ProgressCallback,
    TimedModel,
    Untyped,
    mode_statuses,
)
from twofour.engines.tensorrt.plan import MODES as TENSORRT_MODES
from twofour.engines.torch.modes import ENGINE, MODES, check_compiler, device_for
from twofour.engines.torch.placed import (
    CUDA,
    Forward,
    PerShape,
    Ready,
    TorchDevice,
    TorchProgram,
    best_device,
    by_position,
    place,
    quiet,
    torch_errors,
)
from twofour.engines.torch.timed import check_torch, open_in, open_torch
from twofour.errors import BadInputError, BuildFailedError, MissingToolError, TwofourError
from twofour.records.build import EngineStatus, VariantBuild

if TYPE_CHECKING:
    import torch
    from torch import nn


_WIDTH = 64
"""The least that every 2:4 kernel in float16 takes, and a width of heads that flash takes."""
TORCH_TENSORRT = "torch-tensorrt"
_ALLOWS_SPARSE = {mode.name: mode.sparse_kernels is True for mode in TENSORRT_MODES}
_PRECISION = "float16"
_INSTALL_TORCH_TENSORRT = (
    "pip install torch-tensorrt, in the release of the torch that is installed"
)


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


def open_torch_tensorrt(program: TorchProgram, mode: str, options: OpenOptions) -> TimedModel:
    """The program in float16, one engine for each set of shapes; otherwise as `open_torch`.

    Written by torch-tensorrt's documentation and not run on a GPU so far.
    """
    if mode not in _ALLOWS_SPARSE:
        raise BadInputError(
            f"{TORCH_TENSORRT} has no mode {mode!r}",
            hint=f"choose one of {', '.join(_ALLOWS_SPARSE)}",
        )
    check_torch()
    make = partial(_in_tensorrt, sparse=_ALLOWS_SPARSE[mode])
    return open_in(program, (TORCH_TENSORRT, mode), make, _gpu, options)


class TorchTensorRtEngine(TorchEngine):
    """The same of torch-tensorrt, whose modes all need the same."""

    name = TORCH_TENSORRT
    modes = TENSORRT_MODES

    def statuses(self, modes: Sequence[str]) -> tuple[ModeStatus, ...]:
        """Whether it is installed and there is a GPU, for each mode; never raises."""
        return mode_statuses(self.status(), modes)

    def open(self, request: OpenRequest) -> TimedModel:
        """A module, as `open_torch_tensorrt` compiles it."""
        return open_torch_tensorrt(request.program, request.mode, request.options)

    def _found(self) -> tuple[str, TorchDevice]:
        check_torch()
        return str(_package().__version__), _gpu()


def _in_tensorrt(
    program: TorchProgram,
    device: TorchDevice,
    stack: ExitStack,  # noqa: ARG001  # as the modes of torch
    *,
    sparse: bool,
) -> Ready:
    package = _package()
    placed = place(program, device, _PRECISION)
    module = by_position(program)

    def make(tensors: tuple[torch.Tensor, ...]) -> Forward:
        made: Untyped = package.compile(
            module,
            ir="dynamo",
            arg_inputs=list(tensors),
            use_explicit_typing=True,
            sparse_weights=sparse,
            min_block_size=1,  # its 5 would leave a small model to torch
        )
        if not any(type(part).__name__.endswith("TensorRTModule") for part in made.modules()):
            raise BuildFailedError(f"{TORCH_TENSORRT} left all of {program.source} to torch")
        forward: Forward = made
        return forward

    return Ready(
        placed=placed,
        forward=PerShape(make),
        precision=_PRECISION,
        options=(
            f"torch_tensorrt={package.__version__}",
            "compiled for each shape",
            "min_block_size=1",
        ),
        sparse_kernels=sparse,
    )


def _gpu() -> TorchDevice:
    device = best_device()
    if device.kind != CUDA:
        raise MissingToolError(f"{TORCH_TENSORRT} needs an NVIDIA GPU that torch can use")
    return device


def _package() -> ModuleType:
    import importlib

    try:
        return importlib.import_module("torch_tensorrt")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingToolError(
            f"torch_tensorrt cannot be imported: {(str(error) or 'no reason').splitlines()[0]}",
            hint=_INSTALL_TORCH_TENSORRT,
        ) from error

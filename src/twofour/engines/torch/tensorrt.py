"""torch-tensorrt: a module compiled by TensorRT from within torch, sparse kernels or not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from twofour.engines.protocol import (
    ModeStatus,
    OpenOptions,
    OpenRequest,
    TimedModel,
    Untyped,
    mode_statuses,
)
from twofour.engines.tensorrt.timed import MODES
from twofour.engines.torch.device import CUDA, TorchDevice, best_device
from twofour.engines.torch.engine import TorchEngine
from twofour.engines.torch.placed import Forward, PerShape, Ready, TorchProgram, by_position, place
from twofour.engines.torch.timed import check_torch, open_in
from twofour.errors import BadInputError, BuildFailedError, MissingToolError

if TYPE_CHECKING:
    import torch

ENGINE = "torch-tensorrt"
_SPARSE = {mode.name: mode.sparse_kernels is True for mode in MODES}
_PRECISION = "float16"
_HINT = "pip install torch-tensorrt, in the release of the torch that is installed"


def open_torch_tensorrt(program: TorchProgram, mode: str, options: OpenOptions) -> TimedModel:
    """The program in float16, one engine for each set of shapes; otherwise as `open_torch`.

    Written by torch-tensorrt's documentation and not run on a GPU so far.
    """
    if mode not in _SPARSE:
        raise BadInputError(
            f"{ENGINE} has no mode {mode!r}", hint=f"choose one of {', '.join(_SPARSE)}"
        )
    check_torch()
    make = partial(_compiled, sparse=_SPARSE[mode])
    return open_in(program, (ENGINE, mode), make, _gpu, options)


class TorchTensorRtEngine(TorchEngine):
    """The same of torch-tensorrt, whose modes all need the same."""

    name = ENGINE
    modes = MODES

    def statuses(self, modes: Sequence[str]) -> tuple[ModeStatus, ...]:
        """Whether it is installed and there is a GPU, for each mode; never raises."""
        return mode_statuses(self.status(), modes)

    def open(self, request: OpenRequest) -> TimedModel:
        """A module, as `open_torch_tensorrt` compiles it."""
        return open_torch_tensorrt(request.program, request.mode, request.options)

    def _found(self) -> tuple[str, TorchDevice]:
        check_torch()
        return str(_package().__version__), _gpu()


def _compiled(
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
            raise BuildFailedError(f"{ENGINE} left all of {program.source} to torch")
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
        raise MissingToolError(f"{ENGINE} needs an NVIDIA GPU that torch can use")
    return device


def _package() -> ModuleType:
    import importlib

    try:
        return importlib.import_module("torch_tensorrt")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingToolError(
            f"torch_tensorrt cannot be imported: {(str(error) or 'no reason').splitlines()[0]}",
            hint=_HINT,
        ) from error

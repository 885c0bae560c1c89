"""Scaled-dot-product attention with one back end allowed, and proof that it is called at all."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from twofour.engines.protocol import Untyped
from twofour.engines.torch.device import CUDA, TorchDevice, float32_options
from twofour.engines.torch.placed import Placed, Ready, TorchProgram, place
from twofour.errors import BuildFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils._python_dispatch import TorchDispatchMode

_NO_KERNEL = re.compile(r"No viable backend|No available kernel")
"""What torch says where no back end that is allowed takes a call (aten/native/transformers)."""
_OPERATOR = "scaled_dot_product"
"""Part of the name of the operator and of every fused one it may become."""


def attention(
    program: TorchProgram, device: TorchDevice, stack: ExitStack, *, backend: str
) -> Ready:
    """Every attention in the back end of that name in torch.nn.attention.SDPBackend, or an error.

    float16 on a GPU, where flash and cuDNN take nothing wider, so that the back ends compare. The
    fused path of nn.TransformerEncoder is turned off: it does not ask which back end is allowed.
    Raises BuildFailedError where the module never calls scaled_dot_product_attention, and where the
    back end does not take a call.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    half = device.kind == CUDA
    placed = place(program, device, "float16" if half else "float32")
    without_fast_path(stack)
    stack.enter_context(sdpa_kernel(getattr(SDPBackend, backend)))
    try:
        calls = count_attention(placed)
    except RuntimeError as error:
        if not _NO_KERNEL.search(str(error)):
            raise
        raise BuildFailedError(
            f"{backend.lower()} has no kernel here ({device.name}, {placed.dtype}) for the "
            f"attention of {program.source}"
        ) from error
    if calls == 0:
        raise BuildFailedError(
            f"{program.source} never calls scaled_dot_product_attention, so its back end changes "
            "nothing",
            hint='Hugging Face models call it when loaded with attn_implementation="sdpa"',
        )
    options = (f"attention_calls={calls}", "mha_fastpath=off")
    return Ready(
        placed=placed,
        forward=placed.module,
        precision=placed.dtype,
        options=options if half else (*options, *float32_options(device)),
        layers=placed.module,
    )


def count_attention(placed: Placed) -> int:
    """Calls of scaled_dot_product_attention in one run on the example inputs."""
    counting: Untyped = _counting_mode()
    with counting:
        placed.run_example(placed.module)
    return int(counting.calls)


def without_fast_path(stack: ExitStack) -> None:
    """Turn off the fused kernels of nn.TransformerEncoderLayer and nn.MultiheadAttention."""
    import torch

    stack.callback(
        torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
    )
    torch.backends.mha.set_fastpath_enabled(value=False)


def _counting_mode() -> TorchDispatchMode:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch lacks the types
        # a TorchFunctionMode would miss the calls inside torch's own functions
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # likewise
            self.calls = 0

        def __torch_dispatch__(
            self,
            func: Any,  # noqa: ANN401  # an operator of torch
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> object:
            self.calls += _OPERATOR in str(func)
            return func(*args, **(kwargs or {}))

    return Counting()

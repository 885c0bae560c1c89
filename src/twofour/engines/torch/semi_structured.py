"""2:4 weights in torch's own sparse kernels: which layers fit, and their conversion."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from twofour.engines.torch.placed import (
    CUDA,
    Ready,
    TorchDevice,
    TorchProgram,
    in_one_line,
    place,
    without_fast_path,
)
from twofour.errors import BuildFailedError, MissingToolError
from twofour.pattern import check
from twofour.records.weights import HARDWARE_PATTERN

if TYPE_CHECKING:
    import torch
    from torch import nn

SPARSE_SHAPES: dict[tuple[str, str], tuple[int, int]] = {
    ("cusparselt", "float16"): (16, 16),
    ("cusparselt", "bfloat16"): (16, 16),
    ("cusparselt", "int8"): (32, 32),
    ("cusparselt", "float8_e4m3fn"): (32, 32),
    ("cutlass", "float16"): (32, 64),
    ("cutlass", "bfloat16"): (32, 64),
    ("cutlass", "float32"): (32, 32),
    ("cutlass", "int8"): (16, 128),
}
"""(back end, type) -> what rows (output features) and columns (input features) of a weight must be
multiples of. Source: torch/sparse/semi_structured.py of torch 2.13, `_DTYPE_SHAPE_CONSTRAINTS`."""

DTYPE = "float16"
LEAST_COSINE = 0.99
"""Of sparse against dense outputs, both in float16: below it a kernel computes something else."""
_REASONS_SHOWN = 3
_PIECE = 1 << 24


def semi_structured(
    program: TorchProgram, device: TorchDevice, stack: ExitStack, *, backend: str
) -> Ready:
    """Linear layers whose weights are 2:4 and fit the back end, in its kernels; float16; in place.

    `backend` is cusparselt or cutlass. Raises MissingToolError without a GPU, and BuildFailedError
    where no layer fits (with the reasons) or the outputs are not those of dense kernels.
    """
    if device.kind != CUDA:
        raise MissingToolError(
            "2:4 kernels of torch need a GPU with sparse tensor cores (NVIDIA, SM 8.0 and up)"
        )
    placed = place(program, device, DTYPE)
    without_fast_path(stack)  # it would hand packed weights to kernels that cannot read them
    dense = placed.run_example(placed.module)
    total, left = convert(placed.module, backend)
    if total == len(left):
        raise BuildFailedError(
            f"no layer of {program.source} can run in {backend} kernels: {_listed(left)}",
            hint="only Linear layers with 2:4 weights can: compare the sparse weights",
        )
    _refuse_other_outputs(dense, placed.run_example(placed.module), program, backend)
    options = [f"sparse_layers={total - len(left)} of {total} Linear", "mha_fastpath=off"]
    if left:
        options.append(f"left dense: {_listed(left)}")
    return Ready(
        placed=placed,
        forward=placed.module,
        precision=DTYPE,
        options=tuple(options),
        sparse_kernels=True,
        layers=placed.module,
    )


def convert(module: nn.Module, backend: str) -> tuple[int, dict[str, str]]:
    """Pack every weight that can be; gives the number of Linear layers, and why some stay dense."""
    from torch import nn

    left: dict[str, str] = {}
    total = 0
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        total += 1
        why = why_dense(layer.weight, backend) or _pack(layer, backend)
        if why is not None:
            left[name or "(model)"] = why
    return total, left


def why_dense(weight: torch.Tensor, backend: str) -> str | None:
    """Why a Linear's weight [out, in] cannot run in the back end's kernels; None: it can.

    torch checks shape and type itself, and not the pattern: a weight that is not 2:4 would give
    wrong numbers (pytorch issue 109175).
    """
    kind = str(weight.dtype).removeprefix("torch.")
    multiples = SPARSE_SHAPES.get((backend, kind))
    if multiples is None:
        return f"{backend} has no kernel for {kind}"
    if weight.dim() != 2:
        return f"its weight has {weight.dim()} axes"
    rows, columns = weight.shape
    if rows == 0 or columns == 0 or rows % multiples[0] or columns % multiples[1]:
        return (
            f"{rows}x{columns} is no multiple of {multiples[0]}x{multiples[1]} ({backend}, {kind})"
        )
    if not check(weight.detach().float().cpu().numpy(), 1, HARDWARE_PATTERN).holds:
        return "its weight is not 2:4"
    return None


def _pack(layer: nn.Linear, backend: str) -> str | None:
    """Put the packed weight in place of the dense one; gives what torch says against it."""
    from torch import nn

    try:
        packed = _class_of(backend).from_dense(layer.weight.detach().contiguous())
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return in_one_line(error)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    return None


def _class_of(backend: str) -> Any:  # noqa: ANN401  # a class of torch without types
    """The tensor class itself: the switch between them, `_FORCE_CUTLASS`, is private."""
    import torch

    return getattr(torch.sparse, f"SparseSemiStructuredTensor{backend.upper()}")


def _refuse_other_outputs(
    dense: tuple[torch.Tensor, ...],
    sparse: tuple[torch.Tensor, ...],
    program: TorchProgram,
    backend: str,
) -> None:
    for name, expected, found in zip(program.output_names, dense, sparse, strict=True):
        cosine = cosine_of(expected, found)
        if not cosine >= LEAST_COSINE:
            raise BuildFailedError(
                f"{backend} kernels give other outputs than dense ones with the same weights: "
                f"cosine {cosine:.4f} in {name}",
                hint="known of some releases of torch and cuSPARSELt on some GPUs: "
                "try the other back end, or newer ones",
            )


def cosine_of(first: torch.Tensor, second: torch.Tensor) -> float:
    """Over the values that are finite in the first; 1.0 where those are equal, zeros included."""
    import torch

    if torch.equal(first, second):
        return 1.0
    dot = norm_a = norm_b = 0.0
    # in pieces: float64 copies of a language model's logits may not fit beside it
    pieces = zip(
        torch.split(first.flatten(), _PIECE), torch.split(second.flatten(), _PIECE), strict=True
    )
    for left, right in pieces:
        kept = left.isfinite()
        a, b = left[kept].double(), right[kept].double()
        dot += float(torch.dot(a, b))
        norm_a += float(torch.dot(a, a))
        norm_b += float(torch.dot(b, b))
    if norm_a == norm_b == 0.0:
        return 1.0
    return dot / math.sqrt(norm_a * norm_b) if norm_a * norm_b else 0.0


def _listed(left: dict[str, str]) -> str:
    """The reasons with the number of layers, most frequent first, and one layer for each."""
    if not left:
        return "it has no Linear layer"
    counts = Counter(left.values())
    first = {why: name for name, why in reversed(left.items())}
    shown = [
        f"{first[why]} and {count - 1} more: {why}" if count > 1 else f"{first[why]}: {why}"
        for why, count in counts.most_common(_REASONS_SHOWN)
    ]
    rest = len(left) - sum(count for _, count in counts.most_common(_REASONS_SHOWN))
    return "; ".join([*shown, f"{rest} more layers"] if rest else shown)

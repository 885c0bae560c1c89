"""One product by every kernel that torch has for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name it has everywhere
from torch import Tensor

from gpu_matrix.figures import AGAIN, DENSE
from gpu_matrix.judge import Judge
from gpu_matrix.lab import KERNEL_LIMITS, SMOKE_LIMITS, Builders, Lab, Variant
from gpu_matrix.plan import DTYPES, KernelCase
from gpu_matrix.rounds import measure
from gpu_matrix.rows import Row
from gpu_matrix.weights import padded, sparse_weight, two_four


def same(output: Tensor) -> Tensor:
    return output


def kernel_row(case: KernelCase, lab: Lab) -> Row:
    """Measure one product."""
    integers = case.dtype == "int8"
    x, weight = (random_matrix(n, case, lab) for n in (case.rows, case.outputs))
    weight = two_four(weight)
    # exact for the integers here: sums stay below 2**24
    judge = Judge(x.float() @ weight.float().t(), by_norm=False)
    builders = int8_builders(x, weight) if integers else float_builders(x, weight)
    return case.row() | measure(builders, judge, lab, SMOKE_LIMITS if lab.smoke else KERNEL_LIMITS)


def random_matrix(rows: int, case: KernelCase, lab: Lab) -> Tensor:
    if case.dtype == "int8":
        return torch.randint(-32, 32, (rows, case.inputs), device=lab.device).to(torch.int8)
    return torch.randn(rows, case.inputs, device=lab.device).to(DTYPES[case.dtype])


def float_builders(x: Tensor, weight: Tensor) -> Builders:
    """F.linear as a user calls it, and the cuSPARSELt kernel without padding and dispatch."""
    wide = padded(x, 8)
    turned = partial(_turned, rows=len(x))
    direct = partial(cslt_variant, weight, wide, turned)
    return {
        DENSE: lambda: linear_variant(x, weight),
        AGAIN: lambda: linear_variant(x, weight.clone()),
        "cusparselt": lambda: linear_variant(x, sparse_weight(weight, "cusparselt")),
        "cutlass": lambda: linear_variant(x, sparse_weight(weight, "cutlass")),
        "cusparselt kernel": direct,
        "cusparselt searched": lambda: direct(search=True),
        "cusparselt searched row-major": lambda: cslt_variant(
            weight, wide, partial(_cut, rows=len(x)), search=True, transpose_result=True
        ),
    }


def int8_builders(x: Tensor, weight: Tensor) -> Builders:
    """Products of int8 with int32 out; rows are padded to 32, the least `_int_mm` takes."""
    wide = padded(x, 32)
    turned, cut = partial(_turned, rows=len(x)), partial(_cut, rows=len(x))
    direct = partial(cslt_variant, weight, wide, turned, out_dtype=torch.int32)

    def dense(weight: Tensor) -> Variant:
        return Variant(partial(torch._int_mm, wide, weight.t()), cut)

    def cutlass() -> Variant:
        sparse: Any = sparse_weight(weight, "cutlass")
        packed, meta = sparse.packed, sparse.meta
        kernel = getattr(torch, "_sparse_semi_structured_mm")  # noqa: B009  not in every version
        return Variant(lambda: kernel(packed, meta, wide.t(), out_dtype=torch.int32), turned)

    return {
        DENSE: lambda: dense(weight),
        AGAIN: lambda: dense(weight.clone()),
        "cutlass": cutlass,
        "cusparselt kernel": direct,
        "cusparselt searched": lambda: direct(search=True),
        "cusparselt kernel bfloat16 out": lambda: cslt_variant(
            weight, wide, turned, out_dtype=torch.bfloat16
        ),
    }


def _turned(output: Tensor, rows: int) -> Tensor:
    """(outputs, padded rows) to (rows, outputs)."""
    return output.t()[:rows]


def _cut(output: Tensor, rows: int) -> Tensor:
    return output[:rows]


def linear_variant(x: Tensor, weight: Tensor) -> Variant:
    """F.linear: for a semi-structured weight, torch pads and dispatches to its kernel."""
    return Variant(lambda: F.linear(x, weight), same)


def cslt_variant(
    weight: Tensor,
    wide: Tensor,
    output: Callable[[Any], Tensor],
    *,
    search: bool = False,
    **options: Any,
) -> Variant:
    """The cuSPARSELt product itself; `search`: with the algorithm its own search finds fastest."""
    torch_any: Any = torch
    packed, across = torch_any._cslt_compress(weight), wide.t()
    note = None
    if search:
        found = search_algorithm(packed, across, **options)
        note = ", ".join(f"{key} {value}" for key, value in found.items())
        options |= found
    return Variant(lambda: torch_any._cslt_sparse_mm(packed, across, **options), output, note)


def search_algorithm(
    packed: Tensor,
    across: Tensor,
    *,
    transpose_result: bool = False,
    out_dtype: torch.dtype | None = None,
) -> dict[str, int]:
    """What cuSPARSELt's search finds for one product, as options of `_cslt_sparse_mm`."""
    bound: Any = getattr(torch._C, "_cusparselt", None)
    if hasattr(bound, "mm_search"):
        found = bound.mm_search(packed, across, None, None, out_dtype, transpose_result)
        return dict(zip(("alg_id", "split_k", "split_k_mode"), map(int, found), strict=False))
    torch_any: Any = torch
    return {
        "alg_id": int(
            torch_any._cslt_sparse_mm_search(
                packed, across, out_dtype=out_dtype, transpose_result=transpose_result
            )
        )
    }

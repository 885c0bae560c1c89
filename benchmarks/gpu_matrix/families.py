"""One model dense and with semi-structured layers of each backend."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gpu_matrix.models import Model, linears
from gpu_matrix.rows import first_line
from gpu_matrix.weights import padded, sparse_weight


@dataclass
class Family:
    """One model with 2:4 weights in its layers: float32 for reference, dense twice, sparse."""

    reference: Model
    dense: Model
    sparse: dict[str, Model] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def sparse_model(family: Family, name: str, backend: str, *, fused: bool = False) -> Model:
    """The dense model with semi-structured weights wherever torch takes the layer's shape.

    Raises RuntimeError with torch's first reason where it takes none.
    """
    if name in family.sparse:
        return family.sparse[name]
    model, refused = copy.deepcopy(family.dense), list[str]()
    for linear in linears(model):
        try:
            weight: Any = sparse_weight(linear.weight.detach(), backend)
        except RuntimeError as error:
            refused.append(first_line(error))
            continue
        if fused:
            weight.fuse_transpose_cusparselt = True
        linear.weight = nn.Parameter(weight, requires_grad=False)
    total = len(linears(model))
    if len(refused) == total:
        raise RuntimeError(refused[0])
    reason = f"; {refused[0]}" if refused else ""
    family.notes[name] = f"{total - len(refused)} of {total} linear layers sparse{reason}"
    family.sparse[name] = model
    return model


def tune(model: Model, inputs: Sequence[Tensor]) -> int:
    """Give every sparse layer the algorithm that is fastest for its rows; how many were searched.

    The layer's own product has no split along K, so of the search only the algorithm is used.
    """
    rows: dict[nn.Module, int] = {}

    def note_rows(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows[module] = args[0].numel() // args[0].shape[-1]

    hooks = [linear.register_forward_pre_hook(note_rows) for linear in linears(model)]
    try:
        model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    torch_any: Any = torch
    found: dict[tuple[int, ...], int] = {}
    for linear in linears(model):
        weight: Any = linear.weight
        if getattr(weight, "packed", None) is None:
            continue
        key = (*weight.shape, rows[linear])
        if key not in found:
            x = padded(torch.randn(key[2], key[1], device=weight.device).to(weight.dtype), 8)
            found[key] = int(
                torch_any._cslt_sparse_mm_search(weight.packed, x.t(), transpose_result=True)
            )
        weight.alg_id_cusparselt = found[key]
    return len(found)

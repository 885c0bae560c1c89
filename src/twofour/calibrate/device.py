"""Layers solved on a GPU where torch has one; on the CPU numpy solves them.

Activations come from ONNX Runtime, and sums of them from the CPU: only the problem of one layer at
a time is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from twofour.engines.machine import find_gpu
from twofour.graph.files import Array
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.solve import LayerSolver, SolvedLayer


def solving_device() -> str | None:
    """The device to solve on; None: numpy."""
    if find_gpu() is None:
        return None
    try:
        import torch
    except ImportError:
        return None
    return "cuda" if torch.cuda.is_available() else None


def solve_all(
    solver: LayerSolver, problems: Iterable[LayerProblem], device: str | None
) -> list[SolvedLayer]:
    """The layers solved in turn; what comes back is in numpy."""
    if device is None:
        return list(map(solver.solve, problems))
    return [_with_arrays(solver.solve(_on(problem, device)), _to_host) for problem in problems]


def _on(problem: LayerProblem, device: str) -> LayerProblem:
    import torch

    def move(values: Array) -> Any:  # noqa: ANN401  # a tensor takes an array's place
        return torch.from_numpy(np.array(values)).to(device)

    moved: LayerProblem = _with_arrays(problem, move)
    rounded = problem.rounded
    if rounded is None:
        return moved
    return replace(moved, rounded=lambda values: move(rounded(_to_host(values))))


def _to_host(values: Any) -> Array:  # noqa: ANN401  # a tensor of any device
    array: Array = values if isinstance(values, np.ndarray) else values.cpu().numpy()
    return array


def _with_arrays(record: Any, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401  # any record
    """The record with all arrays in it changed, also those of records inside."""
    if hasattr(record, "dtype") and hasattr(record, "shape"):
        return change(record)
    if not is_dataclass(record) or isinstance(record, type):
        return record
    changed = {f.name: _with_arrays(getattr(record, f.name), change) for f in fields(record)}
    return replace(record, **changed)

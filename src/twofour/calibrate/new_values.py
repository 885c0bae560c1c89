"""New values of weights and biases: each layer's problem, the device that solves it, the files.

Activations come from ONNX Runtime, and sums of them from the CPU: only the problem of one layer at
a time is moved to a GPU, where torch has one; on the CPU numpy solves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from twofour.calibrate.layer_plan import Bias, Key, MainGraph, WeightPart
from twofour.engines.machine import find_gpu
from twofour.errors import BadInputError
from twofour.graph.files import DTYPES, Array, read_tensor, storage_key
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import scopes
from twofour.pruning.arrays import refuse_not_finite
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.methods import InPlace
from twofour.pruning.methods.magnitude import count_non_finite
from twofour.pruning.solve import LayerSolver, SolvedLayer
from twofour.pruning.statistics import Statistics
from twofour.records.weights import Pattern
from twofour.store import atomic_file

ONNX_TYPES = {name: code for code, name in DTYPES.items()}
"""numpy's name of a type -> ONNX's number."""


class NewValues:
    """The differences from the model as it came; they grow while layers are pruned."""

    def __init__(
        self, graph: MainGraph, folder: Path, dense_model: OpenedModel | None = None
    ) -> None:
        """`dense_model` is the dense model where that is another one than the graph's."""
        self.graph = graph
        self.arrays: dict[Key, Path] = {}
        """Stored arrays that were pruned, or biases that were corrected: files with their bytes."""
        self.biases: dict[str, Path] = {}
        """Those of `arrays` that are biases, by name."""
        self._path = graph.opened.path
        self._folder = folder
        self._dense_model = dense_model

    def problem(self, part: WeightPart, pattern: Pattern, statistics: Statistics) -> LayerProblem:
        """The weight that its nodes see, with a function for the rounding of its stored type.

        Raises BadInputError for NaN and infinity in the weight, and a dense model without such a
        weight.
        """
        view = part.weight.view
        stored = read_tensor(part.weight.tensor, self._path)
        weight = self.graph.opened.weights().weights[part.users[0].row]
        refuse_not_finite(weight, count_non_finite(stored))
        seen = _in_floats(view.seen(stored))

        def rounded(values: Array) -> Array:
            return view.flowing(view.kept(values)).astype(seen.dtype)

        # float32 that a MatMul reads as it is; float16 behind a Cast is rounded to float16 and back
        is_exact = stored.dtype == seen.dtype and not view.changes
        problem = LayerProblem(
            stored=seen,
            layout=part.layout,
            pattern=pattern,
            statistics=statistics,
            has_bias=all(user.bias is not None for user in part.users),
            rounded=None if is_exact else rounded,
        )
        if self._dense_model is None:
            return problem
        return replace(problem, unpruned=self.dense_weight(part))

    def dense_weight(self, part: WeightPart) -> Array:
        """The weight that its nodes see in the dense model, in float32 or float64."""
        return _in_floats(part.weight.view.seen(self._dense(part.weight.tensor)))

    def take(self, number: int, part: WeightPart, solved: SolvedLayer) -> None:
        """Use the new values of a part, and of the biases behind it, in all that runs later."""
        view = part.weight.view
        values = self._now(part.weight.tensor)
        kept = view.kept(solved.weight)
        view.write(np.where(kept == 0, np.zeros_like(kept), kept), values)  # every zero as +0.0
        self._write(part.weight.tensor, values, f"array-{number}.bin")
        if solved.bias_change is None:
            return
        for user in part.users:
            assert user.bias is not None, "a part is corrected where all of its users have a bias"
            self._correct(user.bias, solved.bias_change)

    def prune_rest(
        self, parts: Sequence[WeightPart], axis: int, pattern: Pattern, prune: InPlace
    ) -> None:
        """Prune without data what no layer reads, or no input reached, of an array in `parts`."""
        tensor = parts[0].weight.tensor
        if sum(part.size for part in parts) < math.prod(tensor.dims):
            values = self._now(tensor)
            prune(values, axis, pattern)
            self._write(tensor, values, "")

    def _correct(self, bias: Bias, change: Array) -> None:
        """Add a change of its layer's outputs to a bias.

        The change is computed from the dense model's outputs: its bias is changed.
        """
        view = bias.constant.view
        tensor = bias.constant.tensor
        # int32 of scale 1/128, changed by 0.3: from 256 (2.0) to 2.3, stored as 294 (2.296875)
        seen = view.seen(self._dense(tensor))
        wanted = seen.astype(np.float64) + bias.factor * np.reshape(change, bias.constant.shape)
        values = self._now(tensor)
        view.write(view.kept(wanted), values)
        file = f"bias-{bias.node}.bin"
        self.biases[bias.constant.name] = self._write(tensor, values, file)

    def _now(self, tensor: onnx.TensorProto) -> Array:
        """An array as it is now: other parts of it may be changed already."""
        values = read_tensor(tensor, self._path)
        file = self.arrays.get(storage_key(tensor))
        if file is not None:
            values = np.fromfile(file, values.dtype).reshape(values.shape)
        return values

    def _write(self, tensor: onnx.TensorProto, values: Array, name: str) -> Path:
        """Keep an array's new values in the file of that name, or the one that it has already."""
        file = self.arrays.setdefault(storage_key(tensor), self._folder / name)
        with atomic_file(file) as temporary:
            np.ascontiguousarray(values).tofile(temporary)
        return file

    def _dense(self, tensor: onnx.TensorProto) -> Array:
        """The values of a constant in the dense model, where it has the same name."""
        dense = self._dense_model
        if dense is None:
            return read_tensor(tensor, self._path)
        other = next(scopes(dense.proto, dense.path)).constants.get(tensor.name)
        there = "there is none"
        if other is not None:
            there = f"it is {list(other.dims)}"
        if other is None or (other.dims, other.data_type) != (tensor.dims, tensor.data_type):
            raise BadInputError(
                f"{tensor.name!r} is {list(tensor.dims)} in the model; in the dense reference "
                f"{there}",
                hint="name the dense model that this one was made from",
            )
        return read_tensor(other, dense.path)


def _in_floats(values: Array) -> Array:
    """The values in float32, or float64 where they are that."""
    return values if values.dtype == np.float64 else values.astype(np.float32)


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

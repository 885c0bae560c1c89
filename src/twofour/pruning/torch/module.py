"""Pruning the weights of a torch module: in its own memory, or in the files that they come from.

For a checkpoint larger than memory the module has no values; its tensors are read and written one
by one, to where they lie: the files keep their names, order, types and metadata.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from twofour.errors import BadInputError, naming
from twofour.pruning.methods import left_to, without_data
from twofour.pruning.methods.magnitude import count_non_finite
from twofour.pruning.selection import Choice, axis_conflict, choose
from twofour.pruning.torch.module_layers import (
    Arrays,
    ArraysInMemory,
    bits_of,
    dtype_name,
    find_module_weights,
    find_not_covered,
    is_plain,
    make_permanent,
    zeros_of,
)
from twofour.pruning.verify import StoredTensor, read_header
from twofour.records.weights import (
    Calibration,
    Pattern,
    PrunedWeight,
    PruneResult,
    Selection,
    Solution,
    Weight,
    shared,
)
from twofour.store import sync, writing
from twofour.words import keys_listed

NOT_REACHED = "no calibration input reached it: pruned without data"

Progress = Callable[[str, int, int | None], None]
"""Called with the work in progress and the time left, how much is done, and how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedArray(Solution):
    """The report on one array that was pruned, and the method."""

    zeros: int
    kept_magnitude: float | None
    held_before: bool


class ModulePruning:
    """The choice of a module's weights to prune, and the report on each."""

    def __init__(
        self, module: nn.Module, arrays: Arrays, pattern: Pattern, selection: Selection
    ) -> None:
        """Raises BadInputError as `choose` does."""
        weights = find_module_weights(module)
        self.arrays, self._pattern, self._selection = arrays, pattern, selection
        self.choices = choose(weights, pattern, selection)
        self.wanted: dict[Hashable, Weight] = {}
        """Each array that is to be pruned, with its first weight."""
        for weight, pruned, _ in self.choices:
            if pruned:
                self.wanted.setdefault(arrays.key(weight), weight)
        self._not_covered = find_not_covered(module, weights)

    def result(
        self,
        method: str,
        solved: Mapping[str, PrunedArray] | None = None,
        calibration: Calibration | None = None,
        step: Progress | None = None,
    ) -> PruneResult:
        """Prune arrays without data that are not `solved` (by weight), and report all weights.

        Raises BadInputError for NaN and infinity; some arrays are pruned then.
        """
        left, note = left_to(method), None if solved is None else NOT_REACHED
        done: dict[Hashable, PrunedArray] = {}
        for number, (key, weight) in enumerate(self.wanted.items(), 1):
            known = None if solved is None else solved.get(weight.weight or "")
            done[key] = known or self._pruned(weight, left, note)
            if step is not None:
                step(weight.layer, number, len(self.wanted))
        return PruneResult(
            source="",
            pattern=self._pattern,
            method=method,
            selection=self._selection,
            weights=tuple(self._row(choice, done) for choice in self.choices),
            not_covered=self._not_covered,
            calibration=calibration,
        )

    def _pruned(self, weight: Weight, method: str, note: str | None) -> PrunedArray:
        """One array, without data."""
        tensor = self.arrays.read(weight)
        assert tensor is not None, "it is to be pruned"
        assert weight.axis is not None
        bits = bits_of(tensor)
        prune = without_data(method)
        with naming(f"layer {weight.layer!r}"):
            outcome = prune(bits, weight.axis, self._pattern, kind=dtype_name(tensor))
        if outcome.non_finite:
            raise _not_finite(weight, outcome.non_finite)
        if tensor.device.type != "cpu":
            tensor.copy_(torch.from_numpy(bits).view(tensor.dtype))
        self.arrays.write(weight, tensor)
        return PrunedArray(
            method=method,
            zeros=outcome.zeros,
            kept_magnitude=outcome.kept_magnitude,
            held_before=outcome.held_before,
            note=note,
        )

    def _row(self, choice: Choice, found: Mapping[Hashable, PrunedArray]) -> PrunedWeight:
        weight, pruned, reasons = choice
        done = found.get(self.arrays.key(weight))
        if done is not None and pruned:
            return PrunedWeight(
                **shared(done, PrunedArray), weight=weight, pruned=True, reasons=reasons
            )
        zeros = 0 if done is None else done.zeros
        if done is None:
            tensor = self.arrays.read(weight)
            zeros = 0 if tensor is None or not is_plain(tensor) else zeros_of(tensor)
        return PrunedWeight(
            weight=weight, pruned=pruned, zeros=zeros, kept_magnitude=None, reasons=reasons
        )


@torch.no_grad()
def prune_module(
    model: nn.Module,
    pattern: Pattern,
    selection: Selection | None = None,
    *,
    method: str = "magnitude",
) -> PruneResult:
    """N:M in the model's own memory; weights that are computed become permanent first.

    Weights that share an array are pruned once. Raises BadInputError, with every weight as it was,
    for an unknown method, one that needs data, and as `plan_in_memory` does.
    """
    without_data(method)
    return plan_in_memory(model, pattern, selection or Selection()).result(method)


def plan_in_memory(model: nn.Module, pattern: Pattern, selection: Selection) -> ModulePruning:
    """The choice for a module, whose computed weights become permanent.

    Raises BadInputError for NaN or infinity, weights without memory (meta), lazy modules, a
    selection that does not fit, and an array that two layers need along different axes.
    """
    make_permanent(model)
    plan = ModulePruning(model, ArraysInMemory(model), pattern, selection)
    seen: dict[Hashable, tuple[Weight, bool, int | None]] = {}
    for weight, pruned, _ in plan.choices:
        tensor, key = plan.arrays.read(weight), plan.arrays.key(weight)
        if tensor is None:
            continue
        if key not in seen:
            _check_data(weight, tensor)
        # between neighbours of a group: a transposed view has another one
        step = tensor.stride(weight.axis) if pruned and weight.axis is not None else None
        first, known, first_step = seen.setdefault(key, (weight, pruned, step))
        if pruned and not known:
            seen[key] = (weight, pruned, step)
        elif pruned and step != first_step:
            raise axis_conflict(first, weight)
    return plan


def _check_data(weight: Weight, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise BadInputError(
            f"layer {weight.layer!r}: {weight.weight} is a meta tensor, without data",
            hint="load the model's weights before pruning it",
        )
    count = count_non_finite(bits_of(tensor), kind=dtype_name(tensor)) if is_plain(tensor) else 0
    if count:
        raise _not_finite(weight, count)


def _not_finite(weight: Weight, count: int) -> BadInputError:
    return BadInputError(
        f"layer {weight.layer!r}: {count} of {math.prod(weight.shape)} values of {weight.weight} "
        "are NaN or infinite",
        hint="the checkpoint is damaged or its training diverged; use another one",
    )


class CheckpointFiles:
    """The tensors of .safetensors files by key, read one by one."""

    def __init__(self, files: Sequence[Path], *, writable: bool = False) -> None:
        """Raises BadInputError for a damaged file."""
        self.files, self._writable = tuple(files), writable
        self._places = {
            key: (file, stored) for file in files for key, stored in read_header(file).items()
        }

    @property
    def keys(self) -> frozenset[str]:
        """The keys of all files."""
        return frozenset(self._places)

    def file_of(self, key: str) -> Path:
        """The file that contains the tensor."""
        return self._places[key][0]

    def described(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape; raises BadInputError for a type that cannot be held."""
        file, stored = self._places[key]
        return _torch_type(file, key, stored), stored.shape

    def read(self, key: str) -> Tensor:
        """The tensor in memory of its own."""
        file, stored = self._places[key]
        dtype = _torch_type(file, key, stored)
        size = int(np.prod(stored.shape, dtype=np.int64)) * dtype.itemsize
        raw = np.fromfile(file, np.uint8, size, offset=stored.offset)
        return torch.from_numpy(raw).view(dtype).reshape(stored.shape)

    def write(self, key: str, tensor: Tensor) -> None:
        """Overwrite a tensor; raises BadInputError for another type or shape, and a full disk."""
        assert self._writable, "the user's own files stay as they are"
        file, stored = self._places[key]
        if (tensor.dtype, tuple(tensor.shape)) != self.described(key):
            raise BadInputError(
                f"{file}: {key} is {list(stored.shape)} of {stored.dtype}, not "
                f"{list(tensor.shape)} of {tensor.dtype}"
            )
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        with writing(file), file.open("r+b") as handle:
            handle.seek(stored.offset)
            raw.tofile(handle)

    def sync(self, keys: Iterable[str]) -> None:
        """Wait until these tensors are on the disk; raises BadInputError where that fails."""
        for file in dict.fromkeys(self.file_of(key) for key in keys):
            with writing(file):
                sync(file)


class StreamedModule:
    """A module whose parameters come from files when it runs, and go again.

    A submodule's own parameters are there while its forward runs; `held` keeps those of a whole
    block for longer.
    """

    def __init__(self, module: nn.Module, files: CheckpointFiles, prefix: str = "") -> None:
        """`prefix` is put before the module's own keys in the files.

        Raises BadInputError for keys that are missing in the files, and shapes that differ.
        """
        self.module, self.files = module, files
        self.target: CheckpointFiles | None = None
        """A copy of the files, whose weights are changed."""
        self.dense = False
        """Whether all parameters come from `files`, also those that are changed in the copy."""
        self._changed: set[str] = set()
        self._key_of = _keys(module, files, prefix)
        self._holds: Counter[nn.Module] = Counter()
        self._paths = {part: path for path, part in module.named_modules()}
        _take_types(module, files, self._key_of)
        self._hooks = [
            hook
            for part in self._paths
            if any(True for _ in part.parameters(recurse=False))
            for hook in (
                part.register_forward_pre_hook(lambda part, _: self._hold(part)),
                part.register_forward_hook(
                    lambda part, _, _result: self._let_go(part), always_call=True
                ),
            )
        ]

    def key(self, weight: Weight) -> str | None:
        """Key of its array in the files."""
        return None if weight.weight is None else self._key_of[weight.weight]

    def read(self, weight: Weight) -> Tensor | None:
        """The array as it was before anything was pruned."""
        return None if weight.weight is None else self.files.read(self._key_of[weight.weight])

    def write(self, weight: Weight, tensor: Tensor) -> None:
        """Put the array into the copy."""
        assert self.target is not None, "what changes weights makes a copy first"
        self.target.write(self._key_of[weight.weight or ""], tensor)

    @contextlib.contextmanager
    def held(self, block: nn.Module) -> Iterator[None]:
        """Within it all parameters of the block are in memory; they leave with it.

        Also those of submodules whose forward ended in a BaseException: torch calls no hooks then.
        """
        before = {part: self._holds[part] for part in block.modules() if part in self._paths}
        try:
            for part in before:
                self._hold(part)
            yield
        finally:
            for part, holds in before.items():
                self._holds[part] = holds + 1
                self._let_go(part)

    def save(self, names: Sequence[str]) -> None:
        """Write parameters that are held into the copy, and wait until they are on the disk."""
        assert self.target is not None, "what changes weights makes a copy first"
        for name in names:
            self.target.write(self._key_of[name], self.module.get_parameter(name))
        self.target.sync(self._key_of[name] for name in names)

    def take_from_copy(self, block: nn.Module) -> None:
        """Read the block's parameters from the copy from now on."""
        for part in block.modules():
            for name, _ in part.named_parameters(recurse=False):
                self._changed.add(self._key_of[self._name(part, name)])

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hold(self, part: nn.Module) -> None:
        self._holds[part] += 1
        if self._holds[part] == 1:
            for name, param in part._parameters.items():
                if param is not None:
                    key = self._key_of[self._name(part, name)]
                    changed = key in self._changed and not self.dense
                    files = self.target if changed and self.target is not None else self.files
                    value = files.read(key)
                    part._parameters[name] = nn.Parameter(value, requires_grad=False)

    def _let_go(self, part: nn.Module) -> None:
        self._holds[part] = max(0, self._holds[part] - 1)
        if not self._holds[part]:
            for name, param in part._parameters.items():
                if param is not None and not param.is_meta:
                    empty = torch.empty_like(param, device="meta")
                    part._parameters[name] = nn.Parameter(empty, requires_grad=False)

    def _name(self, part: nn.Module, name: str) -> str:
        path = self._paths[part]
        return f"{path}.{name}" if path else name


def _keys(module: nn.Module, files: CheckpointFiles, prefix: str) -> dict[str, str]:
    """The key of each parameter in the files; tied ones are stored under one of their names."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    known = files.keys
    found = {name: f"{prefix}{name}" for name in names if f"{prefix}{name}" in known}
    tied: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(param), []).append(name)
    for group in tied.values():
        stored = next((found[name] for name in group if name in found), None)
        if stored is not None:
            found.update({name: stored for name in group if name not in found})
    missing = [name for name in names if name not in found]
    if missing:
        folder = files.files[0].parent if files.files else Path()
        raise BadInputError(
            f"{folder} has no weights for {len(missing)} parameters of "
            f"{type(module).__name__}: {keys_listed(missing)}",
            hint="leave --stream out: such a checkpoint is pruned in memory",
        )
    return found


def _take_types(module: nn.Module, files: CheckpointFiles, keys: Mapping[str, str]) -> None:
    """Give parameters the types of the files, and buffers that are in the files their values."""
    made: dict[str, nn.Parameter] = {}
    for path, part in module.named_modules():
        start = f"{path}." if path else ""
        for name, param in list(part._parameters.items()):
            if param is None:
                continue
            key = keys[start + name]
            dtype, shape = files.described(key)
            if shape != tuple(param.shape):
                raise BadInputError(
                    f"{files.file_of(key)}: {key} is {list(shape)}, {type(module).__name__} has "
                    f"{list(param.shape)}",
                    hint="config.json and the weights must belong together",
                )
            if key not in made:
                empty = torch.empty(shape, dtype=dtype, device="meta")
                made[key] = nn.Parameter(empty, requires_grad=False)
            part._parameters[name] = made[key]
        for name in part._buffers:
            if start + name in files.keys:
                part._buffers[name] = files.read(start + name)


def _torch_type(file: Path, key: str, stored: StoredTensor) -> torch.dtype:
    found = getattr(torch, stored.dtype or "", None)
    if isinstance(found, torch.dtype):
        return found
    raise BadInputError(f"{file}: {key} is stored in a type that torch cannot hold")


@torch.no_grad()
def prune_streamed(
    streamed: StreamedModule, pattern: Pattern, selection: Selection, *, method: str, step: Progress
) -> PruneResult:
    """N:M in the copy of the files behind the module, without data.

    Raises BadInputError for NaN or infinity in a weight, a method that needs data, and as `choose`
    does; the files are half pruned then.
    """
    without_data(method)
    plan = ModulePruning(streamed.module, streamed, pattern, selection)
    return with_keys(streamed, plan.result(method, step=step))


def with_keys(streamed: StreamedModule, result: PruneResult) -> PruneResult:
    """The result with weights named by their keys in the files, which are validated."""
    rows = (
        replace(row, weight=replace(row.weight, weight=streamed.key(row.weight)))
        for row in result.weights
    )
    return replace(result, weights=tuple(rows))

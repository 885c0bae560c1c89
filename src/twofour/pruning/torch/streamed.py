"""A checkpoint larger than memory: a module without values, its tensors read and written singly.

The files keep their names, order, types and metadata: a tensor that changes is written to where it
lies.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from twofour.errors import BadInputError
from twofour.pruning.verify import StoredTensor, read_header
from twofour.records.weights import Weight
from twofour.store import sync, write_error
from twofour.words import keys_listed


class CheckpointFiles:
    """The tensors of .safetensors files by key; memory holds what is asked for."""

    def __init__(self, files: Sequence[Path], *, writable: bool = False) -> None:
        """Raises BadInputError for a damaged file."""
        self.files = tuple(files)
        self._writable = writable
        self._places = {
            key: (file, stored) for file in files for key, stored in read_header(file).items()
        }

    @property
    def keys(self) -> frozenset[str]:
        """Of all files."""
        return frozenset(self._places)

    def file_of(self, key: str) -> Path:
        """Where the tensor lies."""
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
        """Over what lies there; raises BadInputError for another type or shape, a full disk."""
        assert self._writable, "the user's own files stay as they are"
        file, stored = self._places[key]
        if (tensor.dtype, tuple(tensor.shape)) != self.described(key):
            raise BadInputError(
                f"{file}: {key} is {list(stored.shape)} of {stored.dtype}, not "
                f"{list(tensor.shape)} of {tensor.dtype}"
            )
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        try:
            with file.open("r+b") as handle:
                handle.seek(stored.offset)
                raw.tofile(handle)
        except OSError as error:
            raise write_error(file, error) from error

    def sync(self, keys: Iterable[str]) -> None:
        """Wait until these tensors are on the disk; raises BadInputError where that fails."""
        for file in dict.fromkeys(self.file_of(key) for key in keys):
            try:
                sync(file)
            except OSError as error:
                raise write_error(file, error) from error


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Modules that are built within have parameters on the meta device, and real buffers.

    Buffers that no checkpoint holds (rotary frequencies, position ids) are computed by the
    module's own constructor, so they have to be real.
    """
    original = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is not None and not param.is_meta:
            empty = torch.empty_like(param, device="meta")
            module._parameters[name] = nn.Parameter(empty, requires_grad=False)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]  # put back below
    try:
        with torch.no_grad():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


class StreamedModule:
    """A module whose parameters come from files when it runs, and go again.

    A submodule's own parameters are there while its forward runs; `held` keeps those of a whole
    block for longer.
    """

    def __init__(self, module: nn.Module, files: CheckpointFiles, prefix: str = "") -> None:
        """`prefix` stands before the module's own keys in the files.

        Raises BadInputError for keys that the files have not, and shapes that differ.
        """
        self.module, self.files = module, files
        self.target: CheckpointFiles | None = None
        """A copy of the files, in which weights are changed."""
        self.dense = False
        """Whether all parameters come from `files`, those that are changed in the copy too."""
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
        """All parameters of the block are there within, and gone with it.

        Also those of submodules whose forward was broken off by what is no Exception: torch calls
        no hooks behind that.
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
        """From now on the block has the parameters of the copy."""
        for part in block.modules():
            for name, _ in part.named_parameters(recurse=False):
                self._changed.add(self._key_of[self._name(part, name)])

    def close(self) -> None:
        """Take the hooks off."""
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
    """Key of each parameter in the files; tied ones lie there under one of their names."""
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
            hint="such a checkpoint is pruned in memory, without --stream",
        )
    return found


def _take_types(module: nn.Module, files: CheckpointFiles, keys: Mapping[str, str]) -> None:
    """Parameters get the type that the files have; buffers that they hold, the values."""
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

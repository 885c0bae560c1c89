"""What forwards take and give, kept for later: in memory up to a limit, in files from there on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError

Tree = Any
"""Tensors and other things in nested tuples, lists, dicts and what else pytree knows."""

MEMORY_BYTES = 512 << 20
"""Kept in memory at most, in all; what is more goes to files that are mapped when read."""

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A tensor's values in memory (`data`), or at `offset` of its group's file."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    size: int
    data: Tensor | None
    offset: int = 0


class Spill:
    """Trees of tensors by group and key; each is a copy, put in and taken out."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._free = memory_bytes
        self._trees: dict[Hashable, dict[Hashable, tuple[list[Any], Any]]] = {}
        self._files: dict[Hashable, Path] = {}

    def put(self, group: Hashable, key: Hashable, tree: Tree) -> bool:
        """Keep a tree; False where it holds a tensor that is no plain array of numbers."""
        leaves, shape = pytree.tree_flatten(tree)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not all(_is_plain(tensor) for tensor in tensors):
            return False
        kept = [self._kept(group, v) if isinstance(v, Tensor) else v for v in leaves]
        self._trees.setdefault(group, {})[key] = kept, shape
        return True

    def has(self, group: Hashable, key: Hashable) -> bool:
        """Whether it is there."""
        return key in self._trees.get(group, {})

    def get(self, group: Hashable, key: Hashable) -> Tree:
        """A copy of what was put: values, strides and devices."""
        leaves, shape = self._trees[group][key]
        values = [self._read(group, v) if isinstance(v, _Bytes) else v for v in leaves]
        return pytree.tree_unflatten(values, shape)

    def has_room(self, tree: Tree) -> bool:
        """Whether it would be kept in memory."""
        tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= self._free

    def size_bytes(self) -> int:
        """Of all that is kept, in memory and in files."""
        groups = self._trees.values()
        leaves = (leaf for group in groups for kept, _ in group.values() for leaf in kept)
        return sum(leaf.size for leaf in leaves if isinstance(leaf, _Bytes))

    def blank(self, group: Hashable, key: Hashable) -> None:
        """Give a tree's memory back; from now on it has NaN, and 0 where a type has none."""
        kept, shape = self._trees[group][key]
        for leaf in reversed(kept):
            if isinstance(leaf, _Bytes):
                self._release(group, leaf)
        blank = [replace(v, size=0, data=None) if isinstance(v, _Bytes) else v for v in kept]
        self._trees[group][key] = blank, shape

    def _release(self, group: Hashable, leaf: _Bytes) -> None:
        """Of a file, what lies at its end."""
        if leaf.data is not None:
            self._free += leaf.size
        elif leaf.size:
            file = self._files[group]
            if file.stat().st_size == leaf.offset + leaf.size:
                os.truncate(file, leaf.offset)

    def drop(self, group: Hashable) -> None:
        """Forget a group, and give its memory and its file back."""
        for leaves, _ in self._trees.pop(group, {}).values():
            for leaf in leaves:
                if isinstance(leaf, _Bytes) and leaf.data is not None:
                    self._free += leaf.size
        file = self._files.pop(group, None)
        if file is not None:
            file.unlink(missing_ok=True)

    def _kept(self, group: Hashable, tensor: Tensor) -> _Bytes:
        dense = _is_dense(tensor)
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        stride = tensor.stride() if dense else tensor.contiguous().stride()
        offset, data = 0, None
        if flat.numel() <= self._free:
            self._free -= flat.numel()
            data = flat.clone()
        else:
            offset = self._append(group, flat)
        return _Bytes(
            tuple(tensor.shape), stride, tensor.dtype, tensor.device, flat.numel(), data, offset
        )

    def _append(self, group: Hashable, flat: Tensor) -> int:
        file = self._files.setdefault(group, self._folder / f"{len(self._files)}-{id(group)}.bin")
        try:
            with file.open("ab") as stream:
                offset = stream.tell()
                stream.write(flat.numpy().data)
        except OSError as error:
            raise BadInputError(
                f"cannot keep what calibration gives in {self._folder}: {error.strerror or error}",
                hint="free some space, or take fewer samples",
            ) from error
        return offset

    def _read(self, group: Hashable, kept: _Bytes) -> Tensor:
        result = torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype, device=kept.device)
        if not kept.size:
            return blanked(result)
        flat = kept.data
        if flat is None:
            mapped = np.memmap(
                self._files[group], np.uint8, mode="r", offset=kept.offset, shape=(kept.size,)
            )
            flat = torch.from_numpy(np.array(mapped))
        return result.copy_(flat.view(kept.dtype).view(kept.shape))


@contextlib.contextmanager
def spill(*, memory_bytes: int | None = None, within: Path | None = None) -> Iterator[Spill]:
    """A Spill whose files lie in a folder `within`, and are gone afterwards.

    None: where temporary files go, which may be memory. A run folder removes at its next start
    what a killed process has left in it. Raises BadInputError where the file system refuses.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=".calibration.data.", suffix=".part", dir=within))
    except OSError as error:
        raise BadInputError(
            f"no temporary folder can be made for calibration: {error}",
            hint="free some space, or set TMPDIR to a folder that has it",
        ) from error
    try:
        yield Spill(folder, MEMORY_BYTES if memory_bytes is None else memory_bytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def give_back_memory() -> None:
    """Let the operating system have what was freed, where the C library keeps it (glibc).

    Tensors of some megabytes lie in its heaps, one of each thread: what one thread freed another
    cannot use, and holes between what is kept add up.
    """
    trim = _of_c_library("malloc_trim")
    if trim is not None:
        trim(0)


def give_back_large_arrays() -> None:
    """From now on what is freed of some size goes back to the operating system at once (glibc).

    Else glibc takes ever larger arrays, to 32 MB, from its heaps, where holes add up from block to
    block of a model.
    """
    set_option = _of_c_library("mallopt")
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _LARGE_BYTES)


@functools.cache
def _of_c_library(name: str) -> Callable[..., object] | None:
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # no C library to be had under no name: Windows
        return None


def blanked(tensor: Tensor) -> Tensor:
    """Its values replaced by NaN, or 0 where the type has none."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else 0)


def _is_plain(tensor: Tensor) -> bool:
    ordinary = type(tensor) in {Tensor, torch.nn.Parameter} and tensor.layout is torch.strided
    return ordinary and not tensor.is_meta and not tensor.is_quantized


def _is_dense(tensor: Tensor) -> bool:
    """Whether its values fill their memory one by one, in whatever order."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True

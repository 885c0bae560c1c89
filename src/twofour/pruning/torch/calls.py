"""Running a torch module on calibration data without a change to the module.

Inputs and outputs of its forwards are kept for later: in memory up to a limit, then in files.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import tempfile
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError, TwofourError, system_errors
from twofour.pruning.resources import ArrayStore, StoredArray
from twofour.pruning.samples import SampleSplit

Tree = Any
"""Tensors and other things in nested tuples, lists, dicts and what else pytree knows."""

MEMORY_BYTES = 256 << 20
"""Limit of all that is kept in memory; the rest goes to files."""
_CALLS = "the calls themselves"


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A tensor, its values as bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kept: StoredArray


class TreeStore:
    """Trees of tensors by group and key; both `put` and `get` copy."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._room = ArrayStore(folder, memory_bytes)
        self._trees: dict[Hashable, dict[Hashable, tuple[list[Any], Any]]] = {}

    def put(self, group: Hashable, key: Hashable, tree: Tree) -> bool:
        """Keep a tree; False where it contains a tensor that is no plain array of numbers."""
        leaves, shape = pytree.tree_flatten(tree)
        if not all(_is_plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            return False
        kept = [self._kept(v) if isinstance(v, Tensor) else v for v in leaves]
        self._trees.setdefault(group, {})[key] = kept, shape
        return True

    def has(self, group: Hashable, key: Hashable) -> bool:
        """Whether it is there."""
        return key in self._trees.get(group, {})

    def get(self, group: Hashable, key: Hashable) -> Tree:
        """A copy of the tree with the same values, strides and devices."""
        leaves, shape = self._trees[group][key]
        values = [_read(v) if isinstance(v, _Bytes) else v for v in leaves]
        return pytree.tree_unflatten(values, shape)

    def drop(self, group: Hashable, key: Hashable | None = None) -> None:
        """Forget a group, or one tree of it."""
        trees = self._trees.get(group, {})
        for gone in [*trees] if key is None else [key]:
            leaves, _ = trees.pop(gone, ((), None))
            for leaf in leaves:
                if isinstance(leaf, _Bytes):
                    self._room.drop(leaf.kept)

    def _kept(self, tensor: Tensor) -> _Bytes:
        stride = tensor.stride() if _is_dense(tensor) else tensor.contiguous().stride()
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()
        kept = self._room.put(flat.numpy())
        return _Bytes(tuple(tensor.shape), stride, tensor.dtype, tensor.device, kept)


def _read(kept: _Bytes) -> Tensor:
    result = torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype, device=kept.device)
    if not result.numel():
        return result
    flat = torch.from_numpy(ArrayStore.get(kept.kept))
    return result.copy_(flat.view(kept.dtype).view(kept.shape))


@contextlib.contextmanager
def tree_store(
    *, memory_bytes: int | None = None, within: Path | None = None
) -> Iterator[TreeStore]:
    """A TreeStore whose files lie in a folder `within`, and are gone afterwards.

    None: where temporary files go, which may be memory. A run folder removes at its next start
    what a killed process has left in it. Raises BadInputError where the file system refuses.
    """
    hint = "free some space, or set TMPDIR to a folder that has it"
    with system_errors("no temporary folder can be made for calibration", hint):
        folder = Path(tempfile.mkdtemp(prefix=".calibration.data.", suffix=".part", dir=within))
    try:
        yield TreeStore(folder, MEMORY_BYTES if memory_bytes is None else memory_bytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One forward on calibration data: `module(*args, **kwargs)`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    samples: int
    """Along the first axis of the inputs that have one for each sample."""
    padding: Tensor | None = None
    """Booleans, (samples, positions): True for padding, which no statistics count."""


class KeptCalls:
    """Calls that were read once and are run many times: their arguments lie in a `TreeStore`."""

    def __init__(self, calls: Iterable[Call], device: torch.device, kept: TreeStore) -> None:
        """Raises BadInputError where there are no samples, and for tensors that are not plain."""
        self.kept = kept
        self._without_inputs: list[Call] = []
        self.split = SampleSplit()
        for number, call in enumerate(calls):
            here = moved(call, device)
            if not kept.put(_CALLS, number, (here.args, here.kwargs)):
                raise BadInputError(
                    f"calibration batch {number + 1} holds a tensor that is no plain array",
                    hint="give dense tensors",
                )
            self.split.add(_arrays(call), call.samples)
            self._without_inputs.append(replace(here, args=(), kwargs={}))
        if not self.samples:
            raise BadInputError("the calibration data has no samples", hint="give at least one")
        self.factors = self.split.factors

    def __len__(self) -> int:
        return len(self._without_inputs)

    def __iter__(self) -> Iterator[Call]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Call:
        """A fresh copy: a forward may change its inputs."""
        args, kwargs = self.kept.get(_CALLS, number)
        return replace(self._without_inputs[number], args=args, kwargs=kwargs)

    @property
    def samples(self) -> int:
        """Number of samples of all calls."""
        return sum(call.samples for call in self._without_inputs)

    def without_inputs(self, number: int) -> Call:
        """A call's number of samples and padding, with no tensors of its arguments."""
        return self._without_inputs[number]

    def first_sample(self, number: int) -> int:
        """Number of a call's first sample among all."""
        return sum(call.samples for call in self._without_inputs[:number])


def _arrays(call: Call) -> Iterator[NDArray[Any]]:
    """The tensors of a call; floats are float32."""
    for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))):
        if isinstance(leaf, Tensor):
            plain = leaf.detach().float() if leaf.is_floating_point() else leaf.detach()
            yield plain.cpu().numpy()


def copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each tensor with a copy of what it holds now."""
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


@torch.no_grad()
def put_back(before: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Tensors get what they held when `copies` were made, bit for bit."""
    for tensor, values in before:
        tensor.copy_(values)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Within it the model is in eval mode and every forward gives the same bits.

    One thread within an operator (how sums are split depends on the number), no fused attention
    (whose products cannot be seen), no TF32, no kernels chosen by time, no compiled code, no cache
    of keys and values. On leaving, modes, buffers, random states and settings are as they were.
    """
    cuda, cudnn, mha = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mha
    settings: list[tuple[Any, str, bool]] = [
        *((cuda, "allow_tf32", False), (cudnn, "allow_tf32", False)),
        *((cudnn, "benchmark", False), (cudnn, "deterministic", True)),
    ]
    for module in model.modules():
        settings.append((module, "training", False))
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:  # of transformers: it grows block by block
            settings.append((config, "use_cache", False))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_buffers_kept(model))
        stack.enter_context(torch.random.fork_rng())
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        for owner, name, value in settings:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and it takes 2 s to load
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def forward(model: nn.Module, call: Call, number: int) -> Tree:
    """The output for call `number`, counted from 0; raises BadInputError where the model fails.

    Random numbers that it draws are the same every time.
    """
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    try:
        return model(*call.args, **call.kwargs)
    except TwofourError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise BadInputError(
            f"{type(model).__name__}.forward fails on calibration batch {number + 1} "
            f"({_shapes(call)}): {type(error).__name__}: {lines[0][:300]}",
            hint="give calibration data of the shapes and types that the model takes",
        ) from error


def moved(call: Call, device: torch.device) -> Call:
    """The same with every tensor on the device."""

    def move(value: Tree) -> Tree:
        return value.to(device) if isinstance(value, Tensor) else value

    tree = pytree.tree_map(move, (call.args, dict(call.kwargs)))
    return replace(call, args=tree[0], kwargs=tree[1])


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter with values; without one, the CPU."""
    devices = (tensor.device for tensor in model.parameters() if not tensor.is_meta)
    return next(devices, torch.device("cpu"))


def _shapes(call: Call) -> str:
    named = [*((f"#{i}", value) for i, value in enumerate(call.args)), *call.kwargs.items()]
    return ", ".join(
        f"{name} {'x'.join(map(str, value.shape)) or 'scalar'} {str(value.dtype)[6:]}"
        if isinstance(value, Tensor)
        else f"{name} {type(value).__name__}"
        for name, value in named
    )


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers afterwards: some modules count their calls in one."""
    kept = [
        (module, name, tensor, tensor.clone())
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and not tensor.is_meta
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, tensor, values in kept:
                if tensor.shape == values.shape and not torch.equal(tensor, values):
                    tensor.copy_(values)
                module._buffers[name] = tensor

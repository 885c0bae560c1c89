"""A module's weights as safetensors: every tensor once, aliases in the header.

safetensors refuses tensors that share memory, so a tied weight is written under one of its keys
and the header's metadata maps the other keys to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.errors import BadInputError

if TYPE_CHECKING:
    from torch import Tensor, nn

_ALWAYS_READ_BYTES = 64 << 20


def save_weights(module: nn.Module, target: Path, *, first: Collection[str]) -> None:
    """Write the whole state_dict; of keys that share a tensor, one of `first` is written."""
    save_tensors(module.state_dict(), target, first=first)


def save_tensors(state: Mapping[str, Tensor], target: Path, *, first: Collection[str] = ()) -> None:
    """Write tensors by key, as `save_weights` does for a module."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    written: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for key in sorted(state, key=lambda k: (k not in first, k)):
        same = written.setdefault(_place(state[key]), key)
        if same != key:
            aliases[key] = same
    tensors = {key: state[key] for key in sorted(written.values())}
    try:
        save_file(_apart(tensors), str(target), metadata=aliases or None)
    except SafetensorError as error:  # a full disk, among others
        raise OSError(f"safetensors: {str(error).splitlines()[0]}") from error


def load_weights(module: nn.Module, path: Path) -> None:
    """Fill a module's parameters and buffers in place.

    Raises BadInputError when keys, shapes or types do not fit.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    state = module.state_dict()
    try:
        with safe_open(str(path), framework="pt") as file:
            aliases = file.metadata() or {}
            _check_keys(set(state), set(file.keys()), set(aliases), path)
            with torch.no_grad():
                for key in file.keys():  # noqa: SIM118  # safe_open has no __iter__
                    _fill(state[key], file.get_tensor(key), key, path)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise BadInputError(f"cannot read {path}: {str(error).splitlines()[0]}") from error


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch checkpoint (.pt, .pth, .bin), read without running its code.

    A state_dict, or a dict that has one under "state_dict" or "model". Raises BadInputError for a
    damaged file, a pickle that wants to call something, and a file without tensors.
    """
    import torch

    from twofour.pipeline.sources.checkpoint_weights import check_weight_file

    check_weight_file(path)
    content = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        content = {}
    tensors = {str(k): v for k, v in content.items() if isinstance(v, torch.Tensor)}
    if not tensors:
        raise BadInputError(f"{path} holds no tensors by name", hint="save model.state_dict()")
    for key, tensor in tensors.items():
        _check_plain(tensor, key, path)
    _refuse_blown_up(tensors, path)
    return tensors


def _check_plain(tensor: Tensor, key: str, path: Path) -> None:
    """Raise BadInputError unless the values lie in memory one by one."""
    import torch

    what = None
    if any("\ud800" <= letter <= "\udfff" for letter in key):
        raise BadInputError(f"{path}: the name {key[:80]!r} of a tensor is no text")
    if tensor.is_meta:
        what = "has no values (it is on the meta device)"
    elif tensor.is_nested:
        what = "is a nested tensor"
    elif tensor.layout != torch.strided:
        what = f"is stored as {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_quantized:
        what = f"is quantised ({str(tensor.dtype).removeprefix('torch.')})"
    elif tensor.numel() and not _has_storage(tensor):
        what = "has no values"
    if what is not None:
        raise BadInputError(
            f"{path}: {key} {what}", hint="save the state_dict of a module with dense weights"
        )


def _has_storage(tensor: Tensor) -> bool:
    try:
        return tensor.untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):  # what torch says of tensors without any
        return False


def _refuse_blown_up(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Views (an expanded zero) make gigabytes out of a small file once each is written apart."""
    once = {_place(tensor): tensor for tensor in tensors.values()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in once.values())
    stored = path.stat().st_size
    if size > 2 * stored + _ALWAYS_READ_BYTES:
        raise BadInputError(
            f"{path} has {stored} bytes, its tensors would take {size}: they are views",
            hint="save contiguous tensors: {k: v.contiguous() for k, v in state_dict.items()}",
        )


def _fill(target: Tensor, saved: Tensor, key: str, path: Path) -> None:
    if (target.shape, target.dtype) != (saved.shape, saved.dtype):
        raise BadInputError(
            f"{path}: {key} is {list(saved.shape)} {saved.dtype}, the model has "
            f"{list(target.shape)} {target.dtype}",
            hint="the source gives another model than when it was pruned; use another --out",
        )
    target.copy_(saved)


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same view of the same memory."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and copied where two different views still share memory."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        whole = tensor.is_contiguous() and memory not in seen
        apart[key] = tensor if whole else tensor.clone().contiguous()
        seen.add(memory)
    return apart


def _check_keys(module: set[str], file: set[str], aliases: set[str], path: Path) -> None:
    missing, unknown = module - file - aliases, file - module
    if missing or unknown:
        example = min(missing or unknown)
        raise BadInputError(
            f"{path} does not fit the model: {len(missing)} weights are missing, "
            f"{len(unknown)} are not in the model (such as {example})",
            hint="the source gives another model than when it was pruned; use another --out",
        )

"""Weights of a torch model in files: saved, and read back into a module.

safetensors refuses tensors that share memory, so a tied weight is written under one of its keys and
the header's metadata maps the other keys to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from twofour.errors import BadInputError
from twofour.graph.stored import NewTensor, write_store
from twofour.inputs.fits import torch_type_name
from twofour.records.weights import LoadedWeights
from twofour.store import atomic_file
from twofour.words import keys_listed

if TYPE_CHECKING:
    from torch import Tensor, nn


_ANOTHER_MODEL = (
    "load them into the model that was pruned, in the type it had then; for another model name "
    "another --out"
)


def save_tensors(state: Mapping[str, object], target: Path, *, first: Collection[str] = ()) -> None:
    """Write tensors by key, without extra state; of keys that share one, one of `first` is written.

    Raises BadInputError for a tensor that is no plain array of numbers.
    """
    plain = _tensors(state)
    written: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    # embed.weight and lm_head.weight are one tensor, and lm_head.weight is in `first`: that is
    # written, and the header has {"embed.weight": "lm_head.weight"}
    for key in sorted(plain, key=lambda key: (key not in first, key)):
        same = written.setdefault(_memory_of(key, plain[key]), key)
        if same != key:
            aliases[key] = same
    tensors = {key: _new_tensor(plain[key]) for key in sorted(written.values())}
    with atomic_file(target) as temporary:
        write_store(temporary, tensors, aliases)


def _tensors(state: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors of a state_dict, which may have other values too (extra state)."""
    import torch

    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def _new_tensor(tensor: Tensor) -> NewTensor:
    import torch

    def write(stream: BinaryIO) -> None:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        flat.numpy().tofile(stream)

    return NewTensor(dtype=torch_type_name(tensor), shape=tuple(tensor.shape), write=write)


def load_weights(module: nn.Module, path: Path) -> LoadedWeights:
    """Fill every parameter and buffer of a module in place, or none of them.

    Weights that the module computes (parametrizations, weight norm, masks) become plain ones first,
    because it would compute the dense ones again. A module in float32 takes half precision. Raises
    BadInputError when keys, shapes, types or ties do not fit.
    """
    from safetensors import SafetensorError, safe_open

    from twofour.pruning.torch import make_permanent

    permanent = make_permanent(module)
    state = _tensors(module.state_dict())
    try:
        with safe_open(str(path), framework="pt") as file:
            saved_as = _saved_as(state, {*file.keys()}, file.metadata() or {}, path)
            # all is checked before anything is changed
            for key, name in saved_as.items():
                _check_type(f"{path}: {key}", file.get_tensor(name), state[key])
            _check_ties(state, saved_as, file.get_tensor, path)
            for key, name in saved_as.items():
                _fill(state[key], file.get_tensor(name))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise BadInputError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    return LoadedWeights(
        path=str(path),
        keys=tuple(state),
        tied={key: name for key, name in saved_as.items() if key != name},
        made_permanent=permanent,
    )


def _fill(tensor: Tensor, stored: Tensor) -> None:
    import torch

    values = stored.to(tensor)
    with torch.no_grad():
        # an expanded buffer has several values in one place, and none is new
        if tensor.is_contiguous() or not torch.equal(tensor, values):
            tensor.copy_(values)


def _check_type(where: str, stored: Tensor, wanted: Tensor) -> None:
    """Raise BadInputError for another shape, or a type that the module's does not hold exactly."""
    import torch

    # float16 goes into float32 unchanged, but not into bfloat16, which has fewer digits
    fits = stored.dtype == wanted.dtype
    if stored.is_floating_point() and wanted.is_floating_point():
        fits = torch.promote_types(stored.dtype, wanted.dtype) == wanted.dtype
    if not fits or stored.shape != wanted.shape:
        raise BadInputError(
            f"{where} is {list(stored.shape)} {stored.dtype}, the model has "
            f"{list(wanted.shape)} {wanted.dtype}",
            hint=_ANOTHER_MODEL,
        )


def _saved_as(
    state: Mapping[str, Tensor], saved: set[str], aliases: Mapping[str, str], path: Path
) -> dict[str, str]:
    """The key in the file of each tensor of the module."""
    places = {_memory_of(key, tensor): key for key, tensor in state.items() if key in saved}
    names: dict[str, str] = {}
    missing: list[str] = []
    for key, tensor in state.items():
        # under its own key, that which the header gives for it, or that of a tensor tied to it
        name: str | None = key
        if key not in saved:
            name = aliases.get(key, places.get(_memory_of(key, tensor)))
        if name is None or name not in saved:
            missing.append(key)
        else:
            names[key] = name
    unexpected = sorted(saved - {*names.values()})
    problems = []
    if missing:
        problems.append(f"missing: {keys_listed(missing)}")
    if unexpected:
        problems.append(f"not in the model: {keys_listed(unexpected)}")
    if problems:
        raise BadInputError(
            f"{path} does not fit the model: {'; '.join(problems)}", hint=_ANOTHER_MODEL
        )
    return names


def _check_ties(
    state: Mapping[str, Tensor],
    saved_as: Mapping[str, str],
    read: Callable[[str], Tensor],
    path: Path,
) -> None:
    """Raise BadInputError where the file has two values for one tensor of the module."""
    import torch

    first: dict[tuple[object, ...], str] = {}
    for key, name in saved_as.items():
        other = first.setdefault(_memory_of(key, state[key]), key)
        if saved_as[other] != name and not torch.equal(read(saved_as[other]), read(name)):
            raise BadInputError(
                f"{path}: {other} and {key} differ, but are one tensor in the model",
                hint="untie them in the model before you load the weights",
            )


def _memory_of(key: str, tensor: Tensor) -> tuple[object, ...]:
    """A value that is equal for tensors that are the same view of the same memory."""
    from twofour.pruning.torch import layout_of

    layout = layout_of(tensor)
    if tensor.is_meta or tensor.is_quantized or layout != "strided":
        raise BadInputError(
            f"{key} is no plain array of numbers ({layout}, {tensor.dtype}, {tensor.device})",
            hint="make it a dense tensor with values (to_dense, dequantize), or a buffer with "
            "persistent=False",
        )
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)

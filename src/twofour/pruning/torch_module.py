"""Layers of a torch module, and pruning them in place."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from twofour.errors import BadInputError
from twofour.pattern import count_zeros
from twofour.pruning.methods import InPlace, without_data
from twofour.pruning.methods.magnitude import count_non_finite
from twofour.pruning.methods.magnitude_on_device import (
    count_non_finite_on_device,
    count_zeros_on_device,
)
from twofour.pruning.methods.problem import Array
from twofour.pruning.selection import Choice, axis_conflict, choose
from twofour.records.options import Selection
from twofour.records.pruning import OutputError, PrunedWeight, PruneResult
from twofour.records.weights import (
    LARGEST_PASSED_OVER,
    NotCovered,
    Pattern,
    Reason,
    ReasonCode,
    Weight,
    shared,
)

PRUNABLE_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NO_PRODUCTS = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
)
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")

# Reparametrizations by hook, older than torch.nn.utils.parametrize: module of the hook's class,
# the class, and the function beside it that undoes it and leaves the weight.
_HOOKS = (
    ("torch.nn.utils.weight_norm", "WeightNorm", "remove_weight_norm"),
    ("torch.nn.utils.spectral_norm", "SpectralNorm", "remove_spectral_norm"),
)


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Reduction axis of a weight and the channels it joins."""

    axis: int | None = None
    in_channels: int = 0
    out_channels: int = 0
    groups: int = 1
    kernel: tuple[int, ...] = ()


def find_weights(model: nn.Module) -> tuple[Weight, ...]:
    """A row for each weight of each layer, in module order; a shared array has a row per layer.

    Linear, Conv1d/2d/3d, ConvTranspose1d/2d/3d, the projections of MultiheadAttention,
    transformers' Conv1D, and sub-classes of these. Names are those of the model once
    make_permanent has run. Raises BadInputError for lazy modules that have seen no input yet.
    """
    users = _users(model)
    rows = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name in _weight_names(module):
            weight = _describe(path, name, module)
            tensor = tensor_of(module, name)
            sharing = [] if tensor is None else users[storage_key(tensor)]
            others = tuple(other for other in dict.fromkeys(sharing) if other != path)
            tables = tuple(other for other in others if _is_table(model.get_submodule(other)))
            reasons = (*weight.reasons, *_shared_reasons(others, model))
            rows.append(
                dataclasses.replace(weight, tied_to=others, looked_up_by=tables, reasons=reasons)
            )
    return tuple(rows)


def find_not_covered(model: nn.Module, weights: Sequence[Weight]) -> tuple[NotCovered, ...]:
    """Parameters of more than 1,024 elements that no row names, by class of their module.

    A parameter of two axes or more in a class that is not torch's own may be multiplied by: what
    the forward does with it only the graph tells.
    """
    named = {weight.weight for weight in weights}
    state = dict(model.named_parameters(remove_duplicate=False))
    seen = {storage_key(tensor) for key, tensor in state.items() if key in named}
    found: dict[tuple[bool, str], list[tuple[str, str, int]]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            if tensor.numel() > LARGEST_PASSED_OVER and storage_key(tensor) not in seen:
                seen.add(storage_key(tensor))
                use = _class_name(module) + (" bias" if "bias" in name else "")
                found[_multiplies(module, name, tensor), use].append(
                    (path, _join(path, name), tensor.numel())
                )
    return tuple(
        NotCovered(
            op=op,
            uses=len({path for path, _, _ in rows}),
            weights=sum(size for _, _, size in rows),
            multiplies=multiplies,
            users=tuple(dict.fromkeys(path for path, _, _ in rows)),
            arrays=tuple(key for _, key, _ in rows),
        )
        for (multiplies, op), rows in sorted(found.items(), key=lambda item: not item[0][0])
    )


def _multiplies(module: nn.Module, name: str, tensor: Tensor) -> bool:
    """Whether a parameter is, or may be, a factor of a matrix product."""
    is_matrix = sum(length > 1 for length in tensor.shape) > 1
    return is_matrix and "bias" not in name and not isinstance(module, _NO_PRODUCTS)


def tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """The stored weight of a layer, or None where it is absent or made anew in every forward."""
    by_hook = any(
        name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None))
        for hook in module._forward_pre_hooks.values()
    )
    stored = name in module._parameters or name in module._buffers
    if stored or by_hook or parametrize.is_parametrized(module, name):
        tensor = getattr(module, name)
        return tensor if isinstance(tensor, Tensor) else None
    return None


def is_plain(tensor: Tensor) -> bool:
    """An ordinary array of floats: no packed, quantised, sparse or distributed sub-class."""
    ordinary = type(tensor) in {Tensor, nn.Parameter} and tensor.layout is torch.strided
    return ordinary and tensor.dtype in PRUNABLE_TYPES


def make_permanent(model: nn.Module) -> tuple[str, ...]:
    """Replace weights that are computed (parametrizations, masks, weight norm) by their values.

    What the model computes stays the same. Gives the state_dict keys of the weights replaced.
    Covers torch.nn.utils.parametrize, prune, weight_norm and spectral_norm.
    """
    keys = []
    for path, module in list(model.named_modules()):
        names = list(module.parametrizations) if parametrize.is_parametrized(module) else []
        for name in names:
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
        names += _remove_hooks(module)
        keys += [_join(path, name) for name in names]
    return tuple(keys)


def _remove_hooks(module: nn.Module) -> list[str]:
    removed = []
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, prune.BasePruningMethod):
            hook.remove(module)
            del module._forward_pre_hooks[key]
            removed.append(hook._tensor_name)
        for place, kind, undo in _HOOKS:
            # by import_module: the package's attributes of these names are functions
            hooks = importlib.import_module(place)
            if isinstance(hook, getattr(hooks, kind)):
                getattr(hooks, undo)(module, hook.name)
                removed.append(hook.name)
    return removed


def _weight_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the weights of one layer; () for a module that is no layer of ours."""
    if isinstance(module, nn.MultiheadAttention):
        return tuple(n for n in _ATTENTION_WEIGHTS if getattr(module, n) is not None)
    kinds = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED, *_conv1d_of_transformers())
    return ("weight",) if isinstance(module, kinds) else ()


def _conv1d_of_transformers() -> tuple[type[nn.Module], ...]:
    """The Conv1D of transformers, where that has been imported: else no model can hold one."""
    package = sys.modules.get("transformers.pytorch_utils")
    kind = getattr(package, "Conv1D", None)
    return () if kind is None else (kind,)


def _describe(path: str, name: str, module: nn.Module) -> Weight:
    tensor = tensor_of(module, name)
    if tensor is not None and nn.parameter.is_lazy(tensor):
        raise BadInputError(
            f"layer {path!r} ({type(module).__name__}) is lazy and has no weight yet",
            hint="run the model once on example inputs before pruning it",
        )
    geometry = _Geometry() if tensor is None else _geometry(module, tensor)
    reasons = _storage_reasons(tensor)
    if reasons:
        geometry = dataclasses.replace(geometry, axis=None)
    return Weight(
        **shared(geometry, _Geometry),
        layer=path,
        node=None,
        weight=None if tensor is None else _join(path, name),
        op=_class_name(module),
        shape=() if tensor is None else tuple(tensor.shape),
        dtype="unknown" if tensor is None else dtype_name(tensor),
        math_dtype="unknown" if tensor is None else dtype_name(tensor),
        reasons=reasons,
    )


def _geometry(module: nn.Module, tensor: Tensor) -> _Geometry:
    """Axis and channels by the kind of layer; no axis where the rank is not that of its kind."""
    shape = tuple(tensor.shape)
    if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)):
        if len(shape) < 3:
            return _Geometry()
        return _Geometry(
            axis=0 if isinstance(module, _TRANSPOSED) else 1,
            in_channels=module.in_channels,
            out_channels=module.out_channels,
            groups=module.groups,
            kernel=shape[2:],
        )
    if len(shape) != 2:
        return _Geometry()
    if isinstance(module, _conv1d_of_transformers()):
        return _Geometry(axis=0, in_channels=shape[0], out_channels=shape[1])
    return _Geometry(axis=1, in_channels=shape[1], out_channels=shape[0])


def _storage_reasons(tensor: Tensor | None) -> tuple[Reason, ...]:
    """Why the weight is no plain array of floats, if it is not."""
    if tensor is None:
        message = "the weight is neither a parameter nor a buffer: it is made in every forward"
        return (Reason(code=ReasonCode.NOT_CONSTANT, message=message),)
    if is_plain(tensor):
        return ()
    message = f"the weight is stored as {type(tensor).__name__} of {dtype_name(tensor)}, packed"
    return (Reason(code=ReasonCode.DTYPE, message=message),)


def _shared_reasons(others: tuple[str, ...], model: nn.Module) -> Iterator[Reason]:
    """Say which other layers use the array; of tables the selection speaks."""
    for other in others:
        module = model.get_submodule(other)
        if not _is_table(module):
            message = f"the array is shared with {other} ({_class_name(module)})"
            yield Reason(code=ReasonCode.SHARED_WEIGHT, message=message)


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


StorageKey = tuple[torch.device, int, int]


def storage_key(tensor: Tensor) -> StorageKey:
    """Equal for tensors that start at the same place in memory and are of the same size."""
    address = tensor.data_ptr() if not tensor.is_meta else id(tensor)
    return tensor.device, address, tensor.numel()


def _users(model: nn.Module) -> dict[StorageKey, list[str]]:
    """Which modules hold the array at each place in memory."""
    users: dict[StorageKey, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        for tensor in module._parameters.values():
            if tensor is not None and not nn.parameter.is_lazy(tensor) and tensor.numel():
                users[storage_key(tensor)].append(path)
    return users


def _class_name(module: nn.Module) -> str:
    """The layer's class; torch.nn.utils.parametrize puts one of its own in front."""
    kind = type(module)
    return kind.__mro__[1].__name__ if parametrize.is_parametrized(module) else kind.__name__


def dtype_name(tensor: Tensor) -> str:
    """The name numpy has for the type: "float32", "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_WHERE_THEY_LIE = frozenset({"cuda"})
"""Types of device whose tensors are pruned there, by torch."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the width of each float type: numpy has no bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What was done to one array, and by which method."""

    method: str
    zeros: int
    kept_magnitude: float | None
    held_before: bool
    output_error: OutputError | None = None
    damping: float | None = None
    refit_steps: int = 0
    bias_corrected: bool = False
    note: str | None = None


ByData = Callable[[nn.Module, Sequence[tuple[Weight, Tensor]]], Mapping[StorageKey, Done]]
"""Prunes weights of a model with calibration data, each array once, or changes nothing at all.

What the data did not reach it leaves to the method that needs none.
"""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A row, its choice, and the tensor that holds its weight (None: not stored as an array)."""

    choice: Choice
    tensor: Tensor | None

    @property
    def weight(self) -> Weight:
        return self.choice[0]

    @property
    def pruned(self) -> bool:
        return self.choice[1]


@torch.no_grad()
def prune_module(
    model: nn.Module,
    pattern: Pattern,
    selection: Selection | None = None,
    *,
    source: str = "",
    method: str = "magnitude",
    by_data: ByData | None = None,
) -> PruneResult:
    """N:M in the model's own memory; weights that are computed become permanent first.

    Weights that share an array are pruned once. With `by_data` `method` is for those that the data
    did not reach. Raises BadInputError, with every weight as it was, for an unknown method, NaN or
    infinity, weights without memory (meta), lazy modules, a selection that does not fit, an array
    that two layers need along different axes, and what `by_data` refuses.
    """
    selection, prune = selection or Selection(), without_data(method)
    make_permanent(model)
    weights = find_weights(model)
    stored = [
        _Stored(choice, _tensor(model, choice[0])) for choice in choose(weights, pattern, selection)
    ]
    _check_storage(stored)
    arrays = _arrays(stored)
    done = {} if by_data is None else dict(by_data(model, list(arrays.values())))
    note = None if by_data is None else NOT_REACHED
    for key, array in arrays.items():
        if key not in done:
            done[key] = _pruned(array, pattern, prune, method, note)
    return PruneResult(
        source=source,
        pattern=pattern,
        method=method,
        selection=selection,
        weights=tuple(_row(item, done) for item in stored),
        not_covered=find_not_covered(model, weights),
    )


NOT_REACHED = "no calibration input reached it: pruned without data"


def _tensor(model: nn.Module, weight: Weight) -> Tensor | None:
    if weight.weight is None:
        return None
    name = weight.weight[len(weight.layer) + 1 :] if weight.layer else weight.weight
    return tensor_of(model.get_submodule(weight.layer), name)


def _check_storage(stored: Sequence[_Stored]) -> None:
    """Refuse what cannot be pruned, before anything is."""
    seen: dict[StorageKey, _Stored] = {}
    for item in stored:
        if item.tensor is None:
            continue
        _check_data(item.weight, item.tensor, finite=storage_key(item.tensor) in seen)
        first = seen.setdefault(storage_key(item.tensor), item)
        if item.pruned and not first.pruned:
            seen[storage_key(item.tensor)] = item
        elif item.pruned and _stride(first) != _stride(item):
            raise axis_conflict(first.weight, item.weight)


def _stride(item: _Stored) -> int:
    """Distance in memory between neighbours of a group: a transposed view has another."""
    assert item.tensor is not None
    assert item.weight.axis is not None
    return item.tensor.stride(item.weight.axis)


def _check_data(weight: Weight, tensor: Tensor, *, finite: bool) -> None:
    """Raises for a weight without data and, unless known to be `finite`, for NaN and infinity."""
    if tensor.is_meta:
        raise BadInputError(
            f"layer {weight.layer!r}: {weight.weight} is a meta tensor, without data",
            hint="load the model's weights before pruning it",
        )
    if finite or not is_plain(tensor):
        return
    bits, kind = bits_of(tensor), dtype_name(tensor)
    if isinstance(bits, np.ndarray):
        count = count_non_finite(bits, kind=kind)
    else:
        count = count_non_finite_on_device(bits, kind=kind)
    if count:
        raise BadInputError(
            f"layer {weight.layer!r}: {count} of {tensor.numel()} values of {weight.weight} are "
            "NaN or infinite",
            hint="the checkpoint is damaged or its training diverged; use another one",
        )


def _arrays(stored: Sequence[_Stored]) -> dict[StorageKey, tuple[Weight, Tensor]]:
    """Each array that is to be pruned, with the first weight that asks for it."""
    found: dict[StorageKey, tuple[Weight, Tensor]] = {}
    for item in stored:
        if item.pruned and item.tensor is not None and item.weight.axis is not None:
            found.setdefault(storage_key(item.tensor), (item.weight, item.tensor))
    return found


def _pruned(
    array: tuple[Weight, Tensor], pattern: Pattern, prune: InPlace, method: str, note: str | None
) -> Done:
    """One array without data."""
    weight, tensor = array
    assert weight.axis is not None
    bits = bits_of(tensor)
    outcome = prune(bits, weight.axis, pattern, kind=dtype_name(tensor))
    if isinstance(bits, np.ndarray) and tensor.device.type != "cpu":
        tensor.copy_(torch.from_numpy(bits).view(tensor.dtype))
    return Done(
        method=method,
        zeros=outcome.zeros,
        kept_magnitude=outcome.kept_magnitude,
        held_before=outcome.held_before,
        note=note,
    )


def _row(item: _Stored, outcomes: Mapping[StorageKey, Done]) -> PrunedWeight:
    weight, pruned, reasons = item.choice
    tensor = item.tensor
    done = outcomes.get(storage_key(tensor)) if tensor is not None else None
    if done is not None:
        zeros = done.zeros
    elif tensor is not None and is_plain(tensor):
        zeros = zeros_of(tensor)
    else:
        zeros = 0
    if done is None or not pruned:
        return PrunedWeight(
            weight=weight, pruned=pruned, zeros=zeros, kept_magnitude=None, reasons=reasons
        )
    return PrunedWeight(**shared(done, Done), weight=weight, pruned=True, reasons=reasons)


def zeros_of(tensor: Tensor) -> int:
    """Zeros in a plain tensor of floats, -0.0 included, counted where it lies."""
    bits, kind = bits_of(tensor), dtype_name(tensor)
    if isinstance(bits, np.ndarray):
        return count_zeros(bits, kind=kind)
    return count_zeros_on_device(bits, kind=kind)


def bits_of(tensor: Tensor) -> Array:
    """The tensor's own memory as integers: a numpy array on the CPU, a tensor on a GPU.

    A copy on the CPU for other devices: not all of them add in float64.
    """
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    return bits if bits.device.type in _WHERE_THEY_LIE else bits.cpu().numpy()

"""The weights of a torch module: found, described, made plain parameters, and pruned.

They are pruned in the module's own memory, or in the files that they come from: of a checkpoint
larger than memory the module has no values, and its arrays are read and written one by one.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from twofour.errors import BadInputError
from twofour.graph.stored import Store, StoredTensor
from twofour.graph.weights import with_frozen
from twofour.inputs.fits import Array, array_from_tensor, tensor_from_array, torch_type_name
from twofour.pruning.arrays import (
    ArrayPlan,
    Place,
    plan_arrays,
    prune_arrays,
    refuse_not_finite,
)
from twofour.pruning.methods import without_data
from twofour.pruning.methods.magnitude import count_non_finite
from twofour.records.weights import Pattern, PruneResult, Reason, ReasonCode, Selection, Weight

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the width of each float type: numpy has no bfloat16."""
PRUNABLE_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")

# Reparametrizations by hook, older than torch.nn.utils.parametrize: module of the hook's class,
# the class, and the function beside it that undoes it and leaves the weight.
_HOOKS = (
    ("torch.nn.utils.weight_norm", "WeightNorm", "remove_weight_norm"),
    ("torch.nn.utils.spectral_norm", "SpectralNorm", "remove_spectral_norm"),
)


def find_module_weights(model: nn.Module) -> tuple[Weight, ...]:
    """A row for each weight of each layer, in module order; a shared array has a row per layer.

    Linear, Conv1d/2d/3d, ConvTranspose1d/2d/3d, the projections of MultiheadAttention,
    transformers' Conv1D, and sub-classes of these. Names are those of the model once
    make_permanent has run. Raises BadInputError for lazy modules that have seen no input yet, and
    where all that there is was compiled (TorchScript, torch.export).
    """
    users = _users(model)
    rows = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name in _weight_names(module):
            weight = _describe(path, name, module)
            tensor = tensor_of(module, name)
            if tensor is not None:
                others = [other for other in users[storage_key(tensor)] if other != path]
                weight = _shared_with(weight, list(dict.fromkeys(others)), model)
            rows.append(weight)
    if not rows:
        _refuse_compiled(model)
    return with_frozen(rows, frozen_weights(model))


def _shared_with(weight: Weight, others: Sequence[str], model: nn.Module) -> Weight:
    """The row of a weight whose array other modules use too."""
    tables = []
    reasons = [*weight.reasons]
    for path in others:
        module = model.get_submodule(path)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            tables.append(path)
        else:
            message = f"the array is shared with {path or 'the model'} ({_class_name(module)})"
            reasons.append(Reason(code=ReasonCode.SHARED_WEIGHT, message=message))
    return replace(
        weight, tied_to=tuple(others), looked_up_by=tuple(tables), reasons=tuple(reasons)
    )


def frozen_weights(model: nn.Module) -> frozenset[str]:
    """Names of the frozen parameters; () where more than 1 % of the parameters' values are.

    Then they are a backbone, and no table of fixed values.
    """
    # a table of sines of 512 x 64 beside 20 million trained values: named; a frozen encoder: not
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    if frozen > 0.01 * sum(p.numel() for p in model.parameters()):
        return frozenset()
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse TorchScript and results of torch.export, which contain no layers of torch."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            kind = "TorchScript"
        elif isinstance(module, torch.fx.GraphModule):
            kind = "a graph of operators"
        else:
            continue
        name = getattr(module, "original_name", type(module).__name__)
        raise BadInputError(
            f"{name} is {kind}, whose layers cannot be pruned",
            hint="prune the nn.Module that it was made from, then script, trace or export it again",
        )


def layer_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Stored and computed weights, sharded or not: state_dict key, values, reduction axis."""
    for path, module in model.named_modules():
        for name in _weight_names(module):
            weight = tensor_of(module, name)
            if weight is None:
                continue
            axis = _reduction_axis(module, weight.ndim)
            if axis is not None:
                yield _join(path, name), weight, axis


def tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """The stored weight of a layer, or None where it is absent or made anew in every forward."""
    computed = {None}
    for hook in module._forward_pre_hooks.values():
        # torch.nn.utils.weight_norm and spectral_norm call it so, torch.nn.utils.prune so
        computed |= {getattr(hook, "name", None), getattr(hook, "_tensor_name", None)}
    stored = name in module._parameters or name in module._buffers
    if not (stored or name in computed or parametrize.is_parametrized(module, name)):
        return None
    tensor = getattr(module, name)
    return tensor if isinstance(tensor, Tensor) else None


def layout_of(tensor: Tensor) -> str:
    """How its values lie in memory: "strided" (ordinary ones), "sparse_coo", "nested"..."""
    if tensor.is_nested:
        return "nested"
    return str(tensor.layout).removeprefix("torch.")


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
        names = []
        if parametrize.is_parametrized(module):
            names = list(module.parametrizations)
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
    kinds = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, *_conv1d_of_transformers())
    if isinstance(module, kinds):
        return ("weight",)
    return ()


def _conv1d_of_transformers() -> tuple[type[nn.Module], ...]:
    """The Conv1D of transformers, where that has been imported: else no model can hold one."""
    package = sys.modules.get("transformers.pytorch_utils")
    if package is None:
        return ()
    return (package.Conv1D,)


def _refuse_unusual(tensor: Tensor, path: str, name: str, module: nn.Module) -> None:
    """Refuse weights that have no values yet, and sparse and nested ones."""
    if nn.parameter.is_lazy(tensor):
        raise BadInputError(
            f"layer {path!r} ({type(module).__name__}) is lazy and has no weight yet",
            hint="run the model once on example inputs before pruning it",
        )
    if layout_of(tensor) != "strided":
        raise BadInputError(
            f"layer {path!r}: {_join(path, name)} is {layout_of(tensor)}, which cannot be pruned",
            hint="make it an ordinary tensor first, for example with to_dense()",
        )


def _describe(path: str, name: str, module: nn.Module) -> Weight:
    tensor = tensor_of(module, name)
    row = Weight(
        layer=path,
        node=None,
        weight=None,
        op=_class_name(module),
        shape=(),
        axis=None,
        groups=1,
        in_channels=0,
        out_channels=0,
        kernel=(),
        dtype="unknown",
        math_dtype="unknown",
    )
    if tensor is None:
        message = "the weight is neither a parameter nor a buffer: it is made in every forward"
        return replace(row, reasons=(Reason(code=ReasonCode.NOT_CONSTANT, message=message),))
    _refuse_unusual(tensor, path, name, module)
    dtype = torch_type_name(tensor)
    row = replace(
        row,
        weight=_join(path, name),
        shape=tuple(tensor.shape),
        dtype=dtype,
        math_dtype=dtype,
    )
    axis = _reduction_axis(module, tensor.ndim)
    if axis is not None:
        row = _with_channels(row, axis, module)
    if is_plain(tensor):
        return row
    message = f"the weight is stored as {type(tensor).__name__} of {row.dtype}, packed"
    return replace(row, axis=None, reasons=(Reason(code=ReasonCode.DTYPE, message=message),))


def _reduction_axis(module: nn.Module, rank: int) -> int | None:
    """The axis by the kind of layer; None where the rank is not that of its kind."""
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        if rank < 3:
            return None
        return 0 if isinstance(module, TRANSPOSED) else 1
    if rank != 2:
        return None
    return 0 if isinstance(module, _conv1d_of_transformers()) else 1


def _with_channels(row: Weight, axis: int, module: nn.Module) -> Weight:
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        return replace(
            row,
            axis=axis,
            in_channels=module.in_channels,
            out_channels=module.out_channels,
            groups=module.groups,
            kernel=row.shape[2:],
        )
    return replace(row, axis=axis, in_channels=row.shape[axis], out_channels=row.shape[1 - axis])


StorageKey = tuple[torch.device, int, int]


def storage_key(tensor: Tensor) -> StorageKey:
    """Equal for tensors that start at the same place in memory and are of the same size."""
    address = id(tensor)
    if layout_of(tensor) == "strided" and not tensor.is_meta:
        address = tensor.data_ptr()
    return tensor.device, address, tensor.numel()


def _users(model: nn.Module) -> dict[StorageKey, list[str]]:
    """Which modules hold the array at each place in memory."""
    users: dict[StorageKey, list[str]] = defaultdict(list)
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if not nn.parameter.is_lazy(tensor) and tensor.numel():
            users[storage_key(tensor)].append(name.rpartition(".")[0])
    return users


def _class_name(module: nn.Module) -> str:
    """The layer's class; torch.nn.utils.parametrize puts one of its own in front."""
    kind = type(module)
    if parametrize.is_parametrized(module):
        kind = kind.__mro__[1]
    return kind.__name__


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


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
    without_data(method)  # refused before a weight is changed
    plan = plan_in_memory(model, pattern, selection or Selection())

    def write(row: int, values: Array) -> None:
        tensor = _tensor(model, plan.choices[row][0])
        if tensor.device.type != "cpu":  # else it is there already
            tensor.copy_(tensor_from_array(values))

    return prune_arrays(plan, method, write)


def plan_in_memory(model: nn.Module, pattern: Pattern, selection: Selection) -> ArrayPlan:
    """The choice for a module, whose computed weights become permanent.

    Raises BadInputError for NaN or infinity, weights without memory (meta), lazy modules, a
    selection that does not fit, and an array that two layers need along different axes.
    """
    make_permanent(model)
    weights = find_module_weights(model)
    places = [_place(model, weight) for weight in weights]
    plan = plan_arrays(weights, places, pattern, selection)
    hint = "the checkpoint is damaged or its training diverged; use another one"
    checked = set()
    for weight, place in zip(weights, places, strict=True):
        if place is not None and place.key not in checked:
            refuse_not_finite(weight, count_non_finite(place.read()), hint)
            checked.add(place.key)
    return plan


def _place(model: nn.Module, weight: Weight) -> Place | None:
    """The memory of a weight; None where that is no plain array."""
    if weight.axis is None:
        return None
    tensor = _tensor(model, weight)
    if tensor.is_meta:
        raise BadInputError(
            f"layer {weight.layer!r}: {weight.weight} is a meta tensor, without data",
            hint="load the model's weights before pruning it",
        )
    return Place(
        key=storage_key(tensor),
        step=tensor.stride(weight.axis),
        read=partial(array_from_tensor, tensor),
    )


def _tensor(model: nn.Module, weight: Weight) -> Tensor:
    """The parameter or the buffer of a weight that has an axis."""
    assert weight.weight is not None, "a weight without a tensor has no axis"
    # "block.0.fc.weight" of the layer "block.0.fc" is "weight" there
    name = weight.weight[len(weight.layer) + 1 :] if weight.layer else weight.weight
    tensor = tensor_of(model.get_submodule(weight.layer), name)
    assert tensor is not None, "a weight without a tensor has no axis"
    return tensor


def plan_stored(
    module: nn.Module, store: Store, pattern: Pattern, selection: Selection
) -> ArrayPlan:
    """The choice for a module without values, by the names of whose parameters files have arrays.

    Raises BadInputError for a type that torch cannot hold, and as `choose` does.
    """
    _take_types(module, store)
    weights = find_module_weights(module)
    places = []
    for weight in weights:
        place = None
        if weight.weight is not None and weight.axis is not None:
            stored = store[weight.weight]
            place = Place(
                key=(stored.file, stored.offset),
                step=math.prod(stored.shape[weight.axis + 1 :]),
                read=partial(_copied, stored),
            )
        places.append(place)
    return plan_arrays(weights, places, pattern, selection)


def _copied(stored: StoredTensor) -> Array:
    return np.array(stored.array())


def _take_types(module: nn.Module, store: Store) -> None:
    """Give the parameters of a module without values the types that they are stored in."""
    made: dict[tuple[Path, int], nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        stored = store[name]
        dtype = getattr(torch, stored.dtype or "", None)
        if not isinstance(dtype, torch.dtype):
            raise BadInputError(f"{stored.file}: {name} is of a type that torch cannot hold")
        empty = torch.empty(stored.shape, dtype=dtype, device="meta")
        place = (stored.file, stored.offset)
        # integers have no gradient
        trained = parameter.requires_grad and dtype.is_floating_point
        made.setdefault(place, nn.Parameter(empty, requires_grad=trained))
        path, _, own = name.rpartition(".")
        setattr(module.get_submodule(path), own, made[place])

"""The weights of a torch module that are pruned with data: in memory, or in files by block."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from twofour.calibrate.finished_steps import solution_of
from twofour.calibrate.torch.products import WatchedWeight
from twofour.errors import BadInputError
from twofour.pruning.matrices import Layout, cut_where_wide
from twofour.pruning.methods.problem import Array
from twofour.pruning.solve import SolvedLayer
from twofour.pruning.torch.calls import copies
from twofour.pruning.torch.module import PrunedArray, StreamedModule
from twofour.pruning.torch.module_layers import array_of, is_plain, storage_key, tensor_of, zeros_of
from twofour.records.weights import Pattern, Solution, Weight, shared

_PLACES = {"q_proj_weight": 0, "k_proj_weight": 1, "v_proj_weight": 2}
"""The third of MultiheadAttention's in_proj_bias that belongs to a separate projection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedWeight(WatchedWeight):
    """A stored weight that is to be pruned, and the biases that make up for it."""

    holders: tuple[nn.Module, ...]
    """Modules that have it."""
    biases: tuple[Tensor, ...]
    """The biases of its users, each as long as the outputs; (): not all users have one."""


class WeightsInMemory:
    """The weights of a module that is in memory as a whole."""

    in_memory = True

    def __init__(
        self,
        module: nn.Module,
        weights: Sequence[CalibratedWeight],
        dense_model: nn.Module | None = None,
    ) -> None:
        """`dense_model`: the dense model.

        Raises BadInputError where a weight of the same name has another shape there.
        """
        self.module = module
        self.holders: Mapping[str, Collection[nn.Module]] = {w.name: w.holders for w in weights}
        self.sizes: Mapping[str, int] = {w.name: w.tensor.numel() for w in weights}
        self.before = copies([t for w in weights for t in (w.tensor, *w.biases)])
        """The tensors that are changed, and copies from before."""
        self._weights = {weight.name: weight for weight in weights}
        self._dense_model = dense_model
        self._changed: set[int] = set()
        for weight in weights:
            self.dense_weight(weight)

    @contextlib.contextmanager
    def here(
        self, names: Sequence[str], _block: nn.Module | None
    ) -> Iterator[list[CalibratedWeight]]:
        """Within it these weights of a block can be read and changed: always."""
        yield [self._weights[name] for name in names]

    def resume(self, solved: Mapping[str, SolvedLayer], block: nn.Module | None) -> None:
        """Give the weights the values that an interrupted run has found."""
        weights = [self._weights[name] for name in solved]
        for weight in weights:
            put(weight, solved[weight.name])
        self.keep(weights, block)

    def keep(self, weights: Sequence[CalibratedWeight], _block: nn.Module | None) -> None:
        """Note that these weights differ from the dense model from now on."""
        self._changed.update(id(t) for w in weights for t in (w.tensor, *w.biases))

    @contextlib.contextmanager
    def dense(self) -> Iterator[nn.Module]:
        """Within it the model as it was before anything was pruned."""
        if self._dense_model is not None:
            yield self._dense_model
            return
        swapped = [pair for pair in self.before if id(pair[0]) in self._changed]
        _swap(swapped)
        try:
            yield self.module
        finally:
            _swap(swapped)

    def dense_weight(self, weight: WatchedWeight) -> WatchedWeight:
        """The weight of that model."""
        if self._dense_model is None:
            return weight
        return replace(weight, tensor=tensor_in(self._dense_model, weight.name, weight.tensor))


class WeightsInFiles:
    """The weights of a module that come from files, block by block, and are written into a copy."""

    in_memory = False

    def __init__(
        self, streamed: StreamedModule, wanted: Iterable[Weight], pattern: Pattern
    ) -> None:
        self.module = streamed.module
        self._streamed, self._pattern = streamed, pattern
        self._rows = {row.weight: row for row in wanted if row.weight is not None}
        self.sizes: Mapping[str, int] = {
            name: math.prod(row.shape) for name, row in self._rows.items()
        }
        self.holders: Mapping[str, Collection[nn.Module]] = {
            name: (self.module.get_submodule(row.layer),) for name, row in self._rows.items()
        }

    @contextlib.contextmanager
    def here(
        self, names: Sequence[str], block: nn.Module | None
    ) -> Iterator[list[CalibratedWeight]]:
        """Within it these weights of a block can be read and changed."""
        with contextlib.ExitStack() as held:
            for each in self._parts(names, block):
                held.enter_context(self._streamed.held(each))
            yield [
                calibrated_weight(self.module, self._rows[name], self._pattern) for name in names
            ]

    def resume(self, solved: Mapping[str, SolvedLayer], block: nn.Module | None) -> None:
        """Take the weights of the block from the copy from now on."""
        for part in self._parts(solved, block):
            self._streamed.take_from_copy(part)

    def keep(self, weights: Sequence[CalibratedWeight], block: nn.Module | None) -> None:
        """Write what was changed into the copy."""
        changed = {_storage(t) for w in weights for t in (w.tensor, *w.biases)}
        names = [n for n, p in self.module.named_parameters() if _storage(p) in changed]
        self._streamed.save(names)
        for part in self._parts([w.name for w in weights], block):
            self._streamed.take_from_copy(part)

    def _parts(self, names: Iterable[str], block: nn.Module | None) -> list[nn.Module]:
        """The block; without one, the layers that have the weights."""
        return [block] if block is not None else [p for n in names for p in self.holders[n]]

    @contextlib.contextmanager
    def dense(self) -> Iterator[nn.Module]:
        """Parameters that are not held come from the files as they were."""
        self._streamed.dense = True
        try:
            yield self.module
        finally:
            self._streamed.dense = False

    @staticmethod
    def dense_weight(weight: WatchedWeight) -> WatchedWeight:
        """The weight itself: what is in memory is dense until it is pruned."""
        return weight


def _storage(tensor: Tensor) -> int:
    return id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()


def layout_of(weight: Weight, m: int) -> Layout:
    """A layer's stored weight as matrices; wide convolutions are cut into their taps."""
    assert weight.axis is not None
    if not weight.kernel:
        return Layout(shape=weight.shape, axis=weight.axis, m=m)
    return cut_where_wide(
        Layout(shape=weight.shape, axis=weight.axis, m=m, groups=weight.groups, convolution=True)
    )


def calibrated_weight(model: nn.Module, weight: Weight, pattern: Pattern) -> CalibratedWeight:
    """A row of `find_module_weights` with its array, its users and their biases."""
    tensor = array_of(model, weight)
    assert tensor is not None, "chosen for its array"
    paths = [path for path in (weight.layer, *weight.tied_to) if path not in weight.looked_up_by]
    holders = tuple(dict.fromkeys(model.get_submodule(path) for path in paths))
    return CalibratedWeight(
        name=weight.weight or "",
        tensor=tensor,
        layout=layout_of(weight, pattern.m),
        holders=holders,
        biases=_biases(model, holders, tensor, weight.out_channels),
    )


def _biases(
    model: nn.Module, holders: Sequence[nn.Module], tensor: Tensor, outputs: int
) -> tuple[Tensor, ...]:
    """The bias of each user of a weight; () where one has none, or shares it with another layer."""
    found: list[Tensor] = []
    for module in holders:
        bias = _bias(module, tensor)
        if bias is None or not is_plain(bias) or bias.shape != (outputs,):
            return ()
        others = [
            other
            for other in model.modules()
            if other not in holders
            for stored in other.parameters(recurse=False)
            if stored.data_ptr() == bias.data_ptr()
        ]
        if others:
            return ()
        found.append(bias)
    return tuple({bias.data_ptr(): bias for bias in found}.values())


def _bias(module: nn.Module, tensor: Tensor) -> Tensor | None:
    """The bias that the module adds to the products with this weight."""
    if not isinstance(module, nn.MultiheadAttention):
        return tensor_of(module, "bias")
    packed = tensor_of(module, "in_proj_bias")
    if packed is None or module.in_proj_weight is not None:
        return packed
    key = storage_key(tensor)
    third = next(
        (place for name, place in _PLACES.items() if storage_key(getattr(module, name)) == key),
        None,
    )
    return None if third is None else packed.chunk(3)[third]


def tensor_in(dense_model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The dense model's tensor of that key; raises BadInputError for none of the same shape."""
    found: Tensor | None = dense_model.state_dict().get(name)
    if found is None or found.shape != tensor.shape:
        shape = "there is none" if found is None else f"it is {list(found.shape)}"
        raise BadInputError(
            f"{name} is {list(tensor.shape)} in the model; in the dense reference {shape}",
            hint="name the dense model that this one was made from",
        )
    return found.detach().to(tensor.device)


def take_biases(model: nn.Module, weight: CalibratedWeight, dense_model: nn.Module) -> None:
    """Copy the dense model's biases: the correction is computed from its outputs."""
    tensor_in(dense_model, weight.name, weight.tensor)
    state = model.state_dict()
    for bias in weight.biases:
        for name, tensor in state.items():
            if storage_key(tensor) == storage_key(bias):
                bias.copy_(tensor_in(dense_model, name, bias))


def _swap(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for one, other in pairs:
        values = one.clone()
        one.copy_(other)
        other.copy_(values)


def put(weight: CalibratedWeight, solved: SolvedLayer) -> None:
    """Write new values into the model's own memory."""
    weight.tensor.copy_(_tensor(solved.weight))
    if solved.bias_change is not None:
        for bias in weight.biases:
            bias.copy_(bias.double() + _tensor(solved.bias_change).to(bias.device))


def pruned_array(solved: SolvedLayer, tensor: Tensor, method: str) -> PrunedArray:
    """The report on a weight that a method with data has changed in place."""
    return PrunedArray(
        **shared(solution_of(solved, method), Solution),
        zeros=zeros_of(tensor),
        kept_magnitude=solved.kept_magnitude,
        held_before=solved.damping is None and solved.kept_magnitude == 1.0,
    )


def numbers_of(tensor: Tensor) -> Array:
    """A copy of the values in float32 or float64; on the CPU a numpy array."""
    wide = tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()
    own = wide.clone() if wide.data_ptr() == tensor.data_ptr() else wide
    return own.numpy() if tensor.device.type == "cpu" else own


def _tensor(values: Array) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))


def rounding_of(dtype: torch.dtype) -> Callable[[Array], Array] | None:
    """A function that rounds to the values of the type; None for float32 and float64."""
    if dtype in (torch.float32, torch.float64):
        return None

    def rounded(values: Array) -> Array:
        narrow = _tensor(values).to(dtype).to(_tensor(values).dtype)
        return narrow if isinstance(values, Tensor) else narrow.numpy()

    return rounded

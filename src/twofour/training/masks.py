"""Zeros that stay zeros while a pruned module is trained, in one process or sharded over many.

The weights are looked up by name after each step, because wrappers replace parameters: a mask that
holds on to the parameter of the start is lost without an error (SparseML, pull request 1807).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from twofour.errors import BadInputError, PatternBrokenError
from twofour.pattern import check
from twofour.pruning.torch import BITS, is_plain, layer_weights
from twofour.records import frozen
from twofour.records.weights import Pattern
from twofour.words import keys_listed

_WRAPPED = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "AveragedModel": "module",
}
"""Class of a wrapper -> its attribute with the module inside, whose names the masks go by."""


@frozen
class _Mask:
    """Which values are kept: a bit for each value of a weight, or of this process's shard of it."""

    bits: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, kept: Tensor) -> _Mask:
        # values 0.5, 0, 0, 0.1 and four zeros: the byte 0b00001001
        flags = kept.reshape(-1).to(torch.uint8)
        flags = nn.functional.pad(flags, (0, -len(flags) % 8)).view(-1, 8)
        places = torch.arange(8, dtype=torch.uint8, device=flags.device)
        return cls(bits=(flags << places).sum(-1, dtype=torch.uint8), shape=tuple(kept.shape))

    def unpacked(self, device: torch.device) -> Tensor:
        """int8: all bits set where a value is kept, none where it stays zero."""
        eights = _table(device).index_select(0, self.bits.to(device).int())
        return eights.view(torch.int8)[: math.prod(self.shape)].view(self.shape)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """For each byte of a packed mask, the eight int8 that it stands for, as one int64."""
    # the byte 0b00001001 stands for -1, 0, 0, -1, 0, 0, 0, 0: all bits of an int8 set, or none
    flags = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return (-flags).to(torch.int8).view(torch.int64).reshape(-1).to(device)


class MaskHolder:
    """The masks of a module, and the hooks that hold them until `remove` or `make_permanent`."""

    def __init__(self, model: nn.Module, masks: dict[str, _Mask]) -> None:
        self._model = model
        self._masks = masks
        self._optimizers: list[tuple[Optimizer, RemovableHandle]] = []
        self._gradients: dict[str, tuple[nn.Parameter, RemovableHandle]] = {}

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights that are held."""
        return tuple(self._masks)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Hold the masks after each step of this optimizer too, and clear its state under them.

        Raises BadInputError for what is no torch optimizer, and for one that has none of the
        weights: DeepSpeed and Megatron train copies.
        """
        inner = _with_hooks(optimizer)
        trained = {id(p) for group in inner.param_groups for p in group["params"]}
        held = [weight for _, weight in self._lookup() if weight.requires_grad]
        if held and not any(id(weight) in trained for weight in held):
            raise BadInputError(
                f"{type(optimizer).__name__} has none of the {len(held)} weights that are held",
                hint="give the optimizer of the pruned weights, made after the model was sharded; "
                "one that trains copies of them (DeepSpeed, Megatron) cannot be held",
            )
        handle = inner.register_step_post_hook(lambda *_: self._after_step())
        self._optimizers.append((inner, handle))
        self._start()

    def apply(self, model: nn.Module | None = None) -> None:
        """Write the zeros now: into the model, or into a copy of it, such as an average.

        Call it after whatever else writes weights: a merge of LoRA, the first average after
        pruning. Raises BadInputError where a weight is gone or its shape is another one.
        """
        for name, weight in self._lookup(model):
            self._write_zeros(name, weight, weight)

    @torch.no_grad()
    def verify(self, model: nn.Module | None = None) -> None:
        """Raise PatternBrokenError where values under the masks are not zero, in any process.

        All processes of torch.distributed must call it. `model` is as for `apply`.
        """
        broken: dict[str, int] = {}
        device = None
        for name, weight in self._lookup(model):
            device = weight.device
            kept = self._mask_of(name, weight).unpacked(device)
            under_mask = _local(weight).masked_select(kept == 0)
            broken[name] = int(torch.count_nonzero(under_mask))
        total = torch.tensor(sum(broken.values()), device=device)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        if total:
            here = [f"{name} ({count})" for name, count in broken.items() if count]
            raise PatternBrokenError(
                f"{int(total)} values under the masks are not zero, in all processes together; "
                f"in this one: {keys_listed(here) if here else 'none'}",
                hint="call apply() after whatever writes weights beside the optimizer, and "
                "add_optimizer() for each optimizer",
            )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """The masks of the whole weights by name, a bit for each value, 1 where it is kept.

        All processes of torch.distributed must call it where weights are sharded.
        """
        masks = {}
        for name, weight in self._lookup():
            flags = torch.zeros_like(weight, dtype=torch.uint8)
            local = _local(flags)
            local.copy_(self._mask_of(name, weight).unpacked(local.device) != 0)
            masks[name] = _Mask.of(_whole(flags)).bits.cpu()
        return masks

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the masks by saved ones, and write their zeros.

        Raises BadInputError where the mask of a held weight is missing, for one of another size
        and for a weight that the model does not have; then nothing is changed.
        """
        missing = [name for name in self._masks if name not in state]
        if missing:
            raise BadInputError(
                f"the saved masks lack those of {keys_listed(missing)}",
                hint="give what state_dict() of the holder returned for this model",
            )
        masks = {}
        for name, weight in self._lookup(names=state):
            bits = state[name]
            shape = tuple(weight.shape)
            if (
                not isinstance(bits, Tensor)
                or bits.dtype != torch.uint8
                or bits.shape != (-(-math.prod(shape) // 8),)
            ):
                raise BadInputError(f"the mask of {name} does not belong to a weight of {shape}")
            masks[name] = _Mask(bits=bits.to(_local(weight).device), shape=shape)
        for _, handle in self._gradients.values():
            handle.remove()
        self._gradients.clear()
        self._masks = masks
        self._start()

    def make_permanent(self) -> None:
        """Write the zeros a last time, verify them, and remove the hooks."""
        self.apply()
        self.verify()
        self.remove()

    def remove(self) -> None:
        """Remove the hooks: from now on nothing keeps the zeros."""
        for _, handle in (*self._optimizers, *self._gradients.values()):
            handle.remove()
        self._optimizers.clear()
        self._gradients.clear()

    def _start(self) -> None:
        """Zeros in weights, gradients and what the optimizers remember: momentum moves weights."""
        self._after_step()
        for name, weight in self._lookup():
            self._mask_gradient(name, weight)
            for optimizer, _ in self._optimizers:
                for value in optimizer.state.get(weight, {}).values():
                    if isinstance(value, Tensor) and value.shape == weight.shape:
                        self._write_zeros(name, weight, value)

    def _after_step(self) -> None:
        for name, weight in self._lookup():
            self._write_zeros(name, weight, weight)
            known = self._gradients.get(name)
            if weight.requires_grad and (known is None or known[0] is not weight):
                hook = functools.partial(self._mask_gradient, name)
                register: Callable[..., RemovableHandle] = weight.register_post_accumulate_grad_hook
                self._gradients[name] = weight, register(hook)

    def _mask_gradient(self, name: str, weight: Tensor) -> None:
        """Zeros in the gradient too, for all that looks at it: the norm that clips, Adafactor."""
        if weight.grad is not None:
            self._write_zeros(name, weight, weight.grad)

    @torch.no_grad()
    def _write_zeros(self, name: str, weight: Tensor, tensor: Tensor) -> None:
        """Zeros in a tensor of the weight's shape; packed states of 8-bit optimizers stay.

        The bits of the values are masked: +0.0 comes out of -0.0, NaN and infinity too, in a
        fifth of the time of `masked_fill_` on a processor (benchmarks/LOG.md).
        """
        local = _local(tensor)
        if is_plain(local):
            kept = self._mask_of(name, weight).unpacked(local.device)
            local.view(BITS[local.element_size()]).bitwise_and_(kept)

    def _mask_of(self, name: str, weight: Tensor) -> _Mask:
        """The mask of what this process has of the weight, cut anew where that has been sharded."""
        mask = self._masks[name]
        local = _local(weight)
        if is_plain(local) and mask.shape == tuple(local.shape):
            return mask
        if not is_plain(local) or mask.shape != tuple(weight.shape):
            raise BadInputError(
                f"{name} is {list(weight.shape)} of {type(local).__name__} here, and its mask is "
                f"{list(mask.shape)}",
                hint="weights that are quantised or flattened (FSDP1) cannot be held: use FSDP2 "
                "(torch.distributed.fsdp.fully_shard)",
            )
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(weight, DTensor), "only a sharded weight differs from its local part"
        whole = mask.unpacked(weight.device)
        shard = distribute_tensor(whole, weight.device_mesh, weight.placements)
        self._masks[name] = _Mask.of(_local(shard) != 0)
        return self._masks[name]

    def _lookup(
        self, model: nn.Module | None = None, names: Mapping[str, object] | None = None
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters as the model, or a copy of it, has them now."""
        inner = self._model if model is None else _unwrapped(model)
        for name in list(self._masks if names is None else names):
            try:
                yield name, inner.get_parameter(name)
            except AttributeError:
                raise BadInputError(
                    f"{type(inner).__name__} has no weight {name} that a mask could be held on",
                    hint="wrap or rename layers first, then call hold_masks",
                ) from None


@torch.no_grad()
def hold(model: nn.Module, optimizer: Optimizer, pattern: Pattern) -> MaskHolder:
    """Hold the zeros of all weights in which the pattern holds; `twofour.hold_masks` says more."""
    for part in model.modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise BadInputError(
                "FullyShardedDataParallel (FSDP1) flattens weights, where no mask can be held",
                hint="use FSDP2: torch.distributed.fsdp.fully_shard",
            )
    inner = _unwrapped(model)
    masks: dict[str, _Mask] = {}
    hidden = []
    for name, weight, axis in layer_weights(inner):
        if not is_plain(_local(weight)) or not _is_pruned(_whole(weight), axis, pattern):
            continue
        if isinstance(weight, nn.Parameter):
            masks[name] = _Mask.of(_local(weight) != 0)
        else:
            hidden.append(name)
    if hidden:
        warnings.warn(
            f"{keys_listed(hidden)}: not held, because the module computes it from other tensors; "
            "make it a parameter first (torch.nn.utils.parametrize.remove_parametrizations)",
            stacklevel=3,
        )
    if not masks:
        raise BadInputError(
            f"the zeros of no weight of {type(inner).__name__} hold {pattern}",
            hint="prune it first (twofour.prune), or load pruned weights; give their pattern",
        )
    holder = MaskHolder(inner, masks)
    holder.add_optimizer(optimizer)
    return holder


def _is_pruned(weight: Tensor, axis: int, pattern: Pattern) -> bool:
    """Whether it has zeros that hold the pattern; one of zeros alone begins there (LoRA's B)."""
    kept = weight != 0
    if bool(kept.all()) or not bool(kept.any()):
        return False
    return check(kept.cpu().numpy(), axis, pattern).holds


def _unwrapped(model: nn.Module) -> nn.Module:
    while type(model).__name__ in _WRAPPED:
        model = getattr(model, _WRAPPED[type(model).__name__])
    return model


def _with_hooks(optimizer: object) -> Optimizer:
    """The torch optimizer itself: wrappers such as Accelerate's have it as `optimizer`."""
    inner = optimizer
    while not hasattr(inner, "_optimizer_step_post_hooks") and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not isinstance(inner, Optimizer):
        raise BadInputError(f"optimizer must be a torch.optim.Optimizer, found {optimizer!r}")
    return inner


def _local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: its shard of a DTensor, all of any other."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all processes where it is sharded."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole

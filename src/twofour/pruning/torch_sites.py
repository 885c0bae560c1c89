"""Places in a torch module whose channels repair can change: found, looked at, changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twofour.pruning.repair import Change, Normalisation
from twofour.pruning.torch_calls import copies, put_back
from twofour.pruning.torch_layers import CONVOLUTIONS, TRANSPOSED, storage_key
from twofour.records.weights import Weight

_PLAIN = ("torch.nn.modules.linear", "torch.nn.modules.conv", "transformers.pytorch_utils")
"""Modules with the forwards of layers that give W x + b and nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """A batch norm with running statistics, or a layer whose output channels can be changed."""

    name: str
    module: nn.Module
    weight: Weight | None = None
    """None: a batch norm."""

    def of(self, model: nn.Module) -> Site:
        """The same place in another copy of the model."""
        return replace(self, module=model.get_submodule(self.name))

    @property
    def has_bias(self) -> bool:
        """Whether a channel can be shifted."""
        return self.weight is None or self.module.bias is not None

    @property
    def tensors(self) -> list[Tensor]:
        """What a change changes."""
        names = ("running_mean", "running_var") if self.weight is None else ("weight", "bias")
        held = (getattr(self.module, name) for name in names)
        return [tensor for tensor in held if isinstance(tensor, Tensor)]

    def channel_axis(self, tensor: Tensor) -> int:
        """Of the batch norm's input, or the layer's output (which may be of a single sample)."""
        if self.weight is None:
            return 1
        if isinstance(self.module, (*CONVOLUTIONS, *TRANSPOSED)):
            return tensor.ndim - len(self.module.kernel_size) - 1
        return tensor.ndim - 1


def fold(site: Site, change: Change | Normalisation) -> None:
    """Change the module itself; zeros of the weight stay zeros."""
    if isinstance(change, Normalisation):
        set_norm(site, change)
        return
    weight, bias = site.module.weight, site.module.bias
    assert isinstance(weight, Tensor)
    _store(weight, weight.double() * _along_outputs(site, change.scale))
    if isinstance(bias, Tensor):
        _store(bias, bias.double() * change.scale + change.shift)


@torch.no_grad()
def _store(tensor: Tensor, values: Tensor) -> None:
    """In the tensor's type; numbers beyond it become its largest."""
    most = torch.finfo(tensor.dtype).max
    tensor.copy_(values.clamp(-most, most))


def _along_outputs(site: Site, scale: Tensor) -> Tensor:
    """A factor for each output channel, in a shape that the weight multiplies with."""
    assert site.weight is not None
    shape, groups = site.weight.shape, site.weight.groups
    if isinstance(site.module, TRANSPOSED):  # axis 0 holds the inputs of all groups
        rows = scale.reshape(groups, 1, -1).expand(groups, shape[0] // groups, -1)
        return rows.reshape(shape[0], shape[1], *(1 for _ in shape[2:]))
    axis = 1 if site.weight.axis == 0 else 0
    return scale.reshape([-1 if at == axis else 1 for at in range(len(shape))])


def normalisation(site: Site) -> Normalisation:
    """The running statistics of a batch norm as they are now."""
    mean, variance = site.module.running_mean, site.module.running_var
    assert isinstance(mean, Tensor)
    assert isinstance(variance, Tensor)
    return Normalisation(mean=mean.double(), variance=variance.double())


def epsilon(site: Site) -> float:
    """What a batch norm adds to its variance."""
    return float(vars(site.module)["eps"])


def set_norm(site: Site, change: Normalisation) -> None:
    """Give a batch norm other running statistics, in its own type."""
    for name, values in (("running_mean", change.mean), ("running_var", change.variance)):
        buffer = getattr(site.module, name)
        assert isinstance(buffer, Tensor)
        _store(buffer, values)


@contextmanager
def norms_kept(sites: Iterable[Site]) -> Iterator[None]:
    """Running statistics are afterwards what they were."""
    before = copies([t for site in sites if site.weight is None for t in site.tensors])
    try:
        yield
    finally:
        put_back(before)


def possible_sites(model: nn.Module, weights: Sequence[Weight]) -> dict[str, Site]:
    """Batch norms with running statistics, and layers of `weights` that share none of their arrays.

    Sub-classes that compute something else than W x + b are left out, and so are layers whose
    output no forward shows (the projections of nn.MultiheadAttention).
    """
    holders = Counter(
        storage_key(tensor)
        for module in model.modules()
        for tensor in module._parameters.values()
        if tensor is not None and not tensor.is_meta and tensor.numel()
    )
    sites = {
        name: Site(name=name, module=module)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and isinstance(module.running_mean, Tensor)
        and isinstance(module.running_var, Tensor)
    }
    for weight in weights:
        module = model.get_submodule(weight.layer)
        tensors = [each for each in module._parameters.values() if each is not None]
        alone = all(holders[storage_key(tensor)] == 1 for tensor in tensors)
        if alone and _is_plain_layer(module):
            sites[weight.layer] = Site(name=weight.layer, module=module, weight=weight)
    return sites


def _is_plain_layer(module: nn.Module) -> bool:
    """Whether its forward is that of a layer that gives W x + b, and not one of a sub-class."""
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    named = {name for name, _ in module.named_parameters(recurse=False)}
    return owner.__module__ in _PLAIN and named <= {"weight", "bias"} and "weight" in named


@contextmanager
def hooked(
    sites: Mapping[str, Site], meet: Callable[[Site, Tensor], Tensor | None]
) -> Iterator[None]:
    """`meet` is told the input of each batch norm and the output of each layer.

    What it gives for a layer takes the place of the output.
    """

    def norm(site: Site, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim > 1:
            meet(site, args[0])

    def layer(site: Site, _module: nn.Module, _args: object, output: object) -> Tensor | None:
        return meet(site, output) if isinstance(output, Tensor) and output.ndim else None

    with ExitStack() as stack:
        for site in sites.values():
            handle = (
                site.module.register_forward_pre_hook(partial(norm, site))
                if site.weight is None
                else site.module.register_forward_hook(partial(layer, site))
            )
            stack.callback(handle.remove)
        yield

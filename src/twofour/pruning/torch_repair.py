"""Repair of a pruned torch module: batch norms estimated again, channels matched, the best taken.

`record_dense` runs the dense module once, before it is pruned in place; `repair_module` then tries
each kind by changes on the way (running statistics, forward hooks), one forward of the data each,
and writes the one that is taken into weights, biases and buffers.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from twofour.pruning.lock_step import LockStep
from twofour.pruning.repair import (
    Change,
    Moments,
    Normalisation,
    OutputDistance,
    chosen,
    compared_values,
    concluded,
    estimated_again,
    fitting,
    joined,
    matching,
    moments,
    places,
    renormalised,
)
from twofour.pruning.statistics import held_out_samples
from twofour.pruning.torch_calls import (
    Call,
    copies,
    device_of,
    float_tensors,
    forward,
    put_back,
    random_states_kept,
    undisturbed,
)
from twofour.pruning.torch_sites import (
    Site,
    epsilon,
    fold,
    hooked,
    normalisation,
    norms_kept,
    possible_sites,
    set_norm,
)
from twofour.records.pruning import Repair, RepairKind, RepairTry
from twofour.records.weights import Weight

_MOST_BYTES = 2 << 30
"""That forwards side by side may hold, judged by the largest tensor seen in one of them."""
_ENOUGH_BYTES = 256 << 20
"""The same, where there are enough samples as well: more of either tell little new."""
_ENOUGH_SAMPLES = 128
_AT_HAND = 4
"""Tensors of that size which a forward holds at one place: a residual, an operator's in and out."""
_GOLDEN = 0.6180339887498949
"""Its multiples modulo 1 spread evenly, in step with no period: of batches of one, every second
would have no sample that is held out."""
_CHECKED = 4
"""Calls by which it is seen that a repair does what its trial did, once it is written."""
_ALIKE = 0.01
"""Share of an error by which the two may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbered:
    """A call, its number, and that of its first sample."""

    call: Call
    number: int
    first_sample: int


_Outputs = Mapping[int, Sequence[Tensor]]
"""On held-out samples, by number of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseRecord:
    """What the dense module gave: moments of its channels, and its outputs on held-out samples."""

    sites: Mapping[str, Site]
    """In the order in which the forward comes to them."""
    moments: Mapping[str, Moments]
    calls: tuple[int, ...]
    """Numbers of those that are used: enough of them, which memory can hold side by side."""
    outputs: _Outputs
    held_out: int
    """Samples that the outputs are of."""


def record_dense(model: nn.Module, weights: Sequence[Weight], calls: Iterable[Call]) -> DenseRecord:
    """Run the dense module on `calls`, which give the same every time that they are gone through.

    `weights` are those that will be pruned. Raises BadInputError where the forward fails.
    """
    recorder = _Recorder(possible_sites(model, weights))
    samples = [call.samples for call in calls]
    used: list[int] = []
    held_out = 0
    outputs: dict[int, Sequence[Tensor]] = {}
    with undisturbed(model):
        share = 1.0
        for one in _numbered(calls):
            if one.number * _GOLDEN % 1 < share:
                with hooked(recorder.sites, recorder.meet):
                    recorder.begin(one)
                    given = _run(model, one)
                outputs[one.number] = _held_out_outputs(given, one)
                used.append(one.number)
                held_out += int(_held_out(one).sum())
                share = _share(recorder.largest_bytes, samples)
    found = recorder.moments()
    return DenseRecord(
        sites={name: recorder.sites[name] for name in found},
        moments=found,
        calls=tuple(used),
        outputs=outputs,
        held_out=held_out,
    )


def repair_module(
    model: nn.Module,
    dense: DenseRecord,
    calls: Iterable[Call],
    wanted: bool | None = None,
    kinds: Sequence[RepairKind] = tuple(RepairKind),
) -> Repair:
    """Try the kinds of repair that fit the pruned module, and leave it with the best.

    `wanted` None: where the outputs on held-out samples come nearer to the dense ones by more than
    a hundredth; True: in any case. The module may be another one than the dense one of the record,
    with layers of the same names. Comes after bias correction, whose mean it replaces.
    """
    dense = replace(dense, sites={n: site.of(model) for n, site in dense.sites.items()})
    used = [one for one in _numbered(calls) if one.number in dense.calls]
    judged = [one for one in used if _held_out(one).any()]
    trials: dict[RepairKind, tuple[_Plan, _Outputs]] = {}
    with undisturbed(model):
        before = _distance(dense, _outputs(model, judged))
        tried = []
        for kind in (kind for kind in _fitting(dense) if kind in kinds):
            trial = _Trial(dense, kind)
            outputs = trial.outputs(model, used)
            trials[kind] = trial.plan, outputs
            error = _distance(dense, outputs)
            tried.append(RepairTry(kind=kind, error=error, changed=len(trial.plan)))
    taken, after = chosen(tried, before, always=bool(wanted)), before
    if taken is not None:
        plan, outputs = trials[taken.kind]
        with _taken_back_unless_kept(dense, plan) as keep, undisturbed(model):
            after = _error_as_written(model, dense, judged, outputs)
            if wanted or after is None or before is None or after < before:
                keep()
            else:  # the module uses its layers in other ways than by calling them
                taken, after = None, before
    return concluded(tuple(tried), taken, (before, after), dense.held_out)


_Plan = dict[str, Change | Normalisation]
"""By site."""


def _fitting(dense: DenseRecord) -> tuple[RepairKind, ...]:
    return fitting(
        norms=any(site.weight is None for site in dense.sites.values()),
        layers=any(site.weight is not None for site in dense.sites.values()),
    )


class _Recorder:
    """Sums the moments of each site over the calls of the dense module."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = sites
        self.largest_bytes = 0
        self._parts: dict[str, list[Moments]] = {}
        self._met: Counter[str] = Counter()
        self._again: set[str] = set()
        self._normed: set[str] = set()
        self._one: _Numbered | None = None
        self._last: tuple[str, weakref.ref[Tensor]] | None = None

    def begin(self, one: _Numbered) -> None:
        """The next call."""
        self._one = one
        self._met.clear()

    def meet(self, site: Site, tensor: Tensor) -> None:
        """A site's output, or the input of one that is a batch norm."""
        assert self._one is not None
        self._met[site.name] += 1
        if self._met[site.name] > 1:
            self._again.add(site.name)
        self.largest_bytes = max(self.largest_bytes, tensor.numel() * tensor.element_size())
        self._parts.setdefault(site.name, []).append(_moments(site, tensor, self._one))
        if site.weight is None and self._last is not None and self._last[1]() is tensor:
            self._normed.add(self._last[0])
        self._last = (site.name, weakref.ref(tensor))

    def moments(self) -> dict[str, Moments]:
        """Of the sites that can be changed, in the order in which they were met.

        Those that a forward comes to more than once are left out: one change would have to fit
        all; and layers in front of a batch norm: it takes over what would be changed.
        """
        left_out = self._again | self._normed
        found = {n: joined(parts) for n, parts in self._parts.items() if n not in left_out}
        return {name: each for name, each in found.items() if each is not None}


class _Trial:
    """One kind of repair, tried without touching a weight."""

    def __init__(self, dense: DenseRecord, kind: RepairKind) -> None:
        self.plan: _Plan = {}
        self._dense = dense
        self._kind = kind
        self._local = threading.local()
        order = {name: at for at, name in enumerate(dense.sites)}
        self._together = LockStep[Moments](self._settle, order)

    def outputs(self, model: nn.Module, used: Sequence[_Numbered]) -> _Outputs:
        """Held-out outputs of the repaired model, by number of the call; fills `plan`."""
        norms_alone = self._kind is RepairKind.BATCH_NORM
        sites = {
            name: site
            for name, site in self._dense.sites.items()
            if site.weight is None or not norms_alone
        }
        found: dict[int, Sequence[Tensor]] = {}

        def run(one: _Numbered) -> None:
            self._local.one = one
            with torch.no_grad():
                found[one.number] = _held_out_outputs(_run(model, one), one)

        with norms_kept(sites.values()), hooked(sites, self._meet):
            self._together.run([partial(run, one) for one in used])
        return found

    def _meet(self, site: Site, tensor: Tensor) -> Tensor | None:
        seen = _moments(site, tensor, self._local.one)
        with random_states_kept():  # other forwards seed and draw meanwhile
            self._together.wait(site.name, seen)
        change = self.plan.get(site.name)
        if not isinstance(change, Change):
            return None
        axis = site.channel_axis(tensor)
        shape = [-1 if at == axis else 1 for at in range(tensor.ndim)]
        scale, shift = (each.float().reshape(shape) for each in (change.scale, change.shift))
        changed: Tensor = tensor.float() * scale + shift
        return changed.to(tensor.dtype)

    def _settle(self, name: str, parts: Sequence[Moments]) -> None:
        now, site = joined(parts), self._dense.sites[name]
        if now is None:
            return
        if site.weight is not None:
            self.plan[name] = matching(self._dense.moments[name], now, has_bias=site.has_bias)
            return
        if self._kind is RepairKind.MATCHING:
            before = normalisation(site)
            change = renormalised(before, epsilon(site), self._dense.moments[name], now)
        else:
            again = estimated_again(now)
            if again is None:
                return
            change = again
        self.plan[name] = change
        set_norm(site, change)


@contextmanager
def _taken_back_unless_kept(dense: DenseRecord, plan: _Plan) -> Iterator[Callable[[], None]]:
    """The changes in weights, biases and buffers; to stay there where what it gives is called."""
    sites = [dense.sites[name] for name in plan]
    before = copies([tensor for site in sites for tensor in site.tensors])
    for site, change in zip(sites, plan.values(), strict=True):
        fold(site, change)
    try:
        yield before.clear
    finally:
        put_back(before)


def _numbered(calls: Iterable[Call]) -> Iterator[_Numbered]:
    first = 0
    for number, call in enumerate(calls):
        yield _Numbered(call=call, number=number, first_sample=first)
        first += call.samples


def _held_out(one: _Numbered) -> NDArray[np.bool_]:
    """Which of its samples are."""
    return held_out_samples(one.first_sample, one.call.samples)


def _share(largest_bytes: int, samples: Sequence[int]) -> float:
    """Of the calls, by the samples of each, how many are used.

    Their forwards lie in memory side by side.
    """
    bytes_each = max(1, _AT_HAND * largest_bytes)
    enough = max(_ENOUGH_BYTES / bytes_each, len(samples) * _ENOUGH_SAMPLES / max(1, sum(samples)))
    return min(enough, _MOST_BYTES / bytes_each) / max(1, len(samples))


def _moments(site: Site, tensor: Tensor, one: _Numbered) -> Moments:
    """Over the places that are neither padding nor of a held-out sample."""
    axis = site.channel_axis(tensor)
    others = tuple(size for at, size in enumerate(tensor.shape) if at != axis)
    return moments(tensor, axis, _places(others, one, held_out=False))


def _places(shape: tuple[int, ...], one: _Numbered, *, held_out: bool) -> NDArray[np.bool_] | None:
    call = one.call
    samples = _held_out(one) == held_out
    return places(shape, samples, None if call.padding is None else call.padding.cpu().numpy())


def _run(model: nn.Module, one: _Numbered) -> object:
    """What the model gives; it gets copies of the inputs, which it may change."""
    device = device_of(model)

    def copied(value: object) -> object:
        return value.to(device, copy=True) if isinstance(value, Tensor) else value

    args, kwargs = pytree.tree_map(copied, (one.call.args, dict(one.call.kwargs)))
    return forward(model, replace(one.call, args=args, kwargs=kwargs), one.number)


def _error_as_written(
    model: nn.Module, dense: DenseRecord, judged: Sequence[_Numbered], trial: _Outputs
) -> float | None:
    """The trial's error, if some calls give the same with the repair written; else that of all."""
    some = judged[:: max(1, len(judged) // _CHECKED)]
    written = _outputs(model, some)
    now = _distance(dense, written)
    then = _distance(dense, {number: trial[number] for number in written})
    if now is not None and then is not None and abs(now - then) <= _ALIKE * then:
        return _distance(dense, trial)
    return _distance(dense, _outputs(model, judged))


def _outputs(model: nn.Module, calls: Sequence[_Numbered]) -> _Outputs:
    return {one.number: _held_out_outputs(_run(model, one), one) for one in calls}


def _held_out_outputs(given: object, one: _Numbered) -> list[Tensor]:
    """Each output of floats as a flat tensor of its values that are of held-out samples."""
    return [
        compared_values(tensor.detach(), _places(tuple(tensor.shape), one, held_out=True))
        .float()
        .cpu()
        for tensor in float_tensors(given)
    ]


def _distance(dense: DenseRecord, outputs: _Outputs) -> float | None:
    """Over the calls that there are outputs of."""
    distance = OutputDistance()
    for number in (number for number in dense.calls if number in outputs):
        for at, (one, other) in enumerate(zip(dense.outputs[number], outputs[number], strict=True)):
            distance.add(at, one, other)
    return distance.error()

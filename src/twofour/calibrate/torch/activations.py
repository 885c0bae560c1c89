"""Zeros in what ReLU and functions like it give for calibration samples, and their formats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from twofour.pruning.formats import array_size, total_size
from twofour.pruning.torch.calls import Call, forward, undisturbed
from twofour.records.run import ArraySize

_ZEROING = ("relu", "hardtanh", "clamp", "clamp_min", "threshold", "hardswish", "hardsigmoid")
"""Functions that give exact zeros; nn.ReLU6 calls hardtanh."""
_NO_PADDING = torch.zeros(0, dtype=torch.bool)


class _Activations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts zeros by the innermost module that runs and the function."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.tracker, self.padding = ModuleTracker(), _NO_PADDING
        self.found: dict[tuple[str, str], list[ArraySize]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        out = func(*args, **(kwargs or {}))
        op = func.overloadpacket.__name__.rstrip("_")
        if op in _ZEROING and out.is_floating_point() and out.numel():
            inside = max(self.tracker.parents - {"Global"}, key=len, default="")  # Model.a.b
            name = inside.partition(".")[2], op
            kept = out[~self.padding] if out.shape[:2] == self.padding.shape else out
            nonzeros, shape = int(kept.count_nonzero()), tuple(kept.shape)
            self.found[name].append(array_size(name, shape, nonzeros, kept.element_size(), None))
        return out


def activation_sizes(model: nn.Module, calls: Iterable[Call]) -> tuple[ArraySize, ...]:
    """A row for each module and function that gave a zero; padding does not count."""
    seen = _Activations()
    with undisturbed(model):
        for number, call in enumerate(calls):
            seen.padding = _NO_PADDING if call.padding is None else call.padding
            with seen.tracker, seen:
                forward(model, call, number)
    totals = (total_size(name, sizes) for name, sizes in seen.found.items())
    return tuple(one for one in totals if one.nonzeros < one.values)

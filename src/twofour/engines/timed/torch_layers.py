"""Times of a module's submodules, taken with hooks around each."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from twofour.engines.protocol import Untyped
from twofour.engines.timed.torch_device import CUDA, TorchDevice, timing_event
from twofour.records.build import LayerTime

if TYPE_CHECKING:
    from torch import nn

_ROOT = "(model)"
"""Name of the module itself, whose own is empty."""


def module_times(
    module: nn.Module, device: TorchDevice, run: Callable[[], object], iterations: int
) -> tuple[LayerTime, ...]:
    """Mean time of each submodule without those inside it, in the order in which they end first.

    The times of all add up to the run. `run` must run the module; hooks make it slower.
    """
    watch = _Watch(device)
    with ExitStack() as stack:
        for name, part in module.named_modules():
            before, after = watch.hooks(name or _ROOT)
            stack.callback(part.register_forward_pre_hook(before).remove)
            stack.callback(part.register_forward_hook(after).remove)
        for _ in range(iterations):
            run()
    return tuple(
        LayerTime(name=name, mean_ms=ms / iterations) for name, ms in watch.own_ms().items()
    )


class _Watch:
    """Marks in time at the start and end of each submodule, read when all is over."""

    def __init__(self, device: TorchDevice) -> None:
        self._on_gpu = device.kind == CUDA
        self._open: list[tuple[str, Untyped, list[int]]] = []
        self._done: list[tuple[str, Untyped, Untyped, list[int]]] = []

    def hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """What to call before and after the submodule of that name."""

        def before(*_: Any) -> None:  # noqa: ANN401  # of whatever arguments
            self._open.append((name, self._mark(), []))

        def after(*_: Any) -> None:  # noqa: ANN401
            opened, start, inner = self._open.pop()
            self._done.append((opened, start, self._mark(), inner))
            if self._open:
                self._open[-1][2].append(len(self._done) - 1)

        return before, after

    def own_ms(self) -> dict[str, float]:
        """Name -> milliseconds in it over all runs, those of the submodules inside taken off."""
        spans = [self._between(start, end) for _, start, end, _ in self._done]
        total: dict[str, float] = {}
        for (name, _, _, inner), span in zip(self._done, spans, strict=True):
            own = span - sum(spans[index] for index in inner)
            total[name] = total.get(name, 0.0) + own
        return total

    def _mark(self) -> Untyped:
        if not self._on_gpu:
            return time.perf_counter()
        event = timing_event()
        event.record()
        return event

    def _between(self, start: Untyped, end: Untyped) -> float:
        if not self._on_gpu:
            return float(end - start) * 1e3
        end.synchronize()
        return float(start.elapsed_time(end))

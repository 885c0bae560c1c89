"""The clocks that time a call, on a GPU and on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch

Call = Callable[[], Any]


class Clock(Protocol):
    """Times calls on one device, in milliseconds."""

    tick_ms: float
    """Smallest step between two samples; 0 where it is far below any sample."""

    def launch_ms(self, call: Call) -> float:
        """From an idle device to the end of the call."""

    def device_ms(self, call: Call, ahead_ms: float) -> float:
        """On the device alone, where the call is queued within `ahead_ms`."""

    def capture(self, call: Call) -> Call:
        """A replay of the call that returns the same output. Raises RuntimeError."""

    def settle(self) -> None:
        """Wait for the device; raises RuntimeError where an earlier call failed on it."""


class HostClock:
    """The CPU's clock, for the smoke run."""

    tick_ms = 0.0

    def launch_ms(self, call: Call) -> float:
        """Wall time of the call."""
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def device_ms(self, call: Call, ahead_ms: float) -> float:  # noqa: ARG002  the Protocol's
        """As `launch_ms`: nothing is queued on a CPU."""
        return self.launch_ms(call)

    def capture(self, call: Call) -> Call:  # noqa: ARG002  the Protocol's
        """Raises RuntimeError always."""
        raise RuntimeError("no CUDA graphs on a CPU")

    def settle(self) -> None:
        """Nothing to wait for."""


class CudaClock:
    """CUDA events, behind a flush of the L2 cache."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(0)
        l2_bytes = getattr(properties, "L2_cache_size", None) or 1 << 26
        self._flush = torch.empty(max(2 * l2_bytes, 1 << 27), dtype=torch.int8, device="cuda")
        cuda: Any = torch.cuda  # events, streams and _sleep are untyped
        self._cuda = cuda
        self._start, self._end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        self._spins_per_ms = 0.0
        self._calibrate()
        empty = sorted(self.device_ms(lambda: None, 0.1) for _ in range(200))
        self.empty_ms = empty[len(empty) // 2]
        steps = [b - a for a, b in pairwise(empty) if b - a > 1e-9]
        self.tick_ms = min(steps, default=0.0)

    def _calibrate(self) -> None:
        spin = getattr(torch.cuda, "_sleep", None)
        if spin is None:
            return
        for _ in range(3):  # the first ones wake the clocks up
            self._start.record()
            spin(10_000_000)
            self._end.record()
            self._end.synchronize()
        self._spins_per_ms = 1e7 / self._start.elapsed_time(self._end)

    def launch_ms(self, call: Call) -> float:
        """Between two events around the call, the GPU idle before."""
        self._flush.zero_()
        torch.cuda.synchronize()
        return self._between_events(call)

    def device_ms(self, call: Call, ahead_ms: float) -> float:
        """Between two events around the call, all of it queued while the GPU spins."""
        self._flush.zero_()
        if self._spins_per_ms:
            self._cuda._sleep(int(ahead_ms * self._spins_per_ms))
        return self._between_events(call)

    def _between_events(self, call: Call) -> float:
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))

    def capture(self, call: Call) -> Call:
        """A CUDA graph of the call. Raises RuntimeError where it cannot be captured."""
        graph, stream = torch.cuda.CUDAGraph(), self._cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            # not torch.cuda.graph(): it collects garbage and empties the allocator every time
            graph.capture_begin()
            try:
                output = call()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()

        def replay() -> Any:
            graph.replay()
            return output

        return replay

    def settle(self) -> None:
        """Wait for all that is queued."""
        torch.cuda.synchronize()

"""The workers of a comparison: started, asked in rounds, interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import numpy as np

from twofour.engines.machine import available_bytes, has_room_for
from twofour.errors import BuildFailedError, TwofourError
from twofour.pipeline.compare.plan import Memory, Opened, Planned, VariantRequest, start_worker
from twofour.pipeline.engine_host import Tries
from twofour.pipeline.workers import WorkerProcess
from twofour.records.build import LayerTime
from twofour.records.export import OutputAgreement


@contextlib.contextmanager
def first_interrupt_only(*, until_exit: bool = False) -> Iterator[None]:
    """Within, the first SIGINT raises KeyboardInterrupt and later ones are ignored.

    An impatient second Ctrl-C would otherwise hit the code that keeps what the first one left.
    With `until_exit`, for a process that ends then, they stay ignored after the block too. Outside
    of the main thread, where signals cannot be handled, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if not (interrupted and until_exit):
            signal.signal(signal.SIGINT, before)


@dataclass(slots=True, kw_only=True)
class VariantProcess:
    """A variant with a process of its own, until it fails or the comparison ends."""

    planned: Planned
    process: WorkerProcess | None = None
    opened: Opened | None = None
    error: TwofourError | None = None
    """Why it cannot be measured any more."""
    agreement: tuple[OutputAgreement, ...] = ()
    top1_agreement: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    layers: tuple[LayerTime, ...] = ()
    build_s: float | None = None

    @property
    def name(self) -> str:
        """Its name, without the batch of a sweep."""
        return self.planned.name

    @property
    def runs(self) -> bool:
        """It is loaded and has not failed."""
        return self.opened is not None and self.error is None

    def open(self, request: VariantRequest, note: Callable[[str], None]) -> None:
        """Load it; a failure is kept as `error`.

        Where its process dies it is tried at the engine's lower optimization levels, and `note`
        told.
        """
        opening, levels = request.opening, request.engine.engine().open_levels

        def load(level: str | None) -> None:
            self.close()
            self.process = start_worker(opening.options.threads)
            options = replace(opening.options, level=level)
            wanted = replace(request, opening=replace(opening, options=options))
            self.opened = self.process.call("open", wanted)

        try:
            if levels:
                tries = Tries(engine=self.name, levels=levels, note=note)
                tries.until_alive(load, lambda: f"loading {opening.model}")
            else:
                load(None)
        except TwofourError as error:
            self.fail(error)

    def fail(self, error: TwofourError) -> None:
        """Note why, and let the process go."""
        self.error = error
        self.close()

    def prepare(self, inputs: Mapping[str, np.ndarray], warmup: int) -> None:
        """Take the inputs of the rounds that follow; raises TwofourError."""
        self.call("prepare", inputs, warmup)

    def run_ms(self) -> float:
        """One timed run."""
        return float(self.call("run_ms"))

    def memory(self) -> Memory:
        """Peaks since `prepare`."""
        try:
            found: Memory = self.call("memory")
        except TwofourError:
            return Memory(host_bytes=None, device_bytes=None)
        return found

    def call(self, command: str, *arguments: object) -> Any:  # noqa: ANN401  # each command has its own
        """Ask its process."""
        assert self.process is not None, "it was opened"
        return self.process.call(command, *arguments)

    def close(self) -> None:
        """End its process."""
        if self.process is not None:
            self.process.close()
            self.process = None


def refuse_without_memory(largest_bytes: int) -> None:
    """Raise BuildFailedError where another variant as large as the largest would not fit."""
    if not has_room_for(largest_bytes):
        raise BuildFailedError(
            f"not opened: {available_bytes() / 2**30:.1f} GiB of memory are left, and the "
            f"largest variant took {largest_bytes / 2**30:.1f} GiB",
            hint="every variant stays loaded while the rounds run: name fewer with --engines",
        )

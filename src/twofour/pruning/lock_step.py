"""Forwards of several batches side by side, which wait for each other at chosen places.

So a place sees all batches at once, and what is decided there holds for all that comes after it: a
whole chain of places costs one forward of the data, however the data is cut into batches. Each
forward is a thread, but one runs at a time and in a fixed order. Memory holds what each forward
has at hand at one place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Seen = TypeVar("Seen")


class _StoppedError(BaseException):
    """Unwinds a forward after another one failed."""


@dataclass(slots=True, eq=False)
class _Forward(Generic[Seen]):
    run: Callable[[], object]
    go_on: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    waits_at: str | None = None
    seen: list[Seen] = field(default_factory=list)
    error: BaseException | None = None
    ended: bool = False


class LockStep(Generic[Seen]):
    """Runs forwards, each a function that calls `wait` on its way.

    `settle` is called at each place with what the forwards that came there brought, in their
    order; `order` says which place comes first where forwards wait at different ones.
    """

    def __init__(
        self, settle: Callable[[str, Sequence[Seen]], None], order: Mapping[str, int]
    ) -> None:
        self._settle = settle
        self._order = order
        self._settled: set[str] = set()
        self._back = threading.Semaphore(0)
        self._local = threading.local()
        self._stopped = False

    def wait(self, place: str, seen: Seen) -> None:
        """Called by a forward: returns once the place is settled, at once where it is already."""
        if place in self._settled:
            return
        forward: _Forward[Seen] = self._local.forward
        forward.waits_at, forward.seen = place, [seen]
        self._back.release()
        forward.go_on.acquire()
        if self._stopped:
            raise _StoppedError

    def run(self, forwards: Sequence[Callable[[], object]]) -> None:
        """All of them to the end; raises what the first that failed raised."""
        started = [_Forward[Seen](run=run) for run in forwards]
        try:
            for forward in started:
                self._step(forward)
            while alive := [forward for forward in started if not forward.ended]:
                self._meet(alive)
        finally:
            self._stopped = True
            for forward in started:
                if forward.thread is not None:
                    forward.go_on.release()
                    forward.thread.join()

    def _meet(self, alive: Sequence[_Forward[Seen]]) -> None:
        place = min((f.waits_at or "" for f in alive), key=lambda name: self._order[name])
        there = [forward for forward in alive if forward.waits_at == place]
        seen = [one for forward in there for one in forward.seen]
        self._settle(place, seen)
        self._settled.add(place)
        for forward in there:
            forward.waits_at, forward.seen = None, []
            self._step(forward)

    def _step(self, forward: _Forward[Seen]) -> None:
        """Let one go on until it waits again or ends."""
        if forward.thread is None:
            forward.thread = threading.Thread(target=self._work, args=(forward,), daemon=True)
            forward.thread.start()
        else:
            forward.go_on.release()
        self._back.acquire()
        if forward.error is not None:
            raise forward.error

    def _work(self, forward: _Forward[Seen]) -> None:
        self._local.forward = forward
        try:
            forward.run()
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again where `run` was called
            forward.error = error
        forward.ended = True
        self._back.release()

"""TensorRT's nested build phases as one rising count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

from twofour.engines.protocol import ProgressCallback, Untyped
from twofour.engines.tensorrt.logger import MessageLog

TOTAL = 1000
"""Progress of a build is told in thousandths."""


@dataclass(slots=True)
class _Phase:
    steps: int
    parent: str | None
    done: int = 0
    children: set[str] = field(default_factory=set)


class PhaseTree:
    """The phases that are active now; phases nest, and a name is unique only while it is active."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report
        self._active: dict[str, _Phase] = {}
        self._highest = 0
        self._lock = threading.Lock()

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase of `steps` steps begins, inside `parent` where there is one."""
        with self._lock:
            if parent in self._active:
                self._active[parent].children.add(name)
            else:
                self._highest = 0  # a new outermost phase counts from the start
            self._active[name] = _Phase(steps=max(steps, 1), parent=parent)
            self._tell(name)

    def step(self, name: str, step: int) -> None:
        """Step `step` (from 0) of a phase is done."""
        with self._lock:
            if name in self._active:
                self._active[name].done = step + 1
                self._tell(name)

    def finish(self, name: str) -> None:
        """A phase ends, which it may do before all its steps are done."""
        with self._lock:
            phase = self._active.get(name)
            if phase is None:
                return
            phase.done = phase.steps
            self._tell(name)
            del self._active[name]
            if phase.parent in self._active:
                self._active[phase.parent].children.discard(name)

    def _tell(self, name: str) -> None:
        outermost = name
        while (parent := self._active[outermost].parent) in self._active:
            assert parent is not None
            outermost = parent
        self._highest = max(self._highest, int(self._fraction(outermost) * TOTAL))
        self._report(name, self._highest, TOTAL)

    def _fraction(self, name: str) -> float:
        phase = self._active[name]
        inner = sum(self._fraction(child) for child in phase.children if child in self._active)
        return min(1.0, (phase.done + min(inner, 1.0)) / phase.steps)


def progress_monitor(trt: ModuleType, report: ProgressCallback, log: MessageLog) -> Untyped | None:
    """A trt.IProgressMonitor that reports; None where TensorRT has none (before 10.0).

    The caller keeps the reference for the whole build. An exception of `report` does not cancel the
    build; Ctrl-C does, at the next step (a step that returns False is TensorRT's way to cancel).
    """
    if not hasattr(trt, "IProgressMonitor"):
        return None
    tree = PhaseTree(report)

    def guarded(method: Callable[..., None], *arguments: str | int | None) -> None:
        try:
            method(*arguments)
        except KeyboardInterrupt:
            log.interrupted = True
        except Exception as error:  # noqa: BLE001  # C++ calls this: an exception ends the build
            log.headline(f"progress could not be shown: {error!r}")

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]  # no types
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            guarded(tree.start, phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            guarded(tree.step, phase_name, step)
            return not log.interrupted

        def phase_finish(self, phase_name: str) -> None:
            guarded(tree.finish, phase_name)

    return Monitor()

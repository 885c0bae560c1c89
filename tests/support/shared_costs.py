"""What every run pays anew, and the tests pay once: a process of engines, torch's operators."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import gc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

import pytest

from twofour.workers import host as engine_host
from twofour.workers.host import EngineWorker
from twofour.workers.process import WorkerDiedError, WorkerProcess

_SERVICE = f"{__name__}:RenewedWorker"
_LIBRARIES = ("numpy", "onnxruntime", "polygraphy", "tensorrt", "twofour")
_FOR_ALL = pytest.MonkeyPatch()
_OF_OTHERS = ("PYTEST_", "TORCHINDUCTOR_")
"""Variables that no engine reads."""


class RenewedWorker(EngineWorker):
    """Engines in a process that serves one run after the other."""

    def renew(self, folder: str, path: list[str]) -> bool:
        """Whether this process is now like a new one with this folder and path."""
        self.close()
        os.chdir(folder)
        sys.path[:] = path
        loaded = [name for name in _LIBRARIES if name in sys.modules]
        found = {name: PathFinder.find_spec(name, path) for name in loaded}
        return all(
            spec is not None and spec.origin == sys.modules[name].__file__
            for name, spec in found.items()
        )


class LentProcess(WorkerProcess):
    """A process that is kept for the next run when it is closed, unless it died in a call."""

    idle: list[LentProcess] = []  # noqa: RUF012  # of the whole test process
    conditions: tuple[object, ...]

    def close(self) -> None:
        """Give it back."""
        well = self._ended is None and self._answered == self._number
        self.idle.append(self) if well else self.end()

    def end(self) -> None:
        """End it as any other."""
        super().close()


def lend(service: str, threads: int | None, *, path: Sequence[str]) -> WorkerProcess:
    """A process of engines that was started under the same conditions, or a new one."""
    if service != engine_host._SERVICE:
        return WorkerProcess(service, threads, path=path)
    read = {n: text for n, text in os.environ.items() if not n.startswith(_OF_OTHERS)}
    conditions = (threads, sys.executable, read)
    while LentProcess.idle:
        process = LentProcess.idle.pop()
        with contextlib.suppress(WorkerDiedError):
            if process.conditions == conditions and process.call(
                "renew",
                os.getcwd(),  # noqa: PTH109  # a text
                [*path],
            ):
                return process
        process.end()
    process = LentProcess(_SERVICE, threads, path=path)
    process.conditions = conditions
    return process


@atexit.register
def _end_all() -> None:
    for process in LentProcess.idle:
        process.end()


@functools.cache
def share_processes() -> None:
    """Runs of this process ask one process of engines, one after the other."""
    _FOR_ALL.setattr(engine_host, "WorkerProcess", lend)


@functools.cache
def share_operators() -> None:
    """torch.onnx.export reads the source of 500 operators each time: here the first time alone.

    Nor are the modules of torch looked through each time for what is garbage among them.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read = functools.cache(ONNXRegistry.from_torchlib)

    def registry(**version: int) -> ONNXRegistry:
        made: ONNXRegistry = copy.copy(read(**version))
        made.functions = {name: [*found] for name, found in made.functions.items()}
        return made

    _FOR_ALL.setattr(ONNXRegistry, "from_torchlib", staticmethod(registry))
    gc.freeze()

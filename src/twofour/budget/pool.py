"""Many calls of one kind side by side: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from twofour.engines.machine import usable_cores
from twofour.errors import BadInputError, BuildFailedError, TwofourError
from twofour.sources.source import import_extra
from twofour.workers.process import LOOKING_S, WorkerDiedError, WorkerProcess

MOST_TRIES = 3
"""Of a call whose worker ends before it answers: by then it is the call that ends them."""

Arguments = tuple[object, ...]
Done = Callable[[str, Any], None]
"""Told the key of a call and its value, or the TwofourError that it ended in: once for each."""


class LostError(BuildFailedError):
    """A call took its worker with it every time it was tried."""

    def __init__(self, endings: list[str]) -> None:
        tries = f"{len(endings)} tries" if len(endings) > 1 else "its try"
        super().__init__(f"its process ended in {tries}: {', '.join(dict.fromkeys(endings))}")


class Pool:
    """Up to `count` processes (None: one for each core) of one thread each, kept between runs.

    They are started as calls need them, and end with the `with` block. `service` is the
    `module:Class` that each makes once; its method `command` is called with the number of the try,
    from 0, and the arguments of the call.
    """

    def __init__(self, service: str, command: str, count: int | None = None) -> None:
        self._service, self._command = service, command
        self._threads = ThreadPoolExecutor(count or usable_cores(), "jobs")
        self._own = threading.local()
        self._processes: list[WorkerProcess] = []
        self._closed = False
        self._lock = threading.Lock()
        """Held while processes come and go, so that none is started after the end."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        """End every process, in the middle of a call too."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._processes:  # side by side: each may take a second to end
            with ThreadPoolExecutor(len(self._processes)) as closing:
                list(closing.map(WorkerProcess.close, self._processes))

    def run(self, calls: Mapping[str, Arguments], done: Done) -> None:
        """Make all calls; `done` is called in this thread, in the order in which they end.

        A call whose worker dies is tried again in a new one, at most MOST_TRIES times, and then
        ends in a LostError.
        """
        keys = {self._threads.submit(self._tried, of): key for key, of in calls.items()}
        for future in as_completed(keys):
            done(keys[future], future.result())

    def _tried(self, arguments: Arguments) -> object:
        endings: list[str] = []
        while len(endings) < MOST_TRIES:
            process = self._process()
            try:
                return process.call(self._command, len(endings), *arguments)
            except WorkerDiedError as error:
                endings.append(error.ending)
                self._drop(process)
            except TwofourError as error:
                return error
        return LostError(endings)

    def _process(self) -> WorkerProcess:
        """The one of this thread."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool has ended")
            if getattr(self._own, "process", None) is None:
                self._own.process = WorkerProcess(self._service, 1)
                self._processes.append(self._own.process)
            found: WorkerProcess = self._own.process
            return found

    def _drop(self, process: WorkerProcess) -> None:
        with self._lock:
            if self._closed:
                return
            self._processes.remove(process)
        self._own.process = None
        process.close()


class RayCluster:
    """What a Pool does, on the Ray cluster at `address` ("auto": a local one), whose nodes may go.

    The nodes need this version of twofour, and see the same files at the same paths. Raises
    MissingToolError without ray, and BadInputError where there is no cluster.
    """

    def __init__(self, service: str, command: str, address: str) -> None:
        self._called = (service, command)
        self._address = address
        self._ray: Any = import_extra("ray", "--ray")

    def __enter__(self) -> RayCluster:
        try:
            self._ray.init(
                address=self._address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise BadInputError(
                f"--ray {self._address}: {str(error).splitlines()[0]}",
                hint="start one with `ray start --head`, and give its address or auto",
            ) from error
        work = _work([*sys.path], str(Path.cwd()))
        self._task = self._ray.remote(num_cpus=1, max_retries=0)(work)
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def run(self, calls: Mapping[str, Arguments], done: Done) -> None:
        """Make all calls as tasks of one core each; `done` hears of every key once.

        A call whose worker or node is lost goes to another, at most MOST_TRIES times, and then ends
        in a LostError.
        """
        endings: dict[str, list[str]] = {key: [] for key in calls}
        left = {self._task.remote(*self._called, 0, *calls[key]): key for key in calls}
        while left:
            # looks up now and then, so that Ctrl-C is heard whatever Ray waits for
            ready, _ = self._ray.wait(list(left), num_returns=1, timeout=LOOKING_S)
            for reference in ready:
                key = left.pop(reference)
                tries = endings[key]
                try:
                    done(key, self._ray.get(reference))
                except self._ray.exceptions.RayTaskError as error:
                    raise BadInputError(
                        f"a node of the Ray cluster {self._address} cannot do the work: "
                        f"{str(error.cause or error).splitlines()[-1]}",
                        hint="every node needs this version of twofour and the same files at the "
                        "same paths",
                    ) from error
                except self._ray.exceptions.RayError as error:  # a worker or a node is gone
                    tries.append(type(error).__name__)
                    if len(tries) < MOST_TRIES:
                        left[self._task.remote(*self._called, len(tries), *calls[key])] = key
                    else:
                        done(key, LostError(tries))


def _work(path: list[str], folder: str) -> Callable[..., object]:
    """The function that runs on a node; without a module of ours, so that it is sent whole."""

    def work(service: str, command: str, *arguments: object) -> object:
        import importlib
        import os
        import sys

        os.chdir(folder)
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        from twofour.engines.protocol import no_progress
        from twofour.workers.process import outcome

        module, _, kind = service.partition(":")
        made = getattr(importlib.import_module(module), kind)(no_progress)
        return outcome(getattr(made, command), arguments)

    return work

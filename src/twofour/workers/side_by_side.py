"""Calls made side by side: by processes of this machine (`Pool`), or as tasks on a Ray cluster."""

from __future__ import annotations

import logging
import math
import os
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

from twofour.engines.machine import usable_cores
from twofour.errors import BadInputError, BuildFailedError, MissingToolError, TwofourError
from twofour.packages import how_to_install
from twofour.workers.host import EngineHost
from twofour.workers.process import LOOKING_S, WorkerDiedError, silence_limit_s

MOST_TRIES = 3
"""Tries of a call whose worker ends before it answers: by then it is the call that ends them."""

Arguments = tuple[object, ...]
Done = Callable[[str, Any], None]
"""Called once for each call, with its key and its value, or the TwofourError that it ended in."""
Node = Mapping[str, Any]  # as `ray.nodes()` describes it


class NodeUnfitError(BadInputError):
    """A node lacks what the work needs: this version of twofour, or files."""


class WorkerLostError(BuildFailedError):
    """Every worker that tried a call ended."""

    def __init__(self, endings: list[str]) -> None:
        tries = f"{len(endings)} tries" if len(endings) > 1 else "its try"
        super().__init__(f"its process ended in {tries}: {', '.join(dict.fromkeys(endings))}")


class Pool(AbstractContextManager["Pool"]):
    """Up to `number` processes (None: one for each core) of one thread each, kept between runs.

    They are started as calls need them, and end with the `with` block. `service` is the
    `module:Class` that each makes once; its method `command` is called with the number of the try,
    from 0, and the arguments of the call.
    """

    def __init__(self, service: str, command: str, number: int | None = None) -> None:
        self._command = command
        self._hosts = [EngineHost(1, service=service) for _ in range(number or usable_cores())]
        self._free = queue.SimpleQueue[EngineHost]()
        for host in self._hosts:
            self._free.put(host)
        self._threads = ThreadPoolExecutor(len(self._hosts), "jobs")
        self._closed = False

    def __exit__(self, *_: object) -> None:
        """End every process, in the middle of a call too."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        # side by side: each may take a second to end
        with ThreadPoolExecutor(len(self._hosts)) as closing:
            list(closing.map(EngineHost.close, self._hosts))

    def run(self, calls: Mapping[str, Arguments], done: Done) -> None:
        """Make all calls; `done` is called in this thread, in the order in which they end.

        A call whose worker dies is tried again in a new one, at most MOST_TRIES times, and then
        ends in a WorkerLostError.
        """
        keys = {self._threads.submit(self._tried, of): key for key, of in calls.items()}
        for future in as_completed(keys):
            done(keys[future], future.result())

    def _tried(self, arguments: Arguments) -> object:
        endings: list[str] = []
        host = self._free.get()
        try:
            while len(endings) < MOST_TRIES and not self._closed:
                try:
                    return host.call(self._command, len(endings), *arguments)
                except WorkerDiedError as error:
                    endings.append(error.ending)
        except TwofourError as error:
            return error
        finally:
            self._free.put(host)
        return WorkerLostError(endings)


_ENDS_ONE_CALL = {"WorkerCrashedError", "OutOfMemoryError"}
"""Errors of Ray where a call may have ended its process; all others are of the cluster."""


class RayCluster:
    """What a Pool does, on the Ray cluster at `address` ("auto": a local one), whose nodes may go.

    The nodes need this version of twofour. Raises MissingToolError without ray, and on entry
    BadInputError where there is no cluster.
    """

    def __init__(self, service: str, command: str, address: str) -> None:
        self._called = (service, command)
        self._address = address
        try:
            self._ray: Any = import_module("ray")
        except ImportError as error:
            message = f"--ray needs the package ray: {error}"
            raise MissingToolError(message, hint=how_to_install("ray")) from error

    def __enter__(self) -> RayCluster:
        try:
            self._ray.init(
                address=None if self._address == "auto" else self._address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise self._refused(error) from error
        work = _work([*sys.path], str(Path.cwd()), silence_limit_s())
        task = self._ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")
        self._task = task(work)
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def nodes(self) -> list[Node]:
        """The nodes that live and have a core."""
        return [n for n in self._ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]

    def free_nodes(self, nodes: Iterable[Node], within_s: float) -> list[Node]:
        """Those of the nodes that begin a task within so many seconds."""
        nothing = self._ray.remote(num_cpus=1, max_retries=0)(lambda: None)
        asked = {self._on(node, nothing).remote(): node for node in nodes}
        free, busy = self._ray.wait([*asked], num_returns=len(asked), timeout=within_s)
        for task in busy:
            self._ray.cancel(task)
        return [asked[task] for task in free]

    def share(self, value: object) -> object:
        """A reference to the value, which is sent once to each node that gets it as an argument."""
        return self._ray.put(value)

    def run(
        self,
        calls: Mapping[str, Arguments],
        done: Done,
        pinned: Mapping[str, Sequence[Node]] | None = None,
    ) -> None:
        """Make all calls as tasks of one core each; `done` is called once for each key.

        A call whose worker or node is lost is tried MOST_TRIES times. It ends in a WorkerLostError
        if its process ended each time; else, or with no node left, this raises BuildFailedError.
        One that gives no sign of life for `silence_limit_s` counts as lost.
        A `pinned` call is tried once on each of its nodes, with a GPU, and ends in a
        WorkerLostError if all of them are lost.
        """
        self._had_nodes = bool(self.nodes())
        endings = {key: list[str]() for key in calls}
        left: dict[Any, str] = {}
        heard_s: dict[Any, float] = {}

        def begin(key: str) -> None:
            number = len(endings[key])
            nodes = [None] * MOST_TRIES if pinned is None else pinned[key]
            if number == len(nodes):
                done(key, self._given_up(endings[key], is_pinned=pinned is not None))
                return
            task = self._on(nodes[number], self._task)
            left[task.remote(*self._called, number, *calls[key])] = key

        for key in calls:
            begin(key)
        while left:
            for reference, ending in self._lost(left, heard_s, done).items():
                key = left.pop(reference)
                endings[key].append(ending)
                begin(key)

    def _lost(self, left: dict[Any, str], heard_s: dict[Any, float], done: Done) -> dict[Any, str]:
        """Hear tasks that have something to say; those that are lost, and why."""
        # looks up now and then, so that Ctrl-C is heard whatever Ray waits for
        ready, _ = self._ray.wait(list(left), num_returns=1, timeout=LOOKING_S)
        if self._had_nodes and not ready and not self.nodes():
            raise self._gone("no node is left")
        lost: dict[Any, str] = {}
        for reference in ready:
            try:
                value = self._answer(reference)
            except self._ray.exceptions.RayError as error:  # a worker or a node is gone
                lost[reference] = type(error).__name__
                continue
            heard_s[reference] = time.monotonic()
            if value is not None:
                done(left.pop(reference), value)
        return _silent(left, heard_s) | lost

    def _answer(self, reference: Any) -> object:  # noqa: ANN401  # Ray has no types
        """What a call says next: None is a sign of life; raises RayError where nothing comes."""
        try:
            return self._ray.get(next(reference))
        except self._ray.exceptions.RayTaskError as error:
            why = str(error.cause or error).splitlines()[-1]
            return NodeUnfitError(
                f"a node of the Ray cluster {self._address} cannot do the work: {why}",
                hint="every node needs this version of twofour",
            )

    def _given_up(self, tries: list[str], *, is_pinned: bool) -> WorkerLostError:
        """The end of a call that was lost in each try; raises where that is the cluster's fault."""
        if is_pinned or _ENDS_ONE_CALL.issuperset(tries):
            return WorkerLostError(tries)
        raise self._gone(f"nodes were lost: {', '.join(tries)}")

    def _on(self, node: Node | None, task: Any) -> Any:  # noqa: ANN401  # Ray has no types
        """The task on this node and no other, with a GPU; None: on any."""
        if node is None:
            return task
        strategies: Any = import_module("ray.util.scheduling_strategies")
        here = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        return task.options(scheduling_strategy=here, num_gpus=1)

    def _refused(self, error: Exception) -> BadInputError:
        return BadInputError(
            f"--ray {self._address}: {str(error).splitlines()[0]}",
            hint="start a cluster with `ray start --head`, and give its address, or auto",
        )

    def _gone(self, what: str) -> BuildFailedError:
        hint = "run the command again once the cluster runs"
        return BuildFailedError(f"--ray {self._address}: {what}", hint=hint)


def _silent(left: Iterable[Any], heard_s: Mapping[Any, float]) -> dict[Any, str]:
    """Tasks that began and then gave no sign of life for too long, with these words for it."""
    limit_s = silence_limit_s()
    since_s = time.monotonic() - limit_s
    silent = [task for task in left if heard_s.get(task, math.inf) < since_s]
    return dict.fromkeys(silent, f"no sign of life for {limit_s:.0f} s")


def _work(path: list[str], folder: str, limit_s: float) -> Callable[..., Iterator[object]]:
    """The function that runs on a node; without a module of ours, so that it is sent whole.

    It gives None as a sign of life at once and every few seconds, and the value at last. The
    processes that it starts have the driver's limit of silence.
    """

    def work(service: str, command: str, *arguments: object) -> Iterator[object]:
        import contextlib
        import pkgutil
        import signal
        import sys
        from concurrent.futures import ThreadPoolExecutor, wait

        # Ray ends a worker by SystemExit, which user code and libraries would report as an error
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        with contextlib.suppress(OSError):  # the driver's folder, where the node sees it
            os.chdir(folder)
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        from twofour.engines.protocol import no_progress
        from twofour.workers.process import LIMIT_VARIABLE, LOOKING_S, run_command

        os.environ[LIMIT_VARIABLE] = str(limit_s)
        made = pkgutil.resolve_name(service)(no_progress)
        with ThreadPoolExecutor(1) as thread:
            value = thread.submit(run_command, getattr(made, command), arguments)
            yield None
            while not wait([value], min(LOOKING_S, limit_s / 3)).done:
                yield None
        yield value.result()

    return work

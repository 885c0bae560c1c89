"""Jobs on a Ray cluster whose nodes may go away."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twofour.errors import BadInputError
from twofour.pipeline.deadlines import LOOKING_S, Patience
from twofour.pipeline.jobs.job import MOST_TRIES, Done, Job, LostError, Service, packed
from twofour.pipeline.sources.source import import_extra

_LOST = (
    "WorkerCrashedError",
    "NodeDiedError",
    "LocalRayletDiedError",
    "ObjectLostError",
    "OwnerDiedError",
    "OutOfMemoryError",
    "RaySystemError",
    "TaskUnschedulableError",
)
"""Of ray.exceptions: what says that a worker or a node is gone, not that the job is wrong. They
differ from version to version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lost:
    """A try that gave nothing."""

    ending: str


class RayCluster:
    """The cluster at `address` ("auto": a local one), connected for the `with` block.

    The nodes need this version of twofour, and see the same files at the same paths. Raises
    MissingToolError without ray, and BadInputError where there is no cluster.
    """

    def __init__(self, service: Service, address: str) -> None:
        self._service = service
        self._address = address
        self._ray: Any = import_extra("ray", "ray", "--ray")
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RayCluster:
        self._stack.enter_context(_connected(self._ray, self._address))
        work = _work([*sys.path], str(Path.cwd()))
        self._task = self._ray.remote(num_cpus=1, max_retries=0)(work)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, jobs: Sequence[Job], done: Done) -> None:
        """Do all jobs as tasks of one core each; `done` hears of every key once.

        A job whose worker or node is lost goes to another, at most MOST_TRIES times, and then ends
        in a LostError; so do all that are left where no answer comes for far longer than before.
        """
        endings: dict[str, list[str]] = {job.key: [] for job in jobs}
        left = {self._begun(job, 0): job for job in jobs}
        patience = Patience()
        while left:
            # looks up now and then, so that Ctrl-C is heard whatever Ray waits for
            ready, _ = self._ray.wait(list(left), num_returns=1, timeout=LOOKING_S)
            if not ready and not patience.is_over():
                continue
            if ready:
                patience.answered()
            for reference in ready or list(left):
                job = left.pop(reference)
                value = self._value(reference) if ready else self._given_up(reference, patience)
                if isinstance(value, _Lost):
                    tries = endings[job.key]
                    tries.append(value.ending)
                    if len(tries) < MOST_TRIES:
                        left[self._begun(job, len(tries))] = job
                        continue
                    value = LostError(job.key, tuple(tries))
                done(job.key, value)

    def _value(self, reference: Any) -> object:  # noqa: ANN401  # a reference of Ray's
        try:
            return self._answer(reference)
        except _lost(self._ray) as error:
            return _Lost(ending=type(error).__name__)

    def _given_up(self, reference: Any, patience: Patience) -> _Lost:  # noqa: ANN401
        with contextlib.suppress(Exception):  # it may have ended meanwhile, in whatever way
            self._ray.cancel(reference, force=True)
        return _Lost(ending=f"no answer for {patience.limit_s:.0f} s")

    def _begun(self, job: Job, number: int) -> Any:  # noqa: ANN401  # a reference of Ray's
        return self._task.remote(packed(self._service, job, number))

    def _answer(self, reference: Any) -> object:  # noqa: ANN401
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise BadInputError(
                f"a node of the Ray cluster {self._address} cannot do the work: "
                f"{str(error.cause or error).splitlines()[-1]}",
                hint="every node needs this version of twofour and the same files at the same "
                "paths",
            ) from error


def _lost(ray: Any) -> tuple[type[Exception], ...]:  # noqa: ANN401  # the package
    found = (getattr(ray.exceptions, name, None) for name in _LOST)
    return tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))


def _work(path: list[str], folder: str) -> Callable[[bytes], object]:
    """The function that runs on a node; without a module of ours, so that it is sent whole."""

    def work(packed: bytes) -> object:
        import os
        import sys

        os.chdir(folder)
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        from twofour.pipeline.jobs.job import unpacked

        return unpacked(packed)

    return work


@contextlib.contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:  # noqa: ANN401  # the package
    """A connection of our own, unless this process has one."""
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BadInputError(
            f"--ray {address}: {str(error).splitlines()[0]}",
            hint="start one with `ray start --head`, and give its address or auto",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()

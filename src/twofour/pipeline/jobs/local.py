"""Jobs side by side in worker processes of this machine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from twofour.engines.machine import usable_cores
from twofour.errors import TwofourError
from twofour.pipeline.jobs.job import MOST_TRIES, Done, Job, LostError, Service
from twofour.pipeline.workers import WorkerDiedError, WorkerProcess


def run_side_by_side(
    service: Service, jobs: Sequence[Job], done: Done, *, count: int | None = None
) -> None:
    """Do all jobs in `count` processes (None: one for each core) of one thread each.

    `done` is called in this thread, in the order in which jobs end. A job whose worker dies is
    tried again in a new one, at most MOST_TRIES times, and then ends in a LostError.
    """
    wanted = min(count or usable_cores(), len(jobs))
    waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    with ExitStack() as stack:
        for _ in range(wanted):
            worker = _Worker(service)
            stack.callback(worker.close)  # also where this thread is interrupted
            waiting.put(None)
            threading.Thread(
                target=worker.serve, args=(waiting, answers), daemon=True, name="jobs"
            ).start()
        for _ in jobs:
            key, value = answers.get()
            if isinstance(value, BaseException) and not isinstance(value, TwofourError):
                raise value
            done(key, value)


class _Worker:
    """One thread with a process of its own, and another process after a death."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._process: WorkerProcess | None = None
        self._closed = False

    def serve(
        self,
        waiting: queue.SimpleQueue[Job | None],
        answers: queue.SimpleQueue[tuple[str, object]],
    ) -> None:
        """Do jobs until none is left; the process ends with this thread."""
        while (job := waiting.get()) is not None and not self._closed:
            try:
                value = self._tried(job)
            except BaseException as error:  # noqa: BLE001  # raised again where it is waited for
                value = error
            answers.put((job.key, value))
        self.close()

    def close(self) -> None:
        """End the process, in the middle of a job too."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _tried(self, job: Job) -> object:
        endings: list[str] = []
        while len(endings) < MOST_TRIES and not self._closed:
            if self._process is None:
                self._process = WorkerProcess(self._service.name, 1)
            try:
                return self._process.call(self._service.command, len(endings), *job.arguments)
            except WorkerDiedError as error:
                endings.append(error.ending)
                if self._process is not None:
                    self._process.close()
                    self._process = None
            except TwofourError as error:
                return error
        return LostError(job.key, tuple(endings))

"""Jobs side by side in worker processes of this machine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from twofour.engines.machine import usable_cores
from twofour.errors import TwofourError
from twofour.pipeline.jobs.job import MOST_TRIES, Done, Job, LostError, Service
from twofour.pipeline.workers import WorkerDiedError, WorkerProcess

_Waiting: TypeAlias = "queue.SimpleQueue[Job | None]"
_Answers: TypeAlias = "queue.SimpleQueue[tuple[str, object]]"


class Processes:
    """Up to `count` processes (None: one for each core) of one thread each, kept between runs.

    They are started as jobs need them, and end with the `with` block.
    """

    def __init__(self, service: Service, count: int | None = None) -> None:
        self._service = service
        self._count = count or usable_cores()
        self._workers: list[_Worker] = []
        self._waiting: _Waiting = queue.SimpleQueue()
        self._answers: _Answers = queue.SimpleQueue()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for _each in self._workers:
            self._waiting.put(None)
        if self._workers:  # side by side: each may take a second to end
            with ThreadPoolExecutor(len(self._workers)) as pool:
                list(pool.map(_Worker.close, self._workers))

    def run(self, jobs: Sequence[Job], done: Done) -> None:
        """Do all jobs; `done` is called in this thread, in the order in which they end.

        A job whose worker dies is tried again in a new one, at most MOST_TRIES times, and then
        ends in a LostError.
        """
        for job in jobs:
            self._waiting.put(job)
        while len(self._workers) < min(self._count, len(jobs)):
            worker = _Worker(self._service)
            self._workers.append(worker)
            threading.Thread(
                target=worker.serve, args=(self._waiting, self._answers), daemon=True, name="jobs"
            ).start()
        for _ in jobs:
            key, value = self._answers.get()
            if isinstance(value, BaseException) and not isinstance(value, TwofourError):
                raise value
            done(key, value)


class _Worker:
    """One thread with a process of its own, and another process after a death."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._process: WorkerProcess | None = None
        self._closed = False
        self._lock = threading.Lock()
        """Held while the process comes and goes, so that none is started after `close`."""

    def serve(self, waiting: _Waiting, answers: _Answers) -> None:
        """Do jobs until it is told to end; its process ends with this thread."""
        while (job := waiting.get()) is not None and not self._closed:
            try:
                value = self._tried(job)
            except BaseException as error:  # noqa: BLE001  # raised again where it is waited for
                value = error
            answers.put((job.key, value))
        self.close()

    def close(self) -> None:
        """End the process, in the middle of a job too."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _opened(self) -> WorkerProcess | None:
        with self._lock:
            if self._process is None and not self._closed:
                self._process = WorkerProcess(self._service.name, 1)
            return self._process

    def _dropped(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _tried(self, job: Job) -> object:
        endings: list[str] = []
        while len(endings) < MOST_TRIES and (process := self._opened()) is not None:
            try:
                return process.call(self._service.command, len(endings), *job.arguments)
            except WorkerDiedError as error:
                endings.append(error.ending)
                self._dropped()
            except TwofourError as error:
                return error
        return LostError(job.key, tuple(endings))

"""Measured losses of sets of layers: one model for each set, run by workers side by side.

`study` asks for sets and reads `found`. A measurement is kept in the folder and made once. Workers
are processes of this machine (`Pool`) or tasks on a Ray cluster (`RayCluster`).
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from twofour.engines.machine import usable_cores
from twofour.engines.onnxruntime.session import LEVELS, OrtSession
from twofour.engines.protocol import ProgressCallback
from twofour.errors import BadInputError, BuildFailedError, TwofourError
from twofour.graph.mixture import Mixture
from twofour.inputs.fits import save_arrays, stored_arrays
from twofour.records.options import SideBySide
from twofour.records.run import Measured, Measurement
from twofour.sources.source import import_extra, state_of
from twofour.sources.user_code import files_read, run_metric
from twofour.store import read_sealed, sealed, sha256_bytes, write_record
from twofour.workers.process import LOOKING_S, WorkerDiedError, WorkerProcess, may_be_temporary

MEASURED = "measured"
"""Folder of the kept measurements."""
MEASURED_ON = "stages/measured-on.npz"
"""The inputs of every run of the model: `<number of the run>:<input>`."""
REFERENCE = "stages/outputs.npz"
"""Outputs of the dense model."""
SERVICE = "twofour.budget.measuring:Measurer", "measure"
MOST_TRIES = 3
"""Tries of a call whose worker ends before it answers: by then it is the call that ends them."""

Arrays = Mapping[str, npt.NDArray[np.generic]]
Arguments = tuple[object, ...]
Done = Callable[[str, Any], None]
"""Called once for each call, with its key and its value, or the TwofourError that it ended in."""
Places = tuple[int, ...]
"""Constants of a set of layers, as `Mixture` counts them; () is the dense model."""


class MissingFilesError(BadInputError):
    """The files of the study are missing on another machine."""


class WorkerLostError(BuildFailedError):
    """Every worker that tried a call ended."""

    def __init__(self, endings: list[str]) -> None:
        tries = f"{len(endings)} tries" if len(endings) > 1 else "its try"
        super().__init__(f"its process ended in {tries}: {', '.join(dict.fromkeys(endings))}")


@dataclass(slots=True, kw_only=True)
class SetMeasurements:
    """Measurements of models that are dense.onnx with some layers of sparse.onnx."""

    folder: Path
    """Contains both files, the inputs, and the measurements that are kept."""
    metric: str | None
    seed: int
    content: str
    """sha256 over all that a measurement depends on, besides the layers."""
    workers: Pool | RayCluster
    step: Callable[[int, int], None]
    """Called with how many of how many measurements are made."""
    found: dict[Places, Measured] = field(default_factory=dict)
    watched: dict[str, str] = field(default_factory=dict)
    """Data files that the metric read -> their state then."""
    made: int = 0
    wanted: int = 0
    """Measurements that were not in the folder."""
    is_lasting: bool = True
    """False when a measurement failed for a passing reason, such as lack of memory."""

    def measure(self, sets: Iterable[Places]) -> None:
        """Put all of these into `found`; those that are in the folder are not made again.

        A measurement that fails is there with its error, but raises for the dense model (a metric
        that cannot be called, an engine that does not run it) and where a node lacks the files.
        """
        left: dict[str, Places] = {}
        for places in dict.fromkeys(sets):
            key = sha256_bytes(self.content.encode(), ",".join(map(str, places)).encode())
            if places not in self.found and not self._read_back(key, places):
                left[key] = places
        self.wanted += len(left)

        def done(key: str, value: object) -> None:
            self.made += 1
            self._keep(left[key], key, value)
            self.step(self.made, self.wanted)

        calls = {k: (str(self.folder), p, self.metric, self.seed) for k, p in left.items()}
        if calls:
            self.workers.run(calls, done)

    def _file(self, key: str) -> Path:
        return self.folder / MEASURED / f"{key[:32]}.json"

    def _read_back(self, key: str, places: Places) -> bool:
        """Whether it is in the folder, and the files that the metric read are as they were."""
        try:
            kept = read_sealed(Measurement, self._file(key))
        except BadInputError:
            return False
        if kept.key != key or any(state_of(Path(n)) != s for n, s in kept.watched.items()):
            return False
        if not places and not (self.folder / REFERENCE).is_file():
            return False
        self.found[places] = kept.measured
        self.watched.update(kept.watched)
        return True

    def _keep(self, places: Places, key: str, value: object) -> None:
        """A measurement is written down before it counts; one that failed is not."""
        if isinstance(value, TwofourError):
            if not places or isinstance(value, MissingFilesError):
                raise value
            lost = isinstance(value, WorkerLostError)
            self.is_lasting &= not (lost or may_be_temporary(value.message))
            self.found[places] = Measured(error=value.message)
            return
        assert isinstance(value, tuple)
        measured, watched = value
        kept = sealed(Measurement(key=key, measured=measured, watched=watched))
        write_record(self._file(key), kept)
        self.found[places] = measured
        self.watched.update(watched)


# --- in a worker ----------------------------------------------------------------------------------


class Measurer:
    """Does the measurements of one process; the graphs of a folder are read once."""

    def __init__(self, report: ProgressCallback) -> None:
        """Every service gets the callback; a measurement is one step."""

    def measure(
        self, number: int, folder: str, places: Places, metric: str | None, seed: int
    ) -> tuple[Measured, dict[str, str]]:
        """Run one model in one thread: the same bits beside however many others.

        The `number` of the try lowers the optimization level. The dense model leaves REFERENCE. The
        second value is the state of each data file that the metric read. Raises MissingFilesError
        where a file is missing, BadInputError for a metric that fails, and what OrtSession raises.
        """
        path = Path(folder)
        base, other = path / "dense.onnx", path / "sparse.onnx"
        code = Path((metric or "").rpartition(":")[0])
        for file in (base, *((code,) if code.suffix == ".py" else ())):
            if not file.is_file():
                raise MissingFilesError(
                    f"{file} is missing on {platform.node()}",
                    hint="every node of a Ray cluster needs the same files at the same paths: "
                    "share the folder of the run and that of the metric",
                )
        target = path / f".mixed-{uuid4().hex}.onnx.part"
        try:
            _mixture(base, other).write(places, target)
            session = OrtSession(target, threads=1, level=LEVELS[min(number, len(LEVELS) - 1)])
        except BuildFailedError as error:  # without the name of a file that nobody knows
            raise type(error)(error.message.replace(str(target), "the model")) from error
        finally:
            target.unlink(missing_ok=True)
        with session, files_read() as read:
            outputs = _outputs(session, stored_arrays(path / MEASURED_ON))
            metrics: dict[str, float] = {}
            if metric is not None:
                names = [tensor.name for tensor in session.inputs]
                metrics = run_metric(metric, names, session.outputs, seed=seed)
        if not places:
            save_arrays(path / REFERENCE, outputs)
        moved = output_change(stored_arrays(path / REFERENCE), outputs)
        watched = {str(file): state_of(file) for file in read if not file.is_relative_to(path)}
        return Measured(outputs=moved, metrics=metrics), watched


def output_change(dense: Arrays, pruned: Arrays) -> float | None:
    """How far the outputs move, as Measured says it; None where no output is of floats.

    Raises BadInputError where a value is NaN or infinite.
    """
    moved = []
    for name, array in dense.items():
        if (array.dtype.kind == "f" or array.dtype.name == "bfloat16") and array.size:
            before, after = np.asarray(array, np.float64), np.asarray(pruned[name], np.float64)
            if not (np.isfinite(before).all() and np.isfinite(after).all()):
                raise BadInputError("an output has values that are NaN or infinite")
            whole = float(np.sum(before**2)) or 1.0  # an output of zeros: the change itself
            moved.append(float(np.sum((before - after) ** 2)) / whole)
    return float(np.mean(moved)) if moved else None


def _outputs(session: OrtSession, inputs: Arrays) -> dict[str, npt.NDArray[np.generic]]:
    """Outputs of every run, its number before the name."""
    batches: dict[str, dict[str, npt.NDArray[np.generic]]] = defaultdict(dict)
    for key, array in inputs.items():
        number, _, name = key.partition(":")
        batches[number][name] = array
    return {
        f"{number}:{name}": array
        for number, batch in batches.items()
        for name, array in session.outputs(batch).items()
    }


@lru_cache(maxsize=1)
def _mixture(base: Path, other: Path) -> Mixture:
    """The two models of a folder; one folder at a time is worked on."""
    return Mixture(base, other)


# --- where workers run ----------------------------------------------------------------------------


def open_workers(how: SideBySide) -> Pool | RayCluster:
    """Workers that make measurements within their `with` block; a wrong address is refused now."""
    return Pool(*SERVICE, how.jobs) if how.ray is None else RayCluster(*SERVICE, how.ray)


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
        ends in a WorkerLostError.
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
                with self._lock:
                    if self._closed:
                        continue
                    self._processes.remove(process)
                self._own.process = None
                process.close()
            except TwofourError as error:
                return error
        return WorkerLostError(endings)

    def _process(self) -> WorkerProcess:
        """The process of this thread, started where it has none."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool has ended")
            if getattr(self._own, "process", None) is None:
                self._own.process = WorkerProcess(self._service, 1)
                self._processes.append(self._own.process)
            found: WorkerProcess = self._own.process
            return found


_ENDS_ONE_CALL = {"WorkerCrashedError", "OutOfMemoryError"}
"""Errors of Ray where a call may have ended its process; all others are of the cluster."""
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes of a client of gRPC (RFC 9113, 3.4): a server answers with settings, type 4."""


class RayCluster:
    """What a Pool does, on the Ray cluster at `address` ("auto": a local one), whose nodes may go.

    The nodes need this version of twofour, and see the same files at the same paths. Raises
    MissingToolError without ray, and BadInputError where there is no cluster.
    """

    def __init__(self, service: str, command: str, address: str) -> None:
        self._called = (service, command)
        self._address = address
        self._ray: Any = import_extra("ray", "--ray")
        try:
            _find_server(address)
        except OSError as error:
            raise self._refused(error) from error

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
        work = _work([*sys.path], str(Path.cwd()))
        self._task = self._ray.remote(num_cpus=1, max_retries=0)(work)
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def run(self, calls: Mapping[str, Arguments], done: Done) -> None:
        """Make all calls as tasks of one core each; `done` is called once for each key.

        A call whose worker or node is lost is tried MOST_TRIES times. It ends in a WorkerLostError
        if its process ended each time; else, or with no node left, this raises BuildFailedError.
        """
        had_nodes = self._has_nodes()
        endings: dict[str, list[str]] = {key: [] for key in calls}
        left = {self._task.remote(*self._called, 0, *calls[key]): key for key in calls}
        while left:
            # looks up now and then, so that Ctrl-C is heard whatever Ray waits for
            ready, _ = self._ray.wait(list(left), num_returns=1, timeout=LOOKING_S)
            if had_nodes and not ready and not self._has_nodes():
                raise self._gone("no node is left")
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
                    elif _ENDS_ONE_CALL.issuperset(tries):
                        done(key, WorkerLostError(tries))
                    else:
                        raise self._gone(f"nodes were lost: {', '.join(tries)}") from error

    def _has_nodes(self) -> bool:
        return any(n["Alive"] and n["Resources"].get("CPU") for n in self._ray.nodes())

    def _refused(self, error: Exception) -> BadInputError:
        return BadInputError(
            f"--ray {self._address}: {str(error).splitlines()[0]}",
            hint="start a cluster with `ray start --head`, and give its address, or auto",
        )

    def _gone(self, what: str) -> BuildFailedError:
        hint = "run the same command again once the cluster runs: finished measurements are kept"
        return BuildFailedError(f"--ray {self._address}: {what}", hint=hint)


def _find_server(address: str) -> None:
    """Raise ConnectionError where no server of gRPC is; Ray alone would try for over a minute."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():  # auto, local, or refused by Ray at once
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5) as server:
            server.sendall(_HTTP2)
            if "RAY_USE_TLS" not in os.environ and server.recv(4)[3:] != b"\4":
                raise OSError("what answers is no Ray cluster")
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"Could not find any running Ray cluster there: {error}") from error


def _work(path: list[str], folder: str) -> Callable[..., object]:
    """The function that runs on a node; without a module of ours, so that it is sent whole."""

    def work(service: str, command: str, *arguments: object) -> object:
        import importlib
        import os
        import signal
        import sys

        # Ray ends a worker by SystemExit, which user code and libraries would report as an error
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        os.chdir(folder)
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        from twofour.engines.protocol import no_progress
        from twofour.workers.process import run_command

        module, _, kind = service.partition(":")
        made = getattr(importlib.import_module(module), kind)(no_progress)
        return run_command(getattr(made, command), arguments)

    return work

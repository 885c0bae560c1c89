"""Measured losses of sets of layers: one model for each set, run by workers side by side.

`study` asks for sets and reads `measurements`. Workers are processes of this machine (`Pool`) or
tasks on a Ray cluster (`RayCluster`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np

from twofour.engines.onnxruntime.session import LEVELS, OrtSession
from twofour.engines.protocol import ProgressCallback, no_progress
from twofour.errors import BadInputError, TwofourError
from twofour.graph.mixture import Mixture
from twofour.inputs.fits import Arrays, is_float, run_batches, save_arrays, stored_arrays
from twofour.records.options import SideBySide
from twofour.records.run import Measured
from twofour.sources.user_code import run_metric
from twofour.workers.host import Session, Sessions
from twofour.workers.process import may_be_temporary, run_command
from twofour.workers.side_by_side import Done, NodeUnfitError, Pool, RayCluster

MEASURED_ON = "stages/measured-on.npz"
"""The inputs of every run of the model: `<number of the run>:<input>`."""
REFERENCE = "stages/outputs.npz"
"""Outputs of the dense model."""
SERVICE = "twofour.budget.measuring:Measurer", "measure"

Places = tuple[int, ...]
"""Constants of a set of layers, as `Mixture` counts them; () is the dense model."""
Load: TypeAlias = "Callable[[Path], AbstractContextManager[OrtSession | Session]]"
Workers: TypeAlias = "Pool | RayCluster | OneAfterAnother"


@dataclass(slots=True, kw_only=True)
class SetMeasurements:
    """Measurements of models that are dense.onnx with some layers of sparse.onnx."""

    folder: Path
    """Contains both files and the inputs."""
    metric: str | None
    seed: int
    workers: Workers
    step: Callable[[int, int], None]
    """Called with how many of how many measurements are made."""
    measurements: dict[Places, Measured] = field(default_factory=dict)
    is_lasting: bool = True
    """False when a measurement failed for a passing reason, such as lack of memory."""

    def measure(self, sets: Iterable[Places]) -> None:
        """Put all of these into `measurements`; those that are there are not made again.

        A measurement that fails is there with its error, but raises for the dense model (a metric
        that cannot be called, an engine that does not run it) and where a node lacks the files.
        """
        left = {str(places): places for places in sets if places not in self.measurements}
        total = len(self.measurements) + len(left)

        def done(key: str, value: object) -> None:
            self.measurements[left[key]] = self._measured(left[key], value)
            self.step(len(self.measurements), total)

        folder = str(self.folder)
        calls = {key: (folder, places, self.metric, self.seed) for key, places in left.items()}
        self.workers.run(calls, done)

    def _measured(self, places: Places, value: object) -> Measured:
        if not isinstance(value, TwofourError):
            assert isinstance(value, Measured)
            return value
        if not places or isinstance(value, NodeUnfitError):
            raise value
        if may_be_temporary(value.message):
            self.is_lasting = False
        return Measured(error=value.message)


# --- in a worker ----------------------------------------------------------------------------------


class Measurer:
    """Does the measurements of one process; the graphs of a folder are read once."""

    def __init__(self, _report: ProgressCallback, load: Load | None = None) -> None:
        """Every service gets the callback; a measurement is one step."""
        self._load = load

    def measure(
        self, number: int, folder: str, places: Places, metric: str | None, seed: int
    ) -> Measured:
        """Run one model in one thread: the same bits beside however many others.

        The `number` of the try lowers the optimization level. The dense model leaves REFERENCE.
        Raises NodeUnfitError where a file is missing, BadInputError for a metric that fails, and
        what OrtSession raises.
        """
        path = Path(folder)
        _refuse_missing(path / "dense.onnx")
        code = (metric or "").rpartition(":")[0]
        if code.endswith(".py"):
            _refuse_missing(Path(code))
        level = LEVELS[min(number, len(LEVELS) - 1)]
        load = self._load or partial(OrtSession, threads=1, level=level)
        with _open_mixed(path, places, load) as session:
            outputs = run_batches(session.outputs, stored_arrays(path / MEASURED_ON))
            metrics: dict[str, float] = {}
            if metric is not None:
                names = [tensor.name for tensor in session.inputs]
                metrics = run_metric(metric, names, session.outputs, seed=seed)
        if not places:
            save_arrays(path / REFERENCE, outputs)
        moved = output_change(stored_arrays(path / REFERENCE), outputs)
        return Measured(outputs=moved, metrics=metrics)


class OneAfterAnother:
    """A Pool of none: the metric is in this process, and the run's own worker has the models."""

    def __init__(self, sessions: Sessions) -> None:
        self._own = Measurer(no_progress, lambda path: nullcontext(sessions.open(path)))

    def run(self, calls: Mapping[str, tuple[Any, ...]], done: Done) -> None:
        """What `Pool.run` does."""
        for key, arguments in calls.items():
            done(key, run_command(self._own.measure, (0, *arguments)))


def _refuse_missing(file: Path) -> None:
    if not file.is_file():
        raise NodeUnfitError(
            f"{file} is missing on {platform.node()}",
            hint="every node of a Ray cluster needs the same files at the same paths: "
            "share the folder of the run and that of the metric",
        )


@contextmanager
def _open_mixed(folder: Path, places: Places, load: Load) -> Iterator[OrtSession | Session]:
    """dense.onnx with these constants of sparse.onnx, whose file is there until it was run."""
    target = folder / f".mixed.onnx.{uuid4().hex}.part"
    try:
        _mixture(folder).write(places, target)
        with load(target) as session:  # which reads the file again where its process ends
            yield session
    except TwofourError as error:  # without the name of a file that nobody knows
        for name in (str(target), target.name):
            error.message = error.message.replace(name, "the model")
        raise
    finally:
        target.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _mixture(folder: Path) -> Mixture:
    """The two models of a folder; one folder at a time is worked on."""
    return Mixture(folder / "dense.onnx", folder / "sparse.onnx")


def output_change(dense: Arrays, pruned: Arrays) -> float | None:
    """How far the outputs move, as Measured says it; None where no output is of floats.

    Raises BadInputError where a value is NaN or infinite.
    """
    moved = []
    for name, array in dense.items():
        if not is_float(array.dtype) or not array.size:
            continue
        before = np.asarray(array, np.float64)
        after = np.asarray(pruned[name], np.float64)
        if not (np.isfinite(before).all() and np.isfinite(after).all()):
            raise BadInputError("an output has values that are NaN or infinite")
        whole = float(np.sum(before**2)) or 1.0  # an output of zeros: the change itself
        moved.append(float(np.sum((before - after) ** 2)) / whole)
    return float(np.mean(moved)) if moved else None


# --- where workers run ----------------------------------------------------------------------------


def open_workers(how: SideBySide) -> Pool | RayCluster:
    """Workers that make measurements within their `with` block; MissingToolError without ray."""
    if how.ray is None:
        return Pool(*SERVICE, how.jobs)
    return RayCluster(*SERVICE, how.ray)

"""One model with some layers pruned, run in a worker: its outputs, and the user's metric."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from twofour.engines.onnxruntime.session import LEVELS, OrtSession
from twofour.engines.protocol import ProgressCallback
from twofour.errors import BadInputError, BuildFailedError
from twofour.graph.mixture import Mixture
from twofour.inputs.fits import save_arrays, stored_arrays
from twofour.records.run import Measured
from twofour.sources.source import state_of
from twofour.sources.user_code import files_read, run_metric

BASE, OTHER = "dense.onnx", "sparse.onnx"
"""What is measured is the first with some constants of the second."""
MEASURED_ON = "stages/measured-on.npz"
"""The inputs of every run of the model: `<number of the run>:<input>`."""
REFERENCE = "stages/outputs.npz"
"""Outputs of the dense model."""

Arrays = Mapping[str, npt.NDArray[np.generic]]


class UnseenError(BadInputError):
    """A process on another machine does not see the files of the study."""


class Measurer:
    """Does the measurements of one process; the graphs of a folder are read once."""

    def __init__(self, report: ProgressCallback) -> None:
        """Every service is given the callback; a measurement is one step."""

    def measure(
        self, number: int, folder: str, places: tuple[int, ...], metric: str | None, seed: int
    ) -> tuple[Measured, dict[str, str]]:
        """Run it, in one thread: the same bits beside however many others.

        The `number` of the try lowers the optimization level. The `places` are those of constants,
        as `Mixture` counts them; () is the dense model, which leaves REFERENCE. The second value is
        the state of each data file that the metric read. Raises UnseenError where a file is
        missing, BadInputError for a metric that fails, and what OrtSession raises.
        """
        path = Path(folder)
        code = Path((metric or "").rpartition(":")[0])
        for file in (path / BASE, *((code,) if code.suffix == ".py" else ())):
            if not file.is_file():
                raise UnseenError(
                    f"{file} is not to be seen on {platform.node()}",
                    hint="every node of a Ray cluster needs the same files at the same paths: "
                    "share the folder of the run and that of the metric",
                )
        target = path / f".mixed-{uuid4().hex}.onnx.part"
        try:
            _mixture(path / BASE, path / OTHER).write(places, target)
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
    pairs = [
        (np.asarray(array, np.float64), np.asarray(pruned[name], np.float64))
        for name, array in dense.items()
        if (array.dtype.kind == "f" or array.dtype.name == "bfloat16") and array.size
    ]
    if not pairs:
        return None
    if not all(np.isfinite(array).all() for pair in pairs for array in pair):
        raise BadInputError("an output has values that are NaN or infinite")
    return float(np.mean([_relative_error(a, b) for a, b in pairs]))


def _relative_error(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """0 where both are 0 everywhere; against 1 where only the dense one is."""
    moved, whole = float(np.sum((a - b) ** 2)), float(np.sum(a**2))
    return moved / whole if whole else moved


def _outputs(session: OrtSession, inputs: Arrays) -> dict[str, npt.NDArray[np.generic]]:
    """Those of every run, its number before the name."""
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

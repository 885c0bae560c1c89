"""One model with some layers pruned, run in a worker: its outputs, and the user's metric."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twofour.engines.onnxruntime.session import LEVELS, CannotRunError, OrtSession
from twofour.engines.protocol import ProgressCallback
from twofour.errors import BadInputError, BuildFailedError
from twofour.graph.mixture import Mixture
from twofour.pipeline.sensitivity.measured_on import batches_of
from twofour.pipeline.sources.inputs import save_arrays, stored_arrays
from twofour.pipeline.sources.user_code import files_read, state_of
from twofour.records.sensitivity import Measured, Measurement, OutputChange

Arrays = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedModel:
    """What is to be measured: dense.onnx with some constants of sparse.onnx."""

    key: str
    folder: str
    """Holds dense.onnx, sparse.onnx and the inputs."""
    base: str
    other: str
    places: tuple[int, ...]
    """Of the constants, as `Mixture` counts them; () is the dense model."""
    inputs: str
    reference: str
    """Outputs of the dense model, which the measurement of () leaves."""
    metric: str | None
    seed: int


class UnseenError(BadInputError):
    """A process on another machine does not see the files of the study."""


class Measurer:
    """Does the measurements of one process; the graphs of a folder are read once."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report

    def measure(self, number: int, asked: MixedModel) -> Measurement:
        """Run it, in one thread: the same bits beside however many others.

        The `number` of the try lowers the optimization level. Raises UnseenError where a file is
        missing, BadInputError for a metric that fails, and what OrtSession raises.
        """
        _refuse_unseen(asked)
        level = LEVELS[min(number, len(LEVELS) - 1)]
        folder = Path(asked.folder)
        target = folder / f".mixed-{asked.key[:16]}.onnx.{os.getpid()}.part"
        try:
            mixture(folder / asked.base, folder / asked.other).write(asked.places, target)
            session = _opened(target, level)
        finally:
            target.unlink(missing_ok=True)
        with session, files_read() as read:
            outputs = _outputs(session, stored_arrays(folder / asked.inputs))
            metrics = _metrics(session, asked)
        if not asked.places:
            save_arrays(folder / asked.reference, outputs)
        reference = stored_arrays(folder / asked.reference)
        return Measurement(
            key=asked.key,
            measured=Measured(outputs=output_change(reference, outputs), metrics=metrics),
            watched={str(path): state_of(path) for path in read if not path.is_relative_to(folder)},
        )


def _refuse_unseen(asked: MixedModel) -> None:
    folder = Path(asked.folder)
    names = (asked.base, asked.other, asked.inputs, *((asked.reference,) if asked.places else ()))
    code = Path((asked.metric or "").rpartition(":")[0])
    for file in (*(folder / name for name in names), *((code,) if code.suffix == ".py" else ())):
        if not file.is_file():
            raise UnseenError(
                f"{file} is not to be seen on {platform.node()}",
                hint="every node of a Ray cluster needs the same files at the same paths: share "
                "the folder of the run and that of the metric",
            )


def output_change(dense: Arrays, pruned: Arrays) -> OutputChange | None:
    """How far the outputs move; None where no output is of floats.

    Raises BadInputError where a value is NaN or infinite.
    """
    pairs = [
        (np.asarray(dense[name], np.float64), np.asarray(pruned[name], np.float64))
        for name in dense
        if _is_float(dense[name]) and dense[name].size
    ]
    if not pairs:
        return None
    if not all(np.isfinite(array).all() for pair in pairs for array in pair):
        raise BadInputError("an output has values that are NaN or infinite")
    divergences = [d for a, b in pairs if (d := _divergence(a, b)) is not None]
    return OutputChange(
        error=_mean([_relative_error(a, b) for a, b in pairs]),
        cosine=_mean([_cosine(a, b) for a, b in pairs]),
        kl=_mean(divergences) if divergences else None,
    )


def _outputs(session: OrtSession, inputs: Arrays) -> dict[str, npt.NDArray[np.generic]]:
    """Those of every batch, its number before the name."""
    return {
        f"{number}:{name}": array
        for number, batch in enumerate(batches_of(inputs))
        for name, array in session.outputs(batch).items()
    }


@lru_cache(maxsize=1)
def mixture(base: Path, other: Path) -> Mixture:
    """The two models of a folder; one folder at a time is worked on."""
    return Mixture(base, other)


def _opened(path: Path, level: str) -> OrtSession:
    try:
        return OrtSession(path, threads=1, level=level)
    except ImportError as error:
        raise CannotRunError(f"ONNX Runtime cannot be imported: {error}") from error
    except BuildFailedError as error:  # without the name of a file that nobody knows
        raise type(error)(error.message.replace(str(path), "the model")) from error


def _metrics(session: OrtSession, asked: MixedModel) -> dict[str, float]:
    if asked.metric is None:
        return {}
    from twofour.pipeline.sources.metric import load_metric, predictor, run_metric

    names = [tensor.name for tensor in session.inputs]
    return run_metric(load_metric(asked.metric), predictor(names, session.outputs), seed=asked.seed)


def _is_float(array: npt.NDArray[np.generic]) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _relative_error(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """0 where both are 0 everywhere; against 1 where only the dense one is."""
    moved, whole = float(np.sum((a - b) ** 2)), float(np.sum(a**2))
    return moved / whole if whole else moved


def _cosine(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Mean over the rows of the first axis; 1 for rows that are both 0."""
    rows = [x.reshape(len(x), -1) if x.ndim > 1 else x.reshape(1, -1) for x in (a, b)]
    products = np.sum(rows[0] * rows[1], axis=1)
    norms = np.linalg.norm(rows[0], axis=1) * np.linalg.norm(rows[1], axis=1)
    both = np.all(rows[0] == rows[1], axis=1)
    found = np.where(both, 1.0, products / np.where(norms > 0, norms, 1.0))
    return float(np.mean(found))


def _divergence(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float | None:
    """Mean KL of the softmax of the rows of the last axis; None where that has one value."""
    if a.ndim == 0 or a.shape[-1] < 2:
        return None
    log_p, log_q = (_log_softmax(x.reshape(-1, x.shape[-1])) for x in (a, b))
    return max(0.0, float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=1))))


def _log_softmax(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=1, keepdims=True)))

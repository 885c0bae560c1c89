"""Finished steps of a calibration in files: a run that was killed continues behind them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from twofour.errors import BadInputError
from twofour.pruning.methods import DEFAULT_WITHOUT_DATA
from twofour.pruning.methods.problem import Array
from twofour.pruning.solve import SolvedLayer
from twofour.records.weights import Solution
from twofour.store import atomic_file, read_sealed, sealed, sha256_bytes, sha256_file, write_record

_ARRAYS = ("weight", "bias_change")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """Weights that were solved together; their arrays lie in a file beside this record."""

    solved: dict[str, SolvedLayer]
    arrays_sha256: str
    seal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSteps:
    """Two files for each step, used only by runs with the same key."""

    folder: Path
    key: str
    """sha256 over all that the results depend on: model, data, options, versions."""
    with_weights: bool = True
    """False: weights are in a copy of the checkpoint, and None when a step is loaded."""

    def load(self, names: Sequence[str]) -> Mapping[str, SolvedLayer] | None:
        """The results for these weights; None: not finished, of another key, or damaged."""
        record = self._record(names)
        try:
            step = read_sealed(FinishedStep, record)
            if sha256_file(record.with_suffix(".npz")) != step.arrays_sha256:
                return None
        except BadInputError:
            return None
        with np.load(record.with_suffix(".npz"), allow_pickle=False) as file:
            arrays = dict(file)
        return {
            name: replace(
                found,
                weight=arrays.get(f"{index}.weight"),
                bias_change=arrays.get(f"{index}.bias_change"),
            )
            for index, (name, found) in enumerate(step.solved.items())
        }

    def save(self, names: Sequence[str], solved: Mapping[str, SolvedLayer]) -> None:
        """Save the results; raises BadInputError where the file system refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self._record(names)
        arrays: dict[str, Array] = {
            f"{index}.{key}": np.ascontiguousarray(
                value if isinstance(value, np.ndarray) else value.cpu().numpy()
            )
            for index, found in enumerate(solved.values())
            for key in (_ARRAYS if self.with_weights else _ARRAYS[1:])
            if (value := getattr(found, key)) is not None
        }
        with atomic_file(record.with_suffix(".npz")) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
        facts = {
            name: replace(each, weight=None, bias_change=None) for name, each in solved.items()
        }
        sha256 = sha256_file(record.with_suffix(".npz"))
        write_record(record, sealed(FinishedStep(solved=facts, arrays_sha256=sha256)))

    def clear(self) -> None:
        """Remove all steps when the whole is done."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _record(self, names: Sequence[str]) -> Path:
        return self.folder / f"{sha256_bytes(self.key.encode(), *map(str.encode, names))}.json"


def solution_of(solved: SolvedLayer, method: str) -> Solution:
    """The report on a solved weight."""
    return Solution(
        method=DEFAULT_WITHOUT_DATA if solved.by_magnitude else method,
        output_error=solved.output_error,
        damping=solved.damping,
        refit_steps=solved.refit_steps,
        bias_corrected=solved.bias_change is not None,
        note=solved.note,
    )

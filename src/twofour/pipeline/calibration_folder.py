"""What of a calibration lies in its folder: what is finished, the batches, the model's files."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from twofour.errors import BadInputError
from twofour.graph.files import Array
from twofour.graph.opened import OpenedModel
from twofour.pipeline.calibration_worker import BatchFile
from twofour.pipeline.sources.calibration.data import CalibrationData
from twofour.pipeline.sources.inputs import save_arrays
from twofour.pruning.onnx_file import Solution
from twofour.store import atomic_file, link_or_copy, read_sealed, sealed, sha256_file, write_record

_STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """A bias that was corrected, of one node: in its place, or as a copy for that node alone."""

    user: int
    """Of the piece."""
    file: str
    copy: str | None
    """Its name; None: in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A piece that is done, by its number in the plan."""

    piece: int
    solution: Solution
    biases: tuple[Corrected, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """state.json: what of a calibration is done."""

    key: str
    pieces: tuple[Finished, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """Of values, each with its sha256."""
    seal: str = ""


def finished(folder: Path, key: str) -> tuple[tuple[Finished, ...], dict[str, str]]:
    """What an earlier run with the same key finished, and its files with their sha256.

    What another run left, or was damaged, is removed.
    """
    with contextlib.suppress(BadInputError):
        state = read_sealed(_State, folder / _STATE)
        if state.key == key and all(sha256_file(folder / n) == s for n, s in state.files.items()):
            return state.pieces, state.files
    for left in folder.glob("*"):
        if not left.is_dir():
            left.unlink()
    return (), {}


def write_finished(
    folder: Path, key: str, pieces: Sequence[Finished], files: Mapping[str, str]
) -> None:
    """The record that a run goes on from; the files that it speaks of are there."""
    state = _State(key=key, pieces=tuple(pieces), files=dict(sorted(files.items())))
    write_record(folder / _STATE, sealed(state))


def linked(folder: Path, opened: OpenedModel, name: str = "model") -> dict[Path, str]:
    """The model's files under names in the folder, as ONNX Runtime reads none from outside it."""
    names = {}
    for number, file in enumerate((opened.path, *opened.data_files)):
        names[file] = f"{name}-{number}.bin"
        link_or_copy(file, folder / names[file])
    return names


def written_batches(folder: Path, data: CalibrationData) -> Iterator[BatchFile]:
    """The batches as files, for a process that may have to be started again."""
    first = 0
    for number, batch in enumerate(data.batches()):
        path = folder / f"batch-{number}.npz"
        save_arrays(path, batch.arrays)
        yield BatchFile(path=path, samples=batch.samples, first=first, padding=batch.padding)
        first += batch.samples


def free_bytes(folder: Path) -> int:
    """What its file system has room for."""
    return shutil.disk_usage(folder).free


def write_array(file: Path, values: Array) -> str:
    """The bytes alone, whole or not at all; gives their sha256."""
    content = np.ascontiguousarray(values)
    with atomic_file(file) as temporary:
        content.tofile(temporary)
    return hashlib.sha256(content.reshape(-1).view(np.uint8).data).hexdigest()

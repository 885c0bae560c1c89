"""What of a calibration is done, in files: a run that is killed goes on behind it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from twofour.errors import BadInputError
from twofour.pruning.methods.problem import Array
from twofour.pruning.solve import Solved
from twofour.pruning.torch_module import Done
from twofour.records.pruning import OutputError
from twofour.store import atomic_file, read_sealed, sealed, sha256_bytes, write_record

_ARRAYS = ("weight", "bias_change")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsDone:
    """Of a checkpoint that is pruned in its own files, which parts are."""

    key: str
    """As of `FinishedSteps`."""
    units: dict[str, dict[str, Done]] = field(default_factory=dict)
    """Part of the model -> key in the files -> what was done to the weight."""
    begun: tuple[str, ...] = ()
    """Keys in the files that were being written."""
    seal: str = ""


class FinishedUnits:
    """Keeps `UnitsDone` in a file, of use to runs with the same key alone."""

    def __init__(self, file: Path, key: str) -> None:
        self._file, self._now = file, UnitsDone(key=key)
        self.is_there = False
        """Whether there is anything to go on with."""
        with contextlib.suppress(BadInputError):  # none, or damaged
            found = read_sealed(UnitsDone, file)
            if found.key == key:
                self._now, self.is_there = found, True

    @property
    def begun(self) -> tuple[str, ...]:
        """Keys in the files that may hold anything."""
        return self._now.begun

    def start(self) -> None:
        """The files are as they were; raises BadInputError where the file system refuses."""
        self._keep(UnitsDone(key=self._now.key))

    def begin(self, keys: Iterable[str]) -> None:
        """These will be written next."""
        self._keep(replace(self._now, begun=tuple(keys)))

    def load(self, unit: str) -> Mapping[str, Done] | None:
        """What was done to the weights of a unit; None: not finished yet."""
        return self._now.units.get(unit)

    def save(self, unit: str, done: Mapping[str, Done]) -> None:
        """The unit is written."""
        units = {**self._now.units, unit: dict(done)}
        self._keep(replace(self._now, units=units, begun=()))

    def clear(self) -> None:
        """The whole is done: nothing of this is needed any more."""
        self._file.unlink(missing_ok=True)

    def _keep(self, now: UnitsDone) -> None:
        self._now = now
        write_record(self._file, sealed(now))


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSteps:
    """One file for each step, of use to runs with the same key alone."""

    folder: Path
    key: str
    """sha256 over all that the results depend on: model, data, options, versions."""

    def load(self, names: Sequence[str]) -> Mapping[str, Solved] | None:
        """What was solved of these weights together; None: not done, with another key, damaged."""
        try:
            with safe_open(str(self._file(names)), framework="np") as file:
                said = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
        except (OSError, SafetensorError):
            return None
        if said.get("sha256") != _hash(said.get("solved", ""), arrays):
            return None
        facts = json.loads(said["solved"])
        return {
            name: Solved(
                **{
                    **found,
                    **{key: arrays.get(f"{index}.{key}") for key in _ARRAYS},
                    "output_error": OutputError(**found["output_error"]),
                }
            )
            for index, (name, found) in enumerate(facts.items())
        }

    def save(self, names: Sequence[str], solved: Mapping[str, Solved]) -> None:
        """These weights are done; raises BadInputError where the file system refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        arrays = {
            f"{index}.{key}": _numpy(value)
            for index, found in enumerate(solved.values())
            for key in _ARRAYS
            if (value := getattr(found, key)) is not None
        }
        facts = json.dumps({name: _facts(found) for name, found in solved.items()})
        said = {"solved": facts, "sha256": _hash(facts, arrays)}
        with atomic_file(self._file(names)) as temporary:
            save_file(arrays, str(temporary), metadata=said)

    def _file(self, names: Sequence[str]) -> Path:
        return self.folder / f"{sha256_bytes(self.key.encode(), *map(str.encode, names))}.step"


def _hash(facts: str, arrays: Mapping[str, Array]) -> str:
    parts = [facts.encode()]
    for name, array in sorted(arrays.items()):
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts += [f"{name} {array.dtype} {array.shape}".encode(), content.data.tobytes()]
    return sha256_bytes(*parts)


def _facts(solved: Solved) -> dict[str, Any]:
    found = {f.name: getattr(solved, f.name) for f in fields(solved) if f.name not in _ARRAYS}
    error: OutputError = found["output_error"]
    return {**found, "output_error": {f.name: getattr(error, f.name) for f in fields(error)}}


def _numpy(values: Array) -> Array:
    return np.ascontiguousarray(values if isinstance(values, np.ndarray) else values.cpu().numpy())

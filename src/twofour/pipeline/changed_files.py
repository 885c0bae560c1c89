"""What of a run folder is no longer as its run left it: by the hashes in run.json, never by times.

A folder that was moved or copied is as it was left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from twofour.errors import BadInputError
from twofour.pipeline.folder import is_run_folder, is_there, read_manifest
from twofour.records.run import StageRecord
from twofour.store import sha256_file
from twofour.version import __version__

BROUGHT_UP_TO_DATE = "the command that made the folder brings it up to date"


def changes(
    folder: Path, files: Collection[str], *, alone: Collection[str] = (), but: Collection[str] = ()
) -> tuple[str, ...]:
    """A sentence for each file that is another now than the one the run left or went by.

    Looked at are `files`, all that the stages behind them read and left, back to the first, and of
    the files `alone` only themselves; `but` names those that may change. What `files` were made
    from may be gone, they themselves may not. () for a folder without run.json, and for files that
    no stage left. Raises BadInputError where run.json, or one of the files, cannot be read.
    """
    if not is_run_folder(folder):
        return ()
    look = _Look(folder, read_manifest(folder).stages)
    found = [*look.of(files, alone, but), *look.alone(alone)]
    return tuple(dict.fromkeys(found))


def left(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """Of these files of a run folder, those that a stage left, with their sha256 in run.json."""
    stages = read_manifest(folder).stages
    known = {name: value for stage in stages for name, value in stage.outputs.items()}
    return {name: known[name] for name in files if name in known}


def other_version(folder: Path) -> tuple[str, ...]:
    """A sentence where another version of twofour made the folder; its rules may be others."""
    if not is_run_folder(folder):
        return ()
    made_by = read_manifest(folder).twofour_version
    if made_by == __version__:
        return ()
    return (f"twofour {made_by} made the folder, this is {__version__}",)


def refuse_changed(folder: Path, files: Collection[str], *, but: Collection[str] = ()) -> None:
    """Raise BadInputError for the first of `changes`."""
    found = changes(folder, files, but=but)
    if found:
        raise BadInputError(f"{folder}: {found[0]}", hint=BROUGHT_UP_TO_DATE)


class _Look:
    """Compares files with hashes, and reads each of them once."""

    def __init__(self, folder: Path, stages: Collection[StageRecord]) -> None:
        self.folder = folder
        self.left_by = {name: stage for stage in stages for name in stage.outputs}
        self._hashes: dict[str, str | None] = {}
        self._told_of: set[str] = set()

    def of(
        self, files: Collection[str], others: Collection[str], but: Collection[str]
    ) -> Iterator[str]:
        """Of the files and all behind them."""
        seen = {*others, *but}
        waiting = [name for name in files if name in self.left_by]
        first = {self.left_by[name].stage for name in waiting}
        done: set[str] = set()
        while waiting:
            stage = self.left_by[waiting.pop(0)]
            if stage.stage in done:
                continue
            done.add(stage.stage)
            wanted = files if stage.stage in first else ()
            for name, value in {**stage.inputs, **stage.outputs}.items():
                if name not in but:
                    yield from self._told(stage, name, value, may_be_gone=name not in wanted)
            waiting += [n for n in stage.inputs if n in self.left_by and n not in seen]

    def alone(self, files: Collection[str]) -> Iterator[str]:
        """Of these files and nothing behind them."""
        for name in files:
            stage = self.left_by.get(name)
            if stage is not None:
                yield from self._told(stage, name, stage.outputs[name], may_be_gone=True)

    def _told(
        self, stage: StageRecord, name: str, value: str, *, may_be_gone: bool
    ) -> Iterator[str]:
        found = self._hash(name)
        if found == value or name in self._told_of or (found is None and may_be_gone):
            return
        self._told_of.add(name)
        verb = "was made from" if name in stage.inputs else "left"
        state = "is gone, the one" if found is None else "is not the file"
        yield f"{name} {state} that the {stage.stage} of the run {verb} (run.json has its sha256)"

    def _hash(self, name: str) -> str | None:
        if name not in self._hashes:
            path = self.folder / name
            self._hashes[name] = sha256_file(path) if is_there(path) else None
        return self._hashes[name]

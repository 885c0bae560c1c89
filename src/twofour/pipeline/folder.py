"""The run folder: made, recognised, locked against a second run, and its run.json kept."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath

from twofour.errors import BadInputError
from twofour.records.options import ExampleInputs
from twofour.records.run import RunManifest, StageRecord
from twofour.store import read_record, write_record
from twofour.version import __version__

MANIFEST = "run.json"
STAGES = "stages"
"""Folder of the records and arrays that only stages read."""
FOLDERS = (STAGES, "compare", "sensitivity", "checkpoint")
"""All that is made inside a run folder: what is written goes there, or replaces a file beside."""
_LOCK = ".lock"
_LEFTOVER = re.compile(
    r"\..+\.(json|onnx|data|npz|safetensors|plan|log|cache|md|html|txt)\.[^.]+\.part"
)
"""What store.atomic_file and the export call a half-written file of a kind that runs write."""


@dataclass(slots=True)
class RunFolder:
    """A locked run folder; its lifetime is the `with` block of `open_run_folder`."""

    path: Path
    manifest: RunManifest

    def stage(self, name: str) -> StageRecord | None:
        """The last finished run of a stage, or None."""
        return next((s for s in self.manifest.stages if s.stage == name), None)

    def finish(self, record: StageRecord) -> None:
        """Note in run.json that a stage is done, in place of what was noted before."""
        others = tuple(s for s in self.manifest.stages if s.stage != record.stage)
        self.manifest = replace(
            self.manifest, twofour_version=__version__, stages=(*others, record)
        )
        write_record(self.path / MANIFEST, self.manifest)

    def remember(self, examples: ExampleInputs, dense_reference: str | None = None) -> None:
        """Note in run.json how the source was loaded, for commands that load it again."""
        self.manifest = replace(
            self.manifest,
            inputs=None if examples.file is None else str(examples.file.absolute()),
            input_shapes=examples.input_shapes,
            input_shape_names=examples.input_shape_names,
            seed=examples.seed,
            dense_reference=dense_reference,
        )
        write_record(self.path / MANIFEST, self.manifest)

    def forget(self) -> None:
        """Note in run.json that no stage is done."""
        self.manifest = replace(self.manifest, stages=())
        write_record(self.path / MANIFEST, self.manifest)


@contextlib.contextmanager
def open_run_folder(path: Path, source: str) -> Iterator[RunFolder]:
    """Create or reopen the run folder of one source and hold its lock.

    `source` identifies the model (an absolute path or a name). Raises BadInputError when the path
    is a file or a folder of something else, belongs to another source, cannot be written, is in
    use by another process, or holds a link that leads what is written out of it.
    """
    _make_folder(path)
    with writing_into(path):
        manifest = _manifest(path, source)
        if manifest is None:
            manifest = RunManifest(source=source, twofour_version=__version__, stages=())
            write_record(path / MANIFEST, manifest)
        _remove_leftovers(path)
        yield RunFolder(path, manifest)


@contextlib.contextmanager
def writing_into(path: Path) -> Iterator[None]:
    """Hold the lock of a folder that a command writes its results into.

    The operating system drops it when the process ends, however that ends. Raises BadInputError
    where another process holds it, and for a link in one of FOLDERS: what is written would go
    through it, to wherever it leads. Files beside them are replaced, links or not.
    """
    with _locked(path):
        for name in FOLDERS:
            _refuse_links(path / name)
        yield


@contextlib.contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Hold a lock of the folder itself, which leaves no file in one that is handed on.

    Raises BadInputError where another process holds it. Where folders have no locks (Windows, some
    network file systems) it is none.
    """
    if os.name == "nt":
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            _lock(handle)
        except OSError as error:
            if _is_busy(error):
                raise _in_use(path) from error
        yield
    finally:
        os.close(handle)


def _refuse_links(path: Path) -> None:
    """The folder itself, and everything below it; a folder that cannot be read is no link."""
    if path.is_symlink():
        raise _leads_out(path)
    for here, folders, files in os.walk(path):
        for name in (*folders, *files):
            if Path(here, name).is_symlink():
                raise _leads_out(Path(here, name))


def own_folder(path: Path) -> Path:
    """Create a folder inside a run folder; raises BadInputError where a link leads out of it."""
    try:
        if path.is_symlink():
            raise _leads_out(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(
            f"cannot create {path}: {error.strerror or error}", hint="choose another --out"
        ) from error
    return path


def is_run_folder(path: Path) -> bool:
    """Whether a folder was made by a run of ours."""
    return (path / MANIFEST).is_file()


def is_there(path: Path) -> bool:
    """Whether it is a file; False for names that no file can have, as of a damaged record."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_manifest(folder: Path) -> RunManifest:
    """run.json; raises BadInputError where it is damaged, or names files outside of its folder."""
    manifest = read_record(RunManifest, folder / MANIFEST)
    for stage in manifest.stages:
        for name in (*stage.inputs, *stage.outputs):
            refuse_outside(folder / MANIFEST, name)
    return manifest


def refuse_outside(record: Path, name: str) -> None:
    """Raise BadInputError for a file that a record names and that is not below its folder."""
    parts = PureWindowsPath(name)  # whose separators and drives go for all systems
    if parts.anchor or ".." in parts.parts:
        raise BadInputError(
            f"{record} names a file outside of its folder: {name!r}",
            hint="no run wrote that: the record is damaged, or made up",
        )


def _make_folder(path: Path) -> None:
    try:
        _check_folder(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(
            f"cannot create {path}: {error.strerror or error}", hint="choose another --out"
        ) from error


def _check_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise BadInputError(f"{path} is a file, not a run folder", hint="choose another --out")
    if path.is_dir() and not is_run_folder(path) and _not_ours(path):
        raise BadInputError(
            f"{path} exists and is not a run folder (it holds {_not_ours(path)!r})",
            hint="choose another folder with --out; nothing in it was touched",
        )


def _not_ours(path: Path) -> str | None:
    """Name of one entry that is not of our making; a run killed at its start leaves only ours."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
    return next((n for n in names if not n.startswith(".run.json.") and n != _LOCK), None)


def _manifest(path: Path, source: str) -> RunManifest | None:
    if not is_run_folder(path):
        return None
    try:
        manifest = read_manifest(path)
    except BadInputError as error:
        raise BadInputError(
            error.message,
            hint=error.hint
            or "choose another --out: the folder is damaged, or no run of twofour made it; nothing "
            "in it was touched",
        ) from error
    if manifest.source != source:
        raise BadInputError(
            f"{path} holds a run of {manifest.source}, not of {source}",
            hint="choose another folder with --out, or remove that one",
        )
    return manifest


def _remove_leftovers(path: Path) -> None:
    """Half-written files of a run that was killed; every other dot-file is the user's."""
    for folder in (path, path / STAGES):
        if folder.is_symlink() or not folder.is_dir():
            continue
        for leftover in folder.glob(".*.part"):
            if not _LEFTOVER.fullmatch(leftover.name):
                continue
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock that the operating system drops when the process dies."""
    lock = path / _LOCK
    if lock.is_symlink():
        raise _leads_out(lock)
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        raise BadInputError(
            f"cannot write into {path}: {error.strerror or error}", hint="choose another --out"
        ) from error
    try:
        _lock(handle)
    except OSError as error:
        os.close(handle)
        if _is_busy(error):
            raise _in_use(path) from error
        raise BadInputError(
            f"cannot lock {path}: {error.strerror or error}", hint="choose another --out"
        ) from error
    try:
        yield
    finally:
        os.close(handle)


def _leads_out(path: Path) -> BadInputError:
    return BadInputError(
        f"{path} is a link (to {path.readlink()}): a run writes into its own folder only",
        hint="remove the link, or choose another folder with --out",
    )


def _lock(handle: int) -> None:
    """Or OSError, which `_is_busy` tells apart."""
    if os.name == "nt":
        import msvcrt  # exists on Windows only

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # Windows only
    else:
        import fcntl  # exists on POSIX only

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_busy(error: OSError) -> bool:
    """Another process holds the lock; else the file system has none."""
    return error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)


def _in_use(path: Path) -> BadInputError:
    return BadInputError(
        f"{path} is in use by another twofour command",
        hint="wait for it to end, or choose another folder with --out",
    )

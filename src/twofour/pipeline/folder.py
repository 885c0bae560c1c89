"""The run folder: names of its files, made, recognised, locked against a second run, run.json."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import Any

from twofour.errors import BadInputError, system_errors
from twofour.packages import __version__
from twofour.records.options import ExampleInputs, Variant
from twofour.records.run import RunManifest, StageRecord
from twofour.store import read_record, sha256_file, write_record

MANIFEST = "run.json"
DENSE = Variant.DENSE
SPARSE = Variant.SPARSE
TUNED = Variant.TUNED
PRUNE = "prune.json"
VALIDATE = "validate.json"
EXPORT = "export.json"
BUILD = "build.json"
ACCURACY = "accuracy.json"
INPUTS = "inputs.npz"
WEIGHTS = "weights.safetensors"
FINETUNE = "finetune.json"
FINETUNED = "finetuned.safetensors"
LAYERS = "layers.json"
OPTIONS = "options.toml"
"""The options of the command that pruned last, for one that continues from there."""
SENSITIVITY_OPTIONS = f"sensitivity/{OPTIONS}"
"""The options of `sensitivity` without its budget, for a command that prunes what it chose."""
CHECKPOINT = "checkpoint"
"""Folder of a checkpoint that was pruned in its own files."""
STAGES = "stages"
"""Folder of the records and arrays that only stages read."""
HELD_OUT = f"{STAGES}/held-out.npz"
"""Calibration samples on which both files are compared: `<number of the batch>:<input>`."""
FLEET = "fleet"
FOLDERS = (STAGES, "compare", "sensitivity", FLEET, CHECKPOINT)
"""All folders inside a run folder; other files that a run writes are beside them."""
ANOTHER_OUT = "choose another --out"
_LOCK = ".lock"
_LEFTOVER = re.compile(
    r"\..+\.(json|onnx|data|npz|safetensors|plan|log|cache|md|html|txt)(\.[^.]+\.part)+"
)
"""Names of half-written files, as store.atomic_file and the export give them."""


def onnx_name(variant: Variant) -> str:
    """File of a variant in the run folder."""
    return f"{variant}.onnx"


def reference_name(variant: Variant) -> str:
    """File with the torch module's outputs on the example inputs."""
    return f"stages/reference-{variant}.npz"


def onnx_files(path: Path) -> tuple[str, ...]:
    """Names of an ONNX file and of its external data files, `<name>.data` or `<name>.0.data`.

    Other names that begin so are the user's.
    """
    ours = re.compile(rf"{re.escape(path.name)}(\.\d+)?\.data", re.ASCII)
    names = [file.name for file in path.parent.glob("*.data")]
    return (path.name, *sorted(filter(ours.fullmatch, names)))


def onnx_bytes(path: Path) -> int:
    """Size of an ONNX file and its external data files."""
    return sum(path.with_name(name).stat().st_size for name in onnx_files(path))


def remove_data(path: Path) -> None:
    """Remove the data files of an earlier model, of which the new one may have fewer."""
    for name in onnx_files(path)[1:]:
        path.with_name(name).unlink(missing_ok=True)


def record_of(stage: str) -> str:
    """File of the record of a stage that has none of its own."""
    return f"stages/{stage}.json"


@dataclass(slots=True)
class RunFolder:
    """A locked run folder; its lifetime is the `with` block of `open_run_folder`."""

    path: Path
    manifest: RunManifest

    def stage(self, name: str) -> StageRecord | None:
        """The last finished run of a stage, or None."""
        return next((s for s in self.manifest.stages if s.stage == name), None)

    def finish(self, record: StageRecord) -> None:
        """Note in run.json that a stage is done, instead of its record before."""
        others = tuple(s for s in self.manifest.stages if s.stage != record.stage)
        self._write(twofour_version=__version__, stages=(*others, record))

    def remember(self, examples: ExampleInputs, dense_reference: str | None = None) -> None:
        """Note in run.json how the source was loaded, for commands that load it again."""
        self._write(
            inputs=None if examples.file is None else str(examples.file.absolute()),
            input_shapes=examples.input_shapes,
            input_shape_names=examples.input_shape_names,
            seed=examples.seed,
            dense_reference=dense_reference,
        )

    def _write(self, **changed: Any) -> None:  # noqa: ANN401  # fields of the manifest
        self.manifest = replace(self.manifest, **changed)
        write_record(self.path / MANIFEST, self.manifest)


@contextlib.contextmanager
def open_run_folder(path: Path, source: str) -> Iterator[RunFolder]:
    """Create or reopen the run folder of one source (a path or name) and hold its lock.

    Raises BadInputError for a folder of something else or in use, and links out of it.
    """
    _refuse_others(path)
    with lock_folder(path):
        manifest = _manifest(path, source)
        if manifest is None:
            manifest = RunManifest(source=source, twofour_version=__version__, stages=())
            write_record(path / MANIFEST, manifest)
        own_folder(path / STAGES)
        _remove_leftovers(path)
        yield RunFolder(path, manifest)


@contextlib.contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Create a folder and hold its lock; the operating system drops it when the process ends.

    Raises BadInputError where another process holds it, and where one of FOLDERS is a link.
    """
    for name in (_LOCK, *FOLDERS):
        if (path / name).is_symlink():
            raise _leads_out(path / name)
    with system_errors(f"cannot write into {path}", ANOTHER_OUT):
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(handle, path)
        yield
    finally:
        os.close(handle)


def own_folder(path: Path) -> Path:
    """Create a folder inside a run folder; raises BadInputError where a link leads out of it."""
    with system_errors(f"cannot create {path}", ANOTHER_OUT):
        if path.is_symlink():
            raise _leads_out(path)
        path.mkdir(parents=True, exist_ok=True)
    return path


def is_run_folder(path: Path) -> bool:
    """Whether a folder was made by a run of ours."""
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> RunManifest:
    """run.json; raises BadInputError where it is damaged, or names files outside of its folder."""
    hint = (
        "choose another --out: the folder is damaged, or no run of twofour made it; nothing in it "
        "was touched"
    )
    manifest = read_record(RunManifest, folder / MANIFEST, hint)
    for stage in manifest.stages:
        for name in (*stage.inputs, *stage.outputs):
            refuse_outside(folder / MANIFEST, name)
    return manifest


def final_weights(folder: Path) -> str:
    """weights.safetensors, or finetuned.safetensors where that was trained from those there now."""
    if not is_run_folder(folder) or not (folder / FINETUNED).is_file():
        return WEIGHTS
    stages = {stage.stage: stage for stage in read_manifest(folder).stages}
    if not {"finetune", "prune"} <= stages.keys():
        return WEIGHTS
    trained_from = stages["finetune"].inputs.get(WEIGHTS)
    return FINETUNED if trained_from == stages["prune"].outputs.get(WEIGHTS) else WEIGHTS


def unused_finetuning(folder: Path) -> tuple[str, ...]:
    """A note where finetuned.safetensors was not trained from the weights that are there now."""
    if final_weights(folder) == FINETUNED or not (folder / FINETUNED).is_file():
        return ()
    return (
        f"{FINETUNED} is not used: it was trained from other pruned weights. To use it, repeat "
        "the options of that prune; else run `twofour finetune` again",
    )


def changed_files(
    folder: Path, files: Collection[str], beside: Collection[str] = ()
) -> tuple[str, ...]:
    """A sentence for each file that is not as the run left it, by the hashes in run.json.

    It compares `files` and `beside`, and what was read for `files`; only `files` must be there.
    """
    if not is_run_folder(folder):
        return ()
    hashes: dict[str, str | None] = {}
    sentences: dict[str, str] = {}
    for stage in read_manifest(folder).stages:
        wanted = {n: value for n, value in stage.outputs.items() if n in files or n in beside}
        if not stage.outputs.keys().isdisjoint(files):  # what it read made these files
            wanted = {**stage.inputs, **wanted}
        for name, value in wanted.items():
            if name not in hashes:
                hashes[name] = _hash_now(folder / name)
            if hashes[name] == value:
                continue
            state = "was changed after"
            if hashes[name] is None:
                if name not in files:
                    continue
                state = "is missing since"
            verb = "wrote" if name in stage.outputs else "read"
            sentence = f"{name} {state} the {stage.stage} stage {verb} it"
            sentences.setdefault(name, f"{sentence} (run.json has its sha256)")
    return tuple(sentences.values())


def _hash_now(path: Path) -> str | None:
    return sha256_file(path) if path.is_file() else None


def refuse_changed(folder: Path, files: Collection[str]) -> None:
    """Raise BadInputError for the first of `changed_files`."""
    for sentence in changed_files(folder, files):
        raise BadInputError(
            f"{folder}: {sentence}", hint="the command that made the folder brings it up to date"
        )


def recorded_hashes(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """The sha256 in run.json of those of these files that a stage of the run left."""
    stages = read_manifest(folder).stages  # in the order in which they ended
    known: dict[str, str] = {}
    for stage in stages:
        known |= stage.outputs
    return {name: known[name] for name in files if name in known}


def refuse_outside(record: Path, name: str) -> None:
    """Raise BadInputError for a file that a record names and that is not below its folder."""
    parts = PureWindowsPath(name)  # whose separators and drives go for all systems
    if parts.anchor or ".." in parts.parts:
        raise BadInputError(
            f"{record} names a file outside of its folder: {name!r}",
            hint="no run wrote that name: the record is damaged or forged",
        )


def _refuse_others(path: Path) -> None:
    with system_errors(f"cannot read {path}", ANOTHER_OUT):
        if path.exists() and not path.is_dir():
            raise BadInputError(f"{path} is a file, not a run folder", hint=ANOTHER_OUT)
        if not path.is_dir() or is_run_folder(path):
            return
        for name in sorted(entry.name for entry in path.iterdir()):
            if name.startswith(".run.json.") or name == _LOCK:
                continue  # a run killed at its start leaves them
            raise BadInputError(
                f"{path} exists and is not a run folder (it contains {name!r})",
                hint="choose another folder with --out; nothing in it was touched",
            )


def _manifest(path: Path, source: str) -> RunManifest | None:
    if not is_run_folder(path):
        return None
    manifest = read_manifest(path)
    if manifest.source == source:
        return manifest
    files = [file.name for file in path.rglob("*") if file.is_file()]
    if set(files) <= {MANIFEST, _LOCK}:
        return None  # that run failed before it made anything
    raise BadInputError(
        f"{path} contains a run of {manifest.source}, not of {source}",
        hint="choose another folder with --out, or remove that one",
    )


def _remove_leftovers(path: Path) -> None:
    """Half-written files of a run that was killed; every other dot-file is the user's."""
    for folder in (path, path / STAGES):
        for leftover in folder.glob(".*.part"):
            if not _LEFTOVER.fullmatch(leftover.name):
                continue
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def _leads_out(path: Path) -> BadInputError:
    return BadInputError(
        f"{path} is a link (to {path.readlink()}): a run writes into its own folder only",
        hint="remove the link, or choose another folder with --out",
    )


def _lock(handle: int, path: Path) -> None:
    """Take an advisory lock; raises BadInputError where another process has it."""
    with system_errors(f"cannot lock {path}", ANOTHER_OUT):
        try:
            if os.name == "nt":
                import msvcrt  # exists on Windows only

                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # Windows only
            else:
                import fcntl  # exists on POSIX only

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                raise
            raise BadInputError(
                f"{path} is in use by another twofour command",
                hint="wait for it to end, or choose another folder with --out",
            ) from error

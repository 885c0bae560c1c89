"""Stages of a run as data, and what a run hands from one to the next."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from twofour.graph.opened import OpenedModels
from twofour.pipeline.engine_host import EngineHost, Sessions
from twofour.pipeline.folder import RunFolder
from twofour.pipeline.settings import Settings
from twofour.pipeline.sources.inputs import stored_arrays
from twofour.pipeline.sources.user_code import state_of
from twofour.records.export import LayerMap, OnnxFile
from twofour.records.options import Variant
from twofour.records.run import ExportedVariant, StageRecord
from twofour.store import read_record, sha256_bytes, sha256_file, write_record
from twofour.version import __version__, installed_version

if TYPE_CHECKING:
    import numpy as np

    from twofour.pipeline.sources.source import Source
    from twofour.pipeline.torch_model import TorchModel


R = TypeVar("R")


class Progress(Protocol):
    """Where a run says what it is doing; the command line draws it, tests record it."""

    def stage(self, name: str, title: str) -> None:
        """A stage begins."""

    def done(self, name: str, *, seconds: float, reused: bool) -> None:
        """The stage is done, or was found done."""

    def step(self, text: str, done: int, total: int | None) -> None:
        """Progress inside the stage."""

    def note(self, text: str) -> None:
        """Something the user should know."""


class Silent:
    """The Progress that says nothing."""

    def stage(self, name: str, title: str) -> None:
        """Say nothing."""

    def done(self, name: str, *, seconds: float, reused: bool) -> None:
        """Say nothing."""

    def step(self, text: str, done: int, total: int | None) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""


Made = tuple[R, Sequence[str]]
"""What a stage's work gives: its record, and the names of the files that it wrote beside it."""


def _always(_record: object) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Generic[R]):
    """One stage: what it makes, what that depends on, and the work.

    It is done again when an option, a fact, a version, a file that it reads or one that it left has
    changed; `Run.do` sees to that.
    """

    name: str
    title: str
    """What is shown while it is done."""
    record: str
    """File of its record in the run folder, written last."""
    kind: type[R]
    """Of the record."""
    work: Callable[[], Made[R]]
    """Writes the stage's files; called where it has to be done."""
    options: tuple[str, ...] = ()
    """Fields of Settings that `work` goes by."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """What else it goes by: keys of sources, what earlier stages found."""
    packages: tuple[str, ...] = ()
    """Whose versions count, besides our own."""
    reads: tuple[str, ...] = ()
    """Files of the run folder, left by earlier stages."""
    watched: Callable[[], Iterable[Path]] = tuple
    """Asked after `work`: data files outside the folder that the result depends on."""
    lasting: Callable[[R], bool] = _always
    """A stage whose record is not lasting is done again by the next run."""


class Runner:
    """Runs stages in a folder and keeps the hashes of what they left, so that each is read once."""

    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        self.folder = folder
        self.progress = progress
        self._hashes: dict[str, str] = {}

    def run(self, stage: Stage[R], options: Settings) -> R:
        """The stage's record, read back where nothing changed, else made by its work.

        The order on disk is files, record, run.json: a run killed in between does the stage again.
        """
        self.progress.stage(stage.name, stage.title)
        started = time.perf_counter()
        inputs = {name: self._hash(name) for name in stage.reads}
        key = _key(stage, options, inputs)
        before = self.folder.stage(stage.name)
        if before is not None and before.key == key and before.lasting and self._intact(before):
            record = read_record(stage.kind, self.folder.path / stage.record)
            self.progress.done(stage.name, seconds=time.perf_counter() - started, reused=True)
            return record
        record, files = stage.work()
        write_record(self.folder.path / stage.record, record)
        seconds = time.perf_counter() - started
        outputs = {name: self._hash_again(name) for name in (*files, stage.record)}
        lasting = stage.lasting(record)
        self.folder.finish(
            StageRecord(
                stage=stage.name,
                key=key,
                inputs=inputs,
                outputs=outputs,
                watched={str(path): state_of(path) for path in stage.watched()},
                seconds=round(seconds, 3),
                lasting=lasting,
            )
        )
        if not lasting:
            self.progress.note(
                f"{stage.title}: memory, space or a process was lacking; what is missing is no "
                "result, and the same command tries again"
            )
        self.progress.done(stage.name, seconds=seconds, reused=False)
        return record

    def _intact(self, before: StageRecord) -> bool:
        if any(state_of(Path(name)) != state for name, state in before.watched.items()):
            return False
        return all(
            (self.folder.path / name).is_file() and self._hash(name) == value
            for name, value in before.outputs.items()
        )

    def _hash(self, name: str) -> str:
        if name not in self._hashes:
            self._hashes[name] = sha256_file(self.folder.path / name)
        return self._hashes[name]

    def _hash_again(self, name: str) -> str:
        self._hashes.pop(name, None)
        return self._hash(name)


def _key(stage: Stage[R], options: Settings, inputs: Mapping[str, str]) -> str:
    document = {
        "stage": stage.name,
        "options": {name: getattr(options, name) for name in stage.options},
        "facts": stage.facts,
        "versions": versions(*stage.packages),
        "inputs": inputs,
    }
    # records of options have no JSON of their own here: their repr says every field
    return sha256_bytes(json.dumps(document, sort_keys=True, default=repr).encode())


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of our own and other packages, from their metadata, without importing them."""
    return {"twofour": __version__, **{name: installed_version(name) for name in packages}}


DENSE, SPARSE, TUNED = Variant.DENSE, Variant.SPARSE, Variant.TUNED
"""The model as it came, where another one is the dense reference."""
PRUNE, VALIDATE, EXPORT = "prune.json", "validate.json", "export.json"
PERMUTE, PERMUTED = "stages/permute.json", "permuted.onnx"
"""The dense model with its channels in the order in which it is pruned."""
BUILD, ACCURACY = "build.json", "accuracy.json"
INPUTS = "inputs.npz"
WEIGHTS = "weights.safetensors"
ONE_SHOT, ONE_SHOT_WEIGHTS = "stages/one-shot.onnx", "stages/one-shot.safetensors"
"""The pruned model before its repair, where one was taken."""
CHECKPOINT = "checkpoint"
"""Folder of a checkpoint that was pruned in its own files."""
LAYERS = "layers.json"


def onnx_name(variant: Variant) -> str:
    """File of a variant in the run folder."""
    return f"{variant}.onnx"


def variant_record(stage: str, variant: Variant) -> str:
    """File with the record of a stage that is done for each variant."""
    return f"stages/{stage}-{variant}.json"


def reference_name(variant: Variant) -> str:
    """File with the torch module's outputs on the example inputs."""
    return f"stages/reference-{variant}.npz"


def onnx_files(path: Path) -> tuple[str, ...]:
    """Names of an ONNX file and of its external data files, `<name>.data` or `<name>.0.data`.

    Other names that begin so are the user's.
    """
    ours = re.compile(rf"{re.escape(path.name)}(\.\d+)?\.data", re.ASCII)
    found = path.parent.iterdir() if path.parent.is_dir() else ()
    return (path.name, *sorted(file.name for file in found if ours.fullmatch(file.name)))


def one_shot_files(path: Path) -> tuple[str, ...]:
    """Names in the run folder of the ONNX file of the pruned model before its repair."""
    file = path / ONE_SHOT
    names = onnx_files(file) if file.is_file() else ()
    return tuple(f"{file.parent.name}/{name}" for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: where, of what, how, and the models and sessions that stages hand on."""

    path: Path
    """Absolute: user code may change the working directory."""
    shown: Path
    """The same as the user named it."""
    runner: Runner
    source: Source
    options: Settings
    progress: Progress
    host: EngineHost
    sessions: Sessions
    models: OpenedModels
    """The ONNX files of the run, each parsed once; worker processes parse for themselves."""
    model: TorchModel | None
    """None for an ONNX file."""
    reference: Source | None = None
    """Where dense.onnx comes from, if not from `source`."""
    reference_model: TorchModel | None = None
    calibration_files: list[Path] = field(default_factory=list)
    """What the user's code read while it made the calibration data, once it has been run."""

    @property
    def dense_source(self) -> Source:
        """What dense.onnx is made from."""
        return self.reference or self.source

    def file(self, name: str) -> Path:
        """Path of a file of the run folder."""
        return self.path / name

    def example_inputs(self) -> dict[str, np.ndarray]:
        """The example inputs as the stages saved them, by name of the ONNX input."""
        return stored_arrays(self.file(INPUTS))

    def do(self, stage: Stage[R]) -> R:
        """The record of a stage, done where it has to be."""
        return self.runner.run(stage, self.options)


def exported_variant(run: Run, variant: Variant, layers: LayerMap) -> ExportedVariant:
    """What <variant>.onnx is, as it lies in the run folder, with these names of its layers."""
    path = run.file(onnx_name(variant))
    model = run.models.open(path)
    size_bytes = sum(run.file(name).stat().st_size for name in onnx_files(path))
    return ExportedVariant(
        onnx=OnnxFile(variant=variant, file=path.name, size_bytes=size_bytes),
        reference=None,
        precision=None,
        opset=model.opset,
        inputs=model.inputs,
        outputs=model.outputs,
        layers=layers,
    )

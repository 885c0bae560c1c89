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
from twofour.inputs.fits import stored_arrays
from twofour.packages import __version__, installed_version
from twofour.pipeline.folder import STAGES, RunFolder
from twofour.pipeline.settings import Decisive, Settings
from twofour.records.export import LayerMap, OnnxFile
from twofour.records.options import Variant
from twofour.records.run import ExportedVariant, StageRecord
from twofour.records.weights import PruneResult
from twofour.sources.source import state_of
from twofour.store import read_record, sha256_bytes, sha256_file, write_record
from twofour.workers.host import EngineHost, Sessions

if TYPE_CHECKING:
    import numpy as np

    from twofour.inputs.calibration import CalibrationData, ModelInputs
    from twofour.sources.source import Source


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


def _say_nothing(*_: object, **__: object) -> None:
    pass


class Silent:
    """The Progress that says nothing."""

    stage: Callable[..., None] = staticmethod(_say_nothing)
    done: Callable[..., None] = stage
    step: Callable[..., None] = stage
    note: Callable[..., None] = stage


Made = tuple[R, Sequence[str]]
"""What a stage's work gives: its record, and the names of the files that it wrote beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Generic[R]):
    """One stage: what it makes and from what; done again where any of that has changed."""

    name: str
    title: str
    kind: type[R]
    work: Callable[[], Made[R]]
    """Writes the stage's files; called where it has to be done."""
    record: str = ""
    """File of its record in the run folder, written last; "": `record_of` its name."""
    depends_on: tuple[object, ...] = ()
    """Options, keys of sources, what earlier stages found; by their repr."""
    packages: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    """Files of the run folder, left by earlier stages."""
    watched: Callable[[], Iterable[Path]] = tuple
    """Asked after `work`: data files outside the folder that the result depends on."""
    lasting: Callable[[R], bool] = lambda _record: True
    """A stage whose record is not lasting is done again by the next run."""


def record_of(stage: str) -> str:
    """File of the record of a stage that has none of its own."""
    return f"stages/{stage}.json"


class Model(Decisive, Protocol):
    """What a run does for a torch model in one way, and for an ONNX file in another."""

    @property
    def package(self) -> str:
        """What reads the model; imported while the engines' process starts."""

    @property
    def in_words(self) -> str:
        """What its exported files are compared with."""

    @property
    def precision_hint(self) -> str:
        """What to try where the outputs in `{precision}` are too far off."""

    def export_dense(self, run: Run) -> ExportedVariant:
        """dense.onnx, inputs.npz, and the outputs to compare it with."""

    def prune(self, run: Run) -> Stage[PruneResult]:
        """prune.json and the files with the pruned weights."""

    def weights(self, run: Run) -> tuple[str, ...]:
        """Names of the files that `prune` left."""

    def export_sparse(self, run: Run, dense: ExportedVariant) -> Stage[ExportedVariant]:
        """sparse.onnx."""


class Runner:
    """Runs stages in a folder and keeps the hashes of what they left, so that each is read once."""

    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        self.folder = folder
        self.progress = progress
        self._hashes: dict[str, str] = {}

    def run(self, stage: Stage[R]) -> R:
        """The stage's record, read back where nothing changed, else made by its work.

        The order on disk is files, record, run.json: a run killed in between does the stage again.
        """
        self.progress.stage(stage.name, stage.title)
        file = stage.record or record_of(stage.name)
        started = time.perf_counter()
        inputs = {name: self._hash(name) for name in stage.reads}
        key = _key(stage, inputs)
        before = self.folder.stage(stage.name)
        if before is not None and before.key == key and before.lasting and self._intact(before):
            record = read_record(stage.kind, self.folder.path / file)
            self.progress.done(stage.name, seconds=time.perf_counter() - started, reused=True)
            return record
        record, files = stage.work()
        write_record(self.folder.path / file, record)
        seconds = time.perf_counter() - started
        for name in (*files, file):
            self._hashes.pop(name, None)
        outputs = {name: self._hash(name) for name in (*files, file)}
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
                f"{stage.title}: memory or space ran out, or a process ended; the same command "
                "tries again"
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


def _key(stage: Stage[R], inputs: Mapping[str, str]) -> str:
    document = {
        "stage": stage.name,
        "depends_on": stage.depends_on,
        "versions": versions(*stage.packages),
        "inputs": inputs,
    }
    # records of options have no JSON of their own here: their repr has every field
    return sha256_bytes(json.dumps(document, sort_keys=True, default=repr).encode())


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of our own and other packages, from their metadata, without importing them."""
    return {"twofour": __version__, **{name: installed_version(name) for name in packages}}


DENSE, SPARSE, TUNED = Variant.DENSE, Variant.SPARSE, Variant.TUNED
"""The model as it came, where another one is the dense reference."""
PRUNE, VALIDATE, EXPORT = "prune.json", "validate.json", "export.json"
BUILD, ACCURACY = "build.json", "accuracy.json"
INPUTS = "inputs.npz"
WEIGHTS = "weights.safetensors"

CHECKPOINT = "checkpoint"
"""Folder of a checkpoint that was pruned in its own files."""
LAYERS = "layers.json"


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
    found = path.parent.iterdir() if path.parent.is_dir() else ()
    return (path.name, *sorted(file.name for file in found if ours.fullmatch(file.name)))


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
    model: Model
    reference: Source | None = None
    """Where dense.onnx comes from, if not from `source`."""
    keys: dict[str, str] = field(default_factory=dict)
    calibration_files: list[Path] = field(default_factory=list)
    """What the user's code read while it made the calibration data, once it has been run."""

    @property
    def dense_source(self) -> Source:
        """What dense.onnx is made from."""
        return self.reference or self.source

    def key_of(self, source: Source) -> str:
        """The key of a source of the run, worked out once: that reads all of its weights."""
        if source.text not in self.keys:
            self.keys[source.text] = source.key()
        return self.keys[source.text]

    def file(self, name: str) -> Path:
        """Path of a file of the run folder."""
        return self.path / name

    @property
    def described_in(self) -> Path | None:
        """Where the model's tokenizer and image processor may be described."""
        path = Path(self.source.text).absolute()
        if path.is_dir():
            return path
        return path.parent if path.is_file() else None

    def calibration_key(self) -> str:
        """sha256 over the calibration data; "" without any."""
        options = self.options
        if options.calibration.data is None:
            return ""
        from twofour.sources.calibration.open import calibration_key

        return calibration_key(options.calibration, self.described_in, seed=options.seed)

    def open_calibration(self, inputs: ModelInputs) -> CalibrationData:
        """The calibration data, found to fit a model that takes these inputs."""
        from twofour.sources.calibration.open import open_calibration

        options, folder = self.options, self.file(STAGES)
        data = open_calibration(options.calibration, inputs, seed=options.seed, folder=folder)
        self.calibration_files[:] = data.watched
        return data

    def example_inputs(self) -> dict[str, np.ndarray]:
        """The example inputs as the stages saved them, by name of the ONNX input."""
        return stored_arrays(self.file(INPUTS))

    def do(self, stage: Stage[R]) -> R:
        """The record of a stage, done where it has to be."""
        return self.runner.run(stage)


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

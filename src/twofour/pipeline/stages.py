"""A run and its stages: options resolved once, then each stage done or found done.

`jobs` opens the run and puts the stages in order; the modules beside this one make them. What
is decided later (the sizes that a file leaves free, a lower optimization level after a crash) is a
result in a stage's record; nothing changes the settings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from twofour.eligibility.build_facts import (
    DEPRECATED,
    WEAK_IS_DEPRECATED,
    Typing,
    never_weakly_typed,
    typing_of,
    version_numbers,
)
from twofour.engines.protocol import ENGINES, EngineRow, choose_engine
from twofour.engines.tensorrt.bindings import opset_for
from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, OpenedModels
from twofour.inputs.examples import (
    asked_shapes,
    bind_shapes,
    example_shapes,
    load_exact_inputs,
    opt_shapes,
)
from twofour.inputs.fits import Array, Shapes, shapes_of, stored_arrays
from twofour.packages import PACKAGES, __version__, installed_version, with_parts
from twofour.pipeline.folder import (
    INPUTS,
    STAGES,
    RunFolder,
    is_run_folder,
    onnx_bytes,
    onnx_name,
    record_of,
)
from twofour.pruning.methods import (
    DEFAULT_WITH_DATA,
    DEFAULT_WITHOUT_DATA,
    method_named,
    refuse_without_data,
    without_data,
)
from twofour.records import frozen
from twofour.records.export import EngineStatus, LayerMap, OnnxFile
from twofour.records.options import LossKind, Precision, RunOptions, Variant
from twofour.records.run import ExportedVariant, StageRecord, VariantCheck
from twofour.records.weights import HARDWARE_PATTERN, PruneResult, shared
from twofour.store import read_record, sha256_bytes, sha256_file, write_record
from twofour.workers.host import EngineHost, Sessions

if TYPE_CHECKING:
    from twofour.inputs.samples import CalibrationData, ModelInputs
    from twofour.sources.source import Source


R = TypeVar("R")
StatusOf = Callable[[EngineRow], EngineStatus]


class Progress(Protocol):
    """Where a run says what it is doing; the command line draws it, tests record it."""

    def stage(self, name: str, title: str) -> None:
        """A stage begins."""

    def done(self, name: str, *, seconds: float) -> None:
        """The stage is done."""

    def step(self, text: str, done: int, total: int | None) -> None:
        """Progress inside the stage."""

    def note(self, text: str) -> None:
        """Something the user should know."""


class Silent:
    """The Progress that says nothing."""

    stage: Callable[..., None] = staticmethod(lambda *_, **__: None)
    done: Callable[..., None] = stage
    step: Callable[..., None] = stage
    note: Callable[..., None] = stage


ToProgress: TypeAlias = Progress | Callable[[str], None] | None
"""A Progress, or a function that is called with titles of stages and notes; None: nobody asks."""


def progress_of(given: ToProgress) -> Progress:
    """The Progress that calls the function."""
    if not callable(given):
        return given or Silent()
    caller = Silent()
    caller.note = given
    caller.stage = lambda _name, title: given(title)
    return caller


StageOutput = tuple[R, Sequence[str]]
"""What a stage's work gives: its record, and the names of the files that it wrote beside it."""


@frozen
class Stage(Generic[R]):
    """One stage: what it makes and from what."""

    name: str
    title: str
    kind: type[R]
    work: Callable[[], StageOutput[R]]
    """Writes the stage's files; called where it has to be done."""
    record: str = ""
    """File of its record in the run folder, written last; "": `record_of` its name."""
    depends_on: tuple[object, ...] = ()
    """Options, keys of sources, what earlier stages found; by their repr."""
    reads: tuple[str, ...] = ()
    """Files of the run folder, left by earlier stages."""
    lasting: Callable[[R], bool] = lambda _record: True
    """A stage whose record is not lasting is never kept."""

    @property
    def file(self) -> str:
        """Its record in the run folder."""
        return self.record or record_of(self.name)


@frozen
class ExportedPair:
    """Both files of a run, which are compared and built."""

    dense: ExportedVariant
    sparse: ExportedVariant
    float_check: VariantCheck | None = None
    """The check of the dense file before it was quantized."""


class Model(Protocol):
    """What a torch model does in one way, and an ONNX file in another; a call does its stages."""

    package: str
    """What reads the model; imported while the engines' process starts."""
    in_words: str
    """What its exported files are compared with."""
    precision_hint: str
    """What to try where the outputs in `{precision}` are too far off."""

    def default_precision(self, options: RunOptions) -> Precision | None:
        """The precision that is taken where nobody asks for one; None: the file keeps its types."""

    def refuse_options_without_effect(self, options: RunOptions) -> None:
        """Raise BadInputError for an option that this kind of model does not take."""

    def export_dense(self, run: Run) -> ExportedVariant:
        """dense.onnx, inputs.npz, and the outputs to compare it with."""

    def prune(self, run: Run) -> PruneResult:
        """prune.json and the files with the pruned weights."""

    def weights(self, run: Run) -> tuple[str, ...]:
        """Names of the files that `prune` left."""

    def export_sparse(self, run: Run, dense: ExportedVariant) -> ExportedVariant:
        """sparse.onnx."""


class Runner:
    """Runs stages in a folder and keeps the hashes of what they left, so that each is read once.

    With `resume` a stage that an earlier run did is kept where nothing changed.
    """

    def __init__(self, folder: RunFolder, progress: Progress, *, resume: bool = False) -> None:
        self.folder = folder
        self.progress = progress
        self._resume = resume
        self._done: set[str] = set()
        self._kept: list[str] = []
        self._hashes: dict[str, str] = {}

    def run(self, stage: Stage[R]) -> R:
        """The stage's record, read back where it is kept, else made by its work."""
        record = self.found(stage)
        if record is None:
            record = self._do(stage)
        elif stage.name not in self._done:
            self._kept.append(stage.name)
        self._done.add(stage.name)
        return record

    def _do(self, stage: Stage[R]) -> R:
        """Do the stage's work and note it in run.json.

        The order on disk is files, record, run.json: a run killed in between does the stage again.
        """
        self.say_kept()
        self.progress.stage(stage.name, stage.title)
        started = time.perf_counter()
        inputs = self._hashes_of(stage.reads)
        key = _key(stage, inputs)
        self._say_changed(stage, key, inputs)
        record, files = stage.work()
        write_record(self.folder.path / stage.file, record)
        seconds = time.perf_counter() - started
        written = (*files, stage.file)
        for name in written:
            self._hashes.pop(name, None)  # that of an earlier file
        lasting = stage.lasting(record)
        self.folder.finish(
            StageRecord(
                stage=stage.name,
                key=key,
                inputs=inputs,
                outputs=self._hashes_of(written),
                seconds=round(seconds, 3),
                lasting=lasting,
            )
        )
        if not lasting:
            self.progress.note(
                f"{stage.title}: memory or space ran out, or a process ended; the same command "
                "with --resume tries it again"
            )
        self.progress.done(stage.name, seconds=seconds)
        return record

    def _say_changed(self, stage: Stage[R], key: str, inputs: Mapping[str, str]) -> None:
        """Say which stage is not kept although it read the same files before."""
        before = self.folder.stage(stage.name)
        if before is None or not self._resume:
            return
        if before.inputs == inputs and before.key != key:
            self.progress.note(
                f"{stage.name} is done again: an option, the model or a package is not as before"
            )

    def say_kept(self) -> None:
        """Say which stages of an earlier run were kept since the last stage that was done."""
        if self._kept:
            self.progress.note(f"kept: {', '.join(self._kept)}")
            self._kept.clear()

    def found(self, stage: Stage[R]) -> R | None:
        """The record of a stage that is done and of which nothing changed, else None."""
        # without --resume only what this command did itself is taken
        if not self._resume and stage.name not in self._done:
            return None
        key = _key(stage, self._hashes_of(stage.reads))
        before = self.folder.stage(stage.name)
        if before is None or before.key != key:
            return None
        there = all((self.folder.path / name).is_file() for name in before.outputs)
        if not before.lasting or not there or self._hashes_of(before.outputs) != before.outputs:
            return None
        return read_record(stage.kind, self.folder.path / stage.file)

    def _hashes_of(self, names: Collection[str]) -> dict[str, str]:
        for name in names:
            if name not in self._hashes:
                self._hashes[name] = sha256_file(self.folder.path / name)
        return {name: self._hashes[name] for name in names}


def _key(stage: Stage[R], inputs: Mapping[str, str]) -> str:
    document = {
        "stage": stage.name,
        "depends_on": stage.depends_on,
        "versions": versions(),
        "inputs": inputs,
    }
    # records of options have no JSON of their own here: their repr has every field
    return sha256_bytes(json.dumps(document, sort_keys=True, default=repr).encode())


@cache
def versions() -> dict[str, str | None]:
    """Versions of our own and all other packages, by their metadata, without importing them."""
    names = with_parts(*(package.name for package in PACKAGES))
    return {"twofour": __version__, **{name: installed_version(name) for name in names}}


@frozen
class Settings(RunOptions):
    """The options with `precision` and `opset` decided, and the engine that runs."""

    chosen: EngineStatus | None = None
    """None in a job that builds nothing."""
    not_used: tuple[EngineStatus, ...] = ()
    """The preferred engines that cannot run here."""

    @property
    def method_name(self) -> str:
        """The pruning method that was asked for, else the default with or without data."""
        default = DEFAULT_WITHOUT_DATA if self.calibration.data is None else DEFAULT_WITH_DATA
        return self.method.name or default

    @property
    def pruned_variant(self) -> Variant:
        """The file that pruning leaves: what the engines get, or what is quantized first."""
        return Variant.PRUNED if self.quantize else Variant.SPARSE

    @property
    def dense_variant(self) -> Variant:
        """The file of the unchanged model: what the engines get, or what is quantized first."""
        return Variant.FLOAT if self.quantize else Variant.DENSE

    @property
    def refits_a_mask(self) -> bool:
        """The mask that came with the model is kept, its weights refitted to the dense model."""
        refits = self.method.name == "keep" and bool(self.method.refit)
        return refits and self.dense_reference is not None

    @property
    def builder(self) -> EngineStatus:
        """The engine of a job that builds."""
        assert self.chosen is not None, "only asked for by the stages that build"
        return self.chosen

    @property
    def engine_row(self) -> EngineRow:
        """What the registry says of it."""
        return ENGINES[self.builder.engine]


@frozen
class Run:
    """One run: its folder, model and options, and what one stage hands to the next."""

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
    model: Model
    dense_source: Source
    """What dense.onnx is made from: `source`, or the model that --dense-reference names."""
    models: OpenedModels = field(default_factory=OpenedModels)
    """The ONNX files of the run, each parsed once; worker processes parse for themselves."""
    keys: dict[str, str] = field(default_factory=dict)

    def key_of(self, source: Source) -> str:
        """The key of a source of the run, worked out once: that reads all of its weights."""
        if source.text not in self.keys:
            self.keys[source.text] = source.key()
        return self.keys[source.text]

    def file(self, name: str) -> Path:
        """Path of a file of the run folder."""
        return self.path / name

    def there(self, *names: str) -> tuple[str, ...]:
        """Those of these files that are in the run folder."""
        return tuple(name for name in names if self.file(name).is_file())

    def onnx(self, variant: Variant) -> Path:
        """Path of the ONNX file of a variant."""
        return self.path / onnx_name(variant)

    def opened(self, variant: Variant) -> OpenedModel:
        """The ONNX file of a variant, parsed once."""
        return self.models.open(self.onnx(variant))

    @property
    def described_in(self) -> Path | None:
        """Folder in which the model's tokenizer and image processor may be described."""
        # bert/ has bert/tokenizer.json; export/model.onnx may have export/tokenizer.json
        path = Path(self.source.text).absolute()
        if path.is_file():
            return path.parent
        return path if path.is_dir() else None

    def calibration_key(self) -> str:
        """sha256 over the calibration data; "" without any."""
        options = self.options
        if options.calibration.data is None:
            return ""
        from twofour.sources.calibration.kinds import calibration_key

        return calibration_key(options.calibration, self.described_in, seed=options.seed)

    def open_calibration(self, inputs: ModelInputs) -> CalibrationData:
        """The calibration data, checked to fit a model that takes these inputs."""
        from twofour.sources.calibration.kinds import open_calibration

        options = self.options
        return open_calibration(
            options.calibration, inputs, seed=options.seed, folder=self.file(STAGES)
        )

    def example_inputs(self) -> dict[str, Array]:
        """The example inputs as the stages saved them, by name of the ONNX input."""
        return stored_arrays(self.file(INPUTS))

    def asked_shapes(self, model: OpenedModel) -> dict[str, tuple[int, ...]]:
        """Shapes of the example inputs; of --shapes where it names an input of the model."""
        asked = bind_shapes(self.options.build.shapes, model.inputs)
        return shapes_of(self.example_inputs()) | opt_shapes(asked)

    def do(self, stage: Stage[R]) -> R:
        """The record of a stage, done where it has to be."""
        return self.runner.run(stage)


def exported_variant(run: Run, variant: Variant, layers: LayerMap) -> ExportedVariant:
    """The record of <variant>.onnx in the run folder, with these names of its layers."""
    path = run.onnx(variant)
    model = run.models.open(path)
    return ExportedVariant(
        onnx=OnnxFile(variant=variant, file=path.name, size_bytes=onnx_bytes(path)),
        reference=None,
        precision=None,
        opset=model.opset,
        inputs=model.inputs,
        outputs=model.outputs,
        layers=layers,
    )


def with_inputs_beside(path: Path, options: RunOptions) -> RunOptions:
    """The options with the example inputs of the run folder that an ONNX file of ours is in.

    They are as they were where somebody gave inputs or their shapes.
    """
    inputs = path.parent / INPUTS
    ours = path.name in (onnx_name(Variant.DENSE), onnx_name(Variant.SPARSE))
    if options.inputs or options.input_shapes or not ours:
        return options
    if not is_run_folder(path.parent) or not inputs.is_file():
        return options
    return replace(options, inputs=str(inputs))


def shapes_of_file(model: OpenedModel, options: RunOptions) -> Shapes:
    """Shapes of the example inputs, else those that were asked for, or are in the file."""
    if options.file is not None:
        return shapes_of(load_exact_inputs(options.file, model.inputs))
    sizes = asked_shapes(model.inputs, options, options.build.shapes)
    return example_shapes(model.inputs, sizes, str(model.path))


def refuse_kept_without_change(options: RunOptions, precision: Precision | None) -> None:
    """Raise BadInputError for --keep-float32 where no precision is changed."""
    if options.keep_float32 and precision in (None, Precision.FLOAT32):
        raise BadInputError(
            "--keep-float32 needs a change of precision, and none is asked for",
            hint="add --precision float16 or bfloat16",
        )


def resolve_options(
    options: RunOptions, model: Model, status_of: StatusOf | None, note: Callable[[str], None]
) -> Settings:
    """Decide what the options leave open; `status_of` tries an engine, None: none is needed.

    Raises BadInputError for options that do not fit, MissingToolError when no engine can run.
    """
    model.refuse_options_without_effect(options)
    if options.gpu is not None:
        from twofour.forecasting.gpus import gpu_named

        gpu_named(options.gpu)  # a wrong name is said before the model is loaded
        if options.pattern != HARDWARE_PATTERN:
            why = f"--gpu {options.gpu}: no sparse kernel runs {options.pattern}"
            raise BadInputError(why, hint=f"leave --gpu out, or prune to {HARDWARE_PATTERN}")
    _refuse_without_data(options)
    _refuse_unmeasured(options)
    _refuse_quantization(options)
    if options.metric is not None:  # found before hours of work, not after
        from twofour.sources.user_code import load_metric

        load_metric(options.metric)
    chosen = None
    not_used: tuple[EngineStatus, ...] = ()
    if status_of is not None:
        chosen, not_used = _pick_engine(options, status_of, note)
    precision = options.precision or model.default_precision(options)
    refuse_kept_without_change(options, precision)
    decided = {"precision": precision, "opset": _opset(options, chosen)}
    asked = shared(options, RunOptions) | decided
    return Settings(**asked, chosen=chosen, not_used=not_used)


def _opset(options: RunOptions, chosen: EngineStatus | None) -> int | None:
    """The opset that was asked for, else one that the release of TensorRT reads."""
    if options.opset is not None or options.precision is Precision.BFLOAT16:
        return options.opset
    if chosen is None or not ENGINES[chosen.engine].is_tensorrt:
        return None
    return opset_for(chosen.version)


def _refuse_unmeasured(options: RunOptions) -> None:
    """A budget in units of a metric needs one, and a dense model."""
    if options.budget.is_set and options.dense_reference is not None:
        raise BadInputError(
            "a budget chooses what is pruned: with --dense-reference the model is pruned already",
            hint="leave --dense-reference out, or choose layers with --layers",
        )
    if options.metric is not None:
        return
    # --budget alone goes by the error of the outputs
    if options.budget.max_drop is not None:
        raise BadInputError(
            "--max-drop is in the units of your metric, and none is given",
            hint="add --metric file.py:evaluate, or choose by --budget 0.8",
        )
    if options.budget.loss is LossKind.METRIC:
        raise BadInputError("--loss metric needs a metric", hint="add --metric file.py:evaluate")


def _refuse_quantization(options: RunOptions) -> None:
    """Ranges need samples; layers are chosen in the float model alone."""
    if options.quantize is None:
        return
    if options.calibration.data is None:
        raise BadInputError(
            "--quantize needs calibration samples to measure the ranges of activations",
            hint="add --calibrate DATA",
        )
    if options.budget.is_set:
        raise BadInputError(
            "--quantize and a budget are two runs",
            hint="leave one out; `twofour sensitivity` writes a layers.txt for --layers",
        )


def _refuse_without_data(options: RunOptions) -> None:
    """A method that needs data, and options that say how data are used."""
    method = options.method
    if options.calibration.data is not None:
        from twofour.pruning.solve import LayerSolver

        # raises for settings that no layer can be solved with: the data are not read yet
        LayerSolver(method_named(method.name or DEFAULT_WITH_DATA), method)
        return
    if method.name is not None:
        without_data(method.name)
    refuse_without_data(method, options.calibration)


def _pick_engine(
    options: RunOptions, status_of: StatusOf, note: Callable[[str], None]
) -> tuple[EngineStatus, tuple[EngineStatus, ...]]:
    """Choose by trying; a note says where the preferred engine cannot run, or an option is idle.

    Raises BadInputError for --fp16, --int8 and --bf16 with TensorRT 11.
    """
    status, not_used = choose_engine(options.engine, status_of)
    for other in not_used:
        note(f"{other.engine} cannot run here: {other.why_not}; continuing with {status.engine}")
    allow = options.build.allow  # --fp16, --int8 and --bf16
    version = status.version or ""
    if not allow:
        return status, not_used
    if not ENGINES[status.engine].is_tensorrt:
        words = ", ".join(f"--{allowed.value}" for allowed in allow)
        note(f"{words}: no effect with {status.engine}, only with TensorRT")
    elif typing_of(version_numbers(version)) is Typing.STRONG:
        raise never_weakly_typed(version, allow[0])
    elif version_numbers(version) >= WEAK_IS_DEPRECATED:
        note(DEPRECATED)
    return status, not_used

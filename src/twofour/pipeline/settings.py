"""What a run does: its options, resolved once, before the first stage.

What is decided later (the sizes that a file leaves free, a lower optimization level after a crash)
is a result in a stage's record; nothing changes the settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from twofour.eligibility.build_facts import (
    DEPRECATED,
    WEAK_IS_DEPRECATED,
    Typing,
    never_weakly_typed,
    typing_of,
    version_numbers,
)
from twofour.engines.registry import ENGINES, EngineRow, choose_engine
from twofour.engines.tensorrt.build import opset_for
from twofour.errors import BadInputError
from twofour.pipeline.sources.onnx import OnnxSource
from twofour.pipeline.sources.source import Source
from twofour.pruning.methods import (
    DEFAULT_WITH_DATA,
    DEFAULT_WITHOUT_DATA,
    method_named,
    refuse_without_data,
    without_data,
)
from twofour.records.build import EngineStatus
from twofour.records.options import LossKind, Precision, RunOptions

StatusOf = Callable[[EngineRow], EngineStatus]
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenEngine:
    """The engine of a run, and what was preferred to it and cannot run here."""

    status: EngineStatus
    not_used: tuple[EngineStatus, ...]

    @property
    def row(self) -> EngineRow:
        """What the registry says of it."""
        return ENGINES[self.status.engine]

    @property
    def builds_from_sparse(self) -> bool:
        """TensorRT: both engines come from sparse.onnx and differ in the sparsity flag alone."""
        return self.row.is_tensorrt


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RunOptions):
    """The options with `precision` and `opset` decided, and the engine that runs.

    For a torch model `precision` is not None; `opset` is None where torch's own default is taken,
    and for an ONNX file, which has one. `precision` is None for a file that keeps its types.
    """

    chosen: ChosenEngine | None = None
    """None in a job that builds nothing."""

    @property
    def method_name(self) -> str:
        """The pruning method that was asked for, else the default with or without data."""
        default = DEFAULT_WITHOUT_DATA if self.calibration.data is None else DEFAULT_WITH_DATA
        return self.method.name or default

    @property
    def refits_a_mask(self) -> bool:
        """A mask that came with the model is kept, its weights refitted to the dense reference."""
        refits = self.method.name == "keep" and bool(self.method.refit)
        return refits and self.dense_reference is not None

    @property
    def builder(self) -> ChosenEngine:
        """The engine of a job that builds."""
        assert self.chosen is not None, "only asked for by the stages that build"
        return self.chosen


def resolve(
    options: RunOptions, source: Source, status_of: StatusOf | None, note: Note
) -> Settings:
    """Decide what the options leave open; `status_of` tries an engine, None: none is needed.

    Raises BadInputError for options that this kind of source would pass over, a method that lacks
    its data, and a metric that cannot be called, and MissingToolError when nothing that was asked
    for can run here.
    """
    _refuse_passed_over(options, source)
    _refuse_without_data(options)
    _refuse_broken_mask(options)
    _refuse_unmeasured(options, source)
    if options.metric is not None:  # found before hours of work, not after
        from twofour.pipeline.sources.metric import load_metric

        load_metric(options.metric)
    chosen = None if status_of is None else _pick_engine(options, status_of, note)
    asked = {field.name: getattr(options, field.name) for field in fields(RunOptions)}
    decided = {"precision": _precision(options, source), "opset": _opset(options, source, chosen)}
    return Settings(**{**asked, **decided}, chosen=chosen)


def _refuse_unmeasured(options: RunOptions, source: Source) -> None:
    """A budget in units of a metric needs one; losses need data, gradients or a dense model."""
    if options.budget.is_set and options.dense_reference is not None:
        raise BadInputError(
            "a budget chooses what is pruned: with --dense-reference the model is pruned already",
            hint="leave --dense-reference out, or choose layers with --layers",
        )
    if options.budget.loss is LossKind.LAYER and options.calibration.data is None:
        raise BadInputError(
            "--loss layer is the output error of each layer on calibration data, and there is none",
            hint="add --calibrate, or choose another --loss",
        )
    if options.budget.loss is LossKind.FISHER and isinstance(source, OnnxSource):
        raise BadInputError(
            "--loss fisher needs gradients, and an ONNX file has none",
            hint="name the torch model, or choose another --loss",
        )
    if options.metric is not None:
        return
    if options.budget.max_drop is not None:
        raise BadInputError(
            "--max-drop is in the units of your metric, and none is given",
            hint="add --metric file.py:evaluate, or choose by --budget 0.8",
        )
    if options.budget.loss is LossKind.METRIC:
        raise BadInputError("--loss metric needs a metric", hint="add --metric file.py:evaluate")


def _precision(options: RunOptions, source: Source) -> Precision | None:
    """Of a torch model float16 unless asked otherwise: TensorRT has no sparse float32 kernels."""
    if isinstance(source, OnnxSource):
        return options.precision
    return options.precision or Precision.FLOAT16


def _opset(options: RunOptions, source: Source, chosen: ChosenEngine | None) -> int | None:
    """Where nobody asked for one, a torch model is exported in an opset that the engine reads."""
    is_open = options.opset is None and options.precision is not Precision.BFLOAT16
    if is_open and not isinstance(source, OnnxSource) and chosen and chosen.builds_from_sparse:
        return opset_for(chosen.status.version)
    return options.opset


def _refuse_passed_over(options: RunOptions, source: Source) -> None:
    """What would be passed over in silence: it would look as if it had been done."""
    if not isinstance(source, OnnxSource):
        if options.keep_float32:
            raise BadInputError(
                f"{source.text} is a torch model: --keep-float32 names nodes of an ONNX file",
                hint="export it with --precision float32 first, then convert the file: "
                "twofour export model.onnx --precision float16 --keep-float32 GLOB",
            )
        return
    for given, option, hint in (
        (
            options.dynamic is not None,
            "--dynamic",
            "which sizes are free stands in the file; --input-shape says what they are",
        ),
        (
            not options.dynamic_batch,
            "--static-batch",
            "whether the batch is free stands in the file; --input-shape says what it is",
        ),
        (
            options.opset is not None,
            "--opset",
            "export the torch model with twofour, or convert the file first "
            "(onnx.version_converter)",
        ),
    ):
        if given:
            raise BadInputError(
                f"{source.text} is ONNX already: {option} is for torch models", hint=hint
            )


def _refuse_without_data(options: RunOptions) -> None:
    """A method that needs data, and options that say how data are used."""
    method, calibration = options.method, options.calibration
    if method.name is not None:
        method_named(method.name)
    if calibration.data is not None:
        from twofour.pruning.solve import solve_layers

        # without layers it looks at the settings alone: the data are not read yet
        solve_layers((), method_named(method.name or DEFAULT_WITH_DATA), method)
        return
    if method.name is not None:
        without_data(method.name)
    refuse_without_data(method, calibration)


def _refuse_broken_mask(options: RunOptions) -> None:
    """Another order of channels would break the zeros that a model came with."""
    method = options.method
    for given, option in (
        (method.name == "keep", "--method keep"),
        (options.dense_reference is not None, "--dense-reference"),
    ):
        if given and method.permute_seconds > 0:
            raise BadInputError(
                f"--permute-seconds would tear apart the mask that {option} says the model has",
                hint="leave one of the two out",
            )


def _pick_engine(options: RunOptions, status_of: StatusOf, note: Note) -> ChosenEngine:
    """Choose by trying, and say so in one line where the preferred engine cannot run."""
    status, not_used = choose_engine(options.engine, status_of)
    for other in not_used:
        note(f"{other.engine} cannot run here: {other.why_not}; going on with {status.engine}")
    chosen = ChosenEngine(status=status, not_used=not_used)
    _check_allowed_types(options, chosen, note)
    return chosen


def _check_allowed_types(options: RunOptions, chosen: ChosenEngine, note: Note) -> None:
    """Say where --fp16, --int8 and --bf16 do nothing, and refuse them for TensorRT 11."""
    allow = options.build.allow
    version = chosen.status.version or ""
    if not allow:
        return
    words = ", ".join(f"--{allowed.value}" for allowed in allow)
    if not chosen.builds_from_sparse:
        note(f"{words}: of TensorRT alone; {chosen.status.engine} runs the file")
    elif typing_of(version_numbers(version)) is Typing.STRONG:
        raise never_weakly_typed(version, allow[0])
    elif version_numbers(version) >= WEAK_IS_DEPRECATED:
        note(DEPRECATED)

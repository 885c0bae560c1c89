"""What a run does: its options, resolved once, before the first stage.

What is decided later (the sizes that a file leaves free, a lower optimization level after a crash)
is a result in a stage's record; nothing changes the settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

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
from twofour.pruning.methods import (
    DEFAULT_WITH_DATA,
    DEFAULT_WITHOUT_DATA,
    method_named,
    refuse_without_data,
    without_data,
)
from twofour.records.export import EngineStatus
from twofour.records.options import LossKind, Precision, RunOptions

StatusOf = Callable[[EngineRow], EngineStatus]
Note = Callable[[str], None]


class Decisive(Protocol):
    """What a model of one kind decides about the options."""

    @property
    def default_precision(self) -> Precision | None:
        """Where nobody asked for one; None: the file keeps its types."""

    def refuse_passed_over(self, options: RunOptions) -> None:
        """Raise BadInputError for an option without effect: it would look as if it had one."""


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
    """The options with `precision` and `opset` decided, and the engine that runs."""

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


def refuse_kept_without_change(options: RunOptions, precision: Precision | None) -> None:
    """Raise BadInputError for nodes that keep float32 where all do."""
    if options.keep_float32 and precision in (None, Precision.FLOAT32):
        raise BadInputError(
            "--keep-float32 says what a change of precision leaves alone, and none is asked for",
            hint="add --precision float16 or bfloat16",
        )


def resolve(
    options: RunOptions, model: Decisive, status_of: StatusOf | None, note: Note
) -> Settings:
    """Decide what the options leave open; `status_of` tries an engine, None: none is needed.

    Raises BadInputError for options that do not fit, MissingToolError when no engine can run.
    """
    model.refuse_passed_over(options)
    _refuse_without_data(options)
    _refuse_unmeasured(options)
    if options.metric is not None:  # found before hours of work, not after
        from twofour.sources.user_code import load_metric

        load_metric(options.metric)
    chosen = None if status_of is None else _pick_engine(options, status_of, note)
    asked = {field.name: getattr(options, field.name) for field in fields(RunOptions)}
    precision = options.precision or model.default_precision
    refuse_kept_without_change(options, precision)
    opset, is_bfloat16 = options.opset, options.precision is Precision.BFLOAT16
    if opset is None and not is_bfloat16 and chosen is not None and chosen.builds_from_sparse:
        opset = opset_for(chosen.status.version)  # one that the engine reads
    decided = {"precision": precision, "opset": opset}
    return Settings(**{**asked, **decided}, chosen=chosen)


def _refuse_unmeasured(options: RunOptions) -> None:
    """A budget in units of a metric needs one, and a dense model."""
    if options.budget.is_set and options.dense_reference is not None:
        raise BadInputError(
            "a budget chooses what is pruned: with --dense-reference the model is pruned already",
            hint="leave --dense-reference out, or choose layers with --layers",
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

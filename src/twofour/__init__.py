"""From a dense model to a 2:4-sparse TensorRT engine, with a reason for every layer.

`run` is the command prune-export-build, for a module in memory too. `prune` prunes a module in
memory, `finetune` trains it to give the dense outputs again, `hold_masks` keeps its zeros in your
own training, and `load_weights` puts the weights of a run into one. `forecast`, `validate` and
`compare` are the commands of these names. `product_times` predicts one matrix product on a GPU,
dense and 2:4. `masked_mean` and `masked_var` leave masked positions out. Their records and errors
are here by name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from twofour.errors import BadInputError
from twofour.packages import __version__

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from twofour.errors import BuildFailedError, MissingToolError, PatternBrokenError, TwofourError
    from twofour.forecasting.kernels import product_times, times_of_products
    from twofour.records.eligibility import EligibilityReport
    from twofour.records.forecast import Forecast, ProductTimes
    from twofour.records.latency import LatencyComparison
    from twofour.records.log import BuildLog
    from twofour.records.options import (
        BudgetOptions,
        BuildOptions,
        CalibrationOptions,
        CompareOptions,
        ExportOptions,
        ForecastOptions,
        MathPrecision,
        MethodOptions,
        Precision,
        RunOptions,
        SideBySide,
        TrainingOptions,
        Trust,
    )
    from twofour.records.run import Finetuning, RunResult
    from twofour.records.weights import (
        Calibration,
        LoadedWeights,
        Pattern,
        PruneResult,
        Selection,
        Validation,
    )
    from twofour.sources.callable import ModuleSource
    from twofour.training.masks import MaskHolder
    from twofour.training.means import masked_mean, masked_var

T = TypeVar("T")
__all__ = [
    "BadInputError",
    "BudgetOptions",
    "BuildFailedError",
    "BuildLog",
    "BuildOptions",
    "Calibration",
    "CalibrationOptions",
    "CompareOptions",
    "EligibilityReport",
    "ExportOptions",
    "Finetuning",
    "Forecast",
    "ForecastOptions",
    "LatencyComparison",
    "LoadedWeights",
    "MaskHolder",
    "MathPrecision",
    "MethodOptions",
    "MissingToolError",
    "Pattern",
    "PatternBrokenError",
    "Precision",
    "ProductTimes",
    "PruneResult",
    "RunOptions",
    "RunResult",
    "Selection",
    "SideBySide",
    "TrainingOptions",
    "Trust",
    "TwofourError",
    "Validation",
    "__version__",
    "compare",
    "finetune",
    "forecast",
    "hold_masks",
    "load_weights",
    "masked_mean",
    "masked_var",
    "product_times",
    "prune",
    "run",
    "times_of_products",
    "validate",
]


def __getattr__(name: str) -> object:
    """Import what is here by name when it is used: all of it takes longer than most commands."""
    if name in __all__:
        for room in (
            "errors",
            "records",
            "forecasting.kernels",
            "training.means",
            "training.masks",
        ):
            module = importlib.import_module(f"twofour.{room}")
            value: object = getattr(module, name, None)
            if value is not None:
                globals()[name] = value  # the next time Python finds it there
                return value
    raise AttributeError(f"module 'twofour' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, imported yet or not."""
    return __all__


def prune(  # noqa: PLR0913  # what a user may choose
    model: nn.Module,
    pattern: str | Pattern = "2:4",
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    all_layers: bool = False,
    method: str | None = None,
    calibrate: object = None,
    samples: int = 1024,
    refit: int | None = None,
    damping: float | None = None,
) -> PruneResult:
    """Prune a torch module in place to N:M, and say what was done to each weight.

    `include` and `exclude` are globs over layer names. `calibrate` is an iterable of batches as
    the model takes them: a tensor, a tuple by position, a dict by name, or for a model of one input
    pairs of inputs and labels, which are left out. At most `samples` samples are used. With
    `calibrate` the method is admm by default and the biases are corrected, without it magnitude.
    `refit` and `damping` are those of the command line. Raises BadInputError for a bad pattern, an
    unknown method, a glob that matches nothing, NaN or infinity in a weight or computed from the
    data, a weight that two layers need along different axes, batches that the model cannot run on,
    TorchScript, and an option that needs data without any; then nothing is changed.
    """
    from twofour.records.options import CalibrationOptions, MethodOptions, RunOptions
    from twofour.records.weights import shared

    module = _module_of(model, "for a model on disk: twofour.run(...), or `twofour prune`")
    data = None if calibrate is None else "batches"
    asked = RunOptions(
        pattern=_parsed(pattern),
        selection=_selection(include, exclude, all_layers=bool(all_layers)),
        method=_checked(
            MethodOptions,
            MethodOptions(
                name=method,
                refit=refit,
                damping=damping,
            ),
        ),
        calibration=_checked(CalibrationOptions, CalibrationOptions(data=data, samples=samples)),
    )
    if calibrate is None:
        return _prune_without_data(module, asked)
    from twofour.pipeline.stages import Settings
    from twofour.pipeline.torch.pruning import prune_by_batches

    return prune_by_batches(module, calibrate, Settings(**shared(asked, RunOptions)))


def _prune_without_data(module: nn.Module, asked: RunOptions) -> PruneResult:
    from twofour.pruning.methods import DEFAULT_WITHOUT_DATA, refuse_without_data
    from twofour.pruning.torch import prune_module

    refuse_without_data(asked.method, asked.calibration)
    name = asked.method.name or DEFAULT_WITHOUT_DATA
    return prune_module(module, asked.pattern, asked.selection, method=name)


def load_weights(model: nn.Module, path: str | Path) -> LoadedWeights:
    """Put pruned weights into a module in place: weights.safetensors, or the run folder it is in.

    Where keys, shapes, types or ties do not fit, it raises BadInputError and changes nothing.
    Weights that the module computes (parametrizations, weight norm) become plain ones, because it
    would compute them again from the dense ones.
    """
    from twofour.pipeline.folder import final_weights
    from twofour.pipeline.torch.weight_files import load_weights as load

    module = _module_of(model, "load_weights fills a module in memory")
    file = Path(path)
    if file.is_dir():
        file = file / final_weights(file)
    return load(module, file)


def hold_masks(
    model: nn.Module,
    optimizer: Optimizer,
    pattern: str | Pattern = "2:4",
) -> MaskHolder:
    """Keep the zeros of a pruned module at zero while `optimizer` trains it (docs/training.md).

    Every weight is held whose zeros hold the pattern; `weights` of the result names them. Call it
    before the first step, after the model was sharded (FSDP2) and the optimizer was made. Raises
    BadInputError where no weight is pruned, for FSDP1, and for an optimizer of other weights.
    """
    from twofour.training.masks import hold

    return hold(_module_of(model, "load its weights into a module"), optimizer, _parsed(pattern))


def finetune(
    model: nn.Module,
    dense: nn.Module,
    batches: object,
    *,
    minutes: float = 20.0,
    pattern: str | Pattern = "2:4",
) -> Finetuning:
    """Train a pruned module in place until it gives the outputs of `dense` again; zeros stay.

    `batches` are those of `prune`, without labels; every tenth is held out (16 at most), and the
    module ends with the weights that were best on these. Raises BadInputError where no weight is
    pruned, the modules have other outputs, and for batches that they cannot run on.
    """
    from twofour.inputs.samples import TRAINING_SAMPLES
    from twofour.sources.calibration.kinds import module_inputs
    from twofour.sources.calibration.loaders import calibration_from_value
    from twofour.training.distillation import TrainingTask, distil

    student = _module_of(model, "load it first")
    teacher = _module_of(dense, "load it first")
    inputs = module_inputs(student)
    data = calibration_from_value(batches, inputs, samples=TRAINING_SAMPLES, where="batches")
    return distil(student, teacher, data, TrainingTask(pattern=_parsed(pattern), minutes=minutes))


def validate(
    path: str | Path,
    pattern: str | Pattern | None = None,
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
) -> Validation:
    """Judge the weights in a saved file or folder; `broken` of the result has those that fail.

    Without a pattern a run folder is judged by its own, everything else by 2:4. Raises
    BadInputError for a file that cannot be read, and where there is nothing to check.
    """
    from twofour.pipeline.validating import validate_path

    wanted = None if pattern is None else _parsed(pattern)
    return validate_path(Path(path), wanted, _selection(include, exclude))


def run(
    model: str | Path | nn.Module,
    example_inputs: object = None,
    *,
    out: str | Path | None = None,
    options: RunOptions | None = None,
) -> RunResult:
    """Prune, validate, export, build and report into a run folder.

    `model` is a model source as on the command line, or a module in memory with its example
    inputs: a tensor, a tuple of tensors by position, or a dict of them by name. The module is not
    changed: a copy is pruned (the result is weights.safetensors in the run folder). With
    `options.resume` stages of an earlier run there are kept where nothing changed. Raises the
    kinds of TwofourError.
    """
    from twofour.jobs import run_all
    from twofour.records.options import RunOptions

    settings = _checked(RunOptions, options)
    folder = None if out is None else Path(out)
    return run_all(_source(model, example_inputs, settings), folder, settings)


def compare(
    *paths: str | Path,
    out: str | Path | None = None,
    options: CompareOptions | None = None,
) -> LatencyComparison:
    """Time the variants of a run folder, or of ONNX files and engines, in interleaved rounds.

    Writes latency.json and its pages into `out` (default: the run folder, or runs/compare-...).
    Raises the kinds of TwofourError.
    """
    from twofour.comparing.comparison import compare as run_comparison
    from twofour.records.options import CompareOptions

    settings = _checked(CompareOptions, options)
    folder = None if out is None else Path(out)
    return run_comparison([Path(path) for path in paths], folder, settings)[1]


def forecast(
    model: str | Path | nn.Module,
    example_inputs: object = None,
    *,
    asked: ForecastOptions | None = None,
    options: RunOptions | None = None,
) -> Forecast:
    """Forecast what 2:4 may gain in the model by GPU, precision and batch, before it is pruned.

    `model` and `example_inputs` are those of `run`; `options` say the sizes of the inputs. A module
    is exported into a temporary folder, an ONNX file is only read. Raises the kinds of
    TwofourError.
    """
    from twofour.jobs import run_forecast
    from twofour.records.options import ForecastOptions, RunOptions

    settings = _checked(RunOptions, options)
    source = _source(model, example_inputs, settings)
    return run_forecast(source, _checked(ForecastOptions, asked), settings)


def _checked(kind: type[T], given: T | None) -> T:
    """Options with every field checked; the defaults where none are given."""
    from twofour.store import checked

    return kind() if given is None else checked(kind, given)


def _source(
    model: str | Path | nn.Module,
    example_inputs: object,
    options: RunOptions,
) -> str | ModuleSource:
    """The text of a model that is named, or a module in memory as a source."""
    if _is_module(model):
        from twofour.sources.callable import ModuleSource

        return ModuleSource(cast("nn.Module", model), example_inputs, options)
    if example_inputs is not None:
        raise BadInputError(
            "example_inputs must be left out for a model that is named",
            hint="name the run folder with out=, inputs with options=RunOptions(inputs='x.npz')",
        )
    return str(Path(cast("str | Path", model)))


def _selection(
    include: str | Sequence[str], exclude: str | Sequence[str], *, all_layers: bool = False
) -> Selection:
    """The layers that globs name; a text alone is one glob, not a sequence of letters."""
    from twofour.records.weights import Selection

    included = [include] if isinstance(include, str) else include
    excluded = [exclude] if isinstance(exclude, str) else exclude
    return Selection(
        include=tuple(included),
        exclude=tuple(excluded),
        all_layers=all_layers,
    )


def _parsed(pattern: str | Pattern) -> Pattern:
    """A Pattern, or one as text; raises BadInputError."""
    from twofour.records.weights import Pattern

    return Pattern.parse(str(pattern))


def _is_module(value: object) -> bool:
    """Whether it is a torch module, without importing torch."""
    # who has a module has imported torch
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _module_of(value: object, hint: str) -> nn.Module:
    """A torch module; raises BadInputError for anything else."""
    if not _is_module(value):
        raise BadInputError(
            f"model must be a torch.nn.Module in memory, found {value!r:.200} of type "
            f"{type(value).__name__}",
            hint=hint,
        )
    return cast("nn.Module", value)

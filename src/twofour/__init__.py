"""From a dense model to a 2:4-sparse TensorRT engine, with a reason for every layer.

`run` is the command prune-export-build, for a module in memory too. `prune` prunes a module in
memory, `finetune` trains it to give the dense outputs again, `hold_masks` keeps its zeros in your
own training, and `load_weights` puts the weights of a run into one. `read_log` is the command log,
and `report`, `explain`, `sensitivity`, `export`, `build`, `validate`, `sizes`, `forecast`,
`compare` and `doctor` are the commands of these names. `product_times` predicts one matrix product
on a GPU, dense and 2:4. `masked_mean` and `masked_var` leave masked positions out. Their records
and errors are here by name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from twofour.errors import BadInputError
from twofour.packages import __version__

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from twofour.errors import BuildFailedError, MissingToolError, PatternBrokenError, TwofourError
    from twofour.forecasting.kernels import product_times, times_of_products
    from twofour.pipeline.stages import ToProgress
    from twofour.records.eligibility import EligibilityReport
    from twofour.records.export import Diagnosis
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
    from twofour.records.run import (
        BuildResult,
        ExportedVariant,
        Finetuning,
        ModelSizes,
        RunResult,
        SensitivityResult,
    )
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
Model: TypeAlias = "str | Path | nn.Module"
Place: TypeAlias = "str | Path | None"
Data: TypeAlias = "str | Path | Iterable[object] | Callable[[], object] | None"
Metric: TypeAlias = "str | Callable[..., object] | None"
__all__ = [
    "BadInputError",
    "BudgetOptions",
    "BuildFailedError",
    "BuildLog",
    "BuildOptions",
    "BuildResult",
    "Calibration",
    "CalibrationOptions",
    "CompareOptions",
    "Diagnosis",
    "EligibilityReport",
    "ExportOptions",
    "ExportedVariant",
    "Finetuning",
    "Forecast",
    "ForecastOptions",
    "LatencyComparison",
    "LoadedWeights",
    "MaskHolder",
    "MathPrecision",
    "MethodOptions",
    "MissingToolError",
    "ModelSizes",
    "Pattern",
    "PatternBrokenError",
    "Precision",
    "ProductTimes",
    "PruneResult",
    "RunOptions",
    "RunResult",
    "Selection",
    "SensitivityResult",
    "SideBySide",
    "TrainingOptions",
    "Trust",
    "TwofourError",
    "Validation",
    "__version__",
    "build",
    "compare",
    "doctor",
    "explain",
    "export",
    "finetune",
    "forecast",
    "hold_masks",
    "load_weights",
    "masked_mean",
    "masked_var",
    "product_times",
    "prune",
    "read_log",
    "report",
    "run",
    "sensitivity",
    "sizes",
    "times_of_products",
    "validate",
]


# now: importing the room of this name later would put it in the place of the function
importlib.import_module("twofour.export")


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
        method=MethodOptions(name=method, refit=refit, damping=damping),
        calibration=CalibrationOptions(data=data, samples=samples),
    )
    asked = _checked(RunOptions, asked)
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


def run(  # noqa: PLR0913  # what a user may choose
    model: Model,
    example_inputs: object = None,
    *,
    out: Place = None,
    calibrate: Data = None,
    metric: Metric = None,
    options: RunOptions | None = None,
    progress: ToProgress = None,
) -> RunResult:
    """Prune, validate, export, build and report into a run folder.

    `model` is a model source as on the command line, or a module in memory with its example
    inputs: a tensor, a tuple of tensors by position, or a dict of them by name. The module is not
    changed: a copy is pruned (the result is weights.safetensors in the run folder). `calibrate`
    takes batches as `prune` does, or a function that gives them; `metric` is called as the one of
    --metric; both may be text as on the command line. `progress` is called with the title of each
    stage and with each note. With `options.resume` stages of an earlier run there are kept where
    nothing changed; data and metrics in memory count as changed. Raises the kinds of TwofourError.
    """
    from twofour.jobs import run_all

    settings = _settings(options, calibrate, metric)
    return run_all(_source(model, example_inputs, settings), _path(out), settings, progress)


def sensitivity(  # noqa: PLR0913  # what a user may choose
    model: Model,
    example_inputs: object = None,
    *,
    out: Place = None,
    calibrate: Data = None,
    metric: Metric = None,
    options: RunOptions | None = None,
    progress: ToProgress = None,
) -> SensitivityResult:
    """Measure every layer pruned alone, then sets of them; `options.budget` chooses a set.

    The arguments are those of `run`. With a `metric` in memory one set is measured after the other.
    Raises the kinds of TwofourError.
    """
    from twofour.jobs import run_sensitivity

    settings = _settings(options, calibrate, metric)
    source = _source(model, example_inputs, settings)
    return run_sensitivity(source, _path(out), settings, progress)[1]


def export(
    model: Model,
    example_inputs: object = None,
    *,
    out: Place = None,
    options: RunOptions | None = None,
    progress: ToProgress = None,
) -> ExportedVariant:
    """Export a model as it is to dense.onnx in a run folder, and compare the file with the module.

    The arguments are those of `run`. Raises the kinds of TwofourError.
    """
    from twofour.jobs import run_export

    settings = _settings(options)
    source = _source(model, example_inputs, settings)
    return run_export(source, _path(out), settings, progress)[1]


def build(
    onnx: str | Path,
    *,
    out: Place = None,
    options: RunOptions | None = None,
    progress: ToProgress = None,
) -> BuildResult:
    """Build a pruned ONNX file with sparse weights allowed and without, and time both.

    `variants` of the result say what failed. Raises the kinds of TwofourError.
    """
    from twofour.jobs import run_build

    return run_build(Path(onnx), _path(out), _settings(options), progress)[1]


def compare(
    *paths: str | Path,
    out: Place = None,
    options: CompareOptions | None = None,
    progress: ToProgress = None,
) -> LatencyComparison:
    """Time the variants of a run folder, or of ONNX files and engines, in interleaved rounds.

    Writes latency.json and its pages into `out` (default: the run folder, or runs/compare-...).
    Raises the kinds of TwofourError.
    """
    from twofour.comparing.comparison import compare as run_comparison
    from twofour.records.options import CompareOptions

    settings = _checked(CompareOptions, options)
    return run_comparison([Path(path) for path in paths], _path(out), settings, progress)[1]


def forecast(
    model: Model,
    example_inputs: object = None,
    *,
    asked: ForecastOptions | None = None,
    options: RunOptions | None = None,
    progress: ToProgress = None,
) -> Forecast:
    """Forecast what 2:4 may gain in the model by GPU, precision and batch, before it is pruned.

    `model` and `example_inputs` are those of `run`; `options` say the sizes of the inputs. A module
    is exported into a temporary folder, an ONNX file is only read. Raises the kinds of
    TwofourError.
    """
    from twofour.jobs import run_forecast
    from twofour.records.options import ForecastOptions

    settings = _settings(options)
    source = _source(model, example_inputs, settings)
    return run_forecast(source, _checked(ForecastOptions, asked), settings, progress)


def report(
    run: Place | RunResult = None, *, gpu: str | None = None, **files: str | Path
) -> EligibilityReport:
    """Judge for every layer of a run, or of files, whether sparse math runs in it, and why not.

    `files` are named as the options of `twofour report`: onnx, log, layers, profile, dense_log,
    dense_profile, layer_map. Each is a path, and a log may be its text. The forecast is for `gpu`,
    else for the GPU of the build where that is known. Raises the kinds of TwofourError.
    """
    from twofour.pipeline.reporting import judge

    return judge(_path(run), files, gpu).report


def explain(
    layer: str, run: Place | RunResult = None, *, gpu: str | None = None, **files: str | Path
) -> str:
    """Say everything about one layer; the other arguments and errors are those of `report`."""
    from twofour.pipeline.reporting import judge
    from twofour.reports.explain import layer_story
    from twofour.reports.terminal import plain_text

    judged = judge(_path(run), files, gpu)
    return plain_text(layer_story(judged.report, judged.evidence(), layer))


def read_log(*logs: str | Path) -> BuildLog:
    """Read TensorRT's build logs: paths, or texts of more than one line.

    Raises BadInputError for a file that cannot be read.
    """
    from twofour.logs.read import read_build_log

    return read_build_log(*logs)


def sizes(path: str | Path) -> ModelSizes:
    """Count the bytes of saved weights dense, as 2:4, COO, CSR and bitmask; raises BadInputError.

    A matrix like the largest weight is converted: time and peak memory.
    """
    from twofour.pipeline.weight_sizes import model_sizes

    return model_sizes(Path(path))


def doctor() -> Diagnosis:
    """Say what is installed, which engines can run here and why not, and what the GPU can do."""
    from twofour.jobs import diagnose

    return diagnose()


def _settings(
    options: RunOptions | None, calibrate: Data = None, metric: Metric = None
) -> RunOptions:
    """The options, checked, with the data and the metric of the caller."""
    from twofour.records.options import RunOptions

    settings = _checked(RunOptions, options)
    if calibrate is not None:
        # what can be gone through once is kept by `tee`, as far as it is read
        batches = tee(calibrate, 1)[0] if isinstance(calibrate, Iterator) else calibrate
        data = replace(settings.calibration, data=_text(batches, "batches"))
        settings = replace(settings, calibration=data)
    if metric is not None:
        settings = replace(settings, metric=_text(metric, "metric"))
    return settings


def _text(value: object, name: str) -> str:
    """Text and paths as they are; a value by its own name, or this one."""
    from twofour.sources.user_code import held

    if isinstance(value, (str, Path)):
        return str(value)
    return held(getattr(value, "__name__", name), value)


def _path(place: Place | RunResult) -> Path | None:
    """The path; of a run that was done, its folder."""
    return None if place is None else Path(cast("str | Path", getattr(place, "folder", place)))


def _checked(kind: type[T], given: T | None) -> T:
    """Options with every field checked; the defaults where none are given."""
    from twofour.store import checked

    return kind() if given is None else checked(kind, given)


def _source(
    model: Model,
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

"""Options that belong together as one parameter of a command, and the fields of RunOptions."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from twofour.cli import options as opt
from twofour.engines.protocol import AUTO, builders
from twofour.errors import BadInputError
from twofour.records.options import (
    AllowedType,
    BudgetOptions,
    BuildOptions,
    CalibrationOptions,
    LossKind,
    MethodOptions,
    SideBySide,
)
from twofour.records.weights import Pattern, Selection

if TYPE_CHECKING:
    from twofour.pipeline.evidence import EvidenceFiles

T = TypeVar("T")


def with_groups(command: Callable[..., T]) -> Callable[..., T]:
    """The command as Typer is to see it: in place of each dataclass the options it is made of."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    @functools.wraps(command)
    def run(**given: object) -> T:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**given, **made)

    options = [
        option
        for name, parameter in signature.parameters.items()
        for option in (_parameters(groups[name]) if name in groups else (parameter,))
    ]
    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]  # what inspect reads
    return run


def _parameters(group: Any) -> Iterator[inspect.Parameter]:  # noqa: ANN401  # a dataclass
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, annotation = inspect.Parameter.KEYWORD_ONLY, hints[field.name]
        yield inspect.Parameter(field.name, kind, default=field.default, annotation=annotation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArguments:
    """What a model is run on, and the type that its ONNX file is written in."""

    precision: opt.PrecisionOption = None
    keep_float32: opt.KeepFloat32 = None
    inputs: opt.Inputs = None
    input_shape: opt.InputShapes = None
    seed: opt.Seed = 0

    def options(self) -> dict[str, Any]:
        """Fields of RunOptions; raises BadInputError for shapes that cannot be read."""
        shapes, names = opt.parse_input_shapes(self.input_shape)
        return {
            "precision": self.precision,
            "keep_float32": tuple(self.keep_float32 or ()),
            "inputs": None if self.inputs is None else str(self.inputs),
            "input_shapes": shapes,
            "input_shape_names": names,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportArguments(ModelArguments):
    """The same, and how a torch model is exported."""

    opset: Annotated[
        int | None,
        typer.Option(
            "--opset",
            help="ONNX opset, 17 or later; TensorRT 8.6 reads up to 17.",
            show_default="20; bfloat16: 22; TensorRT 8 here: 17",
        ),
    ] = None
    static_batch: Annotated[
        bool, typer.Option("--static-batch", help="Fix the batch at that of the example inputs.")
    ] = False
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            "--dynamic",
            metavar="INPUT:AXIS=NAME",
            help="Leave a size of a torch model free besides the batch; one name is one size; "
            "repeatable. none: the batch alone.",
            show_default="Hugging Face: what the architecture allows",
        ),
    ] = None

    def options(self) -> dict[str, Any]:
        """Fields of RunOptions; raises BadInputError for what cannot be read."""
        return {
            **ModelArguments.options(self),
            "opset": self.opset,
            "dynamic_batch": not self.static_batch,
            "dynamic": opt.parse_dynamic(self.dynamic),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningArguments:
    """Options of the commands that prune."""

    pattern: Annotated[
        str, typer.Option("--pattern", "-p", metavar="N:M", help="Keep N of every M weights.")
    ] = "2:4"
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="Prune also what sparse math cannot use.")
    ] = False
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="GLOB", help="Prune these layers too; repeatable."),
    ] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="GLOB", help="Leave these layers dense; repeatable."),
    ] = None
    layers: Annotated[
        Path | None,
        typer.Option(
            "--layers",
            metavar="FILE",
            help="Layers to leave dense, a glob on each line; +GLOB is pruned too.",
        ),
    ] = None
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            metavar="DATA",
            help="Data that the method sees: .npz, .npy, .safetensors, .txt, .jsonl, a folder of "
            "images, or file.py:callable that yields batches.",
            show_default="none: magnitude",
        ),
    ] = None
    calibrate_samples: Annotated[
        int,
        typer.Option("--calibrate-samples", min=1, help="At most so many samples of it are used."),
    ] = CalibrationOptions().samples
    mean: Annotated[
        str | None,
        typer.Option(
            "--mean",
            metavar="R,G,B",
            help="Subtracted from pixels of images, on the scale 0 to 1.",
            show_default="the model's own",
        ),
    ] = None
    std: Annotated[
        str | None,
        typer.Option(
            "--std",
            metavar="R,G,B",
            help="Pixels are divided by it.",
            show_default="the model's own",
        ),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="HxW",
            help="Images are brought to it.",
            show_default="the model's own",
        ),
    ] = None
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="magnitude, wanda, sparsegpt, admm, or keep (the mask that is there already).",
            show_default="admm with --calibrate, else magnitude",
        ),
    ] = None
    refit: Annotated[
        int | None,
        typer.Option(
            "--refit",
            min=0,
            metavar="STEPS",
            help="Conjugate-gradient steps on the weights that stay.",
            show_default="what the method takes",
        ),
    ] = None
    damping: Annotated[
        float | None,
        typer.Option(
            "--damping",
            min=0.0,
            metavar="SHARE",
            help="Of the mean diagonal, added to the Gram matrix.",
            show_default="chosen on held-out data",
        ),
    ] = None
    bias_correction: Annotated[
        bool,
        typer.Option(
            "--bias-correction/--no-bias-correction",
            help="The mean of what a layer loses goes into its bias.",
        ),
    ] = True

    def options(self) -> dict[str, Any]:
        """Fields of RunOptions; raises BadInputError for what cannot be read."""
        selection = Selection(
            all_layers=self.all_layers,
            include=tuple(self.include or ()),
            exclude=tuple(self.exclude or ()),
        )
        if self.layers is not None:
            from twofour.pruning.selection import read_layers

            selection = read_layers(self.layers, selection)
        return {
            "pattern": Pattern.parse(self.pattern),
            "selection": selection,
            "calibration": CalibrationOptions(
                data=self.calibrate,
                samples=self.calibrate_samples,
                image_mean=_numbers("--mean", self.mean),
                image_std=_numbers("--std", self.std),
                image_size=_size(self.size),
            ),
            "method": MethodOptions(
                name=self.method,
                refit=self.refit,
                damping=self.damping,
                bias_correction=self.bias_correction,
            ),
        }


def _numbers(option: str, text: str | None) -> tuple[float, ...]:
    """Separated by commas; () for None."""
    if text is None:
        return ()
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(map(math.isfinite, found)):
        raise BadInputError(
            f"{option}: cannot read {text!r}",
            hint=f"write it like {option} 0.485,0.456,0.406, on the scale 0 to 1",
        )
    return found


def _size(text: str | None) -> tuple[int, int] | None:
    """Read "224x320" (height and width), or "224" for both."""
    if text is None:
        return None
    hint = "write height and width: 224x320"
    try:
        sizes = opt.dimensions(text)
    except BadInputError as error:
        raise BadInputError(f"--size: cannot read {text!r}", hint=hint) from error
    if len(sizes) > 2:
        raise BadInputError(f"--size {text} has {len(sizes)} numbers", hint=hint)
    return (sizes[0], sizes[-1])


_MIB = 1 << 20
ENGINE_WORDS = (AUTO, *(row.name for row in builders()))


def _known_engine(word: str) -> str:
    """Raises typer.BadParameter for another word: the registry says which there are."""
    if word not in ENGINE_WORDS:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(ENGINE_WORDS)}.")
    return word


Shapes = Annotated[
    list[str] | None,
    typer.Option("--shapes", metavar="INPUT=MIN:OPT:MAX", help="TensorRT optimization profile."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """Options of the commands that build."""

    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar=f"[{'|'.join(ENGINE_WORDS)}]",
            callback=_known_engine,
            help="auto: TensorRT where a builder can be created.",
        ),
    ] = AUTO
    shapes: Shapes = None
    workspace: Annotated[
        int | None,
        typer.Option("--workspace", metavar="MIB", min=1, help="TensorRT workspace limit."),
    ] = None
    opt_level: Annotated[
        int | None, typer.Option("--opt-level", min=0, max=5, help="TensorRT optimization level.")
    ] = None
    tf32: Annotated[
        bool, typer.Option("--tf32/--no-tf32", help="Allow TF32 in float32 layers.")
    ] = True
    fp16: Annotated[
        bool,
        typer.Option("--fp16", help="TensorRT before 11: run float32 layers in FP16 if faster."),
    ] = False
    int8: Annotated[
        bool,
        typer.Option("--int8", help="TensorRT before 11: allow INT8 (the file has Q/DQ nodes)."),
    ] = False
    bf16: Annotated[
        bool, typer.Option("--bf16", help="TensorRT 10: run float32 layers in BF16.")
    ] = False

    def options(self) -> dict[str, Any]:
        """Fields of RunOptions; raises BadInputError for shapes that cannot be read."""
        from twofour.inputs.examples import parse_shapes

        allowed = {
            AllowedType.FP16: self.fp16,
            AllowedType.INT8: self.int8,
            AllowedType.BF16: self.bf16,
        }
        build = BuildOptions(
            shapes=parse_shapes(self.shapes or ()),
            workspace_bytes=None if self.workspace is None else self.workspace * _MIB,
            optimization_level=self.opt_level,
            tf32=self.tf32,
            allow=tuple(kind for kind, wanted in allowed.items() if wanted),
        )
        return {"engine": self.engine, "build": build}


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetArguments:
    """Options of the commands that measure what layers lose."""

    metric: opt.MetricOption = None

    max_drop: Annotated[
        str | None,
        typer.Option(
            "--max-drop",
            metavar="[FIGURE=]DROP",
            help="Leave layers dense until the metric falls by no more, in its own units.",
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="SHARE",
            help="Least part of the possible saving, 0 to 1, for the least loss.",
        ),
    ] = None
    lower_is_better: Annotated[
        bool,
        typer.Option("--lower-is-better", help="The metric falls where it grows: a loss, say."),
    ] = False
    loss: Annotated[
        LossKind | None,
        typer.Option(
            "--loss",
            help="What layers are judged by.",
            show_default="the metric, without one the outputs",
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FOLDER",
            help="Milliseconds of each layer: a run folder with a TensorRT build.",
            show_default="multiply-adds count",
        ),
    ] = None
    siblings: Annotated[
        bool,
        typer.Option(
            "--siblings", help="Decide together on layers that read one tensor (q, k, v)."
        ),
    ] = False
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            help="Measurements at once on this machine.",
            show_default="cores",
        ),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Measure on a Ray cluster whose nodes see the same files at the same paths; auto: "
            "a local one.",
        ),
    ] = None

    def options(self) -> dict[str, Any]:
        """Fields of RunOptions; raises BadInputError for a drop that is no number."""
        figure, _, text = (self.max_drop or "").rpartition("=")
        try:
            drop = None if self.max_drop is None else float(text)
        except ValueError:
            raise BadInputError(
                f"--max-drop: {self.max_drop!r} is no number", hint="write 0.5, or accuracy=0.5"
            ) from None
        budget = BudgetOptions(
            max_drop=drop,
            share=self.budget,
            figure=figure.strip() or None,
            lower_is_better=self.lower_is_better,
            loss=self.loss,
            profile=None if self.profile is None else str(self.profile),
            siblings=self.siblings,
        )
        side_by_side = SideBySide(jobs=self.jobs, ray=self.ray)
        return {"metric": self.metric, "budget": budget, "side_by_side": side_by_side}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceArguments:
    """The files of anyone that a report is made from."""

    onnx: Annotated[Path | None, typer.Option("--onnx", help="The ONNX model.")] = None
    log: Annotated[
        Path | None, typer.Option("--log", help="Log of the build with sparse weights allowed.")
    ] = None
    layers: Annotated[
        Path | None, typer.Option("--layers", help="Layer information of that engine (JSON).")
    ] = None
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Per-layer profile of that engine (JSON).")
    ] = None
    dense_log: Annotated[
        Path | None, typer.Option("--dense-log", help="Log of the build without sparse weights.")
    ] = None
    dense_profile: Annotated[
        Path | None, typer.Option("--dense-profile", help="Per-layer profile of the dense engine.")
    ] = None
    layer_map: Annotated[
        Path | None,
        typer.Option(
            "--layer-map", help="layers.json, or JSON of yours: engine name, layer or node."
        ),
    ] = None

    def files(self, folder: Path | None) -> EvidenceFiles:
        """As a record; raises BadInputError beside a folder, and for neither."""
        from twofour.pipeline.evidence import EvidenceFiles

        files = EvidenceFiles(**{field.name: getattr(self, field.name) for field in fields(self)})
        if folder is not None and files.layer_map is not None:
            raise BadInputError(
                "a run folder has its own layer map", hint="give --layer-map with --onnx and --log"
            )
        if (folder is not None) == any(getattr(self, field.name) for field in fields(self)):
            raise BadInputError(
                "name a run folder, or files with --onnx, --log or --layers, one of the two",
                hint="for example runs/model, or --onnx model.onnx --log build.log",
            )
        return files

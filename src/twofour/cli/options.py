"""The options of the commands: one row for each, with the field of the record that it sets."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from twofour.engines.protocol import AUTO, builders
from twofour.errors import BadInputError
from twofour.records import frozen
from twofour.records.options import (
    LARGEST_SIZE,
    AllowedType,
    DynamicAxis,
    ExampleInputs,
    LossKind,
    Precision,
    Quantization,
    RunOptions,
)
from twofour.records.weights import Pattern
from twofour.reports import FORMATS, TABLE, Renderer, renderer
from twofour.store import read_options, write_options
from twofour.words import MIB

T = TypeVar("T")
Inputs = TypeVar("Inputs", bound=ExampleInputs)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="file.onnx, a Hugging Face checkpoint folder, a diffusers model folder, "
        "file.py:callable, "
        "package.module:callable, or timm:NAME",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The run folder.", show_default="runs/<model name>"),
]
Layout = Annotated[
    str,
    typer.Option(
        "--format", "-f", metavar=f"[{'|'.join(FORMATS)}]", help="The format printed on stdout."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the record on stdout as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no notes.")]


def report_format(layout: str, *, json: bool) -> Renderer:
    """The format that --format names; raises BadInputError for no format, and beside --json."""
    if json and layout != TABLE:
        raise BadInputError("--json and --format ask for two things", hint="leave one of them out")
    return renderer(layout)


# --- from options to a record ---------------------------------------------------------------------


@frozen
class Option:
    """One option as Typer takes it, and how a value of it changes the record."""

    parameter: inspect.Parameter
    change: Callable[[Any, Any], Any]
    """The record and the value -> the record with it; not called where the option is not given."""


def option(
    field: str | Callable[[Any, Any], Any],
    *flags: str,
    kind: Any = str,  # noqa: ANN401  # a type
    default: object = None,
    read: Callable[[Any], object] | None = None,
    **shown: Any,  # noqa: ANN401  # what typer.Option takes
) -> Option:
    """An option that sets this field, such as "calibration.samples", or changes several.

    `read` turns the value into that of the field; a repeatable option gives a tuple. The default is
    shown: it is that of the record, or what a file of options says.
    """
    if default is not None:
        shown["show_default"] = str(default)
    name = flags[0].partition("/")[0].removeprefix("--").replace("-", "_")

    def change(record: Any, value: Any) -> object:  # noqa: ANN401  # a record, a value of Typer's
        if not isinstance(field, str):
            return field(record, value)
        value = tuple(value) if read is None and isinstance(value, list) else value
        return _with(record, field, value if read is None else read(value))

    parameter = inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, typer.Option(*flags, **shown)],
    )
    return Option(parameter=parameter, change=change)


def _with(record: Any, field: str, value: object) -> Any:  # noqa: ANN401  # any record
    """The record with this value in a field of it, or in a field of its field."""
    name, _, rest = field.partition(".")
    if rest:  # "calibration.samples": the record inside gets the value
        value = _with(getattr(record, name), rest, value)
    return replace(record, **{name: value})


def with_options(
    record: Callable[[], object], *rows: Option, parameter: str = "options"
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a command these options instead of its `parameter`, a record made of them.

    Those of a run may come from a file too; the rows change them in order.
    """
    if record is RunOptions:
        rows = (OPTIONS_FILE, *rows, SAVE_OPTIONS)

    def wrap(command: Callable[..., T]) -> Callable[..., T]:
        signature = inspect.signature(command, eval_str=True)

        @functools.wraps(command)
        def run(**given: object) -> T:
            filled = record()
            for row in rows:
                value = given.pop(row.parameter.name)
                if value not in (None, []):
                    filled = row.change(filled, value)
            return command(**given, **{parameter: filled})

        parameters: list[inspect.Parameter] = []
        for one in signature.parameters.values():
            if one.name == parameter:
                parameters += (row.parameter for row in rows)
            else:
                parameters.append(one)
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what inspect reads
        return run

    return wrap


def _saved(options: RunOptions, path: Path) -> RunOptions:
    write_options(path, options)
    return options


OPTIONS_FILE = option(
    lambda _options, path: read_options(path), "--options", kind=Path, metavar="FILE.toml",
    help="Options from a file, as --save-options writes it; those of the command line win.",
)  # fmt: skip
SAVE_OPTIONS = option(
    _saved, "--save-options", kind=Path, metavar="FILE.toml",
    help="Write these options to a file, then run.",
)  # fmt: skip


# --- the model and the inputs that it runs on -----------------------------------------------------


def _precision(text: str) -> Precision:
    try:
        return Precision(text)
    except ValueError:
        known = "float16 (fp16, half), bfloat16 (bf16) and float32 (fp32)"
        raise BadInputError(f"--precision: {text!r} is none of {known}") from None


def dimensions(text: str) -> tuple[int, ...]:
    """Read "2x3x224x224"; raises BadInputError for anything but positive numbers of a size."""
    try:
        dimensions = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        dimensions = ()
    if not dimensions or min(dimensions) < 1 or max(dimensions) > LARGEST_SIZE:
        raise BadInputError(
            f"{text!r} is not a shape", hint="write it like 2x3x224x224, or x=2x3x224x224"
        )
    return dimensions


def batch_sizes(text: str) -> tuple[int, ...]:
    """Read "1,8,32"; raises BadInputError for anything else than sizes from 1 on."""
    try:
        sizes = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        sizes = (0,)
    if not all(1 <= size <= LARGEST_SIZE for size in sizes):
        raise BadInputError(
            f"--batch: {text!r} is not a list of sizes", hint="write it like 1,8,32"
        )
    return sizes


def with_input_shapes(options: Inputs, texts: list[str]) -> Inputs:
    """Read shapes, and their inputs' names where they have some: 2x3x224x224, x=2x3x224x224."""
    parts = [text.rpartition("=") for text in texts]
    shapes = tuple(dimensions(shape) for _, _, shape in parts)
    names = tuple(name.strip() for name, equals, _ in parts if equals)
    if names and (len(names) < len(shapes) or not all(names)):
        raise BadInputError(
            "--input-shape: give every shape with its input's name, or none",
            hint="write it like --input-shape x=2x3x224x224 --input-shape mask=2x224x224",
        )
    if len(set(names)) < len(names):
        raise BadInputError(f"--input-shape names an input twice: {', '.join(names)}")
    return replace(options, input_shapes=shapes, input_shape_names=names)


def parse_dynamic(texts: list[str]) -> tuple[DynamicAxis, ...]:
    """Read "input:axis=name"; "none" alone is no axis."""
    if texts == ["none"]:
        return ()
    return tuple(_axis(part.strip()) for text in texts for part in text.split(","))


def _axis(text: str) -> DynamicAxis:
    place, _, name = text.rpartition("=")
    tensor, _, axis = place.rpartition(":")
    if not (tensor and name.isidentifier() and axis.removeprefix("-").isdecimal()):
        raise BadInputError(
            f"--dynamic: cannot read {text!r}",
            hint="write it like --dynamic x:2=height; the name is letters, digits and underscores",
        )
    return DynamicAxis(input=tensor, axis=int(axis), name=name)


SEED = option("seed", "--seed", kind=int, default=0, help="The seed of everything random.")
INPUTS = (
    option(
        "inputs", "--inputs", kind=Path, read=str,
        help="Example inputs: .npz, or .txt (one sentence per line).",
    ),
    option(
        with_input_shapes, "--input-shape", kind=list[str], metavar="[NAME=]2x3x224x224",
        help="The shape of a random example input: one for each input in order, or by name; "
        "repeatable.",
    ),
    SEED,
)  # fmt: skip
MODEL = (
    option(
        "precision", "--precision", kind=str, read=_precision,
        metavar="[float32|float16|bfloat16]",
        show_default="float16; prune and build: the file's own",
        help="The type written into the ONNX graph; an ONNX file is converted to it.",
    ),
    option(
        "keep_float32", "--keep-float32", kind=list[str], metavar="GLOB",
        help="Nodes of the ONNX file that stay float32; repeatable.",
    ),
    *INPUTS,
)  # fmt: skip
FREE_SIZES = (
    option(
        "dynamic_batch", "--static-batch", kind=bool, read=lambda fixed: not fixed,
        help="Fix the batch size at that of the example inputs.",
    ),
    option(
        "dynamic", "--dynamic", kind=list[str], read=parse_dynamic, metavar="INPUT:AXIS=NAME",
        show_default="Hugging Face: what the architecture allows",
        help="An axis of a torch model that stays free, besides the batch. Axes with the same NAME "
        "share a size. Repeatable; none: only the batch stays free.",
    ),
)  # fmt: skip
GPU = option(
    "gpu", "--gpu", metavar="NAME",
    help="Forecast what layers gain on this GPU, such as A100: for report and budget.",
)  # fmt: skip
EXPORT = (
    *MODEL,
    option(
        "opset", "--opset", kind=int, show_default="20; bfloat16: 22; TensorRT 8 here: 17",
        help="The ONNX opset, 17 or later; TensorRT 8.6 reads up to 17.",
    ),
    *FREE_SIZES,
)  # fmt: skip
QUANTIZE = option(
    "quantize", "--quantize", kind=Quantization,
    help="Round products to this type with Q/DQ nodes, in dense.onnx and sparse.onnx; the ranges "
    "are those of the --calibrate samples.",
)  # fmt: skip
DENSE_REFERENCE = option(
    "dense_reference", "--dense-reference", metavar="MODEL",
    help="The dense model to compare with, if the model is pruned already.",
)  # fmt: skip
METRIC = option(
    "metric", "--metric", metavar="FILE.py:CALLABLE",
    help="Your metric: called with a predict function for each variant.",
)  # fmt: skip
TRUST = (
    option(
        "trust.sources", "--source", kind=list[str], metavar="FILE.py:CALLABLE",
        help="Code named by the run folder that may run; repeatable.",
    ),
    option(
        "trust.everything", "--trust", kind=bool,
        help="Run whatever code the run folder names.",
    ),
)  # fmt: skip
STREAM = option(
    "stream", "--stream/--no-stream", kind=bool,
    show_default="if it is larger than half of the free memory",
    help="Prune a checkpoint folder in a copy of its files.",
)  # fmt: skip
RAY = option(
    "side_by_side.ray", "--ray", metavar="ADDRESS",
    help="Measure on the nodes of a Ray cluster (sensitivity: they see the same files at the same "
    "paths); auto: a local one.",
)  # fmt: skip
RESUME = option(
    "resume", "--resume", kind=bool,
    help="Keep what an earlier run in the folder did, where no option or input changed.",
)  # fmt: skip


# --- what is pruned and how -----------------------------------------------------------------------


def _with_layers(options: RunOptions, path: Path) -> RunOptions:
    from twofour.pruning.selection import read_layers

    return replace(options, selection=read_layers(path, options.selection))


def _numbers(flag: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(map(math.isfinite, numbers)):
        raise BadInputError(
            f"{flag}: cannot read {text!r}",
            hint=f"write it like {flag} 0.485,0.456,0.406, on the scale 0 to 1",
        )
    return numbers


def _size(text: str) -> tuple[int, int]:
    """Read "224x320" (height and width), or "224" for both."""
    hint = "write height and width: 224x320"
    try:
        sizes = dimensions(text)
    except BadInputError as error:
        raise BadInputError(f"--size: cannot read {text!r}", hint=hint) from error
    if len(sizes) > 2:
        raise BadInputError(f"--size {text} has {len(sizes)} numbers", hint=hint)
    return (sizes[0], sizes[-1])


_MODELS_OWN = "the model's own"
CALIBRATION = (
    option(
        "calibration.data", "--calibrate", metavar="DATA", show_default="none",
        help="Calibration samples: .npz, .npy, .safetensors, .txt, .jsonl, a folder of images, or "
        "file.py:callable that yields batches.",
    ),
    option(
        "calibration.samples", "--calibrate-samples", kind=int, min=1,
        default=RunOptions().calibration.samples, help="Use at most this many of them.",
    ),
    option(
        "calibration.image_mean", "--mean", read=functools.partial(_numbers, "--mean"),
        metavar="R,G,B", show_default=_MODELS_OWN,
        help="Mean of the pixels (0 to 1) of images, which is subtracted.",
    ),
    option(
        "calibration.image_std", "--std", read=functools.partial(_numbers, "--std"),
        metavar="R,G,B", show_default=_MODELS_OWN, help="Then pixels are divided by this.",
    ),
    option(
        "calibration.image_size", "--size", read=_size, metavar="HxW",
        show_default=_MODELS_OWN, help="Images are resized to this height and width.",
    ),
)  # fmt: skip
PRUNING = (
    option(
        "pattern", "--pattern", "-p", default="2:4", read=Pattern.parse, metavar="N:M",
        help="Keep N of every M weights.",
    ),
    option(
        "selection.all_layers", "--all-layers", kind=bool,
        help="Also prune layers that cannot use sparse kernels, and small or frozen weights.",
    ),
    option(
        "selection.include", "--include", kind=list[str], metavar="GLOB",
        help="Prune these layers too; repeatable.",
    ),
    option(
        "selection.exclude", "--exclude", kind=list[str], metavar="GLOB",
        help="Leave these layers dense; repeatable.",
    ),
    option(
        _with_layers, "--layers", kind=Path, metavar="FILE",
        help="Layers to leave dense, such as the layers.txt of `sensitivity`: a glob per line; "
        "+GLOB is pruned too.",
    ),
    *CALIBRATION,
    option(
        "method.name", "--method", metavar="NAME",
        show_default="admm with --calibrate, else magnitude",
        help="magnitude, wanda, sparsegpt, admm, or keep (the mask that the weights already have).",
    ),
    option(
        "method.refit", "--refit", kind=int, min=0, metavar="STEPS",
        show_default="depends on the method",
        help="Solve once more for the weights that stay, in this many conjugate-gradient steps.",
    ),
    option(
        "method.damping", "--damping", kind=float, min=0.0, metavar="SHARE",
        show_default="chosen on samples that are held out",
        help="Added to the diagonal of each Gram matrix, as a share of its mean.",
    ),
)  # fmt: skip

TRAINING = (
    option(
        "training.data", "--train", metavar="DATA",
        help="Training samples without labels, in any form that --calibrate takes.",
    ),
    option(
        "training.minutes", "--minutes", kind=float, default=RunOptions().training.minutes,
        min=0.01, help="Train for this long; the learning rate falls to 0 by the end.",
    ),
)  # fmt: skip


# --- the engine -----------------------------------------------------------------------------------


def _profiles(texts: list[str]) -> object:
    from twofour.inputs.examples import parse_shapes

    return parse_shapes(texts)


def _allowed(kind: AllowedType, help: str) -> Option:  # noqa: A002  # Typer's word
    """A flag that lets a weakly typed build use one more type."""

    def change(options: RunOptions, wanted: bool) -> RunOptions:  # Option.change
        return _with(options, "build.allow", (*options.build.allow, kind)) if wanted else options

    return option(change, f"--{kind.value}", kind=bool, help=help)


def shapes(read: Callable[[list[str]], object] | None = None) -> Option:
    """The option --shapes; without `read` its texts are kept as they are, for several models."""
    field = "shapes" if read is None else "build.shapes"
    return option(
        field, "--shapes", kind=list[str], read=read, metavar="INPUT=MIN:OPT:MAX",
        help="A TensorRT optimization profile.",
    )  # fmt: skip


SHAPES = shapes(_profiles)
_ENGINES = (AUTO, *(row.name for row in builders()))
ENGINE = (
    option(
        "engine", "--engine", default=AUTO, metavar=f"[{'|'.join(_ENGINES)}]",
        help="auto: TensorRT where a builder can be created.",
    ),
    SHAPES,
    option(
        "build.workspace_bytes", "--workspace", kind=int, read=lambda mib: mib * MIB, min=1,
        metavar="MIB", help="TensorRT's workspace limit.",
    ),
    option(
        "build.optimization_level", "--opt-level", kind=int, min=0, max=5,
        help="TensorRT's optimization level.",
    ),
    option(
        "build.tf32", "--tf32/--no-tf32", kind=bool, default=True,
        help="Allow TF32 in float32 layers.",
    ),
    _allowed(AllowedType.FP16, "TensorRT before 11: run float32 layers in FP16 if it is faster."),
    _allowed(AllowedType.INT8, "TensorRT before 11: allow INT8, for a file with Q/DQ nodes."),
    _allowed(AllowedType.BF16, "TensorRT 10: run float32 layers in BF16."),
)  # fmt: skip


# --- which layers to prune within a budget --------------------------------------------------------


def _with_drop(options: RunOptions, text: str) -> RunOptions:
    """Read "0.5", or "accuracy=0.5" where the metric gives several figures."""
    figure, _, number = text.rpartition("=")
    try:
        drop = float(number)
    except ValueError:
        raise BadInputError(
            f"--max-drop: {text!r} is no number", hint="write 0.5, or accuracy=0.5"
        ) from None
    budget = replace(options.budget, max_drop=drop, figure=figure.strip() or None)
    return replace(options, budget=budget)


BUDGET = (
    METRIC,
    option(
        _with_drop, "--max-drop", metavar="[FIGURE=]DROP",
        help="Leave layers dense until the metric falls by at most this, in its own units: 0.005 "
        "is half a point of an accuracy from 0 to 1.",
    ),
    option(
        "budget.share", "--budget", kind=float, metavar="SHARE",
        help="Prune the layers that lose least, to save this part, 0 to 1, of what all save.",
    ),
    option(
        "budget.lower_is_better", "--lower-is-better", kind=bool,
        help="A lower metric is better, such as a loss.",
    ),
    option(
        "budget.loss", "--loss", kind=LossKind, help="What counts as the loss of a layer.",
        show_default="the metric; without a metric the outputs",
    ),
    option(
        "budget.profile", "--profile", kind=Path, read=str, metavar="FOLDER",
        show_default="a forecast for --gpu, else multiply-adds",
        help="A run folder with a TensorRT build, such as runs/model: what a layer saves is "
        "counted in its milliseconds there.",
    ),
    option(
        "budget.siblings", "--siblings", kind=bool,
        help="Prune layers that read the same tensor (q, k, v) all together or not at all.",
    ),
    option(
        "side_by_side.jobs", "--jobs", "-j", kind=int, min=1, show_default="cores",
        help="Measurements that run at the same time on this machine.",
    ),
    RAY,
)  # fmt: skip

"""Options that several commands share, and their translation into records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twofour.engines.registry import AUTO, builders
from twofour.errors import BadInputError
from twofour.records.options import (
    AllowedType,
    BudgetOptions,
    BuildOptions,
    DynamicAxis,
    LossKind,
    Precision,
    Selection,
    SideBySide,
)
from twofour.reports import FORMATS, TABLE, renderer

if TYPE_CHECKING:
    from twofour.pipeline.evidence import EvidenceFiles
    from twofour.reports import Renderer


_MIB = 1 << 20
ENGINE_WORDS = (AUTO, *(row.name for row in builders()))


def _known_engine(word: str) -> str:
    """Raises typer.BadParameter for another word: the registry says which there are."""
    if word not in ENGINE_WORDS:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(ENGINE_WORDS)}.")
    return word


def _known_loss(word: str | None) -> str | None:
    """Raises typer.BadParameter for a word that is no LossKind."""
    known = [kind.value for kind in LossKind]
    if word is not None and word not in known:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(known)}.")
    return word


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="file.onnx, a Hugging Face checkpoint folder, file.py:callable, "
        "package.module:callable, or timm:NAME",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Run folder.", show_default="runs/<model name>"),
]
PatternText = Annotated[
    str, typer.Option("--pattern", "-p", metavar="N:M", help="Keep N of every M weights.")
]
AllLayers = Annotated[
    bool, typer.Option("--all-layers", help="Prune also what sparse math cannot use.")
]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Prune these layers too; repeatable."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="GLOB", help="Leave these layers dense; repeatable."),
]
Layers = Annotated[
    Path | None,
    typer.Option(
        "--layers",
        metavar="FILE",
        help="Layers to leave dense, a glob on each line; +GLOB is pruned too.",
    ),
]
MaxDrop = Annotated[
    str | None,
    typer.Option(
        "--max-drop",
        metavar="[FIGURE=]DROP",
        help="Leave layers dense until the metric falls by no more, in its own units.",
    ),
]
BudgetShare = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="SHARE",
        help="Least part of the possible saving, 0 to 1, for the least loss.",
    ),
]
LowerIsBetter = Annotated[
    bool,
    typer.Option("--lower-is-better", help="The metric falls where it grows: a loss, say."),
]
LossOption = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar=f"[{'|'.join(kind.value for kind in LossKind)}]",
        help="What layers are judged by.",
        show_default="the metric, without one the outputs",
        callback=_known_loss,
    ),
]
LayerTimes = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FOLDER|FILE",
        help="Milliseconds of each layer: a run folder with a TensorRT build, or JSON or CSV.",
        show_default="multiply-adds count",
    ),
]
Siblings = Annotated[
    bool,
    typer.Option("--siblings", help="Decide together on layers that read one tensor (q, k, v)."),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Measurements at once.", show_default="cores"),
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Measure on a Ray cluster; auto: a local one."),
]


Layout = Annotated[
    str,
    typer.Option(
        "--format", "-f", metavar=f"[{'|'.join(FORMATS)}]", help="Of what is printed on stdout."
    ),
]


def report_format(layout: str, *, json: bool) -> Renderer:
    """What --format asks for; raises BadInputError beside --json, and for a format there is not."""
    if json and layout != TABLE:
        raise BadInputError("--json and --format ask for two things", hint="leave one of them out")
    return renderer(layout)


def _precision(text: str) -> Precision:
    try:
        return Precision(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is none of float16 (fp16, half), bfloat16 (bf16) and float32 (fp32)"
        ) from None


PrecisionOption = Annotated[
    Precision | None,
    typer.Option(
        "--precision",
        metavar="[float32|float16|bfloat16]",
        parser=_precision,
        help="Type written into the ONNX graph; an ONNX file is converted.",
        show_default="float16; an ONNX file keeps its own",
    ),
]
KeepFloat32 = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-float32",
        metavar="GLOB",
        help="Nodes of an ONNX file that --precision leaves float32; repeatable.",
    ),
]
Opset = Annotated[
    int | None,
    typer.Option(
        "--opset",
        help="ONNX opset, 17 or later; TensorRT 8.6 reads up to 17.",
        show_default="20; bfloat16: 22; TensorRT 8 here: 17",
    ),
]
StaticBatch = Annotated[
    bool, typer.Option("--static-batch", help="Fix the batch at that of the example inputs.")
]
Dynamic = Annotated[
    list[str] | None,
    typer.Option(
        "--dynamic",
        metavar="INPUT:AXIS=NAME",
        help="Leave a size of a torch model free besides the batch; one name is one size; "
        "repeatable. none: the batch alone.",
        show_default="Hugging Face: what the architecture allows",
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option("--inputs", help="Example inputs: .npz, or .txt (one sentence a line)."),
]
InputShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--input-shape",
        metavar="[NAME=]2x3x224x224",
        help="Random example input: one for each input in order, or by name; repeatable.",
    ),
]
DenseReference = Annotated[
    str | None,
    typer.Option(
        "--dense-reference",
        metavar="MODEL",
        help="The dense model, where MODEL was fine-tuned with its mask: what is compared with.",
    ),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric", metavar="FILE.py:CALLABLE", help="Called with a predict function per variant."
    ),
]
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Prune a checkpoint folder in a copy of its files, block by block.",
        show_default="where it is larger than half of the free memory",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Do every stage again.")]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar=f"[{'|'.join(ENGINE_WORDS)}]",
        callback=_known_engine,
        help="auto: TensorRT where a builder can be created.",
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shapes", metavar="INPUT=MIN:OPT:MAX", help="TensorRT optimization profile."),
]
Workspace = Annotated[
    int | None, typer.Option("--workspace", metavar="MIB", min=1, help="TensorRT workspace limit.")
]
OptimizationLevel = Annotated[
    int | None, typer.Option("--opt-level", min=0, max=5, help="TensorRT optimization level.")
]
Tf32 = Annotated[bool, typer.Option("--tf32/--no-tf32", help="Allow TF32 in float32 layers.")]
Fp16 = Annotated[
    bool, typer.Option("--fp16", help="TensorRT before 11: run float32 layers in FP16 if faster.")
]
Int8 = Annotated[
    bool, typer.Option("--int8", help="TensorRT before 11: allow INT8 (the file has Q/DQ nodes).")
]
Bf16 = Annotated[bool, typer.Option("--bf16", help="TensorRT 10: run float32 layers in BF16.")]
OnnxFile = Annotated[Path | None, typer.Option("--onnx", help="The ONNX model.")]
LogFile = Annotated[
    Path | None, typer.Option("--log", help="Log of the build with sparse weights allowed.")
]
LayersFile = Annotated[
    Path | None, typer.Option("--layers", help="Layer information of that engine (JSON).")
]
ProfileFile = Annotated[
    Path | None, typer.Option("--profile", help="Per-layer profile of that engine (JSON).")
]
DenseLogFile = Annotated[
    Path | None, typer.Option("--dense-log", help="Log of the build without sparse weights.")
]
DenseProfileFile = Annotated[
    Path | None, typer.Option("--dense-profile", help="Per-layer profile of the dense engine.")
]
LayerMapFile = Annotated[
    Path | None,
    typer.Option(
        "--layer-map", help="layers.json, or JSON or CSV of yours: engine name, layer or node."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the record on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")]


def evidence_files(folder: Path | None, **paths: Path | None) -> EvidenceFiles:
    """The files of a report as a record; raises BadInputError beside a folder, and for neither."""
    from twofour.pipeline.evidence import EvidenceFiles

    files = EvidenceFiles(**paths)
    if folder is not None and files.layer_map is not None:
        raise BadInputError(
            "a run folder has its own layer map", hint="give --layer-map with --onnx and --log"
        )
    named = files.onnx is not None or files.layer_map is not None or bool(files.names())
    if (folder is not None) == named:
        raise BadInputError(
            "name a run folder, or files with --onnx, --log or --layers, one of the two",
            hint="for example runs/model, or --onnx model.onnx --log build.log",
        )
    return files


def allowed_types(*, fp16: bool, int8: bool, bf16: bool) -> tuple[AllowedType, ...]:
    """What --fp16, --int8 and --bf16 allow a weakly typed builder."""
    asked = {AllowedType.FP16: fp16, AllowedType.INT8: int8, AllowedType.BF16: bf16}
    return tuple(allowed for allowed, wanted in asked.items() if wanted)


def selection(
    *,
    all_layers: bool = False,
    include: list[str] | None,
    exclude: list[str] | None,
    layers: Path | None = None,
) -> Selection:
    """The selection options as a record; raises BadInputError for a --layers that is no list."""
    asked = Selection(
        all_layers=all_layers, include=tuple(include or ()), exclude=tuple(exclude or ())
    )
    if layers is None:
        return asked
    from twofour.pipeline.layer_lists import read_layers

    return read_layers(layers, asked)


def budget_options(
    *,
    max_drop: str | None,
    share: float | None,
    lower_is_better: bool = False,
    loss: str | None = None,
    profile: Path | None = None,
    siblings: bool = False,
) -> BudgetOptions:
    """The options of a budget as a record; raises BadInputError for a drop that is no number."""
    figure, _, text = (max_drop or "").rpartition("=")
    try:
        drop = None if max_drop is None else float(text)
    except ValueError:
        raise BadInputError(
            f"--max-drop: {max_drop!r} is no number", hint="write 0.5, or accuracy=0.5"
        ) from None
    return BudgetOptions(
        max_drop=drop,
        share=share,
        figure=figure.strip() or None,
        lower_is_better=lower_is_better,
        loss=None if loss is None else LossKind(loss),
        profile=None if profile is None else str(profile),
        siblings=siblings,
    )


def side_by_side(jobs: int | None, ray: str | None) -> SideBySide:
    """Where measurements are made; raises BadInputError for both."""
    if jobs is not None and ray is not None:
        raise BadInputError(
            "--jobs and --ray ask for two things",
            hint="a Ray cluster says how many it has room for",
        )
    return SideBySide(jobs=jobs, ray=ray)


def build_options(
    *,
    shapes: list[str] | None,
    workspace: int | None,
    level: int | None,
    tf32: bool,
    allow: tuple[AllowedType, ...],
) -> BuildOptions:
    """The engine options as a record; raises BadInputError for shapes that cannot be read."""
    from twofour.engines.inputs import parse_shapes

    return BuildOptions(
        shapes=parse_shapes(shapes or ()),
        workspace_bytes=None if workspace is None else workspace * _MIB,
        optimization_level=level,
        tf32=tf32,
        allow=allow,
    )


def parse_input_shapes(
    texts: list[str] | None,
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Shapes, and their inputs' names where they have some: "2x3x224x224" or "x=2x3x224x224".

    Raises BadInputError for anything but positive numbers, a name given twice, and names on some
    of the shapes only.
    """
    parts = [text.rpartition("=") for text in texts or ()]
    shapes = tuple(dimensions(shape) for _, _, shape in parts)
    names = tuple(name.strip() for name, equals, _ in parts if equals)
    if names and (len(names) < len(shapes) or not all(names)):
        raise BadInputError(
            "--input-shape: give every shape with its input's name, or none",
            hint="write it like --input-shape x=2x3x224x224 --input-shape mask=2x224x224",
        )
    if len(set(names)) < len(names):
        raise BadInputError(f"--input-shape names an input twice: {', '.join(names)}")
    return shapes, names


def dimensions(text: str) -> tuple[int, ...]:
    """Read "2x3x224x224"; raises BadInputError for anything but positive numbers."""
    try:
        dimensions = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        dimensions = ()
    if not dimensions or min(dimensions) < 1:
        raise BadInputError(
            f"{text!r} is not a shape", hint="write it like 2x3x224x224, or x=2x3x224x224"
        )
    return dimensions


def parse_dynamic(texts: list[str] | None) -> tuple[DynamicAxis, ...] | None:
    """Read "input:axis=name"; "none" alone is no axis, nothing at all what the source has.

    Raises BadInputError for anything else.
    """
    if not texts:
        return None
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

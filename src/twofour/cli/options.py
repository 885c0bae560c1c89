"""Options that several commands share, and their translation into records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twofour.errors import BadInputError
from twofour.records.options import LARGEST_SIZE, DynamicAxis, Precision, Trust
from twofour.reports import FORMATS, TABLE, renderer

if TYPE_CHECKING:
    from twofour.reports import Renderer


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
        help="Nodes of the ONNX file that --precision leaves float32; repeatable.",
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
Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="FILE.py:CALLABLE",
        help="Code that the run folder names and that is to be run; repeatable.",
    ),
]
TrustFlag = Annotated[bool, typer.Option("--trust", help="Run whatever code the run folder names.")]
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
AsJson = Annotated[bool, typer.Option("--json", help="Print the record on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")]


def trust(sources: list[str] | None, *, everything: bool) -> Trust:
    """What --source and --trust allow."""
    return Trust(sources=tuple(sources or ()), everything=everything)


def parse_input_shapes(
    texts: list[str] | None,
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Shapes, and their inputs' names where they have some: "2x3x224x224" or "x=2x3x224x224"."""
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


def parse_dynamic(texts: list[str] | None) -> tuple[DynamicAxis, ...] | None:
    """Read "input:axis=name"; "none" alone is no axis, nothing at all what the source has."""
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

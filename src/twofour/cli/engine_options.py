"""Options on the engine that runs a model, and on how TensorRT builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from twofour.engines.registry import AUTO, builders
from twofour.records.options import AllowedType, BuildOptions

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
    """What every command is told that builds."""

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

    def build_options(self) -> BuildOptions:
        """As a record; raises BadInputError for shapes that cannot be read."""
        from twofour.engines.inputs import parse_shapes

        allowed = {
            AllowedType.FP16: self.fp16,
            AllowedType.INT8: self.int8,
            AllowedType.BF16: self.bf16,
        }
        return BuildOptions(
            shapes=parse_shapes(self.shapes or ()),
            workspace_bytes=None if self.workspace is None else self.workspace * _MIB,
            optimization_level=self.opt_level,
            tf32=self.tf32,
            allow=tuple(kind for kind, wanted in allowed.items() if wanted),
        )

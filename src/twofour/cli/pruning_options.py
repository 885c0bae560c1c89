"""Options on which weights are pruned and how: layers, calibration data, method."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from twofour.cli.options import dimensions
from twofour.errors import BadInputError
from twofour.records.options import CalibrationOptions, MethodOptions, Selection

Repair = Annotated[
    bool | None,
    typer.Option(
        "--repair/--no-repair",
        help="Batch norms estimated again, means and deviations matched.",
        show_default="where a held-out score improves",
    ),
]
PermuteSeconds = Annotated[
    float,
    typer.Option(
        "--permute-seconds", min=0.0, help="Time to search for a better order of channels."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningArguments:
    """What every command is told that prunes."""

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

    def selection(self) -> Selection:
        """As a record; raises BadInputError for a --layers that is no list."""
        asked = Selection(
            all_layers=self.all_layers,
            include=tuple(self.include or ()),
            exclude=tuple(self.exclude or ()),
        )
        if self.layers is None:
            return asked
        from twofour.pipeline.layer_lists import read_layers

        return read_layers(self.layers, asked)

    def calibration_options(self) -> CalibrationOptions:
        """As a record; raises BadInputError for what are no numbers."""
        return CalibrationOptions(
            data=self.calibrate,
            samples=self.calibrate_samples,
            image_mean=_numbers("--mean", self.mean),
            image_std=_numbers("--std", self.std),
            image_size=_size(self.size),
        )

    def method_options(
        self, *, repair: bool | None = None, permute_seconds: float = 0.0
    ) -> MethodOptions:
        """As a record."""
        return MethodOptions(
            name=self.method,
            refit=self.refit,
            damping=self.damping,
            bias_correction=self.bias_correction,
            repair=repair,
            permute_seconds=permute_seconds,
        )


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
        sizes = dimensions(text)
    except BadInputError as error:
        raise BadInputError(f"--size: cannot read {text!r}", hint=hint) from error
    if len(sizes) > 2:
        raise BadInputError(f"--size {text} has {len(sizes)} numbers", hint=hint)
    return (sizes[0], sizes[-1])

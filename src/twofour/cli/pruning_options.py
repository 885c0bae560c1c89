"""Options on how weights are chosen: calibration data, method, and what is done after it."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from twofour.cli.options import dimensions
from twofour.errors import BadInputError
from twofour.records.options import CalibrationOptions, MethodOptions

SAMPLES = CalibrationOptions().samples
"""Where nobody says how many."""

Calibrate = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        metavar="DATA",
        help="Data that the method sees: .npz, .npy, .safetensors, .txt, .jsonl, a folder of "
        "images, or file.py:callable that yields batches.",
        show_default="none: magnitude",
    ),
]
CalibrateSamples = Annotated[
    int, typer.Option("--calibrate-samples", min=1, help="At most so many samples of it are used.")
]
Mean = Annotated[
    str | None,
    typer.Option(
        "--mean",
        metavar="R,G,B",
        help="Subtracted from pixels of images, on the scale 0 to 1.",
        show_default="the model's own",
    ),
]
Std = Annotated[
    str | None,
    typer.Option(
        "--std", metavar="R,G,B", help="Pixels are divided by it.", show_default="the model's own"
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        "--size",
        metavar="HxW",
        help="Images are brought to it.",
        show_default="the model's own",
    ),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="magnitude, wanda, sparsegpt, admm, or keep (the mask that is there already).",
        show_default="admm with --calibrate, else magnitude",
    ),
]
Refit = Annotated[
    int | None,
    typer.Option(
        "--refit",
        min=0,
        metavar="STEPS",
        help="Conjugate-gradient steps on the weights that stay.",
        show_default="what the method takes",
    ),
]
Damping = Annotated[
    float | None,
    typer.Option(
        "--damping",
        min=0.0,
        metavar="SHARE",
        help="Of the mean diagonal, added to the Gram matrix.",
        show_default="chosen on held-out data",
    ),
]
BiasCorrection = Annotated[
    bool,
    typer.Option(
        "--bias-correction/--no-bias-correction",
        help="The mean of what a layer loses goes into its bias.",
    ),
]
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


def calibration_options(
    *, data: str | None, samples: int, mean: str | None, std: str | None, size: str | None
) -> CalibrationOptions:
    """The options on calibration data as a record; raises BadInputError for no numbers."""
    return CalibrationOptions(
        data=data,
        samples=samples,
        image_mean=_numbers("--mean", mean),
        image_std=_numbers("--std", std),
        image_size=_size(size),
    )


def method_options(
    *,
    name: str | None,
    refit: int | None,
    damping: float | None,
    bias_correction: bool,
    repair: bool | None,
    permute_seconds: float,
) -> MethodOptions:
    """The options on the method as a record."""
    return MethodOptions(
        name=name,
        refit=refit,
        damping=damping,
        bias_correction=bias_correction,
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

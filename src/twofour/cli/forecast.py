"""`twofour forecast`: what pruning a model may gain on a GPU, before anything is pruned."""

from __future__ import annotations

from typing import Annotated

import typer

from twofour.cli import options as opt
from twofour.cli.console import guarded, running, say, show, show_record
from twofour.errors import BadInputError, PatternBrokenError
from twofour.records.options import ForecastOptions, MathPrecision, RunOptions
from twofour.reports import TABLE


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _precisions(text: str) -> tuple[MathPrecision, ...]:
    try:
        return tuple(map(MathPrecision, _names(text)))
    except ValueError:
        known = ", ".join(MathPrecision)
        message = f"--precision: {text!r} names a type that no kernel was measured in"
        raise BadInputError(message, hint=f"name some of {known}") from None


_ASKED = (
    opt.option(
        "gpus", "--gpu", read=_names, metavar="A100,RTX4090|all",
        show_default="those whose kernels were measured", help="GPUs by name.",
    ),
    opt.option(
        "batches", "--batch", read=opt.batch_sizes, metavar="1,8,64", help="Batch sizes.",
        show_default="that of --inputs or --input-shape, else 1,8,64",
    ),
    opt.option(
        "precisions", "--precision", read=_precisions, metavar="float16,int8,fp8",
        show_default="float16",
        help="Types to compute in: float16, bfloat16, int8, fp8, fp4; the file may have others.",
    ),
    opt.option(
        "profile", "--profile", metavar="FILE",
        help="The per-layer profile of a dense engine of the model, for one GPU, precision and "
        "batch: the model's gain is then computed from its measured times.",
    ),
)  # fmt: skip


@guarded
@opt.with_options(ForecastOptions, *_ASKED, parameter="asked")
@opt.with_options(RunOptions, *opt.INPUTS, opt.SHAPES, *opt.FREE_SIZES)
def forecast(
    model: opt.Model,
    *,
    asked: ForecastOptions,
    options: RunOptions,
    min_gain: Annotated[
        float | None,
        typer.Option("--min-gain", help="Gate: least gain of the model in each cell, such as 1.2."),
    ] = None,
    layout: opt.Layout = TABLE,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Forecast what 2:4 may gain by GPU, precision and batch, before anything is pruned.

    The times of products come from kernels of cuBLASLt and cuSPARSELt that others measured, and
    the model gains at most what its products gain. A torch model is exported to learn its sizes,
    and is not pruned. Exit 4: --min-gain is not met.

    Example: twofour forecast model.onnx --gpu A100,RTX4090 --batch 1,8,64 --precision float16,int8
    """
    from twofour.jobs import run_forecast
    from twofour.reports.forecast_document import forecast_document

    render = opt.report_format(layout, json=json)
    with running(None, quiet=quiet) as progress:
        answers = run_forecast(model, asked, options, progress)
    if json:
        show_record(answers)
    else:
        show(render(forecast_document(answers)))
        if layout == TABLE and len(answers.cells) > 1 and not quiet:
            say("Next: name one --gpu, --precision and --batch to see the layers")
    if min_gain is None:
        return
    below = [
        f"{cell.name}: {cell.answer.gain:.2f}x, below {min_gain:g}x"
        for cell in answers.cells
        if cell.answer.gain < min_gain
    ]
    if below:
        raise PatternBrokenError("\n".join(("the forecast does not meet --min-gain", *below)))

"""`twofour compare`: the same model through several engines, interleaved, with its noise."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twofour.cli import options as opt
from twofour.cli.console import (
    TerminalProgress,
    guarded,
    keep_tracebacks_in,
    say,
    show,
    show_record,
)
from twofour.cli.option_groups import Shapes
from twofour.errors import INTERRUPTED, NOT_JUDGED, BadInputError, PatternBrokenError
from twofour.records.options import LARGEST_SIZE, CompareOptions
from twofour.reports import TABLE

if TYPE_CHECKING:
    from twofour.records.latency import LatencyComparison
    from twofour.reports import Renderer


@guarded
def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER|FILE…",
            help="A run folder, a folder of build --emit-trtexec, or ONNX files and engines.",
        ),
    ],
    *,
    engines: Annotated[
        list[str] | None,
        typer.Option(
            "--engines",
            metavar="ENGINE:MODE,…",
            help="Such as onnxruntime:cpu,torch:eager; an engine alone: all its modes.",
            show_default="all that can run here",
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch", metavar="1,8,32", help="Batch sizes.", show_default="that of the inputs"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds at most, per batch.")] = 50,
    warmup: Annotated[int, typer.Option("--warmup", help="Untimed runs of each variant.")] = 5,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", metavar="S", help="Seconds for the rounds of one batch."),
    ] = 120.0,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="CPU threads.", show_default="cores of this process"),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="NAME",
            help="Such as dense@torch:eager.",
            show_default="the first",
        ),
    ] = None,
    inputs: opt.Inputs = None,
    input_shape: opt.InputShapes = None,
    shapes: Shapes = None,
    seed: opt.Seed = 0,
    metric: opt.MetricOption = None,
    source: opt.Sources = None,
    trust: opt.TrustFlag = False,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="EXPRESSION",
            help='Gate, such as "sparse / dense > 1.0"; repeatable.',
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the results.", show_default="the run folder"),
    ] = None,
    layout: opt.Layout = TABLE,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Time a model's variants in interleaved rounds, and say what is faster and what is noise.

    Every variant runs once a round, in random order, in a process of its own; one of each engine
    runs twice, and how far these two may differ is the noise. A ratio is time over the baseline's
    time, with a 95 % bootstrap interval. Gates that are met end in exit 4, and gates
    that could not be judged, as on a busy machine, in exit 6. Ctrl-C keeps the rounds so far.
    Variants in torch run the code that made the run folder: name it with --source, or --trust it.

    Example: twofour compare runs/resnet --engines onnxruntime:cpu,torch:compile --batch 1,8
    """
    render = opt.report_format(layout, json=json)
    asked_shapes, asked_names = opt.parse_input_shapes(input_shape)
    options = CompareOptions(
        engines=tuple(engines or ()),
        batches=_batches(batch),
        rounds=rounds,
        warmup=warmup,
        time_limit_s=time_limit,
        threads=threads,
        seed=seed,
        baseline=baseline,
        inputs=None if inputs is None else str(inputs),
        input_shapes=asked_shapes,
        input_shape_names=asked_names,
        shapes=tuple(shapes or ()),
        metric=metric,
        trust=opt.trust(source, everything=trust),
        fail_if=tuple(fail_if or ()),
    )
    _end(_measured(paths, out, options, render=None if json else render, quiet=quiet))


def _measured(
    paths: list[Path],
    out: Path | None,
    options: CompareOptions,
    *,
    render: Renderer | None,
    quiet: bool,
) -> LatencyComparison:
    """Measure, save and print; None prints JSON."""
    from twofour.comparing.comparison import (
        first_interrupt_only,
        measure_paths,
        save_comparison,
    )
    from twofour.reports.latency_document import latency_document

    if out is not None:
        keep_tracebacks_in(out)
    with first_interrupt_only(until_exit=True), contextlib.ExitStack() as lock:
        with TerminalProgress(quiet=quiet) as progress:
            measuring = measure_paths(paths, out, options, progress)
            folder, comparison = lock.enter_context(measuring)
        try:
            save_comparison(folder, comparison)
        finally:  # on a full disk, the output is all that is left of the measurement
            if render is None:
                show_record(comparison)
            else:
                show(render(latency_document(comparison)))
    if not quiet:
        say(f"everything is in {folder}")
    return comparison


def _batches(text: str | None) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        sizes = (0,)
    if not all(1 <= size <= LARGEST_SIZE for size in sizes):
        raise BadInputError(
            f"--batch: {text!r} is not a list of sizes", hint="write it like 1,8,32"
        )
    return sizes


def _end(comparison: LatencyComparison) -> None:
    """Exit 130 where it was interrupted, 4 where a gate is met, 6 where one was not judged.

    And 5, whatever the gates say, where no variant lived to the end.
    """
    from twofour.comparing.comparison import refuse_unfinished
    from twofour.latency.fail_if import check_fail_if

    refuse_unfinished(comparison)
    outcome = check_fail_if(comparison, comparison.options.fail_if)
    for line in (*outcome.failed, *outcome.not_judged):
        say(f"error: {line}")
    if comparison.partial is not None:
        say(comparison.partial)
        raise typer.Exit(INTERRUPTED)
    if outcome.failed:
        raise typer.Exit(PatternBrokenError.exit_code)
    if outcome.not_judged:
        say("hint: compare again on a quieter machine, or with more --rounds")
        raise typer.Exit(NOT_JUDGED)

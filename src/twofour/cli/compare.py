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
from twofour.errors import INTERRUPTED, NOT_JUDGED, PatternBrokenError
from twofour.records.options import CompareOptions
from twofour.reports import TABLE

if TYPE_CHECKING:
    from twofour.records.latency import LatencyComparison
    from twofour.reports import Renderer


_OPTIONS = (
    opt.option(
        "engines", "--engines", kind=list[str], metavar="ENGINE:MODE,…",
        show_default="that of the run",
        help="Such as onnxruntime:cpu,torch:eager; an engine alone: all its modes.",
    ),
    opt.option(
        "variants", "--variants", kind=bool,
        help="All that can run here: other engines, types, and modes of torch.",
    ),
    opt.option(
        "batches", "--batch", read=opt.batch_sizes, metavar="1,8,32", help="Batch sizes.",
        show_default="that of the inputs",
    ),
    opt.option(
        "rounds", "--rounds", kind=int, default=CompareOptions().rounds,
        help="Most rounds per batch size.",
    ),
    opt.option(
        "warmup", "--warmup", kind=int, default=CompareOptions().warmup,
        help="Untimed runs of each variant.",
    ),
    opt.option(
        "time_limit_s", "--time-limit", kind=float, default=CompareOptions().time_limit_s,
        metavar="S", help="Seconds for the rounds of one batch size.",
    ),
    opt.option(
        "threads", "--threads", kind=int, show_default="cores of this process",
        help="CPU threads.",
    ),
    opt.option(
        "baseline", "--baseline", metavar="NAME", show_default="the first",
        help="The variant to compare with, such as dense@torch:eager.",
    ),
    *opt.INPUTS,
    opt.shapes(),
    opt.METRIC,
    *opt.TRUST,
    opt.option(
        "fail_if", "--fail-if", kind=list[str], metavar="EXPRESSION",
        help='Exit 4 if this is true, such as "sparse / dense > 1.0"; repeatable.',
    ),
)  # fmt: skip


@guarded
@opt.with_options(CompareOptions, *_OPTIONS)
def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER|FILE…",
            help="A run folder, a folder of build --emit-trtexec, or ONNX files and engines.",
        ),
    ],
    *,
    options: CompareOptions,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the results.", show_default="the run folder"),
    ] = None,
    layout: opt.Layout = TABLE,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Time a model's variants in interleaved rounds, and say what is faster and what is noise.

    The dense and the sparse file run in the engine of the run folder, else in the first that can
    run here; --engines and --variants time others. Every variant runs once per round, in random
    order, in a process of its own. One variant of each engine is measured twice: the difference
    between these two is the noise. A ratio is the time of a variant divided by that of the
    baseline, with a 95 % bootstrap interval. Exit 4: a --fail-if condition is true; exit 6: it
    cannot be judged, as on a busy machine. Ctrl-C keeps the rounds. Variants in torch need the code
    that made the run folder: name it with --source, or add --trust.

    Example: twofour compare runs/resnet --engines onnxruntime:cpu,torch:compile --batch 1,8
    """
    render = opt.report_format(layout, json=json)
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
    from twofour.comparing.comparison import first_interrupt_only, measure_paths, save_comparison
    from twofour.pipeline.reporting import saved_report
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
                show(render(latency_document(comparison, saved_report(folder))))
    if not quiet:
        say(f"Results: {folder} (open latency.html)")
    return comparison


def _end(comparison: LatencyComparison) -> None:
    """Exit 130 where it was interrupted, 4 where a gate is met, 6 where one was not judged.

    And 5, whatever the gates say, where no variant lived to the end.
    """
    from twofour.comparing.comparison import refuse_unfinished
    from twofour.latency.fail_if import check_fail_if

    refuse_unfinished(comparison)
    outcome = check_fail_if(comparison, comparison.options.fail_if)
    for line in outcome.left_out:
        say(f"note: {line}")
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

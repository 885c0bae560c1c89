"""The comparison, from its arguments to latency.json and its pages.

`variants` opens what is compared and plans the rows, `measure` times them, `latency` concludes.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from twofour.comparing.compared import ComparisonSetup, open_compared
from twofour.comparing.measure import MeasuredVariants, measure
from twofour.comparing.variant_process import start_worker
from twofour.comparing.variants import PlannedVariant, plan_variants
from twofour.engines.machine import describe_machine, read_clocks, usable_cores
from twofour.engines.protocol import ENGINES, EngineInput
from twofour.errors import BadInputError, BuildFailedError, MissingToolError
from twofour.latency.fail_if import named_pairs, parse_gate
from twofour.latency.ratios import contrasts, ratios_and_noise
from twofour.pipeline.emitting import compare_emitted
from twofour.pipeline.evidence_files import is_emitted_folder
from twofour.pipeline.folder import (
    is_run_folder,
    lock_folder,
    onnx_files,
    own_folder,
    recorded_hashes,
)
from twofour.pipeline.reporting import (
    LATENCY,
    PAGES,
    check_page,
    report_document,
    report_folder,
    saved_report,
)
from twofour.pipeline.stages import Progress, ToProgress, progress_of
from twofour.records.export import EngineStatus
from twofour.records.latency import ComparedVariant, LatencyComparison, without_batch
from twofour.records.options import CompareOptions
from twofour.reports.html import write_pages
from twofour.reports.latency_document import latency_document
from twofour.sources.source import refuse_untrusted
from twofour.store import read_record, write_record
from twofour.workers.process import WorkerDiedError

LATENCY_PAGES = "latency.md", "latency.html"


def compare(
    paths: Sequence[Path],
    out: Path | None,
    options: CompareOptions,
    progress: ToProgress = None,
) -> tuple[Path, LatencyComparison]:
    """`measure_paths` and `save_comparison` in one; raises what they raise."""
    with first_interrupt_only(), measure_paths(paths, out, options, progress) as measured:
        save_comparison(*measured)
    return measured


@contextlib.contextmanager
def measure_paths(
    paths: Sequence[Path],
    out: Path | None,
    options: CompareOptions,
    progress: ToProgress = None,
) -> Iterator[tuple[Path, LatencyComparison]]:
    """Measure; gives the folder for the results, locked within the block, and the comparison.

    An interrupted comparison has `partial`. Raises BadInputError for arguments that do not fit,
    MissingToolError where no engine that was asked for can run here, BuildFailedError where every
    variant failed, and KeyboardInterrupt before the first round.
    """
    check_options(options)
    if len(paths) == 1 and is_emitted_folder(paths[0]):
        folder = out or paths[0]
        _refuse_others(folder)
        with lock_folder(folder):
            yield folder, compare_emitted(paths[0], options)
        return
    compared = open_compared(paths, out, options)
    if is_run_folder(compared.folder):
        check_page(compared.folder)
    else:
        _refuse_others(compared.folder)
    with lock_folder(compared.folder):
        own_folder(compared.work)
        yield compared.folder, _measure(compared, options, progress_of(progress))


@contextlib.contextmanager
def first_interrupt_only(*, until_exit: bool = False) -> Iterator[None]:
    """Within, the first SIGINT raises KeyboardInterrupt and later ones are ignored.

    An impatient second Ctrl-C would otherwise hit the code that keeps what the first one left.
    With `until_exit`, for a process that ends then, they stay ignored after the block too. Outside
    of the main thread, where signals cannot be handled, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if not (interrupted and until_exit):
            signal.signal(signal.SIGINT, before)


def save_comparison(folder: Path, comparison: LatencyComparison) -> None:
    """Write latency.json, latency.md and latency.html, and the page of a run folder again.

    The record comes first: everything else can be made from it. Raises BadInputError where the
    folder cannot be written.
    """
    write_record(folder / LATENCY, comparison)
    report = saved_report(folder)
    write_pages(folder, LATENCY_PAGES, latency_document(comparison, report))
    if report is not None:
        write_pages(folder, PAGES, report_document(folder, report_folder(folder).report))


def statuses_apart(engine: str, modes: Sequence[str]) -> tuple[EngineStatus, ...]:
    """Which modes can run here, tried in a process of its own: libraries may crash or catch Ctrl-C.

    No mode can run where that process ends or hangs.
    """
    try:
        with start_worker(1) as process:
            statuses: tuple[EngineStatus, ...] = process.call("statuses", ENGINES[engine], modes)
            return statuses
    except WorkerDiedError as error:
        why = f"trying it failed: {error.message}"
        status = EngineStatus(engine=engine, version=None, can_run=False, why_not=why)
        return (status,) * len(modes)


def check_options(options: CompareOptions) -> None:
    """Raise BadInputError for numbers that make no comparison."""
    for text, bad in (
        ("--rounds must be at least 1", options.rounds < 1),
        ("--warmup must not be negative", options.warmup < 0),
        ("--time-limit must be positive", options.time_limit_s <= 0),
        ("--threads must be at least 1", options.threads is not None and options.threads < 1),
        ("--batch takes sizes from 1 on", any(b < 1 for b in options.batches)),
        ("--batch names a size twice", len(set(options.batches)) < len(options.batches)),
        ("--variants leaves nothing to --engines", options.variants and bool(options.engines)),
    ):
        if bad:
            raise BadInputError(text)


def _refuse_others(folder: Path) -> None:
    """Raise BadInputError for a folder with results that no comparison of twofour wrote."""
    with contextlib.suppress(BadInputError):
        read_record(LatencyComparison, folder / LATENCY)
        return
    for name in (LATENCY, *LATENCY_PAGES):
        if (folder / name).exists():
            raise BadInputError(
                f"{folder} contains {name}, which no comparison wrote",
                hint="choose another folder with --out; nothing in it was touched",
            )


def _measure(
    compared: ComparisonSetup, options: CompareOptions, progress: Progress
) -> LatencyComparison:
    planned, baseline = _plan(compared, options)
    machine = describe_machine()
    options = replace(options, threads=options.threads or usable_cores())
    measured = measure(compared, planned, options, progress)
    if not any(v.samples_ms for v in measured.variants):
        raise _failed("no variant could be timed", measured.variants)
    variants = measured.variants
    if options.baseline is None:
        baseline = _timed_baseline(baseline, variants)
    ratios, noise = ratios_and_noise(variants, baseline, options.seed, measured.loads)
    return LatencyComparison(
        source=compared.source,
        baseline=baseline,
        machine=replace(machine, end=read_clocks()),
        options=options,
        variants=variants,
        ratios=ratios,
        noise=noise,
        inputs_are=compared.inputs_are,
        loads=measured.loads,
        layers=contrasts(variants, ratios, compared.onnx[0].nodes if compared.onnx else ()),
        partial=measured.partial,
        files=_hashes(compared) if compared.is_run else {},
        notes=(*measured.notes, *_notes(compared, measured)),
    )


def _plan(
    compared: ComparisonSetup, options: CompareOptions
) -> tuple[tuple[PlannedVariant, ...], str]:
    """The variants and the baseline; raises what can be known before anything is timed."""
    planned, baseline = plan_variants(compared.models, options, statuses_apart, compared.run_in)
    _refuse_untrusted_code(compared, planned, options)
    _refuse_vain(planned, options)
    return planned, baseline


def _refuse_untrusted_code(
    compared: ComparisonSetup, planned: Sequence[PlannedVariant], options: CompareOptions
) -> None:
    """Before it is run: the code of the torch variants."""
    for row in planned:
        torch = row.model.torch
        is_run = ENGINES[row.engine].takes is EngineInput.MODULE and row.why_not is None
        if is_run and torch is not None:
            refuse_untrusted(Path(compared.source), torch.source, options.trust)


def _refuse_vain(planned: Sequence[PlannedVariant], options: CompareOptions) -> None:
    """Before anything is timed: a gate or metric that is not there, and what cannot run at all."""
    rows = []
    for row in planned:
        for batch in options.batches or (None,):
            rows.append(ComparedVariant(name=row.name_at(batch), batch=batch))  # two loops
    for gate in options.fail_if:
        named_pairs(rows, parse_gate(gate))
    if all(row.why_not is not None for row in planned):
        reasons = _reasons((row.name, row.why_not) for row in planned)
        raise MissingToolError(reasons, hint=planned[0].hint)
    if options.metric is not None:
        with start_worker(1) as process:
            process.call("check_metric", options.metric)


def _timed_baseline(planned: str, variants: Sequence[ComparedVariant]) -> str:
    """The planned baseline; where it failed the first variant with a twin, else the first."""
    timed = [without_batch(v.name) for v in variants if v.samples_ms]
    if planned in timed:
        return planned
    twins = [name for name in timed if name.endswith(" again")]
    return (twins or timed)[0].removesuffix(" again")


def _hashes(compared: ComparisonSetup) -> dict[str, str]:
    names = [name for model in compared.onnx for name in onnx_files(model.path)]
    return recorded_hashes(compared.folder, names)


def refuse_unfinished(comparison: LatencyComparison) -> None:
    """Raise BuildFailedError where every variant failed before its rounds were over."""
    if comparison.partial is None and all(v.error is not None for v in comparison.variants):
        raise _failed("every variant failed before its rounds were over", comparison.variants)


def _failed(what: str, variants: Sequence[ComparedVariant]) -> BuildFailedError:
    reasons = _reasons((variant.name, variant.error) for variant in variants)
    hint = next((v.hint for v in variants if v.hint), None)
    return BuildFailedError(f"{what}: {reasons}", hint=hint)


def _reasons(whys: Iterable[tuple[str, str | None]]) -> str:
    """Every reason once, behind the names of its variants."""
    names: dict[str | None, list[str]] = {}
    for name, why in whys:
        names.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(alike)}: {why}" for why, alike in names.items())


def _notes(compared: ComparisonSetup, measured: MeasuredVariants) -> Iterator[str]:
    arrays = []
    for name, array in compared.inputs.items():
        shape = "x".join(map(str, array.shape)) or "scalar"
        arrays.append(f"{name} {shape} {array.dtype}")
    origin = "" if compared.inputs_are is None else f" ({compared.inputs_are})"
    if compared.made_up:
        origin = " (random: give real ones with --inputs, or shapes with --input-shape)"
    yield f"inputs: {', '.join(arrays)}{origin}"
    if compared.no_baseline is not None:
        yield compared.no_baseline  # the model came in 2:4: it is compared with itself
    by_name = {without_batch(v.name): v for v in measured.variants}
    for variant in by_name.values():
        far = [row.judged or 0 for row in variant.agreement if row.is_far]
        if far:
            yield (
                f"the outputs of {variant.name} are far from the dense ones (relative error "
                f"{max(far):.2f}): pruning lost too much, or it is another model"
            )
    if compared.dense_outputs is not None:
        yield "outputs are compared, on these inputs, with the dense module's in float32"
        return
    judged = [v.name for v in measured.variants if v.agreement]
    if judged:
        yield f"outputs are compared with those of {judged[0]}: no float32 reference is kept"

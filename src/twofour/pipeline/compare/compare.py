"""The comparison from its arguments to latency.json: what is compared, measured, concluded."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from twofour.engines.machine import describe_machine, read_clocks, usable_cores
from twofour.engines.protocol import ModeStatus
from twofour.engines.registry import ENGINES, Takes
from twofour.errors import BadInputError, BuildFailedError, MissingToolError
from twofour.graph.opened import OpenedModel
from twofour.latency.gates import check_names, parse_fail_if
from twofour.latency.layers import (
    OwnersOf,
    PartsOf,
    contrasts,
    no_owners,
    owners_by_graph,
    parts_by_graph,
    parts_by_name,
)
from twofour.latency.ratios import ratios_and_noise
from twofour.latency.variants import parse_variant_name, variant_name, without_batch
from twofour.pipeline.changed_files import left
from twofour.pipeline.compare.measure import Measured, check_metric, measure, planned_rows
from twofour.pipeline.compare.plan import Planned, parse_engines, plan_variants
from twofour.pipeline.compare.process import start_worker
from twofour.pipeline.compare.trtexec_times import compare_emitted
from twofour.pipeline.compare.variants import NOT_LOADABLE, Compared, open_compared
from twofour.pipeline.emitting import is_emitted_folder
from twofour.pipeline.folder import is_run_folder, own_folder, writing_into
from twofour.pipeline.reporting import (
    LATENCY,
    REPORT,
    check_page,
    report_document,
    report_folder,
    write_pages,
)
from twofour.pipeline.stages import ACCURACY, Progress, Silent, onnx_files
from twofour.pipeline.trust import refuse_untrusted
from twofour.pipeline.workers import WorkerDiedError
from twofour.records.export import Accuracy
from twofour.records.latency import ComparedVariant, LatencyComparison, LatencyRatio
from twofour.records.options import CompareOptions
from twofour.reports import html, markdown
from twofour.reports.latency_document import latency_document
from twofour.store import read_record, write_record, write_text
from twofour.version import installed_version

_FAR_COSINE = 0.9
"""Below it two outputs are not those of one model in two precisions (those are above 0.99)."""
MARKDOWN = "latency.md"
PAGE = "latency.html"
_MARK = ".comparison"
"""Empty, and the first file in the folder of a comparison's work: all beside it is ours."""


def compare(
    paths: Sequence[Path],
    out: Path | None,
    options: CompareOptions,
    progress: Progress | None = None,
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
    progress: Progress | None = None,
) -> Iterator[tuple[Path, LatencyComparison]]:
    """Measure; gives the folder for the results, locked within the block, and the comparison.

    An interrupted comparison is one with `partial`. Raises BadInputError for arguments that do not
    fit and a folder that another command writes into, MissingToolError where no engine that was
    asked for can run here, BuildFailedError where every variant failed, and KeyboardInterrupt
    before the first round.
    """
    check_options(options)
    for text in options.fail_if:
        parse_fail_if(text)
    if len(paths) == 1 and is_emitted_folder(paths[0]):
        folder = make_folder(out or paths[0])
        _refuse_others(folder)
        with writing_into(folder):
            yield folder, compare_emitted(paths[0], options)
        return
    compared = open_compared(paths, out, options)
    _refuse_untrusted_code(compared, options)
    if is_run_folder(compared.folder):
        check_page(compared.folder)
    else:
        _refuse_others(compared.folder, compared.work)
    with writing_into(make_folder(compared.folder)):
        (own_folder(compared.work) / _MARK).touch()
        yield compared.folder, _measure(compared, options, progress or Silent())


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
    document = latency_document(comparison)
    write_text(folder / MARKDOWN, markdown.render(document))
    write_text(folder / PAGE, html.render(document))
    verdicts = folder / REPORT
    if is_run_folder(folder) and verdicts.is_file():
        write_pages(folder, report_document(folder, report_folder(folder)))


def make_folder(path: Path) -> Path:
    """Create it with its parents; raises BadInputError where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(
            f"cannot create {path}: {error.strerror or error}", hint="choose another --out"
        ) from error
    return path


def statuses_apart(engine: str, modes: Sequence[str]) -> Mapping[str, ModeStatus]:
    """What can run here, tried in a process of its own: libraries may crash or catch Ctrl-C.

    Nothing can of an engine that takes that process down, or hangs.
    """
    try:
        with start_worker(1) as process:
            found: Mapping[str, ModeStatus] = process.call("statuses", ENGINES[engine], modes)
            return found
    except WorkerDiedError as error:
        why = f"trying it failed: {error.message}"
        return {
            mode: ModeStatus(engine=engine, mode=mode, why_not=why, hint=None) for mode in modes
        }


def check_options(options: CompareOptions) -> None:
    """Raises BadInputError for numbers that make no comparison."""
    wrong = [
        text
        for text, bad in (
            ("--rounds must be at least 1", options.rounds < 1),
            ("--warmup must not be negative", options.warmup < 0),
            ("--time-limit must be positive", options.time_limit_s <= 0),
            ("--threads must be at least 1", options.threads is not None and options.threads < 1),
            ("--batch takes sizes from 1 on", any(b < 1 for b in options.batches)),
            ("--batch names a size twice", len(set(options.batches)) < len(options.batches)),
        )
        if bad
    ]
    if wrong:
        raise BadInputError("; ".join(wrong))


def _refuse_others(folder: Path, work: Path | None = None) -> None:
    """Raises BadInputError for results, or a folder of work, that no comparison of ours left."""
    with contextlib.suppress(BadInputError):
        read_record(LatencyComparison, folder / LATENCY)
        return
    there = [name for name in (LATENCY, MARKDOWN, PAGE) if (folder / name).exists()]
    if work is not None and work.is_dir() and not (work / _MARK).exists() and any(work.iterdir()):
        there.append(f"{work.name}/")
    if there:
        raise BadInputError(
            f"{folder} holds {there[0]}, which no comparison wrote",
            hint="choose another folder with --out; nothing in it was touched",
        )


def _measure(compared: Compared, options: CompareOptions, progress: Progress) -> LatencyComparison:
    planned, baseline = plan_variants(
        compared.models, options.engines, options.baseline, statuses_apart
    )
    check_names(planned_rows(planned, options.batches), options.fail_if)
    _refuse_nothing(planned)
    if options.metric is not None:
        check_metric(options.metric)
    machine = describe_machine()
    threads = options.threads or usable_cores()
    options = replace(options, threads=threads)
    measured = measure(compared, planned, options, threads, progress)
    _refuse_all_failed(measured.variants)
    baseline = _working_baseline(measured, baseline, options)
    ratios, noise = ratios_and_noise(measured.variants, baseline, options.seed, measured.loads)
    return LatencyComparison(
        source=compared.source,
        baseline=baseline,
        machine=replace(machine, end=read_clocks()),
        options=options,
        variants=measured.variants,
        ratios=ratios,
        noise=noise,
        loads=measured.loads,
        layers=contrasts(
            measured.variants,
            _within_engines(measured.variants, ratios),
            *_layer_names_of(compared),
        ),
        partial=measured.partial,
        files=left(compared.folder, _model_files(compared)) if compared.is_run else {},
        notes=(*measured.notes, *_notes(compared, measured)),
    )


def _model_files(compared: Compared) -> Iterator[str]:
    return (name for model in compared.onnx for name in onnx_files(model.path))


def _within_engines(
    variants: Sequence[ComparedVariant], ratios: Sequence[LatencyRatio]
) -> tuple[LatencyRatio, ...]:
    """Ratios whose two sides name their layers alike: same engine, and same mode or file."""
    settings = {v.name: v.settings for v in variants}

    def alike(ratio: LatencyRatio) -> bool:
        one, other = settings[ratio.variant], settings[ratio.baseline]
        if one is None or other is None or one.engine != other.engine:
            return False
        return one.mode == other.mode or one.sparse_kernels is not None

    return tuple(filter(alike, ratios))


def _layer_names_of(compared: Compared) -> tuple[PartsOf, OwnersOf]:
    """What an engine's layer names mean: by the graph where there is one, else by themselves."""
    if not compared.onnx:
        return parts_by_name, no_owners
    nodes = compared.onnx[0].nodes
    return parts_by_graph(nodes), owners_by_graph(nodes)


def _refuse_nothing(planned: Sequence[Planned]) -> None:
    if any(row.why_not is None for row in planned):
        return
    first = planned[0]
    names: dict[str | None, list[str]] = {}
    for row in planned:
        names.setdefault(row.why_not, []).append(row.name)
    said = "; ".join(f"{', '.join(of)}: {why}" for why, of in names.items())
    raise MissingToolError(said, hint=first.hint)


def _refuse_untrusted_code(compared: Compared, options: CompareOptions) -> None:
    """Before anything is started: the code of the torch variants that are asked for."""
    asked = [name for name, _ in parse_engines(options.engines)] or list(ENGINES)
    rows = [ENGINES[name] for name in asked if ENGINES[name].takes is Takes.MODULE]
    if any(installed_version(package) for row in rows for package in row.packages):
        for model in compared.models:
            if model.torch is not None:
                refuse_untrusted(Path(compared.source), model.torch.source, options.trust)


def _refuse_all_failed(variants: Sequence[ComparedVariant]) -> None:
    if not any(v.samples_ms for v in variants):
        raise _failed("no variant could be timed", variants)


def refuse_unfinished(comparison: LatencyComparison) -> None:
    """Raise BuildFailedError where every variant failed on the way: what is kept is cut short."""
    if comparison.partial is None and all(v.error is not None for v in comparison.variants):
        raise _failed("every variant failed before its rounds were over", comparison.variants)


def _failed(what: str, variants: Sequence[ComparedVariant]) -> BuildFailedError:
    errors: dict[str | None, str] = {}
    for variant in variants:
        errors.setdefault(variant.error, variant.name)
    said = "; ".join(f"{name}: {why}" for why, name in errors.items())
    hint = next((v.hint for v in variants if v.hint), None)
    return BuildFailedError(f"{what}: {said}", hint=hint)


def _working_baseline(measured: Measured, baseline: str, options: CompareOptions) -> str:
    """The baseline, or where that failed and was not asked for the first that has a twin."""
    timed = [without_batch(v.name) for v in measured.variants if v.samples_ms]
    if baseline in timed or options.baseline is not None:
        return baseline
    names = [parse_variant_name(name) for name in timed]
    twins = [variant_name(n.weights, n.engine, n.mode) for n in names if n.again]
    return (*twins, *timed)[0]


def _other_graphs(compared: Compared) -> Iterator[str]:
    """Files that are not the same layers with other weights; a run folder's always are."""
    if compared.is_run or len(compared.onnx) < 2:
        return
    first, *others = compared.onnx
    layers = [_layers_of(model) for model in compared.onnx]
    for model, found in zip(others, layers[1:], strict=True):
        if found != layers[0]:
            yield (
                f"WARNING: {model.path.name} has other layers than {first.path.name} "
                f"({sum(found.values())} weights of {len(found)} kinds against "
                f"{sum(layers[0].values())} of {len(layers[0])}): ratios compare two models"
            )


def _layers_of(model: OpenedModel) -> Counter[tuple[str, tuple[int, ...]]]:
    """Operator and shape of every weight."""
    return Counter((w.op, w.shape) for w in model.weights().weights)


def _no_baseline(compared: Compared) -> Iterator[str]:
    """A run whose model came in 2:4 compares it with itself."""
    record = Path(compared.source, ACCURACY)
    if record.is_file():
        why = read_record(Accuracy, record).no_baseline
        yield from () if why is None else (why,)


def _far_outputs(variants: Sequence[ComparedVariant]) -> Iterator[str]:
    for variant in variants:
        cosines = [row.cosine for row in variant.agreement if row.equal is None]
        if cosines and min(cosines) < _FAR_COSINE:
            yield (
                f"the outputs of {variant.name} are far from the reference's (cosine "
                f"{min(cosines):.2f}): pruned without recovery, or another model"
            )


def _input_words(compared: Compared) -> str:
    arrays = ", ".join(
        f"{name} {'x'.join(map(str, array.shape)) or 'scalar'} {array.dtype}"
        for name, array in compared.inputs.items()
    )
    made_up = " (made up: give real ones with --inputs, or shapes with --input-shape)"
    return f"inputs: {arrays}{made_up if compared.made_up else ''}"


def _notes(compared: Compared, measured: Measured) -> tuple[str, ...]:
    once = {without_batch(v.name): v for v in measured.variants}
    notes = [
        _input_words(compared),
        *_other_graphs(compared),
        *_no_baseline(compared),
        *_far_outputs(tuple(once.values())),
        *({NOT_LOADABLE} & {model.no_torch for model in compared.models}),
    ]
    if compared.reference is not None:
        notes.append("outputs are compared, on these inputs, with the dense module's in float32")
    elif first := next((v.name for v in measured.variants if v.agreement), None):
        notes.append(f"outputs are compared with those of {first}: no float32 reference is kept")
    return tuple(notes)

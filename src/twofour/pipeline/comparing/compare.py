"""The comparison from its arguments to latency.json: what is compared, measured, concluded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from twofour.engines.machine import describe_machine, read_clocks
from twofour.engines.ort_session import usable_cores
from twofour.errors import BadInputError, BuildFailedError, MissingToolError
from twofour.graph import load_model
from twofour.graph_nodes import graph_nodes
from twofour.latency_records import ComparedVariant, CompareOptions, LatencyComparison, LatencyRatio
from twofour.pipeline.comparing.measuring import Measured, check_metric, measure
from twofour.pipeline.comparing.planning import Planned, plan_variants
from twofour.pipeline.comparing.subject import Subject, open_subject
from twofour.pipeline.comparing.times import compare_emitted
from twofour.pipeline.emitting import is_emitted_folder
from twofour.pipeline.folder import is_run_folder
from twofour.pipeline.reporting import HTML, LATENCY, REPORT, report_page
from twofour.pipeline.stages import Progress, Silent
from twofour.records import EligibilityReport
from twofour.reports.comparison.layer_contrast import contrasts
from twofour.reports.comparison.layer_parts import PartsOf, parts_by_graph, parts_by_name
from twofour.reports.comparison.markdown import comparison_markdown
from twofour.reports.comparison.page import comparison_page
from twofour.reports.comparison.ratios import ratios_and_noise
from twofour.store import read_record, write_record, write_text

MARKDOWN = "latency.md"
PAGE = "latency.html"


def compare(
    paths: Sequence[Path],
    out: Path | None,
    options: CompareOptions,
    progress: Progress | None = None,
) -> tuple[Path, LatencyComparison]:
    """Measure and write latency.json, latency.md and the page; gives the folder they are in.

    An interrupted comparison is written too, with `partial`. Raises BadInputError for arguments
    that do not fit, MissingToolError where no engine that was asked for can run here, and
    BuildFailedError where every variant failed.
    """
    check_options(options)
    if len(paths) == 1 and is_emitted_folder(paths[0]):
        folder, comparison = out or paths[0], compare_emitted(paths[0], options)
    else:
        subject = open_subject(paths, out, options)
        folder, comparison = subject.folder, _measure(subject, options, progress or Silent())
    _save(folder, comparison)
    return folder, comparison


def _save(folder: Path, comparison: LatencyComparison) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / MARKDOWN, comparison_markdown(comparison))
    write_text(folder / PAGE, comparison_page(comparison))
    write_record(folder / LATENCY, comparison)
    verdicts = folder / REPORT
    if is_run_folder(folder) and verdicts.is_file():
        report = read_record(EligibilityReport, verdicts)
        write_text(folder / HTML, report_page(folder, report))


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


def _measure(subject: Subject, options: CompareOptions, progress: Progress) -> LatencyComparison:
    planned, baseline = plan_variants(subject.models, options.engines, options.baseline)
    _refuse_nothing(planned)
    if options.metric is not None:
        check_metric(options.metric)
    machine = describe_machine()
    threads = options.threads or usable_cores()
    measured = measure(subject, planned, replace(options, threads=threads), threads, progress)
    _refuse_all_failed(measured.variants)
    ratios, noise = ratios_and_noise(measured.variants, baseline, options.seed)
    return LatencyComparison(
        source=subject.source,
        baseline=baseline,
        machine=replace(machine, end=read_clocks()),
        options=replace(options, threads=threads),
        variants=measured.variants,
        ratios=ratios,
        noise=noise,
        layers=contrasts(
            measured.variants, _within_engines(measured.variants, ratios), _parts_of(subject)
        ),
        partial=measured.partial,
        notes=(*measured.notes, *_notes(subject, measured)),
    )


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


def _parts_of(subject: Subject) -> PartsOf:
    """What an engine's layer names mean: by the graph where there is one, else by themselves."""
    path = next((model.onnx for model in subject.models if model.onnx is not None), None)
    if path is None:
        return parts_by_name
    return parts_by_graph(graph_nodes(load_model(path, weights=False)))


def _refuse_nothing(planned: Sequence[Planned]) -> None:
    if any(row.why_not is None for row in planned):
        return
    raise MissingToolError(
        "; ".join(dict.fromkeys(f"{row.name}: {row.why_not}" for row in planned)),
        hint=next((row.hint for row in planned if row.hint), None),
    )


def _refuse_all_failed(variants: Sequence[ComparedVariant]) -> None:
    if not any(v.samples_ms for v in variants):
        errors = dict.fromkeys(f"{v.name}: {v.error}" for v in variants)
        raise BuildFailedError(
            "no variant could be timed: " + "; ".join(errors),
            hint=next((v.hint for v in variants if v.hint), None),
        )


def _notes(subject: Subject, measured: Measured) -> tuple[str, ...]:
    notes = []
    if subject.reference is None:
        first = next((v.name for v in measured.variants if v.agreement), None)
        if first is not None:
            notes.append(
                f"outputs are compared with those of {first}: no float32 reference is kept"
            )
    return tuple(notes)

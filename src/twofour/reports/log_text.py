"""What build logs say about sparsity, for the terminal: facts, layers, at the end the answer."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twofour.records.log import Build, BuildLog, BuildOutcome, SparsityKind, TunedLayer
from twofour.reports.join.build_facts import build_facts, types_of_command
from twofour.reports.log_answer import answer, counted_layers
from twofour.reports.telling_errors import telling_errors
from twofour.reports.words import SPARSE_TO_DENSE, count, printable, tactic_ratio

_MOST_ROWS = 200
_MOST_ROWS_IN_ALL = 2000
_FEWEST_ROWS = 20
_MOST_ERRORS = 3
_SILENT = "the log has no such line"
_UNTOLD = "-"


def log_view(log: BuildLog) -> RenderableType:
    """Every build with its summary and the table of its tuned layers; then the answers."""
    parts: list[RenderableType] = []
    most = max(_FEWEST_ROWS, min(_MOST_ROWS, _MOST_ROWS_IN_ALL // max(1, len(log.builds))))
    for number, build in enumerate(log.builds, 1):
        parts += [Text(line) for line in _summary(build, number)]
        rows = [*build.layers, *_untimed(build)]
        if rows:
            parts.append(_table(rows, most))
        parts.append(Text())
    notes = [f"{file.name}: {note}" for file in log.files for note in file.notes]
    parts += [Text(printable(note)) for note in notes]
    return Group(*parts, *(Text(line) for line in _answers(log.builds)))


def _answers(builds: tuple[Build, ...]) -> Iterator[str]:
    """What follows from every build, where a reader looks first: at the end."""
    for number, build in enumerate(builds, 1):
        start = "answer" if len(builds) == 1 else f"answer to {_heading(build, number)}"
        yield printable(f"{start}: {answer(build)}")


def _summary(build: Build, number: int) -> Iterator[str]:
    version = build.tensorrt_version or "version not stated"
    gpu = build.gpu or "GPU not stated"
    if build.compute_capability is not None:
        gpu += f" (compute capability {'.'.join(map(str, build.compute_capability))})"
    where = f"{build.file}:{build.first_line}-{build.last_line}"
    yield printable(f"{_heading(build, number)}: {where}: {_outcome(build)}")
    yield printable(f"  {build.producer.value}, TensorRT {version}, {gpu}")
    yield printable(
        f"  sparsity {build.sparsity.value}, precision {build.precision or _by_kernels(build)}"
    )
    yield f"  eligible: {_listed(build, SparsityKind.ELIGIBLE)}"
    yield f"  chosen: {_listed(build, SparsityKind.CHOSEN)}"
    for found in build.contradictions:
        line = "" if found.line is None else f"line {found.line}: "
        yield printable(f"  contradiction: {line}{found.message}")
    if build.timing_cache.hides_timings:
        yield "  a timing cache answered for some layers: a missing timing means nothing there"
    if build.skipped_tactics:
        yield f"  {count(len(build.skipped_tactics), 'tactic')} skipped (memory, workspace, errors)"
    if build.latency is not None and build.latency.throughput_qps is not None:
        yield f"  throughput {build.latency.throughput_qps:g} qps"
    if build.error_count or build.warning_count:
        errors = count(build.error_count, "error")
        yield f"  {errors}, {count(build.warning_count, 'warning')}"
    yield from (
        printable(f"  error at line {e.line}: " + e.on_one_line)
        for e in telling_errors(build.errors)[:_MOST_ERRORS]
    )
    if build.dropped:
        yield f"  {count(build.dropped, 'fact')} not kept, to bound memory"


def _heading(build: Build, number: int) -> str:
    return f"no build ({number})" if build.outcome is BuildOutcome.LOADED else f"build {number}"


def _outcome(build: Build) -> str:
    if build.outcome is BuildOutcome.LOADED:
        return "an engine or a model is loaded or inspected, none built"
    if build.outcome is BuildOutcome.FAILED and not (build.made_no_engine or build.engine_loaded):
        return "failed, after the engine was built"
    return str(build.outcome.value)


def _by_kernels(build: Build) -> str:
    """The types of a build that states none, as its command or the names of its kernels show."""
    types = build_facts(build, build.engine_layers).types
    if types is None:
        return "not stated"
    source = "the names of kernels" if not types_of_command(build) else "the command"
    return f"not stated, {'+'.join(sorted(types)) or 'FP32'} by {source}"


def _listed(build: Build, kind: SparsityKind) -> str:
    names = build.eligible if kind is SparsityKind.ELIGIBLE else build.chosen
    printed = [
        f"{line.printed_count} printed at line {line.line}"
        for line in build.sparsity_lines
        if line.kind is kind and line.printed_count is not None
    ]
    counts = f" ({', '.join(printed[:4])}{', ...' if len(printed) > 4 else ''})" if printed else ""
    if names is None:
        return (printed[0] + ", no names") if printed else _SILENT
    return f"{counted_layers(build, kind)}{counts}"


def _untimed(build: Build) -> Iterator[TunedLayer]:
    """Layers of the (Sparsity) lists that no tuning line names, so that none is only counted."""
    known = {layer.name for layer in build.layers}
    listed = dict.fromkeys((*(build.chosen or ()), *(build.eligible or ())))
    chosen, eligible = set(build.chosen or ()), set(build.eligible or ())
    for name in listed:
        if name not in known and not known.issuperset(name.split(" || ")):
            yield TunedLayer(
                name=name, runner=None, tactics=(), best_dense_ms=None, best_sparse_ms=None,
                eligible=name in eligible, chosen=name in chosen,
            )  # fmt: skip


def _table(layers: list[TunedLayer], most: int) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    titles = ("layer", "runner", "best sparse ms", "best dense ms", SPARSE_TO_DENSE, "chosen")
    rows = sorted(layers, key=_interest)
    cells = [_cells(layer) for layer in rows[:most]]
    # a column that says nothing of any layer would take its room from the names
    told = [at for at, column in enumerate(zip(*cells, strict=True)) if {*column} != {_UNTOLD}]
    for at in told:
        right = "ms" in titles[at] or titles[at] == SPARSE_TO_DENSE
        table.add_column(titles[at], overflow="fold", justify="right" if right else "left")
    for row in cells:
        table.add_row(*(Text(row[at], overflow="fold") for at in told))
    if len(rows) <= most:
        return table
    return Group(table, Text(f"  {len(rows) - most} more layers: see --json"))


def _interest(layer: TunedLayer) -> tuple[bool, bool, bool]:
    """Chosen, then eligible, then whatever has a sparse time; the log's order within."""
    return not layer.chosen, not layer.eligible, layer.best_sparse_ms is None


def _cells(layer: TunedLayer) -> tuple[str, ...]:
    sparse, dense = layer.best_sparse_ms, layer.best_dense_ms
    ratio = tactic_ratio(sparse, dense)
    return (
        printable(layer.name),
        printable(layer.runner or ", ".join(layer.runners) or _UNTOLD),
        _ms(sparse),
        _ms(dense),
        _UNTOLD if ratio is None else f"{ratio:.3f}",
        "yes" if layer.chosen else "eligible" if layer.eligible else _no(layer),
    )


def _no(layer: TunedLayer) -> str:
    return _UNTOLD if layer.chosen is None else "no"


def _ms(value: float | None) -> str:
    return _UNTOLD if value is None else f"{value:.4g}"

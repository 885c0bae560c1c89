"""What build logs say about sparsity as a document: of each build its facts and its answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from twofour.eligibility.build_evidence import causes_first
from twofour.eligibility.build_facts import (
    NO_ENGINES_OF_LLM,
    build_facts,
    types_of_command,
)
from twofour.eligibility.rules import gpu_in_words
from twofour.records.export import FIRST_WITH_SPARSE
from twofour.records.log import (
    Build,
    BuildLog,
    BuildOutcome,
    Producer,
    SparsityFlag,
    SparsityKind,
    SparsityLine,
    TunedLayer,
)
from twofour.reports.document import (
    Block,
    Document,
    Role,
    Table,
    figures,
    lines_of,
    names,
    present,
    table,
    texts,
)
from twofour.words import SPARSE_TO_DENSE, count, printable, tactic_ratio


class _Options(NamedTuple):
    """How a producer of logs calls its options."""

    allow: str = "config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)"
    """Lets the builder choose sparse kernels."""
    louder: str = "a logger at VERBOSE"


_OPTIONS = {
    Producer.TRTEXEC: _Options("--sparsity=enable", "--verbose"),
    Producer.POLYGRAPHY: _Options("--sparse-weights", "--verbose"),
    Producer.TORCH_TENSORRT: _Options("sparse_weights=True"),
    Producer.ONNXRUNTIME: _Options("trt_sparsity_enable=1"),
    Producer.TENSORRT_LLM: _Options("--weight_sparsity"),
}


def answer(build: Build) -> str:
    """One sentence on a build, and what to do where something is in the way."""
    if build.checked_tensors and not (build.layers or build.sparsity_lines):
        held = sum(tensor.sparse for tensor in build.checked_tensors)
        tensors = count(len(build.checked_tensors), "tensor")
        return f"the pattern holds in {held} of {tensors}; nothing was built"
    running = _running(build)
    if build.engine_loaded:
        kernels = f"; by its layer information {running}" if running else ""
        return f"nothing was built, an engine was loaded: give the log of its build{kernels}"
    if build.outcome is BuildOutcome.LOADED:
        return "a model or an engine is shown: nothing was built"
    if build.sparsity is SparsityFlag.FORCED:
        return (
            f"{running or 'no layer runs sparse'}, on weights that --sparsity=force overwrote: "
            "this says nothing of the model; prune it and rebuild with --sparsity=enable"
        )
    if build.made_no_engine:
        errors = causes_first(build.errors)
        return f"the build failed: {errors[0].text}" if errors else "the build failed"
    words = running or _of_dense(build)
    if not running and build.producer is Producer.TENSORRT_LLM:
        words += f". {NO_ENGINES_OF_LLM.in_words}"
    return words


def _layers(number: int, one: str, many: str) -> str:
    return f"{count(number, 'layer')} {one if number == 1 else many}"


def _running(build: Build) -> str:
    """`8 layers run sparse`, by the list of choices or the kernels in the engine; "" for none."""
    # a log that names 8 layers and prints a count of 0: 8
    chosen = len(build.chosen or ())
    kernels = sum(layer.sparse is True for layer in build.engine_layers or ())
    if not chosen and not kernels:
        return ""
    words = _layers(max(chosen, kernels), "runs sparse", "run sparse")
    if _is_cut(build.sparsity_lines):
        words = f"at least {words}"
    if any(line.names and line.printed_count == 0 for line in build.sparsity_lines):
        words += ": the log names them, although it counts 0"
    return words


# --- the (Sparsity) lists and their counts --------------------------------------------------------


def _lines(build: Build, kind: SparsityKind) -> list[SparsityLine]:
    """The lines of a kind, without the choices that were not kept."""
    return [line for line in build.sparsity_lines if line.kind is kind and not line.discarded]


def _is_cut(lines: Iterable[SparsityLine]) -> bool:
    # "Found 39 layer(s) ...: conv1, conv2, ...." of an issue names 2 of 39
    return any(line.elided or line.missing for line in lines)


def _counted(lines: Iterable[SparsityLine]) -> int:
    """How many layers the lines say that they list."""
    return sum(line.printed_count or 0 for line in lines)


def _listed(build: Build, kind: SparsityKind) -> str:
    """`8 layers`, or that the log does not name them."""
    names = build.eligible if kind is SparsityKind.ELIGIBLE else build.chosen
    lines = [line for line in _lines(build, kind) if line.printed_count is not None]
    if names is None:
        if not lines:
            return "the log has no such line"
        return f"{count(_counted(lines), 'layer')} counted, no names are in the log"
    words = count(len(names), "layer")
    for line in lines:
        if line.printed_count == len(line.names or ()):
            continue
        if line.printed_count == len(line.constituents or ()):
            # "3 engine layers (5 layers before fusion, line 812)"
            engine_layers = count(len(names), "engine layer")
            return f"{engine_layers} ({line.printed_count} layers before fusion, line {line.line})"
        return f"{words} by name; the log counts {line.printed_count} (line {line.line})"
    return words


# --- no layer is known to run sparse --------------------------------------------------------------


def _of_dense(build: Build) -> str:
    """The first thing in the way."""
    capability = build.compute_capability
    if capability and capability < FIRST_WITH_SPARSE:
        return gpu_in_words(build.gpu or "the GPU", capability)
    options = _OPTIONS.get(build.producer, _Options())
    if build.sparsity is SparsityFlag.DISABLED and not build.sparsity_lines:
        return f"sparsity was off: rebuild with {options.allow}"
    timed = sum(layer.best_sparse_ms is not None for layer in build.layers)
    # layers that a cut list does not name may run sparse
    if _is_cut(build.sparsity_lines) or (build.sparsity_lines and build.eligible is None):
        return _of_cut(build)
    if build.eligible is None and timed:
        return "sparse kernels were timed, and the log has no list of the layers that were chosen"
    if not build.eligible:
        return _of_silent(build, options)
    return _of_eligible(build, len(build.eligible), timed, options)


def _of_cut(build: Build) -> str:
    missing = "names of layers are missing from the lists: keep the lines of the log whole"
    eligible = _counted(_lines(build, SparsityKind.ELIGIBLE))
    chosen = _counted(_lines(build, SparsityKind.CHOSEN))
    if build.eligible is not None or not eligible:
        return missing
    return f"{eligible} eligible and {chosen} chosen layers are counted; {missing}"


def _of_silent(build: Build, options: _Options) -> str:
    if build.eligible == ():
        return "no layer is eligible: the builder found no 2:4 weights in a layer that can use them"
    if build.sparsity is SparsityFlag.ENABLED:
        return f"sparsity was on, and the log has no list of layers: rebuild with {options.louder}"
    again = f": rebuild with {options.allow}"
    if build.layers:
        return f"sparsity was probably off (layers were tuned, no eligible ones are listed){again}"
    return f"the log does not say whether sparsity was on{again} and {options.louder}"


def _of_eligible(build: Build, number: int, timed: int, options: _Options) -> str:
    eligible = _layers(number, "is eligible", "are eligible")
    # the builder prints its lists in pairs: after one of eligible layers comes one of chosen ones
    if build.chosen is None or build.sparsity_lines[-1].kind is SparsityKind.ELIGIBLE:
        return f"{eligible}; the log does not say which were chosen"
    if build_facts(build, build.engine_layers).types == frozenset():
        why = (
            "this build ran in FP32, for which no sparse kernel is known: "
            "export the model in float16"
        )
    elif timed:
        why = f"sparse kernels were timed for {count(timed, 'layer')}, and none was chosen"
    elif any(layer.tactics for layer in build.layers):
        why = "no sparse kernel was timed"
        if build.timing_cache.hides_timings:
            why += ", and a timing cache may have answered: build once without it"
    else:
        why = f"no times are in the log, rebuild with {options.louder} to see them"
    return f"{eligible}, none runs sparse: {why}"


def _ratio(layer: TunedLayer) -> float | None:
    return tactic_ratio(layer.best_sparse_ms, layer.best_dense_ms)


# --- the document ---------------------------------------------------------------------------------

_MOST_ROWS = 200
_MOST_ERRORS = 3


def log_document(log: BuildLog) -> Document:
    """Every build with its summary and the table of its tuned layers; first of all the answers."""
    answers: list[str] = []
    blocks: list[Block] = []
    for number, build in enumerate(log.builds, 1):
        to = f" to {_heading(build, number)}" if len(log.builds) > 1 else ""
        answers.append(f"answer{to}: {answer(build)}")
        blocks += _build(build, number)
    notes: list[str] = []
    for file in log.files:
        notes += (f"{file.name}: {note}" for note in file.notes)
    return Document(
        name=printable(", ".join(file.name for file in log.files)),
        about="build log",
        title="Build log",
        lead=present(lines_of(Role.TEXT, answers)),
        blocks=present(*blocks, lines_of(Role.TEXT, notes)),
    )


def _build(build: Build, number: int) -> Iterator[Block]:
    yield lines_of(Role.TEXT, _summary(build, number))
    rows = sorted((*build.layers, *_untimed(build)), key=_place)
    yield _layers_table(rows[:_MOST_ROWS])
    more = len(rows) - _MOST_ROWS
    if more > 0:
        yield lines_of(Role.TEXT, [f"  {more} more layers: see --json"])
    yield lines_of(Role.TEXT, [""])


def _place(layer: TunedLayer) -> tuple[bool, bool, bool]:
    """Chosen, then eligible, then whatever has a sparse time; then as in the log."""
    return not layer.chosen, not layer.eligible, layer.best_sparse_ms is None


def _layers_table(rows: Sequence[TunedLayer]) -> Table:
    return table(
        "",
        (
            names("layer", rows, lambda r: r.name),
            texts("runner", rows, lambda r: r.runner or ", ".join(r.runners)),
            figures("best sparse ms", rows, lambda r: r.best_sparse_ms, "{:.4g}".format),
            figures("best dense ms", rows, lambda r: r.best_dense_ms, "{:.4g}".format),
            figures(SPARSE_TO_DENSE, rows, _ratio, "{:.3f}".format),
            texts("sparse kernel", rows, _choice),
        ),
    )


def _choice(layer: TunedLayer) -> str | None:
    if layer.chosen:
        return "chosen"
    if layer.eligible:
        return "eligible"
    return None if layer.chosen is None else "no"


def _untimed(build: Build) -> Iterator[TunedLayer]:
    """Layers of the (Sparsity) lists that no tuning line names, so that none is only counted."""
    known = {layer.name for layer in build.layers}
    chosen = dict.fromkeys(build.chosen or ())
    eligible = dict.fromkeys(build.eligible or ())
    for name in chosen | eligible:
        # "conv1 || conv2" is two layers side by side: each may have a tuning line of its own
        if name not in known and not known.issuperset(name.split(" || ")):
            yield TunedLayer(
                name=name, runner=None, tactics=(), best_dense_ms=None, best_sparse_ms=None,
                eligible=name in eligible, chosen=name in chosen,
            )  # fmt: skip


def _summary(build: Build, number: int) -> Iterator[str]:
    where = f"{build.file}, lines {build.first_line} to {build.last_line}"
    yield f"{_heading(build, number)}: {where}: {_outcome(build)}"
    yield _versions(build)
    precision = build.precision or _by_kernels(build)
    yield f"  sparsity {build.sparsity.value}, precision {precision}"
    for kind in SparsityKind:
        yield f"  {kind.value}: {_listed(build, kind)}"
        if _is_cut(_lines(build, kind)):
            yield f"  the list of {kind.value} layers is cut: names are missing"
    for contradiction in build.contradictions:
        line = "" if contradiction.line is None else f"line {contradiction.line}: "
        yield f"  contradiction: {line}{contradiction.message}"
    yield from _remarks(build)


def _versions(build: Build) -> str:
    version = build.tensorrt_version or "version not stated"
    gpu = build.gpu or "GPU not stated"
    if build.compute_capability is not None:
        gpu += f" (compute capability {'.'.join(map(str, build.compute_capability))})"
    return f"  {build.producer.value}, TensorRT {version}, {gpu}"


def _remarks(build: Build) -> Iterator[str]:
    """What else the log says of the build: cache, skipped tactics, throughput, errors."""
    if build.timing_cache.hides_timings:
        yield "  a timing cache was in use: layers may have been tuned without a time in the log"
    if build.skipped_tactics:
        yield f"  {count(len(build.skipped_tactics), 'tactic')} skipped (memory, workspace, errors)"
    if build.latency is not None and build.latency.throughput_qps is not None:
        yield f"  throughput {build.latency.throughput_qps:g} qps"
    if build.error_count or build.warning_count:
        errors = count(build.error_count, "error")
        yield f"  {errors}, {count(build.warning_count, 'warning')}"
    for error in causes_first(build.errors)[:_MOST_ERRORS]:
        yield f"  error at line {error.line}: {error.text}"
    if build.dropped:
        yield f"  {count(build.dropped, 'fact')} not kept, to bound memory"


def _heading(build: Build, number: int) -> str:
    return f"part {number}" if build.outcome is BuildOutcome.LOADED else f"build {number}"


def _by_kernels(build: Build) -> str:
    """The types of a build that states none, as its command or the names of its kernels show."""
    types = build_facts(build, build.engine_layers).types
    if types is None:
        return "not stated"
    source = "the command" if types_of_command(build) else "the names of kernels"
    return f"{'+'.join(sorted(types)) or 'FP32'} (from {source})"


def _outcome(build: Build) -> str:
    if build.outcome is BuildOutcome.LOADED:
        return "no build in it"
    if build.outcome is BuildOutcome.FAILED and not (build.made_no_engine or build.engine_loaded):
        return "failed, after the engine was built"
    return str(build.outcome.value)

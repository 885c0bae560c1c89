"""One build while the lines of its log are read, and the record that it becomes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from twofour.logs.facts import Facts, Results
from twofour.logs.kernels import Budget, is_sparse_kernel, tuned_layer
from twofour.logs.layer_info import onnx_nodes
from twofour.logs.messages import DATED, PLAIN, LogicalLine
from twofour.logs.sparsity import (
    alone_and_fused,
    contradictions,
    listed_names,
    with_cuts,
    with_list,
    without_profile,
)
from twofour.logs.tactics import MyelinTables, Tuning
from twofour.records.log import (
    AutotuningCounts,
    Build,
    BuildOutcome,
    CheckedTensor,
    EngineLayer,
    Fusion,
    LayerSources,
    LogMessage,
    Producer,
    RenamedLayer,
    SparsityFlag,
    SparsityKind,
    SparsityLine,
    TimingCache,
    TunedLayer,
)

_INSPECTS = re.compile(r"polygraphy(?:\.exe)? inspect ")
_BUILD_FAILED = re.compile(
    r"Could not find any implementation|Engine could not be created|Builder failed"
    r"|buildSerializedNetwork: Error|buildEngine\w*: Error|Building engine failed|Failed to parse"
    r"|Engine set up failed|Could not parse ONNX|Invalid Engine\. Please ensure"
)
_NOT_PARSED = re.compile(r"While parsing node number \d|ModelImporter\.cpp:\d+: ERROR")
"""Errors of the ONNX parser (onnx-tensorrt, ModelImporter.cpp): then nothing is built."""


def _outcome(build: OpenBuild) -> BuildOutcome:
    """How the build ended, as far as the lines show; a finished engine outweighs errors.

    Inspecting a model asks the parser which nodes it refuses, and that is no failure.
    """
    if build.run_failed:
        return BuildOutcome.FAILED
    if build.generated and not build.undecided:
        return BuildOutcome.BUILT
    if _INSPECTS.search(build.facts.command or ""):
        return BuildOutcome.LOADED
    if build.failed:
        return BuildOutcome.FAILED
    shown = build.inspected or build.listed_layers or build.engine_layers
    only_shown = bool(shown) and not build.is_run and not _builder_worked(build)
    if build.loaded or only_shown or (build.passed and _engine_loaded(build)):
        return BuildOutcome.LOADED
    return BuildOutcome.BUILT if build.passed else BuildOutcome.UNFINISHED


def _engine_loaded(build: OpenBuild) -> bool:
    """Whether an engine was loaded from a file, or was to be, and no builder was at work."""
    return (build.loaded or build.facts.loads_engine) and not _builder_worked(build)


def _builder_worked(build: OpenBuild) -> bool:
    """Whether any line is one that only a builder prints."""
    signs = (build.generated, build.tuning.layers, build.sparsity, build.fusions)
    return any(signs) or build.facts.cache_mode is not None


def _producer(build: OpenBuild) -> Producer:
    """The producer of most of the prefixes; a plain `[V]` alone means Python."""
    styles = build.styles
    for certain in (Producer.TENSORRT_LLM, Producer.POLYGRAPHY, Producer.TENSORRT_RTX):
        if styles[certain]:
            return certain
    usual = Producer.PYTHON if styles[PLAIN] else Producer.UNKNOWN
    usual = Producer.TRTEXEC if styles[DATED] else usual
    return next((style for style, _ in styles.most_common() if isinstance(style, Producer)), usual)


_NEAR = 3
"""Lines between the comparison of two passes and the beginning of the next."""


class OpenBuild:
    """Everything read so far of one build or run."""

    def __init__(self, file: str, first_line: int, budget: Budget) -> None:
        self.file = file
        self.first_line = self.last_line = first_line
        self.budget = budget
        self.facts = Facts()
        self.tuning = Tuning(budget)
        self.tables = MyelinTables()
        self.results = Results(budget)
        self.styles: Counter[Producer | str] = Counter()
        self.sparsity: list[SparsityLine] = []
        self.fusions: list[Fusion] = []
        self.renamed: dict[str, RenamedLayer] = {}
        self.sources: dict[str, LayerSources] = {}
        self.engine_layers: list[EngineLayer] | None = None
        self.listed_layers: list[EngineLayer] = []
        self.checked: list[CheckedTensor] = []
        self.warnings: list[LogMessage] = []
        self.errors: list[LogMessage] = []
        self.warning_count = self.error_count = 0
        self.dropped = 0
        self.replayed: str | None = None
        self.touched = False
        """Something worth a record was found besides warnings and errors."""
        self.complained = False
        self.is_run = False
        """Opened by the RUNNING line of trtexec or Polygraphy; only their own line closes it."""
        self.finished = False
        self.generated = self.failed = self.passed = self.loaded = False
        self.inspected = False
        """Polygraphy printed the layers of a network or an engine."""
        self.run_failed = False
        """Trtexec says at its end that the run failed, whatever was built before."""
        self.native_chosen = False
        """The (Sparsity) lines of the whole network are complete."""
        self._pass_start = 0
        """How many (Sparsity) lines there were before the builder's latest pass."""
        self._compared = 0
        self.undecided = False
        """The builder has not compared its latest pass with the one before."""

    def next_pass(self, line: int) -> None:
        """The builder tries another backend strategy for the same engine."""
        if self.generated and line - self._compared <= _NEAR:
            self.generated = self.native_chosen = False
            self.undecided = True
            self.facts.earlier_s = self.facts.passes_s or 0.0
            self._pass_start = len(self.sparsity)
            self.tuning.before, self.tuning.layers = self.tuning.layers, {}

    def compare_passes(self, line: LogicalLine, *, keep_last: bool) -> None:
        """The builder keeps the engine of its latest pass, or the one it had before."""
        self._compared = line.number + line.raw.count("\n")
        self.undecided = False
        self.tuning.end_pass(keep_last=keep_last)
        start, place = self._pass_start, len(self.sparsity)
        for i in range(start) if keep_last else range(start, place):
            self.sparsity[i] = replace(self.sparsity[i], discarded=True)

    @property
    def only_complains(self) -> bool:
        """Only warnings and errors were found, and none of them says that a build failed."""
        return self.complained and not self.touched and not self.failed

    def ends_with(self, error: str) -> bool:
        """Whether a build with this error makes no engine.

        A node that the ONNX parser refuses is such an error; ONNX Runtime continues without it.
        """
        must_parse = not self.styles[Producer.ONNXRUNTIME]
        refused = must_parse and _NOT_PARSED.search(error[:2000]) is not None
        return refused or _BUILD_FAILED.search(error[:2000]) is not None

    def touch(self, found: bool) -> None:
        """Note that something worth a record was found."""
        self.touched = self.touched or found

    def count_style(self, style: Producer | str) -> None:
        """Note whose lines these are."""
        self.styles[style] += 1

    def explain(self, line: LogicalLine) -> bool:
        """Whether the line continues the error before it, which ends in a colon; if so, add it."""
        last = self.errors[-1] if self.errors else None
        if last is None or last.line != line.number - 1 or not last.text.endswith(":"):
            return False
        if self.budget.take(2 * len(line.text)):
            text, raw = f"{last.text} {line.text}", f"{last.raw}\n{line.quote}"
            self.errors[-1] = replace(last, text=text, raw=raw)
        return True

    def complain(self, line: LogicalLine) -> None:
        """Keep a warning or an error, the first some hundred of each."""
        text, raw = line.text.strip(), line.quote
        if line.severity == "W":
            self.warning_count += 1
            kept = self.warnings
        else:
            self.error_count += 1
            kept = self.errors
            self.failed = self.failed or self.ends_with(line.text)
        self.complained = True
        if self.budget.take(2 * len(text)):
            kept.append(LogMessage(line=line.number, text=text, raw=raw))
        else:
            self.dropped += 1

    def add_sparsity(self, found: SparsityLine) -> None:
        """Keep a (Sparsity) line."""
        self.touched = True
        if not self.budget.take(3 * sum(map(len, found.names or ())) + len(found.raw)):
            self.dropped += 1
            found = with_list(replace(found, raw=""), None)
        self.sparsity.append(found)
        if found.foreign_node:
            self.tuning.lists_sparsity()
        else:
            self.native_chosen = found.kind is SparsityKind.CHOSEN

    def add_fusion(self, fusion: Fusion | None, line: LogicalLine) -> None:
        """Keep a graph optimisation, and the line that reports it."""
        if fusion is None:
            return
        raw = line.first_row
        if self._has_room(sum(map(len, fusion.layers)) + len(raw)):
            self.fusions.append(replace(fusion, raw=raw))

    def add_renamed(self, layer: RenamedLayer | None) -> None:
        """Keep which node a layer of another name is made of; every pass prints it again."""
        if layer is None or layer.layer in self.renamed:
            return
        if self._has_room(len(layer.layer) + len(layer.node)):
            self.renamed[layer.layer] = layer

    def add_sources(self, layer: str, metadata: str) -> None:
        """Keep which nodes a layer inside Myelin is made of; every pass prints it again."""
        nodes = () if layer in self.sources else onnx_nodes(metadata)
        if nodes not in ((), (layer,)) and self._has_room(len(layer) + sum(map(len, nodes))):
            self.sources[layer] = LayerSources(layer=layer, onnx_nodes=nodes)

    def _has_room(self, length: int) -> bool:
        """Whether there is room for one more fact of that length; if not, it counts as dropped."""
        found = self.budget.take_spare(length)
        self.dropped += not found
        return found

    def add_engine_layer(self, layer: EngineLayer, *, detailed: bool) -> None:
        """Keep a layer of the finished engine; detailed records are preferred to mere lists."""
        self.touched = True
        if not self.budget.take(len(layer.name) + 2 * len(layer.metadata or "")):
            self.dropped += 1
            return
        if detailed:
            self.engine_layers = self.engine_layers or []
            self.engine_layers.append(layer)
        else:
            self.listed_layers.append(layer)


def finished_build(build: OpenBuild) -> Build:
    """The record of a build."""
    facts, tuning = build.facts, build.tuning
    tuning.end_combination()
    tuning.end_pass(keep_last=True)
    if build.undecided:
        build.sparsity = [replace(x, discarded=x.discarded or None) for x in build.sparsity]
    lines = with_cuts(build.sparsity)
    loaded = _engine_loaded(build)
    if loaded:  # the log's options are defaults for a build that did not happen
        facts.flag = facts.precision = facts.level = None
    flag = facts.flag or (SparsityFlag.ENABLED if lines else SparsityFlag.UNKNOWN)
    found = [*contradictions(lines, flag), *facts.contradictions()]
    return Build(
        file=build.file,
        first_line=build.first_line,
        last_line=build.last_line,
        producer=_producer(build),
        tensorrt_version=facts.version,
        gpu=facts.gpu,
        compute_capability=facts.capability,
        outcome=_outcome(build),
        engine_loaded=loaded,
        loads_engine=build.loaded,
        command=facts.command,
        model=facts.model,
        sparsity=flag,
        precision=facts.precision,
        optimization_level=facts.level,
        build_s=facts.build_s,
        eligible=listed_names(lines, SparsityKind.ELIGIBLE),
        chosen=listed_names(lines, SparsityKind.CHOSEN),
        sparsity_lines=lines,
        contradictions=tuple(found),
        layers=tuple(_layers(build, lines)),
        counts=AutotuningCounts(**tuning.counts),
        skipped_tactics=tuple(tuning.skipped),
        timing_cache=TimingCache(
            mode=facts.cache_mode,
            hits=facts.cache_hits,
            cached_results=tuning.cached,
            silent_combinations=tuning.silent,
        ),
        fusions=tuple(build.fusions),
        renamed_layers=tuple(build.renamed.values()),
        layer_sources=tuple(build.sources.values()),
        warnings=tuple(build.warnings),
        errors=tuple(build.errors),
        warning_count=build.warning_count,
        error_count=build.error_count,
        engine_layers=_engine_layers(build),
        latency=build.results.summary(),
        profile=build.results.profile(),
        checked_tensors=tuple(build.checked),
        workspace_wanted_bytes=facts.workspace_bytes,
        dropped=build.dropped + tuning.dropped + build.results.dropped,
    )


def _layers(build: OpenBuild, lines: tuple[SparsityLine, ...]) -> Iterator[TunedLayer]:
    """Tuned layers, marked with the lists that name them and the kernel that the engine uses."""
    listed = (listed_names(lines, kind) for kind in SparsityKind)
    eligible, chosen = (None if names is None else alone_and_fused(names) for names in listed)
    final = {layer.name: layer for layer in build.listed_layers}
    final |= {layer.name: layer for layer in build.engine_layers or ()}
    for name, state in build.tuning.layers.items():
        layer = tuned_layer(name, state)
        if not layer.tactics and not layer.runners and not layer.cached and not state.runner:
            continue
        silent = None if "ForeignNode[" in name else False  # a region's lists name what is in it
        yield replace(
            layer,
            eligible=None if eligible is None else without_profile(name) in eligible or silent,
            chosen=None if chosen is None else without_profile(name) in chosen or silent,
            kernel=_final_kernel(layer, final.get(name)),
        )


def _final_kernel(layer: TunedLayer, final: EngineLayer | None) -> str | None:
    if final is None:
        return None
    if final.kernel is not None or final.tactic_id is None:
        return final.kernel
    return next((t.kernel for t in layer.tactics if t.id == final.tactic_id and t.kernel), None)


def _engine_layers(build: OpenBuild) -> tuple[EngineLayer, ...] | None:
    """Detailed layers where there are any; else the list, with kernels looked up by number."""
    if build.engine_layers is not None:
        return tuple(build.engine_layers)
    if not build.listed_layers:
        return None
    found = []
    for layer in build.listed_layers:
        state = build.tuning.layers.get(layer.name)
        kernel = _final_kernel(tuned_layer(layer.name, state), layer) if state else None
        sparse = is_sparse_kernel(kernel)
        found.append(replace(layer, kernel=kernel, sparse=sparse) if kernel else layer)
    return tuple(found)

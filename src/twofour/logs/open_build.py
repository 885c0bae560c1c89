"""One build while the lines of its log are read, and the record that it becomes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field, replace

from twofour.logs.facts import Facts, Results
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
from twofour.logs.tactics import Budget, Tuning, is_sparse_kernel, tuned_layer
from twofour.records.log import (
    Build,
    BuildOutcome,
    CheckedTensor,
    Contradiction,
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
SparsityLines = tuple[SparsityLine, ...]
_NEAR = 3
"""Lines between the comparison of two passes and the beginning of the next."""


@dataclass(slots=True)
class OpenBuild:
    """Everything read so far of one build or run."""

    file: str
    first_line: int
    budget: Budget
    last_line: int = field(init=False)
    tuning: Tuning = field(init=False)
    results: Results = field(init=False)
    facts: Facts = field(default_factory=Facts)
    styles: Counter[Producer | str] = field(default_factory=Counter)
    sparsity: list[SparsityLine] = field(default_factory=list)
    fusions: list[Fusion] = field(default_factory=list)
    renamed: dict[str, RenamedLayer] = field(default_factory=dict)
    sources: dict[str, LayerSources] = field(default_factory=dict)
    engine_layers: list[EngineLayer] = field(default_factory=list)
    """Detailed records of the engine's layers."""
    listed_layers: list[EngineLayer] = field(default_factory=list)
    """The engine's layers in mere lists."""
    checked: list[CheckedTensor] = field(default_factory=list)
    warnings: list[LogMessage] = field(default_factory=list)
    errors: list[LogMessage] = field(default_factory=list)
    warning_count: int = 0
    error_count: int = 0
    dropped: int = 0
    replayed: str | None = None
    """The layer of Polygraphy's tactic replay whose tactic is on the next line."""
    touched: bool = False
    """Something worth a record was found besides warnings and errors."""
    complained: bool = False
    is_run: bool = False
    """Opened by the RUNNING line of trtexec or Polygraphy; only their own line closes it."""
    finished: bool = False
    generated: bool = False
    """An engine was built."""
    failed: bool = False
    passed: bool = False
    loaded: bool = False
    inspected: bool = False
    """Polygraphy printed the layers of a network or an engine."""
    run_failed: bool = False
    """Trtexec says at its end that the run failed, whatever was built before."""
    native_chosen: bool = False
    """The (Sparsity) lines of the whole network are complete."""
    undecided: bool = False
    """The builder has not compared its latest pass with the one before."""
    _pass_start: int = 0
    """How many (Sparsity) lines there were before the builder's latest pass."""
    _compared: int = 0

    def __post_init__(self) -> None:
        self.last_line = self.first_line
        self.tuning = Tuning(self.budget)
        self.results = Results(self.budget)

    @property
    def only_complains(self) -> bool:
        """Only warnings and errors were found, and none of them says that a build failed."""
        return self.complained and not self.touched and not self.failed

    @property
    def builder_worked(self) -> bool:
        """Whether any line is one that only a builder prints."""
        signs = (self.generated, self.tuning.layers, self.sparsity, self.fusions)
        return any(signs) or self.facts.cache_mode is not None

    @property
    def only_loads(self) -> bool:
        """Whether an engine was loaded from a file, or was to be, and no builder was at work."""
        return (self.loaded or self.facts.loads_engine) and not self.builder_worked

    # --- passes of one builder ---------------------------------------------------------------

    # TensorRT 10.16 may build an engine several times and keeps the one it estimates to be fastest:
    #     Building graph using backend strategy 4
    #     Engine generation completed in 8.5 seconds.
    #     Use backend strategy 4 with estimated inference time (0.22) as the initial choice.
    #     Building graph using backend strategy 3
    #     Engine generation completed in 0.25 seconds.
    #     Skip backend strategy 3 since its estimated inference time (0.25) is not faster ...
    # One build of 8.75 seconds; what the second pass chose is discarded.

    def next_pass(self, line: int) -> None:
        """The builder tries another backend strategy for the same engine."""
        if self.generated and line - self._compared <= _NEAR:
            self.generated = False
            self.native_chosen = False
            self.undecided = True
            self.facts.earlier_s = self.facts.passes_s or 0.0
            self._pass_start = len(self.sparsity)
            self.tuning.before = self.tuning.layers
            self.tuning.layers = {}

    def compare_passes(self, line: LogicalLine, *, keep_last: bool) -> None:
        """The builder keeps the engine of its latest pass, or the one it had before."""
        self._compared = line.number + line.raw.count("\n")
        self.undecided = False
        self.tuning.end_pass(keep_last=keep_last)
        for i, sparsity_line in enumerate(self.sparsity):
            is_last = i >= self._pass_start
            if is_last is not keep_last:
                self.sparsity[i] = replace(sparsity_line, discarded=True)

    # --- what the lines say ------------------------------------------------------------------

    def count_style(self, style: Producer | str) -> None:
        """Note whose lines these are."""
        self.styles[style] += 1

    def explain(self, line: LogicalLine) -> bool:
        """Whether the line continues the error before it, which ends in a colon; if so, add it."""
        if not self.errors:
            return False
        last = self.errors[-1]
        if last.line != line.number - 1 or not last.text.endswith(":"):
            return False
        if self.budget.take(2 * len(line.text)):
            text = f"{last.text} {line.text}"
            self.errors[-1] = replace(last, text=text, raw=f"{last.raw}\n{line.quote}")
        return True

    def complain(self, line: LogicalLine) -> None:
        """Keep a warning or an error, the first some hundred of each."""
        self.complained = True
        text = line.text.strip()
        if line.severity == "W":
            kept = self.warnings
            self.warning_count += 1
        else:
            kept = self.errors
            self.error_count += 1
            self.failed = self.failed or self.ends_with(text)
        if self._has_room(2 * len(text)):
            kept.append(LogMessage(line=line.number, text=text, raw=line.quote))

    def ends_with(self, error: str) -> bool:
        """Whether a build with this error makes no engine.

        A node that the ONNX parser refuses is such an error; ONNX Runtime continues without it.
        """
        if _BUILD_FAILED.search(error[:2000]):
            return True
        is_refused = _NOT_PARSED.search(error[:2000]) is not None
        return is_refused and not self.styles[Producer.ONNXRUNTIME]

    def add_sparsity(self, line: SparsityLine) -> None:
        """Keep a (Sparsity) line."""
        self.touched = True
        if not self._has_room(3 * sum(map(len, line.names or ())) + len(line.raw)):
            line = with_list(replace(line, raw=""), None)
        self.sparsity.append(line)
        if line.foreign_node:
            self.tuning.lists_sparsity()
        else:
            self.native_chosen = line.kind is SparsityKind.CHOSEN

    def add_fusion(self, fusion: Fusion | None, line: LogicalLine) -> None:
        """Keep a graph optimisation, and the line that reports it."""
        if fusion is None:
            return
        raw = line.first_row
        if self._has_room(sum(map(len, fusion.layers)) + len(raw), spare=True):
            self.fusions.append(replace(fusion, raw=raw))

    def add_renamed(self, layer: RenamedLayer | None) -> None:
        """Keep which node a layer of another name is made of; every pass prints it again."""
        if layer is None or layer.layer in self.renamed:
            return
        if self._has_room(len(layer.layer) + len(layer.node), spare=True):
            self.renamed[layer.layer] = layer

    def add_sources(self, layer: str, metadata: str) -> None:
        """Keep which nodes a layer inside Myelin is made of; every pass prints it again."""
        if layer in self.sources:
            return
        nodes = onnx_nodes(metadata)
        length = len(layer) + sum(map(len, nodes))
        if nodes not in ((), (layer,)) and self._has_room(length, spare=True):
            self.sources[layer] = LayerSources(layer=layer, onnx_nodes=nodes)

    def add_engine_layer(self, layer: EngineLayer, *, detailed: bool) -> None:
        """Keep a layer of the finished engine; detailed records are preferred to mere lists."""
        self.touched = True
        if self._has_room(len(layer.name) + 2 * len(layer.metadata or "")):
            layers = self.engine_layers if detailed else self.listed_layers
            layers.append(layer)

    def _has_room(self, length: int, *, spare: bool = False) -> bool:
        """Whether there is room for one more fact of that length; if not, it counts as dropped."""
        take = self.budget.take_spare if spare else self.budget.take
        has_room = take(length)
        self.dropped += not has_room
        return has_room


# --- the record -----------------------------------------------------------------------------------


def finished_build(build: OpenBuild) -> Build:
    """The record of a build."""
    facts = build.facts
    build.tuning.end_combination()
    build.tuning.end_pass(keep_last=True)
    if build.undecided:
        build.sparsity = [replace(x, discarded=x.discarded or None) for x in build.sparsity]
    lines = with_cuts(build.sparsity)
    if build.only_loads:  # the log's options are defaults for a build that did not happen
        facts.flag = None
        facts.precision = None
        facts.level = None
    flag = facts.flag or (SparsityFlag.ENABLED if lines else SparsityFlag.UNKNOWN)
    record = _record(build, lines, flag)
    return replace(
        record,
        engine_loaded=build.only_loads,
        loads_engine=build.loaded,
        renamed_layers=tuple(build.renamed.values()),
        layer_sources=tuple(build.sources.values()),
        checked_tensors=tuple(build.checked),
        workspace_wanted_bytes=facts.workspace_bytes,
        dropped=build.dropped + build.tuning.dropped + build.results.dropped,
    )


def _record(build: OpenBuild, lines: SparsityLines, flag: SparsityFlag) -> Build:
    facts = build.facts
    return Build(
        file=build.file,
        first_line=build.first_line,
        last_line=build.last_line,
        producer=_producer(build),
        tensorrt_version=facts.version,
        gpu=facts.gpu,
        compute_capability=facts.capability,
        outcome=_outcome(build),
        command=facts.command,
        model=facts.model,
        sparsity=flag,
        precision=facts.precision,
        optimization_level=facts.level,
        build_s=facts.build_s,
        eligible=listed_names(lines, SparsityKind.ELIGIBLE),
        chosen=listed_names(lines, SparsityKind.CHOSEN),
        sparsity_lines=lines,
        contradictions=_contradictions(build, lines, flag),
        layers=_layers(build, lines),
        counts=build.tuning.autotuning_counts(),
        skipped_tactics=tuple(build.tuning.skipped),
        timing_cache=_timing_cache(build),
        fusions=tuple(build.fusions),
        warnings=tuple(build.warnings),
        errors=tuple(build.errors),
        warning_count=build.warning_count,
        error_count=build.error_count,
        engine_layers=_engine_layers(build),
        latency=build.results.summary,
        profile=build.results.profile,
    )


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
    is_shown = build.inspected or build.listed_layers or build.engine_layers
    is_only_shown = is_shown and not build.is_run and not build.builder_worked
    if build.loaded or is_only_shown or (build.passed and build.only_loads):
        return BuildOutcome.LOADED
    return BuildOutcome.BUILT if build.passed else BuildOutcome.UNFINISHED


def _contradictions(
    build: OpenBuild, lines: SparsityLines, flag: SparsityFlag
) -> tuple[Contradiction, ...]:
    return (*contradictions(lines, flag), *build.facts.contradictions())


def _producer(build: OpenBuild) -> Producer:
    """The producer of most of the prefixes; a plain `[V]` alone means Python."""
    styles = build.styles
    for certain in (Producer.TENSORRT_LLM, Producer.POLYGRAPHY, Producer.TENSORRT_RTX):
        if styles[certain]:
            return certain
    for style, _ in styles.most_common():
        if isinstance(style, Producer):
            return style
    if styles[DATED]:
        return Producer.TRTEXEC
    return Producer.PYTHON if styles[PLAIN] else Producer.UNKNOWN


def _timing_cache(build: OpenBuild) -> TimingCache:
    return TimingCache(
        mode=build.facts.cache_mode,
        hits=build.facts.cache_hits,
        cached_results=build.tuning.cached,
        silent_combinations=build.tuning.silent,
    )


def _layers(build: OpenBuild, lines: SparsityLines) -> tuple[TunedLayer, ...]:
    """Tuned layers, marked with the lists that name them and the kernel that the engine uses."""
    eligible = _known_names(lines, SparsityKind.ELIGIBLE)
    chosen = _known_names(lines, SparsityKind.CHOSEN)
    layers = []
    final = {layer.name: layer for layer in (*build.listed_layers, *build.engine_layers)}
    for name, open_layer in build.tuning.layers.items():
        layer = tuned_layer(name, open_layer)
        if not (layer.tactics or layer.runners or layer.cached or layer.runner):
            continue
        marked = replace(
            layer,
            eligible=_is_listed(name, eligible),
            chosen=_is_listed(name, chosen),
            kernel=_final_kernel(layer, final.get(name)),
        )
        layers.append(marked)
    return tuple(layers)


def _known_names(lines: SparsityLines, kind: SparsityKind) -> Set[str] | None:
    names = listed_names(lines, kind)
    return None if names is None else alone_and_fused(names)


def _is_listed(name: str, listed: Set[str] | None) -> bool | None:
    if listed is None:
        return None
    if without_profile(name) in listed:
        return True
    # a region's lists name what is in it
    return None if "ForeignNode[" in name else False


def _final_kernel(layer: TunedLayer, final: EngineLayer | None) -> str | None:
    if final is None:
        return None
    if final.kernel is None and final.tactic_id is not None:
        for tactic in layer.tactics:
            if tactic.id == final.tactic_id and tactic.kernel:
                return tactic.kernel
    return final.kernel


def _engine_layers(build: OpenBuild) -> tuple[EngineLayer, ...] | None:
    """Detailed layers where there are any; else the list, with kernels looked up by number."""
    if build.engine_layers:
        return tuple(build.engine_layers)
    layers = []
    for layer in build.listed_layers:
        tuned = build.tuning.layers.get(layer.name)
        if tuned is None:
            layers.append(layer)
            continue
        kernel = _final_kernel(tuned_layer(layer.name, tuned), layer)
        layers.append(replace(layer, kernel=kernel, sparse=is_sparse_kernel(kernel)))
    return tuple(layers) or None

"""The words with which TensorRT's messages begin, and what is done with each.

One table for all who need it: the parser looks messages up here, segments begin and end by it, and
what stands before such words in a line is a prefix, whatever it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple

from twofour.logs import facts, sparsity, tactics
from twofour.logs.build import OpenBuild
from twofour.logs.names import normal_id
from twofour.logs.prefix import LogicalLine
from twofour.records.log import CheckedTensor, EngineLayer, Fusion, Producer

Handler = Callable[[OpenBuild, LogicalLine], None]


class Turn(Enum):
    """What a message shows of the place in the log, besides what it says."""

    BEGINS = auto()
    """A builder is at work on a network: after a finished build, the next one."""
    MAY_BEGIN = auto()
    """A builder or a runtime is created: the next build, or the use of the last engine."""
    ENDS = auto()
    """An engine is built. TensorRT 8 says the first as VERBOSE; at INFO the last two tell."""
    USES = auto()
    """An engine is used, or a builder goes on: no build begins or ends."""
    TUNES = auto()
    """After a finished engine it is the next one that is tuned, however little was logged."""
    PROFILES = auto()
    """A table of layers and times follows."""
    COMMAND_ENDS = auto()
    """Of Polygraphy; `PASSED | Output: ...` is about one tensor's comparison."""
    BANNER = auto()
    """Trtexec's RUNNING, PASSED, FAILED or WAIVED."""
    FURTHER_IN = auto()
    """What the message says stands behind these words."""


class Wording(NamedTuple):
    """How a message begins."""

    start: str
    handle: Handler
    """What is done with it; where several rows begin alike all are done, in their order."""
    turn: Turn | None = None
    is_sure: bool = False
    """Nobody else writes these words, and no message has them further in."""


KEY_LENGTH = 7
"""Characters of a message by which the words that begin it are looked up; none has fewer."""
_PROVE_NOTHING = frozenset(
    ("Model: ", "Input filename:", "Loading model: ", "Precision: ", "Profiling verbosity: ")
)
"""Words that other programs print too: they make no build where there is none."""
_RESULTS = (
    "Throughput: ", "throughput: ", "Latency: ", "Enqueue Time", "H2D Latency", "D2H Latency",
    "GPU Compute", "End-to-End Host Latency: ", "Total Host Walltime: ", "walltime: ",
    "Total GPU Compute Time: ", "total compute time: ", "Host Latency", "Host latency",
    "percentile: ", "median: ",
)  # fmt: skip
_MEMORY = (
    "Total Host Persistent Memory: ", "Total Device Persistent Memory: ",
    "Total Scratch Memory: ", "Max Scratch Memory: ", "Total Activation Memory: ",
    "Total Weights Memory: ", "Created engine with size: ", "[MemUsageStats] Peak memory usage ",
)  # fmt: skip
_POLYGRAPHY_ENDS = tuple(
    f"{word} | {what}: " for word in ("PASSED", "FAILED") for what in ("Runtime", "Command")
)
_SILENT = ("Average on ", "Searching for ", "Importing ", "Bindings:", "Layers:")
_SILENT_AND_SURE = (
    "Registering tensor", "Parsing node", "Registered plugin creator", "Plugin creator ",
    "Graph optimization time: ", "CUDA lazy loading is ", "Formats and tactics selection",
    "Deserialization required ", "Engine Layer Information:", "Loading tactic replay file",
    "ModelImporter.cpp:", "=== Model Options", "=== Build Options", "=== System Options",
    "=== Inference Options", "=== Reporting Options", "=== Device Information",
    "=== Performance summary", "[MemUsageChange] ",
)  # fmt: skip


def _sure(start: str, handle: Handler, turn: Turn | None = None) -> Wording:
    return Wording(start, handle, turn, is_sure=True)


def _nothing(_build: OpenBuild, _line: LogicalLine) -> None:
    """The message says nothing that is kept."""


def _proof(handle: Handler) -> Handler:
    """The same for a message that alone is worth a record."""

    def proven(build: OpenBuild, line: LogicalLine) -> None:
        build.touched = True
        handle(build, line)

    return proven


def _fact(
    start: str, put: facts.Setter, turn: Turn | None = None, *, sure: bool = False
) -> Wording:
    def handle(build: OpenBuild, line: LogicalLine) -> None:
        put(build.facts, line.text[len(start) :].strip())
        build.touch(start not in _PROVE_NOTHING)

    return Wording(start, handle, turn, sure)


def _polygraphy(start: str, turn: Turn | None = None) -> Wording:
    """Words of Polygraphy's own (its backend/trt/config.py and loader.py, logger/logger.py)."""
    return Wording(start, lambda b, _: b.count_style(Producer.POLYGRAPHY), turn, is_sure=True)


def _fusion(make: Callable[[str, int], Fusion | None]) -> Handler:
    def handle(build: OpenBuild, line: LogicalLine) -> None:
        fusion = make(line.text, line.number)
        if fusion is not None:
            build.add_fusion(fusion, line)

    return handle


def _registered(build: OpenBuild, line: LogicalLine) -> None:
    layer = sparsity.renamed(line.text)
    if layer is not None:
        build.add_renamed(layer)


def _region_sources(build: OpenBuild, line: LogicalLine) -> None:
    region, _, metadata = line.text[len(tactics.REGION) - 1 :].partition(tactics.METADATA)
    build.add_sources(region.strip(), metadata)


def _no_tactics(build: OpenBuild, line: LogicalLine) -> None:
    if ": No valid tactics for" in line.text:
        build.tuning.no_tactics()


def _built(build: OpenBuild, _line: LogicalLine) -> None:
    build.generated = True


def _loaded(build: OpenBuild, _line: LogicalLine) -> None:
    build.loaded = True


def _next_profile(build: OpenBuild, _line: LogicalLine) -> None:
    build.native_chosen = False


def _checked(build: OpenBuild, line: LogicalLine, *, sparse: bool) -> None:
    name = line.text.partition(": ")[2].strip()
    if build.budget.take(len(name)):
        build.checked.append(CheckedTensor(name=name, sparse=sparse))


def _replayed(build: OpenBuild, line: LogicalLine) -> None:
    """A layer of Polygraphy's tactic replay; its tactic is on the next line."""
    build.replayed = line.text[len("Layer: ") :].strip()


_REPLAY = re.compile(r"Algorithm: \(Implementation: -?\d+, Tactic: (-?\w{1,20})\)")


def _replay(build: OpenBuild, line: LogicalLine) -> None:
    match = _REPLAY.match(line.text)
    name, build.replayed = build.replayed, None
    if match is not None and name is not None:
        build.count_style(Producer.POLYGRAPHY)
        layer = EngineLayer(name=name, tactic_id=normal_id(match[1]))
        build.add_engine_layer(layer, detailed=False)


def _polygraphy_command(build: OpenBuild, line: LogicalLine) -> None:
    facts.command(build.facts, line.text.partition(": ")[2].strip())
    build.count_style(Producer.POLYGRAPHY)


def _inspected(build: OpenBuild, _line: LogicalLine) -> None:
    build.inspected = True
    build.count_style(Producer.POLYGRAPHY)


def _of_a_build(_facts: facts.Facts, _text: str) -> None:
    """Nothing is kept of it; that it stands there shows a build."""


WORDINGS: list[Wording] = [
    # autotuning
    Wording("Tactic Name: ", lambda b, x: b.tuning.named_and_timed(x)),
    Wording("Tactic: ", lambda b, x: b.tuning.timed(x)),
    _sure(tactics.RUNNER, _proof(lambda b, x: b.tuning.runner(x)), Turn.TUNES),
    _sure(tactics.COMBINATION, _proof(lambda b, _: b.tuning.combination())),
    _sure(tactics.CHOICE, _proof(lambda b, x: b.tuning.choice(x))),
    _sure(tactics.COSTS, lambda b, x: b.tuning.costs(x), Turn.TUNES),
    Wording("Skipping tactic ", lambda b, x: b.tuning.skipping(x)),
    Wording("Skipping ", _no_tactics),
    Wording("Set Tactic Name: ", lambda b, x: b.tuning.set_name(x)),
    _sure(f"{sparsity.MARK} ", _nothing, Turn.FURTHER_IN),
    _sure(f"{sparsity.FOREIGN_NODE} ", _nothing, Turn.FURTHER_IN),
    # where builds begin and end
    *(_sure(f"&&&& {word} ", _nothing, Turn.BANNER)
      for word in ("RUNNING", "PASSED", "FAILED", "WAIVED")),
    Wording("[MemUsageChange] Init CUDA", _nothing, Turn.MAY_BEGIN),
    _sure("Applying generic optimizations", _nothing, Turn.BEGINS),
    _sure("ONNX IR version", _nothing, Turn.BEGINS),
    _sure("Adding network input: ", _nothing, Turn.BEGINS),
    Wording("Original: ", _nothing, Turn.BEGINS),
    _fact("Input filename:", facts.set_text("model"), Turn.BEGINS, sure=True),
    _fact("Local timing cache in use", facts.set_cache_mode("local"), Turn.BEGINS, sure=True),
    _fact("Global timing cache in use", facts.set_cache_mode("global"), Turn.BEGINS, sure=True),
    Wording("Constructing optimization profile number 0", _nothing, Turn.BEGINS),
    _sure("Constructing optimization profile number ", _next_profile, Turn.USES),
    _fact("Engine generation completed in ", facts.set_pass_seconds, Turn.ENDS, sure=True),
    _fact("Finished engine building in ", facts.set_whole_seconds, Turn.ENDS, sure=True),
    Wording("[MemUsageChange] TensorRT-managed allocation in building engine: ", _nothing,
            Turn.ENDS),
    _sure("[MemUsageSnapshot] Builder end: ", _nothing, Turn.ENDS),
    _sure("Loaded engine size: ", _proof(_loaded), Turn.USES),
    _sure("Engine built in ", _proof(_built)),
    _sure("Engine deserialized in ", _proof(_loaded)),
    _sure("Building graph using backend strategy ", lambda b, x: b.next_pass(x.number)),
    Wording("Use backend strategy ", lambda b, x: b.compare_passes(x.number, keep_last=True)),
    Wording("Chose this engine with backend strategy ",
            lambda b, x: b.compare_passes(x.number, keep_last=True)),
    Wording("Skip backend strategy ", lambda b, x: b.compare_passes(x.number, keep_last=False)),
    # facts
    _fact("Selected Device: ", facts.set_text("gpu"), sure=True),
    _fact("Compute Capability: ", facts.set_capability),
    _fact("TensorRT version: ", facts.set_version, sure=True),
    _fact("Loaded shared library ", facts.set_resource),
    _fact("TensorRT was linked against TensorRT ", facts.set_linked, sure=True),
    _fact("Model: ", facts.set_text("model")),
    _fact("Loading model: ", facts.set_text("model")),
    _fact("Load engine: ", facts.set_engine_to_load),
    _fact("Sparsity: ", facts.set_sparsity),
    _fact("Flags   ", facts.set_flags),
    _fact("Precision: ", facts.set_text("precision")),
    _fact("BuilderOptimizationLevel: ", facts.set_level),
    _fact("Set number of tactics to ", facts.set_level_used, sure=True),
    _fact("Engine built in ", facts.set_whole_seconds),
    _fact("Setting workspace to ", facts.set_workspace, sure=True),
    _fact("Deleting timing cache: ", facts.set_cache, sure=True),
    _fact("Profiling verbosity: ", _of_a_build),
    *(_fact(start, _of_a_build, sure=True) for start in _MEMORY),
    # Polygraphy and TensorRT-RTX
    _fact("Loaded Module: tensorrt", facts.set_module, sure=True),
    _sure("Loaded Module: polygraphy", _nothing, Turn.BEGINS),
    _polygraphy("Loaded Module: "),
    _polygraphy("Configuring with profiles:"),
    _polygraphy("Building engine with configuration", Turn.BEGINS),
    _polygraphy("Finished engine building in "),
    _sure("RUNNING | Command: ", _polygraphy_command, Turn.BEGINS),
    *(_sure(start, _nothing, Turn.COMMAND_ENDS) for start in _POLYGRAPHY_ENDS),
    _sure("Found sparse tensor: ", _proof(lambda b, x: _checked(b, x, sparse=True))),
    _sure("Found non-sparse tensor: ", _proof(lambda b, x: _checked(b, x, sparse=False))),
    Wording("Layer: ", _replayed),
    _sure("Algorithm: (Implem", _replay),
    _sure("==== TensorRT Network ====", _inspected),
    _sure("==== TensorRT Engine ====", _inspected),
    Wording("In JIT build, ", lambda b, _: b.count_style(Producer.TENSORRT_RTX)),
    # layers and results
    *(Wording(start, _fusion(make)) for start, make in sparsity.BY_START),
    _sure(sparsity.REGISTERING, _registered),
    Wording(tactics.REGION, _region_sources),
    _sure("=== Profile (", lambda b, x: b.touch(b.results.title(x.text)), Turn.PROFILES),
    *(Wording(start, lambda b, x: b.touch(b.results.figure(x.text))) for start in _RESULTS),
    *(Wording(start, _nothing) for start in _SILENT),
    *(_sure(start, _nothing) for start in _SILENT_AND_SURE),
]  # fmt: skip


def by_key(wordings: Iterable[Wording]) -> dict[str, tuple[Wording, ...]]:
    """The rows by the first characters of their messages, in the order they are done."""
    table: dict[str, tuple[Wording, ...]] = {}
    for row in wordings:
        key = row.start[:KEY_LENGTH]
        table[key] = (*table.get(key, ()), row)
    return table


def sentence(wordings: Iterable[Wording]) -> re.Pattern[str]:
    """Finds the words that are TensorRT's alone, whatever stands before them."""
    starts = (re.escape(row.start) for row in wordings if row.is_sure)
    return re.compile("|".join((*starts, r"Layer\(\w+\): ", r"Name: .{1,200}?, LayerType: ")))

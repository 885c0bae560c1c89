"""The words with which TensorRT's messages begin, and what is done with each message.

The parser looks messages up in this one table; it says where builds begin and end; and whatever
stands before such words in a line is a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple

from twofour.logs import facts, sparsity, tactics
from twofour.logs.messages import LogicalLine
from twofour.logs.open_build import OpenBuild
from twofour.records.log import CheckedTensor, EngineLayer, Producer

Handler = Callable[[OpenBuild, LogicalLine], None]


class Turn(Enum):
    """What a message says about where builds begin and end in the log."""

    BEGINS = auto()
    """A builder is at work on a network: after a finished build, the next one."""
    ENDS = auto()
    """An engine is built. TensorRT 8 prints the first of these as VERBOSE, the last two as INFO."""
    USES = auto()
    """An engine is used, or a builder continues: no build begins or ends."""
    TUNES = auto()
    """A layer is tuned: after a finished engine, one of the next engine."""
    PROFILES = auto()
    """A table of layers and times follows."""
    COMMAND_ENDS = auto()
    """A Polygraphy command ends; `PASSED | Output: ...` is about one tensor's comparison."""
    BANNER = auto()
    """A line of trtexec with RUNNING, PASSED, FAILED or WAIVED."""
    FURTHER_IN = auto()
    """The words that say what the message is follow behind these."""


class Wording(NamedTuple):
    """How a message begins."""

    start: str
    handle: Handler
    """What is done with it; of several rows that begin alike, every one, in their order."""
    turn: Turn | None = None
    is_sure: bool = False
    """No other program writes these words, and no message has them further in."""


KEY_LENGTH = 7
"""Characters of a message by which its first words are looked up; no `start` has fewer."""
_RESULTS = (
    "Throughput: ",
    "throughput: ",
    "Latency: ",
    "Enqueue Time",
    "H2D Latency",
    "D2H Latency",
    "GPU Compute",
    "End-to-End Host Latency: ",
    "Total Host Walltime: ",
    "walltime: ",
    "Total GPU Compute Time: ",
    "total compute time: ",
    "Host Latency",
    "percentile: ",
    "median: ",
)
_MEMORY = (
    "Total Host Persistent Memory: ",
    "Total Device Persistent Memory: ",
    "Total Scratch Memory: ",
    "Max Scratch Memory: ",
    "Total Activation Memory: ",
    "Total Weights Memory: ",
    "Created engine with size: ",
    "[MemUsageStats] Peak memory usage ",
)
"""Nothing of the message is kept; that it was printed proves a build."""
_SILENT = (
    "Average on ",
    "Searching for ",
    "Importing ",
    "Bindings:",
    "Layers:",
    "[MemUsageChange] Init CUDA",
)
_SILENT_AND_SURE = (
    "Registering tensor",
    "Parsing node",
    "Registered plugin creator",
    "Plugin creator ",
    "Graph optimization time: ",
    "CUDA lazy loading is ",
    "Formats and tactics selection",
    "Deserialization required ",
    "Engine Layer Information:",
    "Loading tactic replay file",
    "ModelImporter.cpp:",
    "=== Model Options",
    "=== Build Options",
    "=== System Options",
    "=== Inference Options",
    "=== Reporting Options",
    "=== Device Information",
    "=== Performance summary",
    "[MemUsageChange] ",
)


# --- handlers -------------------------------------------------------------------------------------


def _nothing(_build: OpenBuild, _line: LogicalLine) -> None:
    """Nothing of the message is kept."""


def _proof(handle: Handler = _nothing) -> Handler:
    """The handler of a message that alone is worth a record."""

    def proven(build: OpenBuild, line: LogicalLine) -> None:
        build.touched = True
        handle(build, line)

    return proven


def _polygraphy(handle: Handler = _nothing) -> Handler:
    """The handler of Polygraphy's own words (its backend/trt/config.py, loader.py, logger.py)."""

    def counted(build: OpenBuild, line: LogicalLine) -> None:
        build.count_style(Producer.POLYGRAPHY)
        handle(build, line)

    return counted


def _mark(name: str, *, value: bool = True) -> Handler:
    return lambda build, _: setattr(build, name, value)


def _cache(mode: str) -> facts.Setter:
    return lambda build_facts, _: setattr(build_facts, "cache_mode", mode)


def _figure(build: OpenBuild, line: LogicalLine) -> None:
    if build.results.figure(line.text):
        build.touched = True


def _profile(build: OpenBuild, line: LogicalLine) -> None:
    if build.results.title(line.text):
        build.touched = True


def _optimization(start: str) -> Handler:
    def keep(build: OpenBuild, line: LogicalLine) -> None:
        build.add_fusion(sparsity.optimized(start, line.text, line.number), line)

    return keep


def _region_sources(build: OpenBuild, line: LogicalLine) -> None:
    region, _, metadata = line.text[len(tactics.REGION) - 1 :].partition(tactics.METADATA)
    build.add_sources(region.strip(), metadata)


def _no_tactics(build: OpenBuild, line: LogicalLine) -> None:
    if ": No valid tactics for" in line.text:
        build.tuning.no_tactics()


def _checked(*, sparse: bool) -> Handler:
    def keep(build: OpenBuild, line: LogicalLine) -> None:
        name = line.text.partition(": ")[2].strip()
        if build.budget.take(len(name)):
            build.checked.append(CheckedTensor(name=name, sparse=sparse))

    return _proof(keep)


def _replayed(build: OpenBuild, line: LogicalLine) -> None:
    """Keep the name of a layer of Polygraphy's tactic replay; its tactic is on the next line."""
    build.replayed = line.text[len("Layer: ") :].strip()


_REPLAY = re.compile(r"Algorithm: \(Implementation: -?\d+, Tactic: (-?\w{1,20})\)")


def _replay(build: OpenBuild, line: LogicalLine) -> None:
    match = _REPLAY.match(line.text)
    if match is not None and build.replayed is not None:
        layer = EngineLayer(name=build.replayed, tactic_id=tactics.normal_id(match[1]))
        build.add_engine_layer(layer, detailed=False)
    build.replayed = None


def _command(build: OpenBuild, line: LogicalLine) -> None:
    facts.command(build.facts, line.text.partition(": ")[2].strip())


# --- rows -----------------------------------------------------------------------------------------


def _sure(start: str, handle: Handler = _nothing, turn: Turn | None = None) -> Wording:
    return Wording(start, handle, turn, is_sure=True)


def _fact(
    start: str, put: facts.Setter, turn: Turn | None = None, *, proves: bool = True
) -> Wording:
    """A fact of the build; other programs print words that prove nothing too."""

    def handle(build: OpenBuild, line: LogicalLine) -> None:
        put(build.facts, line.text[len(start) :].strip())
        build.touched = build.touched or proves

    return Wording(start, handle, turn)


def _sure_fact(start: str, put: facts.Setter, turn: Turn | None = None) -> Wording:
    return _fact(start, put, turn)._replace(is_sure=True)


_OPTIMIZATION_LEVEL = facts.set_match("level", r"(?:\d+ at optimization level )?(\d)$", int)
_CAPABILITY = facts.set_match(
    "capability", r"(\d{1,2}\.\d)$", lambda text: tuple(map(int, text.split(".")))
)
_MODEL = facts.set_match("model")

WORDINGS: list[Wording] = [
    # autotuning
    Wording("Tactic Name: ", lambda b, x: b.tuning.named_and_timed(x)),
    Wording("Tactic: ", lambda b, x: b.tuning.timed(x)),
    _sure(tactics.RUNNER, _proof(lambda b, x: b.tuning.runner(x)), Turn.TUNES),
    _sure(tactics.COMBINATION, _proof(lambda b, _: b.tuning.combination())),
    _sure(tactics.CHOICE, _proof(lambda b, x: b.tuning.choice(x))),
    _sure(tactics.COSTS, lambda b, x: b.tuning.costs(x), Turn.TUNES),
    _sure(tactics.DLA_LAYER, lambda b, x: b.tuning.on_dla(x)),
    Wording(tactics.SKIPPING, lambda b, x: b.tuning.skipping(x)),
    Wording("Skipping ", _no_tactics),
    Wording(tactics.SET_NAME, lambda b, x: b.tuning.set_name(x)),
    _sure(f"{sparsity.MARK} ", turn=Turn.FURTHER_IN),
    _sure(f"{sparsity.FOREIGN_NODE} ", turn=Turn.FURTHER_IN),
    # where builds begin and end
    _sure("&&&& RUNNING ", turn=Turn.BANNER),
    _sure("&&&& PASSED ", turn=Turn.BANNER),
    _sure("&&&& FAILED ", turn=Turn.BANNER),
    _sure("&&&& WAIVED ", turn=Turn.BANNER),
    _sure("Applying generic optimizations", turn=Turn.BEGINS),
    _sure("ONNX IR version", turn=Turn.BEGINS),
    _sure("Adding network input: ", turn=Turn.BEGINS),
    Wording("Original: ", _nothing, Turn.BEGINS),
    _fact("Input filename:", _MODEL, Turn.BEGINS, proves=False)._replace(is_sure=True),
    _sure_fact("Local timing cache in use", _cache("local"), Turn.BEGINS),
    _sure_fact("Global timing cache in use", _cache("global"), Turn.BEGINS),
    Wording("Constructing optimization profile number 0", _nothing, Turn.BEGINS),
    _sure(
        "Constructing optimization profile number ",
        _mark("native_chosen", value=False),
        Turn.USES,
    ),
    _sure_fact("Engine generation completed in ", facts.set_pass_seconds, Turn.ENDS),
    _sure_fact("Finished engine building in ", facts.set_whole_seconds, Turn.ENDS),
    Wording(
        "[MemUsageChange] TensorRT-managed allocation in building engine: ", _nothing, Turn.ENDS
    ),
    _sure("[MemUsageSnapshot] Builder end: ", turn=Turn.ENDS),
    _sure("Loaded engine size: ", _proof(_mark("loaded")), Turn.USES),
    _sure("Engine built in ", _proof(_mark("generated"))),
    _sure("Engine deserialized in ", _proof(_mark("loaded"))),
    _sure("Building graph using backend strategy ", lambda b, x: b.next_pass(x.number)),
    Wording("Use backend strategy ", lambda b, x: b.compare_passes(x, keep_last=True)),
    Wording(
        "Chose this engine with backend strategy ",
        lambda b, x: b.compare_passes(x, keep_last=True),
    ),
    Wording("Skip backend strategy ", lambda b, x: b.compare_passes(x, keep_last=False)),
    # facts
    _sure_fact("Selected Device: ", facts.set_match("gpu")),
    _fact("Compute Capability: ", _CAPABILITY),
    _sure_fact("TensorRT version: ", facts.set_version),
    _fact("Loaded shared library ", facts.set_resource),
    _sure_fact("TensorRT was linked against TensorRT ", facts.set_version),
    _fact("Model: ", _MODEL, proves=False),
    _fact("Loading model: ", _MODEL, proves=False),
    _fact("Load engine: ", facts.set_match("loads_engine", "(.)", bool)),  # then none is built
    _fact("Sparsity: ", facts.set_sparsity),
    _fact("Flags   ", facts.set_flags),
    _fact("Precision: ", facts.set_match("precision"), proves=False),
    _fact("BuilderOptimizationLevel: ", _OPTIMIZATION_LEVEL),
    _sure_fact("Set number of tactics to ", _OPTIMIZATION_LEVEL),
    _fact("Engine built in ", facts.set_whole_seconds),
    _sure_fact("Setting workspace to ", facts.set_workspace),
    _sure_fact(
        "Deleting timing cache: ", facts.set_match("cache_hits", r".*?(\d{1,9}) hits?", int)
    ),
    *(_sure(start, _proof()) for start in _MEMORY),
    # Polygraphy and TensorRT-RTX
    _sure_fact(
        "Loaded Module: tensorrt",
        facts.set_match("library_version", r"\| Version: (\d+\.\d+\.\d+)"),
    ),
    _sure("Loaded Module: polygraphy", turn=Turn.BEGINS),
    _sure("Loaded Module: ", _polygraphy()),
    _sure("Configuring with profiles:", _polygraphy()),
    _sure("Building engine with configuration", _polygraphy(), Turn.BEGINS),
    _sure("Finished engine building in ", _polygraphy()),
    _sure("RUNNING | Command: ", _polygraphy(_command), Turn.BEGINS),
    _sure("PASSED | Runtime: ", turn=Turn.COMMAND_ENDS),
    _sure("PASSED | Command: ", turn=Turn.COMMAND_ENDS),
    _sure("FAILED | Runtime: ", turn=Turn.COMMAND_ENDS),
    _sure("FAILED | Command: ", turn=Turn.COMMAND_ENDS),
    _sure("Found sparse tensor: ", _checked(sparse=True)),
    _sure("Found non-sparse tensor: ", _checked(sparse=False)),
    Wording("Layer: ", _replayed),
    _sure("Algorithm: (Implem", _polygraphy(_replay)),
    _sure("==== TensorRT Network ====", _polygraphy(_mark("inspected"))),
    _sure("==== TensorRT Engine ====", _polygraphy(_mark("inspected"))),
    Wording("In JIT build, ", lambda b, _: b.count_style(Producer.TENSORRT_RTX)),
    # layers and results
    *(Wording(start, _optimization(start)) for start in sparsity.OPTIMIZATIONS),
    _sure(sparsity.REGISTERING, lambda b, x: b.add_renamed(sparsity.renamed(x.text))),
    Wording(tactics.REGION, _region_sources),
    _sure("=== Profile (", _profile, Turn.PROFILES),
    *(Wording(start, _figure) for start in _RESULTS),
    *(Wording(start, _nothing) for start in _SILENT),
    *(_sure(start) for start in _SILENT_AND_SURE),
]


def by_key(wordings: Iterable[Wording]) -> dict[str, tuple[Wording, ...]]:
    """The rows by the first characters of their messages, in the order in which they are done."""
    table: dict[str, tuple[Wording, ...]] = {}
    for row in wordings:
        key = row.start[:KEY_LENGTH]
        table[key] = (*table.get(key, ()), row)
    return table

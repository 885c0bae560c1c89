"""The words with which TensorRT's messages begin, and what is done with each message.

The parser looks messages up in this one table; it says where builds begin and end; and whatever
stands before such words in a line is a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple

from twofour.logs.facts import (
    Results,
    Setter,
    command,
    set_flags,
    set_match,
    set_pass_seconds,
    set_resource,
    set_sparsity,
    set_version,
    set_whole_seconds,
    set_workspace,
)
from twofour.logs.messages import LogicalLine
from twofour.logs.open_build import OpenBuild
from twofour.logs.sparsity import FUSING, OPTIMIZATIONS, REGISTERING, fused, optimized, renamed
from twofour.logs.tactics import (
    CACHED,
    CHOICE,
    COSTS,
    DLA_LAYER,
    RUNNER,
    SET_NAME,
    SKIPPED_BY_GPU,
    SKIPPING,
    Tuning,
    normal_id,
)
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
    "Host Latency",
    "percentile: ",
    "median: ",
)
_PROOFS = (
    "Total Host Persistent Memory: ",
    "Total Device Persistent Memory: ",
    "Total Scratch Memory: ",
    "Max Scratch Memory: ",
    "Total Activation Memory: ",
    "Total Weights Memory: ",
    "Created engine with size: ",
    "[MemUsageStats] Peak memory usage ",
    "Total Host Walltime: ",
    "walltime: ",
    "Total GPU Compute Time: ",
    "total compute time: ",
)
"""Nothing of the message is kept; that it was printed proves a build."""
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


def _cache(mode: str) -> Setter:
    return lambda build_facts, _: setattr(build_facts, "cache_mode", mode)


def _tuned(handle: Callable[[Tuning, LogicalLine], None]) -> Handler:
    """The handler of a message about a layer that is tuned."""
    return lambda build, line: handle(build.tuning, line)


def _result(handle: Callable[[Results, str], bool]) -> Handler:
    """The handler of a message of trtexec's results."""

    def keep(build: OpenBuild, line: LogicalLine) -> None:
        if handle(build.results, line.text):
            build.touched = True

    return keep


def _compare(*, keep_last: bool) -> Handler:
    return lambda build, line: build.compare_passes(line, keep_last=keep_last)


def _optimization(start: str) -> Handler:
    def keep(build: OpenBuild, line: LogicalLine) -> None:
        build.add_fusion(optimized(start, line.text, line.number), line)

    return keep


def _region_sources(build: OpenBuild, line: LogicalLine) -> None:
    # ForeignNode {ForeignNode[a...b]} metadata: [ONNX Layer: a][ONNX Layer: c]
    region, _, metadata = line.text.removeprefix("ForeignNode ").partition(" metadata: ")
    build.add_sources(region.strip(), metadata)


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
        layer = EngineLayer(name=build.replayed, tactic_id=normal_id(match[1]))
        build.add_engine_layer(layer, detailed=False)
    build.replayed = None


def _command(build: OpenBuild, line: LogicalLine) -> None:
    command(build.facts, line.text.partition(": ")[2].strip())


# --- rows -----------------------------------------------------------------------------------------


def _sure(start: str, handle: Handler = _nothing, turn: Turn | None = None) -> Wording:
    return Wording(start, handle, turn, is_sure=True)


def _fact(start: str, put: Setter, turn: Turn | None = None, *, proves: bool = True) -> Wording:
    """A fact of the build; other programs print words that prove nothing too."""

    def handle(build: OpenBuild, line: LogicalLine) -> None:
        put(build.facts, line.text[len(start) :].strip())
        build.touched = build.touched or proves

    return Wording(start, handle, turn)


def _sure_fact(start: str, put: Setter, turn: Turn | None = None) -> Wording:
    return _fact(start, put, turn)._replace(is_sure=True)


_OPTIMIZATION_LEVEL = set_match("level", r"(?:\d+ at optimization level )?(\d)$", int)
_CAPABILITY = set_match(
    "capability", r"(\d{1,2}\.\d)$", lambda text: tuple(map(int, text.split(".")))
)
_MODEL = set_match("model")

WORDINGS: list[Wording] = [
    # autotuning
    Wording("Tactic Name: ", _tuned(Tuning.named_and_timed)),
    Wording("Tactic: ", _tuned(Tuning.timed)),
    _sure(RUNNER, _proof(_tuned(Tuning.runner)), Turn.TUNES),
    _sure("*************** Autotuning format combination:", _proof(_tuned(Tuning.combination))),
    _sure(CHOICE, _proof(_tuned(Tuning.choice))),
    _sure(COSTS, _tuned(Tuning.costs), Turn.TUNES),
    _sure(DLA_LAYER, _tuned(Tuning.on_dla)),
    Wording(SET_NAME, _tuned(Tuning.set_name)),
    # where builds begin and end
    _sure("&&&& RUNNING "),
    _sure("&&&& PASSED "),
    _sure("&&&& FAILED "),
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
    _sure_fact("Engine generation completed in ", set_pass_seconds, Turn.ENDS),
    _sure_fact("Finished engine building in ", set_whole_seconds, Turn.ENDS),
    Wording(
        "[MemUsageChange] TensorRT-managed allocation in building engine: ", _nothing, Turn.ENDS
    ),
    _sure("[MemUsageSnapshot] Builder end: ", turn=Turn.ENDS),
    _sure("Loaded engine size: ", _proof(_mark("loaded")), Turn.USES),
    _sure("Engine built in ", _proof(_mark("generated"))),
    _sure("Engine deserialized in ", _proof(_mark("loaded"))),
    _sure("Building graph using backend strategy ", lambda b, x: b.next_pass(x.number)),
    Wording("Use backend strategy ", _compare(keep_last=True)),
    Wording("Chose this engine with backend strategy ", _compare(keep_last=True)),
    Wording("Skip backend strategy ", _compare(keep_last=False)),
    # facts
    _sure_fact("Selected Device: ", set_match("gpu")),
    _fact("Compute Capability: ", _CAPABILITY),
    _sure_fact("TensorRT version: ", set_version),
    _fact("Loaded shared library ", set_resource),
    _fact("Model: ", _MODEL, proves=False),
    _fact("Loading model: ", _MODEL, proves=False),
    _fact("Load engine: ", set_match("loads_engine", "(.)", bool)),  # then none is built
    _fact("Sparsity: ", set_sparsity),
    _fact("Flags   ", set_flags),
    _fact("Precision: ", set_match("precision"), proves=False),
    _fact("BuilderOptimizationLevel: ", _OPTIMIZATION_LEVEL),
    _sure_fact("Set number of tactics to ", _OPTIMIZATION_LEVEL),
    _fact("Engine built in ", set_whole_seconds),
    _sure_fact("Setting workspace to ", set_workspace),
    _sure_fact("Deleting timing cache: ", set_match("cache_hits", r".*?(\d{1,9}) hits?", int)),
    *(_sure(start, _proof()) for start in _PROOFS),
    # Polygraphy and TensorRT-RTX
    _sure_fact(
        "Loaded Module: tensorrt",
        set_match("library_version", r"\| Version: (\d+\.\d+\.\d+)"),
    ),
    _sure("Loaded Module: polygraphy", turn=Turn.BEGINS),
    _sure("Loaded Module: ", _polygraphy()),
    _sure("Configuring with profiles:", _polygraphy()),
    _sure("Building engine with configuration", _polygraphy(), Turn.BEGINS),
    _sure("Finished engine building in ", _polygraphy()),
    _sure("RUNNING | Command: ", _polygraphy(_command), Turn.BEGINS),
    # `PASSED | Output: ...` is about one tensor's comparison
    _sure("PASSED | Runtime: ", _mark("finished")),
    _sure("PASSED | Command: ", _mark("finished")),
    _sure("FAILED | Runtime: ", _mark("finished")),
    _sure("FAILED | Command: ", _mark("finished")),
    _sure("Found sparse tensor: ", _checked(sparse=True)),
    _sure("Found non-sparse tensor: ", _checked(sparse=False)),
    Wording("Layer: ", _replayed),
    _sure("Algorithm: (Implem", _polygraphy(_replay)),
    _sure("==== TensorRT Network ====", _polygraphy(_mark("inspected"))),
    _sure("==== TensorRT Engine ====", _polygraphy(_mark("inspected"))),
    Wording("In JIT build, ", lambda b, _: b.count_style(Producer.TENSORRT_RTX)),
    # layers and results
    *(Wording(start, _optimization(start)) for start in OPTIMIZATIONS),
    _sure(REGISTERING, lambda b, x: b.add_renamed(renamed(x.text))),
    Wording("ForeignNode {", _region_sources),
    _sure("=== Profile (", _result(Results.title)),
    *(Wording(start, _result(Results.figure)) for start in _RESULTS),
    *(_sure(start) for start in _SILENT_AND_SURE),
]

FURTHER_IN: list[tuple[str, Handler]] = [
    (SET_NAME, _tuned(Tuning.set_name)),
    (SKIPPING, _tuned(Tuning.skipping)),
    (SKIPPED_BY_GPU, _tuned(Tuning.skipping)),
    ("no valid tactics for", _tuned(Tuning.no_tactics)),
    ("No valid tactics for", _tuned(Tuning.no_tactics)),
    (" available tactics, ", _tuned(Tuning.pruned)),
    (CACHED, _tuned(Tuning.cached_result)),
    (
        FUSING,
        lambda build, line: build.add_fusion(fused(line.text, line.number), line),
    ),
    ("min: ", _result(Results.figure)),
    ("max: ", _result(Results.figure)),
    ("mean: ", _result(Results.figure)),
]
"""Words that stand anywhere in a message."""


def by_key(wordings: Iterable[Wording]) -> dict[str, tuple[Wording, ...]]:
    """The rows by the first characters of their messages, in the order in which they are done."""
    table: dict[str, tuple[Wording, ...]] = {}
    for row in wordings:
        key = row.start[:KEY_LENGTH]
        table[key] = (*table.get(key, ()), row)
    return table

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
from twofour.logs.kernels import normal_id
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
_PROVE_NOTHING = frozenset(
    ("Model: ", "Input filename:", "Loading model: ", "Precision: ", "Profiling verbosity: ")
)
"""Words that other programs print too: alone they prove no build."""
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
    """Nothing of the message is kept."""


def _proof(handle: Handler) -> Handler:
    """The handler of a message that alone is worth a record."""

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


def _mark(name: str, *, value: bool = True) -> Handler:
    return lambda build, _: setattr(build, name, value)


def _region_sources(build: OpenBuild, line: LogicalLine) -> None:
    region, _, metadata = line.text[len(tactics.REGION) - 1 :].partition(tactics.METADATA)
    build.add_sources(region.strip(), metadata)


def _no_tactics(build: OpenBuild, line: LogicalLine) -> None:
    if ": No valid tactics for" in line.text:
        build.tuning.no_tactics()


def _checked(build: OpenBuild, line: LogicalLine, *, sparse: bool) -> None:
    name = line.text.partition(": ")[2].strip()
    if build.budget.take(len(name)):
        build.checked.append(CheckedTensor(name=name, sparse=sparse))


def _replayed(build: OpenBuild, line: LogicalLine) -> None:
    """Keep the name of a layer of Polygraphy's tactic replay; its tactic is on the next line."""
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


def _only_proof(_facts: facts.Facts, _text: str) -> None:
    """Nothing of the message is kept; that it was printed proves a build."""


WORDINGS: list[Wording] = [
    # autotuning
    Wording("Tactic Name: ", lambda b, x: b.tuning.named_and_timed(x)),
    Wording("Tactic: ", lambda b, x: b.tuning.timed(x)),
    _sure(tactics.RUNNER, _proof(lambda b, x: b.tuning.runner(x)), Turn.TUNES),
    _sure(tactics.COMBINATION, _proof(lambda b, _: b.tuning.combination())),
    _sure(tactics.CHOICE, _proof(lambda b, x: b.tuning.choice(x))),
    _sure(tactics.COSTS, lambda b, x: b.tuning.costs(x), Turn.TUNES),
    _sure(tactics.DLA_LAYER, lambda b, x: b.tuning.on_dla(x)),
    Wording("Skipping tactic ", lambda b, x: b.tuning.skipping(x)),
    Wording("Skipping ", _no_tactics),
    Wording("Set Tactic Name: ", lambda b, x: b.tuning.set_name(x)),
    _sure(f"{sparsity.MARK} ", _nothing, Turn.FURTHER_IN),
    _sure(f"{sparsity.FOREIGN_NODE} ", _nothing, Turn.FURTHER_IN),
    # where builds begin and end
    *(_sure(f"&&&& {word} ", _nothing, Turn.BANNER)
      for word in ("RUNNING", "PASSED", "FAILED", "WAIVED")),
    Wording("[MemUsageChange] Init CUDA", _nothing),
    _sure("Applying generic optimizations", _nothing, Turn.BEGINS),
    _sure("ONNX IR version", _nothing, Turn.BEGINS),
    _sure("Adding network input: ", _nothing, Turn.BEGINS),
    Wording("Original: ", _nothing, Turn.BEGINS),
    _fact("Input filename:", facts.set_match("model"), Turn.BEGINS, sure=True),
    _fact("Local timing cache in use", lambda f, _: setattr(f, "cache_mode", "local"),
          Turn.BEGINS, sure=True),
    _fact("Global timing cache in use", lambda f, _: setattr(f, "cache_mode", "global"),
          Turn.BEGINS, sure=True),
    Wording("Constructing optimization profile number 0", _nothing, Turn.BEGINS),
    _sure("Constructing optimization profile number ", _mark("native_chosen", value=False),
          Turn.USES),
    _fact("Engine generation completed in ", facts.set_pass_seconds, Turn.ENDS, sure=True),
    _fact("Finished engine building in ", facts.set_whole_seconds, Turn.ENDS, sure=True),
    Wording("[MemUsageChange] TensorRT-managed allocation in building engine: ", _nothing,
            Turn.ENDS),
    _sure("[MemUsageSnapshot] Builder end: ", _nothing, Turn.ENDS),
    _sure("Loaded engine size: ", _proof(_mark("loaded")), Turn.USES),
    _sure("Engine built in ", _proof(_mark("generated"))),
    _sure("Engine deserialized in ", _proof(_mark("loaded"))),
    _sure("Building graph using backend strategy ", lambda b, x: b.next_pass(x.number)),
    Wording("Use backend strategy ", lambda b, x: b.compare_passes(x, keep_last=True)),
    Wording("Chose this engine with backend strategy ",
            lambda b, x: b.compare_passes(x, keep_last=True)),
    Wording("Skip backend strategy ", lambda b, x: b.compare_passes(x, keep_last=False)),
    # facts
    _fact("Selected Device: ", facts.set_match("gpu"), sure=True),
    _fact("Compute Capability: ",
          facts.set_match("capability", r"(\d{1,2}\.\d)$", lambda v: (int(v[:-2]), int(v[-1])))),
    _fact("TensorRT version: ", facts.set_version, sure=True),
    _fact("Loaded shared library ", facts.set_resource),
    _fact("TensorRT was linked against TensorRT ", facts.set_version, sure=True),
    _fact("Model: ", facts.set_match("model")),
    _fact("Loading model: ", facts.set_match("model")),
    _fact("Load engine: ", facts.set_match("loads_engine", "(.)", bool)),  # then none is built
    _fact("Sparsity: ", facts.set_sparsity),
    _fact("Flags   ", facts.set_flags),
    _fact("Precision: ", facts.set_match("precision")),
    _fact("BuilderOptimizationLevel: ", facts.set_match("level", r"(\d)$", int)),
    _fact("Set number of tactics to ",
          facts.set_match("level", r"\d+ at optimization level (\d)", int), sure=True),
    _fact("Engine built in ", facts.set_whole_seconds),
    _fact("Setting workspace to ", facts.set_workspace, sure=True),
    _fact("Deleting timing cache: ", facts.set_match("cache_hits", r".*?(\d{1,9}) hits?", int),
          sure=True),
    _fact("Profiling verbosity: ", _only_proof),
    *(_fact(start, _only_proof, sure=True) for start in _MEMORY),
    # Polygraphy and TensorRT-RTX
    _fact("Loaded Module: tensorrt",
          facts.set_match("library_version", r"\| Version: (\d+\.\d+\.\d+)"), sure=True),
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
    *(Wording(start, lambda b, x: b.add_fusion(sparsity.optimized(x.text, x.number), x))
      for start in sparsity.OPTIMIZATIONS),
    _sure(sparsity.REGISTERING, lambda b, x: b.add_renamed(sparsity.renamed(x.text))),
    Wording(tactics.REGION, _region_sources),
    _sure("=== Profile (", lambda b, x: b.touch(b.results.title(x.text)), Turn.PROFILES),
    *(Wording(start, lambda b, x: b.touch(b.results.figure(x.text))) for start in _RESULTS),
    *(Wording(start, _nothing) for start in _SILENT),
    *(_sure(start, _nothing) for start in _SILENT_AND_SURE),
]  # fmt: skip


def by_key(wordings: Iterable[Wording]) -> dict[str, tuple[Wording, ...]]:
    """The rows by the first characters of their messages, in the order in which they are done."""
    table: dict[str, tuple[Wording, ...]] = {}
    for row in wordings:
        key = row.start[:KEY_LENGTH]
        table[key] = (*table.get(key, ()), row)
    return table

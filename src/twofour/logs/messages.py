"""Which message means what: a table from the start of a message to what is done with it."""

from __future__ import annotations

import re
from collections.abc import Callable

from twofour.logs import facts
from twofour.logs import sparsity as fusions
from twofour.logs import tactics as foreign
from twofour.logs import tactics as tuning
from twofour.logs.build import OpenBuild
from twofour.logs.names import normal_id
from twofour.logs.prefix import LogicalLine
from twofour.logs.unwrap import KEY_LENGTH
from twofour.records.log import CheckedTensor, EngineLayer, Fusion, Producer

_REPLAY = re.compile(r"Algorithm: \(Implementation: -?\d+, Tactic: (-?\w{1,20})\)")
Handler = Callable[[OpenBuild, LogicalLine], None]
_EVERYDAY = frozenset(
    ("Model: ", "Input filename: ", "Loading model: ", "Precision: ", "Profiling verbosity: ")
)
"""Words that other programs print too: they make no build where there is none."""


_POLYGRAPHY_SAYS = (
    "Loaded Module: ", "Configuring with profiles:", "Building engine with configuration:",
    "Finished engine building in ",
)  # fmt: skip
"""Words of Polygraphy's own (its backend/trt/config.py and loader.py, logger/logger.py)."""


def dispatch_table() -> dict[str, tuple[tuple[str, Handler], ...]]:
    """First characters of a message -> the messages that begin so."""
    table: dict[str, tuple[tuple[str, Handler], ...]] = {}
    for start, handler in _handlers():
        key = start[:KEY_LENGTH]
        table[key] = (*table.get(key, ()), (start, handler))
    return table


def _handlers() -> list[tuple[str, Handler]]:
    found: list[tuple[str, Handler]] = [
        ("Tactic Name: ", lambda b, x: b.tuning.named_and_timed(x)),
        ("Tactic: ", lambda b, x: b.tuning.timed(x)),
        (tuning.RUNNER, _runner),
        (tuning.COMBINATION, _combination),
        (tuning.CHOICE, _choice),
        (tuning.COSTS, lambda b, x: b.tuning.costs(x)),
        ("Skipping tactic ", lambda b, x: b.tuning.skipping(x)),
        ("Skipping ", _no_tactics),
        ("Set Tactic Name: ", lambda b, x: b.tuning.set_name(x)),
        ("=== Profile (", lambda b, x: b.touch(b.results.title(x.text))),
        ("Engine built in ", _built),
        ("Building graph using backend strategy ", lambda b, x: b.next_pass(x.number)),
        ("Use backend strategy ", lambda b, x: b.compare_passes(x.number, keep_last=True)),
        ("Skip backend strategy ", lambda b, x: b.compare_passes(x.number, keep_last=False)),
        ("Engine deserialized in ", _loaded),
        ("Found sparse tensor: ", lambda b, x: _checked(b, x, sparse=True)),
        ("Found non-sparse tensor: ", lambda b, x: _checked(b, x, sparse=False)),
        ("Layer: ", _replayed),
        ("Algorithm: (Implem", _replay),
        ("RUNNING | Command: ", _polygraphy_command),
        *((start, lambda b, _: b.count_style(Producer.POLYGRAPHY)) for start in _POLYGRAPHY_SAYS),
        ("==== TensorRT Network ====", _inspected),
        ("==== TensorRT Engine ====", _inspected),
        ("In JIT build, ", lambda b, _: b.count_style(Producer.TENSORRT_RTX)),
    ]
    found += [(start, _fact(start, put)) for start, put in facts.ONE_LINERS]
    found += [(start, _fusion(make)) for start, make in fusions.BY_START]
    found.append((fusions.REGISTERING, _registered))
    found.append((foreign.REGION, _region_sources))
    results = (
        "Throughput: ", "throughput: ", "Latency: ", "Enqueue Time", "H2D Latency", "D2H Latency",
        "GPU Compute", "End-to-End Host Latency: ", "Total Host Walltime: ", "walltime: ",
        "Total GPU Compute Time: ", "total compute time: ", "Host Latency", "Host latency",
        "percentile: ", "median: ",
    )  # fmt: skip
    found += [(start, lambda b, x: b.touch(b.results.figure(x.text))) for start in results]
    silent = (
        "Layers:", "Average on ", "Searching for ", "Registering tensor", "Parsing node",
        "Importing ",
    )  # fmt: skip
    return found + [(start, lambda _b, _x: None) for start in silent]


def _registered(build: OpenBuild, line: LogicalLine) -> None:
    layer = fusions.renamed(line.text)
    if layer is not None:
        build.add_renamed(layer)


def _region_sources(build: OpenBuild, line: LogicalLine) -> None:
    region, _, metadata = line.text[len(foreign.REGION) - 1 :].partition(foreign.METADATA)
    build.add_sources(region.strip(), metadata)


def _runner(build: OpenBuild, line: LogicalLine) -> None:
    build.touched = True
    build.tuning.runner(line)


def _combination(build: OpenBuild, _line: LogicalLine) -> None:
    build.touched = True
    build.tuning.combination()


def _choice(build: OpenBuild, line: LogicalLine) -> None:
    build.touched = True
    build.tuning.choice(line)


def _no_tactics(build: OpenBuild, line: LogicalLine) -> None:
    if ": No valid tactics for" in line.text:
        build.tuning.no_tactics()


def _built(build: OpenBuild, _line: LogicalLine) -> None:
    build.generated = build.touched = True


def _loaded(build: OpenBuild, _line: LogicalLine) -> None:
    build.loaded = build.touched = True


def _checked(build: OpenBuild, line: LogicalLine, *, sparse: bool) -> None:
    name = line.text.partition(": ")[2].strip()
    build.touched = True
    if build.budget.take(len(name)):
        build.checked.append(CheckedTensor(name=name, sparse=sparse))


def _replayed(build: OpenBuild, line: LogicalLine) -> None:
    """A layer of Polygraphy's tactic replay; its tactic is on the next line."""
    build.replayed = line.text[len("Layer: ") :].strip()


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


def _fact(start: str, put: facts.Setter) -> Handler:
    def handle(build: OpenBuild, line: LogicalLine) -> None:
        put(build.facts, line.text[len(start) :].strip())
        build.touch(start not in _EVERYDAY)

    return handle


def _fusion(make: Callable[[str, int], Fusion | None]) -> Handler:
    def handle(build: OpenBuild, line: LogicalLine) -> None:
        fusion = make(line.text, line.number)
        if fusion is not None:
            build.add_fusion(fusion, line)

    return handle

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
from twofour.records.log import CheckedTensor, EngineLayer, Fusion, Producer

KEY_LENGTH = 7
_REPLAY = re.compile(r"Algorithm: \(Implementation: -?\d+, Tactic: (-?\w{1,20})\)")
Handler = Callable[[OpenBuild, str, int], bool]
"""Takes build, message and line number; False where the message is cut short."""
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
        ("Tactic Name: ", _named),
        ("Tactic: ", lambda b, m, n: b.tuning.timed(m, n)),
        (tuning.RUNNER, _runner),
        (tuning.COMBINATION, _combination),
        (tuning.CHOICE, _choice),
        (tuning.COSTS, _costs),
        ("Skipping tactic ", lambda b, m, n: b.tuning.skipping(m, n) or True),
        ("Skipping ", _no_tactics),
        ("Set Tactic Name: ", lambda b, m, n: b.tuning.set_name(m, n)),
        ("Layers:", lambda _b, _m, _n: True),
        ("=== Profile (", lambda b, m, _: _seen(b, b.results.title(m))),
        ("Engine built in ", _built),
        ("Building graph using backend strategy ", _next_pass),
        ("Use backend strategy ", _compared),
        ("Skip backend strategy ", _compared),
        ("Engine deserialized in ", _loaded),
        ("Found sparse tensor: ", lambda b, m, _: _checked(b, m, sparse=True)),
        ("Found non-sparse tensor: ", lambda b, m, _: _checked(b, m, sparse=False)),
        ("Layer: ", _replayed),
        ("Algorithm: (Implem", _replay),
        ("RUNNING | Command: ", _polygraphy_command),
        *((start, lambda b, _m, _n: _style(b, Producer.POLYGRAPHY)) for start in _POLYGRAPHY_SAYS),
        ("==== TensorRT Network ====", _inspected),
        ("==== TensorRT Engine ====", _inspected),
        ("In JIT build, ", lambda b, _m, _n: _style(b, Producer.TENSORRT_RTX)),
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
    found += [(start, lambda b, m, _: _result(b, m)) for start in results]
    silent = ("Average on ", "Searching for ", "Registering tensor", "Parsing node", "Importing ")
    return found + [(start, lambda _b, _m, _n: True) for start in silent]


def _registered(build: OpenBuild, message: str, _line: int) -> bool:
    layer = fusions.renamed(message)
    if layer is not None:
        build.add_renamed(layer)
    return True


def _region_sources(build: OpenBuild, message: str, _line: int) -> bool:
    region, _, metadata = message[len(foreign.REGION) - 1 :].partition(foreign.METADATA)
    build.add_sources(region.strip(), metadata)
    return True


def _seen(build: OpenBuild, found: bool) -> bool:  # what a reader found
    build.touched = build.touched or found
    return True


def _named(build: OpenBuild, message: str, line: int) -> bool:
    return build.tuning.named_and_timed(message, line)


def _runner(build: OpenBuild, message: str, _line: int) -> bool:
    build.touched = True
    return build.tuning.runner(message)


def _combination(build: OpenBuild, _message: str, _line: int) -> bool:
    build.touched = True
    build.tuning.combination()
    return True


def _choice(build: OpenBuild, message: str, _line: int) -> bool:
    build.touched = True
    return build.tuning.choice(message)


def _costs(build: OpenBuild, message: str, _line: int) -> bool:
    build.tuning.costs(message)
    return True


def _no_tactics(build: OpenBuild, message: str, _line: int) -> bool:
    if ": No valid tactics for" in message:
        build.tuning.no_tactics()
    return True


def _next_pass(build: OpenBuild, _message: str, line: int) -> bool:
    build.next_pass(line)
    return True


def _compared(build: OpenBuild, message: str, line: int) -> bool:
    build.compare_passes(line, keep_last=message.startswith("Use "))
    return True


def _built(build: OpenBuild, _message: str, _line: int) -> bool:
    build.generated = build.touched = True
    return True


def _loaded(build: OpenBuild, _message: str, _line: int) -> bool:
    build.loaded = build.touched = True
    return True


def _checked(build: OpenBuild, message: str, *, sparse: bool) -> bool:
    name = message.partition(": ")[2].strip()
    build.touched = True
    if build.budget.take(len(name)):
        build.checked.append(CheckedTensor(name=name, sparse=sparse))
    return True


def _replayed(build: OpenBuild, message: str, _line: int) -> bool:
    """A layer of Polygraphy's tactic replay; its tactic is on the next line."""
    build.replayed = message[len("Layer: ") :].strip()
    return True


def _replay(build: OpenBuild, message: str, _line: int) -> bool:
    match = _REPLAY.match(message)
    name, build.replayed = build.replayed, None
    if match is not None and name is not None:
        build.styles[Producer.POLYGRAPHY] += 1
        layer = EngineLayer(name=name, tactic_id=normal_id(match[1]))
        build.add_engine_layer(layer, detailed=False)
    return True


def _polygraphy_command(build: OpenBuild, message: str, _line: int) -> bool:
    facts.command(build.facts, message.partition(": ")[2].strip())
    return _style(build, Producer.POLYGRAPHY)


def _inspected(build: OpenBuild, _message: str, _line: int) -> bool:
    build.inspected = True
    return _style(build, Producer.POLYGRAPHY)


def _style(build: OpenBuild, producer: Producer) -> bool:
    build.styles[producer] += 1
    return True


def _fact(start: str, put: facts.Setter) -> Handler:
    def handle(build: OpenBuild, message: str, _line: int) -> bool:
        put(build.facts, message[len(start) :].strip())
        build.touched = build.touched or start not in _EVERYDAY
        return True

    return handle


def _fusion(make: Callable[[str, int], Fusion | None]) -> Handler:
    def handle(build: OpenBuild, message: str, line: int) -> bool:
        fusion = make(message, line)
        if fusion is not None:
            build.add_fusion(fusion, message)
        return True

    return handle


def _result(build: OpenBuild, message: str) -> bool:
    return _seen(build, build.results.figure(message))

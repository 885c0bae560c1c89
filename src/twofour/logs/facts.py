"""Facts that a build prints: version, GPU, options, memory, times, and trtexec's results."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from twofour.logs.tactics import Budget
from twofour.records.log import (
    Contradiction,
    LatencyMetric,
    LatencySummary,
    LayerProfile,
    Percentile,
    Profile,
    SparsityFlag,
)

_BANNER = re.compile(
    r"&&&& (?P<word>RUNNING|PASSED|FAILED|WAIVED) TensorRT\.?\S*(?: \[TensorRT v(?P<v>\d{3,8})\])?"
    r"(?: \[b\d+\])?(?: # (?P<command>.*))?"
)
_RESOURCE = re.compile(r"\S*nvinfer_builder_resource(?:_sm(\d{2,3}))?\.so\.(\d+\.\d+\.\d+)")
_WORKSPACE = re.compile(r"(\d{1,19}) ?enables more tactics")
_FLAGS = {
    "sparse-weights": SparsityFlag.ENABLED,
    "enable": SparsityFlag.ENABLED,
    "enabled": SparsityFlag.ENABLED,
    "disable": SparsityFlag.DISABLED,
    "disabled": SparsityFlag.DISABLED,
    "force": SparsityFlag.FORCED,
    "forced": SparsityFlag.FORCED,
}
_LOW_PRECISIONS = frozenset({"FP16", "BF16", "INT8", "FP8", "INT4", "FP4"})
"""Builder flags that allow a type beside FP32; without one a network may be strongly typed."""


@dataclass(slots=True)
class Facts:
    """The facts of a build that were read so far."""

    program_version: str | None = None
    """TensorRT's version that trtexec was compiled for."""
    library_version: str | None = None
    """Version of the library that was loaded, which is the one that builds."""
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    command: str | None = None
    model: str | None = None
    loads_engine: bool = False
    """The options name an engine to load."""
    flag: SparsityFlag | None = None
    precision: str | None = None
    level: int | None = None
    passes_s: float | None = None
    """Seconds of all passes so far: TensorRT 10 builds an engine for each backend strategy."""
    earlier_s: float = 0.0
    """Seconds of the passes before the latest."""
    whole_s: float | None = None
    """What trtexec or Polygraphy measured around the builder."""
    workspace_bytes: int | None = None
    cache_mode: str | None = None
    cache_hits: int | None = None

    @property
    def version(self) -> str | None:
        """The library's version; the program's where the log does not name the library's."""
        return self.library_version or self.program_version

    @property
    def build_s(self) -> float | None:
        """Seconds the builder took."""
        return self.whole_s if self.passes_s is None else self.passes_s

    def contradictions(self) -> tuple[Contradiction, ...]:
        """A program compiled for another version than its library."""
        program = self.program_version or self.version
        if program == self.version:
            return ()
        message = f"the program is compiled for TensorRT {program} and loads library {self.version}"
        return (Contradiction(line=None, message=message),)


Setter = Callable[[Facts, str], None]


def finite_number(text: str) -> float | None:
    """A finite decimal number, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def banner(facts: Facts, message: str) -> bool:
    """Keep version and command of trtexec's RUNNING, PASSED or FAILED line; whether it is one."""
    match = _BANNER.match(message)
    if match is None:
        return False
    if match["v"]:
        facts.program_version = _numbered_version(match["v"])
    if match["word"] == "RUNNING" and match["command"]:
        command(facts, match["command"].strip())
    return True


def command(facts: Facts, text: str) -> None:
    """Keep the command line that made the build, and its options."""
    facts.command = text
    for put in _OPTIONS:
        put(facts, text)


def _numbered_version(text: str) -> str:
    """8203 is 8.2.3 and 100300 is 10.3.0 (NvInferVersion.h of TensorRT 8 and 10)."""
    # four digits are major, minor, patch as 1 + 1 + 2; from version 10 on they are 2 + 2 + 2
    number = int(text)
    thousand = 1000 if len(text) <= 4 else 10_000
    minor = number % thousand // 100
    return f"{number // thousand}.{minor}.{number % 100}"


def set_match(name: str, pattern: str = "(.+)", convert: Callable[[str], object] = str) -> Setter:
    """Keeps the first group of the pattern, where the text begins so, as the fact `name`.

    A group that `convert` makes None of is left out.
    """
    begins = re.compile(pattern)

    def put(facts: Facts, text: str) -> None:
        match = begins.match(text)
        value = None if match is None else convert(match[1])
        if value is not None:
            setattr(facts, name, value)

    return put


def set_pass_seconds(facts: Facts, text: str) -> None:
    """Adds the seconds of one pass of the builder."""
    value = finite_number(text.split(" ", 1)[0])
    if value is not None:
        facts.passes_s = facts.earlier_s + value


set_whole_seconds = set_match("whole_s", r"(\S+)", finite_number)
set_sparsity = set_match("flag", r"(\w+)", lambda word: _FLAGS.get(word.lower()))
_OPTIONS = (
    set_match("flag", r".*?--sparsity=(\w+)", _FLAGS.get),
    set_match("flag", r".*?--(sparse-weights)", _FLAGS.get),
    set_match("level", r".*?--builderOptimizationLevel=(\d)", int),
    set_match("model", r".*?--(?:onnx|loadEngine)=(\S+)"),
    set_match("loads_engine", r"(?:.*\s)?--(loadEngine|load-engine)[= ]\S", bool),
)
"""Options of trtexec and Polygraphy."""


def set_version(facts: Facts, text: str) -> None:
    """Keeps the version of the program, or the one that it was linked against."""
    match = re.match(r"\d{1,3}(?:\.\d{1,4}){1,2}(?=[.\s]|$)", text)
    if match is not None and facts.program_version is None:
        facts.program_version = match[0]


def set_flags(facts: Facts, text: str) -> None:
    """Keeps what Polygraphy's table of builder flags allows: `| [FP16, SPARSE_WEIGHTS]`."""
    if not text.startswith("|"):
        return
    flags = text.strip("| []").split(", ")
    listed = "SPARSE_WEIGHTS" in flags
    facts.flag = SparsityFlag.ENABLED if listed else SparsityFlag.DISABLED
    low = [flag for flag in flags if flag in _LOW_PRECISIONS]
    if low and facts.precision is None:
        facts.precision = "+".join(("FP32", *low))


def set_resource(facts: Facts, text: str) -> None:
    """Keeps GPU and version from the name of the builder's kernel library."""
    # libnvinfer_builder_resource_sm90.so.10.16.2: compute capability 9.0, TensorRT 10.16.2
    match = _RESOURCE.match(text)
    if match is None:
        return
    facts.library_version = match[2]
    if match[1] and facts.capability is None:
        facts.capability = (int(match[1][:-1]), int(match[1][-1]))


def set_workspace(facts: Facts, text: str) -> None:
    """Keeps the largest workspace that would allow more tactics."""
    match = _WORKSPACE.match(text)
    if match is not None:
        facts.workspace_bytes = max(facts.workspace_bytes or 0, int(match[1]))


# --- trtexec's results ---------------------------------------------------------------------------

_FIGURE = re.compile(
    r"(min|max|mean|median|percentile\((\d{1,3}(?:\.\d{1,4})?)%\)) = (\S{1,24}) ms"
)
_METRIC = re.compile(
    r"(Latency|End-to-End Host Latency|Enqueue Time|H2D Latency|GPU Compute Time|D2H Latency)"
    r": (?=min = )"
)
_OLD_HEADINGS = ("Host Latency", "GPU Compute", "Enqueue Time", "H2D Latency", "D2H Latency")
_OLD_FIGURE = re.compile(r"(min|max|mean|median|percentile): (\S{1,24}) ms(?: at (\d{1,3}))?")
_TITLE = re.compile(r"=== Profile \((\d{1,9}) iterations ?\) ===")
_COLUMNS = {
    "time(ms)": "total_ms",
    "time (ms)": "total_ms",
    "avg.(ms)": "average_ms",
    "avg. time (ms)": "average_ms",
    "median(ms)": "median_ms",
    "median time (ms)": "median_ms",
    "time(%)": "percent",
    "time %": "percent",
}


class Results:
    """Summary and per-layer profile of one run, as trtexec prints them."""

    def __init__(self, budget: Budget) -> None:
        self.in_profile = False
        self.dropped = 0
        self._budget = budget
        self._throughput: float | None = None
        self._metrics: dict[str, LatencyMetric] = {}
        self._heading: str | None = None
        self._iterations: int | None = None
        self._rows: list[LayerProfile] | None = None
        self._columns: list[str] = []
        self._name_first = False

    # --- the summary -------------------------------------------------------------------------

    def figure(self, message: str) -> bool:
        """Keep a line of the summary; False where it is none."""
        text = message.strip()
        if not text.startswith(("Throughput: ", "throughput: ")):
            return self._metric(text) or self._old_line(text)
        queries_per_s = finite_number(text.split(" ")[1])
        if queries_per_s is not None:
            self._throughput = queries_per_s
        return True

    def _metric(self, text: str) -> bool:
        """Keep `Latency: min = 0.038 ms, max = ..., percentile(90%) = 0.04 ms, ...`."""
        match = _METRIC.match(text)
        if match is None:
            return False
        values: dict[str, float] = {}
        percentiles: list[Percentile] = []
        for name, percent, printed in _FIGURE.findall(text[:2000]):
            ms = finite_number(printed)
            if ms is not None and percent:
                percentiles.append(Percentile(percent=float(percent), ms=ms))
            elif ms is not None:
                values[f"{name}_ms"] = ms
        metric = LatencyMetric(name=match[1], percentiles=tuple(percentiles), **values)
        self._metrics[match[1]] = metric
        return True

    def _old_line(self, text: str) -> bool:
        """Keep a line of TensorRT 7, which prints a heading and then a line for each figure."""
        # GPU Compute
        # min: 2.11 ms
        # percentile: 2.12988 ms at 99%
        if text in _OLD_HEADINGS:
            self._heading = text
            return True
        match = _OLD_FIGURE.match(text)
        ms = None if match is None else finite_number(match[2])
        if match is None or ms is None or self._heading is None:
            return False
        value: dict[str, Any] = {f"{match[1]}_ms": ms}
        if match[1] == "percentile":
            value = {"percentiles": (Percentile(percent=float(match[3] or 99), ms=ms),)}
        metric = self._metrics.get(self._heading, LatencyMetric(name=self._heading))
        self._metrics[self._heading] = replace(metric, **value)
        return True

    @property
    def summary(self) -> LatencySummary | None:
        """The record; None where nothing was measured."""
        if self._throughput is None and not self._metrics:
            return None
        metrics = tuple(self._metrics.values())
        return LatencySummary(throughput_qps=self._throughput, metrics=metrics)

    # --- the profile -------------------------------------------------------------------------

    def title(self, message: str) -> bool:
        """`=== Profile (N iterations ) ===`: a table follows."""
        match = _TITLE.search(message)
        if match is None:
            return False
        self._iterations = int(match[1])
        self._rows = []
        self._columns = []
        self.in_profile = True
        return True

    def row(self, message: str) -> bool:
        """Keep the row of a layer, or pass over the total; False ends the table."""
        if not self._columns:
            return self._header(message)
        if not message.strip():
            return False
        if self._name_first:
            name, *cells = message.rsplit(None, len(self._columns))
        else:
            *cells, name = message.split(None, len(self._columns))
        figures = [finite_number(cell) for cell in cells]
        if len(figures) != len(self._columns) or None in figures:
            return False
        if name.strip() == "Total" or self._rows is None:
            return True
        if not self._budget.take(len(name)):
            self.dropped += 1
            return True
        times = dict(zip(self._columns, figures, strict=True))
        layer = LayerProfile(
            name=name.strip(),
            total_ms=times.get("total_ms"),
            average_ms=times.get("average_ms"),
            median_ms=times.get("median_ms"),
        )
        self._rows.append(layer)
        return True

    def _header(self, message: str) -> bool:
        """Read the table's header; the name stands first in it up to 8.5, and last from 8.6 on."""
        titles = re.split(r"\s{2,}", message.strip().lower())
        columns = [_COLUMNS[title] for title in titles if title in _COLUMNS]
        if "layer" not in titles or not columns or len(columns) != len(titles) - 1:
            return False
        self._columns = columns
        self._name_first = titles[0] == "layer"
        return True

    @property
    def profile(self) -> Profile | None:
        """The record; None where there was no table."""
        if self._rows is None:
            return None
        return Profile(iterations=self._iterations, layers=tuple(self._rows))

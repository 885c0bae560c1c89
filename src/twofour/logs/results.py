"""trtexec's results: the performance summary of all versions and the per-layer profile."""

from __future__ import annotations

import re

from twofour.logs.layers import Budget
from twofour.logs.names import number
from twofour.records.log import LatencyMetric, LatencySummary, LayerProfile, Percentile, Profile

_FIGURE = re.compile(
    r"(min|max|mean|median|percentile\((\d{1,3}(?:\.\d{1,4})?)%\)) = (\S{1,24}) ms"
)
_METRIC = re.compile(
    r"(Latency|End-to-End Host Latency|Enqueue Time|H2D Latency|GPU Compute Time|D2H Latency)"
    r": (?=min = )"
)
_OLD_HEADINGS = {"Host Latency": "Host Latency", "Host latency": "Host Latency"} | {
    name: name for name in ("GPU Compute", "Enqueue Time", "H2D Latency", "D2H Latency")
}
_OLD_FIGURE = re.compile(r"(min|max|mean|median|percentile): (\S{1,24}) ms(?: at (\d{1,3}))?")
_TOTALS = {
    "Total Host Walltime", "walltime", "Total GPU Compute Time", "total compute time",
}  # fmt: skip
_TITLE = re.compile(r"=== Profile \((\d{1,9}) iterations ?\) ===")
_COLUMNS = {
    "time(ms)": "total", "time (ms)": "total", "avg.(ms)": "average", "avg. time (ms)": "average",
    "median(ms)": "median", "median time (ms)": "median", "time(%)": "percent", "time %": "percent",
}  # fmt: skip


class Results:
    """Summary and profile of one run."""

    def __init__(self, budget: Budget) -> None:
        self.throughput: float | None = None
        self.metrics: dict[str, LatencyMetric] = {}
        self.iterations: int | None = None
        self.rows: list[LayerProfile] | None = None
        self.in_profile = False
        self.dropped = 0
        self._columns: list[str] = []
        self._name_first = False
        self._old: str | None = None
        self._old_figures: dict[str, float] = {}
        self._old_percentiles: list[Percentile] = []
        self._budget = budget

    # --- the summary -------------------------------------------------------------------------

    def figure(self, message: str) -> bool:
        """Any line of the summary; False where it is none."""
        text = message.strip()
        key, colon, value = text.partition(": ")
        if colon and key in {"Throughput", "throughput"}:
            found = number(value.split(" ")[0])
            self.throughput = self.throughput if found is None else found
        elif not colon or key not in _TOTALS:
            return self._metric(text) or self._old_line(text)
        return True

    def _metric(self, text: str) -> bool:
        match = _METRIC.match(text)
        if match is None:
            return False
        values: dict[str, float] = {}
        percentiles: list[Percentile] = []
        for name, percent, printed in _FIGURE.findall(text[:2000]):
            ms = number(printed)
            if ms is not None and percent:
                percentiles.append(Percentile(percent=float(percent), ms=ms))
            elif ms is not None:
                values[name] = ms
        self.metrics[match[1]] = _latency(match[1], values, percentiles)
        return True

    def _old_line(self, text: str) -> bool:
        """TensorRT 7: a heading, then a line for each figure."""
        if text in _OLD_HEADINGS:
            self._old = _OLD_HEADINGS[text]
            self._old_figures, self._old_percentiles = {}, []
            return True
        match = _OLD_FIGURE.match(text)
        ms = None if match is None or self._old is None else number(match[2])
        if match is None or ms is None or self._old is None:
            return False
        if match[1] == "percentile":
            self._old_percentiles = [Percentile(percent=float(match[3] or 99), ms=ms)]
        else:
            self._old_figures[match[1]] = ms
        self.metrics[self._old] = _latency(self._old, self._old_figures, self._old_percentiles)
        return True

    def summary(self) -> LatencySummary | None:
        """The record; None where nothing was measured."""
        if self.throughput is None and not self.metrics:
            return None
        return LatencySummary(
            throughput_qps=self.throughput,
            metrics=tuple(self.metrics.values()),
        )

    # --- the profile -------------------------------------------------------------------------

    def title(self, message: str) -> bool:
        """`=== Profile (N iterations ) ===`: a table follows."""
        match = _TITLE.search(message)
        if match is None:
            return False
        self.iterations, self.rows, self._columns = int(match[1]), [], []
        self.in_profile = True
        return True

    def header(self, message: str) -> bool:
        """The table's header, with the name first (to 8.5) or last (from 8.6 on)."""
        titles = [title.lower() for title in re.split(r"\s{2,}", message.strip())]
        if "layer" not in titles:
            return False
        columns = [_COLUMNS.get(title) for title in titles if title != "layer"]
        if not columns or None in columns:
            return False
        self._columns = [column for column in columns if column is not None]
        self._name_first = titles[0] == "layer"
        self.rows = self.rows if self.rows is not None else []
        self.in_profile = True
        return True

    def row(self, message: str) -> bool:
        """One layer, or the total; False ends the table."""
        if not self._columns:
            return self.header(message)
        count = len(self._columns)
        if not message.strip():
            return False
        if self._name_first:
            cells = message.rsplit(None, count)
            name, printed = cells[0].strip(), cells[1:]
        else:
            cells = message.split(None, count)
            name, printed = cells[-1].strip() if len(cells) > count else "", cells[:count]
        figures = [number(cell) for cell in printed]
        if len(figures) != count or None in figures or not name:
            return False
        self._keep(name, dict(zip(self._columns, figures, strict=True)))
        return True

    def _keep(self, name: str, found: dict[str, float | None]) -> None:
        if name == "Total":
            return
        if not self._budget.take(len(name)):
            self.dropped += 1
            return
        rows = self.rows if self.rows is not None else []
        rows.append(
            LayerProfile(
                name=name,
                total_ms=found.get("total"),
                average_ms=found.get("average"),
                median_ms=found.get("median"),
            )
        )

    def profile(self) -> Profile | None:
        """The record; None where there was no table."""
        if self.rows is None:
            return None
        return Profile(iterations=self.iterations, layers=tuple(self.rows))


def _latency(name: str, found: dict[str, float], percentiles: list[Percentile]) -> LatencyMetric:
    return LatencyMetric(
        name=name,
        min_ms=found.get("min"),
        max_ms=found.get("max"),
        mean_ms=found.get("mean"),
        median_ms=found.get("median"),
        percentiles=tuple(percentiles),
    )

"""The report as one HTML file that needs no network: cards, bars, plots, a table to search in.

The page trusts no name: text is escaped by the template engine, and data for the script is JSON
without a character HTML knows. See page_frame for the policy that it comes with.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from twofour.eligibility.rules import LARGE_ENOUGH
from twofour.records.build import BuildResult
from twofour.records.eligibility import EligibilityReport, Verdict
from twofour.records.export import Accuracy
from twofour.records.latency import LatencyComparison
from twofour.reports import cells, plots
from twofour.reports.comparison.page import STYLE, latency_section
from twofour.reports.confusion import confusion_table
from twofour.reports.fates import Fate, by_fate, fate_of, weights_by_fate
from twofour.reports.latency_text import latency_table
from twofour.reports.page_frame import breakable, drawn, render
from twofour.reports.summary import advice_lines, title_line, totals
from twofour.reports.text import drift_lines, plain_text
from twofour.reports.words import printable, shape_cell, tactic_ratio

_PAGE = "report.html.j2"
_ONE_LINE = 10_000
"""Columns in which no line of text is folded: the browser folds it."""
_NOT_IN_JSON = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One layer as the table shows it."""

    verdict: Verdict
    fate: Fate
    name: Markup
    op: str
    size: str
    dtype: str
    pattern: str
    surprise: str | None
    code: str
    reason: str
    also: str
    remedy: str
    times: tuple[str, str, str]


def to_html(
    report: EligibilityReport,
    *,
    accuracy: Accuracy | None = None,
    build: BuildResult | None = None,
    comparison: LatencyComparison | None = None,
) -> str:
    """A whole page with its style, script and data inside; the same report gives the same bytes.

    The table holds every layer and can be read without its script, which adds the filter, the
    sorting and the details of a layer. A comparison takes the place of the times of the build.
    """
    return render(
        _PAGE,
        styles=("report.css",) if comparison is None else ("report.css", STYLE),
        script="report.js",
        **_of_report(report),
        drift=() if accuracy is None else _lines(accuracy),
        engine=() if build is None else _engine_lines(build),
        build_times=None if build is None or comparison is not None else _build_times(build),
        latency=None if comparison is None else latency_section(comparison),
    )


def _of_report(report: EligibilityReport) -> dict[str, object]:
    """What the template knows about the report, by the names it uses."""
    verdicts = report.verdicts
    return {
        "model": cells.name_cell(report.model),
        "title": title_line(report),
        "cards": totals(report),
        "advice": advice_lines(report),
        "bars": _bars(report),
        "markers": tuple((fate, drawn(plots.marker(fate))) for fate in _present(verdicts)),
        "size_plot": drawn(plots.size_plot(verdicts)),
        "time_plot": drawn(plots.time_plot(verdicts)),
        "with_times": sum(cells.tactic_times(v) is not None for v in verdicts),
        "large_enough": LARGE_ENOUGH,
        "rows": tuple(map(_row, verdicts)),
        "fates": Counter(map(fate_of, verdicts)),
        "codes": sorted(Counter(code for v in verdicts for code in _codes(v)).items()),
        "unmatched": tuple(map(cells.name_cell, report.unmatched_engine_layers)),
        "confusion": confusion_table(report),
        "data": _script_data(verdicts),
    }


def _row(verdict: Verdict) -> _Row:
    return _Row(
        verdict=verdict,
        fate=fate_of(verdict),
        name=breakable(cells.name_cell(verdict.layer)),
        op=printable(verdict.op),
        size=shape_cell(verdict),
        dtype=printable(verdict.dtype),
        pattern=cells.pattern_word(verdict),
        surprise=cells.surprise(verdict),
        code=verdict.reasons[0].code.value,
        reason=cells.main_reason(verdict),
        also=cells.other_codes(verdict),
        remedy=printable(verdict.remedy or "-"),
        times=_times(verdict),
    )


def _times(verdict: Verdict) -> tuple[str, str, str]:
    both = cells.tactic_times(verdict)
    if both is None:
        return ("-", "-", "-")
    sparse, dense = both
    return (f"{sparse:.4g}", f"{dense:.4g}", f"{sparse / dense:.3f}")


def _bars(report: EligibilityReport) -> tuple[tuple[str, Markup | None], ...]:
    layers = [(fate, len(members)) for fate, members in by_fate(report.verdicts).items()]
    weights = weights_by_fate(report.verdicts)
    weights[Fate.UNCOVERED] = report.summary.weights_not_covered
    return (
        ("by layers", drawn(plots.fate_bar(layers, "layer"))),
        ("by weights", drawn(plots.fate_bar([*weights.items()], "weight"))),
    )


def _present(verdicts: Sequence[Verdict]) -> tuple[Fate, ...]:
    there = set(map(fate_of, verdicts))
    return tuple(fate for fate in Fate if fate in there)


def _codes(verdict: Verdict) -> tuple[str, ...]:
    return tuple(dict.fromkeys(r.code.value for r in verdict.reasons))


def _script_data(verdicts: Sequence[Verdict]) -> Markup:
    """What the script sorts and filters by and the details it shows, as JSON that is safe here."""
    text = json.dumps([_layer_data(v) for v in verdicts], separators=(",", ":"), allow_nan=False)
    # everything but ASCII is an escape already, U+2028 and lone surrogates among it
    return Markup(text.translate(_NOT_IN_JSON))  # noqa: S704 -- no character of HTML is left


def _layer_data(verdict: Verdict) -> dict[str, object]:
    fate = fate_of(verdict)
    sparse, dense = cells.tactic_times(verdict) or (None, None)
    return {
        "name": cells.name_cell(verdict.layer),
        "fate": fate.slug,
        "codes": _codes(verdict),
        "sort": {
            "layer": cells.name_cell(verdict.layer),
            "op": printable(verdict.op),
            "size": verdict.in_channels * verdict.out_channels,
            "type": printable(verdict.dtype),
            "pattern": cells.pattern_word(verdict),
            "verdict": list(Fate).index(fate),
            "why": verdict.reasons[0].code.value,
            "remedy": printable(verdict.remedy) if verdict.remedy else None,
            "sparse": sparse,
            "dense": dense,
            "ratio": tactic_ratio(sparse, dense),
        },
        "size": shape_cell(verdict),
        "verdict": verdict.verdict.value,
        "facts": cells.facts(verdict),
        "reasons": [
            (r.code.value, printable(r.message), printable(r.source or "")) for r in verdict.reasons
        ],
        "remedy": printable(verdict.remedy or ""),
    }


def _lines(accuracy: Accuracy) -> tuple[str, ...]:
    return tuple(plain_text(drift_lines(accuracy), width=_ONE_LINE).splitlines())


def _engine_lines(build: BuildResult) -> tuple[str, ...]:
    not_used = (f"not used: {s.engine.value}: {printable(s.why_not or '')}" for s in build.not_used)
    return (*not_used, *map(printable, build.notes))


def _build_times(build: BuildResult) -> str:
    table = latency_table([v.latency for v in build.variants], engine=build.engine.engine)
    return plain_text(table)

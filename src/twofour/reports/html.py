"""Reports as one page each, with nothing to load."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from twofour.eligibility import cells
from twofour.eligibility.rules import LARGE_ENOUGH
from twofour.eligibility.totals import Fate, by_fate, fate_of, weights_by_fate
from twofour.latency.naming import without_batch
from twofour.records.build import BuildResult
from twofour.records.eligibility import EligibilityReport, Verdict
from twofour.records.export import Accuracy
from twofour.records.latency import LatencyComparison, LayerContrast
from twofour.reports import plots
from twofour.reports.eligibility_document import advice_lines, confusion_table, title_line, totals
from twofour.reports.latency_document import batch_grids, batches, failures_grid, sweep_grid
from twofour.reports.latency_grids import Grid, Kind, layer_grid, settings_grid
from twofour.reports.latency_plots import ratio_plot, sample_plot, sweep_plot, waterfall
from twofour.reports.latency_words import (
    answer_lines,
    difference_lines,
    legend,
    machine_lines,
    noise_lines,
    note_lines,
)
from twofour.reports.svg import VERDICT_SLUGS
from twofour.reports.terminal import drift_lines, latency_table, plain_text
from twofour.words import printable, shape_cell, tactic_ratio

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, *, styles: tuple[str, ...], script: str | None, **known: object) -> str:
    """The template of this name with what it knows; styles and script by the names of their files.

    The template also gets `policy`, `style` and `script`.
    """
    style = Markup("").join(map(asset, styles))
    code = None if script is None else asset(script)
    page = environment().get_template(template)
    return page.render(policy=policy(style, code), style=style, script=code, **known)


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The templates of this package, escaping, strict about names that are not there."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("twofour.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def policy(style: Markup, script: Markup | None) -> str:
    """Content Security Policy: nothing is fetched, nothing runs but what is in the page."""
    allowed = f"style-src {_hash(style)}"
    if script is not None:
        allowed += f"; script-src {_hash(script)}"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def asset(name: str) -> Markup:
    """A style or script of this package, on lines of its own."""
    loader = environment().loader
    assert loader is not None
    text, _, _ = loader.get_source(environment(), name)
    return Markup(f"\n{text}")  # noqa: S704 -- a file of this package


def breakable(name: str) -> Markup:
    """The name with a place to break the line behind each dot and slash, rather than anywhere."""
    return escape(name).replace(".", Markup(".<wbr>")).replace("/", Markup("/<wbr>"))


def drawn(text: str | None) -> Markup | None:
    """A plot of this package as markup."""
    return None if text is None else Markup(text)  # noqa: S704 -- plots escape what they are given


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


STYLE = "latency.css"
_PAGE = "latency_page.html.j2"
_PAGE_STYLES = ("report.css", STYLE)
_SLUGS = {verdict.value: slug for verdict, slug in VERDICT_SLUGS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmlTable:
    """A Grid as the template sets it: class of each column, cells of each row as markup."""

    title: str
    heads: tuple[tuple[str, str], ...]
    """Class and text."""
    rows: tuple[tuple[tuple[str, Markup], ...], ...]
    """Class and content."""
    legend: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot with what it shows above it and how to read it beneath."""

    caption: str
    plot: Markup
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What belongs together: tables, then plots; closed at first where it is one of several."""

    title: str | None
    tables: tuple[HtmlTable, ...]
    figures: tuple[Figure, ...]
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySection:
    """The section "Latency" by the names that its template uses."""

    answer: str
    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    legend: str
    blocks: tuple[Block, ...]
    noise: tuple[str, ...]
    machine: tuple[str, ...]
    notes: tuple[str, ...]


def comparison_page(comparison: LatencyComparison) -> str:
    """A whole page that fetches nothing and has no script; the same record gives the same bytes."""
    return render(
        _PAGE,
        styles=_PAGE_STYLES,
        script=None,
        source=printable(comparison.source),
        latency=latency_section(comparison),
    )


def latency_section(comparison: LatencyComparison) -> LatencySection:
    """The section as the report's page and the page of its own show it."""
    answer, *lines = answer_lines(comparison)
    return LatencySection(
        answer=answer,
        lines=tuple(lines),
        warnings=difference_lines(comparison),
        legend=legend(comparison),
        blocks=tuple(b for b in _blocks(comparison) if b.tables or b.figures),
        noise=noise_lines(comparison),
        machine=machine_lines(comparison),
        notes=note_lines(comparison),
    )


def _blocks(comparison: LatencyComparison) -> Iterator[Block]:
    """The sweep, each batch (the first one open), what failed, the layers."""
    sizes = batches(comparison)
    yield _block(None, (sweep_grid(comparison),), _sweep_figure(comparison))
    for number, batch in enumerate(sizes):
        title = f"Batch {batch}" if len(sizes) > 1 else None
        figures = _batch_figures(comparison, batch)
        yield _block(title, batch_grids(comparison, batch), figures, closed=number > 0)
    yield _block(None, (settings_grid(comparison), failures_grid(comparison)), ())
    for contrast in comparison.layers:
        yield _block(None, (layer_grid(contrast),), _waterfall_figure(contrast))


def _block(
    title: str | None,
    grids: tuple[Grid, ...],
    figures: tuple[Figure | None, ...],
    *,
    closed: bool = False,
) -> Block:
    return Block(
        title=title,
        tables=tuple(_table(made) for made in grids if made.columns),
        figures=tuple(figure for figure in figures if figure is not None),
        closed=closed,
    )


def _sweep_figure(comparison: LatencyComparison) -> tuple[Figure | None]:
    note = f"Whiskers: 95 % intervals. {_shaded(comparison)}"
    return (_figure("Ratio over batch", sweep_plot(comparison), note),)


def _batch_figures(comparison: LatencyComparison, batch: int | None) -> tuple[Figure | None, ...]:
    ratio_note = (
        f"Disc: faster; diamond: slower; ring: no difference; box: undecided. {_shaded(comparison)}"
    )
    sample_note = (
        "A dot is a run, the first round on top of its strip: a slant is drift, two columns are two"
        " speeds. Box: the middle half; at the edges: runs beyond the axis."
    )
    return (
        _figure("Time over the baseline's", ratio_plot(comparison, batch), ratio_note),
        _figure("Every run of every variant", sample_plot(comparison, batch), sample_note),
    )


def _shaded(comparison: LatencyComparison) -> str:
    others = any(without_batch(n.variant) != comparison.baseline for n in comparison.noise)
    own = "; other engines have noise of their own, see below" if others else ""
    return f"Shaded: what the baseline measured twice differs by{own}."


def _waterfall_figure(contrast: LayerContrast) -> tuple[Figure | None]:
    note = "Per cent: of the difference between both sums."
    return (_figure("From the baseline's layers to the variant's", waterfall(contrast), note),)


def _figure(caption: str, plot: str | None, note: str) -> Figure | None:
    markup = drawn(plot)
    return None if markup is None else Figure(caption=caption, plot=markup, note=note)


def _table(made: Grid) -> HtmlTable:
    kinds = tuple(column.kind for column in made.columns)
    return HtmlTable(
        title=made.title,
        heads=tuple((column.kind.value, column.head) for column in made.columns),
        rows=tuple(
            tuple((kind.value, _cell(kind, text)) for kind, text in zip(kinds, row, strict=True))
            for row in made.rows
        ),
        legend=made.legend,
    )


def _cell(kind: Kind, text: str | None) -> Markup:
    if text is None:
        return Markup("-")
    if kind is Kind.VERDICT:
        slug = _SLUGS.get(text, "none")
        return Markup('<span class="badge {}">{}</span>').format(slug, text)
    first, *others = text.split("\n")
    shown = breakable(first) if kind is Kind.NAME else escape(first)
    return Markup("<br>").join((shown, *map(escape, others)))


_HTML_PAGE = "report.html.j2"
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
        _HTML_PAGE,
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
    not_used = (f"not used: {s.engine}: {printable(s.why_not or '')}" for s in build.not_used)
    return (*not_used, *map(printable, build.notes))


def _build_times(build: BuildResult) -> str:
    table = latency_table([v.latency for v in build.variants], has_sparse=build.has_sparse)
    return plain_text(table)

"""Records at a glance: a line for repr(), and an HTML table for notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import singledispatch
from html import escape

from twofour.records.eligibility import EligibilityReport
from twofour.records.latency import LatencyComparison, LatencyRatio
from twofour.records.log import BuildLog
from twofour.records.pruning import PruneResult, Validation, WeightCheck
from twofour.records.run import RunResult
from twofour.reports.eligibility_words import main_reason, name_cell
from twofour.words import count, printable, ratio_words, times

_MOST_ROWS = 200
"""A notebook keeps its tables in the file; the whole record is one attribute away."""


def line_of(record: object) -> str:
    """`Class(the main thing)`."""
    return f"{type(record).__name__}({printable(_words(record))})"


def table_of(record: object) -> str:
    """The line, and a row for each layer, weight, variant or build."""
    head, rows = _rows(record)
    if not rows:
        return f"<p>{escape(line_of(record))}</p>"
    cells = "".join(_row(row, "td") for row in rows[:_MOST_ROWS])
    left = len(rows) - _MOST_ROWS
    more = f"<p>and {left:,} more</p>" if left > 0 else ""
    return (
        f"<table><caption>{escape(line_of(record))}</caption>"
        f"<thead>{_row(head, 'th')}</thead><tbody>{cells}</tbody></table>{more}"
    )


_Table = tuple[Sequence[str], Sequence[Sequence[str]]]


@singledispatch
def _words(record: object) -> str:
    raise TypeError(f"no words for {type(record).__name__}")


@singledispatch
def _rows(record: object) -> _Table:
    raise TypeError(f"no table for {type(record).__name__}")


@_words.register
def _(record: PruneResult) -> str:
    pruned = sum(row.pruned for row in record.weights)
    return f"{record.pattern}, {pruned} of {count(len(record.weights), 'weight')} pruned"


@_rows.register
def _(record: PruneResult) -> _Table:
    return ("layer", "op", "shape", "pruned", "zeros", "why not"), [
        (
            name_cell(row.weight.layer),
            row.weight.op,
            times(row.weight.shape),
            "yes" if row.pruned else "no",
            f"{row.zeros:,}",
            ", ".join(reason.code.value for reason in row.reasons),
        )
        for row in record.weights
    ]


@_words.register
def _(record: Validation) -> str:
    broken = len(record.broken)
    state = f"{broken} broken" if broken else "none broken"
    return f"{record.pattern}, {count(len(record.checks), 'weight')}, {state}"


@_rows.register
def _(record: Validation) -> _Table:
    return ("layer", "weight", "shape", "axis", str(record.pattern), "first violation"), [
        (
            name_cell(row.layer),
            name_cell(row.weight),
            times(row.shape),
            str(row.axis),
            _holds(row),
            "" if row.first_violation is None else str(list(row.first_violation)),
        )
        for row in record.checks
    ]


def _holds(row: WeightCheck) -> str:
    if not row.violations:
        return "holds"
    broken = f"{row.violations:,} of {row.groups_checked:,} groups broken"
    return broken if row.required else f"left dense ({broken})"


@_words.register
def _(record: EligibilityReport) -> str:
    found = Counter(v.verdict.value for v in record.verdicts)
    states = ", ".join(f"{number} {name}" for name, number in found.most_common())
    evidence = Counter(v.evidence.value for v in record.verdicts if v.evidence is not None)
    behind = f"; {', '.join(evidence)}" if evidence else ""
    return f"{record.model}, {count(len(record.verdicts), 'layer')}: {states or 'none'}{behind}"


@_rows.register
def _(record: EligibilityReport) -> _Table:
    return ("layer", "op", "shape", "verdict", "evidence", "reason", "what to do"), [
        (
            name_cell(v.layer),
            v.op,
            times(v.shape),
            v.verdict.value,
            "" if v.evidence is None else v.evidence.value,
            f"{v.reasons[0].code.value}: {main_reason(v)}" if v.reasons else "",
            v.remedy or "",
        )
        for v in record.verdicts
    ]


@_words.register
def _(record: RunResult) -> str:
    engine = record.build.engine.in_words
    return f"{record.folder}, {engine}: {_words(record.prune)}; {_words(record.report)}"


@_rows.register
def _(record: RunResult) -> _Table:
    return _rows(record.report)


@_words.register
def _(record: LatencyComparison) -> str:
    medians = (f"{v.name} {_ms(v.median_ms)}" for v in record.variants)
    return f"{record.source}, {count(len(record.variants), 'variant')}: {_some(medians)}"


@_rows.register
def _(record: LatencyComparison) -> _Table:
    ratios = {ratio.variant: ratio for ratio in reversed(record.ratios)}
    rows = [
        (v.name, _ms(v.median_ms), _ms(v.p99_ms), *_ratio(ratios.get(v.name)), v.error or "")
        for v in record.variants
    ]
    return ("variant", "median", "p99", "over the baseline", "verdict", "error"), rows


@_words.register
def _(record: BuildLog) -> str:
    return f"{count(len(record.files), 'file')}, {count(len(record.builds), 'build')}"


@_rows.register
def _(record: BuildLog) -> _Table:
    return ("build", "TensorRT", "GPU", "sparsity", "eligible", "chosen"), [
        (
            str(number),
            build.tensorrt_version or "?",
            build.gpu or "?",
            build.sparsity.value,
            _number(build.eligible),
            _number(build.chosen),
        )
        for number, build in enumerate(record.builds)
    ]


def _number(names: Sequence[object] | None) -> str:
    return "?" if names is None else str(len(names))


def _ratio(found: LatencyRatio | None) -> tuple[str, str]:
    """Ratio with its interval, and the verdict."""
    if found is None:
        return "", ""
    return ratio_words(found), found.verdict.value


def _ms(value: float | None) -> str:
    return "no time" if value is None else f"{value:.4g} ms"


def _some(texts: Iterable[str]) -> str:
    listed = list(texts)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(printable(cell))}</{tag}>' for cell in cells)}</tr>"

"""Reports for the terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from twofour.eligibility.cells import (
    TRIVIAL,
    main_reason,
    name_cell,
    other_codes,
    pattern_word,
    surprise,
)
from twofour.eligibility.predict import not_covered_lines
from twofour.eligibility.rules import holds_trivially
from twofour.records.build import VariantLatency
from twofour.records.eligibility import EligibilityReport, Verdict, VerdictName
from twofour.records.export import Accuracy, OutputAgreement
from twofour.records.pruning import PrunedWeight, PruneResult, Validation, WeightCheck
from twofour.records.weights import Pattern, Reason, ReasonCode
from twofour.reports.eligibility_document import (
    Row,
    Total,
    advice_lines,
    collapse,
    title_line,
    totals,
)
from twofour.words import count, printable, shape_cell, share, times

BASELINE = "dense"
NOT_JUDGED = (
    "not judged: timed one after the other; twofour compare times them in rounds, with the noise"
)


def latency_table(variants: Sequence[VariantLatency], *, has_sparse: bool) -> RenderableType:
    """Median, p90, throughput and time over dense; notes on what to expect.

    The variants were timed one after the other, each once: that is no evidence of a difference
    (decision 0004), so the ratio is shown and never judged.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for title in ("variant", "median ms", "p90 ms", "runs per s", f"time / {BASELINE}"):
        table.add_column(title, overflow="fold", justify="left" if title == "variant" else "right")
    baseline = next((v for v in variants if v.name == BASELINE), None)
    for variant in variants:
        table.add_row(Text(printable(variant.name), overflow="fold"), *_cells(variant, baseline))
    notes = [f"{v.name} failed: {v.error}" for v in variants if v.error is not None]
    if sum(v.median_ms is not None for v in variants) > 1:
        notes.append(NOT_JUDGED)
    if not has_sparse:
        notes.append("the engine runs dense kernels for both: zeros bring no speed here")
    return Group(table, *(Text(printable(note)) for note in notes))


def _cells(variant: VariantLatency, baseline: VariantLatency | None) -> tuple[Text, ...]:
    figures = (variant.median_ms, variant.p90_ms, variant.throughput)
    return (*(Text("-" if f is None else f"{f:.4g}") for f in figures), _ratio(variant, baseline))


def _ratio(variant: VariantLatency, baseline: VariantLatency | None) -> Text:
    if baseline is None or variant is baseline or not variant.median_ms or not baseline.median_ms:
        return Text("-")
    return Text(f"{variant.median_ms / baseline.median_ms:.3f} (not judged)")


_UNMATCHED_SHOWN = 5
PLAIN_WIDTH = 120
"""Columns where the output is no terminal and so has no width."""
AS_ABOVE = "as above"
_OP_WIDTH, _SIZE_WIDTH = len("ConvTranspose"), len("1024 x 1024")
_VERDICT_WIDTH, _REMEDY_WIDTH = len("not-eligible)"), 15
_CODE_WIDTH, _NAME_AND_CODE = len("AXIS_NOT_MULTIPLE:"), 46
"""Columns, at most (of what to do at least), so that 120 hold the longest reason code."""
_GAP, _LEAST_NAME, _TEXTS = 2, 20, 54
"""Columns between two cells, of a name that can be read at least, of both texts where names are
as long as they get."""
_STYLES = {
    VerdictName.CHOSEN: "green",
    VerdictName.ELIGIBLE: "green",
    VerdictName.NOT_ELIGIBLE: "red",
    VerdictName.NOT_IN_ENGINE: "yellow",
    VerdictName.UNKNOWN: "yellow",
}


def plain_text(renderable: RenderableType, *, width: int = PLAIN_WIDTH) -> str:
    """The renderable as text without colour or trailing blanks, for pipes and files."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def eligibility_table(report: EligibilityReport) -> RenderableType:
    """A row per layer (repeated layers share one), then the summary, so that it stays in view.

    On a terminal a row that says what the one before it says is told "as above"; in a pipe or a
    file, where a line may be looked for alone, every row says all.
    """
    layers = _LayerTable(rows=collapse(report.verdicts))
    return Group(
        layers, Text(title_line(report)), _TotalsGrid(totals=totals(report)), *_texts(report)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerTable:
    """The rows, drawn for the console they come to."""

    rows: tuple[Row, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Rich's own protocol for what depends on the console."""
        yield _layers(self.rows, short=console.is_terminal, width=options.max_width)


def _layers(rows: Sequence[Row], *, short: bool, width: int) -> Table:
    """Seven columns; where they are too narrow for words, four, some cells below others."""
    table = _table("layer", "op", "C x K kernel", "pattern", "verdict", "why", "what to do")
    stacked = not _share_width(table, rows, width)
    if stacked:
        table = _table("layer, op, C x K kernel", "verdict, pattern", "why", "what to do")
        _share_stacked(table, rows, width)
    before: tuple[str, str] | None = None
    for row in rows:
        first = row.first
        explained = (_why(row), printable(first.remedy or "-"))
        repeats = short and explained == before
        why, what_to_do = (AS_ABOVE, AS_ABOVE) if repeats else explained
        before = explained
        name, op = Text(_row_name(row), overflow="fold"), Text(first.op, overflow="fold")
        size, pattern, verdict = shape_cell(first), pattern_word(first), _verdict_cell(first)
        if stacked:
            cells = [Text("\n").join((name, Text(f"{op} {size}"))), verdict.append(f"\n{pattern}")]
        else:
            cells = [name, op, Text(size), Text(pattern), verdict]
        table.add_row(*cells, Text(why), Text(what_to_do))
    return table


def validation_table(validation: Validation) -> RenderableType:
    """A row per weight that was read back, file by file, then those that could not be checked."""
    files = tuple(dict.fromkeys(check.file for check in validation.checks))
    tables: list[RenderableType] = []
    for file in files:
        if file:
            tables.append(Text(printable(file), style="bold"))
        checks = [c for c in validation.checks if c.file == file]
        tables.append(_checks_table(checks, validation.pattern))
    skipped = [
        Text.assemble("not checked: ", printable(w.layer), ": ", _sentences(w.reasons))
        for w in validation.skipped
    ]
    beside = map(Text, not_covered_lines(validation.not_covered))
    return Group(*tables, *skipped, Text(_validation_line(validation)), *beside)


def holding_words(validation: Validation) -> str:
    """In how many weights the pattern holds; those that could not break it count apart."""
    pattern, checks = validation.pattern, validation.checks
    telling = [c for c in checks if not holds_trivially(c.shape, c.axis, pattern)]
    holding = sum(not c.violations for c in telling)
    line = f"{pattern} holds in {holding} of {count(len(telling), 'weight')}"
    narrow = len(checks) - len(telling)
    return f"{line} ({narrow:,} more too narrow to break it)" if narrow else line


def _checks_table(checks: Sequence[WeightCheck], pattern: Pattern) -> Table:
    table = _table("layer", "op", "shape", "axis", "groups", "violations", "first at", "verdict")
    for check in checks:
        table.add_row(
            Text(printable(check.layer), overflow="fold"),
            Text(check.op, overflow="fold"),
            Text(times(check.shape)),
            Text(str(check.axis)),
            Text(f"{check.groups_checked:,}", justify="right"),
            Text(f"{check.violations:,}", justify="right"),
            Text("-" if check.first_violation is None else str(list(check.first_violation))),
            _check_cell(check, pattern),
        )
    _keep_whole(table, "op", "axis", "groups", "violations")
    return table


def prune_table(result: PruneResult) -> RenderableType:
    """A row per weight: pruned or not, its zeros, the magnitude that is left, and why not."""
    table = _table("layer", "op", "C x K kernel", "pruned", "zeros", "kept |w|", "notes")
    for row in result.weights:
        table.add_row(
            Text(printable(row.weight.layer), overflow="fold"),
            Text(row.weight.op, overflow="fold"),
            Text(shape_cell(row.weight)),
            Text("yes" if row.pruned else "no", style="green" if row.pruned else "yellow"),
            Text(_zeros(row), justify="right"),
            Text("-" if row.kept_magnitude is None else f"{100 * row.kept_magnitude:.1f} %"),
            Text(_sentences(row.reasons)),
        )
    _keep_whole(table, "op", "pruned", "zeros", "kept |w|")
    pruned = sum(row.pruned for row in result.weights)
    held = sum(row.held_before for row in result.weights)
    line = f"{pruned} of {count(len(result.weights), 'weight')} pruned to {result.pattern}"
    if held:
        line = f"already {result.pattern}: nothing pruned" if held == pruned else line
        line += f" ({held} held it as they came)"
    beside = map(Text, not_covered_lines(result.not_covered))
    return Group(table, Text(f"{line} by {result.method}"), *beside)


def drift_lines(accuracy: Accuracy) -> RenderableType:
    """What pruning did to the outputs, and to the user's own metrics where there are any."""
    if accuracy.no_baseline is not None:
        figures = [f"{printable(m.name)}: {m.sparse:.4g}" for m in accuracy.metrics]
        return Group(*(Text(line) for line in (printable(accuracy.no_baseline), *figures)))
    drift = [_drift_line(output, accuracy.examples) for output in accuracy.drift]
    metrics = [
        f"{printable(m.name)}: dense {m.dense:.4g}, sparse {m.sparse:.4g} "
        f"({m.sparse - m.dense:+.4g})"
        for m in accuracy.metrics
    ]
    why_not = accuracy.not_compared
    missing = [] if why_not is None else [f"outputs not compared: {printable(why_not)}"]
    how = accuracy.by_module
    missing += [] if how is None else [f"outputs of the module in float32: {printable(how)}"]
    return Group(*(Text(line) for line in drift + metrics + missing))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TotalsGrid:
    """A line for each fate; the codes on one of their own where they would be broken."""

    totals: tuple[Total, ...]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """Rich's own protocol for what depends on the console."""
        grid = Table.grid(padding=(0, _GAP, 0, 0))
        for justify in ("left", "right", "right", "left"):
            grid.add_column(justify=justify, overflow="fold")
        for t in self.totals:
            grid.add_row(t.title, t.layers, t.weights, t.codes)
        cells = [(t.title, t.layers, t.weights, *t.codes.split()) for t in self.totals]
        least = [max(map(len, column)) for column in zip(*(row[:3] for row in cells), strict=True)]
        code = max((len(word) for row in cells for word in row[3:]), default=0)
        if sum(least) + 3 * _GAP + code <= options.max_width:
            yield grid
            return
        title, layers, weights = least
        for t in self.totals:
            figures = f"{t.layers:>{layers}}  {t.weights:>{weights}}"
            yield Text(f"{t.title:<{title}}  {figures}")
            if t.codes:
                yield Padding(Text(t.codes), (0, 0, 0, _GAP))


def _texts(report: EligibilityReport) -> tuple[Text, ...]:
    return tuple(Text(line) for line in (*advice_lines(report), *_unmatched(report)))


def _unmatched(report: EligibilityReport) -> tuple[str, ...]:
    """Names of the first engine layers that lead to no layer of the model."""
    names = report.unmatched_engine_layers
    if not names:
        return ()
    more = len(names) - _UNMATCHED_SHOWN
    rest = f", and {more:,} more (--json has all)" if more > 0 else ""
    shown = ", ".join(name_cell(name) for name in names[:_UNMATCHED_SHOWN])
    return (f"engine layers not matched: {shown}{rest}",)


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _keep_whole(table: Table, *titles: str) -> None:
    """Columns of short words and figures give none of their room away while others can."""
    for column in table.columns:
        if column.header in titles:
            longest = max((len(str(cell)) for cell in column.cells), default=0)
            column.width = max(min(longest, _OP_WIDTH), len(str(column.header)))


def _share_width(table: Table, rows: Sequence[Row], width: int) -> bool:
    """Name, why and what to do share what the short columns leave; nothing is cut.

    A code is read whole, and searched for: the column of reasons has room for the longest. False
    where the width does not hold codes and short words, with names that can be read.
    """
    name, op, size, pattern, verdict, why, what_to_do = table.columns
    longest = max((len(_row_name(row)) for row in rows), default=0)
    verdicts = max((len(_verdict_cell(row.first)) for row in rows), default=0)
    op.width = min(max((len(row.first.op) for row in rows), default=0), _OP_WIDTH)
    op.width = max(op.width, len("op"))
    size.width, pattern.width = _SIZE_WIDTH, len("pattern")
    verdict.width = max(min(verdicts, _VERDICT_WIDTH), len("verdict"))
    short = op.width + size.width + pattern.width + verdict.width
    least = max(min(longest, _LEAST_NAME), len("layer"))
    code = _code_width(rows)
    left = width - short - 6 * _GAP - least - code - _REMEDY_WIDTH
    wanted = max(min(longest, _NAME_AND_CODE - max(code, _CODE_WIDTH)), least)
    name.width = least + max(min(wanted - least, left), 0)
    _spread(left - name.width + least, (name, longest), (why, code), (what_to_do, _REMEDY_WIDTH))
    return left >= 0


def _spread(
    left: int, name: tuple[Column, int], why: tuple[Column, int], what: tuple[Column, int]
) -> None:
    """Share `left` columns: of all, names have at most their part, the texts 5 to 4."""
    (named, longest), (why_cell, code), (what_cell, least) = name, why, what
    width, left = named.width or 0, max(left, 0)
    every = width + code + least + left
    named.width = max(width, min(longest, every * width // (width + _TEXTS)))
    texts = every - named.width
    why_cell.width = max(code, min(texts * 5 // 9, texts - least))
    what_cell.width = texts - why_cell.width


def _code_width(rows: Sequence[Row]) -> int:
    codes = (len(r.code.value) for row in rows for r in row.first.reasons)
    return max(codes, default=0) + len(":")


def _share_stacked(table: Table, rows: Sequence[Row], width: int) -> None:
    """The same for four columns: the name has at least the room of its op."""
    name, verdict, why, what_to_do = table.columns
    longest = max((len(_row_name(row)) for row in rows), default=0)
    verdict.width, code = _VERDICT_WIDTH, _code_width(rows)
    left = width - _VERDICT_WIDTH - _OP_WIDTH - code - _REMEDY_WIDTH - 3 * _GAP
    more = max(min(longest - _OP_WIDTH, _LEAST_NAME - _OP_WIDTH, left), 0)
    name.width = _OP_WIDTH + more
    _spread(left - more, (name, longest), (why, code), (what_to_do, _REMEDY_WIDTH))


def _row_name(row: Row) -> str:
    repeated = len(row.members)
    name = name_cell(row.name)
    return f"{name}  x{repeated}" if repeated > 1 else name


def _verdict_cell(verdict: Verdict) -> Text:
    cell = Text(verdict.verdict.value, style=_STYLES[verdict.verdict])
    if (said := surprise(verdict)) is not None:
        cell.append(f" ({said})")
    return cell


def _why(row: Row) -> str:
    main = row.first.reasons[0]
    text = main_reason(row.first)
    if main.code is not ReasonCode.QUALIFIES:
        text = f"{main.code.value}: {text}"
        text += "" if row.same_reasons else " (figures of the first)"
    return "; ".join(part for part in (text, other_codes(row.first)) if part)


def _check_cell(check: WeightCheck, pattern: Pattern) -> Text:
    if not check.violations:
        trivial = holds_trivially(check.shape, check.axis, pattern)
        return Text(TRIVIAL if trivial else "holds", style="green")
    word = "broken" if check.required else "dense"
    if check.holds_along is not None:
        word += f", holds along axis {check.holds_along}"
    return Text(word, style="red" if check.required else "yellow")


def _validation_line(validation: Validation) -> str:
    line, broken = holding_words(validation), len(validation.broken)
    if broken:
        return f"{line}; broken in {count(broken, 'weight')} that had to be {validation.pattern}"
    required = sum(c.required for c in validation.checks)
    return f"{line}; required: {required}, all hold" if required else f"{line}; none is required to"


def _zeros(row: PrunedWeight) -> str:
    total = 1
    for length in row.weight.shape:
        total *= length
    return share(row.zeros, total)


def _sentences(reasons: tuple[Reason, ...]) -> str:
    return "; ".join(f"{r.code.value}: {printable(r.message)}" for r in reasons) or "-"


def _drift_line(output: OutputAgreement, examples: int) -> str:
    line = f"output {printable(output.output)} [{times(output.shape)}]: "
    if output.equal is not None:
        line += f"{output.equal:.2%} of the values are the same, dense and sparse"
    elif math.isnan(output.cosine):
        line += "no finite value to compare"
    else:
        line += (
            f"dense to sparse cosine {output.cosine:.6f}, by row mean "
            f"{output.row_cosine_mean:.6f}, lowest {output.row_cosine_min:.6f}, "
            f"largest difference {output.max_abs_error:.4g}"
        )
    if output.not_finite:
        line += f"; {count(output.not_finite, 'value')} NaN or infinite and left out"
    return f"{line} ({count(examples, 'example')})"

"""Tables of a latency comparison: variants, settings, layers, outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import floor, isnan, log10
from typing import TypeVar

from twofour.latency.naming import parse_variant_name, without_batch
from twofour.records.export import OutputAgreement
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LayerContrast,
    LayerContrastRow,
    VariantSettings,
)
from twofour.words import count, figure, per_cent, printable, ratio_word

_T = TypeVar("_T")


class Kind(str, Enum):
    """How the cells of a column may be set."""

    NAME = "name"
    """From outside, of any length: folded anywhere."""
    FIGURE = "figure"
    """To the right, never broken within a line of the cell."""
    VERDICT = "verdict"
    """One of a few words."""
    TEXT = "text"
    """Sentences: folded at blanks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A head and a cell for each row; None is shown as "-". Cells may hold several lines."""

    head: str
    kind: Kind
    cells: tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One table; its cells are plain text, already without control characters but newlines."""

    title: str
    columns: tuple[Column, ...]
    legend: str | None = None

    @property
    def rows(self) -> tuple[tuple[str | None, ...], ...]:
        """The cells row by row."""
        return tuple(zip(*(column.cells for column in self.columns), strict=True))


def column(head: str, kind: Kind, items: Sequence[_T], cell: Callable[[_T], str | None]) -> Column:
    """A column with a cell for each item."""
    return Column(head=head, kind=kind, cells=tuple(map(cell, items)))


def grid(title: str, columns: Sequence[Column], *, legend: str | None = None) -> Grid:
    """A table of the columns that have a value somewhere."""
    kept = tuple(c for c in columns if any(cell is not None for cell in c.cells))
    return Grid(title=title, columns=kept, legend=legend)


def output_columns(rows: Sequence[ComparedVariant]) -> tuple[Column, ...]:
    """Largest error, lowest cosine, shares of equal values and of rows with one top class."""
    return (
        column("max error", Kind.FIGURE, rows, lambda v: _largest_error(v.agreement)),
        column("cosine", Kind.FIGURE, rows, lambda v: _lowest_cosine(v.agreement)),
        column("equal", Kind.FIGURE, rows, lambda v: _lowest_share(v.agreement)),
        column("top-1", Kind.FIGURE, rows, lambda v: _share(v.top1_agreement)),
    )


def metric_columns(
    rows: Sequence[ComparedVariant], baseline: ComparedVariant | None
) -> tuple[Column, ...]:
    """Each metric, and by how much it is below the baseline's."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return tuple(made for name in names for made in _metric(name, rows, baseline))


def _metric(
    name: str, rows: Sequence[ComparedVariant], baseline: ComparedVariant | None
) -> tuple[Column, Column]:
    whole = None if baseline is None else baseline.metrics.get(name)

    def value(row: ComparedVariant) -> str | None:
        found = row.metrics.get(name)
        return None if found is None else f"{found:.4g}"

    def drop(row: ComparedVariant) -> str | None:
        found = row.metrics.get(name)
        if found is None or whole is None or row is baseline:
            return None
        return f"{whole - found:.4g}"

    said = printable(name)
    return (
        column(said, Kind.FIGURE, rows, value),
        column(f"drop of {said}", Kind.FIGURE, rows, drop),
    )


def _largest_error(outputs: Sequence[OutputAgreement]) -> str | None:
    """The largest error; behind it what is wrong with it: a bound it exceeds, values not finite."""
    if not outputs:
        return None
    worst = max(outputs, key=lambda o: o.max_abs_error)
    said = [f"{worst.max_abs_error:.3g}"]
    said += [f"bound {o.bound:.3g}" for o in outputs if not o.within and o.bound is not None][:1]
    not_finite = sum(o.not_finite for o in outputs)
    said += [f"{not_finite:,} NaN/inf"] if not_finite else []
    return "\n".join(said)


def _lowest_cosine(outputs: Sequence[OutputAgreement]) -> str | None:
    known = [o.cosine for o in outputs if not isnan(o.cosine)]
    return f"{min(known):.6f}" if known else None


def _lowest_share(outputs: Sequence[OutputAgreement]) -> str | None:
    """Of equal values, over the outputs of whole numbers and texts."""
    return _share(min((o.equal for o in outputs if o.equal is not None), default=None))


def _share(part: float | None) -> str | None:
    return None if part is None else per_cent(part)


TITLE = "Settings that differ"
_Cell = Callable[[VariantSettings], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Variants whose settings read alike."""

    names: tuple[str, ...]
    settings: VariantSettings


def settings_grid(comparison: LatencyComparison) -> Grid:
    """A row per kind of settings, a column per setting that is not the same in all.

    Engine, mode and weights stand in the names, versions in the lines on the machine; options that
    all variants of an engine share are left out. What one sample spans is the legend.
    """
    variants = _opened(comparison.variants)
    shared = _shared_options([settings for _, settings in variants])
    columns: tuple[tuple[str, Kind, _Cell], ...] = (
        ("device", Kind.TEXT, lambda s: s.device),
        ("precision", Kind.TEXT, lambda s: s.precision),
        ("sparse kernels", Kind.TEXT, _kernels),
        ("threads", Kind.FIGURE, lambda s: None if s.threads is None else str(s.threads)),
        ("options", Kind.TEXT, lambda s: _own_options(s, shared)),
    )
    rows = _alike(variants, [of for _, _, of in columns])
    made = [c for head, kind, of in columns if (c := _column(head, kind, rows, of)) is not None]
    names = column("variant", Kind.NAME, rows, lambda row: "\n".join(map(printable, row.names)))
    spans = _spans([settings for _, settings in variants])
    if spans is not None and not made:  # the legend needs a table to stand under
        made = [column("device", Kind.TEXT, rows, lambda row: printable(row.settings.device))]
    return grid(TITLE, (names, *made) if made else (), legend=spans)


def _opened(variants: Sequence[ComparedVariant]) -> tuple[tuple[str, VariantSettings], ...]:
    """Each variant once, whatever its batches; the baseline's twin has its settings."""
    found: dict[str, VariantSettings] = {}
    for variant in variants:
        if variant.settings is not None and not parse_variant_name(variant.name).again:
            found.setdefault(without_batch(variant.name), variant.settings)
    return tuple(found.items())


def _alike(
    variants: Sequence[tuple[str, VariantSettings]], cells: Sequence[_Cell]
) -> tuple[_Row, ...]:
    rows: dict[tuple[str | None, ...], list[tuple[str, VariantSettings]]] = {}
    for name, settings in variants:
        key = (settings.engine, *(of(settings) for of in cells))
        rows.setdefault(key, []).append((name, settings))
    return tuple(
        _Row(names=tuple(name for name, _ in same), settings=same[0][1]) for same in rows.values()
    )


def _column(head: str, kind: Kind, rows: Sequence[_Row], of: _Cell) -> Column | None:
    values = [of(row.settings) for row in rows]
    if len(set(values)) < 2:
        return None
    return column(head, kind, values, lambda value: None if value is None else printable(value))


def _shared_options(settings: Sequence[VariantSettings]) -> dict[str, frozenset[str]]:
    """Engine -> the options that all of its variants have; () where there is only one mode."""
    shared: dict[str, frozenset[str]] = {}
    for one in settings:
        shared[one.engine] = shared.get(one.engine, frozenset(one.options)) & set(one.options)
    return shared


def _own_options(settings: VariantSettings, shared: dict[str, frozenset[str]]) -> str | None:
    own = (option for option in settings.options if option not in shared[settings.engine])
    return ", ".join(own) or None


def _spans(settings: Sequence[VariantSettings]) -> str | None:
    """What one sample is, engine by engine, where that is not the same for all."""
    spans = dict.fromkeys((s.engine, s.timing) for s in settings)
    if len({timing for _, timing in spans}) < 2:
        return None
    return "one sample is " + "; ".join(_span_words(spans))


def _span_words(spans: dict[tuple[str, str], None]) -> Iterator[str]:
    for engine, timing in spans:
        yield printable(f"in {engine} {timing}")


def _kernels(settings: VariantSettings) -> str | None:
    words = {True: "allowed", False: "not allowed", None: None}
    return words[settings.sparse_kernels]


SHOWN = 15
"""Layers with a row of their own; the others are summed up in the last row."""


def layer_grid(contrast: LayerContrast) -> Grid:
    """The layers with the largest differences, the others in one row, the sums in the title."""
    rows, places = shown(contrast, SHOWN), decimal_places(contrast)

    def ms(value: float | None) -> str | None:
        return None if value is None else f"{value:,.{places}f}"

    return grid(
        _title(contrast),
        (
            column("layer", Kind.NAME, rows, layer_name),
            column("variant ms", Kind.FIGURE, rows, lambda r: ms(r.variant_ms)),
            column("baseline ms", Kind.FIGURE, rows, lambda r: ms(r.baseline_ms)),
            column("ratio", Kind.FIGURE, rows, _ratio),
            column("difference ms", Kind.FIGURE, rows, lambda r: signed(r.difference_ms, places)),
            column("share", Kind.FIGURE, rows, _layer_grid_share),
        ),
        legend=f"{share_words(contrast)}; profiling makes layers slower",
    )


def share_words(contrast: LayerContrast) -> str:
    """What a share is of, or why there is none."""
    if all(row.share is None for row in contrast.rows):
        return "no share: no difference end to end, or sums that differ by less than 2 %"
    return "share: of the difference between both sums"


def shown(contrast: LayerContrast, most: int) -> tuple[LayerContrastRow, ...]:
    """The first `most` layers, and a row that sums up the others where there are several."""
    if len(contrast.rows) <= most + 1:
        return contrast.rows
    return (*contrast.rows[:most], _rest(contrast.rows[most:]))


def layer_name(row: LayerContrastRow) -> str:
    """The layer's name in the variant's engine and, where it has another there, the baseline's."""
    name, other = printable(row.layer), printable(row.baseline_layer)
    if row.variant_ms is None:
        return f"{other}\nonly in the baseline"
    if row.baseline_ms is None:
        return f"{name}\nnot in the baseline"
    if name != other:
        return f"{name}\nbaseline: {other}"
    return name if row.owner is None else f"{name}\nfor {printable(row.owner)}"


def decimal_places(contrast: LayerContrast) -> int:
    """Of all milliseconds of a contrast alike: the larger sum has five significant digits."""
    largest = max(contrast.variant_ms, contrast.baseline_ms)
    return min(7, max(1, 4 - floor(log10(largest)))) if largest > 0 else 1


def signed(difference_ms: float, places: int) -> str:
    """A difference with its sign; 0 has none."""
    text = f"{difference_ms:+,.{places}f}"
    return text if float(text.replace(",", "")) else text[1:]


def _title(contrast: LayerContrast) -> str:
    sums = f"{figure(contrast.variant_ms)} ms instead of {figure(contrast.baseline_ms)} ms"
    difference = signed(contrast.variant_ms - contrast.baseline_ms, decimal_places(contrast))
    both = f"{printable(contrast.variant)} over {printable(contrast.baseline)}"
    return f"Layers of {both}: {sums} in sum ({difference} ms)"


def _ratio(row: LayerContrastRow) -> str | None:
    return None if row.ratio is None else ratio_word(row.ratio)


def _layer_grid_share(row: LayerContrastRow) -> str | None:
    return None if row.share is None else per_cent(row.share)


def _rest(rows: Sequence[LayerContrastRow]) -> LayerContrastRow:
    name = f"{count(len(rows), 'more layer')}"
    variant_ms = sum(r.variant_ms or 0.0 for r in rows)
    baseline_ms = sum(r.baseline_ms or 0.0 for r in rows)
    shares = [r.share for r in rows if r.share is not None]
    return LayerContrastRow(
        layer=name,
        baseline_layer=name,
        variant_ms=variant_ms,
        baseline_ms=baseline_ms,
        ratio=variant_ms / baseline_ms if baseline_ms else None,
        difference_ms=sum(r.difference_ms for r in rows),
        share=sum(shares) if shares else None,
    )

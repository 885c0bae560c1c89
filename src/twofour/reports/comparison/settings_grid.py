"""The table of settings: in what the variants differ, without what is the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from twofour.records.latency import ComparedVariant, LatencyComparison, VariantSettings
from twofour.reports.comparison.columns import Column, Grid, Kind, column, grid
from twofour.reports.comparison.naming import parse_variant_name, without_batch
from twofour.reports.words import printable

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

"""The table of settings: what differs."""

from __future__ import annotations

from dataclasses import replace

from support.comparison_cases import files, run_folder

from twofour.records.latency import LatencyComparison
from twofour.reports.latency_document import settings_table


def changed(comparison: LatencyComparison, **of: dict[str, object]) -> LatencyComparison:
    """The comparison with other settings for the variants of one engine and mode."""
    variants = tuple(
        replace(v, settings=replace(v.settings, **of[v.settings.engine]))  # type: ignore[arg-type]
        if v.settings is not None and v.settings.engine in of
        else v
        for v in comparison.variants
    )
    return replace(comparison, variants=variants)


def test_each_variant_has_a_row_and_equal_columns_are_left_out() -> None:
    comparison = changed(
        run_folder(),
        torch={"precision": "float32", "timing": "one call"},
        onnxruntime={"precision": "int8", "timing": "one call"},
        tensorrt={"precision": "float16", "timing": "one enqueue"},
    )
    made = settings_table(comparison)
    heads = [c.head for c in made.columns]
    assert heads[:2] == ["variant", "precision"]
    assert "threads" not in heads
    names = [row[0] for row in made.rows]
    assert len(names) == len(set(names))
    assert not any("again" in (name or "") for name in names)
    precisions = {row[0]: row[1] for row in made.rows}
    assert precisions["dense@torch:compile"] == "float32"
    (spans,) = (c.cells for c in made.columns if c.head == "one sample is")
    assert set(spans) == {"one enqueue", "one call"}


def test_where_nothing_differs_there_is_no_table() -> None:
    assert settings_table(files()).columns == ()

"""The table of settings: what differs, once for those that are alike."""

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


def test_variants_with_the_same_settings_share_a_row_and_equal_columns_are_left_out() -> None:
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
    assert made.legend == (
        "one sample is in tensorrt one enqueue; in onnxruntime one call; in torch one call"
    )


def test_options_that_all_of_an_engine_share_are_left_out() -> None:
    comparison = changed(run_folder(), onnxruntime={"options": ("spin=0",)})
    assert "options" not in [c.head for c in settings_table(comparison).columns]
    index, one = next(
        (i, v)
        for i, v in enumerate(comparison.variants)
        if v.settings is not None and v.settings.engine == "onnxruntime"
    )
    assert one.settings is not None
    own = replace(one, settings=replace(one.settings, options=("spin=0", "layout=nhwc")))
    variants = (*comparison.variants[:index], own, *comparison.variants[index + 1 :])
    made = settings_table(replace(comparison, variants=variants))
    (options,) = (c for c in made.columns if c.head == "options")
    assert "layout=nhwc" in options.cells
    assert not any("spin" in (cell or "") for cell in options.cells)


def test_where_nothing_differs_there_is_no_table() -> None:
    assert settings_table(files()).columns == ()


def test_where_only_the_timing_differs_the_legend_has_a_table_to_stand_under() -> None:
    made = settings_table(changed(run_folder(), tensorrt={"timing": "one enqueue"}))
    assert [c.head for c in made.columns] == ["variant", "device"]
    assert made.legend is not None
    assert made.legend.startswith("one sample is in tensorrt one enqueue; in onnxruntime one run")

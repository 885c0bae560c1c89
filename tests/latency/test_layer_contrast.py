from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.join_cases import chain
from support.sampled_variants import around, variant

from twofour.latency.ratios import contrast, contrasts, ratios_and_noise
from twofour.records.latency import LatencyVerdict, LayerContrast

PARTS = ("conv1", "relu1", "conv2", "fc", "add")
LAYERS = st.dictionaries(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=3, unique=True).map(" + ".join),
    st.floats(0, 100),
    max_size=6,
)


def rows_of(ours: Mapping[str, float], theirs: Mapping[str, float]) -> LayerContrast:
    """Of a model that has every node that the names speak of."""
    parts = {part for name in (*ours, *theirs) for part in re.split(r" \+ | \|\| ", name)}
    return contrast(
        variant("sparse@tensorrt:gpu", layers=ours),
        variant("dense@tensorrt:gpu", layers=theirs),
        chain(*((part, "Relu") for part in sorted(parts))),
    )


def names(found: LayerContrast) -> set[tuple[str, str]]:
    return {(row.layer, row.baseline_layer) for row in found.rows}


def test_layers_of_one_name_are_one_row_the_largest_difference_first() -> None:
    found = rows_of({"a": 1.0, "b": 2.0, "c": 5.0}, {"a": 1.5, "b": 6.0, "c": 4.0})
    assert [(r.layer, r.difference_ms, r.ratio) for r in found.rows] == [
        ("b", -4.0, 2 / 6),
        ("c", 1.0, 1.25),
        ("a", -0.5, 1 / 1.5),
    ]
    assert (found.variant_ms, found.baseline_ms) == (8.0, 11.5)
    assert (found.variant, found.baseline) == ("sparse@tensorrt:gpu", "dense@tensorrt:gpu")


def test_a_layer_without_partner_is_a_row_of_its_own() -> None:
    found = rows_of({"a": 1.0, "new": 0.5}, {"a": 1.0, "gone": 0.25})
    assert [(r.layer, r.baseline_layer, r.variant_ms, r.baseline_ms) for r in found.rows] == [
        ("new", "", 0.5, None),
        ("", "gone", None, 0.25),
        ("a", "a", 1.0, 1.0),
    ]
    assert [row.ratio for row in found.rows] == [None, None, 1.0]
    assert [row.difference_ms for row in found.rows] == [0.5, -0.25, 0.0]


def test_the_graph_says_what_lies_inside_a_region_and_without_it_names_decide() -> None:
    nodes = chain(("a", "MatMul"), ("b", "Relu"), ("c", "Add"), ("d", "MatMul"))
    region = "{ForeignNode[a...c]}"
    one = variant("sparse@e:m", layers={region: 3.0, "d": 1.0})
    other = variant("dense@e:m", layers={"a": 1.0, "b": 2.0, "c": 1.0, "d": 1.0})
    assert names(contrast(one, other, nodes)) == {(region, "a + b + c"), ("d", "d")}
    assert names(contrast(one, other)) == {
        *((region, ""), ("", "a"), ("", "b"), ("", "c"), ("d", "d")),
    }


def test_layers_that_share_a_name_in_one_engine_are_summed() -> None:
    one = variant("sparse@e:m", layers={"a": 1.0})
    other = variant("dense@e:m", layers={"a": 1.5})
    doubled = contrast(one, replace(other, layers=other.layers * 2))
    assert [(r.variant_ms, r.baseline_ms) for r in doubled.rows] == [(1.0, 3.0)]
    assert doubled.baseline_ms == 3.0


@given(LAYERS, LAYERS)
def test_rows_add_up_and_hold_every_layer_once(
    ours: dict[str, float], theirs: dict[str, float]
) -> None:
    found = rows_of(ours, theirs)
    assert found.variant_ms == pytest.approx(fsum(ours.values()))
    assert fsum(r.variant_ms or 0 for r in found.rows) == pytest.approx(found.variant_ms)
    assert fsum(r.baseline_ms or 0 for r in found.rows) == pytest.approx(found.baseline_ms)
    whole = found.variant_ms - found.baseline_ms
    assert fsum(r.difference_ms for r in found.rows) == pytest.approx(whole, abs=1e-9)
    for side, layers in ((0, ours), (1, theirs)):
        shown = " + ".join(sorted(pair[side] for pair in names(found) if pair[side]))
        assert sorted(shown.split(" + ")) == sorted(" + ".join(layers).split(" + "))


def test_every_ratio_whose_sides_have_profiles_gets_a_contrast() -> None:
    variants = [
        variant("dense@e:m", around(2), layers={"a": 2.0}),
        variant("sparse@e:m", around(1), layers={"a": 1.0}),
        variant("dense@torch:eager", around(3)),
        variant("dense@other:m", around(3), layers={"aten::mm": 3.0}),
    ]
    ratios, _ = ratios_and_noise(variants, "dense@e:m", 0)
    (found,) = contrasts(variants, ratios)
    assert (found.variant, found.baseline) == ("sparse@e:m", "dense@e:m")


def test_where_the_verdict_is_undecided_no_times_of_layers_are_claimed() -> None:
    few = [
        variant("dense@e:m", (2.0, 2.0), layers={"a": 2.0}),
        variant("sparse@e:m", (1.0, 1.0), layers={"a": 1.0}),
    ]
    ratios, _ = ratios_and_noise(few, "dense@e:m", 0)
    assert [ratio.verdict for ratio in ratios] == [LatencyVerdict.UNDECIDED]
    assert contrasts(few, ratios) == ()


def test_a_sweep_has_one_contrast_of_its_last_batch() -> None:
    variants = [
        variant(f"{label}@e:m:b{batch}", around(1), batch=batch, layers={"a": ms})
        for batch in (1, 8)
        for label, ms in (("dense", 2.0), ("sparse", 1.0))
    ]
    ratios, _ = ratios_and_noise(variants, "dense@e:m", 0)
    (found,) = contrasts(variants, ratios)
    assert (found.variant, found.baseline) == ("sparse@e:m:b8", "dense@e:m:b8")

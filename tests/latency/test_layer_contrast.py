from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.join_cases import chain
from support.sampled_variants import around, variant

from twofour.latency.layers import (
    PartsOf,
    contrast,
    contrasts,
    owners_by_graph,
    parts_by_graph,
    parts_by_name,
)
from twofour.latency.ratios import ratios_and_noise
from twofour.records.export import GraphNode
from twofour.records.latency import LatencyRatio, LatencyVerdict, LayerContrast, LayerContrastRow
from twofour.reports.latency_layers import layer_name

PARTS = ("conv1", "relu1", "conv2", "fc", "add")
LAYERS = st.dictionaries(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=3, unique=True).map(" + ".join),
    st.floats(0, 100),
    max_size=6,
)


def rows_of(
    ours: Mapping[str, float], theirs: Mapping[str, float], parts_of: PartsOf = parts_by_name
) -> LayerContrast:
    return contrast(
        variant("sparse@tensorrt:gpu", layers=ours),
        variant("dense@tensorrt:gpu", layers=theirs),
        parts_of,
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
    assert [row.share for row in found.rows] == pytest.approx([4 / 3.5, -1 / 3.5, 0.5 / 3.5])
    assert (found.variant, found.baseline) == ("sparse@tensorrt:gpu", "dense@tensorrt:gpu")


def test_one_fused_layer_is_one_row_with_the_three_that_do_its_work() -> None:
    found = rows_of(
        {"/conv1/Conv + /relu1/Relu + /add/Add": 3.0},
        {"/conv1/Conv": 2.0, "/relu1/Relu": 1.0, "/add/Add": 1.0},
    )
    assert found.rows == (
        LayerContrastRow(
            layer="/conv1/Conv + /relu1/Relu + /add/Add",
            baseline_layer="/conv1/Conv + /relu1/Relu + /add/Add",
            variant_ms=3.0,
            baseline_ms=4.0,
            ratio=0.75,
            difference_ms=-1.0,
            share=1.0,
        ),
    )


def test_fusions_that_overlap_on_both_sides_are_one_row() -> None:
    found = rows_of({"a + b": 1.0, "c + d": 2.0, "e": 9.0}, {"a": 1.0, "b || c": 2.0, "d": 1.0})
    assert names(found) == {("a + b + c + d", "a + b || c + d"), ("e", "")}


def test_a_layer_without_partner_is_a_row_of_its_own() -> None:
    found = rows_of({"a": 1.0, "new": 0.5}, {"a": 1.0, "gone": 0.25})
    assert [(r.layer, r.baseline_layer, r.variant_ms, r.baseline_ms) for r in found.rows] == [
        ("new", "", 0.5, None),
        ("", "gone", None, 0.25),
        ("a", "a", 1.0, 1.0),
    ]
    assert [row.ratio for row in found.rows] == [None, None, 1.0]
    assert [row.difference_ms for row in found.rows] == [0.5, -0.25, 0.0]


@pytest.mark.parametrize("ours_ms", [1.97, 2.0, 2.03])
def test_sums_that_differ_by_less_than_two_per_cent_have_no_shares(ours_ms: float) -> None:
    found = rows_of({"a": ours_ms - 0.5, "b": 0.5}, {"a": 1.0, "b": 1.0})
    assert [row.share for row in found.rows] == [None, None]


@pytest.mark.parametrize("ours_ms", [1.95, 2.05])
def test_sums_that_differ_by_more_have_shares(ours_ms: float) -> None:
    whole = ours_ms - 2.0
    found = rows_of({"a": ours_ms - 0.5, "b": 0.5}, {"a": 1.0, "b": 1.0})
    shares = {row.layer: row.share for row in found.rows}
    assert shares == pytest.approx({"a": (whole + 0.5) / whole, "b": -0.5 / whole})


def test_profiles_of_no_time_have_no_shares() -> None:
    assert [row.share for row in rows_of({"a": 0.0}, {"a": 0.0}).rows] == [None]


def test_a_baseline_of_no_time_has_no_ratio() -> None:
    (row,) = rows_of({"a": 1.0}, {"a": 0.0}).rows
    assert (row.ratio, row.difference_ms, row.baseline_ms) == (None, 1.0, 0.0)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("PWN(/relu/Relu, /add/Add)", "/add/Add"),
        ("PWN(PWN(/relu/Relu), /add/Add)", "/relu/Relu"),
        ("/fc/Gemm_myl0_2", "/fc/Gemm_myl0_7"),
        ("/fc/Gemm_myl0_2", "/fc/Gemm"),
        ("_model_0_fc_Gemm_myl1_12", "/model.0/fc/Gemm"),
        ("/a/MatMul+/b/MatMul_myl0_4", "/b/MatMul"),
        ("{ForeignNode[/a/MatMul.../b/Add]}", "/b/Add"),
        ("{ForeignNode[/a/MatMul.../b/Add]}", "{ForeignNode[/a/MatMul.../c/Add]}"),
        ("a + b || c", "c"),
    ],
)
def test_names_that_builders_change_still_meet(ours: str, theirs: str) -> None:
    assert names(rows_of({ours: 1.0}, {theirs: 1.0})) == {(ours, theirs)}
    assert names(rows_of({theirs: 1.0}, {ours: 1.0})) == {(theirs, ours)}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("Reformatting CopyNode for Input Tensor 0 to /fc/Gemm", "/fc/Gemm"),
        ("__myl_FcAddRelu_myl0_3", "__myl_FcAddRelu_myl0_4"),
        ("/fc/Gemm", "/fc/Gemm_1"),
    ],
)
def test_names_of_other_work_stay_apart(ours: str, theirs: str) -> None:
    assert names(rows_of({ours: 1.0}, {theirs: 1.0})) == {(ours, ""), ("", theirs)}


def test_the_graph_says_what_lies_inside_a_region() -> None:
    nodes = chain(("a", "MatMul"), ("b", "Relu"), ("c", "Add"), ("d", "MatMul"))
    region = "{ForeignNode[a...c]}"
    ours, theirs = {region: 3.0, "d": 1.0}, {"a": 1.0, "b": 2.0, "c": 1.0, "d": 1.0}
    by_graph = rows_of(ours, theirs, parts_by_graph(nodes))
    assert names(by_graph) == {(region, "a + b + c"), ("d", "d")}
    assert names(rows_of(ours, theirs)) == {(region, "a + c"), ("", "b"), ("d", "d")}


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


@given(LAYERS, LAYERS)
def test_swapping_the_sides_turns_every_row_over(
    ours: dict[str, float], theirs: dict[str, float]
) -> None:
    there = {(r.layer, r.baseline_layer): r.difference_ms for r in rows_of(ours, theirs).rows}
    back = {(r.baseline_layer, r.layer): -r.difference_ms for r in rows_of(theirs, ours).rows}
    assert there == back


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


def test_a_sweep_has_one_contrast_of_its_last_batch() -> None:
    variants = [
        variant(f"{label}@e:m:b{batch}", around(1), batch=batch, layers={"a": ms})
        for batch in (1, 8)
        for label, ms in (("dense", 2.0), ("sparse", 1.0))
    ]
    ratios, _ = ratios_and_noise(variants, "dense@e:m", 0)
    (found,) = contrasts(variants, ratios)
    assert (found.variant, found.baseline) == ("sparse@e:m:b8", "dense@e:m:b8")


def test_shares_are_given_only_where_the_variants_differ_in_the_direction_of_the_sums() -> None:
    def shares(ratio: float, verdict: LatencyVerdict) -> list[float | None]:
        one = variant("sparse@onnxruntime:cpu", layers={"a": 2.0, "b": 1.0})
        other = variant("dense@onnxruntime:cpu", layers={"a": 1.0, "b": 1.0})
        found = LatencyRatio(
            variant=one.name,
            baseline=other.name,
            ratio=ratio,
            low=ratio,
            high=ratio,
            verdict=verdict,
            rounds=30,
        )
        ((contrast_found),) = contrasts((one, other), (found,))
        return [row.share for row in contrast_found.rows]

    assert shares(1.5, LatencyVerdict.SLOWER) == [1.0, 0.0]
    assert shares(1.5, LatencyVerdict.NO_DIFFERENCE) == [None, None]
    assert shares(0.7, LatencyVerdict.FASTER) == [None, None]


NODES = tuple(
    GraphNode(name=name, label=name, op=op, domain="", inputs=(), outputs=(out,))
    for name, op, out in (
        ("node_conv", "Conv", "conv"),
        ("node_relu", "Relu", "relu"),
        ("node_linear", "Gemm", "linear"),
    )
)


def test_layers_that_onnx_runtime_added_or_renamed_say_which_node_they_are_for() -> None:
    names = [
        "ReorderInput",
        "InsertedPrecisionFreeCast_relu_nchwc",
        "ReorderOutput",
        "fused node_linear",
        "node_conv",
    ]
    assert owners_by_graph(NODES)(names) == {
        "ReorderInput": "node_relu",
        "InsertedPrecisionFreeCast_relu_nchwc": "node_relu",
        "ReorderOutput": "node_relu",
        "fused node_linear": "node_linear",
    }


def test_an_added_layer_of_several_owners_or_of_a_graph_that_is_not_known_names_none() -> None:
    owners = owners_by_graph(NODES)
    assert "ReorderOutput" not in owners(["node_conv", "ReorderOutput", "linear", "ReorderOutput"])
    assert owners(["aten::mm", "ReorderOutput"]) == {}


def test_the_owner_of_a_row_is_said_under_its_name() -> None:
    layers = {"conv_nchwc": 2.0, "node_linear": 1.0}
    one, other = variant("a@e:m", layers=layers), variant("b@e:m", layers=layers)
    rows = contrast(one, other, owners_of=owners_by_graph(NODES)).rows
    assert {layer_name(row) for row in rows} == {"conv_nchwc\nfor node_conv", "node_linear"}

"""Layers of joined reports, and forecast against listing over them."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import pytest
from engine_evidence_parts.confusion import confusion_by_kind, confusion_of, disagreements
from engine_evidence_parts.kinds import findings_by_kind, outcome_of
from engine_evidence_parts.layers import is_small, layers_of
from engine_evidence_parts.records import Answer, Forecast, Layer, Listing
from hypothesis import given
from hypothesis import strategies as st
from support.join_cases import DENSE, SPARSE, build, chosen, eligible, report_from_log, tuned
from support.report_cases import conv, verdict
from test_engine_evidence_cases import joined, layer, net, off

from twofour.eligibility.rules import narrow_widths
from twofour.records.eligibility import Evidence, VerdictName

layers = st.builds(
    layer,
    st.sampled_from((None, 16, 256, 512)),
    st.sampled_from((None, 16, 256, 512)),
    op=st.sampled_from(("Conv", "MatMul")),
    precision=st.sampled_from((None, "float16", "int8")),
    groups=st.sampled_from((1, 4)),
    forecast=st.sampled_from(Forecast),
    listing=st.sampled_from(Listing),
    chosen=st.sampled_from((None, True, False)),
    codes=st.sampled_from((("QUALIFIES",), ("TACTIC_SKIPPED",), ("NO_SPARSE_TACTIC",))),
    sparse_over_dense=st.sampled_from((None, 0.5, 1.5)),
)


def by_node(**changes: Any) -> dict[str, Layer]:
    return {found.node: found for found in layers_of(net(**changes))}


def test_a_joined_report_says_what_was_listed_chosen_and_left_out() -> None:
    found = by_node()
    assert {name: (x.forecast, x.listing, x.chosen) for name, x in found.items()} == {
        "a": (Forecast.ELIGIBLE, Listing.LISTED, True),
        "b": (Forecast.ELIGIBLE, Listing.LISTED, False),
        "broken": (Forecast.NOT_ELIGIBLE, Listing.NOT_LISTED, None),
        "grouped": (Forecast.NOT_ELIGIBLE, Listing.NOT_LISTED, None),
    }
    assert found["a"].sparse_over_dense == pytest.approx(0.5)
    assert (found["a"].best_dense_ms, found["a"].best_sparse_ms) == (0.02, 0.01)
    assert all(x.agrees for x in found.values())
    assert found["a"].source is not None
    assert found["a"].source.startswith("build.log:")


def test_a_layer_that_the_rules_ruled_out_and_the_builder_lists_is_a_disagreement() -> None:
    log = build(eligible("a", "b", "grouped"), chosen())
    wrong = disagreements(layers_of(net(joined(log))))
    assert [x.node for x in wrong] == ["grouped"]
    assert wrong[0].source == (
        "build.log:3: (Sparsity) Found 3 layer(s) eligible to use sparse tactics: a, b, grouped"
    )
    assert wrong[0].rule is not None
    assert "GROUPED_CONV" in wrong[0].rule


def test_a_layer_that_was_foretold_and_is_not_listed_is_a_disagreement() -> None:
    (wrong,) = disagreements(layers_of(net(joined(build(eligible("a"), chosen())))))
    assert (wrong.node, wrong.forecast, wrong.listing) == (
        *("b", Forecast.ELIGIBLE),
        Listing.NOT_LISTED,
    )
    assert wrong.source is not None
    assert "(Sparsity) Found 1 layer(s)" in wrong.source


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (build(eligible("a"), flag="Forced"), "SPARSITY_FORCED"),
        (build("Engine generation completed in 3.5 seconds."), "LOG_SILENT"),
        (build("Engine generation completed in 3.5 seconds.", flag="Disabled"), "SPARSITY_OFF"),
    ],
)
def test_a_build_that_tells_nothing_leaves_every_layer_unknown(log: Any, why: str) -> None:
    found = layers_of(net(joined(log)))
    assert {x.listing for x in found} == {Listing.UNKNOWN}
    assert {x.why_unknown for x in found} == {why}
    assert {x.chosen for x in found} == {None}
    made = confusion_of(found)
    assert (made.agreeing, made.comparable) == (0, 0)


def test_a_report_that_calls_itself_no_evidence_measures_nothing() -> None:
    assert {x.listing for x in layers_of(net(off(joined())))} == {Listing.UNKNOWN}


def test_what_is_measured_as_not_in_the_engine_was_never_to_be_listed() -> None:
    whole = joined()
    gone = replace(whole.verdicts[0], verdict=VerdictName.NOT_IN_ENGINE)
    (found,) = layers_of(net(replace(whole, verdicts=(gone,))))
    assert gone.evidence is Evidence.MEASURED
    assert (found.listing, found.agrees) == (Listing.UNKNOWN, None)


def test_an_eligible_layer_of_which_the_choice_is_not_logged_is_neither_chosen_nor_dense() -> None:
    found = by_node(found=joined(build(eligible("a", "b"))))
    assert (found["a"].listing, found["a"].chosen) == (Listing.LISTED, None)
    assert outcome_of(found["a"]) is None


def test_without_a_model_the_rules_are_silent_and_sizes_are_not_known() -> None:
    found = layers_of(net(report_from_log(build(eligible("conv1"), chosen("conv1")))))
    (one,) = found
    assert (one.forecast, one.listing, one.chosen) == (Forecast.SILENT, Listing.LISTED, True)
    assert (one.in_channels, one.out_channels, is_small(one)) == (None, None, None)
    assert one.agrees is None
    (kind,) = findings_by_kind(found)
    assert (kind.fit.answer, kind.no_size, kind.chosen) == (Answer.TOO_FEW, 1, 1)


def test_a_time_that_is_no_number_is_not_known() -> None:
    whole = joined()
    odd = replace(whole.verdicts[0], sparse_ms=nan)
    found = layers_of(net(replace(whole, verdicts=(odd,))))[0]
    assert (found.best_sparse_ms, found.sparse_over_dense) == (None, None)


def test_files_are_named_from_the_nets_own_folder() -> None:
    whole = joined(build(eligible("a"), chosen()))
    moved = replace(
        whole.verdicts[0],
        reasons=tuple(
            replace(r, source=f"/elsewhere/tiny-float16-b8/{r.source}")
            for r in whole.verdicts[0].reasons
        ),
    )
    found = layers_of(net(replace(whole, verdicts=(moved,))))[0]
    assert found.source is not None
    assert found.source.startswith("build.log:3: ")


@given(
    st.integers(1, 600), st.integers(1, 600), st.sampled_from(((), (1, 1), (3, 3), (7, 7), (3,)))
)
def test_the_rule_of_thumb_is_the_one_in_use(c: int, k: int, kernel: tuple[int, ...]) -> None:
    weight = conv("a", c, k, kernel)
    assert is_small(layer(c, k, kernel=kernel)) is bool(narrow_widths(c, k, kernel))
    said = {r.code.value for r in verdict(weight).reasons}
    assert ("SMALL_CHANNELS" in said) is bool(narrow_widths(c, k, kernel))


@given(st.lists(layers, max_size=30))
def test_every_layer_is_in_one_cell_and_unknown_never_agrees(found: list[Layer]) -> None:
    made = confusion_of(found)
    assert sum(cell.layers for cell in made.cells) == len(found)
    agreeing = made.layers(Forecast.ELIGIBLE, Listing.LISTED)
    agreeing += made.layers(Forecast.NOT_ELIGIBLE, Listing.NOT_LISTED)
    assert made.agreeing == agreeing
    unknown = sum(made.layers(said, Listing.UNKNOWN) for said in Forecast)
    silent = sum(made.layers(Forecast.SILENT, measured) for measured in Listing)
    both = made.layers(Forecast.SILENT, Listing.UNKNOWN)
    assert made.comparable == len(found) - unknown - silent + both
    assert made.agreeing + len(disagreements(found)) == made.comparable


@given(st.lists(layers, max_size=30))
def test_the_tables_of_the_kinds_add_up_to_that_of_all(found: list[Layer]) -> None:
    whole, kinds = confusion_of(found), confusion_by_kind(found)
    assert sum(kind.agreeing for kind in kinds) == whole.agreeing
    assert sum(kind.comparable for kind in kinds) == whole.comparable
    for at, cell in enumerate(whole.cells):
        assert sum(kind.cells[at].layers for kind in kinds) == cell.layers
    assert len({(kind.precision, kind.dtype, kind.op) for kind in kinds}) == len(kinds)


@given(st.lists(layers, max_size=30))
def test_every_disagreement_is_listed_and_nothing_else(found: list[Layer]) -> None:
    opposite = {
        (Forecast.ELIGIBLE, Listing.NOT_LISTED),
        (Forecast.NOT_ELIGIBLE, Listing.LISTED),
    }
    expected = [x for x in found if (x.forecast, x.listing) in opposite]
    assert list(disagreements(found)) == expected


@given(st.lists(layers, max_size=40))
def test_each_listed_layer_is_in_one_kind_and_fitted_or_set_aside(found: list[Layer]) -> None:
    kinds = findings_by_kind(found)
    is_listed = [x for x in found if x.listing is Listing.LISTED]
    assert sum(kind.listed for kind in kinds) == len(is_listed)
    telling = [x for x in is_listed if outcome_of(x) is not None]
    assert sum(kind.fit.layers for kind in kinds) == len(telling)
    for kind in kinds:
        assert len(kind.exceptions) == (kind.fit.wrong or 0)
        aside = kind.listed - kind.fit.layers
        assert aside <= kind.not_known + kind.skipped + kind.no_size
        assert (aside == 0) is (kind.not_known + kind.skipped + kind.no_size == 0)


def test_a_layer_whose_tactics_were_skipped_for_memory_tells_nothing_of_its_size() -> None:
    skipped = layer(chosen=False, codes=("TACTIC_SKIPPED", "QUALIFIES"))
    assert outcome_of(skipped) is None
    assert findings_by_kind([skipped])[0].skipped == 1
    assert outcome_of(replace(skipped, chosen=True, codes=("QUALIFIES",))) is not None


def test_ratios_are_told_apart_by_what_was_chosen() -> None:
    log = build(
        *tuned("a", (DENSE, 0.02), (SPARSE, 0.01)),
        *tuned("b", (DENSE, 0.02), (SPARSE, 0.03)),
        eligible("a", "b"),
        chosen("a"),
    )
    (kind,) = findings_by_kind(layers_of(net(joined(log))))
    assert kind.ratios_chosen is not None
    assert kind.ratios_dense is not None
    assert kind.ratios_chosen.low == pytest.approx(0.5)
    assert kind.ratios_dense.high == pytest.approx(1.5)
    assert (kind.ratios_chosen.layers, kind.ratios_dense.layers) == (1, 1)


def test_the_rule_of_thumb_in_use_is_held_against_the_same_layers() -> None:
    small_chosen = layer(16, 512, chosen=True, kernel=(1, 1))
    small_dense = layer(16, 512, chosen=False, kernel=(1, 1))
    large_chosen = layer(512, 512, chosen=True, kernel=(1, 1))
    not_known = layer(512, 512, chosen=None, kernel=(1, 1))
    (kind,) = findings_by_kind([small_chosen, small_dense, large_chosen, not_known])
    assert (kind.in_use_right, kind.fit.layers, kind.not_known) == (2, 3, 1)


def test_builds_of_two_gpus_or_batches_are_not_fitted_together() -> None:
    kinds = findings_by_kind([layer(), layer(batch=1), layer(gpu="Orin"), layer(dtype="int8")])
    assert [kind.listed for kind in kinds] == [1, 1, 1, 1]

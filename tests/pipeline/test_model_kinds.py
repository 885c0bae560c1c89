"""Models whose weights no Linear or Conv holds: every constant is in a row or said to be in none.

The sums are told by onnx alone.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path

import onnx
import pytest
from support import model_kinds
from support.rendered import to_csv, to_table

from twofour.graph.opened import open_onnx
from twofour.graph.weights import GraphWeights
from twofour.jobs import run_all
from twofour.pattern import check
from twofour.records.eligibility import VerdictName
from twofour.records.export import LayerMap
from twofour.records.options import RunOptions
from twofour.records.run import RunResult, VariantCheck
from twofour.records.weights import Pattern, ReasonCode
from twofour.reports.terminal import plain_text
from twofour.store import read_record

LSTM_48 = 2 * 4 * 48 * (32 + 48)
GRU_40 = 3 * 40 * (96 + 40)
KINDS: dict[str, dict[str, tuple[int, int, bool]]] = {
    "Recurrent": {"LSTM": (1, LSTM_48, True), "GRU": (1, GRU_40, True)},
    "Detector": {"MatMul": (1, 20 * 64, True)},
    "SoftMixture": {},
    "Top1Mixture": {},
    "Tied": {"Gather": (1, 96 * 64, False)},
    "ByHand": {},
}
"""What no row names: how often it is used, its weights, and whether something multiplies by it."""


def stored(model: onnx.ModelProto) -> dict[str, int]:
    """Elements of every constant above 1,024; none of these models has a subgraph."""
    tensors = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        assert not any(a.HasField("g") for a in node.attribute)
        if node.op_type == "Constant":
            tensors[node.output[0]] = next(a.t for a in node.attribute if a.name == "value")
    sizes = {name: int(prod(tensor.dims)) for name, tensor in tensors.items()}
    return {name: size for name, size in sizes.items() if size > 1024}


Runs = Callable[[str], tuple[Path, RunResult]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run folder of each kind."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(kind: str) -> tuple[Path, RunResult]:
        source = f"{Path(model_kinds.__file__)}:{kind}"
        return folder / kind, run_all(source, folder / kind, RunOptions())

    return run


def rows(found: GraphWeights) -> dict[str, int]:
    """Elements of the arrays that rows name, above 1,024."""
    sizes = {w.weight: int(prod(w.shape)) for w in found.weights if w.weight is not None}
    return {name: size for name, size in sizes.items() if size > 1024}


@pytest.mark.parametrize("kind", KINDS)
def test_every_constant_is_in_a_row_or_said_to_be_in_none_and_the_totals_add_up(
    kind: str, ran: Runs
) -> None:
    folder, result = ran(kind)
    found = open_onnx(folder / "dense.onnx").weights()
    constants = stored(onnx.load(folder / "dense.onnx"))
    beside = [name for group in found.not_covered for name in group.arrays]
    assert sorted([*rows(found), *beside]) == sorted(constants)
    assert {g.op: (g.uses, g.weights, g.multiplies) for g in found.not_covered} == KINDS[kind]
    elsewhere = sum(group.weights for group in found.not_covered)
    assert sum(rows(found).values()) + elsewhere == sum(constants.values())
    report, summary = result.report, result.report.summary
    # the table without rows of small arrays and of layers that no file holds
    table = csv.DictReader(io.StringIO(to_csv(report)))
    sizes = [int(r["weights"]) for r in table if r["reason_codes"] != "NOT_EXPORTED"]
    in_file = stored(onnx.load(folder / "sparse.onnx"))
    assert sum(size for size in sizes if size > 1024) == sum(in_file.values())
    assert report.totals is not None
    assert report.totals.shares[0].total == summary.weights
    factors = [group for group in report.not_covered if group.multiplies]
    assert summary.weights_not_covered == sum(group.weights for group in factors)
    said = plain_text(to_table(report), width=200)
    assert ("not covered: " in said) is bool(factors)


def test_a_bidirectional_lstm_is_most_of_the_model_and_is_said_to_be(ran: Runs) -> None:
    """In float16 it ends the process of ONNX Runtime 1.31.1: files are run at a lower level."""
    folder, result = ran("Recurrent")
    summary = result.report.summary
    assert (summary.weights, summary.weights_eligible) == (LSTM_48 + GRU_40 + 40 * 64, 40 * 64)
    assert [(g.op, g.weights) for g in result.prune.not_covered] == [
        ("LSTM", LSTM_48),
        ("GRU", GRU_40),
    ]
    said = plain_text(to_table(result.report), width=200)
    assert "LSTM (1), GRU (1)" in said
    assert "47,040 weights (94.8 %)" in said
    checked = read_record(VariantCheck, folder / "stages" / "check-dense.json")
    assert [row.within for row in checked.agreement] == [True], checked.not_compared
    assert [v.error for v in result.build.times.variants] == [None] * 3
    for built in result.build.variants:
        assert built.error is None
        assert (built.level is None) == (built.failed_tries == ())


def test_cross_attention_is_two_rows_of_one_pruned_array_and_a_head_for_training_is_none(
    ran: Runs,
) -> None:
    """`in_proj_weight` is split: a piece for the query, another for key and value."""
    folder, result = ran("Detector")
    module = "decoder.layers.0.multihead_attn"
    names = read_record(LayerMap, folder / "layers.json").layers
    pieces = [row for row in names if row.parameter == f"{module}.in_proj_weight"]
    assert [row.layer for row in pieces] == [module] * 2
    sparse = onnx.load(folder / "sparse.onnx")
    (array,) = (t for t in sparse.graph.initializer if t.name == pieces[0].initializer)
    assert check(onnx.numpy_helper.to_array(array), 1, Pattern(2, 4)).holds
    rows = {v.layer: v for v in result.report.verdicts}
    assert rows[module].pattern_holds is True
    assert "auxiliary" not in rows
    assert "auxiliary" not in {row.weight.layer for row in result.prune.weights}
    assert result.report.summary.not_in_engine == 0


def test_experts_used_by_einsum_are_pruned_and_picked_ones_never(ran: Runs) -> None:
    _, mixed = ran("SoftMixture")
    experts = {r.weight.weight: r for r in mixed.prune.weights if r.weight.op == "Einsum"}
    assert [*experts] == ["up", "down"]
    assert {(r.pruned, r.zeros) for r in experts.values()} == {(True, 4 * 64 * 48 // 2)}
    assert mixed.export.pattern.broken == ()
    folder, picked = ran("Top1Mixture")
    rows = [row for row in picked.report.verdicts if len(row.shape) == 3]
    assert [row.reasons[0].code for row in rows] == [ReasonCode.PICKED_AT_RUN_TIME] * 2
    names = {row.weight.weight for row in picked.prune.weights if not row.pruned}
    assert names == {"gate.weight", "up", "down"}
    layers = read_record(LayerMap, folder / "layers.json").layers
    assert {"up", "down"} <= {row.parameter for row in layers}


def test_two_layers_of_one_weight_are_both_in_the_report(ran: Runs) -> None:
    _, result = ran("Tied")
    codes = {v.layer: [reason.code for reason in v.reasons] for v in result.report.verdicts}
    assert codes["first"] == codes["second"] == [ReasonCode.QUALIFIES, ReasonCode.SMALL_CHANNELS]


def test_parameters_used_by_hand_are_pruned_and_a_matrix_of_the_code_is_no_weight(
    ran: Runs,
) -> None:
    _, result = ran("ByHand")
    weights = ["plain", "linear", "added", "kernel", "out.weight"]
    assert [row.weight.weight for row in result.prune.weights if row.pruned] == weights
    fixed, *others = result.report.verdicts
    assert (fixed.layer, fixed.verdict) == ("node_matmul", VerdictName.NOT_ELIGIBLE)
    assert [v.weight for v in others if v.pattern_holds] == weights
    layers = ["node_matmul_1", "node_linear", "node_addmm"]
    assert [row.weight.layer for row in result.prune.weights][:3] == layers
    assert [v.layer for v in others][:3] == layers
    assert result.prune.not_covered == ()

"""Models whose weights no Linear or Conv holds: every constant is in a row or said to be in none.

The sums are told by onnx alone; ONNX Runtime and torch run the same model before and after.
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
from support.rendered import eligibility_table, to_csv

from twofour.graph.opened import open_onnx
from twofour.graph.weights import GraphWeights
from twofour.jobs import run_all
from twofour.pattern import check
from twofour.pruning.onnx import prune_onnx
from twofour.pruning.verify import validate_onnx
from twofour.records.eligibility import EligibilityReport
from twofour.records.export import LayerMap
from twofour.records.options import RunOptions
from twofour.records.run import RunResult
from twofour.records.weights import Pattern, ReasonCode
from twofour.reports.terminal import plain_text
from twofour.store import read_record

TWO_FOUR = Pattern(2, 4)
KINDS = ("recurrent", "detector", "soft_mixture", "top1_mixture", "tied", "by_hand")


def stored(model: onnx.ModelProto) -> dict[str, int]:
    """Elements of every constant above 1,024; none of these models has a subgraph."""
    tensors = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        assert not any(a.HasField("g") for a in node.attribute)
        if node.op_type == "Constant":
            tensors[node.output[0]] = next(a.t for a in node.attribute if a.name == "value")
    sizes = {name: int(prod(tensor.dims)) for name, tensor in tensors.items()}
    return {name: size for name, size in sizes.items() if size > 1024}


Exports = Callable[[str], tuple[Path, LayerMap]]
Runs = Callable[[str], tuple[Path, RunResult]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run folder of each kind, in float32: ONNX Runtime 1.31 dies of float16 LSTMs."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(kind: str) -> tuple[Path, RunResult]:
        source = f"{Path(model_kinds.__file__)}:{kind}"
        options = RunOptions()
        return folder / kind, run_all(source, folder / kind, options)

    return run


@pytest.fixture(scope="module")
def exported(ran: Runs) -> Exports:
    """The dense file of each run and its layer map."""

    def export(kind: str) -> tuple[Path, LayerMap]:
        folder, _ = ran(kind)
        return folder / "dense.onnx", read_record(LayerMap, folder / "layers.json")

    return export


def rows(found: GraphWeights) -> dict[str, int]:
    """Elements of the arrays that rows name, above 1,024."""
    sizes = {w.weight: int(prod(w.shape)) for w in found.weights if w.weight is not None}
    return {name: size for name, size in sizes.items() if size > 1024}


def groups(found: GraphWeights) -> dict[str, tuple[int, int, bool]]:
    return {g.op: (g.uses, g.weights, g.multiplies) for g in found.not_covered}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_what_no_row_names_are_all_constants(kind: str, exported: Exports) -> None:
    path, _ = exported(kind)
    found = open_onnx(path).weights()
    beside = [name for group in found.not_covered for name in group.arrays]
    assert sorted([*rows(found), *beside]) == sorted(stored(onnx.load(path)))
    total = sum(rows(found).values()) + sum(g.weights for g in found.not_covered)
    assert total == sum(stored(onnx.load(path)).values())


LSTM_48 = 2 * 4 * 48 * (32 + 48)
GRU_40 = 3 * 40 * (96 + 40)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("recurrent", {"LSTM": (1, LSTM_48, True), "GRU": (1, GRU_40, True)}),
        ("detector", {"MatMul": (1, 20 * 64, True)}),
        ("soft_mixture", {}),
        ("top1_mixture", {}),
        ("tied", {"Gather": (1, 96 * 64, False)}),
        ("by_hand", {}),
    ],
)
def test_what_no_row_names_is_told_by_what_uses_it(
    kind: str, expected: dict[str, tuple[int, int, bool]], exported: Exports
) -> None:
    path, _ = exported(kind)
    assert groups(open_onnx(path).weights()) == expected


def test_cross_attention_is_named_traced_and_pruned_once(exported: Exports, tmp_path: Path) -> None:
    """`in_proj_weight` is split: a piece for the query, another for key and value."""
    path, layers = exported("detector")
    module = "decoder.layers.0.multihead_attn"
    names = [r for r in layers.layers if r.parameter == f"{module}.in_proj_weight"]
    assert [name.layer for name in names] == [module] * 2
    result = prune_onnx(open_onnx(path), tmp_path / "sparse.onnx", TWO_FOUR)
    of_array = [r for r in result.weights if r.weight.weight == names[0].initializer]
    assert [(r.pruned, r.weight.shape, r.weight.axis) for r in of_array] == [
        (True, (192, 64), 1)
    ] * 2
    assert {r.zeros for r in of_array} == {192 * 32}
    sparse = onnx.load(tmp_path / "sparse.onnx")
    (array,) = (t for t in sparse.graph.initializer if t.name == names[0].initializer)
    assert check(onnx.numpy_helper.to_array(array), 1, TWO_FOUR).holds


def test_experts_used_by_einsum_are_pruned_in_the_file(exported: Exports, tmp_path: Path) -> None:
    path, layers = exported("soft_mixture")
    assert {r.parameter for r in layers.layers if r.op == "Einsum"} == {"up", "down"}
    result = prune_onnx(open_onnx(path), tmp_path / "sparse.onnx", TWO_FOUR)
    experts = {r.weight.weight: r for r in result.weights if r.weight.op == "Einsum"}
    assert [(r.pruned, r.weight.axis, r.zeros) for r in experts.values()] == [
        (True, 1, 4 * 64 * 48 // 2)
    ] * 2
    assert validate_onnx(open_onnx(tmp_path / "sparse.onnx"), TWO_FOUR).broken == ()


def test_picked_experts_are_named_after_their_parameters_and_never_pruned(
    exported: Exports, tmp_path: Path
) -> None:
    path, layers = exported("top1_mixture")
    result = prune_onnx(open_onnx(path), tmp_path / "sparse.onnx", TWO_FOUR)
    picked = [r for r in result.weights if r.weight.shape[:1] == (4,) and len(r.weight.shape) > 2]
    assert [r.pruned for r in picked] == [False, False]
    assert {r.reasons[0].code for r in picked} == {ReasonCode.PICKED_AT_RUN_TIME}
    assert {"up", "down"} <= {r.parameter for r in layers.layers}


# --- the whole way --------------------------------------------------------------------------------


def counted(report: EligibilityReport) -> int:
    """Weights of the table, without rows of small arrays and of layers that no file holds."""
    table = csv.DictReader(io.StringIO(to_csv(report)))
    sizes = [int(r["weights"]) for r in table if r["reason_codes"] != "NOT_EXPORTED"]
    return sum(size for size in sizes if size > 1024)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_with_totals_that_add_up(kind: str, ran: Runs) -> None:
    folder, result = ran(kind)
    report, summary = result.report, result.report.summary
    assert counted(report) == sum(stored(onnx.load(folder / "sparse.onnx")).values())
    assert report.totals is not None
    assert report.totals.shares[0].total == summary.weights
    factors = [g for g in report.not_covered if g.multiplies]
    assert summary.weights_not_covered == sum(g.weights for g in factors)
    said = plain_text(eligibility_table(report), width=200)
    assert ("not covered: " in said) is bool(factors)


def test_a_bidirectional_lstm_is_most_of_the_model_and_is_said_to_be(ran: Runs) -> None:
    _, result = ran("recurrent")
    summary = result.report.summary
    assert (summary.weights, summary.weights_eligible) == (LSTM_48 + GRU_40 + 40 * 64, 40 * 64)
    assert [(g.op, g.weights) for g in result.prune.not_covered] == [
        ("LSTM", LSTM_48),
        ("GRU", GRU_40),
    ]
    said = plain_text(eligibility_table(result.report), width=200)
    assert "LSTM (1), GRU (1)" in said
    assert "2,560 weights (5.2 %)" in said
    assert "47,040 weights (94.8 %)" in said


def test_a_head_for_training_alone_is_no_row(ran: Runs) -> None:
    _, result = ran("detector")
    rows = {v.layer: v for v in result.report.verdicts}
    assert "auxiliary" not in rows
    assert "auxiliary" not in {row.weight.layer for row in result.prune.weights}
    assert rows["decoder.layers.0.multihead_attn"].pattern_holds is True
    assert result.report.summary.not_in_engine == 0


def test_parameters_used_by_hand_are_pruned_and_in_the_report(ran: Runs) -> None:
    _, result = ran("by_hand")
    weights = ["plain", "linear", "added", "kernel", "out.weight"]
    assert [row.weight.weight for row in result.prune.weights if row.pruned] == weights
    assert [v.weight for v in result.report.verdicts if v.pattern_holds] == weights
    layers = ["node_matmul", "node_linear", "node_addmm"]
    assert [row.weight.layer for row in result.prune.weights][:3] == layers
    assert [v.layer for v in result.report.verdicts][:3] == layers
    assert result.prune.not_covered == ()

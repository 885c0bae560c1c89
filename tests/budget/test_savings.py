"""What is decided together and how it is named in a list; times of layers out of a build."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import helper
from support import onnx_models as om
from support.render_cases import every_status

from twofour.budget import savings
from twofour.budget.savings import PruningUnit, find_units, read_times_saved
from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.jobs import run_sensitivity
from twofour.pruning.onnx import prune_onnx
from twofour.records.eligibility import Verdict
from twofour.records.export import LayerMap, LayerName
from twofour.records.options import BudgetOptions, RunOptions
from twofour.records.weights import HARDWARE_PATTERN, PruneResult, Selection


def _attention(path: Path) -> Path:
    """q, k and v read x; `up` reads their sum; `tied` multiplies by the array of `up`."""
    nodes = [
        *(helper.make_node("MatMul", ["x", n], [f"{n}.out"], name=n) for n in "qkv"),
        helper.make_node("Add", ["q.out", "k.out"], ["qk"]),
        helper.make_node("Add", ["qk", "v.out"], ["sum"]),
        helper.make_node("MatMul", ["sum", "up"], ["u"], name="up"),
        helper.make_node("MatMul", ["u", "up"], ["y"], name="tied[0]"),
    ]
    constants = {n: om.weights(32, 32, seed=i) for i, n in enumerate(("q", "k", "v", "up"))}
    return om.save(om.model(nodes, constants, inputs={"x": [2, 32]}), path)


def _pruned(tmp_path: Path) -> tuple[PruneResult, OpenedModel, OpenedModel, LayerMap]:
    dense = open_onnx(_attention(tmp_path / "dense.onnx"))
    result = prune_onnx(dense, tmp_path / "sparse.onnx", HARDWARE_PATTERN, Selection())
    layers = []
    for weight in dense.weights().weights:
        name, node = str(weight.weight), str(weight.node)
        row = LayerName(layer=weight.layer, parameter=name, node=node, initializer=name, op="")
        layers.append(row)
    return result, dense, open_onnx(tmp_path / "sparse.onnx"), LayerMap(layers=tuple(layers))


def _units(tmp_path: Path, *, siblings: bool) -> dict[str, PruningUnit]:
    result, dense, sparse, layers = _pruned(tmp_path)
    found = find_units(result.weights, layers, dense, sparse, siblings=siblings)
    return {unit.name: unit for unit in found}


def test_users_of_one_array_are_one_unit(tmp_path: Path) -> None:
    units = _units(tmp_path, siblings=False)
    assert list(units) == ["q", "k", "v", "up"]
    assert units["up"].members == ("up", "tied[0]")
    assert units["up"].nodes == ("up", "tied[0]")
    assert [len(unit.places) for unit in units.values()] == [1, 1, 1, 1]
    assert len({place for unit in units.values() for place in unit.places}) == 4
    assert any(fnmatchcase("tied[0]", glob) for glob in units["up"].globs)


def test_siblings_are_one_unit_where_they_are_asked_for(tmp_path: Path) -> None:
    units = _units(tmp_path, siblings=True)
    assert list(units) == ["q", "up"]
    assert units["q"].members == ("q", "k", "v")
    assert units["q"].globs == ("q", "k", "v")
    assert len(units["q"].places) == 3


@pytest.mark.usefixtures("measured_in_one_process")
def test_of_siblings_every_layer_counts_and_is_named(tmp_path: Path) -> None:
    options = RunOptions(budget=BudgetOptions(share=0.2, siblings=True))
    _, found = run_sensitivity(str(_attention(tmp_path / "m.onnx")), tmp_path / "run", options)
    assert found.budget is not None
    assert [s.layers for s in found.pareto][-1] == 5
    groups = {("q", "k", "v"), ("up", "tied[0]")}
    chosen = found.budget.chosen
    assert chosen.dense in groups
    assert chosen.layers == 5 - len(chosen.dense)
    assert [r.layer for r in found.layers if not r.pruned] == [chosen.dense[0]]


def test_a_layer_of_several_weights_is_named_by_weight(tmp_path: Path) -> None:
    result, dense, sparse, layers = _pruned(tmp_path)
    rows = [
        replace(row, weight=replace(row.weight, layer="attention")) if i < 2 else row
        for i, row in enumerate(result.weights)
    ]
    first, second, *_ = find_units(rows, layers, dense, sparse, siblings=False)
    assert (first.name, first.globs) == ("q", ("q",))
    assert (second.name, second.globs) == ("k", ("k",))
    assert np.intersect1d(first.places, second.places).size == 0


def test_a_build_gives_the_tactics_of_the_layers_that_have_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = every_status()
    first = replace(report.verdicts[0], layer="conv", node="/conv", dense_ms=0.5, sparse_ms=0.3)
    others = [replace(v, dense_ms=None) for v in report.verdicts[1:]]

    def saved(*verdicts: Verdict) -> dict[str, float]:
        found = replace(report, verdicts=(*verdicts, *others))
        monkeypatch.setattr(savings, "report_folder", lambda _: SimpleNamespace(report=found))
        return read_times_saved(tmp_path)

    assert saved(first) == {"/conv": pytest.approx(0.2)}
    joined = [replace(first, node=name, engine_layer="q + k") for name in ("/q", "/k")]
    assert saved(first, *joined) == pytest.approx({"/conv": 0.2, "/q": 0.1, "/k": 0.1})
    with pytest.raises(BadInputError, match="no layer there has"):
        saved()


def test_what_is_no_folder_of_a_build_is_refused(tmp_path: Path) -> None:
    (tmp_path / "times.csv").write_text("a,1.5,1\n")
    with pytest.raises(BadInputError, match="is not a run folder"):
        read_times_saved(tmp_path / "times.csv")

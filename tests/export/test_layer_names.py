from __future__ import annotations

from pathlib import Path

import onnx
import torch
from support.export_nets import LAYERS, Exported
from support.exporting import export_onnx
from torch import Tensor, nn
from torch.nn import functional

from twofour.records.options import ExportOptions


def test_every_weight_is_named_after_its_module_and_parameter(exported: Exported) -> None:
    rows = exported.layers.layers
    assert {r.layer: (r.parameter, r.op) for r in rows if r.layer} == LAYERS
    of_root = {(r.parameter, r.op) for r in rows if not r.layer}
    assert of_root == {("right", "MatMul"), ("borrowed", "MatMul")}


def test_names_are_those_of_the_file(exported: Exported) -> None:
    nodes = {n.name: n for n in exported.model.graph.node}
    initializers = {t.name for t in exported.model.graph.initializer}
    for row in exported.layers.layers:
        assert nodes[row.node].op_type == row.op
        assert row.initializer in initializers
    assert len({row.node for row in exported.layers.layers}) == len(exported.layers.layers)


def test_a_large_tied_head_is_named_through_the_transpose_in_the_graph(exported: Exported) -> None:
    row = next(r for r in exported.layers.layers if r.layer == "large_head")
    node = next(n for n in exported.model.graph.node if n.name == row.node)
    assert row.initializer not in node.input
    assert row.parameter == "large_head.weight"


class Borrower(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.tables = [table]

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.tables[0].weight)


class Shared(nn.Module):
    """A module that runs twice, a weight computed from two parameters, and a borrowed one."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(8, 8)
        self.a = nn.Parameter(torch.randn(8, 8))
        self.b = nn.Parameter(torch.randn(8, 8))
        self.table = nn.Embedding(12, 8)
        self.head = Borrower(self.table)

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(functional.relu(self.twice(x))) @ (self.a * self.b)
        z: Tensor = self.head(y)
        return z


def test_weights_that_are_shared_computed_or_borrowed_are_named_by_where_they_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "net.onnx"
    rows = export_onnx(Shared(), (torch.randn(2, 8),), {}, path, ExportOptions()).layers
    first, second, computed, borrowed = rows
    assert [(r.layer, r.parameter) for r in (first, second)] == [("twice", "twice.weight")] * 2
    assert first.node != second.node
    assert (computed.layer, computed.parameter) == (computed.node, "")
    assert computed.node in {n.name for n in onnx.load(path).graph.node}
    assert (borrowed.layer, borrowed.parameter) == ("head", "table.weight")

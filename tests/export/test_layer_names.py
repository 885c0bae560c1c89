from __future__ import annotations

from pathlib import Path

import onnx
import torch
from support.export_nets import LAYERS, Exported
from torch import Tensor, nn
from torch.nn import functional

from twofour.export.torch_export import export_onnx
from twofour.records.export import LayerName
from twofour.records.options import ExportOptions


def rows(net: nn.Module, x: Tensor, folder: Path) -> tuple[LayerName, ...]:
    return export_onnx(net, (x,), {}, folder / "net.onnx", ExportOptions()).layers


def test_every_weight_is_named_after_its_module_and_parameter(exported: Exported) -> None:
    named = {r.layer: (r.parameter, r.op) for r in exported.layers.layers if r.layer}
    assert named == LAYERS


def test_a_parameter_of_the_model_itself_has_the_empty_path_of_the_root(
    exported: Exported,
) -> None:
    named = {(r.parameter, r.op) for r in exported.layers.layers if not r.layer}
    assert named == {("right", "MatMul"), ("borrowed", "MatMul")}


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


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shared(functional.relu(self.shared(x)))
        return y


def test_a_module_that_runs_twice_has_a_row_for_each_node(tmp_path: Path) -> None:
    found = rows(Twice(), torch.randn(2, 8), tmp_path)
    assert [(r.layer, r.parameter) for r in found] == [("shared", "shared.weight")] * 2
    assert found[0].node != found[1].node


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(8, 8))
        self.b = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a * self.b)


def test_a_weight_computed_from_two_parameters_keeps_the_name_of_its_node(tmp_path: Path) -> None:
    (row,) = rows(Scaled(), torch.randn(2, 8), tmp_path)
    assert row.parameter == ""
    assert row.layer == row.node
    names = {n.name for n in onnx.load(tmp_path / "net.onnx").graph.node}
    assert row.node in names


class Borrower(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.tables = [table]

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.tables[0].weight)


class Lender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.head = Borrower(self.table)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y


def test_a_module_that_borrows_a_weight_is_the_layer(tmp_path: Path) -> None:
    (row,) = rows(Lender(), torch.randn(2, 8), tmp_path)
    assert (row.layer, row.parameter) == ("head", "table.weight")


def test_a_bare_layer_has_the_empty_path(tmp_path: Path) -> None:
    (row,) = rows(nn.Linear(8, 4), torch.randn(2, 3, 8), tmp_path)
    assert (row.layer, row.parameter, row.op) == ("", "weight", "MatMul")

"""A module traced without its values: what its graph names, and that the module stays as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from support.onnx_models import Array
from support.ort import outputs
from torch import Tensor, nn

from twofour.errors import BadInputError
from twofour.export.calls import bind, reference_outputs
from twofour.export.tracing import TracedModule, trace, write_graph
from twofour.graph.stored import read_stores
from twofour.pipeline.torch.weight_files import save_tensors
from twofour.records.options import ExportOptions
from twofour.sources.hf import without_values


class Net(nn.Module):
    """A filter, a table, a layer that runs twice, a buffer, a product of its own, a tied head."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8)
        self.table, self.again = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.by_hand = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.arange(8.0))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).mean((2, 3)) + self.steps
        y = self.again(torch.relu(self.again(y + self.table(ids)))) @ self.by_hand
        z: Tensor = self.head(y)
        return z


CALL = (torch.randn(2, 4, 3, 3), torch.tensor([3, 7]))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def graph_of(module: nn.Module, traced: TracedModule, folder: Path) -> onnx.ModelProto:
    """The graph as it is written, and its weights beside it."""
    store = folder / "dense.safetensors"
    save_tensors(module.state_dict(), store, first=frozenset(traced.model.graph.initializers))
    write_graph(traced, read_stores([store]), folder / "graph.onnx")
    return onnx.load(folder / "graph.onnx", load_external_data=False)


def run(path: Path, *inputs: Tensor) -> Array:
    names = [each.name for each in onnx.load(path, load_external_data=False).graph.input]
    feeds = dict(zip(names, (x.numpy() for x in inputs), strict=True))
    (found,) = outputs(path, feeds).values()
    return found


def test_the_graph_names_the_weights_of_the_state_dict_and_runs(tmp_path: Path) -> None:
    module = net()
    traced = trace(module, bind(module, CALL, {}), ExportOptions())
    model = graph_of(module, traced, tmp_path)
    external = {t.name for t in model.graph.initializer if t.data_location == t.EXTERNAL}
    weights = {name for name, _ in module.named_parameters()} | {
        name for name, buffer in module.named_buffers() if buffer.is_floating_point()
    }
    assert external == weights - {"table.weight"} | {"head.weight"}, "which are one array"
    assert (traced.input_names, len(traced.output_names)) == (("x", "ids"), 1)
    invented = ("node_", "val_", "n0")  # n0: the batch norm with torch 2.8
    named = [node.name for node in model.graph.node if not node.name.startswith(invented)]
    assert named == ["conv", "table", "again", "again#2", "head"]
    (expected,) = reference_outputs(module, bind(module, CALL, {}))
    assert np.allclose(run(tmp_path / "graph.onnx", *CALL), expected, atol=1e-5)


def test_a_module_without_values_gives_the_graph_of_one_with_them(tmp_path: Path) -> None:
    module = net()
    with without_values():
        bare = Net().eval()
    bare.steps = module.steps
    bare.norm.load_state_dict(module.norm.state_dict(), assign=True)
    graphs = []
    for name, each in (("whole", module), ("bare", bare)):
        (tmp_path / name).mkdir()
        traced = trace(each, bind(each, CALL, {}), ExportOptions())
        graphs.append(graph_of(module, traced, tmp_path / name))
    assert [n.SerializeToString() for n in graphs[0].graph.node] == [
        n.SerializeToString() for n in graphs[1].graph.node
    ]
    assert {n.partition(".")[0] for n, p in bare.named_parameters() if not p.is_meta} == {"norm"}


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_traced_in_float32_without_a_copy_and_cast_where_they_are_stored(
    kind: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = net().to(kind)
    (expected,) = reference_outputs(module, bind(module, CALL, {}))
    ours, copied, of = {*map(id, module.parameters())}, list[torch.Size](), Tensor.float

    def counted(self: Tensor) -> Tensor:
        copied.extend([self.shape] if id(self) in ours else [])
        return of(self)

    monkeypatch.setattr(Tensor, "float", counted)
    traced = trace(module, bind(module, (CALL[0].to(kind), CALL[1]), {}), ExportOptions())
    monkeypatch.undo()
    assert copied == []
    assert {each.dtype for each in module.parameters()} == {kind}
    model = graph_of(module, traced, tmp_path)
    assert model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    stored = {t.name: t for t in model.graph.initializer}
    code = onnx.helper.np_dtype_to_tensor_dtype(
        np.dtype("float16") if kind is torch.float16 else np.dtype("float64")
    )
    code = onnx.TensorProto.BFLOAT16 if kind is torch.bfloat16 else code
    assert stored["again.weight"].data_type == code
    casts = {n.input[0]: n.output[0] for n in model.graph.node if n.op_type == "Cast"}
    assert casts["again.weight"] == "again.weight/float"
    assert {name for name in casts if name in stored} >= {"conv.weight", "head.weight", "by_hand"}
    assert np.allclose(run(tmp_path / "graph.onnx", *CALL), expected, atol=1e-2)


class Collides(nn.Module):
    """Its parameters are called as torch calls the tensors of a graph."""

    linear: Tensor
    relu: Tensor
    add: Tensor
    val_0: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("linear", "relu", "add", "val_0"):
            self.register_parameter(name, nn.Parameter(torch.randn(8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(nn.functional.linear(x, self.linear)) + x @ self.relu
        z: Tensor = (y @ self.add) + y @ self.val_0
        return z


def test_tensors_that_are_called_like_a_weight_are_renamed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Collides(), torch.randn(3, 8)
    model = graph_of(module, trace(module, bind(module, (x,), {}), ExportOptions()), tmp_path)
    made = [name for node in model.graph.node for name in node.output]
    weights = {tensor.name for tensor in model.graph.initializer}
    assert {"linear", "relu", "add", "val_0"} <= weights
    assert not weights & {*made}
    assert len({*made}) == len(made)
    assert np.allclose(run(tmp_path / "graph.onnx", x), module(x).detach(), atol=1e-5)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = self.again = nn.Linear(8, 8)
        self.layer.weight.grad = torch.ones(8, 8)
        self.register_buffer("halves", torch.ones(3).half())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if float(y.sum()) > 0 else -y


def test_parameters_are_real_again_when_the_trace_fails() -> None:
    module = Fails().train()
    before = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in before.items()}
    with pytest.raises(BadInputError, match="torch cannot export Fails") as caught:
        trace(module, bind(module, (torch.randn(2, 8),), {}), ExportOptions())
    assert "depends on values" in (caught.value.hint or "")
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert after["halves"].dtype is torch.float16
    assert module.layer.weight.grad is not None
    assert module.training


def test_a_missing_and_a_misshapen_weight_are_refused_by_name(tmp_path: Path) -> None:
    module = net()
    for change, said in (
        (None, r"the model needs again\.bias of shape \[8\], and its files have no tensor"),
        (torch.ones(3), r"needs again\.bias of shape \[8\], and its files have a \[3\] tensor"),
    ):
        state = dict(module.state_dict())
        del state["again.bias"]
        store = tmp_path / "s.safetensors"
        save_tensors(state if change is None else state | {"again.bias": change}, store)
        traced = trace(module, bind(module, CALL, {}), ExportOptions())
        with pytest.raises(BadInputError, match=said) as caught:
            write_graph(traced, read_stores([store]), tmp_path / "graph.onnx")
        assert "config.json and the weights" in (caught.value.hint or "")

from __future__ import annotations

import getpass
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from support.export_nets import REDUCTION_AXIS, Exported, example, kinds
from support.exporting import export_onnx
from support.onnx_models import load
from support.ort import outputs
from torch import Tensor, nn

from twofour.export import ir_models
from twofour.export.agreement import agreement
from twofour.export.calls import bind, input_arrays, reference_outputs
from twofour.export.passes import GraphExport
from twofour.export.tracing import trace, write_graph
from twofour.graph.opened import widen
from twofour.graph.stored import read_stores
from twofour.pipeline.torch.weight_files import save_tensors
from twofour.records.options import ExportOptions, Precision

ELEMENT_TYPES = {
    Precision.FLOAT32: TensorProto.FLOAT,
    Precision.FLOAT16: TensorProto.FLOAT16,
    Precision.BFLOAT16: TensorProto.BFLOAT16,
}


def weights(exported: Exported) -> dict[str, NDArray[np.generic]]:
    """The array of each parameter, as it lies in the file."""
    stored = {t.name: numpy_helper.to_array(t) for t in exported.model.graph.initializer}
    return {row.parameter: stored[row.initializer] for row in exported.layers.layers}


def test_the_file_computes_what_the_module_computes_at_another_batch_size(
    exported: Exported,
) -> None:
    model = load(exported.path)
    if exported.precision is Precision.BFLOAT16:  # no kernels for it on the CPU
        widen(model)
    arrays = input_arrays(bind(kinds(), example(3), {}))
    feeds = dict(zip(["image", "ids"], arrays, strict=True))
    reference = reference_outputs(kinds(), bind(kinds(), example(3), {}))
    wanted = dict(zip(("small", "large"), reference, strict=True))
    rows = agreement(wanted, outputs(model, feeds), bounds=exported.precision)
    assert [(row.shape, row.within) for row in rows] == [((3, 5, 40), True), ((3, 5, 300), True)]
    assert min(row.row_cosine_min for row in rows) > 0.9999


def test_inputs_and_outputs_are_float32_in_every_precision_and_named(exported: Exported) -> None:
    graph = exported.model.graph
    described = {
        value.name: (
            value.type.tensor_type.elem_type,
            [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim],
        )
        for value in (*graph.input, *graph.output)
    }
    assert described == {
        "image": (TensorProto.FLOAT, ["batch", 8, 6, 6]),
        "ids": (TensorProto.INT64, ["batch", 5]),
        "small": (TensorProto.FLOAT, ["batch", 5, 40]),
        "large": (TensorProto.FLOAT, ["batch", 5, 300]),
    }


def test_every_floating_point_constant_has_the_precision_of_the_export(exported: Exported) -> None:
    floats = set(ELEMENT_TYPES.values())
    types = {t.data_type for t in exported.model.graph.initializer} & floats
    assert types == {ELEMENT_TYPES[exported.precision]}


def test_the_pattern_of_every_weight_is_in_the_file_zero_for_zero(exported: Exported) -> None:
    stored = weights(exported)
    assert stored.keys() == REDUCTION_AXIS.keys()
    for name, array in stored.items():
        parameter = kinds().get_parameter(name).detach().numpy()
        ours = array if array.shape == parameter.shape else array.T
        np.testing.assert_array_equal(ours == 0, parameter == 0, err_msg=name)
        assert (parameter == 0).mean() == 0.5, name


def test_a_folded_batch_norm_is_rounded_once(exported: Exported) -> None:
    net = kinds()
    assert isinstance(net.bn.running_var, Tensor)
    scale = net.bn.weight / torch.sqrt(net.bn.running_var + net.bn.eps)
    weight = net.conv.weight
    ours = weights(exported)["conv.weight"].astype(np.float32)
    # one rounding of the weight and one of the product, half a step each
    step = torch.finfo(getattr(torch, exported.precision.value)).eps
    tolerance = max(step, 4 * torch.finfo(torch.float32).eps)
    np.testing.assert_allclose(
        ours, (weight * scale[:, None, None, None]).detach().numpy(), rtol=tolerance, atol=1e-7
    )


def test_no_path_of_this_machine_is_in_the_files(exported: Exported) -> None:
    content = exported.path.read_bytes()
    places = [Path.cwd(), Path(__file__).parent, Path(torch.__file__).parent, exported.path.parent]
    for text in (*map(str, places), "stack_trace", ".py", getpass.getuser() + "/"):
        assert text.encode() not in content, text


@pytest.mark.parametrize("most", [ir_models.MOST_INSIDE_BYTES, 0])
def test_weights_lie_in_a_second_file_only_where_the_first_cannot_hold_them(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, data = tmp_path / "net.onnx", tmp_path / "net.onnx.data"
    data.write_bytes(b"of an earlier model")
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).eval()
    x = torch.randn(2, 64)
    monkeypatch.setattr(ir_models, "MOST_INSIDE_BYTES", most)
    export_onnx(net, (x,), {}, target, ExportOptions())
    model = onnx.load(target, load_external_data=False)
    external = [t for t in model.graph.initializer if t.data_location == t.EXTERNAL]
    assert (len(external), data.exists()) == ((0, False) if most else (3, True))
    copied = Path(shutil.copy(target, tmp_path / "alone.onnx"))
    session = onnxruntime.InferenceSession(copied, providers=["CPUExecutionProvider"])
    assert np.allclose(session.run(None, {"input": x.numpy()})[0], net(x).detach(), atol=1e-5)


def test_a_static_batch_keeps_its_number(tmp_path: Path) -> None:
    target = tmp_path / "static.onnx"
    options = ExportOptions(dynamic_batch=False, opset=18)
    export_onnx(nn.Linear(8, 4), (torch.randn(1, 8),), {}, target, options)
    model = onnx.load(target)
    shape = model.graph.input[0].type.tensor_type.shape
    assert [d.dim_value for d in shape.dim] == [1, 8]
    assert [o.version for o in model.opset_import if o.domain == ""] == [18]


def test_one_trace_gives_the_file_of_other_weights_that_a_trace_of_its_own_would(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 4, 1), torch.randn(2, 3, 5, 5)
    module = nn.Sequential(conv, nn.BatchNorm2d(4)).eval()
    options = ExportOptions(precision=Precision.FLOAT16)
    traced, dense, pruned = (tmp_path / n for n in ("graph.onnx", "dense.st", "pruned.st"))
    graph = trace(module, bind(module, (x,), {}), options)
    save_tensors(module.state_dict(), dense)
    write_graph(graph, read_stores([dense]), traced)
    with torch.no_grad():
        conv.weight[:, :2] = 0
    save_tensors(module.state_dict(), pruned)
    proto = onnx.load(traced, load_external_data=False)
    export = GraphExport(proto, options)
    export.write(read_stores([dense]), tmp_path / "dense.onnx")
    export.write(read_stores([pruned]), tmp_path / "again.onnx")
    export_onnx(module, (x,), {}, tmp_path / "alone.onnx", options)
    again, alone = (onnx.load(tmp_path / f"{name}.onnx") for name in ("again", "alone"))
    assert again == alone

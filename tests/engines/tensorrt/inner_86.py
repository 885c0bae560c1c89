"""What is different on TensorRT 8.6, against its real bindings; run by test_engine_tensorrt.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import polygraphy.cuda.cuda
import pytest
import tensorrt as trt
from onnx import TensorProto, helper, numpy_helper
from support.fake_cudart import fake_cudart
from support.trt_fakes import FakeBuild, TimedCuda, request_for, spec

from twofour.engines.protocol import ProgressCallback, no_progress
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.engines.tensorrt.plan import GRAPH
from twofour.errors import BadInputError, BuildFailedError
from twofour.jobs import run_build
from twofour.records.export import VariantBuild
from twofour.records.options import AllowedType, RunOptions
from twofour.workers.host import EngineHost, EngineWorker


class HostHere(EngineHost):
    """The commands of the worker in this process, where the fakes are."""

    _worker: EngineWorker | None = None

    def call(self, command: str, *arguments: object, report: ProgressCallback = no_progress) -> Any:
        self._worker = self._worker or EngineWorker(report)
        return getattr(self._worker, command)(*arguments)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeBuild:
    monkeypatch.setattr("twofour.jobs.EngineHost", HostHere)
    fake = FakeBuild(monkeypatch)
    monkeypatch.setattr(polygraphy.cuda.cuda, "G_CUDA", TimedCuda(fake_cudart(tmp_path)))
    return fake


def model(
    weight: npt.NDArray[np.generic], *, quantized: bool = False, opset: int = 17
) -> onnx.ModelProto:
    kind = helper.np_dtype_to_tensor_dtype(weight.dtype)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    constants = [numpy_helper.from_array(weight, "w")]
    if quantized:
        kind = TensorProto.FLOAT
        constants = [
            numpy_helper.from_array(np.zeros((16, 16), np.int8), "q"),
            numpy_helper.from_array(np.float32(0.1), "scale"),
        ]
        nodes.insert(0, helper.make_node("DequantizeLinear", ["q", "scale"], ["w"]))
    tensors = [helper.make_tensor_value_info(name, kind, ["n", 16]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", tensors[:1], tensors[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def build(
    folder: Path, proto: onnx.ModelProto, allow: tuple[AllowedType, ...] = ()
) -> VariantBuild:
    request = request_for(folder, allow=allow)
    onnx.save(proto, request.onnx)
    return TensorRtEngine().build(request, no_progress)


@pytest.mark.parametrize(
    ("kind", "allow", "flags"),
    [
        (np.float32, (), set()),
        (np.float32, (AllowedType.FP16,), {trt.BuilderFlag.FP16}),
        (np.float16, (), {trt.BuilderFlag.FP16}),
    ],
)
def test_types_of_kernels_are_flags_which_log_and_progress_name(
    tmp_path: Path,
    fake: FakeBuild,
    kind: type[np.generic],
    allow: tuple[AllowedType, ...],
    flags: set[Any],
) -> None:
    shown: list[str] = []
    request = request_for(tmp_path, allow=allow)
    onnx.save(model(np.ones((16, 16), kind)), request.onnx)
    result = TensorRtEngine().build(request, lambda text, _done, _total: shown.append(text))
    assert fake.flags == {trt.BuilderFlag.TF32, trt.BuilderFlag.SPARSE_WEIGHTS, *flags}
    assert fake.network_flags == 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    assert result.error is None
    log = (tmp_path / "sparse.log").read_text()
    assert ("[I] Precision: FP32+FP16" in log) is bool(flags)
    assert any("FP32 and FP16" in text for text in shown) is bool(flags)


def test_bf16_is_refused_where_there_is_none(tmp_path: Path, fake: FakeBuild) -> None:
    assert fake.plan is not None
    with pytest.raises(BadInputError, match="has no BF16"):
        build(tmp_path, model(np.ones((16, 16), np.float32)), allow=(AllowedType.BF16,))


def test_a_model_with_dequantize_nodes_sets_the_int8_flag(tmp_path: Path, fake: FakeBuild) -> None:
    fake.network.__getitem__.side_effect = [
        SimpleNamespace(type=trt.LayerType.DEQUANTIZE, precision_is_set=False, name="dq"),
        IndexError,
        SimpleNamespace(type=trt.LayerType.DEQUANTIZE, precision_is_set=False, name="dq"),
        IndexError,
    ]
    build(tmp_path, model(np.ones((16, 16), np.float32), quantized=True))
    assert trt.BuilderFlag.INT8 in fake.flags
    assert trt.BuilderFlag.FP16 not in fake.flags


def test_a_bfloat16_model_fails_with_what_to_do(tmp_path: Path, fake: FakeBuild) -> None:
    assert fake.plan is not None
    with pytest.raises(BuildFailedError, match=r"8\.6\.1 has no bfloat16") as failure:
        build(tmp_path, model(np.ones((16, 16), ml_dtypes.bfloat16)))
    assert "--precision float16" in (failure.value.hint or "")


def test_a_parser_error_is_told_by_the_index_of_its_node(tmp_path: Path, fake: FakeBuild) -> None:
    fake.parser.parse_from_file.return_value = False
    fake.parser.num_errors = 1
    error = spec("ParserError")
    error.desc.return_value, error.node.return_value = "bad", 3
    fake.parser.get_error.return_value = error
    with pytest.raises(BuildFailedError, match="node 3: bad"):
        build(tmp_path, model(np.ones((16, 16), np.float32)))


@pytest.mark.parametrize(("opset", "told"), [(17, False), (18, True)])
def test_a_file_that_86_cannot_parse_is_asked_for_in_an_opset_that_it_reads(
    opset: int, told: bool, tmp_path: Path, fake: FakeBuild
) -> None:
    fake.parser.parse_from_file.return_value = False
    with pytest.raises(BuildFailedError) as failure:
        build(tmp_path, model(np.ones((16, 16), np.float32), opset=opset))
    assert ("export the torch model with --opset 17" in (failure.value.hint or "")) is told


@pytest.mark.parametrize(("opset", "told"), [(17, False), (18, True)])
@pytest.mark.usefixtures("fake")
def test_a_build_of_an_opset_that_86_does_not_read_is_noted(
    opset: int, told: bool, tmp_path: Path
) -> None:
    onnx.save(model(np.ones((16, 16), np.float32), opset=opset), tmp_path / "model.onnx")
    options = RunOptions(engine="tensorrt")
    _, built = run_build(tmp_path / "model.onnx", tmp_path / "run", options)
    assert built.engine.version == trt.__version__
    assert [(row.name, row.error, len(row.samples_ms) >= 5) for row in built.times.variants] == [
        ("sparse@tensorrt:gpu-sparsity-off", None, True),
        ("sparse@tensorrt:gpu", None, True),
        ("sparse@tensorrt:gpu-sparsity-off again", None, True),
    ]
    for row in built.times.variants:
        assert row.settings is not None
        assert (row.settings.timing, row.enqueue_ms is None) == (GRAPH, False)
    modes = ("tensorrt:gpu-sparsity-off", "tensorrt:gpu")
    assert built.times.options.engines == modes, "compare runs both again"
    assert any("export the torch model with --opset 17" in note for note in built.notes) is told

"""ONNX Runtime as a TimedModel, on the CPU; what needs a GPU is tested up to where it says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support import onnx_models as om

from twofour.engines.machine import find_gpu
from twofour.engines.onnxruntime.engine import (
    MODES,
    OnnxRuntimeEngine,
    OrtTimedModel,
    bind_on,
    node_times,
    nodes_left,
    provider_setup,
    run_bound,
)
from twofour.engines.onnxruntime.session import (
    CPU,
    CUDA,
    TENSORRT,
    TIMING,
    CannotRunError,
    OrtSession,
    ProviderSetup,
    nodes_by_provider,
    open_on,
    reason_in,
    session_options,
)
from twofour.engines.protocol import OpenRequest
from twofour.errors import BadInputError, BuildFailedError, MissingToolError
from twofour.records.export import LayerTime, TensorShape
from twofour.records.options import ShapeProfile

counts_nodes = pytest.mark.skipif(
    not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"),
    reason="ONNX Runtime before 1.24 does not say which provider runs a node",
)
no_gpu = pytest.mark.skipif(find_gpu() is not None, reason="there is a GPU, so CUDA may load")
NAMES = tuple(mode.name for mode in MODES)
WEIGHT = (np.arange(256).reshape(16, 16) % 7 - 3).astype(np.float32)
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
Y = np.maximum(X @ WEIGHT, 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["hidden"], name="fc"),
        helper.make_node("Relu", ["hidden"], ["y"], name="act"),
    ]
    made = om.model(nodes, {"w": WEIGHT}, inputs={"x": ["batch", 16]}, opset=17)
    return om.save(made, tmp_path / "model.onnx")


def opened(model: Path, mode: str = "cpu") -> OrtTimedModel:
    request = OpenRequest(
        mode=mode, weights="dense", threads=1, model=str(model), precision="float32", file=model
    )
    return OnnxRuntimeEngine().open(request)


def test_the_settings_say_all_that_the_session_was_told(model: Path) -> None:
    settings = opened(model).settings
    assert (settings.engine, settings.mode, settings.device) == ("onnxruntime", "cpu", "CPU")
    assert (settings.weights, settings.precision, settings.threads) == ("dense", "float32", 1)
    assert settings.version == onnxruntime.__version__
    assert settings.model == str(model)
    assert settings.timing == TIMING
    assert settings.sparse_kernels is None
    assert settings.options == ("session.force_spinning_stop=1",)


def test_the_session_itself_has_the_threads_and_the_spinning_entry(model: Path) -> None:
    session = open_on(provider_setup("cpu", "float32", ()), model, session_options(threads=2))
    options = session.get_session_options()
    assert options.intra_op_num_threads == 2
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"


def test_a_prepared_model_runs_and_answers(model: Path) -> None:
    timed = opened(model)
    timed.prepare({"x": X})
    samples = [timed.run_ms() for _ in range(5)]
    assert all(0 < sample < 1000 for sample in samples)
    np.testing.assert_allclose(timed.outputs({"x": X[:1]})["y"], Y[:1], rtol=1e-5)
    assert timed.inputs == (TensorShape(name="x", dtype="float32", shape=("batch", 16)),)
    assert timed.peak_device_memory_bytes() is None


def test_the_size_is_that_of_the_file_and_its_external_data(model: Path, tmp_path: Path) -> None:
    assert opened(model).size_bytes == model.stat().st_size
    whole = onnx.load(model)
    apart = tmp_path / "apart.onnx"
    onnx.save(whole, apart, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert opened(apart).size_bytes == apart.stat().st_size + (tmp_path / "w.bin").stat().st_size


def test_a_wrong_shape_and_a_missing_file_are_bad_input(model: Path) -> None:
    with pytest.raises(BadInputError, match="16"):
        opened(model).prepare({"x": np.ones((2, 8), np.float32)})
    with pytest.raises(BadInputError, match="no such file"):
        opened(model.with_name("none.onnx"))


def test_a_model_that_fails_while_it_runs_fails_the_build(tmp_path: Path) -> None:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"], name="three")
    made = om.model([node], {"shape": np.array([3, 16])}, inputs={"x": ["batch", 16]}, opset=17)
    with pytest.raises(BuildFailedError, match="failed while running"):
        opened(om.save(made, tmp_path / "model.onnx")).prepare({"x": X})


def test_layers_have_their_mean_times_over_all_runs_but_the_first(model: Path) -> None:
    timed = opened(model)
    timed.prepare({"x": X})
    layers = timed.layer_times(4)
    assert [layer.name for layer in layers] == ["fc", "act"]
    assert all(0 < layer.mean_ms < 100 for layer in layers)


def test_a_binding_leaves_the_outputs_on_the_device_and_runs_again(model: Path) -> None:
    with OrtSession(model, threads=1) as loaded:
        binding = bind_on(loaded, {"x": X}, "cpu")
        for _ in range(2):
            run_bound(loaded.session, binding)
        np.testing.assert_allclose(binding.copy_outputs_to_cpu()[0], Y, rtol=1e-5)


@no_gpu
@pytest.mark.parametrize("mode", ["cuda", "tensorrt", "tensorrt-sparse"])
def test_a_provider_that_falls_back_is_a_missing_tool_and_never_timed(
    model: Path, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = CUDA if mode == "cuda" else TENSORRT
    with pytest.raises(MissingToolError, match=f"cannot use {wanted}: no NVIDIA GPU") as failure:
        opened(model, mode)
    if wanted in onnxruntime.get_available_providers():
        # a library that is missing or, where torch brought them all, the driver
        assert ".so" in failure.value.message or "CUDA failure" in failure.value.message
    assert "NVIDIA" in (failure.value.hint or "")
    assert capfd.readouterr() == ("", "")


@no_gpu
def test_every_mode_has_a_status_that_was_tried(capfd: pytest.CaptureFixture[str]) -> None:
    statuses = {mode: OnnxRuntimeEngine().status(mode) for mode in NAMES}
    can_run = [mode for mode, status in statuses.items() if status.can_run]
    assert can_run == ["cpu", "int8", "uint8"]
    assert can_run == [mode for mode, status in statuses.items() if status.why_not is None]
    assert all(statuses[mode].version and statuses[mode].device for mode in can_run)
    assert all(status.hint for status in statuses.values() if status.why_not)
    assert capfd.readouterr() == ("", "")


def test_without_onnxruntime_no_mode_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for status in map(OnnxRuntimeEngine().status, NAMES):
        assert "onnxruntime cannot be imported" in (status.why_not or "")
        assert "pip install onnxruntime" in (status.hint or "")


def test_the_modes_on_tensorrt_differ_in_the_sparsity_flag_alone() -> None:
    shapes = (ShapeProfile(input="x", min=(1, 16), opt=(8, 16), max=(32, 16)),)
    dense = provider_setup("tensorrt", "int8+float16", shapes)
    sparse = provider_setup("tensorrt-sparse", "int8+float16", shapes)
    assert dense.wanted == TENSORRT
    assert [name for name, _ in dense.providers] == [TENSORRT, CUDA, CPU]
    expected = {
        "trt_sparsity_enable": "0",
        "trt_int8_enable": "1",
        "trt_fp16_enable": "1",
        "trt_profile_min_shapes": "x:1x16",
        "trt_profile_opt_shapes": "x:8x16",
        "trt_profile_max_shapes": "x:32x16",
    }
    assert dense.providers[0][1] == expected
    assert sparse.providers[0][1] == {**expected, "trt_sparsity_enable": "1"}
    assert dense.config == sparse.config


@counts_nodes
def test_nodes_are_counted_by_the_provider_that_runs_them(model: Path) -> None:
    setup = ProviderSetup(config={"session.record_ep_graph_assignment_info": "1"})
    session = open_on(setup, model, session_options(threads=1))
    assert nodes_by_provider(session) == {CPU: 2}
    assert nodes_by_provider(object()) is None


@counts_nodes
def test_a_provider_that_takes_no_node_fails_and_what_it_leaves_is_told(model: Path) -> None:
    recording = {"session.record_ep_graph_assignment_info": "1"}
    with OrtSession(model, threads=1, providers=ProviderSetup(config=recording)) as loaded:
        with pytest.raises(BuildFailedError, match=r"runs no node of .*: all are left to CPU"):
            nodes_left(loaded, ProviderSetup(providers=((CUDA, {}), (CPU, {}))))
        assert nodes_left(loaded, ProviderSetup()) == ()


@pytest.mark.parametrize(
    ("logged", "reason"),
    [
        (
            "\x1b[1;31m2026-11-21 12:53:13.5 [E:onnxruntime:Default, provider_bridge_ort.cc:2458"
            " operator()] FAIL : Failed to load library /x.so with error: libcublasLt.so.13: cannot"
            " open shared object file: No such file or directory\n\x1b[m\n",
            "libcublasLt.so.13: cannot open shared object file: No such file or directory",
        ),
        ("\x1b[0;93m2026-11-21 12:53:13.5 [W:onnxruntime:Default, a.cc:1 f] No.\x1b[m\n", "No."),
        ("", None),
    ],
)
def test_the_reason_is_the_missing_library_or_the_first_line(
    logged: str, reason: str | None
) -> None:
    assert reason_in(logged) == reason


def test_profiling_events_are_averaged_over_the_runs_after_the_first() -> None:
    events = [
        {"cat": "Session", "name": "model_loading", "dur": 9000},
        {"cat": "Node", "name": "a_kernel_time", "dur": 90000},
        {"cat": "Session", "name": "model_run", "dur": 3605},
        {"cat": "Node", "name": "a_kernel_time", "dur": 1000},
        {"cat": "Node", "name": "a_fence_before", "dur": 5000},
        {"cat": "Node", "name": "b_kernel_time", "dur": 400},
        {"cat": "Node", "name": "a_kernel_time", "dur": 3000},
    ]
    assert node_times(json.dumps(events), 2) == (
        LayerTime(name="a", mean_ms=2.0),
        LayerTime(name="b", mean_ms=0.2),
    )


# --- the session ----------------------------------------------------------------------------------


def save(path: Path, kind: npt.DTypeLike) -> Path:
    end = ("batch", 16)
    return om.one_layer(path, "MatMul", WEIGHT.astype(kind), (end, end))


def write(path: Path, node: onnx.NodeProto, input_type: int, output_type: int) -> Path:
    x = helper.make_tensor_value_info("x", input_type, ["batch", 16])
    y = helper.make_tensor_value_info("y", output_type, ["batch", 16])
    graph = helper.make_graph([node], "g", [x], [y])
    opset = helper.make_opsetid("", 17)
    return om.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)


def test_float32_examples_feed_a_float16_model(tmp_path: Path) -> None:
    y = OrtSession(save(tmp_path / "half.onnx", np.float16)).outputs({"x": X})["y"]
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, X @ WEIGHT, atol=2e-2)


def test_a_model_without_kernels_here_cannot_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "bf16.onnx", ml_dtypes.bfloat16)
    with pytest.raises(CannotRunError, match="an implementation for MatMul"):
        OrtSession(path)
    assert capfd.readouterr() == ("", "")


def test_bfloat16_goes_in_and_comes_out_where_kernels_are(tmp_path: Path) -> None:
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)
    down = write(tmp_path / "down.onnx", cast, TensorProto.FLOAT, TensorProto.BFLOAT16)
    narrow = OrtSession(down).outputs({"x": X})["y"]
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow, X.astype(ml_dtypes.bfloat16))
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    up = write(tmp_path / "up.onnx", cast, TensorProto.BFLOAT16, TensorProto.FLOAT)
    wide = OrtSession(up).outputs({"x": narrow})["y"]
    np.testing.assert_array_equal(wide, narrow.astype(np.float32))


def test_a_model_that_is_invalid_fails_the_build(tmp_path: Path) -> None:
    node = helper.make_node("Nope", ["x"], ["y"], name="bad")
    path = om.save(om.model([node], {}, inputs={"x": [2, 16]}), tmp_path / "bad.onnx")
    with pytest.raises(BuildFailedError, match=r"cannot load .*bad\.onnx.*Nope") as failure:
        OrtSession(path)
    assert not isinstance(failure.value, CannotRunError)

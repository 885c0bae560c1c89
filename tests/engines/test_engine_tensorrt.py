"""The parts of the TensorRT engine that need no TensorRT; the others against real bindings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from support import onnx_models as om
from support.real_bindings import run_inner

from twofour.engines.tensorrt.bindings import (
    opset_advice,
    opset_for,
    precisions_of,
    tensorrt_status,
)
from twofour.engines.tensorrt.plan import ProfilerTimes, cuda_runtime_folders


@pytest.fixture
def no_tensorrt(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    return monkeypatch


def put_tensorrt(folder: Path, patch: pytest.MonkeyPatch, source: str) -> None:
    (folder / "tensorrt.py").write_text(source)
    patch.delitem(sys.modules, "tensorrt", raising=False)
    patch.syspath_prepend(folder)


def test_a_missing_library_is_named(tmp_path: Path, no_tensorrt: pytest.MonkeyPatch) -> None:
    text = "libnvonnxparser.so.11: cannot open shared object file: No such file or directory"
    put_tensorrt(tmp_path, no_tensorrt, f"raise ImportError({text!r})")
    assert "libnvonnxparser.so.11 is missing" in (tensorrt_status().why_not or "")


def test_a_package_that_is_too_old_is_named_with_its_version(
    tmp_path: Path, no_tensorrt: pytest.MonkeyPatch
) -> None:
    put_tensorrt(tmp_path, no_tensorrt, "__version__ = '8.5.3.1'\nBuilder = object\n")
    status = tensorrt_status()
    assert status.version == "8.5.3.1"
    assert status.why_not == "version 8.5.3.1 is older than 8.6"


def test_a_folder_named_tensorrt_is_not_taken_for_it(
    tmp_path: Path, no_tensorrt: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt").mkdir()
    no_tensorrt.delitem(sys.modules, "tensorrt", raising=False)
    no_tensorrt.syspath_prepend(tmp_path)
    why_not = tensorrt_status().why_not or ""
    assert why_not.startswith(str(tmp_path / "tensorrt"))


def test_a_layer_profile_counts_runs_not_reports() -> None:
    profile = ProfilerTimes(times_ms={"fc": [1.0, 2.0, 3.0, 4.0]}, runs=2)
    (layer,) = profile.layers()
    assert (layer.name, layer.mean_ms) == ("fc", 5.0)
    assert '"medianMs": 2.5' in profile.to_json()


def test_folders_of_cuda_runtime_wheels_are_found(tmp_path: Path) -> None:
    for folder in ("cu13", "cuda_runtime"):
        (tmp_path / "nvidia" / folder / "lib").mkdir(parents=True)
        (tmp_path / "nvidia" / folder / "lib" / "libcudart.so.13").touch()
    (tmp_path / "nvidia" / "cublas" / "lib").mkdir(parents=True)
    found = cuda_runtime_folders([str(tmp_path), "", os.devnull])
    assert [folder.parent.name for folder in found] == ["cu13", "cuda_runtime"]


@pytest.mark.parametrize("version", ["8.6.0", "8.x from 8.6 on", "9.3.0"])
def test_before_10_a_newer_opset_is_warned_of(version: str) -> None:
    advice = opset_advice(version, 18)
    assert advice is not None
    assert advice.startswith(f"TensorRT {version} reads opset 17")
    assert advice.endswith("--opset 17")


@pytest.mark.parametrize(
    ("version", "opset"), [("8.6.1", 17), ("10.0.1", 20), ("11.x", 25), (None, 25), ("", 25)]
)
def test_nothing_is_said_where_nothing_is_known_to_be_wrong(
    version: str | None, opset: int
) -> None:
    assert opset_advice(version, opset) is None


@pytest.mark.parametrize(
    ("version", "opset"), [("8.6.1", 17), ("9.3.0", 17), ("10.0.1", None), (None, None)]
)
def test_the_opset_to_export_in_is_one_that_the_version_reads(
    version: str | None, opset: int | None
) -> None:
    assert opset_for(version) == opset


def test_the_type_that_a_cast_makes_is_one_of_the_model() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["h"], ["y"], to=TensorProto.FLOAT),
    ]
    assert precisions_of(om.model(nodes, {}, inputs={"x": [2, 8]})).in_words == "float16"


HERE = Path(__file__).parent / "tensorrt"
ALL = (HERE / "inner_build.py", HERE / "inner_timed.py")


# --- real bindings, each version in a process of its own ------------------------------------------


@pytest.mark.parametrize("major", ["trt10", pytest.param("trt11", marks=pytest.mark.full)])
def test_the_engine_holds_against_the_real_bindings(major: str) -> None:
    assert run_inner(major, *ALL, HERE / "inner_typed.py") >= 40


@pytest.mark.full
def test_the_engine_holds_against_the_real_bindings_of_86() -> None:
    assert run_inner("trt8", *ALL, HERE / "inner_86.py") >= 40

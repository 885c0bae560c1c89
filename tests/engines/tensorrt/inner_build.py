"""The build against real TensorRT bindings over stand-ins; run by test_engine_tensorrt.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tensorrt as trt
from support.log_lines import parse_lines
from support.trt_fakes import PLAN, FakeBuild, request_for

from twofour.engines.protocol import no_progress
from twofour.engines.tensorrt.bindings import tensorrt_status
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.errors import BuildFailedError, MissingToolError
from twofour.inputs.examples import parse_shapes
from twofour.records.export import Gpu
from twofour.records.log import SparsityFlag


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    return FakeBuild(monkeypatch)


def test_without_a_gpu_status_and_build_say_so_in_the_bindings_own_words(tmp_path: Path) -> None:
    status = tensorrt_status()
    assert status.version == trt.__version__
    assert not status.can_run
    assert "factory function returned nullptr" in (status.why_not or "")
    assert "no NVIDIA GPU" in (status.why_not or "")
    with pytest.raises(MissingToolError, match="nullptr"):
        TensorRtEngine().build(request_for(tmp_path), no_progress)


@pytest.mark.parametrize("severity", ["ERROR", "WARNING"])  # a warning in 8.6
def test_the_status_quotes_the_cuda_failure_that_tensorrt_logs(
    monkeypatch: pytest.MonkeyPatch, severity: str
) -> None:
    def without_gpu(logger: Any) -> Any:
        logger.log(trt.ILogger.WARNING, "Unable to determine GPU memory usage")
        level = getattr(trt.ILogger, severity)
        logger.log(level, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(trt, "Builder", without_gpu)
    assert "with error: 35" in (tensorrt_status().why_not or "")


@pytest.mark.usefixtures("build")
def test_a_build_leaves_plan_layers_and_profile(tmp_path: Path) -> None:
    result = TensorRtEngine().build(request_for(tmp_path), no_progress)
    assert (tmp_path / "sparse.plan").read_bytes() == PLAN
    assert result.size_bytes == len(PLAN)
    assert (result.plan, result.log) == ("sparse.plan", "sparse.log")
    layers = json.loads((tmp_path / "sparse.layers.json").read_text())
    assert layers["Layers"][0]["TacticName"] == "sm80_xmma_sparse_gemm"
    count, first, second = json.loads((tmp_path / "sparse.profile.json").read_text())
    assert count == {"count": 10}
    assert (first["name"], first["averageMs"], first["medianMs"]) == ("fc", 0.5, 0.5)
    assert first["percentage"] == pytest.approx(200 / 3)
    assert second["timeMs"] == pytest.approx(2.5)
    assert result.error is None
    assert not list(tmp_path.glob("*.lock")), "no lock file is left beside the timing cache"


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_weights_are_allowed_for_the_sparse_variant_alone(
    tmp_path: Path, build: FakeBuild, sparse: bool
) -> None:
    result = TensorRtEngine().build(request_for(tmp_path, sparse=sparse), no_progress)
    assert result.sparse_weights is sparse
    others = {trt.BuilderFlag.SPARSE_WEIGHTS} if sparse else set()
    assert build.flags == {trt.BuilderFlag.TF32, *others}
    log = (tmp_path / f"{result.variant}.log").read_text()
    assert f"] [I] Sparsity: {'Enabled' if sparse else 'Disabled'}\n" in log


def test_the_options_reach_the_builder_configuration(tmp_path: Path, build: FakeBuild) -> None:
    request = request_for(tmp_path, tf32=False, workspace_bytes=1 << 30, optimization_level=4)
    TensorRtEngine().build(request, no_progress)
    assert trt.BuilderFlag.TF32 not in build.flags
    assert build.pools == {trt.MemoryPoolType.WORKSPACE: 1 << 30}
    assert build.config.builder_optimization_level == 4
    assert build.config.profiling_verbosity == trt.ProfilingVerbosity.DETAILED


@pytest.mark.parametrize(
    ("asked", "batches"), [([], (1, 8, 8)), (["x=2x16:4x16:32x16"], (2, 4, 32))]
)
def test_asked_shapes_become_the_profile_and_runs_are_timed_at_opt(
    tmp_path: Path, build: FakeBuild, asked: list[str], batches: tuple[int, ...]
) -> None:
    TensorRtEngine().build(request_for(tmp_path, shapes=parse_shapes(asked)), no_progress)
    assert build.shapes == {"x": tuple((size, 16) for size in batches)}
    assert build.run.shape == (batches[1], 16)


def test_a_profile_that_tensorrt_refuses_fails_the_build(tmp_path: Path, build: FakeBuild) -> None:
    build.config.add_optimization_profile.side_effect = lambda _: -1
    with pytest.raises(BuildFailedError, match="refuses the shapes"):
        TensorRtEngine().build(request_for(tmp_path), no_progress)


def test_a_build_takes_the_timing_cache_that_is_there_and_leaves_its_own(
    tmp_path: Path, build: FakeBuild
) -> None:
    (tmp_path / "timing.cache").write_bytes(b"of another build")
    TensorRtEngine().build(request_for(tmp_path), no_progress)
    assert build.caches[0] == b"of another build"
    assert (tmp_path / "timing.cache").read_bytes() == b"timings"


@pytest.mark.parametrize("broken", ["context", "enqueue"])
def test_a_plan_that_cannot_run_is_kept_and_says_why(
    tmp_path: Path, build: FakeBuild, broken: str
) -> None:
    if broken == "context":
        build.run.engine.create_execution_context.side_effect = lambda *_: None
    else:
        build.run.can_run = False
    result = TensorRtEngine().build(request_for(tmp_path), no_progress)
    assert (tmp_path / "sparse.plan").read_bytes() == PLAN
    assert "TensorRT" in (result.error or "")
    assert (result.layers, result.profile) == (None, None)
    assert "sparse.plan" in (tmp_path / "sparse.log").read_text()


def test_the_log_holds_all_five_severities_in_tensorrts_own_format(
    tmp_path: Path, build: FakeBuild, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"]
    build.messages = [(name, f"message {name}\nsecond line") for name in names]
    TensorRtEngine().build(request_for(tmp_path), no_progress)
    log = (tmp_path / "sparse.log").read_text()
    found = re.findall(
        r"^\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] \[TRT\] \[(.)\] message (\w+)\nsecond line$",
        log,
        re.MULTILINE,
    )
    assert found == list(zip("FEWIV", names, strict=True))
    assert f"with TensorRT {trt.__version__}" in log.splitlines()[0]
    assert capfd.readouterr() == ("", ""), "nothing is printed"


def test_a_build_without_a_plan_fails_with_the_logged_errors(
    tmp_path: Path, build: FakeBuild
) -> None:
    build.plan = None
    build.messages = [("INFO", "fine so far"), ("ERROR", "10: could not find any implementation")]
    with pytest.raises(BuildFailedError, match="10: could not find any implementation") as failure:
        TensorRtEngine().build(request_for(tmp_path), no_progress)
    assert "fine so far" not in str(failure.value)
    assert failure.value.exit_code == 5
    assert not (tmp_path / "sparse.plan").exists()
    assert "[E] 10: could not find" in (tmp_path / "sparse.log").read_text()


def test_the_log_says_version_and_gpu_also_where_tensorrt_is_silent(
    tmp_path: Path, build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(name="NVIDIA H200", compute_capability=(9, 0), memory_bytes=1, driver=None)
    monkeypatch.setattr("twofour.engines.tensorrt.engine.find_gpu", lambda: gpu)
    build.messages = [("INFO", "(Sparsity) Layers eligible for sparse math: fc")]
    TensorRtEngine().build(request_for(tmp_path), no_progress)
    (found,) = parse_lines((tmp_path / "sparse.log").read_text().splitlines())
    assert found.tensorrt_version == ".".join(trt.__version__.split(".")[:3])
    assert (found.gpu, found.compute_capability) == ("NVIDIA H200", (9, 0))
    assert found.sparsity is SparsityFlag.ENABLED
    assert found.eligible == ("fc",)

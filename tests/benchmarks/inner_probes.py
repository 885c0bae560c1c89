"""Two questions of benchmarks/device against real TensorRT bindings: test_device_probes.py."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import polygraphy.cuda.cuda
import pytest
from device import cache, enqueue
from support.comparison_cases import run_folder
from support.fake_cudart import advance, fake_cudart
from support.render_cases import build_result
from support.trt_fakes import PLAN, FakeBuild, FakeRun, TimedCuda, onnx_file

from twofour.store import write_record


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ctypes.CDLL:
    """CUDA behind the plan of a FakeRun, where a run takes 1.5 ms, in a graph 1 ms."""
    library = fake_cudart(tmp_path)
    fake = FakeRun(monkeypatch)
    monkeypatch.setattr(polygraphy.cuda.cuda, "G_CUDA", TimedCuda(library))
    fake.engine.get_tensor_profile_shape.return_value = [(1, 16), (8, 16), (8, 16)]

    def timed(_stream: int) -> bool:
        assert set(fake.address) == {"x", "y"}, "all buffers have fixed addresses"
        advance(library, 1.0 if library.capturing() else 1.5)
        return True

    fake.context.execute_async_v3.side_effect = timed
    return library


def measured(folder: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and rows of two plans, of which the first is missing."""
    plan = folder / "run" / "sparse.plan"
    plan.parent.mkdir()
    plan.write_bytes(PLAN)
    code = enqueue.main([str(folder / "out.json"), str(folder / "run" / "dense.plan"), str(plan)])
    return code, json.loads((folder / "out.json").read_text())


def test_an_enqueue_is_timed_alone_in_a_row_and_as_a_graph(
    tmp_path: Path, library: ctypes.CDLL
) -> None:
    code, rows = measured(tmp_path)
    assert (code, list(rows)) == (0, ["run/dense.plan", "run/sparse.plan"])
    assert "FileNotFoundError" in rows["run/dense.plan"]["error"]
    row = rows["run/sparse.plan"]
    assert row["one_enqueue_ms"] == pytest.approx(1.5)
    assert row["enqueue_in_a_row_ms"] == pytest.approx(1.5)
    assert row["graph_ms"] == row["graph_in_a_row_ms"] == pytest.approx(1.0)
    assert min(row["host_ms"], row["graph_host_ms"]) > 0
    assert library.launches() > 0


def test_the_sparse_build_is_tried_without_a_cache_and_with_a_dense_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = FakeBuild(monkeypatch)
    onnx_file(tmp_path)
    write_record(tmp_path / "build.json", build_result(run_folder()))
    np.savez(tmp_path / "inputs.npz", x=np.ones((8, 16), np.float32))
    (tmp_path / "cache.timings").write_bytes(b"of an earlier call")
    cache.main(tmp_path, tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["builds"]
    assert [(row["build"], row["sparse"], row["cache"], row["error"]) for row in rows] == [
        ("cache-1-sparse", True, False, None),
        ("cache-2-dense", False, True, None),
        ("cache-3-sparse", True, True, None),
        ("cache-4-sparse", True, True, None),
    ]
    # Polygraphy also makes an empty cache, to merge the one it loads into
    assert [content for content in build.caches if content] == [b"timings", b"timings"]
    assert (tmp_path / "cache-1-sparse.log").is_file()

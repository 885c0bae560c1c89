"""Two questions of benchmarks/device against real TensorRT bindings: test_device_probes.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polygraphy.cuda.cuda
import pytest
from device import cache, enqueue
from support.comparison_cases import run_folder
from support.render_cases import build_result
from support.trt_fakes import PLAN, FakeBuild, FakeRun, HostCuda, onnx_file

from twofour.store import write_record


class HostRuntime:
    """CUDA's runtime library with a clock that an enqueue moves on by 1.5 ms, a graph by 1 ms."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.stamps: dict[int, float] = {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def succeed(*_: Any) -> int:
            self.calls.append(name)
            return 0

        return succeed

    def cudaEventCreate(self, event: Any) -> int:  # noqa: N802  # the library's name
        event._obj.value = len(self.stamps) + 1
        self.stamps[event._obj.value] = 0.0
        return 0

    def cudaEventRecord(self, event: Any, _stream: Any) -> int:  # noqa: N802
        self.stamps[event.value] = self.now_ms
        return 0

    def cudaEventElapsedTime(self, elapsed: Any, start: Any, end: Any) -> int:  # noqa: N802
        elapsed._obj.value = self.stamps[end.value] - self.stamps[start.value]
        return 0

    def cudaGraphLaunch(self, _graph: Any, _stream: Any) -> int:  # noqa: N802
        self.now_ms += 1.0
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> HostRuntime:
    """Behind the plan of a FakeRun."""
    library = HostRuntime()
    fake = FakeRun(monkeypatch)
    wrapper: Any = HostCuda()
    wrapper.handle = library
    monkeypatch.setattr(polygraphy.cuda.cuda, "G_CUDA", wrapper)
    fake.engine.get_tensor_profile_shape.return_value = [(1, 16), (8, 16), (8, 16)]

    def timed(_stream: int) -> bool:
        assert set(fake.address) == {"x", "y"}, "all buffers have fixed addresses"
        library.now_ms += 1.5
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
    tmp_path: Path, library: HostRuntime
) -> None:
    code, rows = measured(tmp_path)
    assert (code, list(rows)) == (0, ["run/dense.plan", "run/sparse.plan"])
    assert "FileNotFoundError" in rows["run/dense.plan"]["error"]
    row = rows["run/sparse.plan"]
    assert row["one_enqueue_ms"] == pytest.approx(1.5)
    assert row["enqueue_in_a_row_ms"] == pytest.approx(1.5)
    assert row["graph_ms"] == row["graph_in_a_row_ms"] == pytest.approx(1.0)
    assert min(row["host_ms"], row["graph_host_ms"]) > 0
    assert library.calls.count("cudaGraphInstantiateWithFlags") == 1


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

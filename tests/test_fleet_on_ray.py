"""`fleet` on a Ray cluster of three nodes with made-up kinds, a node and the driver killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import killed_run
from support.mlp_onnx import save_mlp

from twofour.fleet import run_fleet
from twofour.records.options import RunOptions, SideBySide
from twofour.records.run import Fleet
from twofour.store import read_record

ray = pytest.importorskip("ray")
SMALL = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 << 20}
L4, T4 = ({"resources": {f"accelerator_type:{kind}": 1}} for kind in ("L4", "T4"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and two nodes, with accelerators that do not exist."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**SMALL, **T4, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(**SMALL, **L4)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.full
def test_a_driver_that_is_killed_goes_on_with_the_kinds_that_are_left(
    cluster: Any, tmp_path: Path
) -> None:
    model, out = str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "runs" / "mlp"
    command = (sys.executable, killed_run.__file__, model, "", "fleet-L4", cluster.address)
    done = subprocess.run(command, cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    kept = (out / "fleet" / "L4" / "kind.json").stat().st_mtime_ns
    asked = RunOptions(side_by_side=SideBySide(ray=cluster.address), resume=True)
    _, fleet = run_fleet(str(out), asked)
    assert (out / "fleet" / "L4" / "kind.json").stat().st_mtime_ns == kept
    assert [(row.kind, row.error) for row in fleet.kinds] == [("L4", None), ("T4", None)]
    assert read_record(Fleet, out / "fleet.json") == fleet


@pytest.mark.full
def test_a_node_that_is_killed_is_replaced_by_another_of_its_kind(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    killed: list[Any] = []

    def kill_first() -> None:
        deadline = time.monotonic() + 100
        while not killed and time.monotonic() < deadline:
            for node in cluster.worker_nodes:
                raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
                with contextlib.suppress(psutil.Error):  # a process ended meanwhile
                    below = raylet.children(recursive=True)
                    if any("serve_parent" in " ".join(p.cmdline()) for p in below):  # it builds
                        killed.append(node)
                        cluster.remove_node(node, allow_graceful=False)
                        break
            time.sleep(0.02)

    killer = threading.Thread(target=kill_first)
    killer.start()
    options = RunOptions(side_by_side=SideBySide(ray=cluster.address))
    _, fleet = run_fleet(str(save_mlp(tmp_path / "mlp.onnx")), options, compared=True)
    killer.join()
    assert killed
    assert [(row.kind, row.error) for row in fleet.kinds] == [("L4", None), ("T4", None)]
    for row in fleet.kinds:
        assert row.built
        assert row.times
        assert len(row.built.times.ratios) == 1
        assert row.times.options.rounds > row.built.times.options.rounds, "compare times longer"
    assert all(row.report and len(row.report.verdicts) == 4 for row in fleet.kinds)

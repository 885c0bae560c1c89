"""`fleet` with Ray's own calls faked, then on a Ray cluster of three nodes with made-up kinds.

Faked: which node gets a task, and what becomes of each answer. On the cluster: a node and the
driver are killed.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import killed_run
from support.mlp_onnx import save_mlp
from support.small_run import Recorder

from twofour.engines.protocol import no_progress
from twofour.errors import BadInputError, BuildFailedError, MissingToolError
from twofour.fleet import NodeBuilder, refuse_unbuilt, run_fleet
from twofour.jobs import run_all
from twofour.records.export import Gpu
from twofour.records.options import BuildOptions, RunOptions, SideBySide
from twofour.records.run import Fleet, FleetKind
from twofour.records.weights import ReasonCode, Selection
from twofour.reports.fleet_document import fleet_document
from twofour.reports.text import markdown
from twofour.store import read_record

ray = pytest.importorskip("ray")
SENT = ("dense.onnx", "sparse.onnx", "inputs.npz")
ALL = Selection(all_layers=True)  # they are smaller than what is pruned by default
Came = tuple[FleetKind, dict[str, bytes]]
V100 = Gpu(name="NVIDIA V100", compute_capability=(7, 0), memory_bytes=1 << 34, driver=None)
STOPPED = "a process that does not go on"
GONE = ray.exceptions.NodeDiedError("it died")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of the main job."""
    folder = tmp_path_factory.mktemp("fleet")
    model = str(save_mlp(folder / "mlp.onnx"))
    return Path(run_all(model, folder / "run", RunOptions(selection=ALL)).folder)


@pytest.fixture(scope="module")
def came(made: Path) -> Came:
    """What a node without TensorRT sends back."""
    files = {name: (made / name).read_bytes() for name in SENT}
    return NodeBuilder(no_progress).build(0, "T4", files, RunOptions())


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the run folder."""
    return Path(shutil.copytree(made, tmp_path / "run"))


class FakeTask:
    """A task, whose next answer is itself."""

    def __next__(self) -> FakeTask:
        return self


class FakeRay:
    """A cluster whose nodes (name -> kind) answer every task so; one without is not free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: dict[str, str]) -> None:
        self.kinds = nodes
        self.answers: dict[str, object] = {}
        self.begun: list[tuple[str, float]] = []
        self.tasks: dict[object, object] = {}
        for name in ("wait", "get", "nodes"):
            monkeypatch.setattr(ray, name, getattr(self, name))
        monkeypatch.setattr(ray, "init", lambda **_: None)
        monkeypatch.setattr(ray, "put", lambda value: value)
        monkeypatch.setattr(ray, "cancel", lambda _task: None)
        monkeypatch.setattr(ray, "remote", lambda **_: lambda _work: self)

    def nodes(self) -> list[dict[str, Any]]:
        """Meets ray.nodes."""
        return [
            {
                "NodeID": name.encode().hex() * 28,
                "NodeManagerHostname": name,
                "Alive": True,
                "Resources": {"CPU": 4.0, **self._accelerators(kind)},
            }
            for name, kind in self.kinds.items()
        ]

    def _accelerators(self, kind: str) -> dict[str, float]:
        return {} if kind == "CPU" else {"GPU": 2.0, f"accelerator_type:{kind}": 1.0}

    def options(self, scheduling_strategy: Any, num_gpus: float) -> FakeRay:
        """Meets a remote function's options."""
        assert not scheduling_strategy.soft
        self.pinned = chr(int(scheduling_strategy.node_id[:2], 16)), num_gpus
        return self

    def remote(self, *arguments: Any) -> object:
        """Meets a task; without arguments it asks whether a node is free."""
        task, answer = FakeTask(), self.answers.get(self.pinned[0])
        if arguments:
            self.begun.append(self.pinned)
            if isinstance(answer, tuple):  # a row is of the kind that was asked for
                answer = replace(answer[0], kind=arguments[3]), answer[1]
        self.tasks[task] = answer
        return task

    def wait(self, left: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        """Tasks with an answer are ready."""
        ready = [task for task in left if self.tasks[task] is not None]
        return ready, [task for task in left if task not in ready]

    def get(self, task: object) -> object:
        """Meets ray.get."""
        answer = self.tasks[task]
        if answer == STOPPED:  # it has begun, and says no more
            self.tasks[task] = None
            return None
        if isinstance(answer, ray.exceptions.RayError):
            raise answer
        return answer


def test_a_kind_is_built_once_by_the_first_node_that_can_and_the_others_say_why_not(
    folder: Path, came: Came, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"a": "A100", "b": "A100", "c": "L4", "d": "T4", "e": "CPU", "f": "A100"}
    fake = FakeRay(monkeypatch, nodes)
    missing = MissingToolError("no engine", hint="install one")
    fake.answers = {"a": GONE, "b": came, "d": missing}
    found = run_fleet(str(folder), RunOptions(), free_s=0)[1]
    assert [(row.kind, row.built is not None, row.error) for row in found.kinds] == [
        ("A100", True, None),
        ("L4", False, "no node of this kind is free"),
        ("T4", False, "no engine"),
    ]
    assert sorted(fake.begun) == [("a", 1), ("b", 1), ("d", 1)], "e has no GPU"
    assert found.kinds[2].hint == "install one"
    fake.begun.clear()
    fake.answers |= {"c": came, "d": GONE}
    progress = Recorder()
    again = run_fleet(str(folder), RunOptions(resume=True), progress, free_s=0)[1]
    assert sorted(fake.begun) == [("c", 1), ("d", 1)], "those that failed"
    assert progress.did == ["fleet-L4"]
    assert again.kinds[0] == found.kinds[0]
    assert again.kinds[1].built
    assert again.kinds[2].error == (
        "no node of this kind is free; its process ended in its try: NodeDiedError"
    )
    hint = "run the same command with --resume once one is: other kinds are kept"
    assert again.kinds[2].hint == hint
    fake.begun.clear()
    other = RunOptions(build=BuildOptions(warmup=1), resume=True)
    run_fleet(str(folder), other, free_s=0)
    assert len(fake.begun) == 4, "other options are another measurement"
    fake.begun.clear()
    fresh = run_fleet(str(folder), RunOptions(), free_s=0)[1]
    assert len(fake.begun) == 4, "without --resume every kind is measured"
    assert [row.kind for row in fresh.kinds if row.built] == ["A100", "L4"]


def test_the_log_of_a_node_gives_measured_verdicts_beside_predicted_ones(
    folder: Path, came: Came, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay(monkeypatch, {"a": "A100", "b": "T4"})
    log = "\n".join(
        f"[07/07/2026-02:11:09] [V] [TRT] (Sparsity) {text}"
        for text in (
            "Found 2 layer(s) eligible to use sparse tactics: first, robust",
            "Chose 1 layer(s) using sparse tactics: robust",
        )
    )
    files = {"sparse.log": f"[I] TensorRT version: 10.16.1\n{log}\n".encode()}
    fake.answers = {"a": (came[0], files), "b": came}
    found = run_fleet(str(folder), RunOptions())[1]
    a100, t4 = (row.report.verdicts for row in found.kinds if row.report)
    assert [v.verdict.value for v in a100[:2]] == ["eligible", "chosen"]
    assert {v.verdict.value for v in t4} == {"eligible"}
    on_a100, on_t4 = found.kinds
    assert on_t4.forecast is None, "no GPU with sparse kernels is called so"
    assert on_a100.forecast is not None
    assert on_a100.expected is not None
    assert on_a100.expected.low <= on_a100.expected.gain <= on_a100.forecast.gain
    page = (folder / "fleet.md").read_text()
    at_most = f"at most {on_a100.forecast.gain:.2f}"
    assert f"| {on_a100.expected.in_words}<br>{at_most} |" in page
    assert re.search(r"\| 1 of 4 \| [^|]*in onnxruntime:cpu", page)
    assert "| layer | A100 | T4 |" in page
    assert "| `robust` | chosen | eligible (predicted) |" in page
    assert (folder / "fleet/A100/sparse.log").read_bytes() == files["sparse.log"]
    assert "fleet/A100/sparse.log" in (folder / "run.json").read_text()


def test_kinds_that_were_not_built_are_named_although_others_were(
    folder: Path, came: Came, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay(monkeypatch, {"a": "A100", "b": "T4", "c": "L4"})
    assert came[0].built is not None
    times = came[0].built.times
    failed = tuple(replace(v, error="no engine came out") for v in times.variants)
    built = replace(came[0].built, times=replace(times, variants=failed))
    fake.answers = {"a": came, "b": GONE, "c": (replace(came[0], built=built), {})}
    found = run_fleet(str(folder), RunOptions())[1]
    with pytest.raises(BuildFailedError, match="not built on every") as caught:
        refuse_unbuilt(found)
    assert "T4: no node" in caught.value.message
    assert "L4: dense: no" in caught.value.message
    assert "A100" not in caught.value.message


def test_a_worker_that_is_stopped_is_named_after_the_time_of_silence(
    folder: Path, came: Came, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay(monkeypatch, {"a": "A100", "b": "T4"})
    fake.answers = {"a": came, "b": STOPPED}
    monkeypatch.setenv("TWOFOUR_WORKER_SILENCE_S", "0.1")
    found = run_fleet(str(folder), RunOptions())[1]
    a100, t4 = found.kinds
    assert a100.built
    assert (t4.error or "").endswith("its process ended in its try: no sign of life for 0 s")


def test_a_cluster_without_a_gpu_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch, {"a": "CPU"})
    with pytest.raises(BadInputError, match="no node of the"):
        run_fleet(str(folder), RunOptions())


def test_a_run_folder_is_measured_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch, {})
    with (folder / "sparse.onnx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(BadInputError, match=r"sparse\.onnx was changed"):
        run_fleet(str(folder), RunOptions())
    (folder / "sparse.onnx").unlink()
    with pytest.raises(BadInputError, match=r"sparse\.onnx is missing"):
        run_fleet(str(folder), RunOptions())


def test_a_node_sends_times_of_both_models_and_keeps_nothing(came: Came) -> None:
    assert came[0].built is not None
    assert [v.variant for v in came[0].built.variants] == ["dense", "sparse"]
    assert len(came[0].built.times.ratios) == 1
    assert came[1] == {}


def test_an_old_gpu_and_a_layer_left_dense_have_their_reasons(
    tmp_path: Path, came: Came, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay(monkeypatch, {"a": "V100", "b": "T4"})
    assert came[0].built is not None
    old = replace(came[0], built=replace(came[0].built, gpu=V100))
    fake.answers = {"a": (old, {}), "b": came}
    model, excluded = str(save_mlp(tmp_path / "mlp.onnx")), replace(ALL, exclude=("head",))
    other = run_all(model, tmp_path / "other", RunOptions(selection=excluded)).folder
    found = run_fleet(str(other), RunOptions())[1]
    reports = [row.report for row in found.kinds if row.report]
    t4, v100 = ({v.layer: v.reasons[0].code for v in of.verdicts} for of in reports)
    assert set(v100.values()) == {ReasonCode.GPU_HAS_NO_SPARSE}
    assert t4["head"] is ReasonCode.EXCLUDED


def test_a_kind_that_was_not_built_is_a_row_of_the_page() -> None:
    rows = (FleetKind(kind="L\x1b4", error="no node of this kind is free", hint="wait"),)
    page = markdown(fleet_document(Fleet(source="m.onnx", kinds=rows)))
    assert "x1b4</code> | no node of this kind is free; wait |" in page


# --- on a cluster ---------------------------------------------------------------------------------


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

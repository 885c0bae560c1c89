"""Jobs on a Ray cluster of two nodes, one of which is killed on the way."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.mlp_onnx import save_mlp

from twofour.errors import BadInputError, BuildFailedError
from twofour.jobs import run_sensitivity
from twofour.records.options import BudgetOptions, RunOptions, SideBySide
from twofour.workers.side_by_side import RayCluster, WorkerLostError

NAME = "support.job_service:JobService"
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head of one core; another node joins in the test that kills it."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def _begun(log: Path) -> list[tuple[int, int, int]]:
    """Job, process and parent of what was begun; a line that is being written is left out."""
    lines = log.read_text().split("\n")[:-1] if log.is_file() else []
    return [(int(job), int(process), int(parent)) for job, process, parent in map(str.split, lines)]


@pytest.mark.full
def test_a_node_that_is_killed_loses_no_job_and_none_is_counted_twice(
    cluster: Any, tmp_path: Path
) -> None:
    second = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    raylet = second.all_processes["raylet"][0].process.pid
    log = tmp_path / "begun"
    jobs = {str(i): (i, 0.6, str(log)) for i in range(12)}
    found: dict[str, Any] = {}

    def done(key: str, value: object) -> None:
        assert key not in found
        found[key] = value

    def kill_second() -> None:
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            for _, process, parent in _begun(log):
                if parent == raylet:
                    os.kill(process, signal.SIGKILL)
                    cluster.remove_node(second, allow_graceful=False)
                    return
            time.sleep(0.02)

    killer = threading.Thread(target=kill_second)
    killer.start()
    with RayCluster(NAME, "slow", cluster.address) as nodes:
        nodes.run(jobs, done)
    killer.join()
    assert found == {str(i): 10 * i for i in range(12)}
    lost = [job for job, _, parent in _begun(log) if parent == raylet]
    again = [job for job, _, parent in _begun(log) if parent != raylet]
    assert lost, "the node that was killed had begun a job"
    assert set(again) == set(range(12)), "the other one did all of them"


@pytest.mark.full
def test_errors_and_deaths_come_back_as_from_processes_of_this_machine(cluster: Any) -> None:
    found: dict[str, Any] = {}
    with RayCluster(NAME, "refuse_odd", cluster.address) as nodes:
        nodes.run({"0": (0,), "1": (1,)}, found.__setitem__)
    with RayCluster(NAME, "die_before", cluster.address) as nodes:
        nodes.run({"once": (1,), "always": (9,)}, found.__setitem__)
    with RayCluster(NAME, "end_first", cluster.address) as nodes:
        nodes.run({"ended": ()}, found.__setitem__)
    assert found["0"] == 0
    assert isinstance(found["1"], BadInputError)
    assert found["once"] == 1
    assert isinstance(found["always"], WorkerLostError)
    assert found["ended"] == 1, "as Ray ends workers: SIGTERM is no result"


@pytest.mark.parametrize(("asked", "given"), [("auto", None), ("local", "local")])
def test_auto_takes_the_running_cluster_or_starts_one(
    asked: str, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = []
    monkeypatch.setattr(ray, "init", lambda address, **_: addresses.append(address))
    with RayCluster(NAME, "square", asked):
        pass
    assert addresses == [given]


class FakeRay:
    """Every call ends in the errors of its own, in this order, and then in its number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, endings: list[Exception]) -> None:
        self.endings, self.tries = endings, 0
        self.nodes = [{"Alive": True, "Resources": {"CPU": 1.0}}]
        self.is_silent = False
        for name in ("wait", "get"):
            monkeypatch.setattr(ray, name, getattr(self, name))
        monkeypatch.setattr(ray, "init", lambda **_: None)
        monkeypatch.setattr(ray, "nodes", lambda: self.nodes)
        monkeypatch.setattr(ray, "remote", lambda **_: lambda _work: self)

    def remote(self, _service: str, _command: str, number: int) -> Iterator[int]:
        """Meets a task, of which every answer is the number of the try."""
        return itertools.repeat(number)

    def wait(self, left: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        """All nodes are gone after the first look where it is silent."""
        if self.is_silent:
            self.nodes = [{"Alive": False, "Resources": {}}]
        return ([], left) if self.is_silent else (left, [])

    def get(self, number: int) -> int:
        """Meets ray.get."""
        self.tries += 1
        if number < len(self.endings):
            raise self.endings[number]
        return number


CRASHED, NODE, OTHER = (
    ray.exceptions.WorkerCrashedError(),
    ray.exceptions.LocalRayletDiedError(),
    ray.exceptions.RaySystemError("of a kind that nobody knows"),
)


@pytest.mark.parametrize("endings", [[CRASHED], [NODE], [OTHER, NODE]])
def test_a_call_is_tried_again_whatever_ended_it(
    endings: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, found = FakeRay(monkeypatch, endings), dict[str, Any]()
    with RayCluster(NAME, "square", "auto") as nodes:
        nodes.run({"a": ()}, found.__setitem__)
    assert found == {"a": len(endings)}
    assert fake.tries == len(endings) + 1


def test_only_a_call_that_ends_its_own_process_each_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, Any] = {}
    FakeRay(monkeypatch, [CRASHED] * 3)
    with RayCluster(NAME, "square", "auto") as nodes:
        nodes.run({"a": ()}, found.__setitem__)
    assert isinstance(found.pop("a"), WorkerLostError)
    FakeRay(monkeypatch, [CRASHED, NODE, CRASHED])
    with (
        pytest.raises(BuildFailedError, match="WorkerCrashedError, LocalRaylet"),
        RayCluster(NAME, "square", "auto") as nodes,
    ):
        nodes.run({"a": ()}, found.__setitem__)
    assert found == {}


def test_where_no_node_is_left_the_study_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch, []).is_silent = True
    with (
        pytest.raises(BuildFailedError, match="no node is left") as caught,
        RayCluster(NAME, "square", "auto") as nodes,
    ):
        nodes.run({"a": ()}, dict[str, Any]().__setitem__)
    assert caught.value.exit_code == 5
    assert caught.value.hint == "run the command again once the cluster runs"


@pytest.mark.full
def test_a_study_gives_the_same_as_on_this_machine_alone(cluster: Any, tmp_path: Path) -> None:
    metric = f"{Path(__file__).parents[1] / 'support' / 'mlp_onnx.py'}:agreement"
    budget = BudgetOptions(max_drop=8.0)
    model = str(save_mlp(tmp_path / "mlp.onnx"))
    found = [
        run_sensitivity(
            model,
            tmp_path / f"run{number}",
            RunOptions(metric=metric, budget=budget, side_by_side=where),
        )[1]
        for number, where in enumerate((SideBySide(jobs=1), SideBySide(ray=cluster.address)))
    ]
    assert found[0] == found[1]
    assert found[0].budget is not None

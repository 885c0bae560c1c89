"""An engine that ends its process is a row of a run that goes on to its end, and exit code 5."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from support import onnx_models as om
from support.stand_in_worker import DYING, PLAN

from twofour.errors import BuildFailedError
from twofour.pipeline.building import refuse_crashed
from twofour.pipeline.engine_host import EngineHost, Sessions
from twofour.pipeline.run import open_run, run_stages
from twofour.pipeline.settings import resolve
from twofour.pipeline.stages import Silent
from twofour.records.latency import LatencyComparison
from twofour.records.options import BuildOptions, MethodOptions, RunOptions
from twofour.records.run import BuildResult, RunResult, VariantCheck
from twofour.store import from_json, read_record

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

SEGV, KILL = int(signal.SIGSEGV), int(signal.SIGKILL)
LEVELS = ("ALL", "EXTENDED")
ANY = RunOptions()
ORT = RunOptions(engine="onnxruntime")
TENSORRT = RunOptions(engine="tensorrt")


@dataclass
class Recorder(Silent):
    """Remembers what it was told."""

    did: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def done(self, name: str, *, seconds: float, reused: bool) -> None:  # noqa: ARG002  # Protocol
        """Remember what was not reused."""
        if not reused:
            self.did.append(name)

    def note(self, text: str) -> None:
        """Remember."""
        self.notes.append(text)

    def step(self, text: str, done: int, total: int | None) -> None:  # noqa: ARG002  # Protocol
        """Remember."""
        self.steps.append(text)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One MatMul of 64 to 64 in float16, with a batch of 2."""
    weight = om.weights(64, 64, dtype=np.float16)
    return om.one_layer(tmp_path / "model.onnx", "MatMul", weight, ([2, 64], [2, 64]))


def run(
    model: Path, options: RunOptions, *deaths: str, progress: Recorder | None = None
) -> RunResult:
    """The main job with engines that die as told."""
    progress = progress or Recorder()
    folder = model.parent / "r"
    with (
        open_run(str(model), folder, options, progress) as opened,
        EngineHost(note=progress.note, service=DYING) as host,
    ):
        (folder / PLAN).write_text("\n".join(deaths))
        settings = resolve(options, opened.source, host.status, progress.note)
        return run_stages(replace(opened, options=settings, host=host, sessions=Sessions(host, 1)))


def errors(built: BuildResult) -> list[str | None]:
    return [variant.error for variant in built.variants]


def test_a_file_that_crashes_the_runtime_at_every_level_is_a_row_and_the_run_ends(
    model: Path,
) -> None:
    result = run(model, ORT, f"ALL open {SEGV}", f"EXTENDED open {SEGV}")
    for error in errors(result.build):
        assert error is not None
        assert error.startswith("ONNX Runtime ended: SIGSEGV while loading ")
    assert [v.failed_tries[1].level for v in result.build.variants] == ["EXTENDED", "EXTENDED"]
    checked = read_record(VariantCheck, model.parent / "r/stages/check-dense.json")
    assert checked.outputs is None
    assert "SIGSEGV" in (checked.not_compared or "")
    assert (model.parent / "r/report.html").is_file()
    assert [v.layer for v in result.report.verdicts] == ["fc"]
    with pytest.raises(BuildFailedError, match=r"dense: ONNX Runtime ended: SIGSEGV .*; sparse: "):
        refuse_crashed(result.build)


def test_a_crash_that_repeats_itself_is_not_tried_by_the_next_run(model: Path) -> None:
    deaths = (f"ALL open {SEGV}", f"EXTENDED open {SEGV}")
    run(model, ORT, *deaths)
    progress = Recorder()
    again = run(model, ORT, *deaths, progress=progress)
    assert progress.did == []
    with pytest.raises(BuildFailedError, match="SIGSEGV"):
        refuse_crashed(again.build)


@pytest.mark.parametrize("deaths", [("ALL",), ("ALL", "EXTENDED")])
@pytest.mark.parametrize("command", ["open", "outputs"])
def test_what_a_lack_of_memory_left_is_made_again(
    model: Path, deaths: tuple[str, ...], command: str
) -> None:
    run(model, ORT, *(f"{level} {command} {KILL}" for level in deaths))
    progress = Recorder()
    again = run(model, ORT, progress=progress)
    assert {"build-dense", "build-sparse", "times", "build", "report"} <= set(progress.did)
    assert "check-dense" in progress.did
    assert [(v.failed_tries, v.level) for v in again.build.variants] == [((), None)] * 2
    refuse_crashed(again.build)
    third = Recorder()
    run(model, ORT, progress=third)
    assert third.did == []


@pytest.mark.parametrize("text", ["std::bad_alloc", "[Errno 24] Too many open files"])
def test_a_message_of_what_is_lacking_is_never_a_result(model: Path, text: str) -> None:
    progress = Recorder()
    first = run(model, ANY, *(f"{level} open {text}" for level in LEVELS), progress=progress)
    assert any("the same command tries again" in note for note in progress.notes)
    assert "build-dense" in progress.did
    again = Recorder()
    second = run(model, ANY, progress=again)
    assert {"check-dense", "check-sparse", "accuracy", "report"} <= set(again.did)
    assert errors(second.build) == [None, None]
    assert second.accuracy.drift
    assert not first.accuracy.drift


def test_a_message_that_comes_again_is_a_result(model: Path) -> None:
    failing = [f"{level} open no kernel for LSTM(14)" for level in LEVELS]
    run(model, ANY, *failing)
    progress = Recorder()
    run(model, ANY, *failing, progress=progress)
    assert progress.did == []
    assert not any("tries again" in note for note in progress.notes)


def test_a_permutation_that_could_not_be_judged_is_searched_again(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "v"], ["a"]), helper.make_node("Relu", ["a"], ["r"]),
             helper.make_node("MatMul", ["r", "w"], ["y"])]  # fmt: skip
    weights = {"v": om.weights(16, 16, seed=1), "w": om.weights(16, 16, seed=2)}
    path = om.save(om.model(nodes, weights, inputs={"x": [2, 16]}), tmp_path / "m.onnx")
    options = RunOptions(method=MethodOptions(permute_seconds=0.05))
    killed = run(path, options, *(f"{level} outputs {KILL}" for level in LEVELS))
    assert killed.prune.permutation is not None
    assert "SIGKILL" in (killed.prune.permutation.refused or "")
    progress = Recorder()
    again = run(path, options, progress=progress)
    assert progress.did[0] == "permute"
    assert again.prune.permutation is not None
    assert again.prune.permutation.refused is None


def test_what_went_well_at_a_lower_level_says_so_and_is_no_failure(model: Path) -> None:
    progress = Recorder()
    result = run(model, ORT, f"ALL open {SEGV}", progress=progress)
    assert [v.level for v in result.build.variants] == ["EXTENDED", "EXTENDED"]
    assert errors(result.build) == [None, None]
    (told,) = [n for n in result.build.notes if n.startswith("sparse: ")]
    assert told == (
        "sparse: SIGSEGV while loading sparse.onnx at optimization level ALL; it was built and "
        "timed at level EXTENDED, so its times do not compare with another level's"
    )
    refuse_crashed(result.build)
    ended = [note for note in progress.notes if note.startswith("ONNX Runtime ended: ")]
    assert len(ended) == 2, "one for each file"


def test_a_tensorrt_build_that_crashes_is_tried_lower_and_without_the_cache(model: Path) -> None:
    progress = Recorder()
    result = run(model, TENSORRT, f"None build {SEGV}", progress=progress)
    assert [v.level for v in result.build.variants] == ["2", "2"]
    log = (model.parent / "r/dense.log").read_text()
    assert log.endswith("\nlevel 2, cache False\n")
    assert result.build.variants[0].failed_tries[0].level == "3"
    assert "building" in progress.steps
    refuse_crashed(result.build)


def test_a_tensorrt_build_that_crashes_twice_is_a_row_with_its_log(model: Path) -> None:
    deaths = (f"None build {SEGV}", f"2 build {SEGV}")
    result = run(model, TENSORRT, *deaths)
    dense, sparse = result.build.variants
    assert (dense.plan, dense.log, sparse.log) == (None, "dense.log", "sparse.log")
    assert dense.error == (
        "tensorrt ended: SIGSEGV while building sparse.onnx at optimization level 3, "
        "then SIGSEGV while building sparse.onnx at optimization level 2"
    )
    assert (dense.sparse_weights, sparse.sparse_weights) == (False, True)
    assert (model.parent / "r/report.md").is_file()
    with pytest.raises(BuildFailedError):
        refuse_crashed(result.build)


@pytest.mark.parametrize(("asked", "levels"), [(5, ["5", "2"]), (1, ["1", "0"]), (0, ["0"])])
def test_the_level_that_was_asked_for_comes_first(
    model: Path, asked: int, levels: list[str]
) -> None:
    options = RunOptions(engine="tensorrt", build=BuildOptions(optimization_level=asked))
    result = run(model, options, *(f"{level} build {SEGV}" for level in levels))
    for variant in result.build.variants:
        assert [t.level for t in variant.failed_tries] == levels


_FAKE = """
import importlib, os, sys
_here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_path = sys.path
sys.path = [p for p in sys.path if os.path.abspath(p or ".") != _here]
del sys.modules["onnxruntime"]
real = importlib.import_module("onnxruntime")
sys.path = _path
class Dying(real.InferenceSession):
    def __init__(self, path, options=None, **rest):
        level = str(options.graph_optimization_level).rpartition("_")[2]
        if isinstance(path, str) and level in os.environ["DIES_AT"].split(","):
            os.kill(os.getpid(), int(os.environ["DIES_BY"]))
        super().__init__(path, options, **rest)
real.InferenceSession = Dying
"""


def command(folder: Path, *arguments: str, dies_at: str) -> subprocess.CompletedProcess[str]:
    """`twofour` where onnxruntime dies as it loads a file at these levels."""
    package = folder / "path" / "onnxruntime"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(_FAKE)
    path = os.pathsep.join([str(package.parent), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "twofour", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "DIES_AT": dies_at, "DIES_BY": str(SEGV)},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prune-export-build", "build"])
@pytest.mark.parametrize(("dies_at", "code"), [("ALL", 0), ("ALL,EXTENDED", 5)])
def test_the_command_ends_with_all_its_files_and_the_exit_code_of_a_build(
    model: Path, name: str, dies_at: str, code: int
) -> None:
    for _ in range(2):
        done = command(model.parent, name, model.name, "--out", "r", dies_at=dies_at)
        assert done.returncode == code, done.stderr
        assert "SIGSEGV while loading" in done.stdout
        assert ("error: " in done.stderr) == (code == 5)
        assert "Traceback" not in done.stderr
    assert (model.parent / "r/build.json").is_file()
    if name == "prune-export-build":
        assert (model.parent / "r/report.html").is_file()


@pytest.mark.slow
def test_the_record_on_stdout_is_whole_where_the_exit_code_is_5(model: Path) -> None:
    done = command(
        model.parent, "build", model.name, "--out", "r", "--json", dies_at="ALL,EXTENDED"
    )
    assert done.returncode == 5
    built = from_json(BuildResult, done.stdout)
    assert [t.ending for t in built.variants[0].failed_tries] == ["SIGSEGV", "SIGSEGV"]


@pytest.mark.slow
@pytest.mark.parametrize(("dies_at", "code"), [("ALL", 0), ("ALL,EXTENDED", 5)])
def test_a_comparison_tries_a_lower_level_too_and_says_so(
    model: Path, dies_at: str, code: int
) -> None:
    done = command(
        model.parent,
        *("compare", model.name, "--engines", "onnxruntime:cpu", "--rounds", "3", "--json"),
        *("--out", "c"),
        dies_at=dies_at,
    )
    assert done.returncode == code, done.stderr
    if code:
        assert "then SIGSEGV while loading" in done.stderr
        return
    comparison = from_json(LatencyComparison, done.stdout)
    assert any("trying again at level EXTENDED" in note for note in comparison.notes)
    for variant in comparison.variants:
        assert variant.settings is not None
        assert "graph_optimization_level=EXTENDED" in variant.settings.options

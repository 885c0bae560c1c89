"""The main job's own times: in rounds, with a twin, judged by what `compare` judges by."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import onnx_models as om
from support.small_run import Recorder
from support.stand_in_worker import DYING

from twofour.cli.run import build_view
from twofour.comparing.compared import open_compared
from twofour.comparing.variants import plan_variants
from twofour.engines import timing as engine_times
from twofour.engines.machine import peak_resident_bytes
from twofour.engines.onnxruntime.session import OrtSession
from twofour.engines.protocol import ENGINES, OpenRequest, no_progress
from twofour.engines.timing import RoundPlan, TimedRequest, time_engines
from twofour.jobs import open_run, run_all, run_build, run_stages
from twofour.latency.ratios import ratios_and_noise
from twofour.pipeline.stages import resolve_options
from twofour.records.export import EngineStatus
from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.records.options import CompareOptions, RunOptions
from twofour.records.run import BuildResult, RunResult
from twofour.reports.latency_words import answer_lines
from twofour.reports.terminal import plain_text
from twofour.store import read_record
from twofour.workers.host import EngineHost, Sessions

DENSE, SPARSE = "dense@onnxruntime:cpu", "sparse@onnxruntime:cpu"
OPTIONS = RunOptions(engine="onnxruntime")
X = {"x": np.ones((2, 64), np.float32)}
PLAN = RoundPlan(rounds=3, time_limit_s=1.0, seed=0, least=1, warmup=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return om.save(om.matmul(om.weights(64, 64)), tmp_path_factory.mktemp("times") / "m.onnx")


@pytest.fixture(scope="module")
def finished(model: Path) -> RunResult:
    return run_all(str(model), model.parent / "run", OPTIONS)


def test_dense_and_sparse_take_turns_and_the_dense_one_runs_twice(finished: RunResult) -> None:
    times = finished.build.times
    assert [row.name for row in times.variants] == [DENSE, SPARSE, f"{DENSE} again"]
    (rounds,) = {len(row.samples_ms) for row in times.variants}
    assert 5 <= rounds <= 10
    assert times.baseline == DENSE
    assert [(n.variant, n.again) for n in times.noise] == [(DENSE, f"{DENSE} again")]
    assert len(times.loads) == 1, "how busy the machine was is known"
    assert times.machine is not None
    (ratio,) = times.ratios
    assert (ratio.variant, ratio.baseline, ratio.rounds) == (SPARSE, DENSE, 10)
    assert ratio.only_sparsity


@pytest.mark.parametrize(
    ("factor", "verdict", "said"),
    [
        (1.0, LatencyVerdict.NO_DIFFERENCE, "no difference between sparse and dense"),
        (0.5, LatencyVerdict.FASTER, "sparse is 2.00x faster than dense"),
        (2.0, LatencyVerdict.SLOWER, "sparse is 2.00x slower than dense"),
    ],
)
def test_the_line_of_the_main_job_says_what_compare_says_of_the_same_samples(
    finished: RunResult, factor: float, verdict: LatencyVerdict, said: str
) -> None:
    times = with_times(finished.build.times, factor)
    assert [r.verdict for r in times.ratios] == [verdict]
    shown = plain_text(build_view(replace(finished.build, times=times)), width=200)
    assert answer_lines(times)[0] in shown
    assert said in shown
    assert verdict.value in shown
    assert "not judged" not in shown


def test_a_build_of_one_file_is_timed_with_nothing_to_compare_it_with(
    model: Path, tmp_path: Path
) -> None:
    built: BuildResult = run_build(model, tmp_path / "b", OPTIONS)[1]
    assert [row.name for row in built.times.variants] == [DENSE]
    assert (built.times.ratios, built.times.noise) == ((), ())
    assert "nothing to compare" in plain_text(build_view(built), width=200)


def test_a_session_that_is_open_is_timed_and_closed_not_loaded_again(model: Path) -> None:
    session = OrtSession(model, threads=1)
    opened = {model: session}
    first, second = time_engines(
        [wanted(model, "a"), wanted(model, "b")], opened, X, PLAN, no_progress
    ).rows
    assert opened == {}
    assert session.session is None
    assert first.open_s == session.load_s > 0
    assert second.open_s != session.load_s
    assert first.settings is not None
    assert second.settings == replace(first.settings, weights="b")


def test_where_memory_holds_one_engine_they_are_timed_one_after_the_other(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_times, "has_room_for", lambda _size: False)
    asked = [wanted(model, "a"), wanted(model, "b"), wanted(model, "a", again=True)]
    found = time_engines(asked, {}, X, PLAN, no_progress)
    assert [(row.name, len(row.samples_ms)) for row in found.rows] == [
        ("a@onnxruntime:cpu", 3),
        ("b@onnxruntime:cpu", 3),
    ]
    assert (found.in_rounds, found.loads) == (False, ())


@pytest.mark.skipif(sys.platform != "linux", reason="a peak can be reset on Linux alone")
def test_memory_that_a_build_took_and_freed_does_not_keep_engines_apart(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.ones(1 << 26)  # 512 MB, as a builder takes and frees them in the same process
    peak_bytes = peak_resident_bytes() or 0
    monkeypatch.setattr(engine_times, "has_room_for", lambda size: size < peak_bytes)
    asked = [wanted(model, "a"), wanted(model, "b")]
    assert time_engines(asked, {}, X, PLAN, no_progress).in_rounds


def test_a_file_that_cannot_be_loaded_is_a_row_beside_the_times_of_the_other(
    model: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(b"no onnx")
    good, bad = time_engines(
        [wanted(model, "a"), wanted(damaged, "b")], {}, X, PLAN, no_progress
    ).rows
    assert (len(good.samples_ms), good.error) == (3, None)
    assert bad.samples_ms == ()
    assert "cannot load" in (bad.error or "")


def wanted(file: Path, weights: str, *, again: bool = False) -> TimedRequest:
    opening = OpenRequest(
        mode="cpu",
        weights=weights,
        threads=1,
        level="ALL",
        model=str(file),
        precision="float32",
        file=file,
    )
    name = f"{weights}@onnxruntime:cpu{' again' if again else ''}"
    return TimedRequest(name=name, engine=ENGINES["onnxruntime"], opening=opening, again=again)


def with_times(times: LatencyComparison, factor: float) -> LatencyComparison:
    """The same with made-up samples of a quiet machine, the sparse ones times `factor`."""

    def samples(name: str) -> Iterator[float]:
        for number in range(10):
            yield (factor if name == SPARSE else 1.0) * (1 + 0.002 * (number * 7 % 5))

    rows = tuple(replace(row, samples_ms=tuple(samples(row.name))) for row in times.variants)
    ratios, noise = ratios_and_noise(rows, times.baseline, 0, ())
    return replace(times, variants=rows, ratios=ratios, noise=noise, loads=())


# --- engines of TensorRT: which file each is built from, and what it is called --------------------


TENSORRT = RunOptions(engine="tensorrt")
OFF = "sparse@tensorrt:gpu-sparsity-off"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder of the main job, whose engines a stand-in has built; `did.txt` has the order."""
    weight = om.weights(64, 64, dtype=np.float16)
    model = om.one_layer(tmp_path / "model.onnx", "MatMul", weight, ([2, 64], [2, 64]))
    folder = tmp_path / "run"
    progress = Recorder()
    with (
        open_run(str(model), folder, TENSORRT, progress) as opened,
        EngineHost(note=progress.note, service=DYING) as host,
    ):
        settings = resolve_options(TENSORRT, opened.model, host.status, progress.note)
        run_stages(replace(opened, options=settings, host=host, sessions=Sessions(host, 1)))
    (tmp_path / "did.txt").write_text(" ".join(progress.did))
    return folder


def plans(folder: Path, **options: object) -> dict[str, Mapping[str, Path]]:
    """The engines of the run that a comparison would load."""
    setup = open_compared((folder,), None, CompareOptions(**options))  # type: ignore[arg-type]
    return {model.weights: model.plans for model in setup.models}


def test_each_engine_has_its_own_file_and_the_dense_one_is_the_baseline(folder: Path) -> None:
    built = read_record(BuildResult, folder / "build.json")
    files = [(v.variant, v.onnx, v.sparse_weights, v.plan) for v in built.variants]
    assert files == [
        ("dense", "dense.onnx", False, "dense.plan"),
        ("sparse", "sparse.onnx", True, "sparse.plan"),
    ]
    names = ["dense@tensorrt:gpu", "sparse@tensorrt:gpu", "dense@tensorrt:gpu again"]
    assert [row.name for row in built.times.variants] == names
    assert built.times.baseline == "dense@tensorrt:gpu"
    assert built.times.options.engines == ("tensorrt:gpu",)
    did = (folder.parent / "did.txt").read_text().split()
    assert did.index("build-sparse") < did.index("build-dense")


def test_compare_takes_the_engines_of_the_run_but_at_other_shapes(folder: Path) -> None:
    assert plans(folder) == {
        "dense": {"gpu": folder / "dense.plan"},
        "sparse": {"gpu": folder / "sparse.plan"},
    }
    assert plans(folder, shapes=("x=2x64",)) == {"dense": {}, "sparse": {}}


def test_the_engines_of_one_file_are_compared_in_both_modes(folder: Path) -> None:
    setup = open_compared((folder,), None, CompareOptions())
    run_in = ("tensorrt:gpu-sparsity-off", "tensorrt:gpu")

    def statuses(engine: str, modes: object) -> list[EngineStatus]:
        assert isinstance(modes, tuple)
        status = EngineStatus(engine=engine, version="10.0", can_run=True, why_not=None)
        return [status] * len(modes)

    rows, baseline = plan_variants(setup.models[1:], CompareOptions(), statuses, run_in)
    assert [row.name for row in rows] == [OFF, f"{OFF} again", "sparse@tensorrt:gpu"]
    assert baseline == OFF

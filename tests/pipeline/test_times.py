"""The main job's own times: in rounds, with a twin, judged by what `compare` judges by."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from support import onnx_models as om

from twofour.cli.run import build_view
from twofour.engines import timing as engine_times
from twofour.engines.machine import peak_resident_bytes
from twofour.engines.onnxruntime.session import OrtSession
from twofour.engines.protocol import ENGINES, OpenRequest, no_progress
from twofour.engines.timing import RoundPlan, TimedRequest, time_engines
from twofour.jobs import run_all, run_build
from twofour.latency.ratios import ratios_and_noise
from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.records.options import RunOptions
from twofour.records.run import BuildResult, RunResult
from twofour.reports.latency_words import answer_lines
from twofour.reports.terminal import plain_text

DENSE, SPARSE = "dense@onnxruntime:cpu", "sparse@onnxruntime:cpu"
OPTIONS = RunOptions(engine="onnxruntime")
X = {"x": np.ones((2, 64), np.float32)}
PLAN = RoundPlan(rounds=3, time_limit_s=1.0, seed=0, least=1, warmup=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "dot")]
    made = om.model(nodes, {"w": om.weights(64, 64)}, inputs={"x": [2, 64]})
    return om.save(made, tmp_path_factory.mktemp("times") / "m.onnx")


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
    assert first.open_s == session.load_s
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

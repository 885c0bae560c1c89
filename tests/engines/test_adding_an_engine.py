"""An engine is a class and a row: nothing else has to know of it."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import onnx_models as om
from support.toy_engine import ToyEngine

from twofour.comparing.comparison import compare
from twofour.engines.protocol import ENGINES, Builder, EngineInput, EngineRow
from twofour.jobs import run_build
from twofour.records.export import VariantBuild
from twofour.records.latency import ComparedVariant
from twofour.records.options import CompareOptions, RunOptions
from twofour.records.run import BuildResult
from twofour.store import read_record

TOY = EngineRow(
    name="toy",
    title="Toy",
    code="support.toy_engine:ToyEngine",
    takes=EngineInput.ONNX,
    packages=("ml_dtypes",),
    leaves=(".toy",),
)
meets: Builder = ToyEngine()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, TOY.name, TOY)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weight = np.arange(64, dtype=np.float32).reshape(8, 8) % 5 - 2
    weight[np.arange(8) % 4 < 2] = 0
    return om.one_layer(tmp_path / "model.onnx", "MatMul", weight, (["batch", 8], ["batch", 8]))


@pytest.mark.usefixtures("toy")
def test_a_new_engine_builds_in_a_process_of_its_own(model: Path, tmp_path: Path) -> None:
    _, built = run_build(model, tmp_path / "run", RunOptions(engine="toy"))
    assert built.engine.in_words == f"toy {onnx.__version__} on CPU"
    (times,) = built.times.variants
    assert (times.name, len(times.samples_ms) >= 5, times.error) == ("sparse@toy:plain", True, None)
    assert (tmp_path / "run" / "sparse.toy").is_file()
    assert built.notes[0].startswith("Toy ran dense kernels")
    assert read_record(BuildResult, tmp_path / "run" / "build.json") == built
    stage = read_record(VariantBuild, tmp_path / "run" / "stages" / "build-sparse.json")
    assert stage.build_s == 0.5


@pytest.mark.usefixtures("toy")
def test_a_new_engine_is_compared_mode_by_mode(model: Path, tmp_path: Path) -> None:
    options = CompareOptions(engines=("toy", "onnxruntime:cpu"), rounds=10, time_limit_s=1)
    _, comparison = compare((model,), tmp_path / "out", options)
    rows: dict[str, ComparedVariant] = {v.name: v for v in comparison.variants}
    assert set(rows) == {
        "model@toy:plain",
        "model@toy:plain again",
        "model@toy:sparse-only",
        "model@onnxruntime:cpu",
    }
    assert [row.error for row in rows.values()] == [None] * 4
    assert comparison.baseline == "model@toy:plain"
    assert all(len(row.samples_ms) == 10 and row.error is None for row in rows.values())
    settings = rows["model@toy:sparse-only"].settings
    assert settings is not None
    assert (settings.engine, settings.mode, settings.precision) == ("toy", "sparse-only", "float32")
    (outputs,) = rows["model@onnxruntime:cpu"].agreement
    assert outputs.cosine == pytest.approx(1.0)
    assert comparison.machine is not None
    assert f"ml_dtypes=={metadata.version('ml_dtypes')}" in comparison.machine.packages


def test_each_batch_has_the_settings_of_its_own_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a variant says of itself after its inputs are prepared stands in its row."""
    late = replace(TOY, code="support.toy_engine:LateEngine")
    monkeypatch.setitem(ENGINES, late.name, late)
    options = CompareOptions(engines=("toy:plain",), rounds=5, time_limit_s=1, batches=(2, 4))
    _, comparison = compare((model,), tmp_path / "out", options)
    assert [row.batch for row in comparison.variants] == [2, 4, 2, 4]
    assert [row.enqueue_ms for row in comparison.variants] == [2.0, 4.0, 2.0, 4.0]
    settings = (row.settings for row in comparison.variants)
    assert {(s and s.timing, s and s.launches) for s in settings} == {("late", 3)}

"""Which file each engine of TensorRT is built from, in what order, and what it is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import onnx_models as om
from support.small_run import Recorder
from support.stand_in_worker import DYING

from twofour.comparing.compared import open_compared
from twofour.comparing.variants import plan_variants
from twofour.jobs import open_run, run_stages
from twofour.pipeline.stages import resolve_options
from twofour.records.export import EngineStatus
from twofour.records.options import CompareOptions, RunOptions
from twofour.records.run import BuildResult
from twofour.store import read_record
from twofour.workers.host import EngineHost, Sessions

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

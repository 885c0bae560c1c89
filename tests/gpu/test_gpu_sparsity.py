"""A build, a run and a report for real, through the public commands: `pytest -m gpu`.

Skipped with the reason where TensorRT cannot build; CONTRIBUTING.md says what it needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.sparsity_models import (
    BATCH,
    WIDE,
    SparsityModel,
    dense_convolution,
    float16_model,
    int8_model,
)

from twofour import records
from twofour.engines.machine import find_gpu
from twofour.engines.protocol import OpenRequest
from twofour.engines.tensorrt.bindings import tensorrt_status
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.engines.tensorrt.plan import GPU, GRAPH
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.export import Diagnosis, EngineStatus
from twofour.records.latency import LatencyComparison
from twofour.records.log import Build, BuildLog, BuildOutcome, SparsityFlag
from twofour.records.run import BuildResult
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.text import markdown
from twofour.store import from_json, read_record

pytestmark = pytest.mark.gpu

RUN = "run"
VARIANTS = ("dense", "sparse")
SPARSE, DENSE = "sparse@tensorrt:gpu", "sparse@tensorrt:gpu-sparsity-off"
ROUNDS = 20
SOURCES = Path(records.__file__).resolve().parents[2]
LONGEST_S = 540.0
"""Of one command: below the suite's own limit of a test, so that its output is shown."""
USABLE = frozenset({VerdictName.ELIGIBLE, VerdictName.CHOSEN})


def twofour(folder: Path, *arguments: str) -> str:
    """Standard output of the command, run in the folder; it has to end in 0."""
    search = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "twofour", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        check=False,
        text=True,
        timeout=LONGEST_S,
    )
    said = f"twofour {' '.join(arguments)} ended in {done.returncode}:\n{done.stderr}"
    assert done.returncode == 0, said
    return done.stdout


def logged_build(folder: Path, log: str) -> Build:
    """The one build that `twofour log` finds in the log of an engine."""
    found = from_json(BuildLog, twofour(folder, "log", log, "--json"))
    built = [build for build in found.builds if build.outcome is BuildOutcome.BUILT]
    assert len(built) == 1, [(b.first_line, b.last_line, b.outcome) for b in found.builds]
    return built[0]


def reported(folder: Path, *arguments: str) -> EligibilityReport:
    """The record of `twofour report`."""
    return from_json(EligibilityReport, twofour(folder, "report", *arguments, "--json"))


def by_node(report: EligibilityReport) -> dict[str, Verdict]:
    """Node -> its verdict."""
    return {verdict.node: verdict for verdict in report.verdicts if verdict.node is not None}


def nodes_named(names: Iterable[str] | None, nodes: Iterable[str]) -> frozenset[str]:
    """The nodes whose name is in one of a log's names; Myelin writes "_" for "/".

    Simpler than what the report does, and independent of it: no node's name is part of another's.
    """
    written = [name.replace("/", "_") for name in names or ()]
    return frozenset(n for n in nodes if any(n.replace("/", "_") in name for name in written))


def rows(report: EligibilityReport) -> str:
    """The report as text, for the message of a test that fails."""
    return markdown(eligibility_document(report))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A model and the folder that `twofour build` was run in; its run folder is RUN."""

    model: SparsityModel
    folder: Path

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / RUN


@pytest.fixture(scope="module")
def tensorrt() -> EngineStatus:
    """TensorRT, which can build here; else the reason to skip."""
    status = tensorrt_status()
    if not status.can_run:
        pytest.skip(f"TensorRT cannot run here: {status.why_not}")
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("the GPU is timed, so one process has it alone: pytest -m gpu, without -n")
    return status


@pytest.fixture(scope="module", params=[float16_model, int8_model], ids=["float16", "int8"])
def built(
    request: pytest.FixtureRequest,
    tensorrt: EngineStatus,  # noqa: ARG001  # may skip
    tmp_path_factory: pytest.TempPathFactory,
) -> BuiltModel:
    """Both engines of the model, built once for all tests."""
    make: Callable[[], SparsityModel] = request.param
    model = make()
    folder = tmp_path_factory.mktemp(model.name)
    onnx.save(model.proto, folder / "model.onnx")
    twofour(folder, "build", "model.onnx", "--shapes", model.shapes, "--out", RUN, "--quiet")
    return BuiltModel(model=model, folder=folder)


@pytest.fixture(scope="module")
def sparse_cores(tensorrt: EngineStatus) -> None:
    """Sparse tensor cores; else the reason to skip."""
    gpu = find_gpu()
    assert gpu is not None, f"{tensorrt.in_words}, and the driver shows no GPU"
    if not gpu.has_sparse_tensor_cores:
        capability = ".".join(map(str, gpu.compute_capability))
        pytest.skip(f"{gpu.name} (compute capability {capability}) has no sparse tensor cores")


@pytest.fixture(scope="module")
def report(built: BuiltModel, sparse_cores: None) -> EligibilityReport:  # noqa: ARG001  # may skip
    """What `twofour report RUN` says of the built model."""
    return reported(built.folder, RUN)


def test_doctor_names_the_gpu_and_whether_it_has_sparse_tensor_cores(
    tensorrt: EngineStatus, tmp_path: Path
) -> None:
    diagnosis = from_json(Diagnosis, twofour(tmp_path, "doctor", "--json"))
    assert tensorrt in diagnosis.engines
    gpu = diagnosis.gpu
    assert gpu is not None
    assert tensorrt.device == gpu.name
    assert gpu.has_sparse_tensor_cores == (gpu.compute_capability >= (8, 0))
    has = "has sparse" if gpu.has_sparse_tensor_cores else "has no sparse"
    said = " ".join(twofour(tmp_path, "doctor").split())
    assert f"can run here on {gpu.name}" in said
    assert f"{has} tensor cores" in said


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_build_leaves_plan_log_layers_and_profile(built: BuiltModel, variant: str) -> None:
    assert (built.run / f"{variant}.plan").stat().st_size > 0
    assert (built.run / f"{variant}.log").stat().st_size > 0
    layers = json.loads((built.run / f"{variant}.layers.json").read_text(encoding="utf-8"))
    assert layers["Layers"]
    profile = json.loads((built.run / f"{variant}.profile.json").read_text(encoding="utf-8"))
    assert profile[0]["count"] > 0
    assert sum(row["averageMs"] for row in profile[1:]) > 0


def test_the_build_is_tensorrts_and_both_engines_were_timed(
    built: BuiltModel, tensorrt: EngineStatus
) -> None:
    result = read_record(BuildResult, built.run / "build.json")
    assert result.engine == tensorrt
    assert result.engine.engine == "tensorrt"
    assert [(v.variant, v.sparse_weights) for v in result.variants] == [
        ("dense", False),
        ("sparse", True),
    ]
    for variant in result.variants:
        assert variant.error is None
        assert variant.size_bytes == (built.run / f"{variant.variant}.plan").stat().st_size
    names = [DENSE, SPARSE, f"{DENSE} again"]
    assert [row.name for row in result.times.variants] == names
    assert all(row.error is None and min(row.samples_ms) > 0 for row in result.times.variants)
    (ratio,) = result.times.ratios
    assert ratio.only_sparsity


@pytest.mark.parametrize(
    ("variant", "flag"), [("dense", SparsityFlag.DISABLED), ("sparse", SparsityFlag.ENABLED)]
)
def test_the_log_of_an_engine_states_its_sparsity_and_version(
    built: BuiltModel, tensorrt: EngineStatus, variant: str, flag: SparsityFlag
) -> None:
    build = logged_build(built.run, f"{variant}.log")
    assert build.sparsity is flag
    assert build.tensorrt_version is not None
    assert tensorrt.version is not None
    assert build.tensorrt_version.split(".")[:2] == tensorrt.version.split(".")[:2]


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_engine_computes_what_the_model_says(built: BuiltModel, variant: str) -> None:
    inputs = built.model.inputs(batch=2)
    request = OpenRequest(
        mode=GPU,
        weights=variant,
        threads=1,
        model=variant,
        precision="unknown",
        file=built.run / f"{variant}.plan",
    )
    opened = TensorRtEngine().open(request)
    found = opened.outputs(inputs)["y"]
    opened.close()
    expected = built.model.expected(inputs)
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    assert error <= built.model.largest_error


@pytest.mark.usefixtures("sparse_cores")
def test_the_builder_lists_the_2_4_convolution_and_none_that_is_ruled_out(
    built: BuiltModel,
) -> None:
    build = logged_build(built.run, "sparse.log")
    assert build.eligible is not None, build.warnings
    listed = nodes_named(build.eligible, built.model.layers)
    assert WIDE in listed, build.eligible
    ruled_out = {node for node, code in built.model.layers.items() if code is not None}
    assert not listed & ruled_out, build.eligible


def test_every_layer_of_the_report_is_measured(
    built: BuiltModel, report: EligibilityReport
) -> None:
    verdicts = by_node(report)
    assert verdicts.keys() == built.model.layers.keys()
    assert {v.evidence for v in report.verdicts} == {Evidence.MEASURED}, rows(report)


def test_a_layer_that_is_ruled_out_says_by_what(
    built: BuiltModel, report: EligibilityReport
) -> None:
    verdicts = by_node(report)
    for node, code in built.model.layers.items():
        if code is not None:
            assert verdicts[node].verdict is VerdictName.NOT_ELIGIBLE, rows(report)
            assert code in {reason.code for reason in verdicts[node].reasons}, rows(report)


def test_eligible_and_chosen_layers_of_the_report_are_those_of_the_log(
    built: BuiltModel, report: EligibilityReport
) -> None:
    build = logged_build(built.run, "sparse.log")
    nodes = built.model.layers
    verdicts = by_node(report)
    usable = {node for node in nodes if verdicts[node].verdict in USABLE}
    chosen = {node for node in nodes if verdicts[node].verdict is VerdictName.CHOSEN}
    assert usable == nodes_named(build.eligible, nodes), f"{build.eligible}\n{rows(report)}"
    assert chosen == nodes_named(build.chosen, nodes), f"{build.chosen}\n{rows(report)}"


def test_no_layer_was_foretold_otherwise(report: EligibilityReport) -> None:
    assert report.totals is not None
    assert report.totals.disagreements == (), rows(report)


def test_compare_times_both_engines_with_cuda_events(built: BuiltModel) -> None:
    options = ["--engines", "tensorrt", "--baseline", DENSE, "--rounds", str(ROUNDS)]
    options += ["--warmup", "3", "--time-limit", "30", "--json", "--quiet"]
    found = from_json(LatencyComparison, twofour(built.folder, "compare", RUN, *options))
    variants = {variant.name: variant for variant in found.variants}
    assert variants.keys() == {SPARSE, DENSE, f"{DENSE} again"}
    for variant in found.variants:
        assert (variant.error, len(variant.samples_ms)) == (None, ROUNDS), variant
        assert min(variant.samples_ms) > 0
        assert variant.settings is not None
        assert variant.settings.timing == GRAPH
        assert (variant.enqueue_ms or 0) > 0
        assert variant.settings.sparse_kernels is (variant.name == SPARSE)
        assert variant.layers
    (ratio,) = found.ratios
    assert (ratio.variant, ratio.baseline, ratio.only_sparsity) == (SPARSE, DENSE, True)
    assert ratio.low is not None
    assert ratio.high is not None
    assert 0 < ratio.low <= ratio.ratio <= ratio.high
    assert all((built.run / name).is_file() for name in ("latency.md", "latency.html"))


@pytest.mark.usefixtures("tensorrt", "sparse_cores")
def test_the_whole_chain_ends_in_a_measured_report(tmp_path: Path) -> None:
    onnx.save(dense_convolution(), tmp_path / "dense.onnx")
    shapes = f"x=1x64x32x32:{BATCH}x64x32x32:{BATCH}x64x32x32"
    twofour(tmp_path, "prune-export-build", "dense.onnx", "--shapes", shapes, "--out", RUN, "-q")
    found = read_record(EligibilityReport, tmp_path / RUN / "eligibility.json")
    (verdict,) = found.verdicts
    assert verdict.pattern_holds
    assert (verdict.node, verdict.evidence) == (WIDE, Evidence.MEASURED), rows(found)
    assert verdict.verdict in USABLE, rows(found)
    for name in ("report.md", "report.html"):
        assert WIDE in (tmp_path / RUN / name).read_text(encoding="utf-8")

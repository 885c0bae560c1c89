"""The main job on a small model: what it leaves, and what it does again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.small_run import ALL_STAGES, MODEL, OPTIONS, Recorder

import twofour
from twofour.errors import BadInputError
from twofour.jobs import run_all, run_export
from twofour.pipeline.folder import open_run_folder
from twofour.pipeline.stages import Runner, Silent, Stage, StageOutput
from twofour.pipeline.weight_sizes import model_sizes
from twofour.records.options import Precision, RunOptions
from twofour.records.run import RunResult
from twofour.records.weights import Pattern, PruneResult, ReasonCode, Selection

Finished = tuple[Path, RunResult, Recorder]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One whole run, shared by the tests that only look at it."""
    recorder = Recorder()
    path = tmp_path_factory.mktemp("run") / "small"
    return path, run_all(MODEL, path, OPTIONS, recorder), recorder


@pytest.fixture
def copy(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the finished run folder to change."""
    import shutil

    return Path(shutil.copytree(finished[0], tmp_path / "small"))


def test_a_run_does_every_stage_once_and_in_order(finished: Finished) -> None:
    assert finished[2].did == ALL_STAGES
    assert finished[2].kept == []
    names = {path.name for path in finished[0].iterdir()}
    assert names >= {"validate.json", "export.json", "layers.json", "accuracy.json", "report.html"}
    assert not [name for name in names if name.endswith(".part")]


def test_a_run_prunes_what_sparse_math_can_use_and_says_why_not_the_rest(
    finished: Finished,
) -> None:
    rows = {row.weight.layer: row for row in finished[1].prune.weights}
    assert {name: row.pruned for name, row in rows.items()} == {
        "stem": False,
        "body": True,
        "grouped": False,
        "head": True,
    }
    assert [r.code for r in rows["stem"].reasons] == [
        ReasonCode.AXIS_NOT_MULTIPLE,
        ReasonCode.TOO_SMALL,
    ]
    assert ReasonCode.GROUPED_CONV in [r.code for r in rows["grouped"].reasons]


def test_without_tensorrt_the_build_says_what_ran_instead(finished: Finished) -> None:
    built = finished[1].build
    if built.engine.engine == "tensorrt":
        pytest.skip("TensorRT runs here")
    assert [s.engine for s in built.not_used] == ["tensorrt"]
    assert [v.variant for v in built.variants] == ["dense", "sparse"]
    assert all(v.providers == ("CPUExecutionProvider",) for v in built.variants)
    assert all((v.median_ms or 0) > 0 for v in built.times.variants)
    assert sum("tensorrt cannot run here" in note for note in finished[2].notes) == 1


def test_the_exports_agree_with_the_module(finished: Finished) -> None:
    dense, sparse = finished[1].export.files
    assert len(dense.agreement) == 1
    assert dense.agreement[0].max_abs_error < 1e-5
    assert dense.agreement[0].cosine > 0.99999
    assert sparse.agreement == ()
    why = "its graph is that of dense.onnx, which is compared with the module"
    assert sparse.not_compared == why
    assert finished[1].accuracy.no_baseline is None
    assert not any(row.held_before for row in finished[1].prune.weights)
    drift = finished[1].accuracy.drift[0]
    assert 0.3 < drift.cosine < 0.99999


RESUMED = replace(OPTIONS, resume=True)


def test_a_run_that_is_resumed_does_nothing_again(copy: Path) -> None:
    recorder = Recorder()
    run_all(MODEL, copy, RESUMED, recorder)
    assert recorder.did == []
    assert recorder.kept == ALL_STAGES


def test_what_is_kept_is_said_before_the_stage_that_is_done(copy: Path) -> None:
    said: list[str] = []

    class Listening(Silent):
        def done(self, name: str, *, seconds: float) -> None:  # noqa: ARG002  # Protocol
            said.append(name)

        def note(self, text: str) -> None:
            if text.startswith("kept"):
                said.append(text)

    (copy / "validate.json").unlink()
    (copy / "report.md").unlink()
    run_all(MODEL, copy, RESUMED, Listening())
    rest = ", ".join(ALL_STAGES[4:-1])
    first = "kept: graph, export-dense, prune"
    assert said == [first, "validate", f"kept: {rest}", "report"]


@pytest.mark.parametrize(
    ("change", "redone"),
    [
        (
            lambda o: replace(o, pattern=Pattern(1, 4)),
            set(ALL_STAGES) - {"graph", "export-dense", "check-dense", "build-dense"},
        ),
        (lambda o: replace(o, build=replace(o.build, iterations=7)), {"times", "build", "report"}),
        # the outputs come out the same to the bit, so they are not compared again
        (lambda o: replace(o, opset=21), set(ALL_STAGES) - {"prune", "validate", "accuracy"}),
    ],
)
def test_a_changed_option_redoes_what_depends_on_it_and_no_more(
    copy: Path, change: Callable[[RunOptions], RunOptions], redone: set[str]
) -> None:
    recorder = Recorder()
    run_all(MODEL, copy, change(RESUMED), recorder)
    assert set(recorder.did) == redone


def test_a_metric_is_called_for_both_variants(copy: Path, tmp_path: Path) -> None:
    metric = tmp_path / "metric.py"
    metric.write_text(
        "import numpy as np\n"
        "def evaluate(predict):\n"
        "    out, = predict(np.ones((5, 3, 8, 8), np.float32))\n"
        "    return {'rows': out.shape[0], 'first': float(out[0, 0])}\n"
    )
    recorder = Recorder()
    options = replace(RESUMED, metric=f"{metric}:evaluate")
    metrics = {m.name: m for m in run_all(MODEL, copy, options, recorder).accuracy.metrics}
    assert (metrics["rows"].dense, metrics["rows"].sparse) == (5.0, 5.0)
    assert metrics["first"].dense != metrics["first"].sparse
    # the figures are in the checks, so what reads those is written again
    assert set(recorder.did) == {"check-dense", "check-sparse", "export", "accuracy", "report"}


def test_export_alone_writes_the_dense_model_only(tmp_path: Path) -> None:
    path, exported, checked = run_export(MODEL, tmp_path / "r", OPTIONS)
    assert checked.agreement[0].max_abs_error < 1e-5
    assert {name.layer for name in exported.layers.layers} == {"stem", "body", "grouped", "head"}
    assert (path / "dense.onnx").is_file()
    assert not (path / "sparse.onnx").exists()


def test_an_onnx_file_goes_through_the_whole_chain(finished: Finished, tmp_path: Path) -> None:
    options = RunOptions(precision=Precision.FLOAT32)
    result = run_all(str(finished[0] / "dense.onnx"), tmp_path / "r", options, Recorder())
    assert result.export.precision is None
    assert [row.pruned for row in result.prune.weights] == [False, True, False, True]
    assert result.validation.broken == ()
    assert result.accuracy.drift[0].shape == (2, 10), "the inputs of the run folder it is in"
    sparse = (tmp_path / "r" / "sparse.onnx").stat().st_size
    assert sparse == pytest.approx((finished[0] / "sparse.onnx").stat().st_size, rel=0.01)


_W = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
PACKED = {
    "COO": (_W.to_sparse(), "sparse_coo"),
    "CSR": (_W.to_sparse_csr(), "sparse_csr"),
    "quantised": (torch.quantize_per_tensor(_W, 0.1, 0, torch.qint8), "qint8"),
    "meta": (_W.to("meta"), "meta"),
    "nested": (torch.nested.nested_tensor([_W, _W[:3]]), "nested"),
    "no type of safetensors": (_W.to(torch.complex128), "complex128"),
}


@pytest.mark.filterwarnings("ignore:.*(nested|CSR|quantiz)")
@pytest.mark.parametrize("read", [model_sizes, twofour.validate])
@pytest.mark.parametrize(("tensor", "named"), PACKED.values(), ids=PACKED)
def test_a_tensor_that_is_no_array_is_refused_by_its_name(
    read: Callable[[Path], object], tensor: torch.Tensor, named: str, tmp_path: Path
) -> None:
    torch.save({"fc.weight": tensor, "other.weight": _W}, tmp_path / "c.pt")
    with pytest.raises(BadInputError, match=rf"c\.pt(: fc\.weight)? is .*{named}") as caught:
        read(tmp_path / "c.pt")
    assert caught.value.hint


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("read", [model_sizes, twofour.validate])
def test_a_state_dict_that_torch_ao_packed_is_refused(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 64))
    packed = torch.ao.quantization.quantize_dynamic(net, {torch.nn.Linear})  # type: ignore[no-untyped-call]  # torch's own
    torch.save(packed.state_dict(), tmp_path / "c.pt")
    with pytest.raises(BadInputError, match=r"c\.pt: 0\._packed_params\S* is packed by torch\.ao"):
        read(tmp_path / "c.pt")


def test_bfloat16_files_are_compared_by_the_outputs_of_the_module(tmp_path: Path) -> None:
    result = run_all(MODEL, tmp_path / "r", RunOptions(precision=Precision.BFLOAT16))
    (drift,) = result.accuracy.drift
    assert 0.5 < drift.cosine < 1
    assert "NOT_IMPLEMENTED" in (result.accuracy.by_module or "")
    assert result.accuracy.not_compared is None


def test_without_resume_a_stage_is_done_once_by_every_run(tmp_path: Path) -> None:
    record = PruneResult(
        source="m", pattern=Pattern(2, 4), method="magnitude", selection=Selection(), weights=()
    )
    calls: list[str] = []

    def work() -> StageOutput[PruneResult]:
        calls.append("prune")
        (tmp_path / "weights").write_text("w")
        return record, ("weights",)

    stage = Stage(
        name="prune",
        title="prune",
        record="prune.json",
        kind=PruneResult,
        work=work,
        depends_on=(),
    )
    for runs in (1, 2):
        with open_run_folder(tmp_path, "m") as folder:
            runner = Runner(folder, Silent())
            assert [runner.run(stage) for _ in range(2)] == [record] * 2
        assert len(calls) == runs

"""What `compare` says about an emitted folder that came back, and the times it reads there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.trtexec_machine import Machine, emit, model

from twofour.errors import BadInputError
from twofour.pipeline.emitting import compare_emitted, emit_trtexec, read_trtexec_times
from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.records.options import CompareOptions, RunOptions

SPARSE = "sparse@trtexec:gpu"
DENSE = "sparse@trtexec:gpu-sparsity-off"
"""What the file called dense is here: no dense model was given."""
AGAIN = f"{DENSE} again"


def built(
    tmp_path: Path, *, rounds: str | None = None, failing: str = "", failing_passes: str = ""
) -> Path:
    """An emitted folder that build.sh ran in, by default in all its rounds."""
    folder = tmp_path / "out"
    emit(model(tmp_path / "m.onnx"), folder)
    environment = {"FAILING_PASSES": failing_passes}
    machine = Machine(root=tmp_path, rounds=rounds, failing=failing, environment=environment)
    machine.run(folder)
    return folder


def compared(folder: Path, **options: object) -> LatencyComparison:
    return compare_emitted(folder, CompareOptions(**options))  # type: ignore[arg-type]  # by name


def test_each_round_gives_the_median_of_its_passes_and_the_ratio_comes_out_right(
    tmp_path: Path,
) -> None:
    comparison = compared(built(tmp_path))
    dense, sparse, again = comparison.variants
    assert [v.name for v in comparison.variants] == [DENSE, SPARSE, AGAIN]
    assert dense.samples_ms == again.samples_ms == tuple((200 + n) / 100 for n in range(1, 13))
    assert sparse.samples_ms == tuple((150 + n) / 100 for n in range(1, 13))
    (ratio,) = comparison.ratios
    assert (ratio.variant, ratio.baseline, ratio.rounds) == (SPARSE, DENSE, 12)
    assert ratio.ratio == pytest.approx(156.5 / 206.5, abs=1e-4)
    assert (ratio.verdict, ratio.only_sparsity) == (LatencyVerdict.FASTER, True)
    (noise,) = comparison.noise
    assert (noise.variant, noise.again, noise.floor) == (DENSE, AGAIN, 0)
    assert (comparison.baseline, comparison.machine, comparison.partial) == (DENSE, None, None)
    assert (comparison.options.rounds, comparison.options.warmup) == (12, 0)
    assert comparison.notes == (
        "timed by trtexec of TensorRT 10.3.0 on NVIDIA H100 PCIe",
        "p90 and p99 are of all single runs, the samples are medians of the passes",
    )
    assert dense.batch == 8
    assert dense.median_ms == pytest.approx(2.065)
    assert dense.throughput == pytest.approx(8e3 / 2.065)
    assert (dense.p90_ms, dense.p99_ms) == (2.26, 2.32), "ranks 54 and 60 of 60 runs"
    (contrast,) = comparison.layers
    assert (contrast.variant, contrast.baseline) == (SPARSE, DENSE)
    (row,) = contrast.rows
    assert (row.layer, row.variant_ms, row.baseline_ms, row.ratio) == ("fc", 1.5, 2.0, 0.75)


def test_settings_are_those_of_the_logs_and_the_commands(tmp_path: Path) -> None:
    dense, sparse, again = compared(built(tmp_path)).variants
    assert dense.settings is not None
    assert sparse.settings is not None
    assert again.settings == dense.settings
    assert (dense.settings.engine, dense.settings.mode) == ("trtexec", "gpu-sparsity-off")
    assert dense.settings.version == "10.3.0"
    assert dense.settings.device == "NVIDIA H100 PCIe"
    assert (dense.settings.weights, sparse.settings.weights) == ("sparse", "sparse")
    assert (dense.settings.sparse_kernels, sparse.settings.sparse_kernels) == (False, True)
    assert (dense.settings.precision, dense.settings.model) == ("float16", "sparse.onnx")
    assert dense.settings.timing.startswith("the median of 1 s of runs on the GPU")
    assert {"--stronglyTyped", "--shapes=x:8x8", "--warmUp=500"} <= set(dense.settings.options)
    assert not [o for o in dense.settings.options if "dense" in o], "file names are no setting"
    assert (dense.open_s, dense.size_bytes, dense.peak_memory_bytes) == (12.5, 16, None)


def test_an_engine_that_ran_without_a_cuda_graph_is_not_timed_like_one_that_did(
    tmp_path: Path,
) -> None:
    folder = built(tmp_path)
    log = folder / "times" / "sparse.3.log"
    log.write_text("[W] The specified --useCudaGraph flag has been ignored. The inference will\n")
    dense, sparse, _ = (row.settings for row in compared(folder).variants)
    assert dense is not None
    assert sparse is not None
    assert sparse.timing == f"{dense.timing}; no CUDA graph could be captured"
    assert not compared(folder).ratios[0].only_sparsity


def test_the_engine_of_a_dense_model_is_the_baseline(tmp_path: Path) -> None:
    model(tmp_path / "dense.onnx")
    emit_trtexec(
        model(tmp_path / "m.onnx"),
        tmp_path / "out",
        RunOptions(dense_reference=str(tmp_path / "dense.onnx")),
        "10",
    )
    Machine(root=tmp_path, rounds=None).run(tmp_path / "out")
    comparison = compared(tmp_path / "out")
    names = ["dense@trtexec:gpu", "sparse@trtexec:gpu", "dense@trtexec:gpu again"]
    assert [row.name for row in comparison.variants] == names
    dense = comparison.variants[0].settings
    assert dense is not None
    assert (dense.model, dense.weights, dense.sparse_kernels) == ("dense.onnx", "dense", False)
    (ratio,) = comparison.ratios
    assert (ratio.baseline, ratio.only_sparsity) == ("dense@trtexec:gpu", True)


def test_a_round_in_which_an_engine_was_not_timed_is_left_out_and_named(tmp_path: Path) -> None:
    comparison = compared(built(tmp_path, failing_passes="sparse.2 sparse.5 dense-again.7"))
    kept = [n for n in range(1, 13) if n not in (2, 5, 7)]
    assert comparison.variants[0].samples_ms == tuple((200 + n) / 100 for n in kept)
    assert comparison.variants[1].samples_ms == tuple((150 + n) / 100 for n in kept)
    assert comparison.ratios[0].rounds == comparison.options.rounds == 9
    assert (comparison.ratios[0].low, comparison.ratios[0].high) == (None, None)
    assert comparison.ratios[0].verdict is LatencyVerdict.UNDECIDED
    assert comparison.notes[-1].startswith("9 rounds give no interval, it takes 10: run build.sh")
    assert "round 2, 5, 7 (times/*.log)" in comparison.notes[0]


def test_a_damaged_file_of_times_costs_its_round_alone(tmp_path: Path) -> None:
    folder = built(tmp_path)
    (folder / "times" / "dense.4.json").write_text('[\n  { "computeMs" : 2')
    comparison = compared(folder)
    assert comparison.ratios[0].rounds == 11
    assert "round 4 " in comparison.notes[0]


def test_without_the_second_dense_run_there_is_a_ratio_and_no_noise(tmp_path: Path) -> None:
    failing = " ".join(f"dense-again.{n}" for n in range(1, 13))
    comparison = compared(built(tmp_path, failing_passes=failing))
    assert comparison.variants[2].error == "no timing pass of it left its times"
    assert comparison.noise == ()
    assert comparison.ratios[0].rounds == 12


def test_a_folder_that_came_back_without_plans_and_dense_log_says_what_is_left(
    tmp_path: Path,
) -> None:
    folder = built(tmp_path)
    for name in ("dense.plan", "sparse.plan", "dense.log", "dense.profile.json"):
        (folder / name).unlink()
    comparison = compared(folder)
    dense = comparison.variants[0]
    assert dense.settings is not None
    assert dense.settings.device == "NVIDIA H100 PCIe"
    assert (dense.size_bytes, dense.open_s, dense.layers) == (None, None, ())
    assert (dense.batch, comparison.layers) == (8, ())
    assert comparison.ratios[0].only_sparsity


def test_a_model_with_fixed_shapes_has_the_batch_of_its_file(tmp_path: Path) -> None:
    emit(model(tmp_path / "m.onnx", shape=[4, 8]), tmp_path / "out")
    Machine(root=tmp_path, rounds="1").run(tmp_path / "out")
    assert compared(tmp_path / "out").variants[0].batch == 4


def test_a_folder_without_times_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="times of whole rounds") as error:
        compared(built(tmp_path, rounds="0"))
    assert "run build.sh in it on a machine with TensorRT 10.x" in (error.value.hint or "")


def test_a_folder_in_which_an_engine_failed_says_which(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"trtexec failed, dense\.log"):
        compared(built(tmp_path, failing="dense"))


def test_an_option_that_asks_for_a_measurement_is_refused(tmp_path: Path) -> None:
    folder = built(tmp_path, rounds="1")
    with pytest.raises(BadInputError, match="--seed and --fail-if"):
        compared(folder, rounds=20)


TIMES = """[
  { "startEnqMs" : 0, "endEnqMs" : 0.01, "startH2dMs" : 0, "endH2dMs" : 0, "startComputeMs" : 0.1, \
"endComputeMs" : 9.1, "startD2hMs" : 9.1, "endD2hMs" : 9.1, "h2dMs" : 0, "computeMs" : 9, \
"d2hMs" : 0, "latencyMs" : 9, "endToEndMs" : 9 }
, { "startEnqMs" : 201, "endEnqMs" : 201.1, "startH2dMs" : 201, "endH2dMs" : 201, \
"startComputeMs" : 201, "endComputeMs" : 203, "startD2hMs" : 203, "endD2hMs" : 203, "h2dMs" : 0, \
"computeMs" : 2.00006, "d2hMs" : 0, "latencyMs" : 2.00006, "endToEndMs" : 2.1 }
]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "dense.times.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_computing_times_behind_the_warm_up_are_read(tmp_path: Path) -> None:
    assert read_trtexec_times(written(tmp_path, TIMES), warmup_ms=200) == (2.00006,)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"computeMs": 1}',
        '[{"computeMs": "two"}]',
        '[{"computeMs": 2}, {"computeMs": 0}]',
        '[{"startComputeMs": 100, "computeMs": 2}]',
    ],
)
def test_a_file_without_usable_times_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInputError, match=r"no times in .*dense\.times\.json"):
        read_trtexec_times(written(tmp_path, text), warmup_ms=200)

"""A folder for trtexec: what is in it, what its build.sh does, and the times it comes back with."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.trtexec_machine import Machine, Ran, emit, model
from typer.testing import CliRunner

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.pipeline.emitting import compare_emitted, emit_trtexec, read_trtexec_times
from twofour.pipeline.evidence_files import is_emitted_folder, read_emitted
from twofour.pipeline.folder import MANIFEST
from twofour.records.export import LayerMap, LayerName, TrtexecFolder
from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.records.options import CompareOptions, RunOptions, ShapeProfile
from twofour.records.run import RunManifest
from twofour.store import read_record, write_record

ODD_NAMES = ('it\'s "quoted"', "$(touch owned)`x`;#", "日本 é", "-dash")


def test_the_folder_holds_the_model_with_its_data_the_script_and_a_record(tmp_path: Path) -> None:
    source = model(tmp_path / "m.onnx")
    emitted = emit(source, tmp_path / "out")
    names = {entry.name for entry in (tmp_path / "out").iterdir()}
    assert names == {"sparse.onnx", "sparse.onnx.data", "build.sh", "emitted.json"}
    copied = onnx.load(tmp_path / "out" / "sparse.onnx")
    assert copied.graph.initializer[0].raw_data == onnx.load(source).graph.initializer[0].raw_data
    assert os.access(tmp_path / "out" / "build.sh", os.X_OK)
    assert is_emitted_folder(tmp_path / "out")
    assert read_record(TrtexecFolder, tmp_path / "out" / "emitted.json") == emitted
    assert (emitted.tensorrt, emitted.layer_map) == ("10.x", None)


@pytest.mark.parametrize("is_run", [True, False])
def test_the_dense_model_of_a_run_goes_along_and_is_what_the_dense_engine_is_built_from(
    tmp_path: Path, is_run: bool
) -> None:
    source = model(tmp_path / "sparse.onnx")
    model(tmp_path / "dense.onnx")
    if is_run:
        manifest = RunManifest(source="m", twofour_version="0", stages=())
        write_record(tmp_path / MANIFEST, manifest)
    emitted = emit(source, tmp_path / "out")
    built_from = {variant.variant: variant.onnx for variant in emitted.variants}
    dense = "dense.onnx" if is_run else "sparse.onnx"
    assert built_from == {"sparse": "sparse.onnx", "dense": dense}
    assert (tmp_path / "out" / "dense.onnx").is_file() is is_run
    ran = Machine(root=tmp_path).run(tmp_path / "out")
    assert [note for note in ran.notes if note.startswith("--onnx=")] == [
        "--onnx=sparse.onnx",
        f"--onnx={dense}",
    ]
    (tmp_path / "out" / dense).unlink()
    ran = Machine(root=tmp_path).run(tmp_path / "out")
    assert (ran.code, f"holds no {dense}" in ran.stderr) == (2, True)


def test_a_second_build_starts_with_an_empty_timing_cache_and_may_have_more_arguments(
    tmp_path: Path,
) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    machine = Machine(root=tmp_path)
    machine.run(tmp_path / "out")
    notes = machine.run(tmp_path / "out", "--plugins=a b.so", "--device=1").notes
    assert [n for n in notes if "cache found" in n] == ["cache found by dense"]
    assert notes.count("--plugins=a b.so") == notes.count("--device=1") == 2


@pytest.mark.parametrize("odd", ODD_NAMES)
def test_odd_names_of_folders_and_inputs_come_through_whole(tmp_path: Path, odd: str) -> None:
    tensor = odd.replace("'", "")
    root = tmp_path / odd
    root.mkdir()
    emit(model(root / "m.onnx", name=tensor), root / f"{odd} out")
    ran = Machine(root=root).run(root / f"{odd} out")
    assert ran.code == 0, ran.stderr
    assert ran.notes.count(f"--optShapes={tensor}:8x8") == 2
    assert (root / f"{odd} out" / "sparse.plan").read_text() == "engine of sparse\n"
    assert not list(tmp_path.rglob("owned"))


def test_an_engine_that_fails_is_named_and_the_other_one_is_built(tmp_path: Path) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    Machine(root=tmp_path, rounds="2").run(tmp_path / "out")
    ran = Machine(root=tmp_path, rounds="2", failing="sparse").run(tmp_path / "out")
    assert (ran.code, passes(ran)) == (5, [])
    assert list((tmp_path / "out" / "times").iterdir()) == [], "those of the first build are gone"
    assert "sparse: failed\n    [07/07/2026-02:11:09] [E] Error[2]: out of" in ran.stderr
    assert "build.sh: failed: sparse" in ran.stderr
    assert (tmp_path / "out" / "failed.txt").read_text() == "sparse\n"
    left = {entry.name for entry in (tmp_path / "out").glob("*.plan")}
    assert left == {"dense.plan"}, "the plan of the first build is not taken for that of the second"


@pytest.mark.parametrize(
    ("emitted_for", "machine", "code", "said"),
    [
        ("10.3", {"version": "8602"}, 2, ["is of TensorRT 8.6", "--tensorrt-version 8.6"]),
        ("8.6", {"version": "8510"}, 2, ["is of TensorRT 8.5", "--tensorrt-version 8.5"]),
        ("10", {"version": ""}, 2, ["does not say its", "&&&& RUNNING TensorRT.trtexec"]),
        ("10", {"on_path": False}, 3, ["no /usr/src/tensorrt/bin/trtexec", "TRTEXEC=/path/to/"]),
        ("10", {"rounds": "ten"}, 2, ["ROUNDS=ten is not"]),
        ("10", {"rounds": "1000"}, 2, ["ROUNDS=1000 is not"]),
    ],
)
def test_what_cannot_be_built_or_timed_is_refused_before_anything_runs(
    tmp_path: Path, emitted_for: str, machine: dict[str, Any], code: int, said: list[str]
) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out", emitted_for)
    ran = Machine(root=tmp_path, **machine).run(tmp_path / "out")
    assert (ran.code, ran.notes) == (code, ())
    assert [words for words in said if words not in ran.stderr] == []


@pytest.mark.parametrize("absolute", [True, False])
def test_trtexec_can_be_named_relative_to_where_the_user_is(tmp_path: Path, absolute: bool) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    named = str(tmp_path / "bin" / "trtexec") if absolute else "bin/trtexec"
    machine = Machine(root=tmp_path, on_path=False, environment={"TRTEXEC": named})
    ran = machine.run(tmp_path / "out")
    assert ran.code == 0, ran.stderr
    assert (tmp_path / "out" / "dense.plan").is_file()


def passes(ran: Ran) -> list[str]:
    """Names of the timing passes in the order in which they ran, as "dense-again.3"."""
    files = [n.removeprefix("--exportTimes=times/") for n in ran.notes if "=times/" in n]
    return [name.removesuffix(".json") for name in files]


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_both_engines_are_timed_in_twelve_rounds_of_changing_order(
    tmp_path: Path, shell: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    ran = Machine(root=tmp_path, rounds=None, shell=shell).run(tmp_path / "out")
    assert (ran.code, ran.stderr) == (0, "")
    engines, numbers = zip(*(name.split(".") for name in passes(ran)), strict=True)
    assert numbers == tuple(str(n) for n in range(1, 13) for _ in range(3))
    orders = [engines[at : at + 3] for at in range(0, 36, 3)]
    assert {*orders[:6]} == {*permutations(("dense", "dense-again", "sparse"))}
    assert orders[6:] == orders[:6]
    left = {entry.name for entry in (tmp_path / "out" / "times").iterdir()}
    assert left == {f"{name}.{end}" for name in passes(ran) for end in ("json", "log")}
    assert "timing 12 rounds of" in ran.stdout
    assert ran.stdout.endswith("twofour compare FOLDER\n")


def test_a_pass_loads_its_plan_at_the_opt_shapes_with_the_flags_of_the_release(
    tmp_path: Path,
) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out", "8.6")
    ran = Machine(root=tmp_path, version="8601", rounds="1").run(tmp_path / "out", "--device=1")
    flags = (
        *("--shapes=x:8x8", "--warmUp=500", "--duration=1"),
        *("--useCudaGraph", "--useSpinWait", "--noDataTransfers"),
    )
    assert list(ran.notes[-3 * 9 :]) == [
        argument
        for engine, plan in (("dense", "dense"), ("dense-again", "dense"), ("sparse", "sparse"))
        for argument in (
            f"--loadEngine={plan}.plan",
            *flags,
            f"--exportTimes=times/{engine}.1.json",
            "--device=1",
        )
    ]


def test_a_pass_that_fails_is_said_and_the_others_run(tmp_path: Path) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    failing = {"FAILING_PASSES": "sparse.2 dense-again.3"}
    machine = Machine(root=tmp_path, rounds="3", environment=failing)
    ran = machine.run(tmp_path / "out")
    assert ran.code == 0
    assert len(passes(ran)) == 9
    assert ran.stderr.splitlines() == [
        "sparse: timing failed, times/sparse.2.log says why",
        "dense-again: timing failed, times/dense-again.3.log says why",
        "timing passes that failed: 2; their rounds cannot be compared",
    ]
    assert not (tmp_path / "out" / "times" / "sparse.2.json").exists(), "it was half written"
    assert "no memory for sparse.2" in (tmp_path / "out" / "times" / "sparse.2.log").read_text()


def test_shapes_are_those_asked_for_then_those_of_examples_then_a_batch_of_1_to_8(
    tmp_path: Path,
) -> None:
    source = model(tmp_path / "m.onnx", shape=["batch", 8])
    asked = ShapeProfile(input="x", min=(2, 8), opt=(4, 8), max=(6, 8))
    assert emit(source, tmp_path / "a", shapes=(asked,)).options.shapes == (asked,)
    by_example = emit_trtexec(source, tmp_path / "b", RunOptions(input_shapes=((5, 8),)), "10")
    assert by_example.options.shapes == (
        ShapeProfile(input="x", min=(1, 8), opt=(5, 8), max=(8, 8)),
    )
    assert emit(source, tmp_path / "c").options.shapes == (
        ShapeProfile(input="x", min=(1, 8), opt=(8, 8), max=(8, 8)),
    )


def test_another_dynamic_dimension_is_never_guessed(tmp_path: Path) -> None:
    source = model(tmp_path / "m.onnx", shape=["batch", "width"])
    with pytest.raises(BadInputError, match="leaves sizes of") as error:
        emit(source, tmp_path / "out")
    assert "--shapes x=min:opt:max" in (error.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sparse.onnx").write_text("mine")
    with pytest.raises(BadInputError, match="is not empty"):
        emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    assert (tmp_path / "out" / "sparse.onnx").read_text() == "mine"


def test_nothing_is_left_in_the_folder_where_writing_it_fails(tmp_path: Path) -> None:
    source = model(tmp_path / "m.onnx")
    write_record(tmp_path / MANIFEST, RunManifest(source="m", twofour_version="0", stages=()))
    (tmp_path / "layers.json").write_text("damaged")
    with pytest.raises(BadInputError, match=r"layers\.json"):
        emit(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_names_of_modules_come_along_from_a_run_folder(tmp_path: Path) -> None:
    source = model(tmp_path / "sparse.onnx")
    row = LayerName(layer="head", parameter="head.weight", node="fc", initializer="w", op="Gemm")
    write_record(tmp_path / "layers.json", LayerMap(layers=(row,)))
    assert emit(source, tmp_path / "a").layer_map is None, "that layers.json is no run's"
    manifest = RunManifest(source="m", twofour_version="0", stages=())
    write_record(tmp_path / MANIFEST, manifest)
    assert emit(source, tmp_path / "b").layer_map == "layers.json"
    assert read_record(LayerMap, tmp_path / "b" / "layers.json").layers == (row,)


def test_a_folder_nothing_was_built_in_says_what_to_run_where(tmp_path: Path) -> None:
    emitted = emit(model(tmp_path / "m.onnx"), tmp_path / "out", "8.4")
    with pytest.raises(BadInputError, match=r"contains no sparse\.log") as error:
        read_emitted(tmp_path / "out")
    assert "build.sh" in (error.value.hint or "")
    assert "TensorRT 8.4 or 8.5" in (error.value.hint or "")
    Machine(root=tmp_path, version="8401").run(tmp_path / "out")
    assert read_emitted(tmp_path / "out") == emitted


def test_the_command_line_writes_the_folder_and_says_how_to_go_on(tmp_path: Path) -> None:
    source = model(tmp_path / "m.onnx")
    out = tmp_path / "with a space"
    arguments = ["build", str(source), "--engine", "onnxruntime", "--tensorrt-version", "8.6"]
    emitting = [*arguments, "--emit-trtexec", str(out), "--opt-level", "4"]
    result = CliRunner().invoke(application(), emitting)
    assert result.exit_code == 0, result.output
    assert f"twofour report '{out}', " in result.stdout
    assert "--builderOptimizationLevel=4" in shlex.split((out / "build.sh").read_text())
    assert not (tmp_path / "runs").exists()
    emitting = [*arguments, "--emit-trtexec", str(tmp_path / "out"), "--json"]
    printed = json.loads(CliRunner().invoke(application(), emitting).stdout)
    assert [v["variant"] for v in printed["variants"]] == ["sparse", "dense"]
    advice = "has 18: export the torch model with --opset 17"
    assert any(advice in note for note in printed["notes"])


# --- what compare says about a folder that came back, and the times it reads there ----------------


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

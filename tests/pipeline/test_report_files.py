"""`report_files`: which build of a log is taken, whose GPU counts, models that cannot be judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support import onnx_models as om
from support.real_logs import real_log
from support.report_cases import totals_of
from support.small_run import Recorder
from typer.testing import CliRunner

from twofour.cli import application
from twofour.eligibility.layer_gates import Gates, missed_gates
from twofour.errors import BadInputError
from twofour.jobs import run_all
from twofour.pipeline.evidence_files import EvidenceFiles, read_evidence
from twofour.pipeline.reporting import report_document, report_files, report_folder, with_forecast
from twofour.pruning.methods.magnitude import prune_in_place
from twofour.records.eligibility import EligibilityReport, Evidence, VerdictName
from twofour.records.export import Gpu
from twofour.records.forecast import Worth
from twofour.records.options import BuildOptions, MathPrecision, RunOptions
from twofour.records.weights import Pattern, ReasonCode, Selection
from twofour.reports.eligibility_words import advice_lines
from twofour.reports.explain import layer_story
from twofour.reports.terminal import plain_text
from twofour.reports.text import markdown
from twofour.store import to_json

CHOSEN, ELIGIBLE = VerdictName.CHOSEN, VerdictName.ELIGIBLE


def model(path: Path, *names: str) -> Path:
    """A chain of 1x1 convolutions of 256 channels, pruned to 2:4."""
    weights, nodes, before = {}, [], "x"
    for name in names:
        array = om.weights(256, 256, 1, 1, dtype=np.float16)
        prune_in_place(array, 1, Pattern(2, 4))
        weights[f"{name}.w"] = array
        inputs, outputs = [before, f"{name}.w"], [f"{name}_out"]
        nodes.append(helper.make_node("Conv", inputs, outputs, name=name))
        before = f"{name}_out"
    return save(path, nodes, weights)


def save(path: Path, nodes: Sequence[onnx.NodeProto], weights: dict[str, om.Array]) -> Path:
    """A graph from `x` to the last node's output."""
    sizes: dict[str, list[int | str]] = {"x": [1, 256, 8, 8]}
    return om.save(om.model(nodes, weights, inputs=sizes, outputs=nodes[-1].output), path)


def built(
    eligible: Sequence[str],
    chosen: Sequence[str],
    *,
    flag: str = "Enabled",
    lines: bool = True,
    end: str = "PASSED",
) -> list[str]:
    """One trtexec run with its (Sparsity) lines."""
    words = "TensorRT.trtexec [TensorRT v101601] # trtexec --onnx=m.onnx --verbose"
    said = [
        f"Found {len(eligible)} layer(s) eligible to use sparse tactics: {', '.join(eligible)}",
        f"Chose {len(chosen)} layer(s) using sparse tactics: {', '.join(chosen)}",
    ]
    return [
        f"&&&& RUNNING {words}",
        f"[07/07/2026-02:11:09] [I] Sparsity: {flag}",
        "[07/07/2026-02:11:09] [I] Selected Device: NVIDIA GeForce RTX 3090",
        "[07/07/2026-02:11:09] [I] Compute Capability: 8.6",
        *(f"[07/07/2026-02:11:09] [V] [TRT] (Sparsity) {text}" for text in said if lines),
        "[07/07/2026-02:11:09] [I] [TRT] Engine generation completed in 3.2 seconds.",
        *(["[07/07/2026-02:11:09] [E] [TRT] out of memory"] if end == "FAILED" else []),
        f"&&&& {end} {words}",
    ]


def write(path: Path, *builds: list[str]) -> Path:
    path.write_text("\n".join(line for build in builds for line in build) + "\n")
    return path


def verdicts(report: EligibilityReport) -> list[VerdictName]:
    return [v.verdict for v in report.verdicts]


GOOD = built(["a", "b"], ["a"])
OTHER = built(["x", "y"], ["y"])


def of_file(name: str, eligible: Sequence[str], chosen: Sequence[str]) -> list[str]:
    return [line.replace("=m.onnx", f"={name}") for line in built(eligible, chosen)]


def test_the_version_and_the_flags_of_another_model_s_build_set_no_verdict(tmp_path: Path) -> None:
    weight = om.weights(256, 256, dtype=np.float16)
    prune_in_place(weight, 0, Pattern(2, 4))
    product = helper.make_node("MatMul", ["x", "m.w"], ["y"], name="m")
    onnx_file = save(tmp_path / "m.onnx", [product], {"m.w": weight})
    old = [line.replace("v101601", "v8601") for line in OTHER]
    alone = report_files(EvidenceFiles(onnx=onnx_file)).report
    strange = report_files(
        EvidenceFiles(onnx=onnx_file, log=write(tmp_path / "other.log", old))
    ).report
    assert "do not belong together" in strange.notes[0]
    (said,), (ruled, *_) = strange.verdicts, alone.verdicts
    assert (said.verdict, said.predicted) == (ruled.verdict, ruled.predicted)
    assert [r for r in said.reasons if r.code is not ReasonCode.LOG_SILENT] == list(ruled.reasons)
    assert "TensorRT" not in (said.remedy or "")


# --- which build ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("builds", "used"),
    [
        ((GOOD, OTHER), 1),
        ((OTHER, GOOD), 2),
        ((GOOD, built([], [], lines=False)), 1),
        ((GOOD, built(["a"], [], end="FAILED")), 1),
        ((GOOD, built([], [], flag="Disabled", lines=False)), 1),
        ((built(["b"], []), GOOD), 2),
        # the same names in a build of another file; no build is of this file
        ((GOOD, of_file("other.onnx", ["a", "b"], ["b"])), 1),
        ((of_file(r"C:\models\m.onnx", ["a", "b"], ["a"]), of_file("n.onnx", ["a"], [])), 1),
        ((of_file("dense.onnx", ["a"], []), of_file("n.onnx", ["a", "b"], ["a"])), 2),
        # a build of other layers
        ((of_file("n.onnx", ["a", "b"], ["a"]), OTHER), 1),
    ],
)
def test_of_several_builds_the_one_that_tells_of_this_model_is_taken(
    tmp_path: Path, builds: tuple[list[str], ...], used: int
) -> None:
    files = EvidenceFiles(
        onnx=model(tmp_path / "m.onnx", "a", "b"), log=write(tmp_path / "l.log", *builds)
    )
    judged = report_files(files)
    report, evidence = judged.report, judged.evidence()
    assert verdicts(report) == [CHOSEN, ELIGIBLE]
    assert report.not_evidence is None
    assert evidence.build is not None
    first, last = evidence.build.first_line, evidence.build.last_line
    assert (
        f"{tmp_path / 'l.log'} contains 2 builds: number {used} is used (lines {first} to {last})"
        in report.notes
    )


def subgraph(
    prefix: str, eligible: str, chosen: str, *, timed: str = "", lines: bool = True
) -> list[str]:
    """One engine of ONNX Runtime or Torch-TensorRT; a letter is a layer."""
    runners = (f"--------------- Timing Runner: {x} (CaskConvolution[0x80000009])" for x in timed)
    said = [
        f"(Sparsity) Found {len(eligible)} layer(s) eligible to use sparse tactics: "
        + ", ".join(eligible),
        f"(Sparsity) Chose {len(chosen)} layer(s) using sparse tactics: {', '.join(chosen)}",
    ]
    start = "Local timing cache in use. Profiling results will not be stored."
    ends = "Engine generation completed in 3.2 seconds."
    return [prefix + x for x in (start, *runners, *(said if lines else ()), ends)]


PYTHON = "[07/07/2026-02:11:09] [TRT] [V] "
PREFIXES = (
    PYTHON,
    "2026-07-07 06:14:38 - torch_tensorrt [TensorRT Conversion Context] - DEBUG - ",
    "2026-05-01 10:00:00.123456789 [V:onnxruntime:Default, tensorrt_execution_provider.h:84 log] "
    "[2026-05-01 10:00:00 VERBOSE] ",
)


def judged(tmp_path: Path, *builds: list[str]) -> tuple[str, EligibilityReport]:
    """A letter for what was measured of each layer, a to f; "?": nothing."""
    onnx_file, log = model(tmp_path / "m.onnx", *"abcdef"), write(tmp_path / "l.log", *builds)
    found = report_files(EvidenceFiles(onnx=onnx_file, log=log)).report
    measured = (v.evidence is Evidence.MEASURED for v in found.verdicts)
    known = zip(found.verdicts, measured, strict=True)
    return "".join(v.verdict.value[0] if m else "?" for v, m in known), found


@pytest.mark.parametrize("prefix", PREFIXES)
def test_engines_without_a_layer_in_common_are_parts_of_one_model(
    tmp_path: Path, prefix: str
) -> None:
    parts = [subgraph(prefix, *x) for x in (("ab", "a"), ("cd", "d"), ("e", ""))]
    said, found = judged(tmp_path, *parts)
    assert said == "ceecen"
    used = "numbers 1, 2 and 3 are used together: they have no layer in common"
    assert f"{tmp_path / 'l.log'} contains 3 builds: {used}" in found.notes
    assert missed_gates(found, Gates(min_chosen=0.3)) == ()
    alone = report_files(EvidenceFiles(log=tmp_path / "l.log")).report
    assert [v.layer for v in alone.verdicts] == list("abcde")
    again = [subgraph(prefix, *x) for x in (("ab", "b"), ("cd", ""))]
    assert judged(tmp_path, *parts, *again)[0] == "eceeen"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # a name in common: parts, or one model with other weights
        ({"eligible": "abf", "chosen": "a"}, {"eligible": "cdf", "chosen": "d"}, "??ecne"),
        # the second engine has the same layers
        ({"timed": "abcd"}, {"eligible": "cd", "chosen": "d", "timed": "abcd"}, "nnecnn"),
        ({"eligible": "abc", "chosen": "a"}, {"eligible": "abc", "chosen": "b"}, "ecennn"),
        # a part without lists
        ({"eligible": "ab", "chosen": "a"}, {"timed": "cd", "lines": False}, "ce??nn"),
        ({"timed": "cd", "lines": False}, {"eligible": "ab", "chosen": "a"}, "ce??nn"),
        # a part, or a build in which nothing was eligible
        ({"eligible": "ab", "chosen": "a"}, {}, "??nnnn"),
    ],
)
def test_what_another_engine_of_the_log_may_hold_is_not_measured(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], expected: str
) -> None:
    named = ({"eligible": "", "chosen": "", **given} for given in (first, second))
    assert judged(tmp_path, *(subgraph(PYTHON, **given) for given in named))[0] == expected


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_engine_that_names_no_layer_may_have_any_of_those_that_another_leaves_out(
    tmp_path: Path, prefix: str
) -> None:
    built = subgraph(prefix, "ab", "a")
    loaded = [prefix + "Loaded engine size: 3 MiB"]
    nameless = subgraph(prefix, "", "", lines=False)
    # Python and trtexec build one engine of a model: its list leaves out what is not eligible
    left_out = "n" if prefix == PYTHON else "?"
    for builds in ([loaded, built], [built, loaded], [built, nameless[:1]], [nameless[1:], built]):
        said, found = judged(tmp_path, *builds)
        assert said == "ce" + 4 * left_out
        last = found.verdicts[-1]
        words = "it may be in another engine of the log"
        assert (words in [r.message for r in last.reasons]) is (prefix != PYTHON)
        assert ("give the log" in (last.remedy or "")) is (prefix != PYTHON)


def test_one_log_gives_both_the_sparse_and_the_dense_build(tmp_path: Path) -> None:
    log = write(tmp_path / "l.log", GOOD, built([], [], flag="Disabled", lines=False))
    evidence = read_evidence(EvidenceFiles(log=log, dense_log=log))
    assert evidence.build is not None
    assert evidence.dense_build is not None
    assert evidence.build.first_line < evidence.dense_build.first_line
    assert len(evidence.notes) == 2


def test_without_a_model_the_last_build_that_has_lines_is_taken(tmp_path: Path) -> None:
    log = write(tmp_path / "l.log", GOOD, built([], [], lines=False))
    report = report_files(EvidenceFiles(log=log)).report
    assert verdicts(report) == [CHOSEN, ELIGIBLE]


def test_a_log_that_names_no_layer_gives_its_own_answer(tmp_path: Path) -> None:
    log = write(tmp_path / "l.log", built([], [], flag="Disabled", lines=False))
    report = report_files(EvidenceFiles(log=log)).report
    assert report.notes[0] == "sparsity was off: rebuild with --sparsity=enable"
    assert not any("twofour log" in line for line in advice_lines(report))


def test_a_profile_in_a_log_of_an_engine_is_not_compared_with_a_model_that_is_not_there() -> None:
    log = "trtexec_trt8.5.3_sparsedrive-motion_1.log"
    report = report_files(EvidenceFiles(log=real_log(log))).report
    (note,) = advice_lines(replace(report, notes=report.notes[1:]))
    assert "profile" not in note
    assert "give the log of its build" in report.notes[0]


def test_products_are_counted_at_the_sizes_of_the_example_inputs(tmp_path: Path) -> None:
    inputs: dict[str, list[int | str]] = {"x": ["n", "length", 16], "scalar": []}
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")
    path = om.save(om.model([node], {"w": om.weights(16, 8)}, inputs=inputs), tmp_path / "m.onnx")
    without = report_files(EvidenceFiles(onnx=path)).report
    np.savez(tmp_path / "inputs.npz", x=np.zeros((4, 27, 16), np.float32))
    files = EvidenceFiles(onnx=path, inputs=tmp_path / "inputs.npz")
    judged = report_files(files)
    report, evidence = judged.report, judged.evidence()
    (found,) = evidence.nodes
    assert found.multiply_adds == 27 * 8 * 16
    assert any("at length 27" in note for note in report.notes)
    units = {share.unit.value: share.total for share in totals_of(report).shares}
    assert units["multiply-adds"] == 27 * 8 * 16
    assert "multiply-adds" not in {share.unit.value for share in totals_of(without).shares}
    assert any("depend on free sizes (length): give" in note for note in without.notes)


# --- whose GPU ------------------------------------------------------------------------------------


def test_the_gpu_of_the_log_counts_and_not_that_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Gpu(name="GTX 1650", compute_capability=(7, 5), memory_bytes=4 << 30, driver=None)
    monkeypatch.setattr("twofour.pipeline.reporting.find_gpu", lambda: old)
    path = model(tmp_path / "m.onnx", "a", "b")
    log = write(tmp_path / "l.log", built(["a", "b"], ["a"]))
    here = report_files(EvidenceFiles(onnx=path)).report
    there = report_files(EvidenceFiles(onnx=path, log=log)).report
    assert here.gpu == old
    assert {v.reasons[0].code for v in here.verdicts} == {ReasonCode.GPU_HAS_NO_SPARSE}
    assert there.gpu is None
    assert "on NVIDIA GeForce RTX" in str(there.engine)
    assert "GPU_HAS_NO_SPARSE" not in to_json(there)


def test_the_types_of_the_build_in_the_log_decide_about_float32_layers(tmp_path: Path) -> None:
    array = np.zeros((256, 256), np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")]
    path = save(tmp_path / "m.onnx", nodes, {"w": array})
    for precision, doubted in (("FP32", True), ("FP32+FP16", False), ("FP32+INT8", False)):
        stated = f"[07/07/2026-02:11:09] [I] Precision: {precision}"
        first, *rest = built(["fc"], [])
        log = write(tmp_path / "l.log", [first, stated, *rest])
        (found,) = report_files(EvidenceFiles(onnx=path, log=log)).report.verdicts
        assert ("DTYPE" in [r.code.value for r in found.reasons]) is doubted, precision
        assert ("float16" in (found.remedy or "")) is doubted, precision


# --- what cannot be judged ------------------------------------------------------------------------


def test_a_profile_alone_names_no_layer_to_report_on(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('[{"count": 1}, {"name": "fc", "averageMs": 0.1}]')
    with pytest.raises(BadInputError, match="no file here names a layer"):
        report_files(EvidenceFiles(profile=profile))


def test_a_model_without_any_weight_says_so(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"], name="r")], {})
    log = write(tmp_path / "l.log", GOOD)
    for files in (EvidenceFiles(onnx=path), EvidenceFiles(onnx=path, log=log)):
        with pytest.raises(BadInputError, match="no convolution or matrix") as caught:
            report_files(files)
        assert "leave --onnx out" in (caught.value.hint or "")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("equation", ["ab,b1e999", "ab,b1e", "1e"])
def test_an_einsum_that_onnx_never_gets_done_with_is_reported_without_shapes(
    tmp_path: Path, equation: str
) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "dot"),
        helper.make_node("Einsum", ["h", "w"], ["y"], "odd", equation="equation"),
    ]
    built_model = om.model(nodes, {"w": om.weights(16, 16)}, inputs={"x": [2, 16]})
    built_model.graph.node[1].attribute[0].s = equation.encode()
    path = om.save(built_model, tmp_path / "m.onnx")
    report = report_files(EvidenceFiles(onnx=path)).report
    assert [v.layer for v in report.verdicts][:1] == ["dot"]


# --- the forecast for a GPU that is named, or that a build names ----------------------------------


HINT = "time and possible gain are not known:"


def network(path: Path, *, batch: int | str = 2048, dtype: type = np.float16) -> Path:
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["h"], "up"),
        helper.make_node("MatMul", ["h", "down"], ["y"], "down"),
    ]
    constants = {
        "up": om.weights(512, 2048, dtype=dtype),
        "down": om.weights(2048, 512, dtype=dtype),
    }
    made = om.model(nodes, constants, inputs={"x": [batch, 512]}, dtype=dtype)
    return om.save(made, path / "net.onnx")


def test_a_run_forecasts_first_and_counts_what_it_pruned_in_the_end(tmp_path: Path) -> None:
    options = RunOptions(
        gpu="a100",
        engine="onnxruntime",
        selection=Selection(exclude=("down",)),
        build=BuildOptions(iterations=1, warmup=0),
    )
    said, out = Recorder(), tmp_path / "run"
    cell = run_all(str(network(tmp_path)), out, options, said).report.forecast
    assert cell is not None
    assert (cell.gpu, cell.precision) == ("A100 80GB PCIe", MathPrecision.FLOAT16)
    assert [(x.layer, x.rows, x.can_run_sparse) for x in cell.layers] == [
        ("up", 2048, True),
        ("down", 2048, False),
    ]
    (early,) = (note for note in said.notes if note.startswith("Forecast for A100 80GB PCIe, flo"))
    assert "if the 2 layers that gain run sparse" in early
    assert early.endswith("; sizes: x (2048 x 512)")
    page = markdown(report_document(out, report_folder(out).report))
    first = page.splitlines()[2]
    assert cell.verdict is Worth.TRY_FIRST
    assert first.startswith("**Worth shipping: perhaps, by the forecast, if a build")
    assert f" {cell.sentence}." in first
    assert HINT not in page
    assert "| forecast gain |" in page
    up = next(x for x in cell.layers if x.layer == "up")
    assert f"| {up.gain:.2f} |" in page
    report = report_folder(out).report
    fused = tuple(replace(v, engine_layer="up + down") for v in report.verdicts)
    both = sum(x.dense_us for x in cell.layers)
    assert replace(report, verdicts=fused).forecast_gains == {
        "up": pytest.approx(up.gain),
        "up + down": pytest.approx(both / (both - up.dense_us + up.sparse_us)),
    }
    judged = report_folder(out)
    told = plain_text(layer_story(judged.report, judged.evidence(), "up"))
    assert f"forecast gain      {up.in_words}; dense {up.dense_us:,.1f} us (" in told
    assert f"model's forecast   {cell.name}: {cell.in_words}" in told
    other = report_folder(out, "RTX 4090").report.forecast
    assert other is not None
    assert [x.can_run_sparse for x in other.layers] == [True, False]
    assert "for GeForce RTX 4090" in other.sentence


def test_report_and_explain_give_the_same_gain_to_a_layer_that_would_run_dense(
    tmp_path: Path,
) -> None:
    narrow = network(tmp_path, batch=8)
    judged = with_forecast(report_files(EvidenceFiles(onnx=narrow)), "A100")
    report, evidence = judged.report, judged.evidence()
    assert report.forecast is not None
    slow = replace(report.forecast.layers[0], can_run_sparse=True, sparse_us=99.0, gain=0.5)
    cell = replace(report.forecast, layers=(slow, *report.forecast.layers[1:]))
    report = replace(report, forecast=cell)
    assert report.forecast_gains[slow.layer] == 1.0
    assert "| 1.00 |" in markdown(report_document(None, report))
    story = plain_text(layer_story(report, evidence, slow.layer))
    assert "forecast gain      TensorRT would keep the dense kernel: 1.00" in story
    assert "0.50x" not in story


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RunOptions(gpu="A1000000"), "unknown GPU 'A1000000'"),
        (RunOptions(gpu="A100", pattern=Pattern(4, 8)), "--gpu A100: no sparse kernel runs 4:8"),
    ],
)
def test_what_cannot_be_forecast_is_refused_before_anything_is_pruned(
    tmp_path: Path, options: RunOptions, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        run_all(str(network(tmp_path)), tmp_path / "run", options)
    assert not (tmp_path / "run/prune.json").exists()


def test_float32_is_forecast_in_float16_and_says_why(tmp_path: Path) -> None:
    files = EvidenceFiles(onnx=network(tmp_path, dtype=np.float32))
    report = with_forecast(report_files(files), "A100").report
    assert report.forecast is not None
    assert report.forecast.precision is MathPrecision.FLOAT16
    assert report.forecast.sentence.endswith(
        "; no sparse kernel is known for float32, the model's own type"
    )


def test_the_gpu_of_a_log_is_taken_where_it_is_known_and_nothing_else_is_asked(
    tmp_path: Path,
) -> None:
    lines = ["&&&& RUNNING TensorRT.trtexec [TensorRT v101601] # trtexec --onnx=net.onnx"]
    found = {}
    for device in ("NVIDIA A100-SXM4-80GB", "Tesla T4"):
        log = tmp_path / "build.log"
        log.write_text("\n".join([*lines, f"[I] Selected Device: {device}"]))
        judged = report_files(EvidenceFiles(onnx=network(tmp_path), log=log))
        found[device] = with_forecast(judged, None).report
    known, unknown = found.values()
    assert known.forecast is not None
    assert known.forecast.gpu == "A100-SXM4-80GB"
    assert unknown.forecast is None
    assert HINT in markdown(report_document(None, unknown))


def test_a_report_names_the_command_that_takes_sizes(tmp_path: Path) -> None:
    path = network(tmp_path, batch="batch")
    arguments = ["report", "--onnx", str(path), "--gpu", "A100"]
    done = CliRunner().invoke(application(), arguments)
    assert done.exit_code == 0
    assert "Forecast for A100 80GB PCIe, float16, batch 8" in done.stdout
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "fc")
    inputs = {"x": ("batch", "length", 512)}
    om.save(om.model([node], {"w": om.weights(512, 2048)}, inputs=inputs), path)
    done = CliRunner().invoke(application(), arguments)
    assert done.exit_code == 2
    assert "takes them: give the sizes" in done.stderr.replace("\n", " ")

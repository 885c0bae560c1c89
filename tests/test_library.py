"""Every command as a function: values in memory go in, records come out that print short."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from support.mlp_onnx import NAMES, WIDTHS, agreement, broken, save_mlp
from support.render_cases import every_status
from support.small_run import Recorder
from torch import nn
from typer.testing import CliRunner

import twofour
from twofour.cli import application
from twofour.errors import BadInputError
from twofour.records import SUBJECTS
from twofour.records.options import Quantization
from twofour.records.weights import Record, Report
from twofour.reports import DOCUMENTS, document_of
from twofour.reports.text import csv
from twofour.store import checked, from_json, to_json

FLOAT32 = twofour.RunOptions(precision=twofour.Precision.FLOAT32)
LOG = Path(__file__).parent / "data" / "logs" / "contradiction.log"


def _batches(count: int, *, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.normal(size=(16, WIDTHS[0])).astype(np.float16) for _ in range(count)]


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


@pytest.fixture(scope="module")
def done(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[str]]:
    """A run with everything in memory, and what its progress was told."""
    lines: list[str] = []

    def mean(predict: Callable[..., tuple[np.ndarray, ...]]) -> float:
        return float(predict(np.ones((4, 64), np.float32))[0].mean())

    result = twofour.run(
        net,
        torch.randn(8, 64),
        out=tmp_path_factory.mktemp("run") / "net",
        calibrate=(torch.randn(16, 64) for _ in range(4)),
        metric=mean,
        options=FLOAT32,
        progress=lines.append,
    )
    return result, lines


def test_every_command_is_a_function() -> None:
    commands = {str(one.callback.__name__) for one in application().registered_commands}  # type: ignore[union-attr]  # all have one
    renamed = {"prune_export_build": "run", "log": "read_log"}
    # fleet: a cluster is asked for on the command line
    functions = {renamed.get(name, name) for name in commands - {"fleet"}}
    assert functions <= set(twofour.__all__)
    assert all(isinstance(getattr(twofour, name), FunctionType) for name in functions)


def test_a_room_of_the_same_name_does_not_take_the_place_of_a_function() -> None:
    code = (
        "import twofour; import twofour.export.agreement; "
        "import twofour.export.model_code; print(type(twofour.export).__name__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "function"
    assert importlib.import_module("twofour.export").__name__ == "twofour.export"


def test_batches_that_come_once_a_metric_and_progress_are_taken_from_memory(
    done: tuple[Any, list[str]],
) -> None:
    result, lines = done
    assert (result.prune.method, result.prune.calibration.samples) == ("admm", 64)
    (metric,) = result.accuracy.metrics
    assert metric.name == "mean"
    assert metric.dense != metric.sparse
    assert "prune to 2:4" in lines
    assert len(lines) > 10


def test_batches_that_come_once_are_there_for_every_stage_that_reads_them(tmp_path: Path) -> None:
    options = twofour.RunOptions(
        quantize=Quantization.INT8, selection=twofour.Selection(all_layers=True)
    )
    model = save_mlp(tmp_path / "mlp.onnx", half=False)
    batches = (batch for batch in _batches(4))
    result = twofour.run(model, out=tmp_path / "r", calibrate=batches, options=options)
    assert result.prune.calibration is not None
    assert result.prune.calibration.samples == 64
    assert {row.dtype for row in result.report.verdicts} == {"int8"}


def test_what_is_in_memory_is_new_to_a_resumed_run(tmp_path: Path) -> None:
    model = save_mlp(tmp_path / "mlp.onnx")
    options = twofour.RunOptions(resume=True, selection=twofour.Selection(all_layers=True))

    def run(seed: int) -> tuple[Any, list[str]]:
        lines: list[str] = []
        result = twofour.run(
            model, out=tmp_path / "r", calibrate=_batches(4, seed=seed), options=options,
            progress=lines.append,
        )  # fmt: skip
        return result.prune, lines

    first, _ = run(0)
    second, lines = run(1)
    assert "prune to 2:4 in sparse.onnx" in lines
    assert first != second


def test_a_metric_in_memory_is_measured_for_every_set_as_one_of_a_file_is(tmp_path: Path) -> None:
    model = save_mlp(tmp_path / "mlp.onnx")
    options = twofour.RunOptions(budget=twofour.BudgetOptions(share=0.5))
    named = twofour.sensitivity(
        model, out=tmp_path / "named", metric="support.mlp_onnx:agreement", options=options
    )
    recorder = Recorder()
    held = twofour.sensitivity(
        model, out=tmp_path / "held", metric=agreement, options=options, progress=recorder
    )
    assert {row.layer for row in held.layers} == set(NAMES)
    assert [row.loss for row in held.layers] == [row.loss for row in named.layers]
    assert held.budget == named.budget
    assert held.figure == "agreement"
    assert "measured" in recorder.steps, "a progress with methods of its own is told the steps"
    assert list((tmp_path / "held").rglob(".mixed-*")) == []


def test_a_metric_that_fails_and_batches_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = save_mlp(tmp_path / "mlp.onnx")
    wrong: list[tuple[Any, str]] = [(3, "batches"), ([np.ones((4, 9))], "batches: batch 0")]
    for data, message in wrong:
        with pytest.raises(twofour.BadInputError, match=message):
            twofour.run(model, out=tmp_path / "r", calibrate=data)
    with pytest.raises(twofour.BadInputError, match=r"broken raised .*no such data"):
        twofour.sensitivity(model, out=tmp_path / "r", metric=broken)


def test_a_function_that_gives_batches_is_called_and_text_is_a_file(tmp_path: Path) -> None:
    model = save_mlp(tmp_path / "mlp.onnx")
    options = twofour.RunOptions(selection=twofour.Selection(all_layers=True))
    np.savez(tmp_path / "x.npz", x=np.concatenate(_batches(4)))
    data: list[Any] = [lambda: iter(_batches(4)), str(tmp_path / "x.npz"), tmp_path / "x.npz"]
    pruned = [
        twofour.run(model, out=tmp_path / "r", calibrate=each, options=options).prune.weights
        for each in data
    ]
    assert pruned[0] == pruned[1] == pruned[2]


def test_a_report_is_made_of_a_run_a_folder_and_files(done: tuple[Any, list[str]]) -> None:
    result, _ = done
    of_run = twofour.report(result)
    assert of_run == twofour.report(result.folder) == twofour.report(Path(result.folder))
    assert of_run.verdicts == result.report.verdicts
    of_file = twofour.report(onnx=Path(result.folder, "sparse.onnx"), gpu="A100")
    assert of_file.forecast is not None
    assert of_file.forecast.gpu.startswith("A100")
    story = twofour.explain("0", result)
    assert story.startswith("0 (Gemm): eligible")
    assert "input channels C   64" in story


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "name either a run folder, or files"),
        ({"log": "two\nlines\n"}, "log contains no TensorRT message"),
        ({"layer_map": "x.json", "onnx": "m.onnx"}, "cannot read m.onnx"),
    ],
)
def test_what_no_report_can_be_made_of_is_refused(files: dict[str, str], message: str) -> None:
    with pytest.raises(twofour.BadInputError, match=message):
        twofour.report(**files)


def test_a_log_may_be_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = LOG.read_text()
    as_text, as_file = twofour.read_log(text), twofour.read_log(LOG)
    assert as_text.files[0].name == "log"
    assert as_text.files[0].lines == as_file.files[0].lines
    assert [build.eligible for build in as_text.builds] == [b.eligible for b in as_file.builds]
    assert as_text.builds[0].layers == as_file.builds[0].layers
    assert twofour.report(log=text).verdicts
    monkeypatch.chdir(tmp_path)
    with pytest.raises(twofour.BadInputError, match=r"cannot read build.log"):
        twofour.read_log("build.log")


def test_export_build_sizes_and_doctor_are_the_jobs_of_the_commands(tmp_path: Path) -> None:
    model = save_mlp(tmp_path / "mlp.onnx")
    exported = twofour.export(model, out=tmp_path / "e")
    assert (exported.onnx.file, len(exported.layers.layers)) == ("dense.onnx", len(NAMES))
    lines: list[str] = []
    built = twofour.build(tmp_path / "e" / "dense.onnx", out=tmp_path / "b", progress=lines.append)
    assert [row.error for row in built.variants] == [None]
    assert any("dense" in line for line in lines)
    assert twofour.sizes(model).weights == len(NAMES)
    assert {engine.engine for engine in twofour.doctor().engines} == {"tensorrt", "onnxruntime"}


# --- records --------------------------------------------------------------------------------------


def test_records_that_functions_return_print_short(done: tuple[Any, list[str]]) -> None:
    result, _ = done
    assert repr(result.validation) == (
        "Validation(files=<items: 1>, pattern=2:4, checks=<items: 2>)"
    )
    for record in (result, result.prune, result.report, result.build, twofour.doctor()):
        assert isinstance(record, Record)
        assert len(repr(record)) < 1000
        assert "\n" not in repr(record)


def test_a_record_gives_its_json_as_text_and_as_plain_values() -> None:
    report = every_status()
    assert report.to_json() == to_json(report)
    assert report.to_dict() == json.loads(to_json(report))
    assert from_json(type(report), report.to_json()) == report


def test_every_record_with_a_document_is_a_report() -> None:
    for subject in SUBJECTS:
        importlib.import_module(f"twofour.records.{subject}")
    kinds = Report.__subclasses__()
    kinds += [inner for kind in kinds for inner in kind.__subclasses__()]
    with_document = {kind.__name__ for kind in kinds} - {"OfFiles", "PrunedModel"}
    assert with_document == set(DOCUMENTS)


def test_a_report_is_a_page_in_a_frame_of_its_own_in_a_notebook() -> None:
    page = every_status()._repr_html_()
    assert page.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert page.count("<") == 2  # the frame's own: all else is escaped
    assert "encoder.0.fc" in page


def test_a_table_in_python_has_the_rows_of_the_csv() -> None:
    pytest.importorskip("pandas")
    report = every_status()
    frame = report.to_dataframe()
    assert list(frame.columns) == csv(document_of(report)).splitlines()[0].split(",")
    assert list(frame["layer"]) == [row.layer for row in report.verdicts]
    assert list(frame["sparse_ms"].dropna()) == [
        row.sparse_ms for row in report.verdicts if row.sparse_ms is not None
    ]


def test_without_pandas_a_table_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(twofour.MissingToolError, match="pandas") as caught:
        every_status().to_dataframe()
    assert caught.value.hint == "pip install pandas"


# --- the model with the verdicts ------------------------------------------------------------------


def _metadata(path: Path) -> dict[str, dict[str, str]]:
    return {
        node.name: {entry.key: entry.value for entry in node.metadata_props}
        for node in onnx.load(path, load_external_data=False).graph.node
    }


def _without(path: Path) -> bytes:
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        kept = [e for e in node.metadata_props if not e.key.startswith("twofour.")]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    return bytes(model.SerializeToString())


def test_a_model_with_its_verdicts_in_the_metadata_is_otherwise_the_same(tmp_path: Path) -> None:
    model = save_mlp(tmp_path / "mlp.onnx")
    arguments = ["report", "--onnx", str(model), "--gpu", "A100", "--annotate"]
    for target in (tmp_path / "out.onnx", tmp_path / "out.onnx"):  # again over the first
        ended = CliRunner().invoke(application(), [*arguments, str(target)])
        assert ended.exit_code == 0, ended.output
    found = _metadata(tmp_path / "out.onnx")
    report = twofour.report(onnx=model, gpu="A100")
    for verdict in report.verdicts:
        own = found[str(verdict.node)]
        assert own["twofour.verdict"] == verdict.verdict.value
        assert own["twofour.evidence"] == "predicted"
        assert own["twofour.reasons"] == " ".join(reason.code.value for reason in verdict.reasons)
        gain = report.forecast_gains.get(verdict.layer)
        assert own.get("twofour.forecast_gain", "").startswith(
            f"{gain:.2f}x on A100" if gain else ""
        )
    assert any(not entries for entries in found.values()), "Relu has none"
    ended = CliRunner().invoke(application(), [*arguments, str(model)])
    assert ended.exit_code == 2, "the model itself is not written over"
    assert _without(tmp_path / "out.onnx") == model.read_bytes()


def test_the_model_of_a_run_is_the_sparse_one(done: tuple[Any, list[str]], tmp_path: Path) -> None:
    folder = done[0].folder
    target = tmp_path / "out.onnx"
    ended = CliRunner().invoke(application(), ["report", folder, "--annotate", str(target)])
    assert ended.exit_code == 0, ended.output
    assert _without(target) == _without(Path(folder, "sparse.onnx"))
    assert sum("twofour.verdict" in own for own in _metadata(target).values()) == 2


def test_external_data_is_referred_to_where_it_is(tmp_path: Path) -> None:
    model = onnx.load(save_mlp(tmp_path / "mlp.onnx"))
    path = tmp_path / "external.onnx"
    onnx.save(model, path, save_as_external_data=True, location="data.bin", size_threshold=0)
    (tmp_path / "elsewhere").mkdir()
    for target, code in (("beside.onnx", 0), ("elsewhere/out.onnx", 2)):
        asked = ["report", "--onnx", str(path), "--annotate", str(tmp_path / target)]
        ended = CliRunner().invoke(application(), asked)
        assert ended.exit_code == code, ended.output
        assert (tmp_path / target).exists() is (code == 0)
    assert f"--annotate {tmp_path}/out.onnx" in ended.output.replace("\n", "")
    assert _without(tmp_path / "beside.onnx") == path.read_bytes()


def test_verdicts_are_written_into_no_model_where_none_is_given(tmp_path: Path) -> None:
    asked = ["report", "--log", str(LOG), "--annotate", str(tmp_path / "out.onnx")]
    ended = CliRunner().invoke(application(), asked)
    assert ended.exit_code == 2
    assert "hint: add --onnx" in ended.output


# --- the names of the API, and wrong arguments ----------------------------------------------------


NET = nn.Sequential(nn.Linear(8, 8))


def test_every_name_of_the_api_is_there_and_no_other() -> None:
    for name in twofour.__all__:
        assert getattr(twofour, name) is not None
    assert dir(twofour) == twofour.__all__
    assert twofour.RunOptions(pattern=twofour.Pattern(1, 4)).pattern.m == 4
    assert issubclass(twofour.BadInputError, twofour.TwofourError)
    with pytest.raises(AttributeError, match="no attribute 'Prune'"):
        _ = twofour.Prune


def test_the_options_of_a_run_can_all_be_made_from_names_of_the_api() -> None:
    for field in dataclasses.fields(twofour.RunOptions()):
        value = getattr(twofour.RunOptions(), field.name)
        if dataclasses.is_dataclass(value):
            assert type(value).__name__ in twofour.__all__


def test_importing_twofour_brings_nothing_heavy() -> None:
    code = (
        "import sys, twofour; dir(twofour); heavy = {'torch', 'onnx', 'numpy', 'pydantic', 'rich',"
        " 'twofour.records.weights'}; print(sorted(heavy & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: twofour.prune("m.onnx"), "model must be a torch.nn.Module in memory, found 'm.on"),  # type: ignore[arg-type]
        (lambda: twofour.prune(NET, exclude="nothing"), "nothing"),
        (lambda: twofour.run("m.onnx", "runs/m"), "example_inputs must be left out"),
        (lambda: twofour.run("m.onnx", options={"a": 1}), "expected RunOptions, found {'a': 1}"),  # type: ignore[arg-type]
        (lambda: twofour.run("m.onnx", options=twofour.CompareOptions()), "expected RunOptions"),  # type: ignore[arg-type]
        (lambda: twofour.compare("a", options=twofour.RunOptions()), "expected CompareOptions"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_another_type_is_named_with_what_was_found(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(BadInputError, match=f"(?s){message}"):
        call()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("pattern", "2:4", "RunOptions.pattern: .*found '2:4' of type str"),
        ("precision", "float8", "RunOptions.precision: .*found 'float8'"),
        ("seed", "zero", "RunOptions.seed: .*integer.*found 'zero'"),
        ("input_shapes", (4, 32), r"RunOptions.input_shapes.0: .*found 4 of type int"),
        ("build", None, "RunOptions.build"),
    ],
)
def test_options_are_checked_field_by_field(field: str, value: object, message: str) -> None:
    options = twofour.RunOptions(**{field: value})  # type: ignore[arg-type]  # that is the point
    with pytest.raises(BadInputError, match=message):
        checked(twofour.RunOptions, options)


def test_texts_of_enums_lists_and_paths_become_what_the_field_takes() -> None:
    given = twofour.RunOptions(
        precision="float32",  # type: ignore[arg-type]
        input_shapes=[[1, 8]],  # type: ignore[arg-type]
    )
    found = checked(twofour.RunOptions, given)
    assert found.precision is twofour.Precision.FLOAT32
    assert found.input_shapes == ((1, 8),)
    assert checked(twofour.RunOptions, found) == found
    arrays = twofour.RunOptions(inputs=Path("x.npz"))  # type: ignore[arg-type]
    assert checked(twofour.RunOptions, arrays).inputs == "x.npz"

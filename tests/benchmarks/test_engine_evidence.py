"""engine_evidence.py from folders to tables, files and exit codes."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_evidence import NOTHING_MEASURED, examine, main
from engine_evidence_parts.csv_rows import COLUMNS, to_csv
from engine_evidence_parts.kinds import findings_by_kind
from engine_evidence_parts.reading import builder_in_words, named, read_nets
from engine_evidence_parts.tables import markdown
from support.join_cases import build, chosen, eligible
from test_engine_evidence_cases import joined, layer, net

from twofour.records.build import EngineStatus, Gpu
from twofour.records.eligibility import EligibilityReport
from twofour.records.latency import LatencyComparison
from twofour.records.options import BuildOptions, CompareOptions, ShapeProfile
from twofour.records.run import BuildResult
from twofour.store import write_record

WRONG = build(eligible("a", "b", "grouped"), chosen())
SILENT = build("Engine generation completed in 3.5 seconds.")


def write_net(folder: Path, name: str, found: EligibilityReport) -> Path:
    place = folder / name
    place.mkdir(parents=True)
    write_record(place / "eligibility.json", found)
    return place


def built(name: str = "NVIDIA H200", batch: int = 8) -> BuildResult:
    engine = EngineStatus(
        engine="tensorrt", version="8.6.1", can_run=True, why_not=None, device=name
    )
    shape = (batch, 64, 14, 14)
    profile = ShapeProfile(input="x", min=shape, opt=shape, max=shape)
    return BuildResult(
        engine=engine,
        asked_for="auto",
        not_used=(),
        gpu=Gpu(name=name, compute_capability=(9, 0), memory_bytes=1 << 37, driver=None),
        options=BuildOptions(shapes=(profile,)),
        variants=(),
        times=LatencyComparison(
            source="run",
            baseline="dense@tensorrt:gpu",
            machine=None,
            options=CompareOptions(),
            variants=(),
            ratios=(),
            noise=(),
        ),
    )


def run(folder: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([str(folder), *options])
    said = capsys.readouterr()
    return code, said.out, said.err


def rows_below(text: str, title: str) -> list[list[str]]:
    """Cells of the table whose first column has this title, without its two head lines."""
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {title} |"))
    body = lines[start + 2 :]
    end = next((at for at, line in enumerate(body) if not line.startswith("|")), len(body))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body[:end]]


def test_two_nets_become_tables_rows_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nets = tmp_path / "nets"
    write_record(write_net(nets, "good-float16-b8", joined()) / "build.json", built())
    write_net(nets, "odd-int8-b1", joined(WRONG))
    files = ("--csv", str(tmp_path / "o.csv"), "--json", str(tmp_path / "o.json"))
    code, out, err = run(nets, *files, capsys=capsys)
    assert (code, err) == (0, "")
    assert "2 nets, 8 layers with a weight, of which 8 measured." in out
    assert "NVIDIA H200, TensorRT 8.6.1 (1 net)" in out
    assert "Agreement: 7 of 8 (87.5 %)" in out
    assert rows_below(out, "predicted / measured") == [
        ["eligible", "4", "0", "0"],
        ["not eligible", "1", "3", "0"],
        ["silent", "0", "0", "0"],
    ]
    assert "### Disagreements: 1 of 8 comparable layers" in out
    (wrong,) = rows_below(out, "net")
    assert wrong[:7] == [
        *("odd-int8-b1", "`grouped`", "Conv", "128 x 128 3x3 g4", "float16"),
        *("not eligible", "listed, runs dense"),
    ]
    with (tmp_path / "o.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["folder"], row["node"], row["chosen"]) for row in table] == [
        ("good-float16-b8", "a", "true"),
        ("good-float16-b8", "b", "false"),
        ("odd-int8-b1", "a", "false"),
        ("odd-int8-b1", "b", "false"),
        ("odd-int8-b1", "grouped", "false"),
    ]
    first = table[0]
    assert (first["C"], first["K"], first["kernel"], first["batch"]) == ("512", "512", "3x3", "8")
    assert (first["best_dense_ms"], first["best_sparse_ms"]) == ("0.02", "0.01")
    assert (first["input_shapes"], first["gpu"]) == ("x=8x64x14x14", "NVIDIA H200")
    assert (table[1]["best_dense_ms"], table[1]["sparse_over_dense"]) == ("", "")
    everything = json.loads((tmp_path / "o.json").read_text())
    assert len(everything["layers"]) == 8
    assert everything["confusion"]["agreeing"] == 7
    assert [x["node"] for x in everything["disagreements"]] == ["grouped"]


def test_where_nothing_was_measured_there_is_no_share_and_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_net(tmp_path, "silent-float16-b8", joined(SILENT))
    code, out, err = run(tmp_path, capsys=capsys)
    assert code == NOTHING_MEASURED == 3
    said = "nothing was measured: of 4 layers, none is known to be listed or not (LOG_SILENT 4)"
    assert err == f"error: {said}\n"
    assert "Nothing was measured: of 4 layers" in out
    assert "%" not in out
    assert "Agreement" not in out
    assert "No layer is known to be listed." in out


def test_rules_that_were_silent_have_no_share_either() -> None:
    found = replace(examine("nets", [net()]), layers=(), by_kind=())
    silent = replace(found.confusion, agreeing=0, comparable=0)
    text = markdown(replace(found, layers=(layer(),), confusion=silent))
    assert "Agreement: not known" in text


@pytest.mark.parametrize("content", [None, "not a folder", "empty"])
def test_a_folder_without_reports_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    place = tmp_path / "nets"
    if content == "not a folder":
        place.write_text("")
    elif content == "empty":
        (place / "a-float16-b1").mkdir(parents=True)
    code, out, err = run(place, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {place} ")


def test_one_net_instead_of_the_folder_of_them_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = write_net(tmp_path, "a-float16-b1", joined())
    code, _, err = run(place, capsys=capsys)
    assert code == 2
    assert "hint: name the folder above it" in err


def test_damaged_and_missing_reports_are_left_out_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_net(tmp_path, "a-float16-b8", joined())
    (tmp_path / "b-float16-b8").mkdir()
    damaged = tmp_path / "c-float16-b8"
    damaged.mkdir()
    (damaged / "eligibility.json").write_text('{"model": 3')
    (tmp_path / ".cache").mkdir()
    (tmp_path / "line.json").write_text("{}")
    nets, left_out = read_nets(tmp_path)
    assert [x.folder for x in nets] == ["a-float16-b8"]
    assert [x.folder for x in left_out] == ["b-float16-b8", "c-float16-b8"]
    code, out, _ = run(tmp_path, capsys=capsys)
    assert code == 0
    assert "- left out: b-float16-b8: no eligibility.json" in out
    assert "- left out: c-float16-b8: " in out


def test_a_build_record_of_another_shape_is_noted_and_the_report_goes_in(tmp_path: Path) -> None:
    place = write_net(tmp_path, "a-float16-b8", joined())
    (place / "build.json").write_text("{}")
    ((found,), _) = read_nets(tmp_path)
    assert found.gpu is None
    assert found.notes[0].startswith("a-float16-b8: not read: ")


def test_another_batch_in_the_build_than_in_the_name_is_noted(tmp_path: Path) -> None:
    place = write_net(tmp_path, "a-float16-b8", joined())
    write_record(place / "build.json", built(batch=4))
    ((found,), _) = read_nets(tmp_path)
    assert found.batch == 8
    assert found.notes == (
        "a-float16-b8: the name says b8, the inputs were built for 4 first of all",
    )


def test_the_log_gives_what_report_and_build_lack(tmp_path: Path) -> None:
    unknown = replace(joined(), engine="tensorrt, version not stated")
    place = write_net(tmp_path, "a-float16-b8", unknown)
    (place / "sparse.log").write_text(
        "&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # trtexec --onnx=m.onnx\n"
        "[07/07/2026-02:11:09] [I] Selected Device: NVIDIA H200\n"
        "&&&& PASSED TensorRT.trtexec [TensorRT v8601] # trtexec --onnx=m.onnx\n"
    )
    ((found,), _) = read_nets(tmp_path)
    assert (found.gpu, found.tensorrt) == ("NVIDIA H200", "8.6.1")


@pytest.mark.parametrize(
    ("words", "gpu", "tensorrt"),
    [
        ("tensorrt 8.6.1 (trtexec) on Orin (compute capability 8.7)", "Orin", "8.6.1"),
        ("tensorrt 10.16.1 on NVIDIA H200", "NVIDIA H200", "10.16.1"),
        ("tensorrt 10.3.0 (python)", None, "10.3.0"),
        ("tensorrt, version not stated on a GPU (compute capability 8.7)", None, None),
        ("tensorrt None on None", None, None),
        ("onnxruntime 1.23.2 on CPU", None, None),
        ("no engine", None, None),
    ],
)
def test_the_words_of_a_report_say_gpu_and_version(
    words: str, gpu: str | None, tensorrt: str | None
) -> None:
    found = builder_in_words(words)
    assert (found.gpu, found.tensorrt) == (gpu, tensorrt)


@pytest.mark.parametrize(
    ("folder", "parts"),
    [
        ("sweep_conv3x3-float16-b8", ("sweep_conv3x3", "float16", 8)),
        ("resnet-50-int8-b1", ("resnet-50", "int8", 1)),
        ("resnet50", ("resnet50", None, None)),
        ("resnet50-int8-b", ("resnet50-int8-b", None, None)),
    ],
)
def test_the_name_of_a_folder_says_net_precision_and_batch(folder: str, parts: Any) -> None:
    assert named(folder) == parts


def test_rule_counts_and_exceptions_are_printed() -> None:
    sizes = [(c, k) for c in (64, 128, 256) for k in (64, 128, 256)]
    layers = [
        layer(c, k, node=f"n{c}_{k}", chosen=c >= 128 and k >= 256, sparse_over_dense=c / 256)
        for c, k in sizes
    ]
    odd = layer(256, 256, node="odd|one", chosen=False, best_dense_ms=0.02)
    found = examine("nets", [net()])
    text = markdown(replace(found, kinds=findings_by_kind([*layers, odd])))
    (row,) = rows_below(text, "op")
    rule = "C >= 128 and K >= 256"
    assert row[:7] == ["Conv", "3x3", "float16", "8", "10", "2", "10 (9)"]
    assert row[7:10] == [rule, "9, wrong 1, 1 size of both outcomes", "0.938"]
    assert row[12:] == ["0.500 to 1.000 (2)", "0.250 to 1.000 (7)", "0", "-"]
    exceptions = text.split("Exceptions to these rules:")[1]
    (exception,) = rows_below(exceptions, "net")
    assert exception[1:7] == [
        "<code>odd&#124;one</code>",
        *("Conv", "256 x 256 3x3", "float16", rule, "dense"),
    ]
    assert exception[7:] == ["0.02", "?", "?"]


def test_names_cannot_break_a_row_of_the_csv() -> None:
    text = to_csv([layer(node='evil,"name\nnext', chosen=None, source=None)])
    head, row = csv.reader(text.splitlines())
    assert tuple(head) == COLUMNS
    cells = dict(zip(head, row, strict=True))
    assert cells["node"] == 'evil,"name\\nnext'
    assert (cells["chosen"], cells["source"], cells["best_sparse_ms"]) == ("", "", "")

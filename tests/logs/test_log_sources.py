"""Where logs come from, layer information and profiles as JSON, and the command."""

from __future__ import annotations

import gzip
import html
import io
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.logs.layer_info import documents, read_layer_information, read_profile
from twofour.logs.read import read_build_log
from twofour.records.log import BuildLog, BuildOutcome
from twofour.store import from_json, to_json

LOGS = Path(__file__).parents[1] / "data" / "logs"
TEXT = (LOGS / "foreign_node.log").read_text(encoding="utf-8")
CHOSEN = ("fc2", "conv1 + relu")


def chosen(log: BuildLog) -> list[tuple[str, ...] | None]:
    return [build.chosen for build in log.builds]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_of_any_usual_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "build.txt"
    path.write_bytes(TEXT.encode(encoding))
    assert chosen(read_build_log(path)) == [CHOSEN]


@pytest.mark.parametrize("blank", ["\u00a0", "\u3000", "&nbsp;", "&#160;", "\u200b "])
def test_blanks_of_a_web_page_are_blanks(tmp_path: Path, blank: str) -> None:
    path = tmp_path / "build.txt"
    path.write_text(TEXT.replace(" ", blank), encoding="utf-8")
    assert chosen(read_build_log(path)) == [CHOSEN]


def test_text_that_is_escaped_for_html_is_read(tmp_path: Path) -> None:
    lines = (
        "&&&& RUNNING TensorRT.trtexec [TensorRT v100300] # trtexec --onnx=m.onnx",
        '[V] [TRT] (Sparsity) Found 2 layer(s) eligible to use sparse tactics: a<b>, "c"',
        "&&&& PASSED TensorRT.trtexec [TensorRT v100300] # trtexec --onnx=m.onnx",
    )
    path = tmp_path / "page.txt"
    path.write_text("".join(f"{html.escape(line)}\n" for line in lines), encoding="utf-8")
    (build,) = read_build_log(path).builds
    assert (build.tensorrt_version, build.outcome) == ("10.3.0", BuildOutcome.BUILT)
    assert build.eligible == ("a<b>", '"c"')


@pytest.mark.parametrize("as_list", [True, False])
def test_the_outputs_of_a_notebook_are_read(tmp_path: Path, as_list: bool) -> None:
    text = TEXT.splitlines(keepends=True) if as_list else TEXT
    outputs = [{"output_type": "stream", "text": text}, {"data": {"text/plain": "42"}}]
    path = tmp_path / "build.ipynb"
    whole = json.dumps({"cells": [{"source": "!trtexec"}, {"outputs": outputs}]})
    path.write_text(whole)
    assert chosen(read_build_log(path)) == [CHOSEN]
    path.write_text(whole[:-9])
    assert read_build_log(path).files[0].notes[0].startswith("not a complete notebook")


def test_stdin_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(TEXT.encode())))
    )
    log = read_build_log("-")
    assert chosen(log) == [CHOSEN]
    assert log.files[0].name == "-"


def test_several_files_make_one_record_whose_builds_name_their_file() -> None:
    first, second = LOGS / "wording_8.log", LOGS / "forced.log"
    log = read_build_log(first, second)
    assert [build.file for build in log.builds] == [str(first), str(first), str(second)]


def test_the_record_survives_json() -> None:
    log = read_build_log(*sorted(LOGS.glob("*.log")))
    assert from_json(BuildLog, to_json(log)) == log


# --- layer information ----------------------------------------------------------------------------

DETAILED = {
    "Name": "conv1 + relu1",
    "LayerType": "CaskConvolution",
    "Inputs": [{"Name": "x", "Dimensions": [8, 64, 16, 16], "Format/Datatype": "Half"}],
    "Outputs": [{"Name": "y", "Dimensions": [8, 64, 16, 16], "Format/Datatype": "Half"}],
    "ParameterType": "Convolution",
    "Kernel": [3, 3],
    "Groups": 1,
    "OutMaps": 64,
    "Weights": {"Type": "Half", "Count": 36864},
    "HasSparseWeights": 1,
    "TacticName": "sm80_xmma_fprop_sparse_conv_f16f16_sptensor16x8x32",
    "TacticValue": "0x3cf3672bfafcee02",
    "Metadata": "[ONNX Layer: conv1]\u001e[ONNX Layer: relu1]",
}
MYELIN = {
    "Name": "fc_myl0_2",
    "LayerType": "gemm",
    "TacticName": "sm80_xmma_gemm_f16",
    "Metadata": "",
}


def test_detailed_layers_give_kernel_flag_groups_and_sources(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"Layers": [DETAILED, MYELIN], "Bindings": ["x", "y"]}))
    found = read_layer_information(path)
    conv, fc = found.layers
    assert (conv.sparse, conv.has_sparse_weights, conv.groups, conv.out_maps) == (True, True, 1, 64)
    assert (conv.kernel_shape, conv.tactic_id) == ((3, 3), "0x3cf3672bfafcee02")
    assert conv.onnx_nodes == ("conv1", "relu1")
    assert found.detailed
    assert (fc.sparse, fc.has_sparse_weights, fc.groups) == (False, None, None)


def test_layers_that_are_bare_names_no_progress_of_kernels(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"Layers": ["conv1 + relu1", "fc"]}))
    found = read_layer_information(path)
    assert [(layer.name, layer.kernel, layer.sparse) for layer in found.layers] == [
        ("conv1 + relu1", None, None),
        ("fc", None, None),
    ]
    assert not found.detailed


def test_several_objects_with_text_between_them_are_all_read(tmp_path: Path) -> None:
    path = tmp_path / "layers.txt"
    first, second = json.dumps(DETAILED, indent=2), json.dumps(MYELIN)
    path.write_text(f"it's \"layer {{0\n{first}\n--- Layer 1 ---\n{second}\n")
    names = [layer.name for layer in read_layer_information(path).layers]
    assert names == ["conv1 + relu1", "fc_myl0_2"]


def test_a_profile_gives_count_and_times_per_layer(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    row = {"name": "conv1", "timeMs": 8.5, "averageMs": 0.5, "medianMs": 0.25, "percentage": 100}
    path.write_text(json.dumps([{"count": 17}, row]))
    profile = read_profile(path)
    assert profile.iterations == 17
    assert (profile.layers[0].average_ms, profile.layers[0].median_ms) == (0.5, 0.25)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"Layers": []}', '{"a": ' * 5000, "[" * 100_000])
def test_files_without_layers_or_rows_are_bad_input(tmp_path: Path, text: str) -> None:
    path = tmp_path / "layers.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match="no layer information"):
        read_layer_information(path)
    with pytest.raises(BadInputError, match="no profile"):
        read_profile(path)
    assert list(documents("{{{{\n" * 1000)) == []


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_the_record_and_nothing_else_as_json() -> None:
    result = CliRunner().invoke(application(), ["log", "--json", str(LOGS / "foreign_node.log")])
    assert result.exit_code == 0
    builds = json.loads(result.stdout)["builds"]
    assert builds[0]["chosen"] == list(CHOSEN)
    layer = next(row for row in builds[0]["layers"] if row["name"] == "fc1")
    assert (layer["best_sparse_ms"], layer["best_dense_ms"]) == (0.005, 0.004)
    assert set(layer["tactics"][0]) >= {"kernel", "id", "ms", "sparse"}


def test_a_compressed_log_cut_early_gives_all_the_text_before_the_cut(tmp_path: Path) -> None:
    noise = "".join(f"[V] line {number * number % 7919}\n" for number in range(20_000))
    packed = gzip.compress((TEXT + noise).encode())
    path = tmp_path / "build.log.gz"
    path.write_bytes(packed[: len(packed) // 2])
    log = read_build_log(path)
    assert chosen(log) == [CHOSEN]
    assert log.files[0].lines > 1000
    assert log.files[0].notes == (
        "the compressed file is damaged or cut; everything before that was read",
    )


def test_members_of_a_compressed_log_are_read_one_after_the_other(tmp_path: Path) -> None:
    half = len(TEXT) // 2
    path = tmp_path / "build.log"  # compression is seen in the bytes, not in the name
    path.write_bytes(
        gzip.compress(TEXT[:half].encode()) + gzip.compress(TEXT[half:].encode()) + bytes(9)
    )
    log = read_build_log(path)
    assert (chosen(log), log.files[0].notes) == ([CHOSEN], ())
    assert log.files[0].size_bytes == len(TEXT.encode())


def test_a_list_cut_for_its_length_is_marked_and_contradicts_nothing(tmp_path: Path) -> None:
    names = [f"layer{number}" for number in range(200_000)]
    path = tmp_path / "build.log"
    path.write_text(
        "[V] [TRT] (Sparsity) Found 200000 layer(s) eligible to use sparse tactics: "
        f"{', '.join(names)}\n"
        f"[V] [TRT] (Sparsity) Chose 1 layer(s) using sparse tactics: {names[-1]}\n"
    )
    log = read_build_log(path)
    (build,) = log.builds
    eligible, last = build.sparsity_lines
    assert (eligible.elided, last.names, build.contradictions) == (True, (names[-1],), ())
    assert eligible.names == tuple(names[: len(eligible.names or ())])
    assert len(eligible.names) > 50_000
    assert "was cut" in log.files[0].notes[0]


def test_a_file_without_a_message_gets_a_note_beside_one_that_has_some_and_alone_ends_in_2(
    tmp_path: Path,
) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text("nothing here\n")
    for others, code in (([str(LOGS / "forced.log")], 0), ([], 2)):
        done = CliRunner().invoke(application(), ["log", *others, str(empty)])
        assert done.exit_code == code
        assert "no TensorRT message" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"Layers": [{"Name": "a", "LayerType": "b"}]}, "layer information: give it to `twofour"),
        ([{"count": 3}, {"name": "a", "timeMs": 1.5}], "a profile: give it to `twofour report"),
    ],
)
def test_json_of_trtexec_is_named_with_the_option_that_reads_it(
    tmp_path: Path, document: object, words: str
) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps(document))
    (file,) = read_build_log(path).files
    assert words in file.notes[0]
    done = CliRunner().invoke(application(), ["log", str(path)])
    assert done.exit_code != 0
    assert "hint" not in done.output


def test_a_log_in_a_pipe_has_a_line_for_every_layer_and_ends_with_the_answer(
    tmp_path: Path,
) -> None:
    name = " + ".join(f"/backbone/stage{i}/block/conv/Conv" for i in range(9))
    path = tmp_path / "build.log"
    path.write_text(f"[TRT] [I] (Sparsity) Chose 1 layer(s) using sparse tactics: {name}\n")
    result = CliRunner().invoke(application(), ["log", str(path)])
    lines = result.output.splitlines()
    assert len(name) > 250
    assert [line.split()[-1] for line in lines if line.startswith(name)] == ["chosen"]
    assert lines[-1] == "answer: 1 layer runs sparse"

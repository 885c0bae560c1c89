"""Every real log of a collection with an index, against what that says is in it."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import pytest
from support.real_logs import NOT_THERE, REAL_LOGS

from twofour.logs.layer_info import read_layer_information, read_profile
from twofour.logs.read import read_build_log
from twofour.records.log import Build, BuildLog, Producer, SparsityFlag, SparsityLine

INDEX = REAL_LOGS / "INDEX.md"
pytestmark = pytest.mark.skipif(not INDEX.is_file(), reason=NOT_THERE)
_CELL = re.compile(r"(?<!\\)\|")
_FIRST_LAST = re.compile(r"→ (\d+) entries \((?:first `(.*?)`; last `(.*?)`|empty)\)")
_LINES = re.compile(
    r"(\d+) tactic-name lines, (\d+) \"Timing Runner\", (\d+) \"Autotuning format combination\", "
    r"(\d+) \"Chose Runner Type\""
)


class Row(NamedTuple):
    """One line of the index."""

    file: str
    version: str
    producer: str
    gpu: str
    facts: tuple[str, ...]


def rows() -> list[Row]:
    if not INDEX.is_file():
        return []
    found = []
    for line in INDEX.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in _CELL.split(line)[1:-1]]
        if len(cells) == 8 and cells[0].startswith("`"):
            facts = tuple(fact.strip().replace("\\|", "|") for fact in cells[7].split(" • "))
            name = cells[0].split("`")[1]
            found.append(Row(name, cells[2], cells[3], cells[4], facts))
    return found


LOGS = [row for row in rows() if not re.search(r"layerinfo|profile_trt8", row.file)] + [
    row for row in rows() if row.file.endswith("layerinfo_1.log")
]
LAYER_FILES = [row for row in rows() if re.search(r"layerinfo.*\.json", row.file)]


@cache
def read(name: str) -> BuildLog:
    return read_build_log(REAL_LOGS / name)


def lines_of(log: BuildLog) -> list[SparsityLine]:
    return [line for build in log.builds for line in build.sparsity_lines]


def check_fact(log: BuildLog, fact: str, lines: list[SparsityLine]) -> None:
    """Assert one fact; a (Sparsity) fact takes the next line off `lines`."""
    builds = log.builds
    if (found := _FIRST_LAST.search(fact)) is not None:
        check_list(lines.pop(0), fact, found)
    elif (found := _LINES.fullmatch(fact)) is not None:
        check_counts(builds, tuple(int(n) for n in found.groups()))
    elif (found := re.fullmatch(r"Sparsity option: (\w+)", fact)) is not None:
        built = [b for b in builds if b.producer is Producer.TRTEXEC and not b.engine_loaded]
        assert not built or SparsityFlag(found[1].lower()) in {b.sparsity for b in built}
    elif (
        found := re.fullmatch(r"[Tt]hroughput: (\S+) qps(?: \(\+(\d+) more\))?", fact)
    ) is not None:
        rates = [b.latency.throughput_qps for b in builds if b.latency is not None]
        assert rates[0] == float(found[1])
        assert len(rates) == 1 + int(found[2] or 0)
    elif (found := re.fullmatch(r"HasSparseWeights: (\d+)\W0, (\d+)\W1", fact)) is not None:
        layers = [layer for b in builds for layer in b.engine_layers or ()]
        held = [layer.has_sparse_weights for layer in layers]
        assert (held.count(False), held.count(True)) == (int(found[1]), int(found[2]))
    elif (found := re.fullmatch(r"(\d+) Myelin sorted tables", fact)) is not None:
        assert sum(build.counts.foreign_node_tables for build in builds) == int(found[1])
    elif (found := re.fullmatch(r"(\d+) RUNNING / (\d+) (.*)", fact)) is not None:
        check_banners(builds, int(found[1]), found[3])
    elif (found := re.fullmatch(r"(\d+) \[E\] lines", fact)) is not None:
        assert sum(build.error_count for build in builds) == int(found[1])
    else:
        assert fact == "", f"no check for {fact!r}"


def check_list(line: SparsityLine, fact: str, expected: re.Match[str]) -> None:
    names = line.names or ()
    assert line.foreign_node is fact.startswith("foreignNode")
    assert len(names) == int(expected[1])
    if names:
        assert names[0] == expected[2]
        assert names[-1].startswith(expected[3].rstrip('",'))
    if (printed := re.search(r"(?:Found|Chose) (\d+)", fact)) is not None:
        assert line.printed_count == int(printed[1])


def check_counts(builds: tuple[Build, ...], expected: tuple[int, ...]) -> None:
    counts = [b.counts for b in builds]
    assert expected == (
        sum(c.tactic_names for c in counts),
        sum(c.timing_runners for c in counts),
        sum(c.format_combinations for c in counts),
        sum(c.runner_choices for c in counts),
    )


def check_banners(builds: tuple[Build, ...], runs: int, ending: str) -> None:
    trtexec = [b for b in builds if b.producer is Producer.TRTEXEC]
    assert len(trtexec) == runs
    outcomes = {b.outcome.value for b in trtexec}
    expected = {"PASSED": {"built", "loaded"}, "FAILED": {"failed"}}
    assert outcomes <= expected.get(ending, {"unfinished"})


@pytest.mark.parametrize("row", LOGS, ids=lambda row: row.file)
def test_a_real_log_gives_every_fact_of_its_row(row: Row) -> None:
    log = read(row.file)
    lines = lines_of(log)
    facts = [fact for fact in row.facts if fact]
    for fact in facts:
        check_fact(log, fact, lines)
    assert lines == []


def test_a_real_log_kept_as_strings_of_json_gives_the_names_of_its_lines() -> None:
    def names(file: str) -> list[tuple[str, ...] | None]:
        builds = read(file).builds
        return [line.names for build in builds for line in build.sparsity_lines]

    stem = "trtexec_trt10.3.0_orin-nano-yolov5s-sparse24-opt1_1"
    assert names(f"{stem}.json") == names(f"{stem}.log")


@pytest.mark.parametrize("row", LOGS, ids=lambda row: row.file)
def test_a_real_log_gives_its_producer_version_and_gpu(row: Row) -> None:
    builds = read(row.file).builds
    stated = re.match(r"(\d+\.\d+\.\d+)\S* — stated", row.version)
    if stated is not None:
        assert stated[1] in {build.tensorrt_version for build in builds}
    words = {"trtexec": "trtexec", "polygraphy": "polygraphy", "Python": "python", "RTX": "rtx"}
    wanted = next((value for word, value in words.items() if word in row.producer), "trtexec")
    if "RTX" in row.producer:
        wanted = "tensorrt-rtx"
    assert wanted in {build.producer.value for build in builds}
    gpu = row.gpu.split(" (")[0]
    if "trtexec" in row.file and gpu not in {"not stated", "Jetson Orin Nano"}:
        assert gpu in {build.gpu for build in builds}
    if (sm := re.match(r"sm(\d)(\d)\b", row.gpu)) and "timingcache" not in row.file:
        assert {build.compute_capability for build in builds} & {(int(sm[1]), int(sm[2]))}


@pytest.mark.parametrize("row", LAYER_FILES, ids=lambda row: row.file)
def test_real_layer_information_gives_the_flags_of_its_row(row: Row) -> None:
    layers = read_layer_information(REAL_LOGS / row.file).layers
    held = [layer.has_sparse_weights for layer in layers]
    (fact,) = (f for f in row.facts if f.startswith("HasSparseWeights"))
    found = re.fullmatch(r"HasSparseWeights: (\d+)\W0, (\d+)\W1", fact)
    assert found is not None
    assert (held.count(False), held.count(True)) == (int(found[1]), int(found[2]))
    assert all(layer.layer_type for layer in layers)
    assert not any(layer.sparse for layer in layers)


def test_every_row_of_the_index_is_checked() -> None:
    checked = {row.file for row in (*LOGS, *LAYER_FILES)}
    assert {row.file for row in rows()} - checked == {
        "trtexec-profile_trt8.4_trex-a100-resnet-fp16_1.json"
    }


def test_the_real_profile_file_has_its_layers_and_count() -> None:
    profile = read_profile(REAL_LOGS / "trtexec-profile_trt8.4_trex-a100-resnet-fp16_1.json")
    assert (profile.iterations, len(profile.layers)) == (1, 36)
    layer = profile.layers[1]
    assert (layer.name, layer.average_ms) == ("Conv_0 + Relu_1", 0.111616)


@pytest.mark.parametrize(
    ("name", "layers", "first", "average_ms", "median_ms"),
    [
        ("trtexec_trt10.16.1_cookbook-mnist-profile_1.log", 15, "__mye59_0_myl0_0", 0.0017, 0.0018),
        (
            "trtexec_trt8.2.3_centerpoint-rpn-fp16_1.log",
            94,
            "Reformatting CopyNode for Input Tensor 0 to Conv_15 + Relu_16",
            0.0391,
            None,
        ),
        (
            "trtexec_trt8.5.3_sparsedrive-motion_1.log",
            51,
            "Reformatting CopyNode for Network Input det_classification_sigmoid",
            0.0089,
            0.0041,
        ),
    ],
)
def test_profile_tables_of_all_versions_are_read(
    name: str, layers: int, first: str, average_ms: float, median_ms: float | None
) -> None:
    (profile,) = (b.profile for b in read(name).builds if b.profile is not None)
    assert len(profile.layers) == layers
    row = profile.layers[0]
    assert (row.name, row.average_ms, row.median_ms) == (first, average_ms, median_ms)


def test_latency_summaries_of_tensorrt_7_and_8_and_10_have_the_same_shape() -> None:
    def gpu(name: str, key: str) -> tuple[float | None, ...]:
        (latency,) = (b.latency for b in read(name).builds if b.latency is not None)
        metric = {m.name: m for m in latency.metrics}[key]
        return metric.median_ms, metric.percentiles[-1].percent, metric.percentiles[-1].ms

    seven = gpu("trtexec_trt7.x_resnet50-intro_1.log", "GPU Compute")
    eight = gpu("trtexec_trt8.2.3_centerpoint-rpn-fp16_1.log", "GPU Compute Time")
    ten = gpu("trtexec_trt10.16.1_cookbook-mnist-inference_1.log", "GPU Compute Time")
    assert seven == (2.11353, 99.0, 2.12988)
    assert eight == (2.35217, 99.0, 2.37775)
    assert ten == (0.0388184, 99.0, 0.0390625)


def test_the_tensors_polygraphy_inspected_are_kept_with_its_answer() -> None:
    name = "polygraphy_trt10.16.2_cookbook-mnist-inspect-sparsity-yes_1.log"
    (build,) = read(name).builds
    assert [(t.name, t.sparse) for t in build.checked_tensors] == [
        ("conv2.weight", True),
        ("gemm1.weight", True),
        ("gemm2.weight", False),
    ]


def test_a_tactic_replay_of_polygraphy_gives_the_layers_and_their_tactics() -> None:
    (build,) = read("polygraphy_trt10.16.2_cookbook-mnist-inspect-tactics_1.log").builds
    layers = build.engine_layers or ()
    assert len(layers) == 5
    assert (layers[0].name, layers[0].tactic_id) == (
        "node_conv2d + node_relu",
        "0x5b8bf1b8028629d9",
    )

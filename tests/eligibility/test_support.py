"""Who is told where support for 2:4 ended; each time with the source and its date."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.join_cases import build, joined
from support.report_cases import conv, gpu, int8, report

from twofour.eligibility import build_facts as support
from twofour.records.export import Gpu

NO_INT8 = "NVIDIA's sparse library has no int8 kernels for compute capability 10.3"
QDQ = "TensorRT 11 quantises by Q/DQ pairs alone: --int8, --calib and calibrators ended with "


ROWS = [row for row in vars(support).values() if isinstance(row, support.Support)]


@pytest.mark.parametrize("row", ROWS)
def test_each_fact_has_a_link_and_a_date(row: support.Support) -> None:
    assert re.search(r"https://\S+", row.source)
    assert re.fullmatch(r"202\d-\d\d(-\d\d)?", row.since)
    assert row.in_words == f"{row.what} ({row.since}, {row.source})"


@pytest.mark.parametrize(
    ("device", "tensorrt", "packages", "said"),
    [
        (gpu("B300", 10, 3), "10.16.1", (), [NO_INT8]),
        (gpu("B200", 10, 0), "11.4.0.106", ("torch",), [QDQ]),
        (None, None, ("vllm",), ["vLLM 0.19 and later refuse compressed 2:4 checkpoints"]),
        (None, "8.6.1", ("tensorrt-llm",), ["TensorRT-LLM builds no TensorRT engines any more: "]),
        (gpu("H200", 9, 0), "8.6.0", (), ["on compute capability 9.0, TensorRT 8.6 has sparse "]),
        (gpu("A100", 8, 0), "8.6.0", ("torch",), []),
        (gpu("H200", 9, 0), "10.16.1", ("torch",), []),
    ],
)
def test_doctor_says_what_concerns_this_machine(
    device: Gpu | None, tensorrt: str | None, packages: tuple[str, ...], said: list[str]
) -> None:
    found = support.of_machine(device, tensorrt, packages)
    assert len(found) == len(said)
    assert all(map(str.startswith, found, said))


@pytest.mark.parametrize(
    ("flag", "version", "said"),
    [("Forced", "v100001", 1), ("Forced", "v8601", 0), ("Enabled", "v110100", 0)],
)
def test_a_forced_log_of_a_version_that_deprecates_it_says_so_once(
    flag: str, version: str, said: int
) -> None:
    found = joined(report(conv("a", 512, 512)), build=build(flag=flag, version=version))
    assert found.notes.count(support.FORCE_DEPRECATED.in_words) == said


@pytest.mark.parametrize(
    ("version", "types", "told"),
    [("v8601", "--int8", True), ("v101601", "--best", True), ("v101601", "--fp16", False)],
)
def test_int8_without_pairs_is_told_to_end_with_tensorrt_10(
    version: str, types: str, told: bool
) -> None:
    log = build(version=version, options=types)
    layer = conv("a", 512, 512)
    said = support.QDQ_ONLY.in_words
    assert (said in joined(report(layer), build=log).notes) is told
    assert said not in joined(report(replace(layer, **int8(output=True))), build=log).notes


@pytest.mark.parametrize(
    ("version", "capability", "told"),
    [("v8601", (9, 0), True), ("v8601", (8, 0), False), ("v101601", (9, 0), False)],
)
def test_a_build_of_8_6_on_hopper_says_that_its_sparse_products_are_amperes(
    version: str, capability: tuple[int, int], told: bool
) -> None:
    log = replace(build(version=version), compute_capability=capability)
    notes = joined(report(conv("a", 512, 512)), build=log).notes
    assert (support.AMPERE_PRODUCTS.in_words in notes) is told

"""Who is told where support for 2:4 ended; each time with the source and its date."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

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
    ("fact", "version", "given", "is_said"),
    [
        (support.FORCE_DEPRECATED, "v100001", {"flag": "Forced"}, True),
        (support.FORCE_DEPRECATED, "v8601", {"flag": "Forced"}, False),
        (support.FORCE_DEPRECATED, "v110100", {}, False),
        (support.QDQ_ONLY, "v8601", {"options": "--int8"}, True),
        (support.QDQ_ONLY, "v101601", {"options": "--fp16"}, False),
        (support.AMPERE_PRODUCTS, "v8601", {"capability": (9, 0)}, True),
        (support.AMPERE_PRODUCTS, "v8601", {"capability": (8, 0)}, False),
        (support.AMPERE_PRODUCTS, "v101601", {"capability": (9, 0)}, False),
    ],
)
def test_a_report_says_once_what_concerns_its_build(
    fact: support.Support, version: str, given: dict[str, Any], is_said: bool
) -> None:
    options = {name: value for name, value in given.items() if name != "capability"}
    log = replace(build(version=version, **options), compute_capability=given.get("capability"))
    notes = joined(report(conv("a", 512, 512)), build=log).notes
    assert notes.count(fact.in_words) == is_said


def test_a_file_with_pairs_is_not_told_that_calibrators_ended() -> None:
    pairs = report(replace(conv("a", 512, 512), **int8(output=True)))
    log = build(version="v8601", options="--int8")
    assert support.QDQ_ONLY.in_words not in joined(pairs, build=log).notes

"""A wording of a log is one row: how the message begins, and what is done with it."""

from __future__ import annotations

import pytest
from support.log_lines import parse_lines

from twofour.logs.messages import LogicalLine
from twofour.logs.open_build import OpenBuild
from twofour.logs.wordings import WORDINGS, Wording
from twofour.records.log import CheckedTensor

LOG = [
    "[I] TensorRT version: 10.3.0",
    "[I] [TRT] Weights with two of four zeros: conv1.weight",
    "[2024-05-01 10:00:00 INFO] [TRT] Weights with two of four zeros: fc.weight",
]


def new_words(build: OpenBuild, line: LogicalLine) -> None:
    build.touched = True
    name = line.text.partition(": ")[2]
    build.checked.append(CheckedTensor(name=name, sparse=True))


def test_a_wording_that_is_added_is_read_behind_any_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "twofour.logs.read.WORDINGS",
        [*WORDINGS, Wording("Weights with two of four zeros: ", new_words, is_sure=True)],
    )
    (build,) = parse_lines(LOG)
    assert [tensor.name for tensor in build.checked_tensors] == ["conv1.weight", "fc.weight"]

"""What is read from trtexec's --exportTimes, in every form that its releases write.

The rows are written by hand after exportJSONTrace of samples/common/sampleReporting.cpp.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from twofour.errors import BadInputError
from twofour.pipeline.emitting import read_trtexec_times

BEFORE_8 = """[
  { "startInMs" : 0, "endInMs" : 0.1, "startComputeMs" : 0.1, "endComputeMs" : 9.1, "startOutMs" \
: 9.1, "endOutMs" : 9.2, "inMs" : 0.1, "computeMs" : 9, "outMs" : 0.1, "latencyMs" : 9.2, \
"endToEndMs" : 9.3 }
, { "startInMs" : 200, "endInMs" : 200.1, "startComputeMs" : 200.1, "endComputeMs" : 202.1, \
"startOutMs" : 202.1, "endOutMs" : 202.2, "inMs" : 0.1, "computeMs" : 2.00006, "outMs" : 0.1, \
"latencyMs" : 2.2, "endToEndMs" : 2.3 }
]
"""
OF_8 = """[
  { "startEnqMs" : 0, "endEnqMs" : 0.01, "startH2dMs" : 0, "endH2dMs" : 0, "startComputeMs" : 0.1, \
"endComputeMs" : 9.1, "startD2hMs" : 9.1, "endD2hMs" : 9.1, "h2dMs" : 0, "computeMs" : 9, \
"d2hMs" : 0, "latencyMs" : 9, "endToEndMs" : 9 }
, { "startEnqMs" : 201, "endEnqMs" : 201.1, "startH2dMs" : 201, "endH2dMs" : 201, \
"startComputeMs" : 201, "endComputeMs" : 203, "startD2hMs" : 203, "endD2hMs" : 203, "h2dMs" : 0, \
"computeMs" : 2.00006, "d2hMs" : 0, "latencyMs" : 2.00006, "endToEndMs" : 2.1 }
]
"""
OF_10 = """[
  { "startEnqMs" : 201, "endEnqMs" : 201.1, "startH2dMs" : 201, "endH2dMs" : 201, \
"startComputeMs" : 201, "endComputeMs" : 203, "startD2hMs" : 203, "endD2hMs" : 203, "h2dMs" : 0, \
"computeMs" : 2.00006, "d2hMs" : 0, "latencyMs" : 2.00006 }
]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "dense.times.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", [BEFORE_8, OF_8, OF_10], ids=["before 8", "8", "10"])
def test_every_form_gives_the_computing_times_behind_the_warm_up(tmp_path: Path, text: str) -> None:
    assert read_trtexec_times(written(tmp_path, text), warmup_ms=200) == (2.00006,)


def test_rows_that_do_not_say_when_they_began_are_taken(tmp_path: Path) -> None:
    assert read_trtexec_times(
        written(tmp_path, '[{"computeMs": 2}, {"computeMs": 3.5}]'), warmup_ms=200
    ) == (2, 3.5)


@pytest.mark.parametrize(
    "text",
    [
        '[\n  { "computeMs" : 1 }\n, { "comp',
        "[]",
        '{"computeMs": 1}',
        '[{"name": "fc", "timeMs": 1}]',
        '[{"computeMs": "two"}]',
        '[{"computeMs": 2}, {"computeMs": 0}]',
        '[{"startComputeMs": 100, "computeMs": 2}]',
    ],
)
def test_a_file_without_usable_times_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInputError, match=r"no times in .*dense\.times\.json"):
        read_trtexec_times(written(tmp_path, text), warmup_ms=200)

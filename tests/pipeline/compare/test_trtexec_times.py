"""What is read from trtexec's --exportTimes, in every form that its releases write.

The rows are written by hand after exportJSONTrace of samples/common/sampleReporting.cpp.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from twofour.errors import BadInputError
from twofour.pipeline.compare.trtexec_times import read_times

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
    assert read_times(written(tmp_path, text)) == (2.00006,)


def test_a_longer_warm_up_takes_more_and_what_follows_it_stays_whatever_it_says(
    tmp_path: Path,
) -> None:
    starts = ((0, 9), (450, 8), (501, 2), (499, 3))
    rows = ", ".join(f'{{"startComputeMs": {at}, "computeMs": {ms}}}' for at, ms in starts)
    path = written(tmp_path, f"[{rows}]")
    assert read_times(path, warmup_ms=500) == (2, 3)
    assert read_times(path, warmup_ms=0) == (9, 8, 2, 3)


def test_rows_that_do_not_say_when_they_began_are_taken(tmp_path: Path) -> None:
    assert read_times(written(tmp_path, '[{"computeMs": 2}, {"computeMs": 3.5}]')) == (2, 3.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is damaged"),
        ('[\n  { "computeMs" : 1 }\n, { "comp', "is damaged"),
        ('[{"computeMs": nan}]', "is damaged"),
        ("[]", "no times in"),
        ('{"computeMs": 1}', "no times in"),
        ('[{"name": "fc", "timeMs": 1}]', "no times in"),
        ('[{"computeMs": "2"}, {"computeMs": true}, 7]', "no times in"),
        ('[{"computeMs": 2}, {"computeMs": 0}]', "no times in"),
        ('[{"startComputeMs": 100, "computeMs": 2}]', "no times in"),
    ],
)
def test_a_file_without_usable_times_is_refused_by_name(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(BadInputError, match=words) as error:
        read_times(written(tmp_path, text))
    assert "dense.times.json" in error.value.message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"cannot read .*No such file"):
        read_times(tmp_path / "dense.times.json")


def test_a_number_that_no_float_holds_is_no_time(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(f'[{{"computeMs": {"9" * 400}}}, {{"computeMs": 2.5}}]')
    assert read_times(path) == (2.5,)

"""Times of layers, as the user names them: a report with tactics, JSON, CSV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.render_cases import every_status

from twofour.errors import BadInputError
from twofour.pipeline.sensitivity.layer_times import read_times
from twofour.store import to_json


def _pairs(path: Path) -> dict[str, tuple[float, float]]:
    times = read_times(path)
    assert times.source == str(path)
    assert times.dense.keys() == times.sparse.keys()
    return {name: (time, times.sparse[name]) for name, time in times.dense.items()}


def test_two_profiles_of_tensorrt_in_a_folder_give_the_time_of_one_run(tmp_path: Path) -> None:
    rows = '{ "name" : "a + b", "timeMs" : 8.0 }, { "name" : "c", "averageMs" : 0.5 }'
    (tmp_path / "dense.profile.json").write_text(f'[{{ "count" : 4 }}, {rows}, {rows}]')
    with pytest.raises(BadInputError, match="is a list, as the profile of one engine is"):
        read_times(tmp_path / "dense.profile.json")
    with pytest.raises(BadInputError, match="is not a run folder"):
        read_times(tmp_path)
    (tmp_path / "sparse.profile.json").write_text(f'[{{ "count" : 8 }}, {rows}]')
    assert _pairs(tmp_path) == {"a + b": (4.0, 1.0), "c": (1.0, 0.5)}


def test_a_report_gives_the_tactics_of_the_layers_that_have_both(tmp_path: Path) -> None:
    report = every_status()
    first = replace(report.verdicts[0], layer="conv", node="/conv", dense_ms=0.5, sparse_ms=0.3)
    others = [replace(v, dense_ms=None) for v in report.verdicts[1:]]
    path = tmp_path / "eligibility.json"
    path.write_text(to_json(replace(report, verdicts=(first, *others))))
    assert _pairs(path) == {"/conv": (0.5, 0.3)}
    joined = [replace(first, node=name, engine_layer="q + k") for name in ("/q", "/k")]
    path.write_text(to_json(replace(report, verdicts=(first, *joined, *others))))
    assert _pairs(path) == {"/conv": (0.5, 0.3), "/q": (0.25, 0.15), "/k": (0.25, 0.15)}
    path.write_text(to_json(replace(report, verdicts=tuple(others))))
    with pytest.raises(BadInputError, match="no layer there has times of a dense and a sparse"):
        read_times(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1.5, 1], "b, c": [0.25, 0.5]}',
        'layer,dense_ms,sparse_ms\na,1.5,1\n"b, c",0.25,0.5\n',
        '\ufeffa, 1.5, 1\n\n"b, c", 0.25, 0.5\n',
    ],
)
def test_json_and_csv_say_the_same(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times"
    path.write_text(text, encoding="utf-8")
    assert _pairs(path) == {"a": (1.5, 1.0), "b, c": (0.25, 0.5)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no times"),
        ("layer,dense,sparse\n", "has no times"),
        ("a,1.5\n", "has no times"),
        ("a,1,2\nb,-1,2\n", "b, -1, 2"),
        ("a,1,2\nb,nan,2\n", "b, nan, 2"),
        ('{"a": 1}', "a, 1"),
        ('{"a": [1, "x"]}', "a, 1, x"),
        ("{", "is no JSON"),
        ("\x00\xff", "has no times"),
    ],
)
def test_what_has_no_times_is_refused_with_the_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "times"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError, match="--profile") as caught:
        read_times(path)
    assert message in caught.value.message


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="is not a run folder"):
        read_times(tmp_path)
    with pytest.raises(BadInputError, match="--profile: cannot read"):
        read_times(tmp_path / "none.csv")

"""What a report quotes from a log can be searched for there: it is the line itself, at its number.

Every real log, as it is and as other programs write it: loggers, containers, colours, line ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.join_cases import report_from_log
from support.log_lines import parse_lines
from support.real_logs import REAL_LOGS

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.logs.read import read_build_log
from twofour.records.log import Build, BuildLog
from twofour.reports.explain import layer_story
from twofour.reports.terminal import plain_text
from twofour.store import from_json, to_json
from twofour.words import printable

OWN_LOGS = Path(__file__).parents[1] / "data" / "logs"
LOGS = sorted([*OWN_LOGS.glob("*.log"), *REAL_LOGS.glob("*.log")])
SMALL = 60_000
"""Bytes of a log that is read in every format."""
WIDE = 100_000
_PREFIX = re.compile(r"^(?:\[[\d/:-]+\] )?(?:\[[A-Z]+\] ?){0,2}")


def _torch(line: str) -> str:
    return f"DEBUG: [Torch-TensorRT TensorRT Conversion Context] - {_PREFIX.sub('', line)}"


FORMATS: dict[str, Callable[[str], str]] = {
    "Python's logging": lambda line: f"2026-11-22 10:00:01,123 - trt - DEBUG - {line}",
    "docker": lambda line: f"2026-11-22T10:00:01.123456789Z {line}",
    "Torch-TensorRT": _torch,
    "ROS": lambda line: f"[component-1] [INFO] [1700000000.123456789] [trt_node]: {line}",
    "CRLF": lambda line: f"{line}\r",
    "a coloured line": lambda line: f"\x1b[32m{line}\x1b[0m",
    "a coloured level": lambda line: line.replace("[V]", "[\x1b[36mV\x1b[0m]"),
    "colours inside": lambda line: line.replace("Tactic", "Tac\x1b[1mtic\x1b[0m"),
    "a web page": lambda line: line.replace(">", "&gt;").replace(" Time", "\N{NO-BREAK SPACE}Time"),
}


def quotes(build: Build) -> Iterator[tuple[int, str]]:
    """Line and words of everything in the record that stands for a line of the log."""
    said = [(e.line, e.raw) for e in (*build.errors, *build.warnings)]
    said += [(line.line, line.raw) for line in build.sparsity_lines]
    said += [(x.line, x.raw) for x in build.fusions] + [
        (s.line, s.raw) for s in build.skipped_tactics
    ]
    said += [(t.line, t.raw) for layer in build.layers for t in layer.tactics if t.raw is not None]
    for line, text in said:
        yield from enumerate(text.split("\n"), line)


def cited(build: Build) -> Iterator[tuple[int, str]]:
    """Line and words of every source in the report on a log, and in the stories of some layers."""
    report = report_from_log(build)
    texts = {r.source for verdict in report.verdicts for r in verdict.reasons if r.source}
    names = {
        v.layer for v in report.verdicts if sum(v.layer == w.layer for w in report.verdicts) == 1
    }
    for name in sorted(names)[:3]:
        story = layer_story(report, BuildEvidence(build=build), name)
        texts |= set(plain_text(story, width=WIDE).splitlines())
    mark = re.compile(rf"(?:^|; |\s){re.escape(build.file)}:(\d+): ")
    for text in texts:
        parts = mark.split(text)[1:]
        yield from zip(map(int, parts[::2]), parts[1::2], strict=True)


def check(path: Path) -> int:
    """How many quotes there are, all of which stand in the file."""
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    found = 0
    for build in read_build_log(path).builds:
        for number, words in quotes(build):
            assert words in lines[number - 1], (number, words)
            found += bool(words)
        for number, words in cited(build):
            for piece in re.split(r" \.\.\.(?: |$)", words.rstrip()):
                assert printable(piece) in printable(lines[number - 1]), (number, piece)
            found += 1
    return found


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_every_quoted_line_stands_in_the_log_at_its_number(path: Path) -> None:
    check(path)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "path",
    [p for p in LOGS if p.stat().st_size < SMALL],
    ids=lambda path: path.name,
)
def test_every_quoted_line_stands_in_the_log_as_other_programs_write_it(
    path: Path, name: str, tmp_path: Path
) -> None:
    lines = path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    log = tmp_path / "a.log"
    log.write_bytes("\n".join(map(FORMATS[name], lines)).encode())
    check(log)


def test_of_a_layer_the_fastest_dense_and_the_fastest_sparse_kernel_keep_their_lines() -> None:
    times = (("sparse_conv", 5), ("conv", 4), ("sparse_conv", 2), ("conv", 9), ("conv", 3))
    lines = [f"Tactic Name: sm80_xmma_{name} Tactic: {ms}  Time: {ms}" for name, ms in times]
    runner = "[V] --------------- Timing Runner: a (CaskConvolution)"
    (build,) = parse_lines([runner, *(f"[V] {line}" for line in lines)])
    (layer,) = build.layers
    kept = [(t.sparse, t.ms, t.raw) for t in layer.tactics if t.raw is not None]
    assert kept == [(True, 2, lines[2]), (False, 3, lines[4])]


def test_a_name_far_in_a_list_is_quoted_behind_the_words_that_begin_the_list(
    tmp_path: Path,
) -> None:
    log = tmp_path / "a.log"
    names = [f"/model.{n}/conv/Conv + /model.{n}/act/Relu" for n in range(200)]
    line = f"(Sparsity) Found 200 layer(s) eligible to use sparse tactics: {', '.join(names)}"
    log.write_text(f"[V] {line}\n[V] (Sparsity) Chose 0 layer(s) using sparse tactics: \n")
    (build,) = read_build_log(log).builds
    sources = {v.layer: v.reasons[-1].source for v in report_from_log(build).verdicts}
    head = "(Sparsity) Found 200 layer(s) eligible to use sparse tactics:"
    assert sources[names[0]] == f"{log}:1: {head} {names[0]} ..."
    assert sources[names[150]] == f"{log}:1: {head} ... {names[150]} ..."
    assert sources[names[199]] == f"{log}:1: {head} ... {names[199]}"


def test_a_wrapped_list_is_quoted_by_the_line_that_names_the_layer(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    names = "layer1.conv, layer2.conv, layer3.conv"
    found = f"[V] (Sparsity) Found 3 layer(s) eligible to use sparse tactics: {names}"
    chose = f"[V] (Sparsity) Chose 3 layer(s) using sparse tactics: {names}"
    log.write_text("".join(f"{line[:79]}\n{line[79:]}\n" for line in (found, chose)))
    (build,) = read_build_log(log).builds
    report = report_from_log(build)
    sources = [(v.reasons[0].source or "").removeprefix(f"{log}:") for v in report.verdicts]
    first = "3: (Sparsity) Chose 3 layer(s) using sparse tactics: layer1.conv, layer2.conv,"
    assert sources == [first, first, "4:  layer3.conv"]
    assert check(log) > 0


def test_the_json_of_a_log_has_a_line_for_the_tactics_that_keep_one_alone() -> None:
    times = "".join(f"[V] Tactic Name: k{t} Tactic: {t} Time: {t}\n" for t in range(1, 10))
    builds = parse_lines(f"[V] --------------- Timing Runner: a (Cask)\n{times}".splitlines())
    log = BuildLog(files=(), builds=builds)
    text = to_json(log)
    (layer,) = json.loads(text)["builds"][0]["layers"]
    assert [tactic.get("raw", "none") for tactic in layer["tactics"]] == [
        "Tactic Name: k1 Tactic: 1 Time: 1", *["none"] * 8,
    ]  # fmt: skip
    assert from_json(BuildLog, text) == log

"""Whatever other programs put before TensorRT's lines, the facts are those of the bare log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.log_lines import parse_lines
from test_log_properties import LOGS, MESSAGES, facts

from twofour.logs.messages import take_apart
from twofour.logs.read import OpenSource, lines_of
from twofour.records.log import Build, Producer, SparsityFlag

LEVELS = {"V": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL", "": "INFO"}
Logger = Callable[[str, int, str], str]
"""Level (as Python's logging names it), line number, message -> line."""


def _stamp(n: int) -> str:
    return f"10:{n // 60 % 60:02d}:{n % 60:02d}"


LOGGERS: dict[str, Logger] = {
    "torch-tensorrt's file": lambda level, n, m: (
        f"2026-07-07 {_stamp(n)} - torch_tensorrt [TensorRT Conversion Context] - {level} - {m}"
    ),
    "basicConfig and a tag": lambda level, _, m: f"{level}:tensorrt:[{level[0]}] {m}",
    "loguru": lambda level, n, m: (
        f"2026-11-22 {_stamp(n)}.{n:03d} | {level:<8} | module:function:12 - {m}"
    ),
    "an enumeration": lambda level, _, m: f"[TRT] [Logger.Severity.{level}] {m}",
    "glog": lambda level, n, m: (
        f"{level[0].replace('D', 'I').replace('C', 'F')}1122 {_stamp(n)}.{n:06d} 1 log.cc:42] {m}"
    ),
}
AROUND: dict[str, Callable[[int, str], str]] = {
    "grep -n": lambda n, line: f"{n}:{line}",
    "quoted": lambda _, line: f"> {line}",
    "docker compose": lambda _, line: f"trt-1  | {line}",
    "a pod": lambda n, line: f"2026-11-22T{_stamp(n)}.{n:09d}Z stdout F {line}",
    "mpirun": lambda _, line: f"[1,0]<stdout>:{line}",
    "basicConfig of whole lines": lambda _, line: f"INFO:build:{line}",
}


def read(lines: list[str]) -> list[Build]:
    """Facts of the builds in lines, read as a file is."""
    text = "\n".join(lines).encode()
    found = lines_of(iter([text]), OpenSource("x"))
    return [facts(build) for build in parse_lines(line for lines, _ in found for line in lines)]


def messages_of(lines: list[str]) -> list[tuple[str | None, str]]:
    """Severity and message of every line; None where the line has no prefix."""
    found = [take_apart(line) for line in lines]
    return [
        (None, line) if each is None or line.startswith("&&&&") else (each.severity, each.message)
        for each, line in zip(found, lines, strict=True)
    ]


def check_logger(lines: list[str], logger: Logger) -> None:
    parts = messages_of(lines)
    plain = [m if level is None else f"[{level or 'I'}] {m}" for level, m in parts]
    logged = [
        m if level is None else logger(LEVELS[level], n, m) for n, (level, m) in enumerate(parts, 1)
    ]
    assert read(logged) == read(plain)


def log_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


SMALL = sorted(path for path in LOGS.glob("*.log") if path.name != "wrapped.log")


@pytest.mark.parametrize("name", LOGGERS)
def test_a_log_through_any_logger_gives_the_facts_of_the_bare_log(name: str) -> None:
    for path in SMALL:
        check_logger(log_lines(path), LOGGERS[name])


@pytest.mark.parametrize("name", AROUND)
def test_lines_with_anything_before_them_give_the_facts_of_the_bare_log(name: str) -> None:
    for path in SMALL:
        lines = log_lines(path)
        wrapped = [AROUND[name](n, line) for n, line in enumerate(lines, 1)]
        assert read(wrapped) == read(lines), path.name


# --- generated loggers ----------------------------------------------------------------------------

CLOCKS = (
    "",
    "2026-11-22 10:00:{:02d} ",
    "2026-11-22T10:00:{:02d},123 ",
    "[11/22/26 10:00:{:02d}] ",
    "10:00:{:02d}.123456 ",
)
NAMES = ("", "trt ", "my.package.builder ", "[engine] ", "worker-3 ", "(MainThread) ", "app[77] ")
LEVEL_FORMS = ("{} ", "[{}] ", "{}: ", "{:<8} ", "<{}> ", "{} - ", "| {:<8} | ", "level={} ")
COMPLAINT = "Detected a hazard that no sentence is known of"


@settings(deadline=None, max_examples=120)
@given(
    st.sampled_from(CLOCKS),
    st.sampled_from(NAMES),
    st.sampled_from(LEVEL_FORMS),
    st.booleans(),
    st.booleans(),
)
def test_a_prefix_put_together_from_the_parts_of_loggers_is_found(
    clock: str, name: str, level_form: str, level_first: bool, lower: bool
) -> None:
    def logger(level: str, n: int, message: str) -> str:
        word = level_form.format(level.lower() if lower else level)
        return clock.format(n) + (word + name if level_first else name + word) + message

    parts = [("W", COMPLAINT), *(("V", message) for message in MESSAGES)]
    plain = read([f"[{severity}] {message}" for severity, message in parts])
    assert [warning.text for build in plain for warning in build.warnings] == [COMPLAINT]
    lines = [logger(LEVELS[severity], n, m) for n, (severity, m) in enumerate(parts)]
    assert read(lines) == plain


# --- the prefixes by themselves -------------------------------------------------------------------


def test_the_name_of_a_file_or_a_path_is_no_level() -> None:
    lines = [f"error.log:{n}:[V] {message}" for n, message in enumerate(MESSAGES)]
    (build,) = parse_lines([*lines, "error.log:99:Done."])
    assert (build.error_count, build.warning_count) == (0, 0)


def test_torch_tensorrt_is_known_by_its_logger_s_name() -> None:
    logger = LOGGERS["torch-tensorrt's file"]
    (build,) = parse_lines(logger("DEBUG", n, m) for n, m in enumerate(MESSAGES))
    assert build.producer is Producer.TORCH_TENSORRT


def test_what_other_loggers_say_in_the_same_log_is_none_of_tensorrt_s() -> None:
    lines = [f"DEBUG:trt_log:{message}" for message in MESSAGES]
    (build,) = parse_lines(["WARNING:root:slow disk", *lines, "ERROR:app:no such file"])
    assert (build.error_count, build.warning_count) == (0, 0)
    assert build.eligible == ("fc", "conv1 + relu1", "conv2")


def test_lines_kept_as_a_json_array_of_strings_have_no_quotes_in_their_names() -> None:
    lines = [
        "[08/18/2026-03:26:49] [I] Sparsity: Enabled",
        "[08/18/2026-03:42:29] [I] [TRT] (Sparsity) Found 2 layer(s) eligible to use sparse "
        "tactics: a, b",
        "[08/18/2026-03:42:29] [I] [TRT] (Sparsity) Chose 1 layer(s) using sparse tactics: b",
        "&&&& PASSED TensorRT.trtexec [TensorRT v100300] # trtexec --onnx=x.onnx",
    ]
    wrapped = (
        ["{", '  "lines": [', *(f"      {json.dumps(line)}," for line in lines), "  ]", "}"],
        [f"  {json.dumps(f'2026-08-18 03:26:49 - DEBUG - {line}')}," for line in lines],
    )
    for kept in wrapped:
        (build,) = parse_lines(kept)
        assert [line.names for line in build.sparsity_lines] == [("a", "b"), ("b",)]


def test_a_log_without_a_message_of_tensorrt_is_no_build() -> None:
    for line in ("WARNING:root:slow", "2026-11-20 10:00:02,123 - app - ERROR - no such file"):
        assert parse_lines([line]) == ()


def test_an_excerpt_of_polygraphy_is_known_by_its_words_and_its_flags_give_the_precision() -> None:
    lines = (
        "[I] Building engine with configuration:",
        "    Flags                  | [FP16, SPARSE_WEIGHTS]",
        "    Engine Capability      | EngineCapability.STANDARD",
        "[I] Finished engine building in 3.500 seconds",
    )
    (build,) = parse_lines(lines)
    assert (build.producer, build.precision) == (Producer.POLYGRAPHY, "FP32+FP16")
    assert (build.sparsity, build.build_s) == (SparsityFlag.ENABLED, 3.5)
    (silent,) = parse_lines([lines[0], "    Flags                  | []", lines[3]])
    assert (silent.precision, silent.sparsity) == (None, SparsityFlag.DISABLED)

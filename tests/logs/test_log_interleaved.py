"""Two processes that write to one file: read apart by their tags, else noted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path

import pytest

from twofour.logs.read import read_build_log

A = (
    "[MemUsageChange] Init CUDA: CPU +24, GPU +0, now: CPU 164, GPU 458 (MiB)",
    "Loaded shared library libnvinfer_builder_resource_sm90.so.10.16.2",
    "--------------- Timing Runner: a (CaskConvolution[0x80000009])",
    "Tactic Name: sm80_xmma_fprop_implicit_gemm_f16f16 Tactic: 0x00000000000000a1 Time: 0.5",
    "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: a, b",
    "(Sparsity) Chose 1 layer(s) using sparse tactics: a",
    "Engine generation completed in 8.5 seconds.",
)
B = tuple(
    m.replace("sm90.so.10.16.2", "sm89.so.10.14.1").replace(": a", ": x").replace(", b", ", y")
    for m in A
)
TAGS: dict[str, tuple[str, str]] = {
    "torchrun": ("[rank0]: ", "[rank1]: "),
    "MPI": ("[1,0]<stdout>:", "[1,1]<stdout>:"),
    "compose": ("trt-a-1  | ", "trt-b-1  | "),
    "srun": ("0: ", "1: "),
    "a worker": ("[Worker 0]: ", "[Worker 1]: "),
}
DATED: Callable[[str], str] = lambda m: f"[07/07/2026-10:00:00] [TRT] [V] {m}"  # noqa: E731  # one-liner


def mixed(path: Path, first: str, second: str) -> Path:
    pairs = zip_longest((first + DATED(m) for m in A), (second + DATED(m) for m in ("", *B)))
    path.write_text("\n".join(line for line in chain.from_iterable(pairs) if line))
    return path


@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
def test_processes_with_tags_are_read_apart(tmp_path: Path, tags: tuple[str, str]) -> None:
    log = read_build_log(mixed(tmp_path / "log.txt", *tags))
    first, second = log.builds
    assert (first.eligible, first.chosen, first.tensorrt_version) == (("a", "b"), ("a",), "10.16.2")
    assert (second.eligible, second.chosen) == (("x", "y"), ("x",))
    assert (second.tensorrt_version, second.build_s) == ("10.14.1", 8.5)
    assert [layer.name for layer in second.layers] == ["x"]
    assert (first.contradictions, second.contradictions) == ((), ())
    (note,) = log.files[0].notes
    assert note.startswith("lines of 2 processes, read apart by their tags: ")


def test_mixed_lines_without_tags_are_noted(tmp_path: Path) -> None:
    build, *_ = read_build_log(mixed(tmp_path / "log.txt", "", "")).builds
    assert "lines of two builds may be mixed" in build.contradictions[-1].message


@pytest.mark.parametrize("tag", ["[rank0]: ", "trt-a-1  | ", "0: "])
def test_one_process_with_a_tag_is_one_build(tmp_path: Path, tag: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text("\n".join(tag + DATED(m) for m in A))
    log = read_build_log(path)
    (build,) = log.builds
    assert (build.eligible, build.chosen) == (("a", "b"), ("a",))
    assert log.files[0].notes == ()


def test_one_build_after_the_other_is_no_mixture(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("\n".join(DATED(m) for m in (*A, *B)))
    first, second = read_build_log(path).builds
    assert (first.eligible, second.eligible) == (("a", "b"), ("x", "y"))
    assert (first.contradictions, second.contradictions) == ((), ())


def test_the_numbers_of_lines_are_no_processes(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    lines = (*A, *B, *A, *B)
    path.write_text("\n".join(f"{n}: {DATED(m)}" for n, m in enumerate(lines, 1)))
    log = read_build_log(path)
    assert [build.eligible for build in log.builds] == [("a", "b"), ("x", "y")] * 2
    assert log.files[0].notes == ()

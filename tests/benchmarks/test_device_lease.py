"""The scripts of benchmarks/device, each run against stand-ins: the pack is a shell script.

What they do on a GPU machine is in benchmarks/device/README.md.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from device import skeleton
from engine_matrix.sweep import Chain, write_sweep
from onnx import numpy_helper

ROOT = Path(__file__).parents[2]
# stands for the pack's Python: "cache" and "chains" fail, the tests take too long, all else is well
STAND_IN = """#!/usr/bin/env bash
echo "ran $*"
case "$*" in
    *tests/gpu*) sleep 60 ;;
    *device.cache*) echo "no cache here" >&2; exit 1 ;;
    *device.chains*) kill -SEGV $$ ;;
esac
"""
TEST_LIMIT_S = 2


def stand_in_pack(folder: Path) -> Path:
    """Two parts, as pack.sh makes them."""
    run = folder / "trt86" / "run"
    run.parent.mkdir(parents=True)
    run.write_text(STAND_IN)
    run.chmod(0o755)
    archive = folder / "pack.tar"
    subprocess.run(["tar", "-C", folder, "-cf", archive, "trt86"], check=True)
    packed = subprocess.run(["zstd", "-qc", "--long=27", archive], capture_output=True, check=True)
    parts = folder / "parts"
    parts.mkdir()
    half = len(packed.stdout) // 2
    (parts / "part-00").write_bytes(packed.stdout[:half])
    (parts / "part-01").write_bytes(packed.stdout[half:])
    return parts


def test_a_network_travels_without_its_large_weights_and_gets_others_of_the_same_spread(
    tmp_path: Path,
) -> None:
    source = tmp_path / "nets" / "small-float16" / "dense.onnx"
    source.parent.mkdir(parents=True)
    write_sweep(Chain(op="Gemm", channels=(16, 128)), source)
    skeleton.strip(tmp_path / "nets", tmp_path / "nets.tar.xz")
    assert (tmp_path / "nets.tar.xz").stat().st_size < source.stat().st_size / 4
    skeleton.fill(tmp_path / "nets.tar.xz", tmp_path / "there")
    target = tmp_path / "there" / "small-float16" / "dense.onnx"
    before, after = (onnx.load(path).graph for path in (source, target))
    assert before.node == after.node
    pairs = list(zip(before.initializer, after.initializer, strict=True))
    for old, new in pairs:
        a, b = numpy_helper.to_array(old), numpy_helper.to_array(new)
        assert (old.name, a.shape, a.dtype) == (new.name, b.shape, b.dtype)
        if a.size < skeleton.LEAST_VALUES:
            np.testing.assert_array_equal(a, b)
        else:
            assert b.std() == pytest.approx(a.std(), rel=0.05)
            assert not np.array_equal(a, b)
    made = target.stat().st_mtime_ns
    skeleton.fill(tmp_path / "nets.tar.xz", tmp_path / "there")
    assert target.stat().st_mtime_ns == made


class Machine:
    """A GPU machine that is this one, with stand-ins for programs and the pack."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "lease"
        self.out = folder / "out"
        self.carried = folder / "carried"
        self.out.mkdir()
        self.carried.mkdir()
        programs = folder / "programs"
        programs.mkdir()
        for name in ("nvidia-smi", "python3"):
            (programs / name).write_text(f"#!/bin/sh\necho {name} of the test\n")
            (programs / name).chmod(0o755)
        path = os.pathsep.join((str(programs), os.environ["PATH"]))
        own = {"PYTHONPATH": str(ROOT / "benchmarks"), "OUT": str(self.out), "PATH": path}
        self.environment = os.environ | own

    def call(self, name: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "device.lease", name, *options]
        command += ["--home", str(self.home), "--carried", str(self.carried)]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=120
        )

    def steps(self) -> dict[str, int | None]:
        """The last exit code of each step."""
        lines = (self.home / "steps.jsonl").read_text().splitlines()
        return {row["step"]: row["exit_code"] for row in map(json.loads, lines)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.skipif(shutil.which("zstd") is None, reason="packs are made with zstd")
def test_the_calls_keep_what_steps_say_and_pass_over_those_that_fail(
    machine: Machine, tmp_path: Path
) -> None:
    parts = stand_in_pack(tmp_path)
    skeleton.strip(tmp_path / "no nets", machine.carried / "nets.tar.xz")
    shutil.move(parts / "part-01", machine.carried)
    assert machine.call("start", "--kernels", "1").returncode == 0
    assert "nvidia-smi of the test" in (machine.home / "said" / "machine.txt").read_text()
    shutil.move(parts / "part-00", machine.carried)
    assert machine.call("part").returncode == 0
    kept = sorted(path.name for path in (machine.home / "parts").iterdir())
    assert (kept, list(machine.carried.iterdir())) == (["nets.tar.xz", "part-00", "part-01"], [])

    assert machine.call("first", "--seconds", "300", "--limit", str(TEST_LIMIT_S)).returncode == 0
    probe = "enqueue-sweep_small_conv1x1-float16-b64"
    ended_well = dict.fromkeys(("machine", "unpack", "doctor", probe), 0)
    assert machine.steps() == ended_well | {"tests-float16": None, "chains": -11, "cache": 1}
    assert "no cache here" in kept_texts(machine)["said/cache.txt"]

    assert machine.call("engines", "--seconds", "300", "--limit", str(TEST_LIMIT_S)).returncode == 0
    steps = machine.steps()
    assert [name for name in steps if name.startswith("build-")] == [
        *("build-resnet50-float16", "build-resnet50-int8", "build-bert_base-float16"),
        *("build-bert_base-int8", "build-sweep_conv1x1-float16", "build-everything"),
    ]
    assert steps["tests-int8"] is None
    command = kept_texts(machine)["said/build-resnet50-float16.txt"].split()
    assert command[command.index("--budget") + 1] == str(TEST_LIMIT_S)
    assert machine.call("engines", "--seconds", "300", "--limit", "1").returncode == 0
    texts = kept_texts(machine)
    assert texts["said/build-resnet50-float16.txt"].count("ran ") == 2
    assert texts["said/enqueue-resnet50-float16-b8.txt"].count("ran ") == 1


def kept_texts(machine: Machine) -> dict[str, str]:
    """What came home, and nothing else did."""
    assert [path.name for path in machine.out.iterdir()] == ["kept-0.tar"]
    with tarfile.open(machine.out / "kept-0.tar") as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        contents = {name: file.read() for name, file in files.items() if file is not None}
    return {
        name.removesuffix(".gz"): gzip.decompress(content).decode()
        for name, content in contents.items()
    }

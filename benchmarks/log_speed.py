"""Speed and memory of the build-log parser on a generated log.

    python benchmarks/log_speed.py [--megabytes 200]

The log has the lines of TensorRT 8.2 (two lines a tactic, decimal numbers) and 10.16 (one line a
tactic) with their surroundings, in builds of 400 layers each. The parser runs in a process of its
own, so that its peak memory is its own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LAYERS = 400
TACTICS = 90
MEGABYTE = 1_000_000
KERNEL = "sm80_xmma_fprop_implicit_gemm_indexed_f16f16_f16f16_f16_nhwckcrs_nhwc_tilesize"


def build_lines(rng: random.Random, build: int) -> Iterator[str]:
    """One build, in the older or the newer form of lines."""
    old = build % 2 == 0
    prefix = "[03/24/2026-12:56:29] [V] [TRT] " if old else "[03/24/2026-12:56:29] [TRT] [V] "
    yield f"{prefix}Applying generic optimizations to the graph for inference."
    names = [f"/model.{i}/cv{i % 3}/conv/Conv + /model.{i}/act/Relu" for i in range(LAYERS)]
    for name in names:
        yield f"{prefix}=============== Computing costs for {name}"
        yield f"{prefix}*************** Autotuning format combination: Half(1,2) -> Half(1,2) *****"
        runner = "CaskConvolution" if old else "CaskConvolution[0x80000009]"
        yield f"{prefix}--------------- Timing Runner: {name} ({runner})"
        for tactic in range(TACTICS):
            yield from tactic_lines(rng, prefix, name, tactic, old=old)
        yield f"{prefix}>>>>>>>>>>>>>>> Chose Runner Type: Cask Tactic: 0x00000000000000ff"
    eligible = ", ".join(names[:100])
    yield f"{prefix}(Sparsity) Found 100 layer(s) eligible to use sparse tactics: {eligible}"
    yield f"{prefix}(Sparsity) Chose 2 layer(s) using sparse tactics: {names[0]}, {names[1]}"
    yield f"{prefix}Engine generation completed in 82.8537 seconds."


def tactic_lines(
    rng: random.Random, prefix: str, layer: str, tactic: int, *, old: bool
) -> Iterator[str]:
    kind = "sparse_conv_sptensor16x8x32_" if tactic % 10 == 0 else ""
    kernel = f"{KERNEL}{tactic}x64x8_{kind}stage3_warpsize1x2x1_g1_tensor16x8x16_t1r3s3"
    ms = rng.uniform(0.01, 2.0)
    if old:
        number = rng.getrandbits(63)
        yield f"{prefix}{layer} Set Tactic Name: {kernel} Tactic: {number}"
        yield f"{prefix}Tactic: {number} Time: {ms:.6g}"
    else:
        yield f"{prefix}Tactic Name: {kernel} Tactic: 0x{rng.getrandbits(64):016x} Time: {ms:.6g}"


def write_log(path: Path, size_bytes: int) -> None:
    rng = random.Random(0)
    build = 0
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size_bytes:
            file.writelines(f"{line}\n" for line in build_lines(rng, build))
            build += 1


def measure(path: Path) -> dict[str, object]:
    from twofour.logs.read import read_build_log

    start, start_cpu = time.perf_counter(), time.process_time()
    log = read_build_log(path)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = log.files[0].size_bytes
    layers = [layer for build in log.builds for layer in build.layers]
    return {
        "megabytes": round(size / MEGABYTE, 1),
        "mb_per_s": round(size / MEGABYTE / wall_s, 1),
        "mb_per_cpu_s": round(size / MEGABYTE / cpu_s, 1),
        "peak_rss_mb": round(peak_kb / 1024, 1),
        "builds": len(log.builds),
        "layers": len(layers),
        "tactics_kept": sum(len(layer.tactics) for layer in layers),
        "tactics_dropped": sum(layer.dropped_tactics for layer in layers),
        "facts_dropped": sum(build.dropped for build in log.builds),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "generated.log"
        write_log(path, options.megabytes * MEGABYTE)
        command = [sys.executable, __file__, "--measure", str(path)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


if __name__ == "__main__":
    main()

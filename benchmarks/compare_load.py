"""How often `compare` calls equal models different while other processes keep the machine busy.

    python benchmarks/compare_load.py [--repeats 20] [--rounds 20]

One small CNN under two names, in ONNX Runtime and torch eager, so that every "faster" or "slower"
within an engine is false. The load: processes that spin all the time, or in bursts of half a
second; up to one for each core. A row for each load: ratios within an engine, those called
different, undecided ones, and what they would have been by interval and noise alone. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from twofour.comparing.comparison import compare
from twofour.jobs import run_all
from twofour.latency.noise import floor_at, own_floor
from twofour.latency.ratios import verdict_of
from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.records.options import CompareOptions, RunOptions, Trust

MODEL = """
import torch

def make():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.ReLU()]
    for _ in range(3):
        layers += [torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers).eval(), (torch.randn(1, 3, 32, 32),)
"""
STEADY = "while True: pass"
BURSTS = """
import random, time
while True:
    end = time.monotonic() + 0.5
    while time.monotonic() < end: pass
    time.sleep(random.random())
"""
DIFFERENT = {LatencyVerdict.FASTER, LatencyVerdict.SLOWER}


@contextlib.contextmanager
def load(code: str, processes: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def counted(found: LatencyComparison) -> Counter[str]:
    """Ratios of the two weights within one engine: zeros cost these engines what others do."""
    counts: Counter[str] = Counter()
    for ratio in found.ratios:
        if not ratio.only_sparsity:
            continue
        own = own_floor(found.noise, ratio.variant, ratio.baseline, ratio.batch)
        floor = own if own is not None else floor_at(found.noise, found.baseline, ratio.batch)
        alone = verdict_of(ratio.low, ratio.high, floor or 0.0)
        counts["ratios"] += 1
        counts["false"] += ratio.verdict in DIFFERENT
        counts["undecided"] += ratio.verdict is LatencyVerdict.UNDECIDED
        counts["false by interval and noise alone"] += alone in DIFFERENT
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    loads = {
        "none": (STEADY, 0),
        "one process": (STEADY, 1),
        "one a core": (STEADY, cores),
        "one in bursts": (BURSTS, 1),
    }
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model.py")
        model.write_text(MODEL, encoding="utf-8")
        out = Path(folder, "run")
        run_all(f"{model}:make", out, RunOptions())
        for name, (code, processes) in loads.items():
            counts: Counter[str] = Counter()
            others = []
            for seed in range(arguments.repeats):
                options = CompareOptions(
                    engines=("onnxruntime:cpu", "torch:eager"),
                    rounds=arguments.rounds,
                    seed=seed,
                    trust=Trust(everything=True),
                )
                with load(code, processes):
                    _, found = compare([out], None, options)
                counts += counted(found)
                others += [each.other_cores for each in found.loads]
            result[name] = {**counts, "other cores": round(sum(others) / len(others), 2)}
            print(f"{name}: {result[name]}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

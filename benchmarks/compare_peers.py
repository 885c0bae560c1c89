"""Medians of `twofour compare` against Polygraphy's runner and a bare ONNX Runtime loop.

    python benchmarks/compare_peers.py MODEL.onnx [MODEL.onnx ...] [--repeats 3] [--runs 50]

For each model and repeat, in turn and in fresh processes: `twofour compare` (onnxruntime:cpu),
Polygraphy's OnnxrtRunner (what `polygraphy run --onnxrt` times: `last_inference_time`, on its own
session), and a loop over `session.run` with the defaults, as ONNX Runtime's perf test has it
(sequential, warm-up first). The wheels of ONNX Runtime carry no onnxruntime_perf_test; where
`--perf-test PROGRAM` names one, it is run too. Same inputs and threads for all. Ends in JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARMUP = 10
COMPARE = (
    "import json, sys, twofour\n"
    "from pathlib import Path\n"
    "from twofour.records.options import CompareOptions\n"
    "model, runs, threads, out = sys.argv[1:]\n"
    "options = CompareOptions(engines=('onnxruntime:cpu',), rounds=int(runs), warmup=10,\n"
    "    threads=int(threads), time_limit_s=300)\n"
    "found = twofour.compare(model, out=out, options=options)\n"
    "print(json.dumps([list(v.samples_ms) for v in found.variants]))\n"
)
SESSION = (
    "import json, sys, time, onnxruntime as ort\n"
    "from pathlib import Path\n"
    "from twofour.graph.opened import open_onnx\n"
    "from twofour.inputs.examples import random_inputs\n"
    "model, runs, threads, _ = sys.argv[1:]\n"
    "inputs = random_inputs(open_onnx(Path(model)).inputs, 0)\n"
    "options = ort.SessionOptions(); options.intra_op_num_threads = int(threads)\n"
)
LOOP = SESSION + (
    "session = ort.InferenceSession(model, options, providers=['CPUExecutionProvider'])\n"
    "def run():\n"
    "    started = time.perf_counter(); session.run(None, inputs)\n"
    "    return (time.perf_counter() - started) * 1e3\n"
    "[run() for _ in range(10)]\n"
    "print(json.dumps([[run() for _ in range(int(runs))]]))\n"
)
POLYGRAPHY = SESSION + (
    "from polygraphy.backend.onnxrt import OnnxrtRunner\n"
    "session = ort.InferenceSession(model, options, providers=['CPUExecutionProvider'])\n"
    "with OnnxrtRunner(lambda: session) as runner:\n"
    "    def run():\n"
    "        runner.infer(inputs); return runner.last_inference_time() * 1e3\n"
    "    [run() for _ in range(10)]\n"
    "    print(json.dumps([[run() for _ in range(int(runs))]]))\n"
)
SIDES = {"twofour compare": COMPARE, "polygraphy": POLYGRAPHY, "session.run loop": LOOP}


def samples(code: str, model: Path, runs: int, threads: int) -> list[list[float]]:
    """What one fresh process measured: a list of milliseconds for each session it had."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", code, str(model), str(runs), str(threads), out]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def perf_test(program: Path, model: Path, runs: int, threads: int) -> list[list[float]]:
    """ONNX Runtime's own program; it prints an average only, which stands for all its runs."""
    command = [str(program), "-e", "cpu", "-I", "-r", str(runs), "-x", str(threads), str(model)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"Average inference time cost[^:]*: *([\d.]+) ms", done.stdout)
    assert found is not None, done.stdout
    return [[float(found[1])]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--perf-test", type=Path, help="onnxruntime_perf_test, where there is one.")
    options = parser.parse_args()
    report: dict[str, dict[str, dict[str, list[float]]]] = {}
    for model in options.models:
        medians: dict[str, list[float]] = {side: [] for side in SIDES}
        fastest: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(options.repeats):
            for side, code in SIDES.items():
                for found in samples(code, model, options.runs, options.threads):
                    medians[side].append(round(statistics.median(found), 4))
                    fastest[side].append(round(statistics.quantiles(found, n=10)[0], 4))
            if options.perf_test is not None:
                found = perf_test(options.perf_test, model, options.runs, options.threads)[0]
                medians.setdefault("perf test (mean)", []).append(found[0])
        report[str(model)] = {"median_ms": medians, "p10_ms": fastest}
        for side, values in medians.items():
            print(f"{model.name}: {side}: medians {values} p10 {fastest.get(side)}", flush=True)
    print(json.dumps({"benchmark": "compare_peers", "models": report}))


if __name__ == "__main__":
    main()

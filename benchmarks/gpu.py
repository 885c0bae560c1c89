"""Dense against 2:4 semi-structured kernels of torch on an NVIDIA GPU, and three models end to end.

    python3 benchmarks/gpu.py --out gpu.json > line.json  # under 8 minutes on one H200
    python3 benchmarks/gpu.py --smoke                     # the same path on a CPU, tiny, dense only

Runs from any folder and needs torch and numpy alone: to another machine, copy this file and the
folder `gpu_matrix` beside it. All talk goes to stderr; stdout gets one JSON line, also when the run
is interrupted. The file of `--out` has the same JSON and in it, for each variant and clock, what
the line leaves out: the raw samples (`samples_ms`, milliseconds by round, rounded to 1e-6). The
GPU's settings are read and never changed.

How a number comes about. In each round every variant runs once, in random order; the dense product
runs twice, so that its ratio to itself is the noise. Before each sample a buffer of twice the L2
cache is written, as in a network whose weights do not fit the cache. Two clocks, both CUDA events:

  launch   the GPU is idle when the call starts: includes what the CPU needs to launch it
  device   the GPU spins until the whole call is queued: the GPU's time alone. Replays of a CUDA
           graph where every variant could be captured, else the calls themselves (`device_calls`)

A ratio is time over dense time within a round: median over the rounds, 95 % bootstrap interval
over rounds. `floor` is how far the interval of dense against dense reaches from 1, plus one tick of
the clock; an interval that reaches into it is "no difference". An output is compared with the
float32 product of the same 2:4 weight: a variant further off than five times the dense one, and
than TOLERANCES of its type, is "wrong" and not timed.

A child process measures; the parent keeps the budget, restarts the child where a CUDA error or a
hang took it, and writes the JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from gpu_matrix.child import work
from gpu_matrix.models import make_model, parameters
from gpu_matrix.plan import SHAPES, Order, full_plan, smoke_plan
from gpu_matrix.report import Report
from gpu_matrix.rows import Row, attempt, first_line
from gpu_matrix.supervising import Interrupted, signals_end_it, skip_rest, supervise


def new_report(arguments: argparse.Namespace) -> Report:
    """An empty report with the plan behind it."""
    plan = smoke_plan() if arguments.smoke else full_plan()
    order = Order(plan, arguments.budget, time.monotonic(), arguments.seed, arguments.smoke)
    with torch.device("meta"):
        sizes = {name: parameters(make_model(name, smoke=False)) for name, _ in SHAPES}
    data: Row = {
        "benchmark": "gpu",
        "smoke": arguments.smoke,
        "seed": arguments.seed,
        "budget_s": arguments.budget,
        "planned": len(plan),
        "ended": "running",
        "parameters": sizes,
        "environment": None,
        "clocks": [],
    }
    empty: Iterable[str] = ("kernels", "models", "skipped", "restarts")
    return Report(data | {name: [] for name in empty}, arguments.out, order)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for all of it")
    parser.add_argument(
        "--out", type=Path, help="write the JSON with raw samples here, every ten seconds"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    report = new_report(parser.parse_args(argv))
    try:
        with signals_end_it():
            supervise(report, work)
            report.data["ended"] = "complete"
    except Interrupted as reason:
        report.data["ended"] = str(reason)
        skip_rest(report, str(reason))
    except Exception as error:  # noqa: BLE001  what was measured must get out
        report.data["ended"] = first_line(error)
    finally:
        attempt(report.save)
        print(report.line(samples=False), flush=True)
    measured = report.data["kernels"] or report.data["models"]
    return 0 if measured and report.data["ended"] == "complete" else 1


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # a child that cannot be killed would hold the exit up
    os._exit(code)

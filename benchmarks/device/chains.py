"""Four chains of four layers each through the main job: the first real engines, in a minute or two.

    trt86/run -m device.chains NETS ENGINES [--channels 256 1024] [--engine tensorrt]

1x1 and 3x3 convolutions, Gemm and MatMul, in float16, with every pair of the channel counts, wide
enough that sparse kernels could win. Writes NETS/<name>-float16/dense.onnx and the run folders
ENGINES/<name>-float16-b64, as benchmarks/engines.py does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine_matrix.making import DENSE
from engine_matrix.plan import FLOAT16, MODES, Case
from engine_matrix.running import Folders, build_command, run_all
from engine_matrix.sweep import CHAINS, write_sweep

KINDS = ("conv1x1", "conv3x3", "gemm", "matmul")
BATCH = 64


def cases() -> list[Case]:
    """One for each kind; the names begin as those of the sweeps, which prune every layer."""
    return [Case(net=f"sweep_small_{kind}", precision=FLOAT16, batch=BATCH) for kind in KINDS]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a chain was not built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("nets", type=Path)
    parser.add_argument("engines", type=Path)
    parser.add_argument("--channels", type=int, nargs="+", default=(256, 1024))
    parser.add_argument("--engine", default="tensorrt", choices=MODES)
    parser.add_argument("--budget", type=float, default=120, help="seconds")
    arguments = parser.parse_args(argv)
    for case, kind in zip(cases(), KINDS, strict=True):
        target = arguments.nets / case.folder / DENSE
        target.parent.mkdir(parents=True, exist_ok=True)
        write_sweep(replace(CHAINS[kind], channels=tuple(arguments.channels)), target)
    folders = Folders(nets=arguments.nets, engines=arguments.engines, engine=arguments.engine)
    outcomes = run_all(cases(), build_command, folders, arguments.budget)
    return int(len(outcomes) < len(KINDS) or any(o.exit_code != 0 for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())

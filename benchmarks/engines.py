"""Sparse and dense TensorRT engines of many networks on one GPU, and what comes of each layer.

    python3 benchmarks/engines.py make --out nets                    # needs torch, transformers
    python3 benchmarks/engines.py build nets --out engines --budget 480
    python3 benchmarks/engines.py compare nets --out engines --budget 300
    python3 benchmarks/engines.py pack engines --to results          # results-0.tar, ...
    python3 benchmarks/engine_evidence.py engines                    # the rules against all that

`make` writes dense ONNX files: chains of convolutions and products over every pair of channel
counts from 16 to 2048, ResNet-50, ResNeXt-50, MobileNetV2, a U-Net, BERT-base and ViT-base, with
random weights, float16 and INT8. `build` runs twofour's main job on each (prune, validate, two
engines, report) and `compare` its comparison, in the order of engine_matrix/plan.py; both go on
where they were stopped and end with their budget of seconds. `build`, `compare` and `pack` need
neither torch nor ONNX Runtime, `pack` no package at all. `--engine onnxruntime` runs all of it
without a GPU, to try it. On a machine without network: benchmarks/device/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from device.archives import archive, kept
from engine_matrix.needs import missing_words
from engine_matrix.plan import BATCHES, FLOAT16, INT8, MODES, NETS, Case, cases

MISSING_TOOL = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a network could not be made or a command failed, 2 for nothing to do.

    3: this Python lacks a package.
    """
    arguments = _parser().parse_args(argv)
    if arguments.command == "pack":
        archives = archive(kept(arguments.engines), arguments.to, arguments.limit << 20)
        print(*archives, sep="\n")
        return 0 if archives else _nothing(f"no run folder in {arguments.engines}")
    missing = missing_words()
    if missing is not None:
        print(f"error: {missing}", file=sys.stderr)
        return MISSING_TOOL
    if arguments.command == "make":
        from engine_matrix.making import make

        failures = make(arguments.only or NETS, arguments.out, arguments.precision)
        print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
        return int(bool(failures))
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from engine_matrix import running

    building = arguments.command == "build"
    folders = running.Folders(nets=arguments.nets, engines=arguments.out, engine=arguments.engine)
    chosen = _chosen(arguments)
    result = running.REPORT if building else running.LATENCY
    left = running.waiting(chosen, folders, result)
    done = [case for case in chosen if (folders.engines / case.name / result).is_file()]
    if not left and not done:
        missing = f"{folders.nets} has none of these networks" if building else "nothing is built"
        return _nothing(f"{missing}: {', '.join(case.name for case in chosen[:3])}, ...")
    command = running.build_command if building else running.compare_command
    outcomes = running.run_all(left, command, folders, arguments.budget)
    return int(any(outcome.exit_code for outcome in outcomes))


def _nothing(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 2


def _chosen(arguments: argparse.Namespace) -> list[Case]:
    return [
        case
        for case in cases()
        if case.net in (arguments.only or NETS)
        and case.precision in arguments.precision
        and case.batch in arguments.batch
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("make", "build", "compare"):
        command = commands.add_parser(name)
        if name != "make":
            command.add_argument("nets", type=Path)
            command.add_argument("--budget", type=float, default=480, help="seconds")
            command.add_argument("--engine", default="tensorrt", choices=MODES)
            command.add_argument("--batch", type=int, nargs="+", choices=BATCHES, default=BATCHES)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--only", nargs="+", choices=NETS)
        kinds = (FLOAT16, INT8)
        command.add_argument("--precision", nargs="+", choices=kinds, default=kinds)
    packer = commands.add_parser("pack")
    packer.add_argument("engines", type=Path)
    packer.add_argument("--to", type=Path, required=True)
    packer.add_argument("--limit", type=int, default=15, metavar="MIB", help="no archive is larger")
    return parser


if __name__ == "__main__":
    sys.exit(main())

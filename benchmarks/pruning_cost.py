"""What pruning a whole transformer costs: time and peak memory of `twofour.prune` per method.

    python benchmarks/pruning_cost.py [--models vit-base,bert-base] [--methods magnitude,wanda]
        [--samples 16] [--layers 12] [--threads 1]

The shapes of ViT-base (12 layers of 768, 197 positions) and BERT-base (the same, 64 tokens) with
random weights; every pruned Linear goes to 2:4, with repair, bias correction and the refit that the
method takes by itself. A fresh process for each row. Processor time is that of all threads; the
peak is of the whole process, beside what it was with the model and the data in memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

import twofour

MIB = 1 << 20
SEQUENCE = 64
BATCH = 4
METHODS = ("magnitude without data", "magnitude", "wanda", "sparsegpt", "admm")


@dataclass(frozen=True)
class Row:
    """One model, one method."""

    model: str
    method: str
    layers: int
    weights: int
    wall_s: float
    cpu_s: float
    before_mib: float
    peak_mib: float
    held_out: float | None
    """Median over the layers of the output error on held-out inputs."""


def vit_base(layers: int) -> tuple[nn.Module, Callable[[int], Any]]:
    """Images 224x224."""
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(num_hidden_layers=layers), add_pooling_layer=False)
    return model, lambda count: torch.randn(count, 3, 224, 224)


def bert_base(layers: int) -> tuple[nn.Module, Callable[[int], Any]]:
    """Random tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=layers, attn_implementation="eager")
    model = BertModel(config, add_pooling_layer=False)

    def batch(count: int) -> dict[str, Tensor]:
        shape = (count, SEQUENCE)
        mask = torch.ones(shape, dtype=torch.int64)
        return {"input_ids": torch.randint(1000, 30000, shape), "attention_mask": mask}

    return model, batch


MODELS = {"vit-base": vit_base, "bert-base": bert_base}


def one(model_name: str, method: str, layers: int, samples: int, threads: int) -> Row:
    """In a process of its own."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, batch = MODELS[model_name](layers)
    model.eval()
    data = [batch(BATCH) for _ in range(-(-samples // BATCH))]
    before = _peak_mib()
    wall, busy = time.perf_counter(), time.process_time()
    if method == METHODS[0]:
        result = twofour.prune(model, "2:4", method="magnitude")
    else:
        result = twofour.prune(model, "2:4", method=method, calibrate=data)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    rows = [row for row in result.weights if row.pruned]
    held_out = sorted(
        row.output_error.held_out
        for row in rows
        if row.output_error is not None and row.output_error.held_out is not None
    )
    return Row(
        model=model_name,
        method=method,
        layers=len(rows),
        weights=sum(row.zeros for row in rows) * 2,
        wall_s=wall,
        cpu_s=busy,
        before_mib=before,
        peak_mib=_peak_mib(),
        held_out=held_out[len(held_out) // 2] if held_out else None,
    )


def _peak_mib() -> float:
    """Highest resident memory of this process until now (Linux: ru_maxrss is in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def main() -> None:
    """Print a table, then the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    where = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "transformers"))
    print(f"{where}; Python {platform.python_version()}, {packages}; {args}", file=sys.stderr)
    print("| model | method | wall s | CPU s | MiB before | peak | held-out error |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    processes = multiprocessing.get_context("spawn")
    for model in args.models.split(","):
        for method in args.methods.split(","):
            given = (model, method, args.layers, args.samples, args.threads)
            with processes.Pool(1) as pool:
                row = pool.apply(one, given)
            rows.append(row)
            error = "-" if row.held_out is None else f"{row.held_out:.4f}"
            print(
                f"| {model} | {method} | {row.wall_s:.1f} | {row.cpu_s:.1f} | "
                f"{row.before_mib:.0f} | {row.peak_mib:.0f} | {error} |",
                flush=True,
            )
    print(json.dumps([asdict(row) for row in rows]), flush=True)


if __name__ == "__main__":
    main()

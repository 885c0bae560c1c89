"""CPU seconds of a training step of BERT-base with its masks held and without, on one core.

    python benchmarks/mask_cost.py [--steps 5] [--batch 16] [--no-fused]

Random weights in the shape of BERT-base, float32, 128 tokens a text, AdamW. Steps with and without
masks run in turn, so that a busy machine hits both alike. A step with masks writes zeros twice:
into gradients and into weights. `masks alone` are two calls of `apply`, which does so once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import BertConfig, BertForMaskedLM

import twofour


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=given.fused)
    tokens = torch.randint(0, 30000, (given.batch, 128))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    step()
    dense, held, alone = [], [], []
    for _ in range(given.steps):
        dense.append(_cpu_seconds(step))
        twofour.prune(model)
        holder = twofour.hold_masks(model, optimizer)
        held.append(_cpu_seconds(step))
        alone.append(_cpu_seconds(holder.apply) + _cpu_seconds(holder.apply))
        holder.remove()
    for name, seconds in {"without": dense, "with masks": held, "masks alone": alone}.items():
        middle = statistics.median(seconds)
        print(f"{name:12} {middle:.3f} s [{min(seconds):.3f} to {max(seconds):.3f}]")
    ratio = statistics.median(b / a for a, b in zip(dense, held, strict=True))
    share = statistics.median(alone) / statistics.median(dense)
    print(
        f"weights {len(holder.weights)}; pairs {ratio - 1:+.2%}; masks alone {share:.2%} of a step"
    )


def _cpu_seconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()

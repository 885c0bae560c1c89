"""COO and CSR of weights, by twofour and by torch in turns: time and the curve of memory.

    python benchmarks/sizes.py [--side 4096] [--masks]

Weights of several sizes and types, half of the values or none zero, and a line for each way:
median [min to max] in ms, processor time in ms, bytes held beside the weight in order as multiples
of the weight. `--masks` times the forward and backward pass of `masked_mean` beside boolean
indexing and `torch.masked.mean`.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import accumulate, groupby, product

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from twofour import masked_mean
from twofour.inputs.fits import array_from_tensor
from twofour.pipeline.weight_sizes import to_sparse


def weights(shape: tuple[int, int], zeros: float) -> Tensor:
    made = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=made).mul(torch.rand(shape, generator=made) >= zeros)


def bytes_held(convert: Callable[[], object]) -> list[int]:
    """What is held after each step of torch's allocator, on top of the peak of Python and numpy."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        tracemalloc.start()
        _result = convert()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    events = found.profiler.kineto_results.events()
    steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return [*accumulate((size for _, size in steps), initial=peak)]


def conversions(side: int) -> None:
    shapes = [(side, side), (4 * side, side), (1536, 384), (384, 384), (64, 576), (64, 27)]
    for shape, zeros, dtype in product(shapes, (0.5, 0.0), (torch.float32, torch.float16)):
        tensor = weights(shape, zeros).to(dtype)
        array, samples = array_from_tensor(tensor), defaultdict[str, list[float]](list)
        print(f"{shape} {dtype} {array.nbytes / 2**20:.2f} MiB, {zeros:.0%} zero")
        ways: dict[str, Callable[[], object]] = {
            "twofour COO": partial(to_sparse, array, coo=True),
            "torch COO": tensor.to_sparse,
            "twofour CSR": partial(to_sparse, array, coo=False),
            "torch CSR": tensor.to_sparse_csr,
        }
        for name, way in [*ways.items()] * 5:
            begin, cpu = time.perf_counter(), time.process_time()
            way()
            samples[name].append((time.perf_counter() - begin) * 1e3)
            samples[f"{name} cpu"].append((time.process_time() - cpu) * 1e3)
        for name, way in ways.items():
            low, high = min(samples[name]), max(samples[name])
            curve = [f"{held / array.nbytes:.2f}" for held in bytes_held(way)]
            print(
                f"  {name:12} {statistics.median(samples[name]):9.2f} ms [{low:.2f} to {high:.2f}]"
                f" cpu {statistics.median(samples[f'{name} cpu']):8.2f} ms"
                f"  held {' -> '.join(text for text, _ in groupby(curve))}"
            )


def masks() -> None:
    values = torch.randn(64, 128, 384, requires_grad=True)
    mask = torch.rand(64, 128) < 0.5
    compiled = torch.compile(lambda x, m: masked_mean(x, m, 1), fullgraph=True, dynamic=False)
    ways: dict[str, Callable[[], Tensor]] = {
        "masked_mean": lambda: masked_mean(values, mask, 1),
        "masked_mean, compiled": lambda: compiled(values, mask),
        "boolean indexing": lambda: torch.stack(
            [v[m].mean(0) for v, m in zip(values, mask, strict=True)]
        ),
        "torch.masked.mean": lambda: torch.masked.mean(values, 1, mask=mask[..., None]),
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(22):
        for name, way in ways.items():
            begin = time.process_time()
            torch.autograd.grad(way().sum(), values)
            samples[name].append((time.process_time() - begin) * 1e3)
    for name, found in samples.items():
        kept = sorted(found[2:])
        print(f"{name:22} cpu {statistics.median(kept):7.2f} ms [{kept[0]:.2f} to {kept[-1]:.2f}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--masks", action="store_true")
    arguments = parser.parse_args()
    masks() if arguments.masks else conversions(arguments.side)

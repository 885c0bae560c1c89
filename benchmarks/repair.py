"""What repair after pruning is worth: accuracy of small nets by method, and by kind of repair.

    python benchmarks/repair.py [--seeds 3] [--methods admm wanda ...] [--no-file]

Nets are trained on the spot (scikit-learn's digits, moved about and with noise; no download): six
3x3 convolutions of width 8 and of width 16, with batch norms and with these folded into the
convolutions, and examples/digits.py. They are pruned to 2:4 with 512 calibration images of the
training set and judged on digits that neither training nor calibration saw. `bare` methods go
without refit and bias correction. `chosen` is what pruning takes by itself, by the held-out tenth
of the calibration images; `file` is the same from an ONNX file alone (first seed). A row per net
and method with the mean over the seeds, then one JSON line with every figure.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import twofour
from twofour.pipeline.torch_calibrating import calls_of, data_of
from twofour.pruning.selection import choose
from twofour.pruning.torch_layers import find_weights
from twofour.pruning.torch_repair import record_dense, repair_module
from twofour.records.options import MethodOptions, Selection
from twofour.records.pruning import RepairKind
from twofour.records.weights import Pattern

SIDE, NOISE = 12, 0.3
TRAINED_ON, CALIBRATED_ON, JUDGED_ON = 4000, 512, 2000
PATTERN = Pattern(2, 4)
METHODS: dict[str, MethodOptions] = {
    "magnitude, bare": MethodOptions(name="magnitude", refit=0, bias_correction=False),
    "wanda, bare": MethodOptions(name="wanda", refit=0, bias_correction=False),
    "sparsegpt, bare": MethodOptions(name="sparsegpt", refit=0, bias_correction=False),
    "magnitude": MethodOptions(name="magnitude"),
    "wanda": MethodOptions(name="wanda"),
    "sparsegpt": MethodOptions(name="sparsegpt"),
    "admm": MethodOptions(name="admm"),
}
Labelled = tuple[torch.Tensor, torch.Tensor]


def digits(seed: int) -> tuple[Labelled, Labelled, Labelled]:
    """Images (n, 1, 12, 12) and labels: to train on, to calibrate on, to judge on."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=450, random_state=24, stratify=labels
    )
    random = np.random.default_rng(seed)

    def moved(x: NDArray[np.float32], y: NDArray[np.int64], count: int) -> Labelled:
        taken = random.integers(0, len(x), count)
        out = np.zeros((count, 1, SIDE, SIDE), np.float32)
        for at, source in enumerate(taken):
            row, column = random.integers(0, SIDE - 7, 2)
            out[at, 0, row : row + 8, column : column + 8] = x[source]
        out += random.normal(0, NOISE, out.shape).astype(np.float32)
        return torch.from_numpy(out), torch.from_numpy(y[taken])

    return (
        moved(train_x, train_y, TRAINED_ON),
        moved(train_x, train_y, CALIBRATED_ON),
        moved(test_x, test_y, JUDGED_ON),
    )


def network(width: int) -> nn.Module:
    """Six 3x3 convolutions with batch norms; the first has one input channel and stays dense."""
    sizes = [1, width, width, 2 * width, 2 * width, 4 * width, 4 * width]
    layers: list[nn.Module] = []
    for at, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        stride = 2 if at in (2, 4) else 1
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def trained(width: int, data: Labelled, seed: int, epochs: int = 8) -> nn.Module:
    """In eval mode."""
    torch.manual_seed(seed)
    model, (x, y) = network(width), data
    steps = epochs * -(-len(x) // 128)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, steps)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(x)), 128):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x[batch]), y[batch]))
            optimizer.step()
            schedule.step()
    return model.eval()


def folded(model: nn.Module) -> nn.Module:
    """The same without batch norms, as exported files have it."""
    layers = [*copy.deepcopy(model).children()]
    for at, layer in enumerate(layers):
        if isinstance(layer, nn.BatchNorm2d):
            conv = layers[at - 1]
            assert isinstance(conv, nn.Conv2d)
            layers[at - 1] = nn.utils.fusion.fuse_conv_bn_eval(conv, layer)
    return nn.Sequential(*(x for x in layers if not isinstance(x, nn.BatchNorm2d))).eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Labelled) -> float:
    """In per cent."""
    return float((model(data[0]).argmax(1) == data[1]).float().mean()) * 100


def judged(
    dense: nn.Module, images: torch.Tensor, method: MethodOptions, data: Labelled
) -> dict[str, float]:
    """One method: without repair, with each kind, and what pruning takes by itself."""
    batches = [*torch.split(images, 64)]
    alone = copy.deepcopy(dense)
    started = time.process_time()
    twofour.prune(
        alone,
        "2:4",
        calibrate=batches,
        samples=len(images),
        method=method.name,
        refit=method.refit,
        bias_correction=method.bias_correction,
        repair=False,
    )
    pruned_s = time.process_time() - started
    found = {"one-shot": accuracy(alone, data), "prune_s": pruned_s}
    calls = calls_of(dense, data_of(dense, batches, len(images))).calls
    chosen = choose(find_weights(dense), PATTERN, Selection())
    record = record_dense(dense, [weight for weight, pruned, _ in chosen if pruned], calls)
    for kind in RepairKind:
        model = copy.deepcopy(alone)
        if repair_module(model, record, calls, True, (kind,)).taken is kind:
            found[kind.value] = accuracy(model, data)
    started = time.process_time()
    record = record_dense(dense, [weight for weight, pruned, _ in chosen if pruned], calls)
    model = copy.deepcopy(alone)
    repair = repair_module(model, record, calls)
    found["repair_s"] = time.process_time() - started
    found["chosen"] = accuracy(model, data)
    found["error before"] = float("nan") if repair.error_before is None else repair.error_before
    found["error after"] = float("nan") if repair.error_after is None else repair.error_after
    return found


def from_file(
    dense: nn.Module, images: torch.Tensor, method: MethodOptions, data: Labelled
) -> dict[str, float]:
    """The same from an ONNX file alone, through ONNX Runtime."""
    import onnxruntime

    from twofour.graph.opened import open_onnx
    from twofour.pipeline.onnx_calibrating import CalibrationJob, calibrate
    from twofour.pipeline.sources.calibration.models import onnx_inputs
    from twofour.pipeline.sources.calibration.values import calibration_from_value
    from twofour.pipeline.stages import Silent
    from twofour.pruning.onnx_file import prune_onnx

    found = {}
    with tempfile.TemporaryDirectory() as name:
        path, target = Path(name, "dense.onnx"), Path(name, "sparse.onnx")
        torch.onnx.export(
            dense, (images[:2],), path, dynamic_axes={"x": {0: "batch"}}, input_names=["x"],
            dynamo=False,
        )  # fmt: skip
        for wanted, word in ((False, "one-shot"), (None, "chosen")):
            opened = open_onnx(path)
            values = [{"x": batch.numpy()} for batch in torch.split(images, 64)]
            inputs = onnx_inputs(path, opened.inputs)
            job = CalibrationJob(
                opened=opened,
                pattern=PATTERN,
                selection=Selection(),
                method=method.name or "",
                options=replace(method, repair=wanted),
                data=calibration_from_value(values, inputs, samples=len(images)),
                folder=Path(name, word),
                key=word,
            )
            calibrated = calibrate(job, Silent())
            prune_onnx(opened, target, PATTERN, method=method.name or "", calibrated=calibrated)
            session = onnxruntime.InferenceSession(str(target))
            (logits,) = session.run(None, {"x": data[0].numpy()})
            found[word] = float((logits.argmax(1) == data[1].numpy()).mean()) * 100
    return found


def example() -> tuple[nn.Module, torch.Tensor, Labelled]:
    """examples/digits.py, 512 of its training images, and its held-out ones."""
    path = Path(__file__).parents[1] / "examples" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits_example", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    train, _, test, labels = module.split()
    images = torch.from_numpy(train[:CALIBRATED_ON])
    return module.make()[0], images, (torch.from_numpy(test), torch.from_numpy(labels))


def cases(seeds: int) -> Iterator[tuple[str, nn.Module, torch.Tensor, Labelled]]:
    """Name, dense net, calibration images, and what it is judged on."""
    yield ("examples/digits.py", *example())
    for seed in range(seeds):
        train, calibration, test = digits(seed)
        for width in (8, 16):
            model = trained(width, train, seed)
            yield f"width {width}", model, calibration[0], test
            yield f"width {width}, folded", folded(model), calibration[0], test


def in_words(key: str, values: list[float]) -> str:
    """The mean, as it is read."""
    mean = statistics.fmean(values)
    return f"{key} {mean:.3g}" if "error" in key or key.endswith("_s") else f"{key} {mean:.1f}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--no-file", action="store_true", help="leave ONNX files out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, dense, images, data in cases(options.seeds):
        rows = found.setdefault(name, {})
        rows.setdefault("dense", {}).setdefault("accuracy", []).append(accuracy(dense, data))
        for method in options.methods:
            row = judged(dense, images, METHODS[method], data)
            if method not in rows and not options.no_file:
                file = from_file(dense, images, METHODS[method], data)
                row |= {f"file {key}": value for key, value in file.items()}
            for key, value in row.items():
                rows.setdefault(method, {}).setdefault(key, []).append(value)
    for name, rows in found.items():
        for method, figures in rows.items():
            print(f"{name} | {method} | " + " | ".join(in_words(*one) for one in figures.items()))
    print(json.dumps({"load": os.getloadavg()[0], "found": found}))


if __name__ == "__main__":
    main()

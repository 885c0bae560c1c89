r"""A model to try twofour on: a small CNN that reads handwritten digits, trained on the spot.

    twofour prune-export-build examples/digits.py:make --metric examples/digits.py:evaluate \
        --calibrate examples/digits.py:calibration

`make` trains the network in a few seconds on scikit-learn's bundled 8x8 digits (real scans, no
download; needs the extra `examples`) and returns it with example inputs. `evaluate` is handed the
dense and the pruned program in turn and answers with the accuracy of each on digits that the
training never saw. `calibration` gives digits of the training set, which pruning looks at. The
layers are chosen so that the report has something to explain:

    layer      C -> K, kernel           what the report should say
    stem       1 -> 64, 3x3             one input channel: nothing to prune, too small to gain
    widen      64 -> 128, 3x3           can be pruned; rather small for a sparse kernel
    grouped    128 -> 128, 3x3, 4 groups  never: TensorRT has no sparse kernel for groups
    deepen     128 -> 256, 3x3          can be pruned and is large enough
    mix        256 -> 256, 1x1          can be pruned and is large enough
    hidden     256 -> 256, linear       can be pruned and is large enough
    head       256 -> 10, linear        can be pruned; ten outputs are too few to gain
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

SEED = 24
EPOCHS = 12
BATCH = 128
PEAK_LEARNING_RATE = 2e-3

Array = npt.NDArray[np.float32]
Predict = Callable[..., tuple[npt.NDArray[np.generic], ...]]


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The trained network in evaluation mode, and one batch of example digits (8, 1, 8, 8)."""
    train_images, train_labels, test_images, _ = split()
    network = train(train_images, train_labels, epochs=EPOCHS)
    return network, (torch.from_numpy(test_images[:8]),)


def evaluate(predict: Predict) -> dict[str, float]:
    """Share of held-out digits read correctly; `predict` maps (450, 1, 8, 8) images to logits."""
    _, _, images, labels = split()
    logits = predict(images)[0]
    return {"accuracy": float((logits.argmax(axis=1) == labels).mean())}


def calibration() -> Iterator[Array]:
    """Batches (64, 1, 8, 8) of digits that the training saw, for `--calibrate`; no labels."""
    images = split()[0]
    for start in range(0, len(images), 64):
        yield images[start : start + 64]


def split() -> tuple[Array, npt.NDArray[np.int64], Array, npt.NDArray[np.int64]]:
    """Images (n, 1, 8, 8) in 0..1 and labels: 1347 to train on, 450 held out; always the same."""
    images, labels = load_digits(return_X_y=True)
    shaped = (images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(
        shaped, labels.astype(np.int64), test_size=450, random_state=SEED, stratify=labels
    )
    return train_x, train_y, test_x, test_y


def build() -> nn.Module:
    """The network, untrained: images (n, 1, 8, 8) in, logits (n, 10) out."""
    return nn.Sequential(
        OrderedDict(
            stem=block(1, 64, 3),
            halve=nn.MaxPool2d(2),
            widen=block(64, 128, 3),
            grouped=block(128, 128, 3, groups=4),
            quarter=nn.MaxPool2d(2),
            deepen=block(128, 256, 3),
            mix=block(256, 256, 1),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            hidden=nn.Linear(256, 256),
            activation=nn.ReLU(),
            head=nn.Linear(256, 10),
        )
    )


def block(inputs: int, outputs: int, kernel: int, *, groups: int = 1) -> nn.Module:
    """Convolution that keeps the image size, batch normalisation, ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs), relu=nn.ReLU()))


def train(images: Array, labels: npt.NDArray[np.int64], *, epochs: int) -> nn.Module:
    """Train from SEED; the same data give the same weights, and torch's own seed is untouched."""
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(SEED)
        network = build()
        steps = epochs * -(-len(x) // BATCH)
        optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK_LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, steps)
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(x)), BATCH):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(network(x[batch]), y[batch])
                torch.autograd.backward(loss)
                optimizer.step()
                schedule.step()
    return network.eval()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread sums in one order, so the weights do not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
